/* Matrix product of two tiles with operands of any float dtype and strides (nki.h).
 *
 * Every element of the result is summed by FMAs over k in one of the two orders of nki.h, so neither tiles, vector
 * widths nor threads change a bit. Operands are packed to float32 panels: the rows of one operand (a) to panels of MR columns that are
 * broadcast, those of the other (b) to one panel of vectors, which stays in the first-level cache while all of a
 * passes by. Product and sum are symmetric, so a narrow moving tile trades places with the stationary one.
 * Where the CPU multiplies tiles of bfloat16, tiles.c does that instead, with the same bits.
 */
#include "panels.h"
#include <string.h>

/* MR x NR vectors of accumulators in the micro-kernel; SMALL rows or fewer take WIDE vectors per row instead, as one
 * row of NR vectors would wait for its own sums. */
#if defined(__AVX512F__)
#include <immintrin.h>
typedef __m512 vec;
enum { LANES = 16, MR = NKI_PANEL, NR = 2, SMALL = 4, WIDE = 6 };
#define V_ZERO _mm512_setzero_ps()
#define V_LOAD(p) _mm512_loadu_ps((const void *)(p))
#define V_STORE(p, v) _mm512_storeu_ps((void *)(p), v)
#define V_ONE(x) _mm512_set1_ps(x)
#define V_BF16(p) \
    _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)(p))), 16))
#define V_FMA(a, b, c) _mm512_fmadd_ps(a, b, c)
#define V_ADD(a, b) _mm512_add_ps(a, b)
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
typedef __m256 vec;
enum { LANES = 8, MR = NKI_PANEL, NR = 2, SMALL = 2, WIDE = 6 };
#define V_ZERO _mm256_setzero_ps()
#define V_LOAD(p) _mm256_loadu_ps((const float *)(const void *)(p))
#define V_STORE(p, v) _mm256_storeu_ps((float *)(void *)(p), v)
#define V_ONE(x) _mm256_set1_ps(x)
#define V_BF16(p) \
    _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)(p))), 16))
#define V_FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#define V_ADD(a, b) _mm256_add_ps(a, b)
#elif defined(__aarch64__)
#include <arm_neon.h>
typedef float32x4_t vec;
enum { LANES = 4, MR = NKI_PANEL, NR = 2, SMALL = 4, WIDE = 6 };
#define V_ZERO vdupq_n_f32(0.0f)
#define V_LOAD(p) vreinterpretq_f32_u8(vld1q_u8((const uint8_t *)(p)))
#define V_STORE(p, v) vst1q_u8((uint8_t *)(p), vreinterpretq_u8_f32(v))
#define V_ONE(x) vdupq_n_f32(x)
#define V_BF16(p) vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8((const uint8_t *)(p))), 16))
#define V_FMA(a, b, c) vfmaq_f32(c, a, b)
#define V_ADD(a, b) vaddq_f32(a, b)
#else
/* No FMA in the instruction set: the product is exact in double, and the sum is rounded to odd there (the error of the
 * sum says which way), after which rounding to float32 equals rounding once. */
typedef struct {
    float x[4];
} vec;
enum { LANES = 4, MR = NKI_PANEL, NR = 2, SMALL = 1, WIDE = 4 };

