/* The scalar functions of isa/scalar.py as loops that are vectorised, and as functions of single numbers. */
#include "fastmath.h"
#include "inner.h"
#include "wide.h"

#define NKI_1(name, e)                                                                                                 \
    static float s1_##name(float a) { return e; }                                                                      \
    static void v1_##name(float *d, const float *x, int n) {                                                           \
        NKI_IVDEP for (int i = 0; i < n; i++) {                                                                        \
            float a = x[i];                                                                                            \
            d[i] = e;                                                                                                  \
        }                                                                                                              \
    }
#define NKI_2(name, e)                                                                                                 \
    static float s2_##name(float a, float b) { return e; }                                                             \
    static void vv_##name(float *d, const float *x, const float *y, int n) {                                           \
        NKI_IVDEP for (int i = 0; i < n; i++) {                                                                        \
            float a = x[i], b = y[i];                                                                                  \
            d[i] = e;                                                                                                  \
        }                                                                                                              \
    }                                                                                                                  \
    static void vs_##name(float *d, const float *x, const float *y, int n) {                                           \
        const float b = *y;                                                                                            \
        NKI_IVDEP for (int i = 0; i < n; i++) {                                                                        \
            float a = x[i];                                                                                            \
            d[i] = e;                                                                                                  \
        }                                                                                                              \
    }                                                                                                                  \
    static void sv_##name(float *d, const float *x, const float *y, int n) {                                           \
        const float a = *x;                                                                                            \
        NKI_IVDEP for (int i = 0; i < n; i++) {                                                                        \
            float b = y[i];                                                                                            \
            d[i] = e;                                                                                                  \
        }                                                                                                              \
    }
#include "functions.h" /* now the expressions as well */

/* ---- functions whose fast form does not hold everywhere ------------------------------------------------------
 * A chunk with an operand out of its range goes number by number; inside the range both ways give the same. */
static int far_away(const float *a, int n) {
    int far = 0;
    for (int i = 0; i < n; i++) far |= __builtin_fabsf(a[i]) > NKI_CIRCLE;
    return far;
}
#undef exp
#undef fmodf
#undef sinf
#undef cosf
#undef tanf
#define CIRCLE(name, exact)                                                                                            \
    static float c1_##name(float a) { return __builtin_fabsf(a) > NKI_CIRCLE ? (float)exact((double)a) : s1_##name(a); } \
    static void c_##name(float *d, const float *x, int n) {                                                            \
        if (far_away(x, n))                                                                                            \
            for (int i = 0; i < n; i++) d[i] = c1_##name(x[i]);                                                        \
        else                                                                                                           \
            v1_##name(d, x, n);                                                                                        \
    }
CIRCLE(sin, sin)
CIRCLE(cos, cos)
CIRCLE(tan, tan)

static int small_quotient(float a, float b) {
    float y = __builtin_fabsf(b);
    return (__builtin_fabsf(a) < y * NKI_QUOTIENT) & (y <= 0x1.fffffep+127f);
}
static float python_sign(float m, float b) { /* nki_mod of the prelude after its fmodf */
    if (m != 0.0f) return ((b < 0.0f) != (m < 0.0f)) ? m + b : m;
    return b == 0.0f ? m : copysignf(0.0f, b);
}
static float c1_fmod(float a, float b) { return small_quotient(a, b) ? s2_fmod(a, b) : fmodf(a, b); }
static float c1_mod(float a, float b) { return small_quotient(a, b) ? s2_mod(a, b) : python_sign(fmodf(a, b), b); }
#define QUOTIENT(name)                                                                                                 \
    static void form_##name(float *d, const float *x, int xs, const float *y, int ys, int n, nki_fn2 fast) {           \
        int good = 1;                                                                                                  \
        for (int i = 0; i < n; i++) good &= small_quotient(x[i * xs], y[i * ys]);                                      \
        if (good) {                                                                                                    \
            fast(d, x, y, n);                                                                                          \
            return;                                                                                                    \
        }                                                                                                              \
        float a = *x, b = *y; /* d may be x or y */                                                                    \
        for (int i = 0; i < n; i++) d[i] = c1_##name(xs ? x[i] : a, ys ? y[i] : b);                                    \
    }                                                                                                                  \
    static void cvv_##name(float *d, const float *x, const float *y, int n) { form_##name(d, x, 1, y, 1, n, vv_##name); } \
    static void cvs_##name(float *d, const float *x, const float *y, int n) { form_##name(d, x, 1, y, 0, n, vs_##name); } \
    static void csv_##name(float *d, const float *x, const float *y, int n) { form_##name(d, x, 0, y, 1, n, sv_##name); }
