/* Element types: one value from memory to the float32 (or raw 32-bit) lane and back.
 *
 * Everything is integer arithmetic and selects, which compilers vectorise at every level of CPU, and no step makes a
 * denormal float on the way, which would cost a hundred cycles. The results are those of isa/dtypes.py bit by bit.
 */
#ifndef NKI_CONVERT_H
#define NKI_CONVERT_H
#include "nki.h"

/* Lanes of registers are read as float or as bits, and memory as whatever the tile says. */
typedef float nki_f32a __attribute__((may_alias));
typedef int32_t nki_i32a __attribute__((may_alias));
typedef uint32_t nki_u32a __attribute__((may_alias));
typedef int16_t nki_i16a __attribute__((may_alias));
typedef uint16_t nki_u16a __attribute__((may_alias));
typedef int8_t nki_i8a __attribute__((may_alias));
typedef uint8_t nki_u8a __attribute__((may_alias));

static inline uint32_t nki_bits(float x) {
    uint32_t u;
    __builtin_memcpy(&u, &x, 4);
    return u;
}
static inline float nki_float(uint32_t u) {
    float x;
    __builtin_memcpy(&x, &u, 4);
    return x;
}

/* Nearest integer, ties to even; beyond 2^23 every float32 is one. */
static inline float nki_rint(float x) {
    float a = __builtin_fabsf(x), r = (a + 0x1p23f) - 0x1p23f;
    return __builtin_copysignf(a < 0x1p23f ? r : a, x);
}

/* ---- narrow floats: sign, exponent of the given bias, M bits ------------------------------------------------- */

/* Code of |x| without its sign, rounded to nearest even; what overflows comes out above the largest code. */
static inline uint32_t nki_narrow(uint32_t a, int M, int bias) {
    uint32_t smallest = (uint32_t)(128 - bias) << 23; /* smallest normal of the format */
    uint32_t magic = (uint32_t)(127 + 23 + 1 - bias - M) << 23;
    uint32_t normal = ((a + ((1u << (22 - M)) - 1) + ((a >> (23 - M)) & 1)) >> (23 - M)) - ((uint32_t)(127 - bias) << M);
    /* Adding a power of two whose last place is the smallest denormal rounds there. A float32 denormal is far below
     * half of that and gives 0; it does not reach the addition. */
    uint32_t small = a < 0x00800000u ? 0u : (a < smallest ? a : 0u);
    uint32_t denormal = nki_bits(nki_float(small) + nki_float(magic)) - magic;
    return a < smallest ? denormal : normal;
}

/* `top`: the first code that is no finite number; `over` stands for what overflows, `nan` for NaN. */
static inline uint32_t nki_encode(float x, int M, int bias, int width, uint32_t top, uint32_t over, uint32_t nan) {
    uint32_t u = nki_bits(x), a = u & 0x7fffffffu, sign = (u >> 31) << (width - 1);
    uint32_t r = nki_narrow(a > 0x7f800000u ? 0x7f800000u : a, M, bias);
    r = r >= top ? over : r;
    return sign | (a > 0x7f800000u ? nan : r);
}

static inline float nki_decode(uint32_t u, int M, int bias, int width, uint32_t inf) {
    uint32_t a = u & ((1u << (width - 1)) - 1), sign = (u >> (width - 1)) << 31;
    uint32_t normal = (a << (23 - M)) + ((uint32_t)(127 - bias) << 23);
    /* The mantissa of a denormal as an integer, times the smallest denormal. */
    uint32_t denormal = nki_bits((float)(int32_t)(a & ((1u << M) - 1)) * nki_float((uint32_t)(128 - bias - M) << 23));
    uint32_t r = (a >> M) == 0 ? denormal : normal;
    r = a >= inf ? 0x7f800000u | ((a - inf) << (23 - M)) : r;
    return nki_float(sign | r);
}

