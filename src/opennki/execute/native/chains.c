/* Chains: operations of an elementwise phase of which each takes what the one before it has made run as one, over vectors that stay in
 * registers. What else reads a value of the chain finds it where it would be. Every function is the one that runs alone, so
 * results do not change. There is a table of the chains that have code of their own, all of it made from one function; other
 * operations, and all of them at levels of CPU without AVX-512, run one after the other.
 */
#include "run.h"
#include "wide.h"

#if defined(__AVX512F__)
enum { FROM, WRITE, ADD_ROW, ADD, LESS_ROW, ROW_LESS, LESS, LESS_FROM, TIMES_ROW, TIMES, SQUARED, EXPONENTIAL, CHOSEN, SUM, LARGEST, NARROW, NONE };
enum { MOST_LINKS = 16, WIDTH = 64 }; /* elements that are in registers at a time */
typedef struct {
    __m512 low, high; /* lanes of the fold */
    int numbers;      /* no NaN so far */
    int64_t yes, no;  /* where the predicate of the choice holds */
    int narrows;      /* the CPU has an instruction for it */
} state;

static inline __mmask16 first_of(int64_t n) { return (__mmask16)(n >= 16 ? 0xffff : n > 0 ? (1 << n) - 1 : 0); }

#define ALWAYS static inline __attribute__((always_inline))

