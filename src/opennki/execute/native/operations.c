/* Single operations of elementwise programs: over a row of a chunk, over all of them, or over the values that the rows of a block have. */
#include <string.h>
#include "run.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

static int size(const chunk *c) { return c->m * c->l; }

/* Lanes of a slot as a vector, for an operation over the elements of a row, or over rows. */
static const float *lanes(const run *r, const op *o, const chunk *c, int slot, int spare) {
    const float *p = nki_lanes_at(r, c, slot);
    if (!r->is_row[slot] || o->uniform) return p;
    float *d = r->spare + spare * NKI_CHUNK, x = *p;
    for (int i = 0, n = size(c); i < n; i++) d[i] = x;
    return d;
}

/* Short runs of bytes from rows to rows. */
static void rows_of_bytes(char *d, int64_t dm, const char *s, int64_t sm, int m, size_t bytes) {
#define ROWS(n)                                                    \
    case n:                                                        \
        for (int i = 0; i < m; i++) memcpy(d + i * dm, s + i * sm, n); \
        return
    switch (bytes) {
        ROWS(4);
        ROWS(8);
        ROWS(16);
        ROWS(32);
        ROWS(64);
    }
#undef ROWS
    for (int i = 0; i < m; i++) memcpy(d + i * dm, s + i * sm, bytes);
}

/* ---- memory ------------------------------------------------------------------------------------------------------- */
static void load_rows(const run *r, const op *o, const chunk *c) { /* one element of each row */
    const nki_tile *t = &r->k->tiles[o->tile];
    const nki_type *type = &nki_types[t->dtype];
    (o->code == NKI_LOAD_RAW ? type->load_raw : type->load)(r->slot[o->d], c->tile[o->tile], nki_to_next_row(r, t->stride), c->m);
}

static void load(const run *r, const op *o, const chunk *c) {
    const nki_tile *t = &r->k->tiles[o->tile];
    const nki_type *type = &nki_types[t->dtype];
    const nki_loader f = o->code == NKI_LOAD_RAW ? type->load_raw : type->load;
    const char *s = nki_tile_at(r, c, o->tile);
    float *d = nki_lanes_at(r, c, o->d);
    if (nki_contiguous(r, t, c->m, c->l)) {
        f(d, s, type->size, c->m * c->l);
        return;
    }
    const int64_t sm = nki_along(t->stride, r->dim_m), sl = nki_along(t->stride, r->dim_l);
    if (c->l == 1)
        f(d, s, sm, c->m);
    else if (sl == 4 && (t->dtype == NKI_F32 || (type->size == 4 && o->code == NKI_LOAD_RAW)))
        rows_of_bytes((char *)d, c->l * 4, s, sm, c->m, (size_t)c->l * 4);
    else
        for (int i = 0; i < c->m; i++) f(d + i * c->l, s + i * sm, sl, c->l);
}

#if defined(__x86_64__)
/* `lines` lines past the caches. `n` and `simple`, which is that `next` are linear and none is wider than a line, are known to the compiler: the
 * CPU sees over what it does here to what it can compute next. */
static inline __attribute__((always_inline)) void lines_out(char *d, const char *s, int64_t lines, int n, int simple, nki_asked *next) {
    nki_asked a[MOST_FAR];
    for (int i = 0; i < n; i++) a[i] = next[i], a[i].linear |= simple;
    for (; lines > 0; lines--, d += 64, s += 64) {
        for (int i = 0; i < n; a[i].at += a[i].bytes, i++) nki_ask_for(a + i, simple ? 1 : a[i].bytes);
#if defined(__AVX512F__)
        _mm512_stream_si512((void *)d, _mm512_loadu_si512(s));
#else
        for (int i = 0; i < 64; i += 16) _mm_stream_si128((__m128i *)(void *)(d + i), _mm_loadu_si128((const __m128i *)(const void *)(s + i)));
#endif
    }
    for (int i = 0; i < n; i++) next[i].at = a[i].at;
}
#endif

/* Past the caches, with lines of what comes next asked for by the way: memory reads while it writes, which takes it less than one after the
 * other. The bytes of `next` are those for each line that goes out. */
