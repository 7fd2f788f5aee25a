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
#define DEFINE(name)                                                                                                   \
    VECTORS(name, w, w, n) VECTORS(name, w, n, w) VECTORS(name, w, n, n)                                               \
    VECTORS(name, n, w, w) VECTORS(name, n, w, n) VECTORS(name, n, n, w) VECTORS(name, n, n, n)                        \
    SCALAR(name, w, n) SCALAR(name, n, w) SCALAR(name, n, n)
DEFINE(add) DEFINE(subtract) DEFINE(multiply) DEFINE(maximum) DEFINE(minimum)

#define ROW(name, number) \
    [number] = {{{{NULL, name##_wwn, NULL}, {name##_wnw, name##_wnn, name##_wns}}, \
                 {{name##_nww, name##_nwn, name##_nws}, {name##_nnw, name##_nnn, name##_nns}}}},
const nki_forms nki_narrows[NKI_FUNCTIONS] = {
    ROW(add, NKI_FN_ADD) ROW(subtract, NKI_FN_SUBTRACT) ROW(multiply, NKI_FN_MULTIPLY) ROW(maximum, NKI_FN_MAXIMUM)
    ROW(minimum, NKI_FN_MINIMUM)};
