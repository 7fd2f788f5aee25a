/* Transcendental functions that compilers vectorise: no calls, no branches, no tables.
 *
 * exp, log and tanh work in float32, log and tanh with the polynomials of the Cephes library; the others in float64, which makes
 * them right to the last place but for rare roundings. Nothing is contracted, and no step depends on the width of
 * vectors, so all levels of CPU give the same bits. Errors are in tests/execute/test_native_functions.py.
 */
#ifndef NKI_FASTMATH_H
#define NKI_FASTMATH_H
#include <math.h>
#include "convert.h"

static inline int64_t nki_bits64(double x) {
    int64_t u;
    __builtin_memcpy(&u, &x, 8);
    return u;
}
static inline double nki_double(int64_t u) {
    double x;
    __builtin_memcpy(&x, &u, 8);
    return x;
}
#define NKI_MAGIC 0x1.8p23f  /* adding it leaves the nearest integer in the low bits */
#define NKI_MAGIC64 0x1.8p52
#define NKI_LN2 0x1.62e42fefa39efp-1
static inline double nki_power_of_two(double t) { /* 2^n of t = n + NKI_MAGIC64; anything where t is NaN */
    return nki_double((int64_t)(((uint64_t)nki_bits64(t) - 0x4338000000000000u + 1023) << 52));
}

/* ---- float32 -------------------------------------------------------------------------------------------------- */
/* a * b + c, rounded once. */
#if defined(__FMA__) || defined(__aarch64__)
static inline float nki_fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
/* The product is exact in float64, and the sum is rounded to odd there (its error says which way), after which rounding to
 * float32 equals rounding once. */
static inline float nki_fmaf(float a, float b, float c) {
    double p = (double)a * b, s = p + c, t = s - p, error = (p - (s - t)) + (c - t);
    int64_t u = nki_bits64(s), away = ((error > 0.0) == (s > 0.0)) ? 1 : -1;
    return (float)nki_double(u + ((error > 0.0) | (error < 0.0) && !(u & 1) ? away : 0));
}
#endif

#define NKI_EXP_MOST 89.0f
#define NKI_EXP_LEAST -104.0f /* below, exactly 0, and without the way there over denormals, which costs 100 cycles */
#define NKI_EXP_NORMAL 87.0f /* of numbers up to that one, whichever sign they have, exp is normal */
#define NKI_EXP_LOG2E 0x1.715476p+0f
#define NKI_EXP_LN2_HIGH 0x1.62e43p-1f
#define NKI_EXP_LN2_LOW -0x1.05c61p-29f
/* exp(r) for |r| <= ln(2) / 2, from the highest power: minimax with 1 as the last two coefficients, each of the others rounded in turn;
 * within 2^-28. */
#define NKI_EXP_FIRST 0x1.6a3d12p-10f
#define NKI_EXP_POLYNOMIAL(X) X(0x1.123856p-7f) X(0x1.5558bep-5f) X(0x1.555494p-3f) X(0x1.fffffcp-2f) X(1.0f) X(1.0f)
static inline float nki_expf(float x) {
    float c = x > NKI_EXP_MOST ? NKI_EXP_MOST : x;
    int none = x < NKI_EXP_LEAST;
    c = none ? 0.0f : c;
    float t = nki_fmaf(c, NKI_EXP_LOG2E, NKI_MAGIC), n = t - NKI_MAGIC;
    int32_t k = (int32_t)(nki_bits(t) - nki_bits(NKI_MAGIC));
    float r = nki_fmaf(n, -NKI_EXP_LN2_LOW, nki_fmaf(n, -NKI_EXP_LN2_HIGH, c));
    float p = NKI_EXP_FIRST;
#define STEP(x) p = nki_fmaf(p, r, x);
    NKI_EXP_POLYNOMIAL(STEP)
#undef STEP
    int32_t half = k >> 1; /* two steps: 2^k alone may be infinite or denormal */
    float y = p * nki_float((uint32_t)(half + 127) << 23) * nki_float((uint32_t)(k - half + 127) << 23);
    return none ? 0.0f : y;
}

