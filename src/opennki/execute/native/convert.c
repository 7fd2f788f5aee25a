/* Loops over the conversions of convert.h, and their table. */
#include "convert.h"
#include "wide.h"

#define DEFINE(code, T, ld, st)                                                                                        \
    static void load_##code(float *restrict d, const char *restrict s, int64_t stride, int n) {                        \
        if (stride == (int64_t)sizeof(T)) {                                                                            \
            const T *p = (const T *)s;                                                                                 \
            for (int i = 0; i < n; i++) d[i] = ld(p[i]);                                                               \
        } else if (stride == 2 * (int64_t)sizeof(T)) { /* what compilers vectorise too, if they know */                  \
            const T *p = (const T *)s;                                                                                 \
            for (int i = 0; i < n; i++) d[i] = ld(p[2 * i]);                                                           \
        } else if (stride == 0) {                                                                                      \
            float x = ld(*(const T *)s);                                                                               \
            for (int i = 0; i < n; i++) d[i] = x;                                                                      \
        } else {                                                                                                       \
            for (int i = 0; i < n; i++) d[i] = ld(*(const T *)(s + i * stride));                                       \
        }                                                                                                              \
    }                                                                                                                  \
    static void raw_##code(float *restrict d, const char *restrict s, int64_t stride, int n) {                         \
        nki_i32a *q = (nki_i32a *)d;                                                                                   \
        if (stride == (int64_t)sizeof(T)) {                                                                            \
            const BITS_##code *p = (const BITS_##code *)s;                                                             \
            for (int i = 0; i < n; i++) q[i] = (int32_t)p[i];                                                          \
        } else {                                                                                                       \
            for (int i = 0; i < n; i++) q[i] = (int32_t) * (const BITS_##code *)(s + i * stride);                      \
        }                                                                                                              \
    }                                                                                                                  \
    static void store_##code(char *restrict d, int64_t stride, const float *restrict a, int n) {                       \
        if (stride == (int64_t)sizeof(T)) {                                                                            \
            T *p = (T *)d;                                                                                             \
            for (int i = 0; i < n; i++) p[i] = st(a[i]);                                                               \
        } else {                                                                                                       \
            for (int i = 0; i < n; i++) *(T *)(d + i * stride) = st(a[i]);                                             \
        }                                                                                                              \
    }                                                                                                                  \
    static void put_##code(char *restrict d, int64_t stride, const float *restrict a, int n) {                         \
        const nki_i32a *q = (const nki_i32a *)a;                                                                       \
        if (stride == (int64_t)sizeof(T)) {                                                                            \
            BITS_##code *p = (BITS_##code *)d;                                                                         \
            for (int i = 0; i < n; i++) p[i] = (BITS_##code)q[i];                                                      \
        } else {                                                                                                       \
            for (int i = 0; i < n; i++) *(BITS_##code *)(d + i * stride) = (BITS_##code)q[i];                          \
        }                                                                                                              \
    }

/* Raw lanes: floats are their bits. */
#define BITS_NKI_F32 nki_i32a
#define BITS_NKI_BF16 nki_u16a
#define BITS_NKI_F16 nki_u16a
#define BITS_NKI_F8E4M3 nki_u8a
#define BITS_NKI_F8E4M3FN nki_u8a
#define BITS_NKI_F8E5M2 nki_u8a
#define BITS_NKI_TF32 nki_i32a
#define BITS_NKI_I32 nki_i32a
#define BITS_NKI_U32 nki_i32a
#define BITS_NKI_I16 nki_i16a
#define BITS_NKI_U16 nki_u16a
#define BITS_NKI_I8 nki_i8a
#define BITS_NKI_U8 nki_u8a
#define BITS_NKI_BOOL nki_u8a

NKI_EACH_DTYPE(DEFINE)

#if defined(__AVX512F__)
static void wide_bf16(char *restrict d, int64_t stride, const float *restrict a, int n) {
    int i = 0;
    for (; stride == 2 && i + 32 <= n; i += 32)
        _mm512_storeu_si512(d + 2 * i, nki_wide_bf16(_mm512_loadu_ps(a + i), _mm512_loadu_ps(a + i + 16)));
    store_NKI_BF16(d + i * stride, stride, a + i, n - i);
}
#define store_NKI_BF16 wide_bf16
#endif

#define ROW(code, T, ld, st) [code] = {sizeof(T), load_##code, raw_##code, store_##code, put_##code},
const nki_type nki_types[NKI_DTYPES] = {NKI_EACH_DTYPE(ROW)};

#define PIECE (1 << 20)

void nki_to_float(int dtype, const void *src, float *dst, int64_t n) {
    const nki_type *t = &nki_types[dtype];
    for (int64_t i = 0; i < n; i += PIECE)
        t->load(dst + i, (const char *)src + i * t->size, t->size, (int)(n - i < PIECE ? n - i : PIECE));
}

void nki_from_float(int dtype, const float *src, void *dst, int64_t n) {
    const nki_type *t = &nki_types[dtype];
    for (int64_t i = 0; i < n; i += PIECE)
        t->store((char *)dst + i * t->size, t->size, src + i, (int)(n - i < PIECE ? n - i : PIECE));
}
