/* Trees over the elements of a window (NKI_TREE): each element of a result joins up to 32 elements of tiles that lie side by
 * side, such as those of a pool. They are joined in registers, so that memory is read about as often as a cache line comes by.
 */
#include "run.h"

enum { BLOCK = 64, MOST_AHEAD = 8192 };

/* What has been read, the group whose lines ahead are asked for next, and bytes that a vector of results adds to what has been read; 0: it is
 * near, and nothing is asked for. */
typedef struct {
    const char *read, *asked;
    int64_t share;
} group;
/* The windows of m rows of l results, of float32; to_next: bytes from row to row of what is read. */
typedef struct {
    const char *const *at;
    int64_t m, l, to_next;
    group next;
} rows;
typedef void (*tree)(const rows *r, int step, float *d);

/* Any function, dtypes and strides: n elements of d. */
static void any_tree(const run *r, const op *o, const char *const *at, const int64_t *stride, float *d, int n) {
    float lanes[NKI_LANES][BLOCK] __attribute__((aligned(64)));
    for (int64_t i = 0; i < n; i += BLOCK, d += BLOCK) {
        const int some = (int)(n - i < BLOCK ? n - i : BLOCK);
        for (int j = 0; j < o->count; j++) nki_types[r->k->tiles[o->tile + j].dtype].load(lanes[j], at[j] + i * stride[j], stride[j], some);
        for (int left = o->count, half = NKI_LANES / 2; half; half /= 2) {
            for (int j = half; j < left; j++) nki_functions2[o->fn].vv(j == 1 ? d : lanes[j - half], lanes[j - half], lanes[j], some);
            left = left < half ? left : half;
        }
    }
}

#if defined(__AVX512F__)
#include "wide.h"
#define ALWAYS static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")
enum { PLAIN_MAXIMUM = -1, PLAIN_MINIMUM = -2 };
ALWAYS __m512 join(int fn, __m512 a, __m512 b) {
    switch (fn) {
    case PLAIN_MAXIMUM: return _mm512_max_ps(a, b);
    case PLAIN_MINIMUM: return _mm512_min_ps(a, b);
    default: return nki_wide_two(fn, a, b);
    }
}

#define EVEN _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
#define ODD _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)

/* 16 elements, or `some` of them: side by side, or every second one, of which nothing is read behind the last. */
ALWAYS __m512 few(const float *p, int step, int some) {
    if (step == 1) return some == 16 ? _mm512_loadu_ps(p) : _mm512_maskz_loadu_ps((__mmask16)((1u << some) - 1), p);
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 17, 19, 21, 23, 25, 27, 29, 31);
    if (some == 16) return _mm512_permutex2var_ps(_mm512_loadu_ps(p), even, _mm512_loadu_ps(p + 15));
    const uint32_t wanted = (1u << (2 * some - 1)) - 1;
    return _mm512_permutex2var_ps(_mm512_maskz_loadu_ps((__mmask16)wanted, p), even, _mm512_maskz_loadu_ps((__mmask16)(wanted >> 15), p + 15));
}

/* The elements of 16 windows, whose rows of `width` elements lie side by side (1: they are anywhere); p: where such rows begin. What every
 * second element of a row shares with its neighbours is loaded once, as loads that cross cache lines are the dearest part. */
ALWAYS void windows(__m512 *v, int step, int count, int width, const char *const *p, int64_t skip) {
    UNROLL for (int j = 0; j < count; j++) {
        const float *row = (const float *)(const void *)(p[j / width] + skip);
        if (step == 2 && width > 1 && j % width == 0) {
            const __m512 low = _mm512_loadu_ps(row), high = _mm512_loadu_ps(row + 16);
            v[j] = _mm512_permutex2var_ps(low, EVEN, high);
            v[j + 1] = _mm512_permutex2var_ps(low, ODD, high);
        } else if (step == 2 && width > 1 && j % width == 2) {
            const __m512i last = _mm512_castps_si512(_mm512_set1_ps(row[32]));
            v[j] = _mm512_castsi512_ps(_mm512_alignr_epi32(last, _mm512_castps_si512(v[j - 2]), 1));
        } else if (step == 1 || width == 1 || j % width != 1) {
            v[j] = few(row + j % width, step, 16);
        }
    }
}