static inline float fma_exact(float a, float b, float c)
{
    double p = (double)a * b, s = p + c, t = s - p, error = (p - (s - t)) + (c - t);
    int64_t bits;
    memcpy(&bits, &s, 8);
    int64_t away = ((error > 0.0) == (s > 0.0)) ? 1 : -1;
    bits += (error > 0.0 || error < 0.0) && !(bits & 1) ? away : 0;
    memcpy(&s, &bits, 8);
    return (float)s;
}
static inline vec V_LOAD(const void *p)
{
    vec v;
    memcpy(&v, p, sizeof v);
    return v;
}
static inline void V_STORE(void *p, vec v) { memcpy(p, &v, sizeof v); }
static inline vec V_ONE(float x) { return (vec){{x, x, x, x}}; }
#define V_ZERO V_ONE(0.0f)
static inline vec V_BF16(const void *p)
{
    uint16_t half[LANES];
    uint32_t full[LANES];
    memcpy(half, p, sizeof half);
    for (int i = 0; i < LANES; i++) full[i] = (uint32_t)half[i] << 16;
    return V_LOAD(full);
}
static inline vec V_FMA(vec a, vec b, vec c)
{
    for (int i = 0; i < LANES; i++) c.x[i] = fma_exact(a.x[i], b.x[i], c.x[i]);
    return c;
}
static inline vec V_ADD(vec a, vec b)
{
    for (int i = 0; i < LANES; i++) a.x[i] += b.x[i];
    return a;
}
#endif

_Static_assert(NR * LANES == NKI_PANEL_OF_VECTORS, "a panel that packing has a form for");
enum { ROWS = NKI_PANELS_AT_ONCE / MR * MR }; /* rows of `a` that are packed at a time: 240 KiB at K = 128, in the second cache */

typedef float f32_any __attribute__((aligned(1), may_alias));

/* ---- micro-kernel ------------------------------------------------------------------------------------------- */

/* Results in memory: bytes from row to row, and from column to column. */
typedef struct {
    char *at;
    int64_t row, col;
} place;

typedef struct {
    int K, cols;            /* cols: columns that are stored */
    int adds;               /* enum nki_adds; to the result: to what is at `from` */
    const char *a, *b;      /* floats to broadcast, and vectors */
    int64_t a_step, b_step; /* bytes from k to k + 1 */
    float *panel;           /* where the first kernel of a panel leaves what it read */
    place from, d;
} block;

#define UNROLL _Pragma("GCC unroll 12")

/* What a kernel reads as b. The FIRST ones read the source and pack it by the way: loads and stores cost nothing
 * next to the FMAs, while a separate pass over b would wait for the second-level cache. */
enum source { PANEL, FIRST_F32, FIRST_BF16 };

/* Rows of a block to the result. */
static inline __attribute__((always_inline)) void finish(const block *t, const int mr, const int nr, vec acc[][WIDE])
{
    const int adds = t->adds;
    if (t->d.col == 4 && t->cols == nr * LANES && (adds != NKI_ADDS_TO_RESULT || t->from.col == 4)) {
        UNROLL for (int i = 0; i < mr; i++) {
            char *d = t->d.at + i * t->d.row;
            const char *from = t->from.at + i * t->from.row;
            UNROLL for (int j = 0; j < nr; j++) {
                vec r = acc[i][j];
                if (adds) r = V_ADD(adds == NKI_ADDS_TO_ZERO ? V_ZERO : V_LOAD(from + j * LANES * 4), r);
                V_STORE(d + j * LANES * 4, r);
            }
        }
        return;
    }
    float out[MR * WIDE * LANES];
    UNROLL for (int i = 0; i < mr; i++)
        UNROLL for (int j = 0; j < nr; j++) V_STORE((char *)(out + (i * nr + j) * LANES), acc[i][j]);
    for (int i = 0; i < mr; i++)
        for (int c = 0; c < t->cols; c++) {
            float r = out[i * nr * LANES + c];
            if (adds) r = (adds == NKI_ADDS_TO_ZERO ? 0.0f : *(const f32_any *)(t->from.at + i * t->from.row + c * t->from.col)) + r;
            *(f32_any *)(t->d.at + i * t->d.row + c * t->d.col) = r;
        }
}

