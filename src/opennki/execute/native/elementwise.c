/* Elementwise programs: prepared once per call, then run block by block, and chunk by chunk.
 *
 * A block is a few rows that go through the phases together, a chunk the part of it that an operation runs over before the
 * next one does: as many short rows as make NKI_CHUNK elements, or that part of a long one. An operation that takes all its
 * operands from lanes which lie side by side runs over all rows of a chunk at once.
 *
 * Preparing gives every value that an operation makes a slot. A slot that has one value per row (constants, loads
 * with stride 0, folds, all of a ROW phase) is computed for all rows of the block at once, and is passed to functions as a
 * single number. Other slots are chunk buffers, which are used again when nobody reads them any more, or whole rows that later
 * phases read, or memory itself: a float32 tile that is contiguous is read where it is, and the operation before a store
 * without a mask writes where the store would.
 */
#include <stdlib.h>
#include <string.h>
#include "run.h"

int nki_abi(void) { return NKI_ABI; }

/* ---- preparation ------------------------------------------------------------------------------------------------- */
static int flat(const run *r, const int64_t *stride) { /* the same over the whole row */
    for (int i = r->outer; i < r->rank; i++)
        if (stride[i] && r->shape[i] > 1) return 0;
    return 1;
}

static int row_slot(run *r, float value) {
    const int s = r->n_slots++;
    r->slot[s] = r->single + (size_t)s * (size_t)r->rows;
    for (int i = 0; i < r->rows; i++) r->slot[s][i] = value;
    r->is_row[s] = ONE;
    r->pitch[s] = (int64_t)r->m * r->l * (int64_t)sizeof(float);
    return s;
}

void nki_extent(const run *r, const nki_tile *t, int64_t *low, int64_t *high) {
    *low = *high = 0;
    for (int i = 0; i < r->rank; i++) {
        const int64_t reach = (r->shape[i] - 1) * t->stride[i];
        *(reach < 0 ? low : high) += reach;
    }
    *high += nki_types[t->dtype].size;
}

enum { APART, SAME, MIXED };
static int relation(const run *r, char *const *at, int x, int y) {
    const nki_tile *a = &r->k->tiles[x], *b = &r->k->tiles[y];
    int64_t al, ah, bl, bh;
    if (x == y) return SAME;
    nki_extent(r, a, &al, &ah);
    nki_extent(r, b, &bl, &bh);
    if (at[x] + ah <= at[y] + bl || at[y] + bh <= at[x] + al) return APART;
    if (at[x] != at[y] || a->dtype != b->dtype) return MIXED;
    for (int i = 0; i < r->rank; i++)
        if (r->shape[i] > 1 && a->stride[i] != b->stride[i]) return MIXED;
    return SAME;
}


/* Whether an operation has a form for operands and results of bfloat16. */
static int takes_narrow(const run *r, const op *o) {
    return o->code == NKI_FUNC && !o->width && !o->uniform && o->b >= 0 && !r->is_row[o->a] && nki_narrows[o->fn].form[1][1][1];
}

