/* Matrix product of two tiles with operands of any float dtype and strides (nki.h).
 *
 * Every element of the result is summed by FMAs over k in one of the two orders of nki.h, so neither tiles, vector
 * widths nor threads change a bit. Operands are packed to float32 panels: the rows of one operand (a) to panels of MR columns that are
 * broadcast, those of the other (b) to one panel of vectors, which stays in the first-level cache while all of a
 * passes by. Product and sum are symmetric, so a narrow moving tile trades places with the stationary one.
 * Where the CPU multiplies tiles of bfloat16, tiles.c does that instead, with the same bits.
 */
#include "nki.h"
#include <string.h>

/* MR x NR vectors of accumulators in the micro-kernel; SMALL rows or fewer take WIDE vectors per row instead, as one
 * row of NR vectors would wait for its own sums. */
#if defined(__AVX512F__)
#include <immintrin.h>
typedef __m512 vec;
enum { LANES = 16, MR = 12, NR = 2, SMALL = 4, WIDE = 6 };
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
enum { LANES = 8, MR = 6, NR = 2, SMALL = 2, WIDE = 6 };
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
enum { LANES = 4, MR = 12, NR = 2, SMALL = 4, WIDE = 6 };
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
enum { LANES = 4, MR = 4, NR = 2, SMALL = 1, WIDE = 4 };

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

enum { ROWS = MR * (480 / MR) }; /* rows of `a` that are packed at a time: 240 KiB at K = 128, in the second cache */

/* ---- packing ------------------------------------------------------------------------------------------------ */

typedef float f32_any __attribute__((aligned(1), may_alias));
typedef uint16_t u16_any __attribute__((aligned(1), may_alias));