/* One k: a row of b, and what is broadcast of a. */
static inline __attribute__((always_inline)) void step(const char *a, const char *b, float *panel, const int mr, const int nr,
                                                       const enum source from, vec acc[][WIDE])
{
    vec v[WIDE];
    UNROLL for (int j = 0; j < nr; j++) {
        v[j] = from == FIRST_BF16 ? V_BF16(b + j * LANES * 2) : V_LOAD(b + j * LANES * 4);
        if (from != PANEL) V_STORE(panel + j * LANES, v[j]);
    }
    if (from != PANEL) { /* the columns of the next panel, as rows that are far apart defeat the CPU's own prefetch */
        const int size = from == FIRST_BF16 ? 2 : 4;
        UNROLL for (int j = 0; j < nr * LANES * size; j += 64) __builtin_prefetch(b + nr * LANES * size + j, 0, 2);
    }
    UNROLL for (int i = 0; i < mr; i++) {
        vec s = V_ONE(((const f32_any *)a)[i]);
        UNROLL for (int j = 0; j < nr; j++) acc[i][j] = V_FMA(s, v[j], acc[i][j]);
    }
}

static inline __attribute__((always_inline)) void multiply(const block *t, const int mr, const int nr, const enum source from)
{
    vec acc[MR][WIDE];
    const char *a = t->a, *b = t->b;
    float *panel = t->panel;
    UNROLL for (int i = 0; i < mr; i++)
        UNROLL for (int j = 0; j < nr; j++) acc[i][j] = V_ZERO;
    for (int k = t->K; k > 0; k--, a += t->a_step, b += t->b_step, panel += nr * LANES) step(a, b, panel, mr, nr, from, acc);
    finish(t, mr, nr, acc);
}

/* The order of pairs (nki.h): the even and the odd k of 32 have a chain each, whose sum is added to the total. One chain after the other has
 * the registers, as both together would take those of half the rows. */
static inline __attribute__((always_inline)) void multiply_pairs(const block *t, const int mr, const int nr, const enum source from)
{
    vec even[MR][WIDE], total[MR][WIDE], acc[MR][WIDE];
    const char *a = t->a, *b = t->b;
    const int64_t next = t->K * t->a_step; /* to the rows that come after these */
    float *panel = t->panel;
    for (int left = t->K; left > 0; left -= NKI_PAIRS) {
        const int some = left < NKI_PAIRS ? left : NKI_PAIRS;
        for (int odd = 0; odd < 2; odd++) {
            UNROLL for (int i = 0; i < mr; i++)
                UNROLL for (int j = 0; j < nr; j++) acc[i][j] = V_ZERO;
            const char *ak = a + odd * t->a_step, *bk = b + odd * t->b_step;
            float *pk = panel + odd * nr * LANES;
            for (int k = odd; k < some; k += 2, ak += 2 * t->a_step, bk += 2 * t->b_step, pk += 2 * nr * LANES) {
                __builtin_prefetch(ak + next, 0, 3);
                step(ak, bk, pk, mr, nr, from, acc);
            }
            if (odd) break;
            UNROLL for (int i = 0; i < mr; i++)
                UNROLL for (int j = 0; j < nr; j++) even[i][j] = acc[i][j];
        }
        const int first = left == t->K;
        UNROLL for (int i = 0; i < mr; i++)
            UNROLL for (int j = 0; j < nr; j++)
                total[i][j] = V_ADD(first ? V_ZERO : total[i][j], V_ADD(even[i][j], acc[i][j]));
        a += NKI_PAIRS * t->a_step, b += NKI_PAIRS * t->b_step, panel += NKI_PAIRS * nr * LANES;
    }
    if (t->K <= 0)
        UNROLL for (int i = 0; i < mr; i++)
            UNROLL for (int j = 0; j < nr; j++) total[i][j] = V_ZERO;
    finish(t, mr, nr, total);
}

#define KERNEL(mr) \
    static void one_##mr(const block *t) { multiply(t, mr, 1, PANEL); } \
    static void some_##mr(const block *t) { multiply(t, mr, NR, PANEL); } \
    static void one_pairs_##mr(const block *t) { multiply_pairs(t, mr, 1, PANEL); } \
    static void some_pairs_##mr(const block *t) { multiply_pairs(t, mr, NR, PANEL); }