static inline float nki_logf(float x) {
    int tiny = x < 0x1p-126f;
    float big = tiny ? x * 0x1p23f : x;
    uint32_t u = nki_bits(big) + (0x3f800000u - 0x3f3504f3u);
    float e = (float)((int32_t)(u >> 23) - 127) - (tiny ? 23.0f : 0.0f);
    float f = nki_float((u & 0x007fffffu) + 0x3f3504f3u) - 1.0f, z = f * f; /* mantissa in sqrt(1/2) .. sqrt(2) */
    float p = 7.0376836292e-2f;
    p = p * f + -1.1514610310e-1f;
    p = p * f + 1.1676998740e-1f;
    p = p * f + -1.2420140846e-1f;
    p = p * f + 1.4249322787e-1f;
    p = p * f + -1.6668057665e-1f;
    p = p * f + 2.0000714765e-1f;
    p = p * f + -2.4999993993e-1f;
    p = p * f + 3.3333331174e-1f;
    float y = (p * f) * z + e * -2.12194440e-4f;
    y = (f + (y - 0.5f * z)) + e * 0.693359375f;
    y = x == INFINITY ? x : y;
    y = x == 0.0f ? -INFINITY : y;
    return x < 0.0f ? NAN : (x != x ? x : y);
}

static inline float nki_tanhf(float x) {
    float a = __builtin_fabsf(x), z = x * x;
    float p = -5.70498872745e-3f;
    p = p * z + 2.06390887954e-2f;
    p = p * z + -5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z + -3.33332819422e-1f;
    float small = (p * z) * x + x;
    float large = 1.0f - 2.0f / (nki_expf(2.0f * (a > 10.0f ? 10.0f : a)) + 1.0f);
    /* below, x is the result, and z underflows */
    return a < 0x1p-13f ? x : (a < 0.625f ? small : __builtin_copysignf(large, x));
}

/* ---- float64 inside ------------------------------------------------------------------------------------------- */
static inline double nki_expm_kernel(double r) { /* exp(r), |r| <= ln(2)/2 */
    double p = 1.0 / 39916800;
    p = p * r + 1.0 / 3628800;
    p = p * r + 1.0 / 362880;
    p = p * r + 1.0 / 40320;
    p = p * r + 1.0 / 5040;
    p = p * r + 1.0 / 720;
    p = p * r + 1.0 / 120;
    p = p * r + 1.0 / 24;
    p = p * r + 1.0 / 6;
    p = p * r + 0.5;
    p = p * r + 1.0;
    return p * r + 1.0;
}

/* For float64 formulas that are rounded to float32: right in -700 .. 700, tiny below, and 0 from where
 * float64 has nothing left, as signs of zeros tell the two apart. */
static inline double nki_exp64(double x) {
    double c = x < -700.0 ? -700.0 : (x > 700.0 ? 700.0 : x);
    double t = c * 0x1.71547652b82fep+0 + NKI_MAGIC64, n = t - NKI_MAGIC64;
    double r = (c - n * 0x1.62e42feep-1) - n * 0x1.a39ef35793c76p-33;
    double y = nki_expm_kernel(r) * nki_power_of_two(t);
    return x < -745.1332191019412 ? 0.0 : y;
}