ALWAYS __m512 tree_of(int fn, int count, const __m512 *from) {
    __m512 v[NKI_LANES];
    UNROLL for (int j = 0; j < count; j++) v[j] = from[j];
    UNROLL for (int j = 16; j < count; j++) v[j - 16] = join(fn, v[j - 16], v[j]);
    UNROLL for (int j = 8; j < (count < 16 ? count : 16); j++) v[j - 8] = join(fn, v[j - 8], v[j]);
    UNROLL for (int j = 4; j < (count < 8 ? count : 8); j++) v[j - 4] = join(fn, v[j - 4], v[j]);
    UNROLL for (int j = 2; j < (count < 4 ? count : 4); j++) v[j - 2] = join(fn, v[j - 2], v[j]);
    return join(fn, v[0], v[1]);
}
/* Maxima and minima by single instructions, where nothing is NaN. */
ALWAYS __m512 best_of(int fn, int count, const __m512 *v) {
    if (fn != NKI_FN_MAXIMUM && fn != NKI_FN_MINIMUM) return tree_of(fn, count, v);
    __mmask16 numbers = 0xffff;
    UNROLL for (int j = 0; j < count; j += 2)
        numbers = _mm512_mask_cmp_ps_mask(numbers, v[j], v[j + 1 < count ? j + 1 : j], _CMP_ORD_Q);
    if (__builtin_expect(numbers != 0xffff, 0)) return tree_of(fn, count, v);
    return tree_of(fn == NKI_FN_MAXIMUM ? PLAIN_MAXIMUM : PLAIN_MINIMUM, count, v);
}
ALWAYS void trees_of(int fn, int step, int count, int width, const rows *r, float *d) {
    const int64_t n = r->l;
    const char *p[NKI_LANES];
    group next = r->next;
    __m512 v[NKI_LANES];
    UNROLL for (int j = 0; j < count; j += width) p[j / width] = r->at[j];
    for (int64_t row = 0; row < r->m; row++, d += n) {
        if (next.share) next.read = r->next.read + row * r->to_next;
        if (n < 16) {
            UNROLL for (int j = 0; j < count; j++) v[j] = few((const float *)(const void *)p[j / width] + j % width, step, (int)n);
            _mm512_mask_storeu_ps(d, (__mmask16)((1u << n) - 1), best_of(fn, count, v));
        }
        for (int64_t i = 0; i < n && n >= 16; i += 16) {
            if (i + 16 > n) i = n - 16; /* the last ones overlap */
            for (next.read += next.share; next.asked < next.read; next.asked += NKI_GROUP) nki_ask_group(next.asked);
            windows(v, step, count, width, p, i * step * 4);
            _mm512_storeu_ps(d + i, best_of(fn, count, v));
        }
        UNROLL for (int j = 0; j < count; j += width) p[j / width] += r->to_next;
    }
}

/* The windows that people use have code of their own. */
#define SQUARES(X, fn) X(fn, 4, 2) X(fn, 9, 3) X(fn, 16, 4) X(fn, 25, 5)
#define ROWS(X, fn) X(fn, 2, 1) X(fn, 3, 1) X(fn, 4, 1) X(fn, 5, 1) X(fn, 6, 1) X(fn, 7, 1) X(fn, 8, 1) X(fn, 9, 1) X(fn, 16, 1)
#define TREE(fn, count, width)                                                  \
    static void tree_##fn##_##count##_##width(const rows *r, int step, float *d) { \
        if (step == 1)                                                          \
            trees_of(NKI_FN_##fn, 1, count, width, r, d);                       \
        else                                                                    \
            trees_of(NKI_FN_##fn, 2, count, width, r, d);                       \
    }
#define EACH(X) SQUARES(X, ADD) SQUARES(X, MAXIMUM) SQUARES(X, MINIMUM) ROWS(X, ADD) ROWS(X, MULTIPLY) ROWS(X, MAXIMUM) ROWS(X, MINIMUM)
EACH(TREE)

static tree fast_tree(int fn, int count, const char *const *at) {
    static const struct {
        int fn, count, width;
        tree run;
    } all[] = {
#define ROW(fn, count, width) {NKI_FN_##fn, count, width, tree_##fn##_##count##_##width},
        EACH(ROW)
#undef ROW
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        if (all[i].fn != fn || all[i].count != count) continue;
        int fits = 1;
        for (int j = 0; j < count; j++) fits &= j % all[i].width == 0 || at[j] == at[j - 1] + 4;
        if (fits) return all[i].run;
    }
    return NULL;
}
#else
static tree fast_tree(int fn, int count, const char *const *at) {
    (void)fn, (void)count, (void)at;
    return NULL;
}
#endif

void nki_trees(const run *r, const op *o, const chunk *c) {
    const nki_tile *tiles = r->k->tiles + o->tile;
    const char *at[NKI_LANES];
    int64_t stride[NKI_LANES], to_next[NKI_LANES];
    int alike = 1, m = c->m, l = c->l;
    for (int j = 0; j < o->count; j++) {
        at[j] = nki_tile_at(r, c, o->tile + j);
        to_next[j] = nki_along(tiles[j].stride, r->dim_m);
        stride[j] = l == 1 ? to_next[j] : nki_along(tiles[j].stride, r->dim_l);
        alike &= tiles[j].dtype == NKI_F32 && stride[j] == stride[0] && to_next[j] == to_next[0];
    }
    if (l == 1) l = m, m = 1;
    const tree fast = alike && (stride[0] == 4 || stride[0] == 8) ? fast_tree(o->fn, o->count, at) : NULL;
    float *d = nki_lanes_at(r, c, o->d);
    if (fast) {
        /* What a step adds to what has been read: to the CPU the walk is no simple one. */
        const int64_t step = m > 1 ? to_next[0] : l * stride[0];
        const int64_t share = o->far_away && step > 0 && step <= MOST_AHEAD ? step / ((l + 15) / 16) : 0;
        const char *first = at[o->count - 1];
        const rows all = {at, m, l, to_next[0], {first, first + (-(intptr_t)first & (NKI_GROUP - 1)), share}};
        fast(&all, (int)(stride[0] / 4), d);
        return;
    }
    for (;; d += l) {
        any_tree(r, o, at, stride, d, l);
        if (!--m) return;
        for (int j = 0; j < o->count; j++) at[j] += to_next[j];
    }
}