#define KERNEL_WIDE(mr) \
    static void wide_##mr(const block *t) { multiply(t, mr <= SMALL ? mr : SMALL, WIDE, PANEL); } \
    static void wide_pairs_##mr(const block *t) { multiply_pairs(t, mr <= SMALL ? mr : SMALL, WIDE, PANEL); }
KERNEL(1) KERNEL(2) KERNEL(3) KERNEL(4)
KERNEL_WIDE(1) KERNEL_WIDE(2) KERNEL_WIDE(3) KERNEL_WIDE(4)
typedef void (*kernel_fn)(const block *);
static void first_f32(const block *t) { multiply(t, MR, NR, FIRST_F32); }
static void first_bf16(const block *t) { multiply(t, MR, NR, FIRST_BF16); }
static void first_pairs(const block *t) { multiply_pairs(t, MR, NR, FIRST_BF16); }
static const kernel_fn firsts[2][NKI_DTYPES] = {{[NKI_F32] = first_f32, [NKI_TF32] = first_f32, [NKI_BF16] = first_bf16},
                                                {[NKI_BF16] = first_pairs}};
#define FOUR(name) name##_1, name##_2, name##_3, name##_4
#define SIX(name) FOUR(name), name##_5, name##_6
#if defined(__AVX512F__) || defined(__aarch64__)
KERNEL(5) KERNEL(6) KERNEL(7) KERNEL(8) KERNEL(9) KERNEL(10) KERNEL(11) KERNEL(12)
#define ALL(name) SIX(name), name##_7, name##_8, name##_9, name##_10, name##_11, name##_12
#elif defined(__AVX2__) && defined(__FMA__)
KERNEL(5) KERNEL(6)
#define ALL(name) SIX(name)
#else
#define ALL(name) FOUR(name)
#endif
/* By rows; the second of each in the order of pairs. */
static const kernel_fn wide[2][5] = {{0, FOUR(wide)}, {0, FOUR(wide_pairs)}};
static const kernel_fn one[2][MR + 1] = {{0, ALL(one)}, {0, ALL(one_pairs)}};
static const kernel_fn some[2][MR + 1] = {{0, ALL(some)}, {0, ALL(some_pairs)}};

typedef struct {
    int dtype, n;
    const int64_t *stride;
    const char *at;
} operand;

static int swaps(const nki_mm *k) { return k->N < LANES && k->M > k->N; }
static size_t padded(size_t bytes) { return (bytes + 63) & ~(size_t)63; }
static size_t bytes_of_a(int K, int rows)
{
    int most = rows < ROWS ? rows : ROWS;
    return padded((size_t)K * MR * 4 * (size_t)((most + MR - 1) / MR));
}

/* Whether `a` is read where it lies: not if its rows, far apart, would push each other out of the caches again and
 * again, for each panel of b. */
static int reads_in_place(const operand *a, const operand *b)
{
    int near = (a->stride[0] >= -2048 && a->stride[0] <= 2048) || b->n <= NR * LANES;
    return (a->dtype == NKI_F32 || a->dtype == NKI_TF32) && a->stride[1] == 4 && near;
}

int nki_in_pairs(const nki_mm *k)
{
    static const char narrow[NKI_DTYPES] = {[NKI_BF16] = 1, [NKI_F8E4M3] = 1, [NKI_F8E4M3FN] = 1, [NKI_F8E5M2] = 1};
    return narrow[k->s_dtype] && narrow[k->m_dtype];
}

/* ---- operands that are kept: all panels of a block, then those of the next ---------------------------------- */

static size_t kept_block(const nki_mm *k, int moving)
{
    const int width = moving ? NKI_PANEL_OF_VECTORS : MR, n = moving ? k->N : k->M;
    return padded((size_t)k->K * (size_t)((n + width - 1) / width * width) * 4);
}

static int by_tiles(const nki_mm *k) { return nki_in_pairs(k) && nki_tiles_there(k); }