QUOTIENT(fmod)
QUOTIENT(mod)

/* What only this level has. */
#if defined(__AVX512F__)
static void wide_exp(float *d, const float *x, int n) {
    int i = 0;
    for (; i + 32 <= n; i += 32) {
        const __m512 a = nki_wide_exp(_mm512_loadu_ps(x + i)), b = nki_wide_exp(_mm512_loadu_ps(x + i + 16));
        _mm512_storeu_ps(d + i, a);
        _mm512_storeu_ps(d + i + 16, b);
    }
    for (; i < n; i += 16) {
        const __mmask16 some = (__mmask16)(n - i >= 16 ? 0xffff : (1 << (n - i)) - 1);
        _mm512_mask_storeu_ps(d + i, some, nki_wide_exp(_mm512_maskz_loadu_ps(some, x + i)));
    }
}
/* Division by one number without the divider, which takes 16 cycles: where y is the float32 nearest to 1 / b, and q within a
 * place of a / b, q + (a - b q) y with FMAs is a / b rounded (Markstein). The first q may be two places off, the second is
 * not. All steps stay among normal numbers for operands from 2^-60 to 2^60; vectors with others are divided. */
static void wide_divide(float *d, const float *x, const float *y, int n) {
    const float b = *y;
    const __m512 vb = _mm512_set1_ps(b), r = _mm512_set1_ps(1.0f / b), low = _mm512_set1_ps(0x1p-60f), high = _mm512_set1_ps(0x1p60f);
    const int plain = __builtin_fabsf(b) >= 0x1p-60f && __builtin_fabsf(b) <= 0x1p60f;
    for (int i = 0; i < n; i += 16) {
        const __mmask16 some = (__mmask16)(n - i >= 16 ? 0xffff : (1 << (n - i)) - 1);
        const __m512 a = _mm512_maskz_loadu_ps(some, x + i), m = _mm512_abs_ps(a);
        const __mmask16 good = _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(m, low, _CMP_GE_OQ), m, high, _CMP_LE_OQ);
        __m512 q;
        if (plain && !(some & ~good)) {
            q = _mm512_mul_ps(a, r);
            q = _mm512_fmadd_ps(_mm512_fnmadd_ps(q, vb, a), r, q);
            q = _mm512_fmadd_ps(_mm512_fnmadd_ps(q, vb, a), r, q);
        } else {
            q = _mm512_maskz_div_ps(some, a, vb);
        }
        _mm512_mask_storeu_ps(d + i, some, q);
    }
}
#define NKI_WIDE_DIVIDE [NKI_FN_DIVIDE] = {vv_divide, wide_divide, sv_divide, s2_divide},
#define NKI_WIDE_EXP [NKI_FN_EXP] = {wide_exp, s1_exp},
#else
#define NKI_WIDE_EXP
#define NKI_WIDE_DIVIDE
#endif

#define ROW1(name, number) [number] = {v1_##name, s1_##name},
#define ROW2(name, number) [number] = {vv_##name, vs_##name, sv_##name, s2_##name},
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Woverride-init" /* those after them replace rows */
const nki_one nki_functions1[NKI_FUNCTIONS] = {NKI_EACH_1(ROW1) NKI_WIDE_EXP[NKI_FN_SIN] = {c_sin, c1_sin},
                                               [NKI_FN_COS] = {c_cos, c1_cos},
                                               [NKI_FN_TAN] = {c_tan, c1_tan}};
const nki_two nki_functions2[NKI_FUNCTIONS] = {NKI_EACH_2(ROW2) NKI_WIDE_DIVIDE[NKI_FN_FMOD] = {cvv_fmod, cvs_fmod, csv_fmod, c1_fmod},
                                               [NKI_FN_MOD] = {cvv_mod, cvs_mod, csv_mod, c1_mod}};
#pragma GCC diagnostic pop

/* ---- calls of single functions, for tests ----------------------------------------------------------------------- */
void nki_call1(int fn, float *d, const float *a, int64_t n) {
    for (int64_t i = 0; i < n; i += NKI_CHUNK)
        nki_functions1[fn].v(d + i, a + i, (int)(n - i < NKI_CHUNK ? n - i : NKI_CHUNK));
}

void nki_call2(int fn, float *d, const float *a, const float *b, int64_t n) {
    for (int64_t i = 0; i < n; i += NKI_CHUNK)
        nki_functions2[fn].vv(d + i, a + i, b + i, (int)(n - i < NKI_CHUNK ? n - i : NKI_CHUNK));
}