/* Elements i .. i + 63 of a row, or the `left` last ones of it. The compiler knows `kinds`. */
ALWAYS void group(const int8_t *kinds, int count, char *const *at, const __m512 *row, int i, int whole, int left, state *s) {
    const __mmask16 m0 = whole ? 0xffff : first_of(left), m1 = whole ? 0xffff : first_of(left - 16);
    const __mmask16 m2 = whole ? 0xffff : first_of(left - 32), m3 = whole ? 0xffff : first_of(left - 48);
    __m512 v0 = _mm512_setzero_ps(), v1 = v0, v2 = v0, v3 = v0;
    int plain = 0; /* exp was normal, or zero */
    int done = -1, alone = 1; /* nothing of what a choice throws away is computed */
    _Pragma("GCC unroll 16") for (int k = 0; k < count; k++) {
        if (alone && kinds[k] == CHOSEN && (s->no <= i || s->yes >= i + left)) done = k, v0 = v1 = v2 = v3 = row[k];
        if (kinds[k] == WRITE || kinds[k] == NARROW || kinds[k] == SUM || kinds[k] == LARGEST) alone = 0;
    }
#define LOAD(j) (whole ? _mm512_loadu_ps(p + 16 * j) : _mm512_maskz_loadu_ps(m##j, p + 16 * j))
#define STORE(j) (whole ? _mm512_storeu_ps(p + 16 * j, v##j) : _mm512_mask_storeu_ps(p + 16 * j, m##j, v##j))
#define EACH(e) e(0) e(1) e(2) e(3)
#define DO(name, make) \
    case name: {       \
        EACH(make)     \
        break;         \
    }
    _Pragma("GCC unroll 16") for (int k = 0; k < count; k++) {
        float *p = (float *)(void *)at[k] + i;
        if (k <= done) continue;
        switch (kinds[k]) {
#define MAKE(j) v##j = LOAD(j);
            DO(FROM, MAKE)
#undef MAKE
#define MAKE(j) STORE(j);
            DO(WRITE, MAKE)
#undef MAKE
#define MAKE(j) v##j = _mm512_add_ps(v##j, row[k]);
            DO(ADD_ROW, MAKE)
#undef MAKE
#define MAKE(j) v##j = _mm512_add_ps(v##j, LOAD(j));
            DO(ADD, MAKE)
#undef MAKE
#define MAKE(j) v##j = _mm512_sub_ps(v##j, row[k]);
            DO(LESS_ROW, MAKE)
#undef MAKE
#define MAKE(j) v##j = _mm512_sub_ps(row[k], v##j);
            DO(ROW_LESS, MAKE)
#undef MAKE
#define MAKE(j) v##j = _mm512_sub_ps(v##j, LOAD(j));
            DO(LESS, MAKE)
#undef MAKE
#define MAKE(j) v##j = _mm512_sub_ps(LOAD(j), v##j);
            DO(LESS_FROM, MAKE)
#undef MAKE
#define MAKE(j) v##j = _mm512_mul_ps(v##j, row[k]);
            DO(TIMES_ROW, MAKE)
#undef MAKE
#define MAKE(j) v##j = _mm512_mul_ps(v##j, LOAD(j));
            DO(TIMES, MAKE)
#undef MAKE
#define MAKE(j) v##j = _mm512_mul_ps(v##j, v##j);
            DO(SQUARED, MAKE)
#undef MAKE
        case EXPONENTIAL:
#define BELOW(j) _mm512_cmp_ps_mask(v##j, _mm512_set1_ps(NKI_EXP_LEAST), _CMP_LT_OQ)
#define MAKE(j) v##j = nki_wide_exp_of(v##j, 1);
            if (whole && __builtin_expect((plain = nki_wide_plain(v0, v1, v2, v3)), 1)) {
                EACH(MAKE)
                break;
            }
#undef MAKE
            if ((BELOW(0) & BELOW(1) & BELOW(2) & BELOW(3)) == 0xffff) { /* scores behind a mask */
                v0 = v1 = v2 = v3 = _mm512_setzero_ps(), plain = 1;
                break;
            }
#undef BELOW
#define MAKE(j) v##j = nki_wide_exp(v##j);
            EACH(MAKE)
#undef MAKE
            break;
        case CHOSEN:
            if (s->yes <= i && s->no >= i + left) break;
#define MAKE(j) v##j = _mm512_mask_mov_ps(row[k], first_of(s->no - i - 16 * j) & ~first_of(s->yes - i - 16 * j), v##j);
            EACH(MAKE)
#undef MAKE
            break;
        case SUM:
            s->low = _mm512_mask_add_ps(s->low, m0, s->low, v0), s->high = _mm512_mask_add_ps(s->high, m1, s->high, v1);
            s->low = _mm512_mask_add_ps(s->low, m2, s->low, v2), s->high = _mm512_mask_add_ps(s->high, m3, s->high, v3);
            break;
        case LARGEST:
            /* what is in lanes beyond the end may be NaN too: then the slower way is taken */
            s->numbers &= !(_mm512_cmp_ps_mask(v0, v1, _CMP_UNORD_Q) | _mm512_cmp_ps_mask(v2, v3, _CMP_UNORD_Q));
            if (__builtin_expect(whole & s->numbers, 1)) { /* whatever is joined first, the last of what is equal wins */
                s->low = _mm512_max_ps(s->low, _mm512_max_ps(v0, v2)), s->high = _mm512_max_ps(s->high, _mm512_max_ps(v1, v3));
                break;
            }
#define LARGER(side, m, v) s->side = _mm512_mask_mov_ps(s->side, m, nki_wide_two(NKI_FN_MAXIMUM, s->side, v))
            LARGER(low, m0, v0), LARGER(high, m1, v1), LARGER(low, m2, v2), LARGER(high, m3, v3);
#undef LARGER
            break;
        case NARROW: {
            uint16_t *q = (uint16_t *)(void *)at[k] + i;
            const int exact = plain && s->narrows && (kinds[k - 1] == EXPONENTIAL || (kinds[k - 1] == SUM && kinds[k - 2] == EXPONENTIAL));
            const __m512i a = exact ? nki_wide_narrowed(v0, v1) : nki_wide_bf16(v0, v1);
            const __m512i b = exact ? nki_wide_narrowed(v2, v3) : nki_wide_bf16(v2, v3);
            if (whole) {
                _mm512_storeu_si512(q, a), _mm512_storeu_si512(q + 32, b);
            } else {
                _mm512_mask_storeu_epi16(q, (__mmask32)m0 | (__mmask32)m1 << 16, a);
                _mm512_mask_storeu_epi16(q + 32, (__mmask32)m2 | (__mmask32)m3 << 16, b);
            }
            break;
        }
        }
    }
}