/* Behind the panels of what is read as vectors: whether it is finite, so that zeros of the other operand add nothing. */
static int32_t *finite_of(const nki_mm *k, const void *kept)
{
    return (int32_t *)(void *)((char *)(uintptr_t)kept + kept_block(k, 1) * (size_t)nki_blocks(k));
}
size_t nki_mm_kept(const nki_mm *k, int moving)
{
    if (by_tiles(k)) return nki_tiles_kept(k, moving);
    if (k->N < NKI_PANEL_OF_VECTORS || k->M < MR || k->K < 8) return 0; /* packing is no longer than the product */
    return kept_block(k, moving) * (size_t)nki_blocks(k) + 64;
}

void nki_mm_keep(const nki_mm *k, int moving, const char *at, void *kept)
{
    if (by_tiles(k)) {
        nki_tiles_keep(k, moving, at, kept);
        return;
    }
    const int width = moving ? NKI_PANEL_OF_VECTORS : MR, n = moving ? k->N : k->M;
    char *to = kept;
    int finite = 1;
    for (int i = 0; i < nki_blocks(k); i++, at += moving ? k->m_block : k->s_block, to += kept_block(k, moving)) {
        for (int c = 0; c < n; c += ROWS) { /* so many fit the buffers of packing; a whole number of panels of either kind */
            const char *part = at + c * (moving ? k->m_stride : k->s_stride)[1];
            float *panels = (float *)(void *)to + (size_t)c * (size_t)k->K;
            nki_panels[moving ? k->m_dtype : k->s_dtype](part, moving ? k->m_stride : k->s_stride, k->K, n - c < ROWS ? n - c : ROWS, width, panels);
        }
        if (moving && nki_in_pairs(k)) finite &= nki_panels_finite((const float *)(const void *)to, (size_t)k->K * (size_t)((n + width - 1) / width * width));
    }
    if (moving) *finite_of(k, kept) = finite;
}

/* ---- the product ------------------------------------------------------------------------------------------- */

/* Blocks are added up for one panel of columns after the other, in `sum`, which stays in the first cache; of `a`, so many of them are
 * packed at a time. */
enum { PACKED = 512 << 10 };
static int group_of(const nki_mm *k, int rows)
{
    const size_t each = bytes_of_a(k->K, rows);
    const int some = each ? (int)(PACKED / each) : 1, all = nki_blocks(k);
    return some < 1 ? 1 : some < all ? some : all;
}

static size_t bytes_of_sum(const nki_mm *k, int rows)
{
    const int most = rows < ROWS ? rows : ROWS;
    return nki_blocks(k) > 1 ? padded((size_t)(most + MR) * (rows <= SMALL ? WIDE : NR) * LANES * 4) : 0;
}

size_t nki_mm_scratch(const nki_mm *k)
{
    int rows = swaps(k) ? k->N : k->M;
    size_t bytes = bytes_of_a(k->K, rows) * (size_t)group_of(k, rows) + bytes_of_sum(k, rows) +
                   padded((size_t)k->K * (rows <= SMALL ? WIDE : NR) * LANES * 4);
    if (nki_in_pairs(k)) { /* also for what is left of a product that the tile unit cannot end */
        size_t tiles = nki_tiles_scratch(k);
        bytes += padded((size_t)k->K * (MR + WIDE * LANES) * 4) + (nki_blocks(k) > 1 ? padded((MR + MR) * WIDE * LANES * 4) : 0);
        bytes = bytes > tiles ? bytes : tiles;
    }
    return bytes;
}

void nki_mm_run(const nki_mm *k, const char *stationary, const char *moving, char *dst, void *scratch)
{
    nki_mm_kept_run(k, stationary, moving, dst, scratch, NULL, NULL);
}

static void vectors(const nki_mm *k, const char *stationary, const char *moving, char *dst, void *scratch, const char *kept_s,
                    const char *kept_m, const int64_t *where);

