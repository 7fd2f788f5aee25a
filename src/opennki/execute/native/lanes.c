/* What works on the bits of lanes: functions on bits, exact integers, choices, and stores under a mask. */
#include "inner.h"

int nki_on_bits(int fn) {
    return fn == NKI_FN_BITWISE_AND || fn == NKI_FN_BITWISE_OR || fn == NKI_FN_BITWISE_XOR || fn == NKI_FN_INVERT ||
           fn == NKI_FN_LEFT_SHIFT || fn == NKI_FN_RIGHT_SHIFT;
}

#define BITS(e)                                                                                                        \
    NKI_IVDEP for (int i = 0; i < n; i++) {                                                                            \
        uint32_t x = (uint32_t)a[i], y = (uint32_t)b[i];                                                               \
        (void)y;                                                                                                       \
        d[i] = (int32_t)(e);                                                                                           \
    }
void nki_bits_run(int fn, int width, int sign, int32_t *dst, const int32_t *left, const int32_t *right, int n) {
    nki_i32a *d = (nki_i32a *)dst;
    const nki_i32a *a = (const nki_i32a *)left, *b = (const nki_i32a *)right;
    const uint32_t mask = width == 32 ? ~0u : (1u << width) - 1, w = (uint32_t)width;
    switch (fn) {
    case NKI_FN_BITWISE_AND: BITS(x & y) break;
    case NKI_FN_BITWISE_OR: BITS(x | y) break;
    case NKI_FN_BITWISE_XOR: BITS(x ^ y) break;
    case NKI_FN_INVERT: b = a; BITS(~x) break;
    case NKI_FN_LEFT_SHIFT: BITS((y & mask) < w ? x << (y & 31) : 0) break;
    default: BITS((y & mask) < w ? (x & mask) >> (y & 31) : 0) break;
    }
    if (width == 32) return;
    const int up = 32 - width;
    if (sign) {
        for (int i = 0; i < n; i++) d[i] = (int32_t)((uint32_t)d[i] << up) >> up;
    } else {
        for (int i = 0; i < n; i++) d[i] = (int32_t)((uint32_t)d[i] & mask);
    }
}

/* ---- integers in 64 bits ---------------------------------------------------------------------------------------- */
void nki_exact_run(int fn, int dtype, int sign, float *dst, const float *left, const float *right, int n) {
    static const int64_t low[NKI_DTYPES] = {[NKI_I32] = INT32_MIN, [NKI_I16] = INT16_MIN, [NKI_I8] = INT8_MIN};
    static const int64_t high[NKI_DTYPES] = {[NKI_I32] = INT32_MAX, [NKI_U32] = UINT32_MAX, [NKI_I16] = INT16_MAX,
                                             [NKI_U16] = UINT16_MAX, [NKI_I8] = INT8_MAX, [NKI_U8] = UINT8_MAX};
    const nki_u32a *a = (const nki_u32a *)left, *b = (const nki_u32a *)right;
    nki_i32a *d = (nki_i32a *)dst;
    for (int i = 0; i < n; i++) {
        const int64_t x = sign & 1 ? (int64_t)(int32_t)a[i] : (int64_t)a[i];
        const int64_t y = sign & 2 ? (int64_t)(int32_t)b[i] : (int64_t)b[i];
        int64_t v;
        int huge = 0; /* the product of two unsigned numbers may have all 64 bits */
        switch (fn) {
        case NKI_FN_ADD: v = x + y; break;
        case NKI_FN_SUBTRACT: v = x - y; break;
        case NKI_FN_MAXIMUM: v = x > y ? x : y; break;
        case NKI_FN_MINIMUM: v = x < y ? x : y; break;
        default:
            v = (int64_t)((uint64_t)x * (uint64_t)y);
            huge = !(sign & 3) && v < 0;
            break;
        }
        if (dtype < NKI_I32)
            dst[i] = huge ? (float)(uint64_t)v : (float)v;
        else if (dtype == NKI_BOOL)
            d[i] = v != 0;
        else
            d[i] = (int32_t)(huge || v > high[dtype] ? high[dtype] : (v < low[dtype] ? low[dtype] : v));
    }
}

/* ---- choices ---------------------------------------------------------------------------------------------------- */
void nki_choose(float *dst, const float *yes, const float *no, const float *mask, int n) {
    nki_i32a *d = (nki_i32a *)dst;
    const nki_i32a *a = (const nki_i32a *)yes, *b = (const nki_i32a *)no;
    NKI_IVDEP for (int i = 0; i < n; i++) {
        int32_t x = a[i], y = b[i];
        d[i] = mask[i] != 0.0f ? x : y;
    }
}

void nki_put_some(char *d, int64_t stride, int size, const char *s, const float *mask, int n) {
#define PUT(T)                                                                                                         \
    if (stride == (int64_t)sizeof(T)) {                                                                                \
        T *p = (T *)d;                                                                                                 \
        NKI_IVDEP for (int i = 0; i < n; i++) if (mask[i] != 0.0f) p[i] = ((const T *)s)[i];                           \
    } else {                                                                                                           \
        for (int i = 0; i < n; i++)                                                                                    \
            if (mask[i] != 0.0f) *(T *)(d + i * stride) = ((const T *)s)[i];                                           \
    }
    if (size == 4) {
        PUT(nki_i32a)
    } else if (size == 2) {
        PUT(nki_i16a)
    } else {
        PUT(nki_i8a)
    }
}
