/* Elementwise programs: prepared once per call, then run row by row and chunk by chunk.
 *
 * Preparing gives every value that an operation makes a slot. A slot that has one value per row (constants, loads
 * with stride 0, folds, all of a ROW phase) is computed once per row and is passed to functions as a single number.
 * Other slots are chunk buffers, or point at memory itself: a float32 tile that is contiguous is read where it is,
 * and the operation before a store without a mask writes where the store would.
 */
#include <stdlib.h>
#include <string.h>
#include "inner.h"

typedef struct {
    int32_t code, fn, d, a, b, c; /* d, a, b, c: slots; -1: none */
    int32_t tile;                 /* tile, predicate or index expression */
    int32_t uniform;              /* one value per row */
    int32_t in_place;             /* LOAD, STORE: memory itself is the slot */
    int32_t into;                 /* tile that the operation writes in place, -1: none */
    int32_t dtype, width, sign;
    nki_lanes *fold;
} op;

typedef struct {
    const nki_ew *k;
    op *ops;
    float **slot;      /* where the lanes of each slot are */
    int8_t *is_row;    /* the slot has one value per row */
    int32_t (*used)[2]; /* of each slot: the operation that makes it, and the last one that reads it */
    float *single;     /* storage of row slots */
    float *buffers;    /* chunk buffers, one for each register */
    float *spare;      /* four chunk buffers for operands and conversions */
    nki_lanes *folds;
    int64_t shape[NKI_RANK], total; /* elements of a row */
    int rank, outer, inner, n_slots;
    int m, l, dim_m, dim_l; /* chunk: m times l elements, along two dimensions; -1: none */
} run;

/* The program, addresses of one chunk, its size. */
typedef struct {
    char *const *tile;
    const int64_t *pred, *index;
    int m, l;
    int64_t position; /* of its first element in the row */
} chunk;

int nki_abi(void) { return NKI_ABI; }

/* ---- single operations ------------------------------------------------------------------------------------------ */
static int64_t along(const int64_t *stride, int dim) { return dim < 0 ? 0 : stride[dim]; }