ALWAYS int takes_row(int kind) { return kind == ADD_ROW || kind == LESS_ROW || kind == ROW_LESS || kind == TIMES_ROW || kind == CHOSEN; }
ALWAYS void chain(const run *r, const op *o, const chunk *c, const int8_t *kinds, int count) {
    const nki_link *links = o->links;
    const int n = c->m * c->l, narrows = nki_narrows_there();
    char *at[MOST_LINKS];
    int64_t step[MOST_LINKS];
    const op *fold = NULL, *choice = NULL;
    _Pragma("GCC unroll 16") for (int k = 0; k < count; k++) {
        const nki_link *l = links + k;
        at[k] = (char *)r->spare, step[k] = 0; /* a fold has no place of its own */
        if (kinds[k] == SUM || kinds[k] == LARGEST)
            fold = l->of;
        else if (kinds[k] == CHOSEN)
            choice = l->of, at[k] = (char *)nki_lanes_at(r, c, l->slot), step[k] = sizeof(float);
        else if (l->slot >= 0)
            at[k] = (char *)nki_lanes_at(r, c, l->slot), step[k] = r->is_row[l->slot] ? (int64_t)sizeof(float) : r->pitch[l->slot];
        else if (l->of)
            at[k] = nki_tile_at(r, c, l->of->tile), step[k] = nki_to_next_row(r, r->k->tiles[l->of->tile].stride);
    }
    for (int i = 0; i < c->rows; i++) {
        state s = {_mm512_set1_ps(-0.0f), _mm512_set1_ps(-0.0f), 1, 0, n, narrows};
        if (choice) {
            chunk one = *c;
            one.row += i;
            nki_holds(r, choice, &one, &s.yes, &s.no);
        }
        __m512 row[MOST_LINKS];
        _Pragma("GCC unroll 16") for (int k = 0; k < count; k++)
            row[k] = takes_row(kinds[k]) ? _mm512_set1_ps(*(float *)(void *)at[k]) : _mm512_setzero_ps();
        if (fold && !r->whole) {
            s.low = _mm512_load_ps(fold->fold->lanes), s.high = _mm512_load_ps(fold->fold->lanes + 16);
            s.numbers = !_mm512_cmp_ps_mask(s.low, s.high, _CMP_UNORD_Q);
        } else if (fold && fold->fn == NKI_FN_MAXIMUM) {
            s.low = s.high = _mm512_set1_ps(-__builtin_inff());
        }
        int j = 0;
        for (; j + WIDTH <= n; j += WIDTH) group(kinds, count, at, row, j, 1, WIDTH, &s);
        if (j < n) group(kinds, count, at, row, j, 0, n - j, &s);
        if (fold && !r->whole) {
            _mm512_store_ps(fold->fold->lanes, s.low), _mm512_store_ps(fold->fold->lanes + 16, s.high);
        } else if (fold && fold->fn == NKI_FN_ADD) {
            r->slot[fold->d][c->row + i] = nki_tree_add(_mm512_add_ps(s.low, s.high));
        } else if (fold && s.numbers) {
            r->slot[fold->d][c->row + i] = nki_tree_maximum(_mm512_max_ps(s.low, s.high));
        } else if (fold) {
            nki_lanes lanes;
            _mm512_store_ps(lanes.lanes, s.low), _mm512_store_ps(lanes.lanes + 16, s.high);
            r->slot[fold->d][c->row + i] = nki_fold_end(&lanes, fold->fn);
        }
        _Pragma("GCC unroll 16") for (int k = 0; k < count; k++) at[k] += step[k];
    }
}