/* A row is read and written where it is, as far as nothing reads what was overwritten. */
static void place(run *r, char *const *at, const nki_phase *p) {
    op *first = r->ops + p->first, *end = first + p->count;
    for (op *o = first; o < end; o++) { /* stores */
        const nki_tile *t = &r->k->tiles[o->tile];
        if (o->code != NKI_STORE || o->c >= 0 || t->dtype != NKI_F32 || !nki_contiguous(r, t, r->m, r->l)) continue;
        if (r->is_row[o->a] || o->far_away) continue;
        op *from = r->ops + r->used[o->a][0];
        if (from < first || from->place != HERE || nki_loads(from)) continue;
        int good = 1;
        for (op *q = first; q < end && good; q++) {
            if (nki_stores(q) && q != o) good = relation(r, at, o->tile, q->tile) == APART;
            for (int j = 0; j < q->count && q < o && good; j++) { /* what is read from there */
                const int kind = relation(r, at, o->tile, q->tile + j);
                good = q < from ? kind != MIXED : kind == APART;
            }
        }
        if (!good) continue;
        from->place = TILE, from->number = o->tile, o->in_place = 1;
        r->pitch[o->a] = nki_to_next_row(r, t->stride);
    }
    for (op *o = first; o < end; o++) { /* loads */
        const nki_tile *t = &r->k->tiles[o->tile];
        if (!nki_loads(o) || o->uniform || o->place != HERE || !nki_contiguous(r, t, r->m, r->l)) continue;
        const int wide = o->code == NKI_LOAD ? t->dtype == NKI_F32 || t->dtype == NKI_TF32 : nki_types[t->dtype].size == 4;
        const int narrow = o->code == NKI_LOAD && t->dtype == NKI_BF16;
        int good = wide || narrow;
        for (op *q = first; q < end && good; q++) {
            if (narrow && (q->a == o->d || q->b == o->d || q->c == o->d)) good = takes_narrow(r, q) && q->c != o->d;
            const int tile = nki_stores(q) && !q->in_place ? q->tile : q->place == TILE && !nki_loads(q) ? q->number : -1;
            if (tile < 0 || !good) continue;
            const int kind = relation(r, at, o->tile, tile);
            good = kind == APART || (kind == SAME && r->used[o->d][1] <= q - r->ops);
        }
        if (!good) continue;
        o->in_place = 1, o->place = TILE, o->number = o->tile;
        r->is_narrow[o->d] = (int8_t)narrow;
        r->pitch[o->d] = nki_to_next_row(r, t->stride);
    }
    for (op *o = first; o < end; o++) { /* results that nobody reads but a store of bfloat16 */
        const nki_tile *t = &r->k->tiles[o->tile];
        if (o->code != NKI_STORE || o->c >= 0 || t->dtype != NKI_BF16 || r->is_row[o->a] || !nki_contiguous(r, t, r->m, r->l)) continue;
        op *from = r->ops + r->used[o->a][0];
        int good = from >= first && from->place == HERE && !nki_loads(from) && takes_narrow(r, from);
        for (const op *q = from; q < end && good; q++)
            if (q != o && (q->a == o->a || q->b == o->a || q->c == o->a)) good = 0;
        if (good) r->is_narrow[o->a] = 1, r->pitch[o->a] /= 2;
    }
}

/* Chunk buffers for the slots of a phase; returns how many there are by now. */
static int assign(run *r, const nki_phase *p, int32_t *buffer, int32_t *idle, int buffers) {
    int n_idle = buffers;
    for (int i = 0; i < buffers; i++) idle[i] = i;
    for (int i = p->first; i < p->first + p->count; i++) {
        const op *o = &r->ops[i];
        const int32_t reads[3] = {o->a, o->b, o->c};
        for (int j = 0; j < 3; j++) /* the result may take the place of an operand */
            if (reads[j] >= 0 && buffer[reads[j]] >= 0 && r->used[reads[j]][1] == i) idle[n_idle++] = buffer[reads[j]], buffer[reads[j]] = -2 - buffer[reads[j]];
        if (o->d < 0 || r->is_row[o->d] || o->place != HERE || o->code == NKI_KEPT) continue;
        buffer[o->d] = n_idle ? idle[--n_idle] : buffers++;
        if (r->used[o->d][1] == i) idle[n_idle++] = buffer[o->d], buffer[o->d] = -2 - buffer[o->d];
    }
    return buffers;
}