static int contiguous(const run *r, const nki_tile *t, int m, int l) {
    const int64_t size = nki_types[t->dtype].size;
    return (l == 1 || along(t->stride, r->dim_l) == size) && (m == 1 || along(t->stride, r->dim_m) == l * size);
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

static void load(const run *r, const op *o, const chunk *c, float *d) {
    const nki_tile *t = &r->k->tiles[o->tile];
    const nki_type *type = &nki_types[t->dtype];
    const nki_loader f = o->code == NKI_LOAD_RAW ? type->load_raw : type->load;
    const char *s = c->tile[o->tile];
    if (o->uniform && t->dtype == NKI_F32) {
        *d = *(const nki_f32a *)s;
        return;
    }
    if (contiguous(r, t, c->m, c->l)) {
        f(d, s, type->size, c->m * c->l);
        return;
    }
    const int64_t sm = along(t->stride, r->dim_m), sl = along(t->stride, r->dim_l);
    if (c->l == 1)
        f(d, s, sm, c->m);
    else if (sl == 4 && (t->dtype == NKI_F32 || (type->size == 4 && o->code == NKI_LOAD_RAW)))
        rows_of_bytes((char *)d, c->l * 4, s, sm, c->m, (size_t)c->l * 4);
    else
        for (int i = 0; i < c->m; i++) f(d + i * c->l, s + i * sm, sl, c->l);
}

/* Lanes of a slot as a vector. */
static const float *lanes(const run *r, int slot, int n, int spare) {
    const float *p = r->slot[slot];
    if (!r->is_row[slot]) return p;
    float *d = r->spare + spare * NKI_CHUNK, x = *p;
    for (int i = 0; i < n; i++) d[i] = x;
    return d;
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
    int64_t sm = along(t->stride, r->dim_m), sl = along(t->stride, r->dim_l);
    int m = c->m, l = c->l;
    if (contiguous(r, t, m, l))
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

static int64_t ceil_div(int64_t a, int64_t b) { return a > 0 ? (a - 1) / b + 1 : -(-a / b); } /* b > 0 */

static void predicate(const run *r, const op *o, const chunk *c, float *d) {
    const int64_t *stride = r->k->preds[o->tile].stride;
    const int64_t sm = along(stride, r->dim_m), sl = along(stride, r->dim_l);
    for (int i = 0; i < c->m; i++, d += c->l) {
        const int64_t v = c->pred[o->tile] + i * sm;
        int64_t yes = 0, no = c->l; /* holds in yes .. no */
        if (sl == 0 || (v >= 0) == (v + (c->l - 1) * sl >= 0))
            no = v >= 0 ? no : 0;
        else if (sl > 0)
            yes = ceil_div(-v, sl);
        else
            no = v / -sl + 1;
        int j = 0;
        for (; j < yes; j++) d[j] = 0.0f;
        for (; j < no; j++) d[j] = 1.0f;
        for (; j < c->l; j++) d[j] = 0.0f;
    }
}

static void index_values(const run *r, const op *o, const chunk *c, float *d) {
    const int64_t *stride = r->k->indices[o->tile].stride;
    for (int i = 0; i < c->m; i++, d += c->l) {
        int32_t v = (int32_t)(c->index[o->tile] + i * along(stride, r->dim_m)), s = (int32_t)along(stride, r->dim_l);
        nki_i32a *q = (nki_i32a *)d;
        if (o->sign) /* raw */
            for (int j = 0; j < c->l; j++) q[j] = (int32_t)((uint32_t)v + (uint32_t)j * (uint32_t)s);
        else
            for (int j = 0; j < c->l; j++) d[j] = (float)(int32_t)((uint32_t)v + (uint32_t)j * (uint32_t)s);
    }
}

static void function(const run *r, const op *o, float *d, int n) {
    if (o->b == -1) {
        nki_functions1[o->fn].v(d, lanes(r, o->a, n, 0), n);
        return;
    }
    const nki_two *f = &nki_functions2[o->fn];
    const float *a = r->slot[o->a], *b = r->slot[o->b];
    if (r->is_row[o->a] && r->is_row[o->b]) a = lanes(r, o->a, n, 0);
    (r->is_row[o->b] ? f->vs : r->is_row[o->a] ? f->sv : f->vv)(d, a, b, n);
}

/* A chunk of an operation. A row slot has n = 1. */
static void step(const run *r, const op *o, const chunk *c) {
    const int n = c->m * c->l;
    if (o->into >= 0) r->slot[o->d] = (float *)c->tile[o->into];
    float *d = o->d >= 0 ? r->slot[o->d] : NULL;
    switch (o->code) {
    case NKI_LOAD:
    case NKI_LOAD_RAW:
        if (o->in_place)
            r->slot[o->d] = (float *)c->tile[o->tile];
        else
            load(r, o, c, d);
        break;
    case NKI_STORE:
    case NKI_STORE_RAW:
        if (!o->in_place) store(r, o, c);
        break;
    case NKI_CONST: break; /* a slot that was filled before */
    case NKI_FUNC:
        if (o->width) {
            const float *a = lanes(r, o->a, n, 0), *b = o->b >= 0 ? lanes(r, o->b, n, 1) : a;
            nki_bits_run(o->fn, o->width, o->sign, (int32_t *)d, (const int32_t *)a, (const int32_t *)b, n);
        } else if (o->uniform) {
            const float *a = r->slot[o->a];
            *d = o->b < 0 ? nki_functions1[o->fn].one(*a) : nki_functions2[o->fn].one(*a, *r->slot[o->b]);
        } else
            function(r, o, d, n);
        break;
    case NKI_SELECT: nki_choose(d, lanes(r, o->a, n, 0), lanes(r, o->b, n, 1), lanes(r, o->c, n, 2), n); break;
    case NKI_PRED: predicate(r, o, c, d); break;
    case NKI_INDEX: index_values(r, o, c, d); break;
    case NKI_FOLD:
        if (o->uniform || (n == r->total && n <= NKI_LANES))
            *d = nki_fold_short(o->fn, lanes(r, o->a, n, 0), n);
        else
            nki_fold_add(o->fold, o->fn, lanes(r, o->a, n, 0), n, c->position);
        break;
    case NKI_ROUND:
        nki_types[o->dtype].store((char *)(r->spare + 3 * NKI_CHUNK), nki_types[o->dtype].size, lanes(r, o->a, n, 0), n);
        nki_types[o->dtype].load(d, (const char *)(r->spare + 3 * NKI_CHUNK), nki_types[o->dtype].size, n);
        break;
    case NKI_EXACT: nki_exact_run(o->fn, o->dtype, o->sign, d, lanes(r, o->a, n, 0), lanes(r, o->b, n, 1), n); break;
    }
}

/* ---- preparation ------------------------------------------------------------------------------------------------- */
static int flat(const run *r, const int64_t *stride) { /* the same over the whole row */
    for (int i = r->outer; i < r->rank; i++)
        if (stride[i] && r->shape[i] > 1) return 0;
    return 1;
}

static int row_slot(run *r, float value) {
    const int s = r->n_slots++;
    r->slot[s] = r->single + s;
    r->single[s] = value;
    r->is_row[s] = 1;
    return s;
}

/* Lowest and highest byte of a tile. */
static void extent(const run *r, const nki_tile *t, const char *at, const char **low, const char **high) {
    *low = *high = at;
    for (int i = 0; i < r->rank; i++) {
        const int64_t reach = (r->shape[i] - 1) * t->stride[i];
        *(reach < 0 ? low : high) += reach;
    }
    *high += nki_types[t->dtype].size;
}

enum { APART, SAME, MIXED };
static int relation(const run *r, char *const *at, int x, int y) {
    const nki_tile *a = &r->k->tiles[x], *b = &r->k->tiles[y];
    const char *al, *ah, *bl, *bh;
    if (x == y) return SAME;
    extent(r, a, at[x], &al, &ah);
    extent(r, b, at[y], &bl, &bh);
    if (ah <= bl || bh <= al) return APART;
    if (at[x] != at[y] || a->dtype != b->dtype) return MIXED;
    for (int i = 0; i < r->rank; i++)
        if (r->shape[i] > 1 && a->stride[i] != b->stride[i]) return MIXED;
    return SAME;
}

static int is_store(const op *o) { return o->code == NKI_STORE || o->code == NKI_STORE_RAW; }
static int is_load(const op *o) { return o->code == NKI_LOAD || o->code == NKI_LOAD_RAW; }

/* A row is read and written where it is, as far as nothing reads what was overwritten. */
static void place(run *r, char *const *at, const nki_phase *p) {
    op *first = r->ops + p->first, *end = first + p->count;
    for (op *o = first; o < end; o++) { /* stores */
        const nki_tile *t = &r->k->tiles[o->tile];
        if (o->code != NKI_STORE || o->c >= 0 || t->dtype != NKI_F32 || !contiguous(r, t, r->m, r->l)) continue;
        if (r->is_row[o->a]) continue;
        op *from = r->ops + r->used[o->a][0];
        if (from < first || from->into >= 0 || is_load(from)) continue;
        int good = 1;
        for (op *q = first; q < end && good; q++) {
            if (is_store(q) && q != o) good = relation(r, at, o->tile, q->tile) == APART;
            if (is_load(q) && q > from && q < o) good = relation(r, at, o->tile, q->tile) == APART;
            if (is_load(q) && q < from) good = relation(r, at, o->tile, q->tile) != MIXED;
        }
        if (good) from->into = o->tile, o->in_place = 1;
    }
    for (op *o = first; o < end; o++) { /* loads */
        const nki_tile *t = &r->k->tiles[o->tile];
        if (!is_load(o) || o->uniform || !contiguous(r, t, r->m, r->l)) continue;
        if (o->code == NKI_LOAD ? t->dtype != NKI_F32 && t->dtype != NKI_TF32 : nki_types[t->dtype].size != 4) continue;
        int good = 1;
        for (op *q = first; q < end && good; q++) {
            const int tile = is_store(q) && !q->in_place ? q->tile : q->into;
            if (tile < 0) continue;
            const int kind = relation(r, at, o->tile, tile);
            good = kind == APART || (kind == SAME && r->used[o->d][1] <= q - r->ops);
        }
        o->in_place = good;
    }
}

static void prepare(run *r, char *const *at) {
    const nki_ew *k = r->k;
    int32_t *current = (int32_t *)r->spare; /* slot of each register; the spare buffers are not in use yet */
    int folds = 0;
    for (int i = 0; i < k->n_registers; i++) current[i] = -1;
    for (int ip = 0; ip < k->n_phases; ip++) {
        const nki_phase *p = &k->phases[ip];
        for (int i = p->first; i < p->first + p->count; i++) {
            const nki_uop *u = &k->uops[i];
            op *o = &r->ops[i];
            *o = (op){.code = u->code, .fn = u->fn, .d = -1, .a = -1, .b = -1, .c = -1, .tile = 0, .into = -1};
            int uniform = 1, makes = 1, store = 0;
#define READ(x) (o->x = u->x < 0 ? row_slot(r, u->imm) : current[u->x])
            switch (u->code) {
            case NKI_LOAD:
            case NKI_LOAD_RAW: o->tile = u->a, uniform = flat(r, k->tiles[u->a].stride); break;
            case NKI_STORE:
            case NKI_STORE_RAW:
                o->tile = u->d, makes = 0, store = 1;
                READ(a);
                if (u->c >= 0) READ(c);
                break;
            case NKI_CONST: break;
            case NKI_FUNC:
                READ(a);
                o->width = nki_on_bits(u->fn) ? u->c : 0, o->sign = u->pad;
                if (o->width ? u->fn != NKI_FN_INVERT : nki_functions2[u->fn].one != NULL) READ(b);
                break;
            case NKI_SELECT: READ(a), READ(b), READ(c); break;
            case NKI_PRED: o->tile = u->a, uniform = flat(r, k->preds[u->a].stride); break;
            case NKI_INDEX: o->tile = u->a, o->sign = u->b == 1, uniform = flat(r, k->indices[u->a].stride); break;
            case NKI_FOLD: READ(a); break;
            case NKI_ROUND: READ(a), o->dtype = u->b; break;
            case NKI_EXACT: READ(a), READ(b), o->dtype = u->c, o->sign = u->pad; break;
            }
#undef READ
            const int32_t reads[3] = {o->a, o->b, o->c};
            for (int j = 0; j < 3; j++)
                if (reads[j] >= 0) uniform &= r->is_row[reads[j]], r->used[reads[j]][1] = i;
            o->uniform = p->row || (uniform && !store && u->code != NKI_FOLD);
            if (!makes) continue;
            o->d = row_slot(r, u->code == NKI_CONST ? u->imm : 0.0f);
            r->used[o->d][0] = r->used[o->d][1] = i;
            if (u->code == NKI_FOLD) {
                o->fold = r->folds + folds++;
                continue; /* is there from the end of the phase on */
            }
            if (!o->uniform) r->is_row[o->d] = 0, r->slot[o->d] = r->buffers + (int64_t)u->d * NKI_CHUNK;
            current[u->d] = o->d;
        }
        for (int i = p->first; i < p->first + p->count; i++)
            if (k->uops[i].code == NKI_FOLD) current[k->uops[i].d] = r->ops[i].d;
        if (!p->row) place(r, at, p);
    }
}

/* ---- rows ---------------------------------------------------------------------------------------------------------- */
typedef struct { /* where a walk over the dimensions is */
    char **tile;
    int64_t *pred, *index;
} place_in;

static inline void move(const run *r, place_in *w, int dim, int64_t steps) {
    const nki_ew *k = r->k;
    for (int i = 0; i < k->n_tiles; i++) w->tile[i] += steps * k->tiles[i].stride[dim];
    for (int i = 0; i < k->n_preds; i++) w->pred[i] += steps * k->preds[i].stride[dim];
    for (int i = 0; i < k->n_indices; i++) w->index[i] += steps * k->indices[i].stride[dim];
}

static void chunk_of(const run *r, const nki_phase *p, const place_in *w, int m, int l, int64_t position) {
    const chunk c = {w->tile, w->pred, w->index, m, l, position};
    for (const op *o = r->ops + p->first, *end = o + p->count; o < end; o++)
        if (!o->uniform) step(r, o, &c);
}

/* All chunks of a row; `w` is where it was again afterwards. */
static void row(const run *r, const nki_phase *p, place_in *w) {
    int64_t position = 0, at[NKI_RANK] = {0};
    const int64_t length_m = r->dim_m < 0 ? 1 : r->shape[r->dim_m], length_l = r->dim_l < 0 ? 1 : r->shape[r->dim_l];
    for (;;) {
        if (r->l == length_l && r->m == length_m) { /* one chunk: nothing to step over */
            chunk_of(r, p, w, r->m, r->l, position);
            position += length_m * length_l;
        } else if (r->l == length_l) { /* several short runs make a chunk */
            for (int64_t i = 0; i < length_m; i += r->m) {
                const int m = (int)(length_m - i < r->m ? length_m - i : r->m);
                chunk_of(r, p, w, m, r->l, position);
                move(r, w, r->dim_m, m);
                position += (int64_t)m * r->l;
            }
            move(r, w, r->dim_m, -length_m);
        } else {
            for (int64_t j = 0; j < length_l; j += r->l) {
                const int l = (int)(length_l - j < r->l ? length_l - j : r->l);
                chunk_of(r, p, w, 1, l, position);
                move(r, w, r->dim_l, l);
                position += l;
            }
            move(r, w, r->dim_l, -length_l);
        }
        int dim = (r->dim_m < 0 ? r->dim_l : r->dim_m) - 1; /* the dimensions around the chunks */
        for (; dim >= r->outer; dim--) {
            move(r, w, dim, 1);
            if (++at[dim] < r->shape[dim]) break;
            move(r, w, dim, -r->shape[dim]);
            at[dim] = 0;
        }
        if (dim < r->outer) return;
    }
}

static void phases(const run *r, place_in *w) {
    const nki_ew *k = r->k;
    const chunk one = {w->tile, w->pred, w->index, 1, 1, 0};
    for (int ip = 0; ip < k->n_phases; ip++) {
        const nki_phase *p = &k->phases[ip];
        const op *first = r->ops + p->first, *end = first + p->count;
        const int folded = r->total > NKI_LANES || r->total < 1 || (int64_t)r->m * r->l != r->total;
        for (const op *o = first; o < end; o++) {
            if (o->uniform) step(r, o, &one);
            if (o->fold && folded) nki_fold_start(o->fold, o->fn);
        }
        if (p->row) continue;
        if (r->total > 0) row(r, p, w);
        for (const op *o = first; o < end && folded; o++)
            if (o->fold) *r->slot[o->d] = nki_fold_end(o->fold, o->fn);
    }
}

/* Chunks: along the innermost dimension, or, where it is short, over a few steps of the one around it. */
static void cut(run *r) {
    r->dim_l = r->inner > 0 ? r->rank - 1 : -1;
    r->dim_m = r->inner > 1 ? r->rank - 2 : -1;
    const int64_t l = r->dim_l < 0 ? 1 : r->shape[r->dim_l], m = r->dim_m < 0 ? 1 : r->shape[r->dim_m];
    r->l = (int)(l < NKI_CHUNK ? l : NKI_CHUNK);
    r->m = l > NKI_CHUNK / 2 || l < 1 ? 1 : (int)(NKI_CHUNK / l < m ? NKI_CHUNK / l : m);
    if (r->m == 1) r->dim_m = -1;
}

#define ON_STACK 49152

void nki_ew_run(const nki_ew *k, char *const *at, const int64_t *pred_base, const int64_t *index_base, const int64_t *lo,
                const int64_t *hi) {
    run r = {.k = k, .rank = k->outer + k->inner, .outer = k->outer, .inner = k->inner, .total = 1};
    int64_t begin[NKI_RANK] = {0};
    for (int i = 0; i < r.rank; i++) {
        begin[i] = lo ? lo[i] : 0;
        r.shape[i] = (hi ? hi[i] : k->shape[i]) - begin[i];
        if (i >= r.outer) r.total *= r.shape[i];
        if (i < r.outer && r.shape[i] < 1) return;
    }
    cut(&r);

    /* All storage in one piece: every operation makes a slot at most and has up to three immediate operands. */
    const size_t slots = 4 * (size_t)k->n_uops + 1, registers = (size_t)k->n_registers;
    const size_t vectors = (registers + 4) * NKI_CHUNK * sizeof(float);
    const size_t need = vectors + (size_t)k->n_uops * (sizeof(nki_lanes) + sizeof(op)) +
                        slots * (sizeof(float *) + sizeof(float) + sizeof(*r.used) + 1) +
                        (size_t)k->n_tiles * sizeof(char *) + (size_t)(k->n_preds + k->n_indices) * sizeof(int64_t) + 256;
    char stack[ON_STACK] __attribute__((aligned(64)));
    char *heap = NULL, *p = stack;
    if (need > ON_STACK) {
        heap = malloc(need + 64);
        if (!heap) abort();
        p = heap + (-(uintptr_t)heap & 63);
    }
    place_in w;
#define TAKE(what, count) ((what) = (void *)p, p += (count) * sizeof(*(what)))
    TAKE(r.buffers, registers * NKI_CHUNK);
    TAKE(r.spare, (size_t)4 * NKI_CHUNK);
    TAKE(r.folds, k->n_uops);
    TAKE(r.slot, slots);
    TAKE(w.tile, k->n_tiles);
    TAKE(w.pred, k->n_preds);
    TAKE(w.index, k->n_indices);
    TAKE(r.ops, k->n_uops);
    TAKE(r.used, slots);
    TAKE(r.single, slots);
    TAKE(r.is_row, slots);
#undef TAKE
    for (int i = 0; i < k->n_tiles; i++) w.tile[i] = at[i];
    for (int i = 0; i < k->n_preds; i++) w.pred[i] = pred_base[i];
    for (int i = 0; i < k->n_indices; i++) w.index[i] = index_base[i];
    for (int i = 0; i < r.rank; i++) move(&r, &w, i, begin[i]);
    prepare(&r, w.tile);

    int64_t count[NKI_RANK] = {0};
    for (int dim = 0; dim >= 0;) {
        phases(&r, &w);
        for (dim = r.outer - 1; dim >= 0; dim--) {
            move(&r, &w, dim, 1);
            if (++count[dim] < r.shape[dim]) break;
            move(&r, &w, dim, -r.shape[dim]);
            count[dim] = 0;
        }
    }
    free(heap);
}