static void stream(char *d, const char *s, int64_t bytes, int n, nki_asked *next) {
#if defined(__x86_64__)
    const int64_t head = -(intptr_t)d & 63;
    if (bytes < LEAST_STREAM || head > bytes) {
        memcpy(d, s, (size_t)bytes);
        return;
    }
    memcpy(d, s, (size_t)head);
    d += head, s += head, bytes -= head;
    int simple = 1;
    for (int i = 0; i < n; i++) simple &= next[i].linear && next[i].bytes <= 64;
    switch (simple ? n : MOST_FAR + 1) {
    case 0: lines_out(d, s, bytes / 64, 0, 1, next); break;
    case 1: lines_out(d, s, bytes / 64, 1, 1, next); break;
    case 2: lines_out(d, s, bytes / 64, 2, 1, next); break;
    default: lines_out(d, s, bytes / 64, n, 0, next);
    }
    d += bytes & -64, s += bytes & -64, bytes &= 63;
#else
    (void)n, (void)next;
#endif
    memcpy(d, s, (size_t)bytes);
}
void nki_stream_end(void) {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

nki_asked nki_next(const run *r, const op *o, const chunk *c) {
    const nki_tile *t = &r->k->tiles[o->tile];
    const int64_t size = nki_types[t->dtype].size, to_next = nki_to_next_row(r, t->stride);
    if (!nki_contiguous(r, t, c->m, c->l)) return (nki_asked){NULL, 0, 0};
    const int linear = r->total > LONG_ROW || to_next == r->total * size;
    return (nki_asked){nki_tile_at(r, c, o->tile) + (linear ? 0 : r->rows * to_next), (int64_t)c->m * c->l * size, linear};
}

/* Elements first .. first + n of a row that a function makes. */
static const char *lanes_from(const run *r, const chunk *c, int slot, int first) {
    return (const char *)nki_lanes_at(r, c, slot) + (r->is_row[slot] ? 0 : first * (r->is_narrow[slot] ? 2 : 4));
}
static nki_narrow_fn narrow_form(const run *r, const op *o) {
    const int b = r->is_row[o->b] ? 2 : r->is_narrow[o->b];
    return nki_narrows[o->fn].form[(int)r->is_narrow[o->d]][(int)r->is_narrow[o->a]][b];
}
static void make_some(const run *r, const op *o, const chunk *c, void *d, int first, int n) {
    const void *a = lanes_from(r, c, o->a, first), *b = o->b < 0 ? NULL : lanes_from(r, c, o->b, first);
    const nki_two *two = &nki_functions2[o->fn];
    if (!b)
        nki_functions1[o->fn].v(d, a, n);
    else if (r->is_narrow[o->a] | r->is_narrow[o->b] | r->is_narrow[o->d])
        narrow_form(r, o)(d, a, b, n);
    else
        (r->is_row[o->b] ? two->vs : r->is_row[o->a] ? two->sv : two->vv)(d, a, b, n);
}

/* In pieces: while memory is busy with what one of them stores, the CPU is with the next. */
enum { STREAM_PIECE = 256 };
static void store_stream(const run *r, const op *o, const chunk *c) {
    const int dtype = r->k->tiles[o->tile].dtype, n = size(c);
    const nki_type *type = &nki_types[dtype];
    const int converts = !r->is_narrow[o->a] && (o->code == NKI_STORE ? dtype != NKI_F32 : type->size != 4);
    const float *a = o->from ? NULL : lanes(r, o, c, o->a, 0);
    float *made = r->spare + 2 * NKI_CHUNK;
    char *d = nki_tile_at(r, c, o->tile), *converted = (char *)(r->spare + NKI_CHUNK);
    nki_asked next[MOST_FAR];
    int asked = 0;
    for (int i = 0; r->asker == o && i < r->far; i++) {
        next[asked] = nki_next(r, r->ops + r->next[i], c);
        if (next[asked].at) next[asked].bytes = 64 * next[asked].bytes / ((int64_t)n * type->size), asked++;
    }
    int end = (int)((-(intptr_t)d & 63) / type->size); /* of the first piece: the next ones are whole lines */
    const int piece = o->from || converts ? STREAM_PIECE : n;
    nki_ask(d + (int64_t)n * type->size); /* a line that is stored in part has to be there */
    for (int i = 0; i < n; i = end, end += piece) {
        if (piece == n || end > n) end = n;
        const char *s = a ? (const char *)a + i * (r->is_narrow[o->a] ? 2 : 4) : (const char *)made;
        if (!a) make_some(r, o->from, c, made, i, end - i);
        if (converts) {
            (o->code == NKI_STORE_RAW ? type->store_raw : type->store)(converted, type->size, (const float *)(const void *)s, end - i);
            s = converted;
        }
        stream(d + i * type->size, s, (int64_t)(end - i) * type->size, asked, next);
    }
}
int nki_may_ask(const run *r, const op *o) {
#if defined(__x86_64__)
    return o->go == store_stream && r->total * nki_types[r->k->tiles[o->tile].dtype].size >= LEAST_STREAM;
#else
    return (void)r, (void)o, 0;
#endif
}

static void store_as_it_is(const run *r, const op *o, const chunk *c) {
    memcpy(nki_tile_at(r, c, o->tile), nki_lanes_at(r, c, o->a), (size_t)size(c) * sizeof(uint16_t));
}

/* m runs of l elements, where the lanes of `mask` are not 0, if there is one. */
static void put(const run *r, const op *o, char *d, int64_t sm, int64_t sl, const float *a, int m, int l, const float *mask) {
    const nki_tile *t = &r->k->tiles[o->tile];
    const nki_type *type = &nki_types[t->dtype];
    const nki_storer f = o->code == NKI_STORE_RAW ? type->store_raw : type->store;
    const int as_it_is = type->size == 4 && (t->dtype == NKI_F32 || o->code == NKI_STORE_RAW);
    if (d == (const char *)a) return; /* read where it is, and it stays there */
    if (!mask && m > 1 && sl == 4 && as_it_is) {
        rows_of_bytes(d, sm, (const char *)a, l * 4, m, (size_t)l * 4);
        return;
    }
    if (!mask) {
        for (int i = 0; i < m; i++) f(d + i * sm, sl, a + i * l, l);
        return;
    }
    const char *s = (const char *)a;
    if (!as_it_is) {
        f((char *)(r->spare + NKI_CHUNK), type->size, a, m * l);
        s = (const char *)(r->spare + NKI_CHUNK);
    }
    for (int i = 0; i < m; i++) nki_put_some(d + i * sm, sl, type->size, s + i * l * type->size, mask + i * l, l);
}
static void store_rows(const run *r, const op *o, const chunk *c) { /* one element of each row */
    put(r, o, c->tile[o->tile], 0, nki_to_next_row(r, r->k->tiles[o->tile].stride), r->slot[o->a], 1, c->m, o->c < 0 ? NULL : r->slot[o->c]);
}
static void store(const run *r, const op *o, const chunk *c) {
    const nki_tile *t = &r->k->tiles[o->tile];
    const float *mask = o->c < 0 ? NULL : nki_lanes_at(r, c, o->c);
    if (mask && r->is_row[o->c]) {
        if (*mask == 0.0f) return;
        mask = NULL;
    }
    int64_t sm = nki_along(t->stride, r->dim_m), sl = nki_along(t->stride, r->dim_l);
    int m = c->m, l = c->l;
    if (nki_contiguous(r, t, m, l))
        m = 1, l = size(c), sl = nki_types[t->dtype].size;
    else if (l == 1)
        m = 1, l = size(c), sl = sm;
    put(r, o, nki_tile_at(r, c, o->tile), sm, sl, lanes(r, o, c, o->a, 0), m, l, mask);
}

/* ---- predicates and indices ----------------------------------------------------------------------------------------- */
static int64_t ceil_div(int64_t a, int64_t b) { return a > 0 ? (a - 1) / b + 1 : -(-a / b); } /* b > 0 */

/* A predicate of value v at the first of n elements, with `step` from each to the next, holds in *yes .. *no. */
static void holds(int64_t v, int64_t step, int n, int64_t *yes, int64_t *no) {
    *yes = 0, *no = n;
    if (step == 0 || (v >= 0) == (v + (n - 1) * step >= 0))
        *no = v >= 0 ? n : 0;
    else if (step > 0)
        *yes = ceil_div(-v, step);
    else
        *no = v / -step + 1;
}

/* Steps from row to row of a predicate or index, and along the dimensions of a chunk; of an operation over rows, the rows are such. */
typedef struct {
    int64_t base, m, l;
} walk;
static walk walk_of(const run *r, const op *o, const chunk *c, int64_t base, const int64_t *stride) {
    const int64_t row = nki_to_next_row(r, stride);
    if (o->uniform) return (walk){base, row, 0};
    return (walk){base + c->row * row, nki_along(stride, r->dim_m), nki_along(stride, r->dim_l)};
}

static void predicate(const run *r, const op *o, const chunk *c) {
    const walk w = walk_of(r, o, c, c->pred[o->tile], r->k->preds[o->tile].stride);
    float *d = nki_lanes_at(r, c, o->d);
    for (int i = 0; i < c->m; i++, d += c->l) {
        int64_t yes, no;
        holds(w.base + i * w.m, w.l, c->l, &yes, &no);
        int j = 0;
        for (; j < yes; j++) d[j] = 0.0f;
        for (; j < no; j++) d[j] = 1.0f;
        for (; j < c->l; j++) d[j] = 0.0f;
    }
}

static void index_values(const run *r, const op *o, const chunk *c) {
    const walk w = walk_of(r, o, c, c->index[o->tile], r->k->indices[o->tile].stride);
    float *d = nki_lanes_at(r, c, o->d);
    for (int i = 0; i < c->m; i++, d += c->l) {
        int32_t v = (int32_t)(w.base + i * w.m), s = (int32_t)w.l;
        nki_i32a *q = (nki_i32a *)d;
        if (o->sign) /* raw */
            for (int j = 0; j < c->l; j++) q[j] = (int32_t)((uint32_t)v + (uint32_t)j * (uint32_t)s);
        else
            for (int j = 0; j < c->l; j++) d[j] = (float)(int32_t)((uint32_t)v + (uint32_t)j * (uint32_t)s);
    }
}

/* ---- functions ------------------------------------------------------------------------------------------------------ */
#define AT(x) nki_lanes_at(r, c, o->x)
static float *next_row(float *p, int64_t pitch) { return (float *)(void *)((char *)p + pitch); }
static void unary(const run *r, const op *o, const chunk *c) { nki_functions1[o->fn].v(AT(d), AT(a), size(c)); }
static void binary_vv(const run *r, const op *o, const chunk *c) { nki_functions2[o->fn].vv(AT(d), AT(a), AT(b), size(c)); }
static void binary_vs(const run *r, const op *o, const chunk *c) {
    const nki_fn2 f = nki_functions2[o->fn].vs;
    float *d = AT(d), *a = AT(a), *b = AT(b);
    for (int i = c->rows, n = size(c); i > 0; i--, d = next_row(d, r->pitch[o->d]), a = next_row(a, r->pitch[o->a]), b++) f(d, a, b, n);
}
static void binary_sv(const run *r, const op *o, const chunk *c) {
    const nki_fn2 f = nki_functions2[o->fn].sv;
    float *d = AT(d), *a = AT(a), *b = AT(b);
    for (int i = c->rows, n = size(c); i > 0; i--, d = next_row(d, r->pitch[o->d]), a++, b = next_row(b, r->pitch[o->b])) f(d, a, b, n);
}
static void binary_narrow(const run *r, const op *o, const chunk *c) {
    const nki_narrow_fn f = narrow_form(r, o);
    const int64_t to_next = r->is_row[o->b] ? (int64_t)sizeof(float) : r->pitch[o->b];
    float *d = AT(d), *x = AT(a), *y = AT(b);
    for (int i = c->rows, n = size(c); i > 0; i--, d = next_row(d, r->pitch[o->d]), x = next_row(x, r->pitch[o->a]), y = next_row(y, to_next)) f(d, x, y, n);
}
/* A row alone in its block: vectors of one element take as long as those of sixteen. */
static void unary_one(const run *r, const op *o, const chunk *c) {
    (void)c;
    *r->slot[o->d] = nki_functions1[o->fn].one(*r->slot[o->a]);
}
static void binary_one(const run *r, const op *o, const chunk *c) {
    (void)c;
    *r->slot[o->d] = nki_functions2[o->fn].one(*r->slot[o->a], *r->slot[o->b]);
}
static void on_bits(const run *r, const op *o, const chunk *c) {
    const float *a = lanes(r, o, c, o->a, 0), *b = o->b >= 0 ? lanes(r, o, c, o->b, 1) : a;
    nki_bits_run(o->fn, o->width, o->sign, (int32_t *)AT(d), (const int32_t *)a, (const int32_t *)b, size(c));
}
static void exact(const run *r, const op *o, const chunk *c) {
    nki_exact_run(o->fn, o->dtype, o->sign, AT(d), lanes(r, o, c, o->a, 0), lanes(r, o, c, o->b, 1), size(c));
}
static void choose(const run *r, const op *o, const chunk *c) {
    const int n = size(c);
    const float *mask = AT(c);
    if (!r->is_row[o->c] || o->uniform) {
        nki_choose(AT(d), lanes(r, o, c, o->a, 0), lanes(r, o, c, o->b, 1), mask, n);
        return;
    }
    const int from = *mask != 0.0f ? o->a : o->b; /* the same for the whole row */
    const float *s = nki_lanes_at(r, c, from);
    float *d = AT(d);
    if (r->is_row[from])
        for (int i = 0; i < n; i++) ((nki_i32a *)d)[i] = *(const nki_i32a *)s;
    else if (d != s)
        memcpy(d, s, (size_t)n * sizeof *d);
}
/* A selection by a predicate that nothing else reads: a part of the row is that of the one, the rest of the other. */
void nki_holds(const run *r, const op *o, const chunk *c, int64_t *yes, int64_t *no) {
    const walk w = walk_of(r, o, c, c->pred[o->tile], r->k->preds[o->tile].stride);
    holds(w.base, w.l, c->l, yes, no);
}
void nki_choose_parts(const run *r, const op *o, const chunk *c) {
    int64_t yes, no;
    nki_holds(r, o, c, &yes, &no);
    const int64_t end[4] = {0, yes < no ? yes : no, no, c->l};
    for (int part = 0; part < 3; part++) {
        const int from = part == 1 ? o->a : o->b;
        const nki_i32a *s = (const nki_i32a *)nki_lanes_at(r, c, from);
        nki_i32a *d = (nki_i32a *)AT(d);
        if (r->is_row[from])
            for (int64_t i = end[part], x = *s; i < end[part + 1]; i++) d[i] = (int32_t)x;
        else if (s != d && end[part] < end[part + 1])
            memmove(d + end[part], s + end[part], (size_t)(end[part + 1] - end[part]) * 4);
    }
}
static op *only_predicate(const run *r, const op *o, const op *end) {
    op *p = &r->ops[r->used[o->c][0]];
    if (r->is_row[o->c] || p->code != NKI_PRED || r->m != 1) return NULL;
    for (const op *q = p + 1; q < end; q++)
        if (q != o && (q->a == o->c || q->b == o->c || q->c == o->c)) return NULL;
    return p;
}
static void fold_rows(const run *r, const op *o, const chunk *c) { /* of one element each */
    for (int i = 0; i < c->m; i++) r->slot[o->d][i] = nki_fold_short(o->fn, r->slot[o->a] + i, 1);
}
static void fold_chunk(const run *r, const op *o, const chunk *c) { nki_fold_add(o->fold, o->fn, lanes(r, o, c, o->a, 0), size(c), c->position); }
static void fold_whole(const run *r, const op *o, const chunk *c) {
    nki_fold_whole(o->fn, AT(d), lanes(r, o, c, o->a, 0), r->pitch[o->a], c->rows, size(c));
}
static void tree_rows(const run *r, const op *o, const chunk *c) { /* of one element each */
    chunk one = *c;
    one.m = one.l = 1;
    for (; one.row < c->m; one.row++, one.part++) nki_trees(r, o, &one);
}
static void rounded(const run *r, const op *o, const chunk *c) {
    const nki_type *type = &nki_types[o->dtype];
    char *narrow = (char *)(r->spare + 3 * NKI_CHUNK);
    type->store(narrow, type->size, lanes(r, o, c, o->a, 0), size(c));
    type->load(AT(d), narrow, type->size, size(c));
}

/* Whether the rows of a chunk are like one row to an operation: all it takes and gives lies side by side, or is the same for all rows. */
static int side_by_side(const run *r, const op *o) {
    const int32_t n = r->m * r->l, slots[4] = {o->a, o->b, o->c, o->d};
    if (r->chunk_rows == 1 || r->l == 1) return 0;
    for (int i = 0; i < 4; i++) {
        const int32_t s = slots[i];
        if (s >= 0 && (r->is_row[s] ? r->is_row[s] != ONE : r->pitch[s] != n * (r->is_narrow[s] ? 2 : 4))) return 0;
    }
    if (!nki_loads(o) && !nki_stores(o)) return o->code == NKI_FUNC || o->code == NKI_SELECT || o->code == NKI_ROUND || o->code == NKI_EXACT;
    const nki_tile *t = &r->k->tiles[o->tile];
    return nki_contiguous(r, t, r->m, r->l) && nki_to_next_row(r, t->stride) == n * nki_types[t->dtype].size;
}

void nki_choose_step(const run *r, op *o, const op *end) {
    o->go = NULL;
    switch (o->code) {
    case NKI_LOAD:
    case NKI_LOAD_RAW:
        if (!o->in_place) o->go = o->uniform ? load_rows : load;
        break;
    case NKI_STORE:
    case NKI_STORE_RAW:
        if (o->in_place) break;
        o->go = o->uniform ? store_rows : store;
        if (o->uniform || o->c >= 0 || !nki_contiguous(r, &r->k->tiles[o->tile], r->m, r->l)) break;
        if (o->far_away)
            o->go = store_stream;
        else if (r->is_narrow[o->a])
            o->go = store_as_it_is;
        break;
    case NKI_FUNC:
        if (o->width)
            o->go = on_bits;
        else if (o->uniform && r->rows == 1)
            o->go = o->b < 0 ? unary_one : binary_one;
        else if (o->b < 0)
            o->go = unary;
        else if (o->uniform)
            o->go = binary_vv;
        else
            o->go = r->is_narrow[o->a] | r->is_narrow[o->b] | r->is_narrow[o->d] ? binary_narrow : r->is_row[o->b] ? binary_vs : r->is_row[o->a] ? binary_sv : binary_vv;
        break;
    case NKI_SELECT: {
        op *p = o->uniform ? NULL : only_predicate(r, o, end);
        o->go = p ? nki_choose_parts : choose;
        if (p) p->go = NULL, o->tile = p->tile;
        break;
    }
    case NKI_PRED: o->go = predicate; break;
    case NKI_INDEX: o->go = index_values; break;
    case NKI_FOLD: o->go = o->uniform ? fold_rows : r->whole ? fold_whole : fold_chunk; break;
    case NKI_TREE: o->go = o->uniform ? tree_rows : nki_trees; break;
    case NKI_ROUND: o->go = rounded; break;
    case NKI_EXACT: o->go = exact; break;
    }
    o->joined = o->go && o->go != nki_choose_parts && side_by_side(r, o);
    o->many = o->go == binary_vs || o->go == binary_sv || o->go == binary_narrow || (o->go == fold_whole && !r->is_row[o->a]);
}

static int is_function(const op *o) {
    return o->go == unary || o->go == binary_vv || o->go == binary_vs || o->go == binary_sv || o->go == binary_narrow;
}
void nki_feed_streams(const run *r, const nki_phase *p) {
    for (op *first = r->ops + p->first, *o = first; o < first + p->count; o++) {
        if (o->go != store_stream || r->is_row[o->a] || r->used[o->a][1] != o - r->ops) continue;
        op *from = o - 1;
        while (from >= first && (from->uniform || !from->go)) from--;
        if (from < first || from->d != o->a || from->place != HERE || !is_function(from)) continue;
        o->joined &= side_by_side(r, from);
        o->from = from, from->go = NULL;
    }
}