/* Natural logarithm of a positive normal float64; *e: the exponent, to which the result is to be added times ln 2. */
static inline double nki_log_kernel(double x, double *e) {
    int64_t u = nki_bits64(x) + (0x3ff0000000000000 - 0x3fe6a09e667f3bcd);
    /* the exponent as a double without 64-bit conversions: as the low bits of 2^52 */
    *e = nki_double((int64_t)((uint64_t)u >> 52) | 0x4330000000000000) - (0x1p52 + 1023.0);
    double m = nki_double((u & 0x000fffffffffffff) + 0x3fe6a09e667f3bcd);
    double s = (m - 1.0) / (m + 1.0), z = s * s;
    double p = 1.0 / 17;
    p = p * z + 1.0 / 15;
    p = p * z + 1.0 / 13;
    p = p * z + 1.0 / 11;
    p = p * z + 1.0 / 9;
    p = p * z + 1.0 / 7;
    p = p * z + 1.0 / 5;
    p = p * z + 1.0 / 3;
    return 2.0 * s + 2.0 * s * (p * z);
}

static inline float nki_log1pf(float x) {
    double d = (double)x, e, w = 1.0 + d;
    double y = nki_log_kernel(w > 0x1p-60 ? (w < 0x1p1000 ? w : 1.0) : 1.0, &e) + e * NKI_LN2;
    float r = (float)y;
    r = __builtin_fabsf(x) < 0x1p-20f ? x - x * (0.5f * x) : r;
    r = __builtin_fabsf(x) < 0x1p-30f ? x : r;
    r = x == INFINITY ? x : r;
    r = x == -1.0f ? -INFINITY : r;
    return x < -1.0f ? NAN : (x != x ? x : r);
}

static inline float nki_powf(float a, float b) {
    float m = __builtin_fabsf(a), y = __builtin_fabsf(b), e, r;
    double k, x = (double)m;
    int edge = (m == 0.0f) | (m == INFINITY);
    double l = nki_log_kernel(edge | (m != m) ? 1.0 : x, &k) * 0x1.71547652b82fep+0 + k;
    double t = (double)b * l;
    t = t < -200.0 ? -200.0 : (t > 200.0 ? 200.0 : t);
    double s = t + NKI_MAGIC64, n = s - NKI_MAGIC64;
    e = (float)(nki_expm_kernel((t - n) * NKI_LN2) * nki_power_of_two(s));
    r = edge ? (((m == 0.0f) != (b < 0.0f)) ? 0.0f : INFINITY) : e;
    /* integers have no fraction, odd ones one in their half */
    float half = 0.5f * y, whole = nki_rint(y), whole_half = nki_rint(half);
    uint32_t minus = nki_bits(a) & 0x80000000u;
    uint32_t odd = (whole == y) & (y < 0x1p24f) & (whole_half != half) ? minus : 0u;
    r = nki_float(nki_bits(r) | odd);
    r = (minus != 0) & (whole != y) & !edge ? NAN : r;
    r = a != a ? a : (b != b ? b : r);
    return (b == 0.0f) | (a == 1.0f) | ((m == 1.0f) & (y == INFINITY)) ? 1.0f : r;
}

static inline float nki_atanf(float x) {
    double a = (double)__builtin_fabsf(x);
    int far = a > 2.414213562373095, mid = a > 0.4142135623730950;
    double z = (far ? -1.0 : (mid ? a - 1.0 : a)) / (far ? a : (mid ? a + 1.0 : 1.0)), s = z * z;
    double p = -1.0 / 27;
    p = p * s + 1.0 / 25;
    p = p * s - 1.0 / 23;
    p = p * s + 1.0 / 21;
    p = p * s - 1.0 / 19;
    p = p * s + 1.0 / 17;
    p = p * s - 1.0 / 15;
    p = p * s + 1.0 / 13;
    p = p * s - 1.0 / 11;
    p = p * s + 1.0 / 9;
    p = p * s - 1.0 / 7;
    p = p * s + 1.0 / 5;
    p = p * s - 1.0 / 3;
    double y = z + z * (p * s);
    y = y + (far ? 0x1.921fb54442d18p+0 : (mid ? 0x1.921fb54442d18p-1 : 0.0));
    return __builtin_copysignf((float)y, x);
}