static inline float from_bits(uint32_t u)
{
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static inline float widen_bf16(uint16_t x) { return from_bits((uint32_t)x << 16); }

/* A narrow IEEE-like float of `mant` mantissa bits and an exponent of bias `bias`; magnitudes from `special` on are
 * NaN but for `inf`. Subnormals go through an integer, as float32 subnormals would cost an assist each. */
static inline float widen(uint32_t mag, uint32_t sign, int mant, int bias, uint32_t special, uint32_t inf)
{
    uint32_t normal = (mag << (23 - mant)) + ((uint32_t)(127 - bias) << 23);
    float small = (float)(int32_t)mag * from_bits((uint32_t)(127 + 1 - bias - mant) << 23);
    uint32_t low;
    memcpy(&low, &small, 4);
    /* masks, not branches: the loops are to become vectors */
    uint32_t tiny = -(uint32_t)(mag < (1u << mant)), odd = -(uint32_t)(mag >= special), nan = -(uint32_t)(mag != inf);
    uint32_t u = (low & tiny) | (normal & ~tiny);
    u = (u & ~odd) | ((0x7f800000u | (0x00400000u & nan)) & odd);
    return from_bits(u | sign << 31);
}
static inline float widen_f16(uint16_t x) { return widen(x & 0x7fffu, x >> 15, 10, 15, 0x7c00, 0x7c00); }
static inline float widen_e4m3(uint8_t x) { return widen(x & 0x7fu, x >> 7, 3, 7, 0x78, 0x78); }
static inline float widen_e4m3fn(uint8_t x) { return widen(x & 0x7fu, x >> 7, 3, 7, 0x7f, ~0u); }
static inline float widen_e5m2(uint8_t x) { return widen(x & 0x7fu, x >> 7, 2, 15, 0x7c, 0x7c); }
static inline float widen_f32(float x) { return x; }

/* One row to its places in the panels; the source is read as it lies. */
static inline __attribute__((always_inline)) void deal_blocks(const char *row, int K, int cols, int width, float *at)
{
    int c = 0;
    for (; c + width <= cols; c += width, at += (int64_t)K * width) memcpy(at, row + c * 4, (size_t)width * 4);
    for (int i = 0; c < cols && i < width; i++) { /* not memcpy: the call would cost more than the few elements */
        if (c + i < cols)
            memcpy(at + i, row + (c + i) * 4, 4);
        else
            at[i] = 0.0f;
    }
}
static inline void deal(const void *row, int K, int cols, int width, float *at)
{
    if (width == MR)
        deal_blocks(row, K, cols, MR, at);
    else
        deal_blocks(row, K, cols, width, at);
}
static void pack_rows_f32(const char *src, int64_t step, int K, int cols, int width, float *dst)
{
    for (int k = 0; k < K; k++, src += step, dst += width) deal(src, K, cols, width, dst);
}

/* K rows of `cols` elements to panels of `width` floats for each k, zeros behind the last column. */
#define PACK_ROWS(name, type)                                                                                       \
    static void pack_rows_##name(const char *src, int64_t step, int K, int cols, int width, float *dst)             \
    {                                                                                                               \
        float wide_row[ROWS];                                                                                       \
        for (int k = 0; k < K; k++, src += step, dst += width) {                                                    \
            for (int c = 0; c < cols; c++) wide_row[c] = widen_##name(((const type *)src)[c]);                      \
            deal(wide_row, K, cols, width, dst);                                                                    \
        }                                                                                                           \
    }
#define PACK(name, type)                                                                                            \
    static void pack_##name(const char *src, const int64_t *stride, int K, int cols, int width, float *dst)         \
    {                                                                                                               \
        if (stride[1] == sizeof(type)) return pack_rows_##name(src, stride[0], K, cols, width, dst);                \
        for (int c0 = 0; c0 < cols; c0 += width, dst += (int64_t)K * width)                                         \
            for (int k = 0; k < K; k++) {                                                                           \
                const char *row = src + k * stride[0] + c0 * stride[1];                                             \
                float *at = dst + (int64_t)k * width;                                                               \
                int n = cols - c0 < width ? cols - c0 : width;                                                      \
                for (int c = 0; c < n; c++) at[c] = widen_##name(*(const type *)(row + c * stride[1]));             \
                for (int c = n; c < width; c++) at[c] = 0.0f;                                                       \
            }                                                                                                       \
    }
PACK_ROWS(bf16, u16_any)
PACK_ROWS(f16, u16_any)
PACK_ROWS(e4m3, uint8_t)
PACK_ROWS(e4m3fn, uint8_t)
PACK_ROWS(e5m2, uint8_t)
PACK(f32, f32_any)
PACK(bf16, u16_any)
PACK(f16, u16_any)
PACK(e4m3, uint8_t)
PACK(e4m3fn, uint8_t)
PACK(e5m2, uint8_t)

typedef void (*pack_fn)(const char *, const int64_t *, int, int, int, float *);
static const pack_fn packs[NKI_DTYPES] = {
    [NKI_F32] = pack_f32, [NKI_BF16] = pack_bf16, [NKI_F16] = pack_f16, [NKI_F8E4M3] = pack_e4m3,
    [NKI_F8E4M3FN] = pack_e4m3fn, [NKI_F8E5M2] = pack_e5m2, [NKI_TF32] = pack_f32,
};

/* ---- micro-kernel ------------------------------------------------------------------------------------------- */

typedef struct {
    int K, cols, accumulate; /* cols: columns that are stored */
    const char *a, *b;       /* floats to broadcast, and vectors */
    int64_t a_step, b_step;  /* bytes from k to k + 1 */
    float *panel;            /* where the first kernel of a panel leaves what it read */
    char *d;
    int64_t row, col;
} block;

#define UNROLL _Pragma("GCC unroll 12")

/* What a kernel reads as b. The FIRST ones read the source and pack it by the way: loads and stores cost nothing
 * next to the FMAs, while a separate pass over b would wait for the second-level cache. */
enum source { PANEL, FIRST_F32, FIRST_BF16 };

/* Rows i0 .. i0 + mr of a block to the result. */
static inline __attribute__((always_inline)) void finish(const block *t, const int i0, const int mr, const int nr, vec acc[][WIDE])
{
    if (t->col == 4 && t->cols == nr * LANES) {
        UNROLL for (int i = 0; i < mr; i++) {
            char *d = t->d + (i0 + i) * t->row;
            UNROLL for (int j = 0; j < nr; j++) {
                vec r = acc[i][j];
                if (t->accumulate) r = V_ADD(t->accumulate == NKI_ADDS_TO_ZERO ? V_ZERO : V_LOAD(d + j * LANES * 4), r);
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
            f32_any *d = (f32_any *)(t->d + (i0 + i) * t->row + c * t->col);
            float r = out[i * nr * LANES + c];
            *d = t->accumulate == NKI_ADDS_TO_RESULT ? *d + r : t->accumulate ? 0.0f + r : r;
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
    finish(t, 0, mr, nr, acc);
}

/* The order of pairs (nki.h): the even and the odd k of 32 have a chain each, whose sum is added to the total. */
static inline __attribute__((always_inline)) void pairs_of(const block *t, const int i0, const int mr, const int nr,
                                                           const enum source from)
{
    vec even[MR / 2][WIDE], odd[MR / 2][WIDE], total[MR / 2][WIDE];
    const int in_panel = from == PANEL || i0 > 0;
    const char *a = t->a + i0 * 4, *b = in_panel && from != PANEL ? (const char *)t->panel : t->b;
    const int64_t b_step = in_panel && from != PANEL ? nr * LANES * 4 : t->b_step;
    float *panel = t->panel;
    UNROLL for (int i = 0; i < mr; i++)
        UNROLL for (int j = 0; j < nr; j++) total[i][j] = V_ZERO;
    for (int left = t->K; left > 0; left -= NKI_PAIRS) {
        UNROLL for (int i = 0; i < mr; i++)
            UNROLL for (int j = 0; j < nr; j++) even[i][j] = odd[i][j] = V_ZERO;
        for (int k = left < NKI_PAIRS ? left : NKI_PAIRS; k > 0; k -= 2) {
            step(a, b, panel, mr, nr, in_panel ? PANEL : from, even);
            a += t->a_step, b += b_step, panel += nr * LANES;
            if (k == 1) break;
            step(a, b, panel, mr, nr, in_panel ? PANEL : from, odd);
            a += t->a_step, b += b_step, panel += nr * LANES;
        }
        UNROLL for (int i = 0; i < mr; i++)
            UNROLL for (int j = 0; j < nr; j++) total[i][j] = V_ADD(total[i][j], V_ADD(even[i][j], odd[i][j]));
    }
    finish(t, i0, mr, nr, total);
}
/* The two chains take the registers of twice the rows. */
static inline __attribute__((always_inline)) void multiply_pairs(const block *t, const int mr, const int nr, const enum source from)
{
    const int most = nr > NR ? (SMALL + 1) / 2 : MR / 2;
    pairs_of(t, 0, mr < most ? mr : most, nr, from);
    if (mr > most) pairs_of(t, most, mr - most, nr, from);
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

/* ---- the product ------------------------------------------------------------------------------------------- */

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

size_t nki_mm_scratch(const nki_mm *k)
{
    int rows = swaps(k) ? k->N : k->M;
    size_t bytes = bytes_of_a(k->K, rows) + padded((size_t)k->K * (rows <= SMALL ? WIDE : NR) * LANES * 4);
    if (nki_in_pairs(k)) { /* also for what is left of a product that the tile unit cannot end */
        size_t tiles = nki_tiles_scratch(k);
        bytes += padded((size_t)k->K * (MR + WIDE * LANES) * 4);
        bytes = bytes > tiles ? bytes : tiles;
    }
    return bytes;
}

int nki_in_pairs(const nki_mm *k)
{
    static const char narrow[NKI_DTYPES] = {[NKI_BF16] = 1, [NKI_F8E4M3] = 1, [NKI_F8E4M3FN] = 1, [NKI_F8E5M2] = 1};
    return narrow[k->s_dtype] && narrow[k->m_dtype];
}

void nki_mm_run(const nki_mm *k, const char *stationary, const char *moving, char *dst, void *scratch)
{
    nki_mm_kept_run(k, stationary, moving, dst, scratch, NULL, NULL);
}

void nki_mm_kept_run(const nki_mm *k, const char *stationary, const char *moving, char *dst, void *scratch, const void *kept_s,
                     const void *kept_m)
{
    if (!nki_in_pairs(k) || !nki_tiles_run(k, stationary, moving, dst, scratch, kept_s, kept_m))
        nki_mm_vectors(k, stationary, moving, dst, scratch);
}

size_t nki_mm_kept(const nki_mm *k, int moving) { return nki_in_pairs(k) ? nki_tiles_kept(k, moving) : 0; }

static void one_block(const nki_mm *k, int accumulate, const char *stationary, const char *moving, char *dst, void *scratch);

void nki_mm_vectors(const nki_mm *k, const char *stationary, const char *moving, char *dst, void *scratch)
{
    for (int i = 0; i < nki_blocks(k); i++, stationary += k->s_block, moving += k->m_block)
        one_block(k, nki_adds_then(k, i), stationary, moving, dst, scratch);
}

static void one_block(const nki_mm *k, int accumulate, const char *stationary, const char *moving, char *dst, void *scratch)
{
    const int in_pairs = nki_in_pairs(k);
    operand a = {k->s_dtype, k->M, k->s_stride, stationary}, b = {k->m_dtype, k->N, k->m_stride, moving};
    block t = {.K = k->K, .accumulate = accumulate, .row = k->d_stride[0], .col = k->d_stride[1]};
    if (swaps(k)) {
        operand other = a;
        a = b;
        b = other;
        t.row = k->d_stride[1];
        t.col = k->d_stride[0];
    }
    float *packed = scratch, *panel = (float *)((char *)scratch + bytes_of_a(k->K, a.n));
    t.panel = panel;
    int a_stays = reads_in_place(&a, &b), element = b.dtype == NKI_BF16 ? 2 : 4;
    t.a_step = a_stays ? a.stride[0] : MR * 4;
    int b_stays = element == 4 && firsts[0][b.dtype] && b.stride[1] == 4 && a.n <= MR;
    kernel_fn first = b.stride[1] == element ? firsts[in_pairs][b.dtype] : NULL;
    for (int m0 = 0; m0 < a.n; m0 += ROWS) {
        int rows = a.n - m0 < ROWS ? a.n - m0 : ROWS;
        if (!a_stays) packs[a.dtype](a.at + m0 * a.stride[1], a.stride, t.K, rows, MR, packed);
        int vectors;
        for (int n0 = 0; n0 < b.n; n0 += vectors * LANES) {
            int left = b.n - n0;
            vectors = a.n <= SMALL && left >= WIDE * LANES ? WIDE : left > LANES ? NR : 1;
            int width = vectors * LANES;
            t.cols = left < width ? left : width;
            t.b = b.at + n0 * b.stride[1];
            t.b_step = b.stride[0];
            const kernel_fn *kernels = vectors == 1 ? one[in_pairs] : vectors == NR ? some[in_pairs] : wide[in_pairs];
            kernel_fn leader = vectors == NR && t.cols == width && rows >= MR && !b_stays ? first : NULL;
            if (!leader && !(b_stays && t.cols == width)) {
                packs[b.dtype](t.b, b.stride, t.K, t.cols, width, panel);
                t.b = (const char *)panel;
                t.b_step = width * 4;
            }
            for (int m = 0; m < rows; m += MR) {
                t.a = a_stays ? a.at + (m0 + m) * 4 : (const char *)(packed + (size_t)m * (size_t)t.K);
                t.d = dst + (m0 + m) * t.row + n0 * t.col;
                if (m == 0 && leader) {
                    leader(&t);
                    t.b = (const char *)panel;
                    t.b_step = width * 4;
                } else {
                    kernels[rows - m < MR ? rows - m : MR](&t);
                }
            }
        }
    }
}