/* Returns the number of chunk buffers. `buffer`: of each slot, all -1; `current` and `idle`: room for the registers. */
static int prepare(run *r, char *const *at, const int32_t *chosen, const int8_t *without, nki_link *links, int32_t *buffer,
                   int32_t *current, int32_t *idle, int32_t *row_kept) {
    const nki_ew *k = r->k;
    int folds = 0, buffers = 0;
    for (int i = 0; i < k->n_registers; i++) current[i] = -1;
    for (int ip = 0; ip < k->n_phases; ip++) {
        const nki_phase *p = &k->phases[ip];
        for (int i = p->first; i < p->first + p->count; i++) {
            const nki_uop *u = &k->uops[i];
            op *o = &r->ops[i];
            *o = (op){.code = u->code, .fn = u->fn, .d = -1, .a = -1, .b = -1, .c = -1};
            if (chosen[i] >= 0 || without[i]) {
                if (!without[i]) current[u->d] = current[chosen[i]];
                o->code = NKI_CONST, o->uniform = 1;
                continue;
            }
            const int64_t *stride = NULL;
            int uniform = 1, makes = 1, store = 0;
#define READ(x) (o->x = u->x < 0 ? row_slot(r, u->imm) : current[u->x])
            switch (u->code) {
            case NKI_LOAD:
            case NKI_LOAD_RAW: o->tile = u->a, o->count = 1, o->far_away = u->pad, stride = k->tiles[u->a].stride; break;
            case NKI_STORE:
            case NKI_STORE_RAW:
                o->tile = u->d, o->far_away = u->pad, makes = 0, store = 1;
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
            case NKI_PRED: o->tile = u->a, stride = k->preds[u->a].stride; break;
            case NKI_INDEX: o->tile = u->a, o->sign = u->b == 1, stride = k->indices[u->a].stride; break;
            case NKI_FOLD: READ(a); break;
            case NKI_ROUND: READ(a), o->dtype = u->b; break;
            case NKI_EXACT: READ(a), READ(b), o->dtype = u->c, o->sign = u->pad; break;
            case NKI_KEEP: READ(a), makes = 0; break;
            case NKI_KEPT: uniform = row_kept[u->a] >= 0; break;
            case NKI_TREE: o->tile = u->a, o->count = u->b, o->far_away = u->pad, stride = k->tiles[u->a].stride; break;
            }
#undef READ
            if (stride) uniform = flat(r, stride);
            int one = u->code != NKI_FOLD && u->code != NKI_TREE && (!stride || !nki_to_next_row(r, stride));
            const int32_t reads[3] = {o->a, o->b, o->c};
            for (int j = 0; j < 3; j++)
                if (reads[j] >= 0) uniform &= r->is_row[reads[j]] != LANES, one &= r->is_row[reads[j]] == ONE, r->used[reads[j]][1] = i;
            o->uniform = p->row || (uniform && !store && u->code != NKI_FOLD);
            if (u->code == NKI_KEEP) { /* what makes the value leaves it there */
                op *from = r->ops + r->used[o->a][0];
                row_kept[u->d] = r->is_row[o->a] ? o->a : -1;
                if (!r->is_row[o->a]) from->place = KEPT, from->number = u->d;
            }
            if (!makes) continue;
            if (u->code == NKI_KEPT && o->uniform) {
                current[u->d] = row_kept[u->a];
                continue;
            }
            o->d = row_slot(r, u->code == NKI_CONST ? u->imm : 0.0f);
            r->used[o->d][0] = r->used[o->d][1] = i;
            r->is_row[o->d] = one ? ONE : ROW;
            if (u->code == NKI_FOLD) {
                o->fold = r->folds + folds++;
                continue; /* is there from the end of the phase on */
            }
            if (u->code == NKI_KEPT) o->place = KEPT, o->number = u->a;
            if (!o->uniform) r->is_row[o->d] = LANES;
            current[u->d] = o->d;
        }
        for (int i = p->first; i < p->first + p->count; i++)
            if (r->ops[i].code == NKI_FOLD) current[k->uops[i].d] = r->ops[i].d;
        if (!p->row) {
            place(r, at, p);
            buffers = assign(r, p, buffer, idle, buffers);
        }
        for (int i = p->first; i < p->first + p->count; i++) nki_choose_step(r, &r->ops[i], r->ops + p->first + p->count);
        if (!p->row && nki_find_chains(r, p, links + 3 * p->first) && ip < 64) r->unbuffered |= (uint64_t)1 << ip;
        if (!p->row) nki_feed_streams(r, p);
    }
    return buffers;
}

/* ---- rows ---------------------------------------------------------------------------------------------------------- */
static inline void move(const run *r, place_in *w, int dim, int64_t steps) {
    const nki_ew *k = r->k;
    for (int i = 0; i < k->n_tiles; i++) w->tile[i] += steps * k->tiles[i].stride[dim];
    for (int i = 0; i < k->n_preds; i++) w->pred[i] += steps * k->preds[i].stride[dim];
    for (int i = 0; i < k->n_indices; i++) w->index[i] += steps * k->indices[i].stride[dim];
}