static inline float nki_ld_f32(float x) { return x; }
static inline float nki_st_f32(float x) { return x; }
static inline float nki_ld_bf16(uint16_t x) { return nki_float((uint32_t)x << 16); }
static inline uint16_t nki_st_bf16(float x) {
    uint32_t u = nki_bits(x), r = (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
    return (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? ((u >> 16) & 0x8000u) | 0x7fc0u : r);
}
static inline float nki_ld_f16(uint16_t x) { return nki_decode(x, 10, 15, 16, 0x7c00); }
static inline uint16_t nki_st_f16(float x) { return (uint16_t)nki_encode(x, 10, 15, 16, 0x7c00, 0x7c00, 0x7e00); }
static inline float nki_ld_f8e4m3(uint8_t x) { return nki_decode(x, 3, 7, 8, 0x78); }
static inline uint8_t nki_st_f8e4m3(float x) { return (uint8_t)nki_encode(x, 3, 7, 8, 0x78, 0x78, 0x7c); }
static inline float nki_ld_f8e4m3fn(uint8_t x) {
    float r = nki_decode(x, 3, 7, 8, 0x80); /* all exponents are numbers, except for the last code */
    return (x & 0x7f) == 0x7f ? nki_float(0x7fc00000u | (uint32_t)(x >> 7) << 31) : r;
}
static inline uint8_t nki_st_f8e4m3fn(float x) { return (uint8_t)nki_encode(x, 3, 7, 8, 0x7f, 0x7f, 0x7f); }
static inline float nki_ld_f8e5m2(uint8_t x) { return nki_decode(x, 2, 15, 8, 0x7c); }
static inline uint8_t nki_st_f8e5m2(float x) { return (uint8_t)nki_encode(x, 2, 15, 8, 0x7c, 0x7c, 0x7e); }
static inline float nki_st_tf32(float x) {
    uint32_t u = nki_bits(x), r = u + 0xfffu + ((u >> 13) & 1);
    r = (u & 0x7fffffffu) > 0x7f800000u ? u | 0x00400000u : r;
    return nki_float(r & ~0x1fffu);
}

/* ---- integers: saturating, NaN gives 0 ------------------------------------------------------------------------ */
static inline float nki_ld_i32(int32_t x) { return (float)x; }
static inline float nki_ld_u32(uint32_t x) { return (float)x; }
static inline float nki_ld_i16(int16_t x) { return (float)x; }
static inline float nki_ld_u16(uint16_t x) { return (float)x; }
static inline float nki_ld_i8(int8_t x) { return (float)x; }
static inline float nki_ld_u8(uint8_t x) { return (float)x; }

static inline int32_t nki_clipped(float x, float low, float high) { /* ends that float32 holds exactly */
    float r = nki_rint(x);
    r = r > low ? r : low; /* false for NaN as well */
    r = r < high ? r : high;
    return x != x ? 0 : (int32_t)r;
}
static inline int32_t nki_st_i32(float x) {
    int32_t r = nki_clipped(x, -0x1p31f, 0x1.fffffep30f);
    return x >= 0x1p31f ? INT32_MAX : r;
}
static inline uint32_t nki_st_u32(float x) {
    int over = x >= 0x1p31f;
    uint32_t low = (uint32_t)nki_clipped(over ? x - 0x1p31f : x, 0.0f, 0x1.fffffep30f);
    uint32_t r = over ? low + 0x80000000u : low;
    return x >= 0x1p32f ? UINT32_MAX : r;
}
static inline int16_t nki_st_i16(float x) { return (int16_t)nki_clipped(x, -32768.0f, 32767.0f); }
static inline uint16_t nki_st_u16(float x) { return (uint16_t)nki_clipped(x, 0.0f, 65535.0f); }
static inline int8_t nki_st_i8(float x) { return (int8_t)nki_clipped(x, -128.0f, 127.0f); }
static inline uint8_t nki_st_u8(float x) { return (uint8_t)nki_clipped(x, 0.0f, 255.0f); }
static inline uint8_t nki_st_bool(float x) { return x != 0.0f; }

/* number, type in memory, value of an element, element of a value */
#define NKI_EACH_DTYPE(X)                                                                                              \
    X(NKI_F32, nki_f32a, nki_ld_f32, nki_st_f32)                                                                       \
    X(NKI_BF16, nki_u16a, nki_ld_bf16, nki_st_bf16)                                                                    \
    X(NKI_F16, nki_u16a, nki_ld_f16, nki_st_f16)                                                                       \
    X(NKI_F8E4M3, nki_u8a, nki_ld_f8e4m3, nki_st_f8e4m3)                                                               \
    X(NKI_F8E4M3FN, nki_u8a, nki_ld_f8e4m3fn, nki_st_f8e4m3fn)                                                         \
    X(NKI_F8E5M2, nki_u8a, nki_ld_f8e5m2, nki_st_f8e5m2)                                                               \
    X(NKI_TF32, nki_f32a, nki_ld_f32, nki_st_tf32)                                                                     \
    X(NKI_I32, nki_i32a, nki_ld_i32, nki_st_i32)                                                                       \
    X(NKI_U32, nki_u32a, nki_ld_u32, nki_st_u32)                                                                       \
    X(NKI_I16, nki_i16a, nki_ld_i16, nki_st_i16)                                                                       \
    X(NKI_U16, nki_u16a, nki_ld_u16, nki_st_u16)                                                                       \
    X(NKI_I8, nki_i8a, nki_ld_i8, nki_st_i8)                                                                           \
    X(NKI_U8, nki_u8a, nki_ld_u8, nki_st_u8)                                                                           \
    X(NKI_BOOL, nki_u8a, nki_ld_u8, nki_st_bool)

/* n elements with `stride` bytes from one to the next (that of the dtype: the vectorised loop). Raw: 32-bit lanes. */
typedef void (*nki_loader)(float *d, const char *s, int64_t stride, int n);
typedef void (*nki_storer)(char *d, int64_t stride, const float *a, int n);
typedef struct {
    int size;
    nki_loader load, load_raw;
    nki_storer store, store_raw;
} nki_type;
extern const nki_type nki_types[NKI_DTYPES];

#endif
