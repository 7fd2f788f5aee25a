/* Vectors of the level of CPU with AVX-512: what several sources use. Results are those of the forms for single numbers. */
#ifndef NKI_WIDE_H
#define NKI_WIDE_H
#if defined(__AVX512F__)
#include <immintrin.h>
#include "fastmath.h"
#include "inner.h"

/* nki_expf; the power of two is taken in one step. `plain`: neither clamped nor cut off, for numbers of which nki_wide_plain is true. */
static inline __attribute__((always_inline)) __m512 nki_wide_exp_of(__m512 x, int plain) {
    const __mmask16 some = plain ? 0xffff : _mm512_cmp_ps_mask(x, _mm512_set1_ps(NKI_EXP_LEAST), _CMP_NLT_UQ);
    const __m512 c = plain ? x : _mm512_min_ps(_mm512_set1_ps(NKI_EXP_MOST), x), magic = _mm512_set1_ps(NKI_MAGIC); /* NaN stays */
    const __m512 n = _mm512_sub_ps(_mm512_fmadd_ps(c, _mm512_set1_ps(NKI_EXP_LOG2E), magic), magic);
    __m512 r = _mm512_fmadd_ps(n, _mm512_set1_ps(-NKI_EXP_LN2_HIGH), c);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(-NKI_EXP_LN2_LOW), r);
    __m512 p = _mm512_set1_ps(NKI_EXP_FIRST);
#define STEP(x) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(x));
    NKI_EXP_POLYNOMIAL(STEP)
#undef STEP
    return plain ? _mm512_scalef_ps(p, n) : _mm512_maskz_scalef_ps(some, p, n);
}
static inline __attribute__((always_inline)) __m512 nki_wide_exp(__m512 x) { return nki_wide_exp_of(x, 0); }

/* Whether exp of four vectors is normal or NaN. */
static inline int nki_wide_plain(__m512 v0, __m512 v1, __m512 v2, __m512 v3) {
    enum { LARGER_MAGNITUDE = 0xb }; /* the other operand where one is NaN */
    const __m512 a = _mm512_range_ps(v0, v1, LARGER_MAGNITUDE), b = _mm512_range_ps(v2, v3, LARGER_MAGNITUDE);
    return !_mm512_cmp_ps_mask(_mm512_range_ps(a, b, LARGER_MAGNITUDE), _mm512_set1_ps(NKI_EXP_NORMAL), _CMP_GT_OQ);
}

/* The bits of 32 numbers, from whose upper halves nki_st_bf16 of each can be read: to nearest even, by adding a half, or a bit less than that
 * where the number is even. */
static inline __attribute__((always_inline)) void nki_wide_round(__m512 v, __m512 w, __m512i *x, __m512i *y) {
    const __m512i odd = _mm512_set1_epi32(0x10000), less = _mm512_set1_epi32(0x7fff), half = _mm512_set1_epi32(0x8000);
    const __m512i a = _mm512_castps_si512(v), b = _mm512_castps_si512(w);
    *x = _mm512_mask_add_epi32(_mm512_add_epi32(a, less), _mm512_test_epi32_mask(a, odd), a, half);
    *y = _mm512_mask_add_epi32(_mm512_add_epi32(b, less), _mm512_test_epi32_mask(b, odd), b, half);
    if (__builtin_expect(_mm512_cmp_ps_mask(v, w, _CMP_UNORD_Q), 0)) {
        const __m512i sign = _mm512_set1_epi32(INT32_MIN), nan = _mm512_set1_epi32(0x7fc00000);
        *x = _mm512_mask_or_epi32(*x, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_and_epi32(a, sign), nan);
        *y = _mm512_mask_or_epi32(*y, _mm512_cmp_ps_mask(w, w, _CMP_UNORD_Q), _mm512_and_epi32(b, sign), nan);
    }
}
/* nki_st_bf16 of 32 numbers that lie side by side; of those of the even elements and of the odd ones. */
static inline __m512i nki_wide_bf16(__m512 low, __m512 high) {
    const __m512i even_words_first = _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1, 30, 28, 26, 24, 22, 20, 18,
                                                      16, 14, 12, 10, 8, 6, 4, 2, 0);
    __m512i x, y;
    nki_wide_round(low, high, &x, &y);
    return _mm512_permutexvar_epi16(even_words_first, _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(x, 16), y));
}
static inline __m512i nki_wide_bf16_pairs(__m512 even, __m512 odd) {
    __m512i x, y;
    nki_wide_round(even, odd, &x, &y);
    return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(x, 16), y);
}

/* The same of numbers that are normal, zero or NaN, by the instruction of CPUs that have it (nki_narrows_there); it takes denormals for
 * zeros, and has other NaN. */
static inline __m512i nki_wide_narrowed(__m512 low, __m512 high) {
    __m512i both;
    if (__builtin_expect(_mm512_cmp_ps_mask(low, high, _CMP_UNORD_Q), 0)) return nki_wide_bf16(low, high);
    __asm__("vcvtne2ps2bf16 %2, %1, %0" : "=v"(both) : "v"(high), "v"(low));
    return both;
}

/* A function of the number `fn` that the compiler knows; of NaN, the first one stays. */
static inline __attribute__((always_inline)) __m512 nki_wide_two(int fn, __m512 a, __m512 b) {
    switch (fn) {
    case NKI_FN_ADD: return _mm512_add_ps(a, b);
    case NKI_FN_SUBTRACT: return _mm512_sub_ps(a, b);
    case NKI_FN_MULTIPLY: return _mm512_mul_ps(a, b);
    case NKI_FN_MAXIMUM: return _mm512_mask_mov_ps(_mm512_max_ps(a, b), _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), a);
    default: return _mm512_mask_mov_ps(_mm512_min_ps(a, b), _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), a);
    }
}

/* The tree that ends a fold, of the 16 lanes that its first step leaves; for maxima and minima where nothing is NaN. */
#define TREE_OF(name, op)                                                                                              \
    static inline __attribute__((unused)) float nki_tree_##name(__m512 v) {                                                                        \
        const __m256 a = op(256, _mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));                             \
        const __m128 b = op(, _mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));                                 \
        const __m128 c = op(, b, _mm_movehl_ps(b, b));                                                                 \
        return _mm_cvtss_f32(op(, c, _mm_movehdup_ps(c)));                                                             \
    }
#define ADD_OF(width, a, b) _mm##width##_add_ps(a, b)
#define MAXIMUM_OF(width, a, b) _mm##width##_max_ps(a, b)
#define MINIMUM_OF(width, a, b) _mm##width##_min_ps(a, b)
TREE_OF(add, ADD_OF)
TREE_OF(maximum, MAXIMUM_OF)
TREE_OF(minimum, MINIMUM_OF)
#endif
#endif