/* The operations of a phase over a chunk of `rows` rows, of which the first is number `first` of the block. */
static void chunk_of(const run *r, const nki_phase *p, const place_in *w, int first, int rows, int m, int l, int64_t position) {
    const chunk joined = {w->tile, w->pred, w->index, 1, rows * m * l, position, first, 0, 1};
    const chunk many = {w->tile, w->pred, w->index, m, l, position, first, 0, rows};
    chunk one = {w->tile, w->pred, w->index, m, l, position, first, 0, 1};
    for (const op *o = r->ops + p->first, *end = o + p->count; o < end; o++) {
        if (o->uniform) continue;
        if (o->place == TILE)
            r->slot[o->d] = (float *)(void *)nki_tile_at(r, &one, o->number);
        else if (o->place == KEPT)
            r->slot[o->d] = r->kept + ((int64_t)o->number * r->rows + first) * r->total + position;
        if (!o->go) continue;
        if (o->joined | o->many) {
            o->go(r, o, o->joined ? &joined : &many);
            continue;
        }
        for (; one.part < rows; one.part++, one.row++) o->go(r, o, &one);
        one.part = 0, one.row = first;
    }
    if (r->ahead == p)
        for (int i = 0; i < r->far; i++)
            for (one.row = first; one.row < first + rows; one.row++) { /* on its way while there is something to compute */
                const nki_asked next = nki_next(r, r->ops + r->next[i], &one);
                if (next.at) nki_ask_for(&next, next.bytes);
            }
}