/* Softmax and attention, normalisations, sums of products. */
#define EACH_CHAIN(X)                                                                                                             \
    X(0, FROM, EXPONENTIAL, SUM) X(1, FROM, EXPONENTIAL, SUM, WRITE) X(2, FROM, EXPONENTIAL, SUM, NARROW)                         \
    X(3, FROM, ADD_ROW, EXPONENTIAL, WRITE) X(4, FROM, ADD_ROW, EXPONENTIAL, SUM) X(5, FROM, ADD_ROW, EXPONENTIAL, SUM, WRITE)    \
    X(6, FROM, ADD_ROW, EXPONENTIAL, SUM, NARROW) X(7, FROM, LESS_ROW, EXPONENTIAL, WRITE) X(8, FROM, LESS_ROW, EXPONENTIAL, SUM) \
    X(9, FROM, LESS_ROW, EXPONENTIAL, SUM, WRITE) X(10, FROM, LESS_ROW, EXPONENTIAL, SUM, NARROW)                                 \
    X(11, FROM, TIMES_ROW, ADD_ROW, EXPONENTIAL, SUM, WRITE) X(12, FROM, TIMES_ROW, ADD_ROW, EXPONENTIAL, SUM, NARROW)            \
    X(13, FROM, TIMES_ROW, LARGEST) X(14, FROM, TIMES_ROW, LARGEST, WRITE) X(15, FROM, ADD, LARGEST, WRITE)                       \
    X(16, FROM, SQUARED, SUM) X(17, FROM, LESS_ROW, SQUARED, SUM) X(18, FROM, LESS_ROW, WRITE, SQUARED, SUM)                      \
    X(19, FROM, LESS, SQUARED, SUM) X(20, FROM, ADD, SQUARED, SUM) X(21, FROM, ADD, WRITE, SQUARED, SUM)                          \
    X(22, FROM, ADD, SUM, WRITE) X(23, FROM, TIMES, SUM) X(24, FROM, LESS_ROW, TIMES_ROW, WRITE)                                  \
    X(25, FROM, LESS_ROW, TIMES, WRITE) X(26, FROM, TIMES_ROW, TIMES, WRITE) X(27, FROM, TIMES_ROW, ADD_ROW, WRITE)               \
    X(28, FROM, TIMES_ROW, ADD, WRITE) X(29, FROM, TIMES, ADD, WRITE) X(30, FROM, TIMES, ADD_ROW, WRITE)                          \
    X(31, FROM, TIMES, LESS_FROM, WRITE) X(32, FROM, TIMES_ROW, ROW_LESS, WRITE) X(33, FROM, CHOSEN, LARGEST)                     \
    X(34, FROM, CHOSEN, LARGEST, WRITE) X(35, FROM, TIMES_ROW, CHOSEN, WRITE) X(36, FROM, TIMES_ROW, CHOSEN, LARGEST, WRITE)

#define DEFINE(number, ...)                                                                                            \
    static const int8_t kinds_##number[] = {__VA_ARGS__};                                                              \
    static void chain_##number(const run *r, const op *o, const chunk *c) {                                            \
        chain(r, o, c, kinds_##number, (int)sizeof kinds_##number);                                                    \
    }
EACH_CHAIN(DEFINE)
#define ENTRY(number, ...) {kinds_##number, (int)sizeof kinds_##number, chain_##number},
static const struct {
    const int8_t *kinds;
    int count;
    void (*run)(const run *r, const op *o, const chunk *c);
} chains[] = {EACH_CHAIN(ENTRY)};

/* ---- finding them -------------------------------------------------------------------------------------------------- */
static int in_lanes(const run *r, int slot) { return slot >= 0 && r->is_row[slot] == LANES && !r->is_narrow[slot]; }

/* The link that a function or a choice is to a value, the other operand in *slot; NONE if it is none. */
static int function_of(const run *r, const op *o, int value, int *slot) {
    *slot = o->b;
    if (o->go == nki_choose_parts && o->a == value && r->is_row[o->b] && in_lanes(r, o->d)) return CHOSEN;
    *slot = -1;
    if (o->code != NKI_FUNC || o->width || !in_lanes(r, o->d)) return NONE;
    if (o->b < 0) return o->fn == NKI_FN_EXP ? EXPONENTIAL : o->fn == NKI_FN_SQUARE ? SQUARED : NONE;
    const int left = o->a == value, other = *slot = left ? o->b : o->a, row = r->is_row[other] != LANES;
    if (!row && !in_lanes(r, other)) return NONE;
    if (o->a == o->b) {
        *slot = -1;
        return o->fn == NKI_FN_MULTIPLY ? SQUARED : NONE;
    }
    switch (o->fn) {
    case NKI_FN_ADD: return row ? ADD_ROW : ADD;
    case NKI_FN_MULTIPLY: return row ? TIMES_ROW : TIMES;
    case NKI_FN_SUBTRACT: return left ? (row ? LESS_ROW : LESS) : row ? ROW_LESS : LESS_FROM;
    }
    return NONE;
}