void nki_mm_kept_run(const nki_mm *k, const char *stationary, const char *moving, char *dst, void *scratch, const void *kept_s,
                     const void *kept_m)
{
    nki_mm_where_run(k, stationary, moving, dst, scratch, kept_s, kept_m, NULL);
}

void nki_mm_where_run(const nki_mm *k, const char *stationary, const char *moving, char *dst, void *scratch, const void *kept_s,
                      const void *kept_m, const int64_t *where)
{
    if (by_tiles(k))
        nki_tiles_run(k, stationary, moving, dst, scratch, kept_s, kept_m, where);
    else
        vectors(k, stationary, moving, dst, scratch, kept_s, kept_m, where);
}

void nki_mm_vectors(const nki_mm *k, const char *stationary, const char *moving, char *dst, void *scratch)
{
    vectors(k, stationary, moving, dst, scratch, NULL, NULL, NULL);
}

/* The operands as the kernels take them: `a` is broadcast, `b` read as vectors. kept: their packed panels, NULL where they are packed as
 * they come; then `first` does that by the way. */
typedef struct {
    operand a, b;
    int64_t a_block, b_block; /* bytes from block to block */
    const char *kept_a, *kept_b;
    int64_t kept_a_block, kept_b_block;
    int a_stays, b_stays, in_pairs, skips; /* skips: zeros of a are left out */
    kernel_fn first;
    float *packed, *panel, *sum;
    size_t packed_block;
    const int64_t *where;
} product;

/* Rows m0 .. m0 + rows of `blocks` blocks from number `start` on, and the columns of one panel. */
static void panel_of(const nki_mm *k, const product *p, int start, int blocks, int m0, int rows, int n0, int vectors, place d)
{
    const int width = vectors * LANES, left = p->b.n - n0;
    const place sum = {(char *)p->sum, width * 4, 4};
    block t = {.K = k->K, .panel = p->panel, .cols = left < width ? left : width};
    const kernel_fn *kernels = vectors == 1 ? one[p->in_pairs] : vectors == NR ? some[p->in_pairs] : wide[p->in_pairs];
    kernel_fn leader = vectors == NR && t.cols == width && rows >= MR && !p->b_stays && !p->kept_b ? p->first : NULL;
    for (int i = 0; i < blocks; i++) {
        const int64_t number = start + i;
        const int last = i == blocks - 1;
        const char *a = p->kept_a ? p->kept_a + number * p->kept_a_block + (size_t)m0 * (size_t)k->K * 4
                        : p->a_stays ? p->a.at + number * p->a_block + m0 * 4 : (const char *)p->packed + (size_t)i * p->packed_block;
        const int64_t next = p->a_stays && !p->kept_a ? 4 : (int64_t)k->K * 4; /* bytes from row to row */
        t.a_step = p->a_stays && !p->kept_a ? p->a.stride[0] : MR * 4;
        t.b = p->b.at + number * p->b_block + n0 * p->b.stride[1];
        t.b_step = p->b.stride[0];
        if (p->kept_b) {
            t.b = p->kept_b + number * p->kept_b_block + (size_t)n0 * (size_t)k->K * 4;
            t.b_step = NKI_PANEL_OF_VECTORS * 4;
        } else if (!leader && !(p->b_stays && t.cols == width)) {
            nki_panels[p->b.dtype](t.b, p->b.stride, k->K, t.cols, width, p->panel);
            t.b = (const char *)p->panel;
            t.b_step = width * 4;
        }
        t.adds = i ? NKI_ADDS_TO_RESULT : nki_adds_then(k, start);
        const place from = i ? sum : d, to = last ? d : sum;
        const char *ahead = NULL; /* the panel after this one, which the kernels have time to ask for */
        if (p->kept_b && !last) ahead = t.b + p->kept_b_block;
        if (p->kept_b && last && left > width) ahead = p->kept_b + start * p->kept_b_block + (size_t)(n0 + width) * (size_t)k->K * 4;
        const int64_t share = ((int64_t)k->K * NKI_PANEL_OF_VECTORS * 4 / ((rows + MR - 1) / MR) + 63) & ~(int64_t)63;
        for (int m = 0; m < rows; m += MR) {
            for (int64_t j = 0; ahead && j < share; j += 64) __builtin_prefetch(ahead + j, 0, 2);
            if (ahead) ahead += share;
            if (!(m == 0 && leader) && nki_unwanted(k, p->where, m0 + m, rows - m < MR ? rows - m : MR, n0, t.cols)) continue;
            t.a = a + m * next;
            t.K = p->skips ? nki_panel_depth(t.a, k->K) : k->K;
            t.from = (place){from.at + m * from.row, from.row, from.col};
            t.d = (place){to.at + m * to.row, to.row, to.col};
            if (m == 0 && leader) {
                leader(&t);
                t.b = (const char *)p->panel;
                t.b_step = width * 4;
            } else {
                kernels[rows - m < MR ? rows - m : MR](&t);
            }
        }
    }
}