/* Sine, cosine and tangent up to NKI_CIRCLE; beyond, functions.c calls the C library. */
#define NKI_CIRCLE 1e6f
typedef struct {
    double sine, cosine;
    int64_t quarter; /* quarters of the circle that were taken off, in the low bits */
    int odd;
} nki_turned;
static inline nki_turned nki_turn(float x) {
    double d = (double)x, t = d * 0x1.45f306dc9c883p-1 + NKI_MAGIC64, n = t - NKI_MAGIC64;
    double r = ((d - n * 0x1.921fb544p+0) - n * 0x1.0b4611a6p-34) - n * 0x1.3198a2e037073p-69, z = r * r;
    double s = -1.0 / 39916800, c = 1.0 / 479001600;
    s = s * z + 1.0 / 362880;
    s = s * z - 1.0 / 5040;
    s = s * z + 1.0 / 120;
    s = s * z - 1.0 / 6;
    c = c * z - 1.0 / 3628800;
    c = c * z + 1.0 / 40320;
    c = c * z - 1.0 / 720;
    c = c * z + 1.0 / 24;
    c = c * z - 0.5;
    double half = 0.5 * n, whole = (half + NKI_MAGIC64) - NKI_MAGIC64;
    return (nki_turned){r + r * (s * z), 1.0 + c * z, nki_bits64(t), half != whole};
}
static inline double nki_sign_of(double x, int64_t quarter) { /* -x where bit 1 is set */
    return nki_double(nki_bits64(x) ^ (int64_t)(((uint64_t)quarter & 2) << 62));
}
static inline float nki_sinf(float x) {
    nki_turned q = nki_turn(x);
    return x == 0.0f ? x : (float)nki_sign_of(q.odd ? q.cosine : q.sine, q.quarter); /* -0 */
}
static inline float nki_cosf(float x) {
    nki_turned q = nki_turn(x);
    return (float)nki_sign_of(q.odd ? q.sine : q.cosine, q.quarter + 1);
}
static inline float nki_tanf(float x) {
    nki_turned q = nki_turn(x);
    return x == 0.0f ? x : (float)((q.odd ? -q.cosine : q.sine) / (q.odd ? q.sine : q.cosine));
}

/* ---- rounding and remainder ----------------------------------------------------------------------------------- */
#if defined(__SSE4_1__) || defined(__aarch64__)
#define nki_truncf __builtin_truncf /* single instructions */
#define nki_floorf __builtin_floorf
#define nki_ceilf __builtin_ceilf
#else
static inline float nki_truncf(float x) {
    float a = __builtin_fabsf(x);
    float r = (float)(int32_t)(a < 0x1p23f ? x : 0.0f);
    return __builtin_copysignf(a < 0x1p23f ? r : x, x);
}
static inline float nki_floorf(float x) {
    float t = nki_truncf(x);
    return x != x ? x : __builtin_copysignf(t > x ? t - 1.0f : t, x);
}
static inline float nki_ceilf(float x) {
    float t = nki_truncf(x);
    return x != x ? x : __builtin_copysignf(t < x ? t + 1.0f : t, x);
}
#endif

/* Exact for |a / b| below NKI_QUOTIENT: the quotient has 28 bits and its product with b 52, so float64 holds all. */
#define NKI_QUOTIENT 0x1p28f
static inline float nki_fmodf(float a, float b) {
    double x = (double)__builtin_fabsf(a), y = (double)__builtin_fabsf(b), q = x / y;
    q = (double)(int32_t)q;
    double r = x - q * y;
    r = r < 0.0 ? r + y : r; /* the quotient was rounded up to an integer */
    return __builtin_copysignf((float)r, a);
}

#define expf nki_expf
#define logf nki_logf
#define tanhf nki_tanhf
#define log1pf nki_log1pf
#define powf nki_powf
#define atanf nki_atanf
#define sinf nki_sinf
#define cosf nki_cosf
#define tanf nki_tanf
#define truncf nki_truncf
#define floorf nki_floorf
#define ceilf nki_ceilf
#define fmodf nki_fmodf
#define exp nki_exp64

#endif