/* The link that a fold or a store of a value is. */
static int end_of(const run *r, const op *o, int value) {
    if (o->a != value) return NONE;
    if (o->code == NKI_FOLD && (r->whole || (r->inner == 1 && r->l % NKI_LANES == 0)))
        return o->fn == NKI_FN_ADD ? SUM : o->fn == NKI_FN_MAXIMUM ? LARGEST : NONE;
    const nki_tile *t = &r->k->tiles[o->tile];
    if (o->code != NKI_STORE || o->c >= 0 || o->far_away || !nki_contiguous(r, t, r->m, r->l)) return NONE;
    return t->dtype == NKI_F32 ? WRITE : t->dtype == NKI_BF16 ? NARROW : NONE;
}

/* Whether more than `inside` operations of a phase read what an operation makes, or it has to be somewhere. */
static int is_wanted(const op *o, const op *end, int inside) {
    if (o->place != HERE) return 1;
    for (const op *q = o + 1; q < end; q++) inside -= q->a == o->d || q->b == o->d || q->c == o->d;
    return inside < 0;
}

/* The chain of the table that has these links, -1 if there is none. */
static int known(const nki_link *links, int count) {
    for (int i = 0; i < (int)(sizeof chains / sizeof *chains); i++) {
        int k = 0;
        while (chains[i].count == count && k < count && links[k].kind == chains[i].kinds[k]) k++;
        if (k == count) return i;
    }
    return -1;
}

/* Whether all lanes of a chain are in memory, or in rows that are kept. */
static int without_buffers(const run *r, const nki_link *links, int count) {
    for (int k = 0; k < count; k++) {
        const int slot = links[k].slot;
        if (slot >= 0 && r->is_row[slot] == LANES && r->ops[r->used[slot][0]].place == HERE) return 0;
    }
    return 1;
}

/* The longest chain of the table that begins with an operation: its last one, NULL if there is none. `links`: those of it. */
static op *longest(const run *r, op *o, const op *end, nki_link *links) {
    nki_link found[MOST_LINKS];
    int slot, value = in_lanes(r, o->a) ? o->a : o->b, folds = 0, inside = 0, count = 0, joined = o->joined;
    int kind = in_lanes(r, value) ? function_of(r, o, value, &slot) : NONE;
    if (kind == NONE) return NULL;
    op *maker = o, *last = NULL;
    int chosen = 0, together = 0, alone = 0;
    found[count++] = (nki_link){FROM, value, NULL};
    int choices = kind == CHOSEN;
    found[count++] = (nki_link){kind, slot, kind == CHOSEN ? o : NULL};
    for (op *q = o + 1; q < end && count + 3 < MOST_LINKS; q++) {
        if (q->uniform || !q->go) continue;
        if ((kind = end_of(r, q, maker->d)) != NONE) {
            if (q->code == NKI_FOLD && folds++) break;
            found[count++] = (nki_link){kind, -1, q};
            inside++;
        } else if (q->a == maker->d || q->b == maker->d) {
            if ((kind = function_of(r, q, maker->d, &slot)) == NONE) break;
            if (is_wanted(maker, end, inside + 1)) found[count++] = (nki_link){WRITE, maker->d, NULL};
            if ((choices += kind == CHOSEN) > 1) break;
            found[count++] = (nki_link){kind, slot, kind == CHOSEN ? q : NULL};
            maker = q, inside = 0;
        } else {
            break;
        }
        joined &= q->joined;
        const int wanted = is_wanted(maker, end, inside), all = count + wanted;
        if (wanted) found[count] = (nki_link){WRITE, maker->d, NULL};
        const int which = known(found, all);
        if (which < 0) continue;
        last = q;
        chosen = which, together = joined;
        for (int k = 0; k < all; k++) links[k] = found[k];
        alone = without_buffers(r, found, all);
    }
    if (last) last->go = chains[chosen].run, last->links = links, last->many = 1, last->joined = together, last->unbuffered = alone;
    return last;
}

int nki_find_chains(const run *r, const nki_phase *p, nki_link *links) {
    op *first = r->ops + p->first, *end = first + p->count;
    int unbuffered = 1;
    for (op *o = first; o < end; o++) {
        if (o->uniform || !o->go) continue;
        op *last = longest(r, o, end, links + 3 * (o - first));
        unbuffered &= last && last->unbuffered;
        if (!last) continue;
        for (; o < last; o++)
            if (!o->uniform) o->go = NULL;
    }
    return unbuffered;
}
#else
int nki_find_chains(const run *r, const nki_phase *p, nki_link *links) { return (void)r, (void)p, (void)links, 0; }
#endif