static void vectors(const nki_mm *k, const char *stationary, const char *moving, char *dst, void *scratch, const char *kept_s,
                    const char *kept_m, const int64_t *where)
{
    product p = {
        .a = {k->s_dtype, k->M, k->s_stride, stationary}, .b = {k->m_dtype, k->N, k->m_stride, moving},
        .a_block = k->s_block, .b_block = k->m_block, .kept_a = kept_s, .kept_b = kept_m,
        .kept_a_block = (int64_t)kept_block(k, 0), .kept_b_block = (int64_t)kept_block(k, 1), .in_pairs = nki_in_pairs(k),
        .where = swaps(k) ? NULL : where,
    };
    place d = {dst, k->d_stride[0], k->d_stride[1]};
    if (swaps(k)) { /* nothing is kept of these */
        const operand other = p.a;
        p.a = p.b, p.b = other;
        p.a_block = k->m_block, p.b_block = k->s_block;
        d.row = k->d_stride[1], d.col = k->d_stride[0];
    }
    const int a_n = p.a.n, group = group_of(k, a_n), element = p.b.dtype == NKI_BF16 ? 2 : 4;
    p.packed = scratch;
    p.packed_block = bytes_of_a(k->K, a_n);
    p.panel = (float *)(void *)((char *)scratch + p.packed_block * (size_t)group);
    p.sum = p.panel + padded((size_t)k->K * (a_n <= SMALL ? WIDE : NR) * LANES * 4) / 4;
    p.a_stays = reads_in_place(&p.a, &p.b);
    p.b_stays = element == 4 && firsts[0][p.b.dtype] && p.b.stride[1] == 4 && a_n <= MR;
    p.skips = p.in_pairs && !p.kept_a && kept_m && *finite_of(k, kept_m);
    p.first = p.b.stride[1] == element ? firsts[p.in_pairs][p.b.dtype] : NULL;
    for (int start = 0; start < nki_blocks(k); start += group) {
        const int blocks = nki_blocks(k) - start < group ? nki_blocks(k) - start : group;
        for (int m0 = 0; m0 < a_n; m0 += ROWS) {
            const int rows = a_n - m0 < ROWS ? a_n - m0 : ROWS;
            if (!p.a_stays && !p.kept_a)
                for (int i = 0; i < blocks; i++)
                    nki_panels[p.a.dtype](p.a.at + (start + i) * p.a_block + m0 * p.a.stride[1], p.a.stride, k->K, rows, MR,
                                     (float *)(void *)((char *)p.packed + (size_t)i * p.packed_block));
            int vectors;
            for (int n0 = 0; n0 < p.b.n; n0 += vectors * LANES) {
                const int left = p.b.n - n0;
                vectors = a_n <= SMALL && left >= WIDE * LANES ? WIDE : left > LANES || p.kept_b ? NR : 1;
                panel_of(k, &p, start, blocks, m0, rows, n0, vectors, (place){d.at + m0 * d.row + n0 * d.col, d.row, d.col});
            }
        }
    }
}