/* All chunks of a row that has several; `w` is where it was again afterwards. */
static void long_row(const run *r, const nki_phase *p, place_in *w) {
    int64_t position = 0, at[NKI_RANK] = {0};
    const int64_t length_m = r->dim_m < 0 ? 1 : r->shape[r->dim_m], length_l = r->dim_l < 0 ? 1 : r->shape[r->dim_l];
    for (;;) {
        if (r->l == length_l) { /* several short runs make a chunk */
            for (int64_t i = 0; i < length_m; i += r->m) {
                const int m = (int)(length_m - i < r->m ? length_m - i : r->m);
                chunk_of(r, p, w, 0, 1, m, r->l, position);
                if (r->dim_m >= 0) move(r, w, r->dim_m, m);
                position += (int64_t)m * r->l;
            }
            if (r->dim_m >= 0) move(r, w, r->dim_m, -length_m);
        } else {
            for (int64_t j = 0; j < length_l; j += r->l) {
                const int l = (int)(length_l - j < r->l ? length_l - j : r->l);
                chunk_of(r, p, w, 0, 1, 1, l, position);
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

/* `rows` rows, each of which is one chunk at most. */
static void short_rows(const run *r, const nki_phase *p, const place_in *w, int rows) {
    const int64_t number = p - r->k->phases;
    const int some = number < 64 && r->unbuffered >> number & 1 ? rows : r->chunk_rows;
    for (int i = 0; i < rows; i += some) chunk_of(r, p, w, i, rows - i < some ? rows - i : some, r->m, r->l, 0);
}

static void phases(const run *r, place_in *w, int rows) {
    const nki_ew *k = r->k;
    const chunk all = {w->tile, w->pred, w->index, rows, 1, 0, 0, 0, 1};
    for (int ip = 0; ip < k->n_phases; ip++) {
        const nki_phase *p = &k->phases[ip];
        const op *first = r->ops + p->first, *end = first + p->count;
        for (const op *o = first; o < end; o++) {
            if (o->uniform && o->go) o->go(r, o, &all);
            if (o->fold && !r->whole) nki_fold_start(o->fold, o->fn);
        }
        if (p->row) continue;
        if (r->whole)
            short_rows(r, p, w, rows);
        else if (r->total > 0)
            long_row(r, p, w);
        for (const op *o = first; o < end && !r->whole; o++)
            if (o->fold) *r->slot[o->d] = nki_fold_end(o->fold, o->fn);
    }
}

/* Whether rows store to the same elements, such as the state that one leaves for the next: they run one after the other. */
static int in_turn(const run *r) {
    for (const nki_uop *u = r->k->uops, *end = u + r->k->n_uops; u < end; u++)
        if ((u->code == NKI_STORE || u->code == NKI_STORE_RAW) && !nki_to_next_row(r, r->k->tiles[u->d].stride)) return 1;
    return 0;
}

/* Chunks: along the innermost dimension, or, where it is short, over a few steps of the one around it; and rows of a block. */
static void cut(run *r) {
    r->dim_l = r->inner > 0 ? r->rank - 1 : -1;
    r->dim_m = r->inner > 1 ? r->rank - 2 : -1;
    const int64_t l = r->dim_l < 0 ? 1 : r->shape[r->dim_l], m = r->dim_m < 0 ? 1 : r->shape[r->dim_m];
    r->l = (int)(l < NKI_CHUNK ? l : NKI_CHUNK);
    r->m = l > NKI_CHUNK / 2 || l < 1 ? 1 : (int)(NKI_CHUNK / l < m ? NKI_CHUNK / l : m);
    if (r->m == 1) r->dim_m = -1;
    r->whole = r->total > 0 && (int64_t)r->m * r->l == r->total;
    r->rows = r->chunk_rows = 1;
    if (!r->whole || !r->outer || in_turn(r)) return;
    const int64_t rows = r->shape[r->outer - 1], most = NKI_BLOCK / r->total;
    r->rows = (int)(most < NKI_BLOCK_ROWS ? most : NKI_BLOCK_ROWS);
    if (r->rows > rows) r->rows = (int)rows;
    r->chunk_rows = NKI_CHUNK / (int)r->total < r->rows ? NKI_CHUNK / (int)r->total : r->rows;
}

/* The phase that asks for what comes next: the last but one over elements, as memory has enough to do with what the last one stores.
 * Long rows that are read again would be pushed out. */
static const nki_phase *asking(const run *r) {
    const nki_ew *k = r->k;
    if (r->total < 64 || (r->total <= LONG_ROW && r->outer < 1) || (r->total > LONG_ROW && k->n_phases > 1)) return NULL;
    const nki_phase *found = NULL;
    for (int i = k->n_phases - 1, seen = 0; i >= 0 && seen < 2; i--)
        if (!k->phases[i].row) found = &k->phases[i], seen++;
    return found;
}

#define ON_STACK 32768

int nki_ew_begin(run *r, const nki_ew *k, const int64_t *lo, const int64_t *hi) {
    *r = (run){.k = k, .rank = k->outer + k->inner, .outer = k->outer, .inner = k->inner, .total = 1};
    for (int i = 0; i < r->rank; i++) {
        r->shape[i] = (hi ? hi[i] : k->shape[i]) - (lo ? lo[i] : 0);
        if (i >= r->outer) r->total *= r->shape[i];
        if (i < r->outer && r->shape[i] < 1) return 0;
    }
    cut(r);
    return 1;
}

/* Every operation makes a slot at most and has up to three immediate operands. */
static size_t slots_of(const nki_ew *k) { return 4 * (size_t)k->n_uops + 1; }

size_t nki_ew_room(const run *r) {
    const nki_ew *k = r->k;
    const size_t slots = slots_of(k), registers = (size_t)k->n_registers + 1;
    return (size_t)k->n_uops * (sizeof(nki_lanes) + sizeof(op) + 3 * sizeof(nki_link)) +
           slots * (sizeof(float *) + (size_t)r->rows * sizeof(float) + sizeof(int64_t) + sizeof(*r->used) + sizeof(int32_t) + 2) +
           (3 * registers + 2 * slots + (size_t)k->n_uops) * sizeof(int32_t) + (size_t)k->n_uops + (size_t)k->n_kept * sizeof(int32_t) +
           (size_t)k->n_tiles * sizeof(char *) + (size_t)(k->n_preds + k->n_indices) * sizeof(int64_t) + 256;
}

size_t nki_ew_prepare(run *r, place_in *w, char *p, char *const *at, const int64_t *pred_base, const int64_t *index_base, const int64_t *lo) {
    const nki_ew *k = r->k;
    const size_t slots = slots_of(k), registers = (size_t)k->n_registers + 1;
    int32_t *current, *idle, *row_kept, *chosen, *known;
    int8_t *without;
    nki_link *links;
#define TAKE(what, count) ((what) = (void *)p, p += (count) * sizeof(*(what)))
    TAKE(r->folds, k->n_uops);
    TAKE(r->slot, slots);
    TAKE(r->pitch, slots);
    TAKE(w->tile, k->n_tiles);
    TAKE(w->pred, k->n_preds);
    TAKE(w->index, k->n_indices);
    TAKE(r->ops, k->n_uops);
    TAKE(links, 3 * (size_t)k->n_uops);
    TAKE(r->used, slots);
    TAKE(r->single, slots * (size_t)r->rows);
    TAKE(r->buffer, slots);
    TAKE(current, registers);
    TAKE(idle, 2 * slots);
    TAKE(row_kept, k->n_kept);
    TAKE(known, registers);
    TAKE(chosen, k->n_uops);
    TAKE(r->is_row, slots);
    TAKE(r->is_narrow, slots);
    TAKE(without, k->n_uops);
#undef TAKE
    nki_ew_at(r, w, at, pred_base, index_base);
    for (int i = 0; lo && i < r->rank; i++) move(r, w, i, lo[i]);
    memset(r->is_narrow, 0, slots);
    memset(r->buffer, 0xff, slots * sizeof *r->buffer);
    r->n_slots = 0, r->unbuffered = 0;
    nki_decide(r, w->pred, known, chosen, without);
    r->n_buffers = prepare(r, w->tile, chosen, without, links, r->buffer, current, idle, row_kept);
    r->streams = r->far = 0;
    for (int i = 0; i < k->n_uops; i++) r->streams |= r->ops[i].far_away && nki_stores(&r->ops[i]);
    r->ahead = asking(r);
    r->asker = NULL;
    for (int i = 0, seen; r->ahead && i < k->n_uops && r->far < MOST_FAR; i++) {
        if (!nki_loads(&r->ops[i]) || !r->ops[i].far_away || r->ops[i].uniform) continue;
        for (seen = 0; seen < r->far && r->ops[r->next[seen]].tile != r->ops[i].tile;) seen++;
        if (seen == r->far) r->next[r->far++] = i;
    }
    for (int i = 0; r->ahead && i < k->n_uops; i++)
        if (nki_stores(&r->ops[i]) && nki_may_ask(r, &r->ops[i])) r->asker = &r->ops[i];
    if (r->asker) r->ahead = NULL;
    return ((size_t)(r->n_buffers + 4) * NKI_CHUNK + (size_t)(k->n_kept * r->rows * r->total)) * sizeof(float);
}

void nki_ew_at(const run *r, const place_in *w, char *const *at, const int64_t *pred_base, const int64_t *index_base) {
    const nki_ew *k = r->k;
    for (int i = 0; i < k->n_tiles; i++) w->tile[i] = at[i];
    for (int i = 0; i < k->n_preds; i++) w->pred[i] = pred_base[i];
    for (int i = 0; i < k->n_indices; i++) w->index[i] = index_base[i];
}

void nki_ew_vectors(run *r, float *vectors) {
    r->spare = vectors;
    r->buffers = r->spare + 4 * NKI_CHUNK;
    r->kept = r->buffers + (size_t)r->n_buffers * NKI_CHUNK;
    for (int i = 0; i < r->k->n_uops; i++) {
        const op *o = &r->ops[i];
        const int number = o->d < 0 ? -1 : r->buffer[o->d];
        if (number != -1) r->slot[o->d] = r->buffers + (number < 0 ? -2 - number : number) * NKI_CHUNK;
    }
}

void nki_ew_go(const run *r, place_in *w) {
    int64_t count[NKI_RANK] = {0};
    const int64_t rows = r->outer ? r->shape[r->outer - 1] : 1;
    for (int dim = 0; dim >= 0;) {
        for (int64_t i = 0; i < rows; i += r->rows) {
            const int some = (int)(rows - i < r->rows ? rows - i : r->rows);
            phases(r, w, some);
            if (r->outer) move(r, w, r->outer - 1, some);
        }
        if (r->outer) move(r, w, r->outer - 1, -rows);
        for (dim = r->outer - 2; dim >= 0; dim--) {
            move(r, w, dim, 1);
            if (++count[dim] < r->shape[dim]) break;
            move(r, w, dim, -r->shape[dim]);
            count[dim] = 0;
        }
    }
    if (r->streams) nki_stream_end();
}

/* `bytes` aligned to 64, from the stack where they fit; *heap: what is to be freed. */
static void *room_for(size_t bytes, void *stack, size_t most, char **heap) {
    if (bytes <= most) return stack;
    *heap = malloc(bytes + 64);
    if (!*heap) abort();
    return *heap + (-(uintptr_t)*heap & 63);
}

void nki_ew_run(const nki_ew *k, char *const *at, const int64_t *pred_base, const int64_t *index_base, const int64_t *lo,
                const int64_t *hi) {
    run r;
    place_in w;
    char stack[ON_STACK] __attribute__((aligned(64))), *heap = NULL, *more = NULL;
    float vectors[NKI_VECTORS / sizeof(float)] __attribute__((aligned(64)));
    if (!nki_ew_begin(&r, k, lo, hi)) return;
    const size_t bytes = nki_ew_prepare(&r, &w, room_for(nki_ew_room(&r), stack, ON_STACK, &heap), at, pred_base, index_base, lo);
    float *room = room_for(bytes, vectors, NKI_VECTORS, &more);
    nki_poison(room, bytes);
    nki_ew_vectors(&r, room);
    nki_ew_go(&r, &w);
    free(heap);
    free(more);
}
