/* Single operations of elementwise programs, each over a chunk. A row slot has a chunk of one element. */
#include <string.h>
#include "run.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* Lanes of a slot as a vector. */
static const float *lanes(const run *r, int slot, int n, int spare) {
    const float *p = r->slot[slot];
    if (!r->is_row[slot]) return p;
    float *d = r->spare + spare * NKI_CHUNK, x = *p;
    for (int i = 0; i < n; i++) d[i] = x;
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
static void load(const run *r, const op *o, const chunk *c) {
    const nki_tile *t = &r->k->tiles[o->tile];
    const nki_type *type = &nki_types[t->dtype];
    const nki_loader f = o->code == NKI_LOAD_RAW ? type->load_raw : type->load;
    const char *s = c->tile[o->tile];
    float *d = r->slot[o->d];
    if (o->uniform && t->dtype == NKI_F32) {
        *d = *(const nki_f32a *)s;
        return;
    }
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

void nki_stream(char *d, const char *s, int64_t bytes) {
#if defined(__x86_64__)
    const int64_t head = -(intptr_t)d & 63;
    if (bytes < 256 || head > bytes) {
        memcpy(d, s, (size_t)bytes);
        return;
    }
    memcpy(d, s, (size_t)head);
    d += head, s += head, bytes -= head;
    for (; bytes >= 64; bytes -= 64, d += 64, s += 64) {
#if defined(__AVX512F__)
        _mm512_stream_si512((void *)d, _mm512_loadu_si512(s));
#else
        for (int i = 0; i < 64; i += 16) _mm_stream_si128((__m128i *)(void *)(d + i), _mm_loadu_si128((const __m128i *)(const void *)(s + i)));
#endif
    }
#endif
    memcpy(d, s, (size_t)bytes);
}
void nki_stream_end(void) {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

static void store_stream(const run *r, const op *o, const chunk *c) {
    const nki_type *type = &nki_types[r->k->tiles[o->tile].dtype];
    const int n = c->m * c->l;
    const float *a = lanes(r, o->a, n, 0);
    if (!r->is_narrow[o->a] && (o->code == NKI_STORE ? r->k->tiles[o->tile].dtype != NKI_F32 : type->size != 4)) {
        (o->code == NKI_STORE_RAW ? type->store_raw : type->store)((char *)(r->spare + NKI_CHUNK), type->size, a, n);
        a = r->spare + NKI_CHUNK;
    }
    nki_stream(c->tile[o->tile], (const char *)a, (int64_t)n * type->size);
}

static void store_as_it_is(const run *r, const op *o, const chunk *c) {
    memcpy(c->tile[o->tile], r->slot[o->a], (size_t)(c->m * c->l) * sizeof(uint16_t));
}

static void store(const run *r, const op *o, const chunk *c) {
    const nki_tile *t = &r->k->tiles[o->tile];
    const nki_type *type = &nki_types[t->dtype];
    const nki_storer f = o->code == NKI_STORE_RAW ? type->store_raw : type->store;
    const int n = c->m * c->l;
    char *d = c->tile[o->tile];
    if (o->c >= 0 && r->is_row[o->c] && *r->slot[o->c] == 0.0f) return;
    if (o->uniform && type->size == 4 && (t->dtype == NKI_F32 || o->code == NKI_STORE_RAW)) {
        *(nki_f32a *)d = *r->slot[o->a];
        return;
    }
    const int masked = o->c >= 0 && !r->is_row[o->c];
    const float *a = lanes(r, o->a, n, 0);
    int64_t sm = nki_along(t->stride, r->dim_m), sl = nki_along(t->stride, r->dim_l);
    int m = c->m, l = c->l;
    if (nki_contiguous(r, t, m, l))
        m = 1, l = n, sl = type->size;
    else if (l == 1)
        m = 1, l = n, sl = sm;
    if (!masked && m > 1 && sl == 4 && (t->dtype == NKI_F32 || (type->size == 4 && o->code == NKI_STORE_RAW))) {
        rows_of_bytes(d, sm, (const char *)a, l * 4, m, (size_t)l * 4);
        return;
    }
    if (!masked) {
        for (int i = 0; i < m; i++) f(d + i * sm, sl, a + i * l, l);
        return;
    }
    const char *s = (const char *)a;
    if (type->size != 4 || (t->dtype != NKI_F32 && o->code != NKI_STORE_RAW)) {
        f((char *)(r->spare + NKI_CHUNK), type->size, a, n);
        s = (const char *)(r->spare + NKI_CHUNK);
    }
    for (int i = 0; i < m; i++) nki_put_some(d + i * sm, sl, type->size, s + i * l * type->size, r->slot[o->c] + i * l, l);
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

static void predicate(const run *r, const op *o, const chunk *c) {
    const int64_t *stride = r->k->preds[o->tile].stride;
    const int64_t sm = nki_along(stride, r->dim_m), sl = nki_along(stride, r->dim_l);
    float *d = r->slot[o->d];
    for (int i = 0; i < c->m; i++, d += c->l) {
        int64_t yes, no;
        holds(c->pred[o->tile] + i * sm, sl, c->l, &yes, &no);
        int j = 0;
        for (; j < yes; j++) d[j] = 0.0f;
        for (; j < no; j++) d[j] = 1.0f;
        for (; j < c->l; j++) d[j] = 0.0f;
    }
}

static void index_values(const run *r, const op *o, const chunk *c) {
    const int64_t *stride = r->k->indices[o->tile].stride;
    float *d = r->slot[o->d];
    for (int i = 0; i < c->m; i++, d += c->l) {
        int32_t v = (int32_t)(c->index[o->tile] + i * nki_along(stride, r->dim_m)), s = (int32_t)nki_along(stride, r->dim_l);
        nki_i32a *q = (nki_i32a *)d;
        if (o->sign) /* raw */
            for (int j = 0; j < c->l; j++) q[j] = (int32_t)((uint32_t)v + (uint32_t)j * (uint32_t)s);
        else
            for (int j = 0; j < c->l; j++) d[j] = (float)(int32_t)((uint32_t)v + (uint32_t)j * (uint32_t)s);
    }
}

/* ---- functions ------------------------------------------------------------------------------------------------------ */
static int size(const chunk *c) { return c->m * c->l; }
static void unary(const run *r, const op *o, const chunk *c) { nki_functions1[o->fn].v(r->slot[o->d], r->slot[o->a], size(c)); }
static void binary_vv(const run *r, const op *o, const chunk *c) {
    nki_functions2[o->fn].vv(r->slot[o->d], r->slot[o->a], r->slot[o->b], size(c));
}
static void binary_vs(const run *r, const op *o, const chunk *c) {
    nki_functions2[o->fn].vs(r->slot[o->d], r->slot[o->a], r->slot[o->b], size(c));
}
static void binary_sv(const run *r, const op *o, const chunk *c) {
    nki_functions2[o->fn].sv(r->slot[o->d], r->slot[o->a], r->slot[o->b], size(c));
}
static void binary_narrow(const run *r, const op *o, const chunk *c) {
    const int b = r->is_row[o->b] ? 2 : r->is_narrow[o->b];
    nki_narrows[o->fn].form[(int)r->is_narrow[o->d]][(int)r->is_narrow[o->a]][b](r->slot[o->d], r->slot[o->a], r->slot[o->b], size(c));
}
static void unary_row(const run *r, const op *o, const chunk *c) {
    (void)c;
    *r->slot[o->d] = nki_functions1[o->fn].one(*r->slot[o->a]);
}
static void binary_row(const run *r, const op *o, const chunk *c) {
    (void)c;
    *r->slot[o->d] = nki_functions2[o->fn].one(*r->slot[o->a], *r->slot[o->b]);
}
static void on_bits(const run *r, const op *o, const chunk *c) {
    const float *a = lanes(r, o->a, size(c), 0), *b = o->b >= 0 ? lanes(r, o->b, size(c), 1) : a;
    nki_bits_run(o->fn, o->width, o->sign, (int32_t *)r->slot[o->d], (const int32_t *)a, (const int32_t *)b, size(c));
}
static void exact(const run *r, const op *o, const chunk *c) {
    nki_exact_run(o->fn, o->dtype, o->sign, r->slot[o->d], lanes(r, o->a, size(c), 0), lanes(r, o->b, size(c), 1), size(c));
}
static void choose(const run *r, const op *o, const chunk *c) {
    const int n = size(c);
    if (!r->is_row[o->c]) {
        nki_choose(r->slot[o->d], lanes(r, o->a, n, 0), lanes(r, o->b, n, 1), r->slot[o->c], n);
        return;
    }
    const int from = *r->slot[o->c] != 0.0f ? o->a : o->b; /* the same for the whole row */
    float *d = r->slot[o->d];
    if (r->is_row[from])
        for (int i = 0; i < n; i++) ((nki_i32a *)d)[i] = *(const nki_i32a *)r->slot[from];
    else if (d != r->slot[from])
        memcpy(d, r->slot[from], (size_t)n * sizeof *d);
}
/* A selection by a predicate that nothing else reads: a part of the row is that of the one, the rest of the other. */
static void choose_parts(const run *r, const op *o, const chunk *c) {
    int64_t yes, no;
    holds(c->pred[o->tile], nki_along(r->k->preds[o->tile].stride, r->dim_l), c->l, &yes, &no);
    const int64_t end[4] = {0, yes < no ? yes : no, no, c->l};
    for (int part = 0; part < 3; part++) {
        const int from = part == 1 ? o->a : o->b;
        const nki_i32a *s = (const nki_i32a *)r->slot[from];
        nki_i32a *d = (nki_i32a *)r->slot[o->d];
        if (r->is_row[from])
            for (int64_t i = end[part], x = *s; i < end[part + 1]; i++) d[i] = (int32_t)x;
        else if (s != d && end[part] < end[part + 1])
            memmove(d + end[part], s + end[part], (size_t)(end[part + 1] - end[part]) * 4);
    }
}
static op *only_predicate(const run *r, const op *o) {
    op *p = &r->ops[r->used[o->c][0]];
    if (r->is_row[o->c] || p->code != NKI_PRED || r->m != 1) return NULL;
    for (const op *q = p + 1; q < r->ops + r->k->n_uops; q++)
        if (q != o && (q->a == o->c || q->b == o->c || q->c == o->c)) return NULL;
    return p;
}
static void fold(const run *r, const op *o, const chunk *c) {
    const int n = size(c);
    if (o->uniform || (n == r->total && n <= NKI_LANES))
        *r->slot[o->d] = nki_fold_short(o->fn, lanes(r, o->a, n, 0), n);
    else
        nki_fold_add(o->fold, o->fn, lanes(r, o->a, n, 0), n, c->position);
}
static void rounded(const run *r, const op *o, const chunk *c) {
    const nki_type *type = &nki_types[o->dtype];
    char *narrow = (char *)(r->spare + 3 * NKI_CHUNK);
    type->store(narrow, type->size, lanes(r, o->a, size(c), 0), size(c));
    type->load(r->slot[o->d], narrow, type->size, size(c));
}

void nki_choose_step(const run *r, op *o) {
    o->go = NULL;
    switch (o->code) {
    case NKI_LOAD:
    case NKI_LOAD_RAW:
        if (!o->in_place) o->go = load;
        break;
    case NKI_STORE:
    case NKI_STORE_RAW:
        if (o->in_place) break;
        o->go = store;
        if (o->uniform || o->c >= 0 || !nki_contiguous(r, &r->k->tiles[o->tile], r->m, r->l)) break;
        if (o->far_away)
            o->go = store_stream;
        else if (r->is_narrow[o->a])
            o->go = store_as_it_is;
        break;
    case NKI_FUNC:
        if (o->width)
            o->go = on_bits;
        else if (o->uniform)
            o->go = o->b < 0 ? unary_row : binary_row;
        else
            o->go = o->b < 0 ? unary : r->is_narrow[o->a] | r->is_narrow[o->b] | r->is_narrow[o->d] ? binary_narrow : r->is_row[o->b] ? binary_vs : r->is_row[o->a] ? binary_sv : binary_vv;
        break;
    case NKI_SELECT: {
        op *p = only_predicate(r, o);
        o->go = p ? choose_parts : choose;
        if (p) p->go = NULL, o->tile = p->tile;
        break;
    }
    case NKI_PRED: o->go = predicate; break;
    case NKI_INDEX: o->go = index_values; break;
    case NKI_FOLD: o->go = fold; break;
    case NKI_TREE: o->go = nki_trees; break;
    case NKI_ROUND: o->go = rounded; break;
    case NKI_EXACT: o->go = exact; break;
    }
}
