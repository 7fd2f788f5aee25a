/* Arithmetic on bfloat16 where it is: operands that are widened, and results that are rounded, on the way. */
#include "fastmath.h"
#include "inner.h"
#include "wide.h"

#define NKI_1(name, e)
#define NKI_2(name, e) static inline __attribute__((unused)) float of_##name(float a, float b) { return e; }
#include "functions.h" /* now the expressions as well */

#define KIND_w nki_f32a
#define KIND_n nki_u16a
#define LOAD_w(x) (x)
#define LOAD_n(x) nki_ld_bf16(x)

#define EACH_w(make) NKI_IVDEP for (int i = 0; i < n; i++) ((nki_f32a *)d)[i] = make
/* Results are rounded as they are made, or, where vectors round faster than that, some at a time. */
#if defined(__AVX512F__)
enum { SOME = 64 };
#define EACH_n(make)                                                                                                   \
    uint16_t *out = d;                                                                                                 \
    int first = 0;                                                                                                     \
    for (; first + SOME <= n; first += SOME) {                                                                         \
        float made[SOME] __attribute__((aligned(64)));                                                                 \
        NKI_IVDEP for (int j = 0, i = first; j < SOME; j++, i++) made[j] = make;                                       \
        for (int j = 0; j < SOME; j += 32)                                                                             \
            _mm512_storeu_si512(out + first + j, nki_wide_bf16(_mm512_load_ps(made + j), _mm512_load_ps(made + j + 16))); \
    }                                                                                                                  \
    for (int i = first; i < n; i++) ((nki_u16a *)d)[i] = nki_st_bf16(make)
#else
#define EACH_n(make) NKI_IVDEP for (int i = 0; i < n; i++) ((nki_u16a *)d)[i] = nki_st_bf16(make)
#endif

/* d, a, b: w (float32) or n (bfloat16); s: one number for all */
#define VECTORS(name, d_, a_, b_)                                                                                      \
    static void name##_##d_##a_##b_(void *d, const void *a, const void *b, int n) {                           \
        EACH_##d_(of_##name(LOAD_##a_(((const KIND_##a_ *)a)[i]), LOAD_##b_(((const KIND_##b_ *)b)[i])));              \
    }
#define SCALAR(name, d_, a_)                                                                                           \
    static void name##_##d_##a_##s(void *d, const void *a, const void *b, int n) {                            \
        const float s = *(const float *)b;                                                                             \
        EACH_##d_(of_##name(LOAD_##a_(((const KIND_##a_ *)a)[i]), s));                                                 \
    }

/* Where all is bfloat16, two elements lie in a word: its halves are widened and rounded where they are. */
#if defined(__AVX512F__)
#define LOW(v) _mm512_castsi512_ps(_mm512_slli_epi32(v, 16))
#define HIGH(v) _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32((int)0xffff0000)))
#define PAIRS(name, fn, b_, low, high)                                                                                 \
    static void name##_nn##b_(void *d, const void *a, const void *b, int n) {                                          \
        const __m512 s = #b_[0] == 's' ? _mm512_set1_ps(*(const float *)b) : _mm512_setzero_ps();                      \
        for (int i = 0; i < n; i += 32) {                                                                              \
            const __mmask32 m = i + 32 <= n ? 0xffffffff : (1u << (n - i)) - 1;                                        \
            const __m512i x = _mm512_maskz_loadu_epi16(m, (const uint16_t *)a + i);                                    \
            const __m512i y = #b_[0] == 's' ? x : _mm512_maskz_loadu_epi16(m, (const uint16_t *)b + i);                \
            const __m512 even = nki_wide_two(fn, LOW(x), low), odd = nki_wide_two(fn, HIGH(x), high);                  \
            const __m512i made = nki_wide_bf16_pairs(even, odd);                                                       \
            if (i + 32 <= n)                                                                                           \
                _mm512_storeu_si512((uint16_t *)d + i, made);                                                          \
            else                                                                                                       \
                _mm512_mask_storeu_epi16((uint16_t *)d + i, m, made);                                                  \
        }                                                                                                              \
        (void)s;                                                                                                       \
    }
#define EACH_PAIR(name, fn) PAIRS(name, fn, n, LOW(y), HIGH(y)) PAIRS(name, fn, s, s, s)
#else
typedef uint32_t two __attribute__((may_alias, aligned(2)));
#define LOW(x) nki_float((x) << 16)
#define HIGH(x) nki_float((x) & 0xffff0000u)
#define PAIRS(name, b_, number, low, high, last)                                                                       \
    static void name##_nn##b_(void *d, const void *a, const void *b, int n) {                                          \
        number;                                                                                                        \
        NKI_IVDEP for (int i = 0; i < n / 2; i++) {                                                                    \
            const uint32_t x = ((const two *)a)[i];                                                                    \
            const uint16_t even = nki_st_bf16(of_##name(LOW(x), low)), odd = nki_st_bf16(of_##name(HIGH(x), high));    \
            ((two *)d)[i] = even | (uint32_t)odd << 16;                                                                \
        }                                                                                                              \
        for (int i = n & ~1; i < n; i++)                                                                               \
            ((nki_u16a *)d)[i] = nki_st_bf16(of_##name(nki_ld_bf16(((const nki_u16a *)a)[i]), last));                  \
    }
#define EACH_PAIR(name, fn)                                                                                            \
    PAIRS(name, n, const two *w = b, LOW(w[i]), HIGH(w[i]), nki_ld_bf16(((const nki_u16a *)b)[i]))                     \
    PAIRS(name, s, const float s = *(const float *)b, s, s, s)
#endif

#define DEFINE(name, fn)                                                                                               \
    VECTORS(name, w, w, n) VECTORS(name, w, n, w) VECTORS(name, w, n, n)                                               \
    VECTORS(name, n, w, w) VECTORS(name, n, w, n) VECTORS(name, n, n, w)                                               \
    SCALAR(name, w, n) SCALAR(name, n, w)                                                                              \
    EACH_PAIR(name, fn)
DEFINE(add, NKI_FN_ADD) DEFINE(subtract, NKI_FN_SUBTRACT) DEFINE(multiply, NKI_FN_MULTIPLY) DEFINE(maximum, NKI_FN_MAXIMUM)
DEFINE(minimum, NKI_FN_MINIMUM)

#define ROW(name, number) \
    [number] = {{{{NULL, name##_wwn, NULL}, {name##_wnw, name##_wnn, name##_wns}}, \
                 {{name##_nww, name##_nwn, name##_nws}, {name##_nnw, name##_nnn, name##_nns}}}},
const nki_forms nki_narrows[NKI_FUNCTIONS] = {
    ROW(add, NKI_FN_ADD) ROW(subtract, NKI_FN_SUBTRACT) ROW(multiply, NKI_FN_MULTIPLY) ROW(maximum, NKI_FN_MAXIMUM)
    ROW(minimum, NKI_FN_MINIMUM)};
