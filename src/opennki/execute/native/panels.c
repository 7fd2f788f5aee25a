/* Operands of matrix products as panels of float32: see panels.h. */
#include "panels.h"
#include <string.h>

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

/* Some of the K rows of `cols` elements to panels of `width` floats for each k, zeros behind the last column. */
#define PACK_ROWS(name, type)                                                                                       \
    static inline __attribute__((always_inline)) void row_##name(const type *restrict row, int cols,                \
                                                                 const int width, float *restrict at, int64_t apart) \
    {                                                                                                               \
        int c = 0;                                                                                                  \
        for (; c + width <= cols; c += width, at += apart)                                                          \
            for (int i = 0; i < width; i++) at[i] = widen_##name(row[c + i]);                                       \
        for (int i = 0; c < cols && i < width; i++) at[i] = c + i < cols ? widen_##name(row[c + i]) : 0.0f;         \
    }                                                                                                               \
    static void pack_rows_##name(const char *src, int64_t step, int rows, int K, int cols, int width, float *dst)   \
    {                                                                                                               \
        const int64_t apart = (int64_t)K * width;                                                                   \
        for (int k = 0; k < rows; k++, src += step, dst += width) {                                                 \
            if (width == NKI_PANEL)                                                                                 \
                row_##name((const type *)src, cols, NKI_PANEL, dst, apart);                                         \
            else if (width == NKI_PANEL_OF_VECTORS)                                                                 \
                row_##name((const type *)src, cols, NKI_PANEL_OF_VECTORS, dst, apart);                              \
            else                                                                                                    \
                row_##name((const type *)src, cols, width, dst, apart);                                             \
        }                                                                                                           \
    }
/* What is contiguous along k instead: a line of each column at a time is turned, and goes on as rows. */
enum { LINE = 64 };
#define PACK(name, type)                                                                                            \
    static void pack_##name(const char *src, const int64_t *stride, int K, int cols, int width, float *dst)         \
    {                                                                                                               \
        enum { SIZE = sizeof(type), DEEP = LINE / SIZE };                                                           \
        char rows[LINE * NKI_PANELS_AT_ONCE] __attribute__((aligned(64)));                                          \
        if (stride[1] == SIZE) return pack_rows_##name(src, stride[0], K, K, cols, width, dst);                     \
        if (stride[0] == SIZE) {                                                                                    \
            for (int k = 0; k < K; k += DEEP) {                                                                     \
                const int deep = K - k < DEEP ? K - k : DEEP;                                                       \
                nki_transpose(SIZE, rows, src + k * SIZE, cols, deep, cols * SIZE, stride[1]);                      \
                pack_rows_##name(rows, cols * SIZE, deep, K, cols, width, dst + (int64_t)k * width);                \
            }                                                                                                       \
            return;                                                                                                 \
        }                                                                                                           \
        for (int c0 = 0; c0 < cols; c0 += width, dst += (int64_t)K * width)                                         \
            for (int k = 0; k < K; k++) {                                                                           \
                const char *row = src + k * stride[0] + c0 * stride[1];                                             \
                float *at = dst + (int64_t)k * width;                                                               \
                int n = cols - c0 < width ? cols - c0 : width;                                                      \
                for (int c = 0; c < n; c++) at[c] = widen_##name(*(const type *)(row + c * stride[1]));             \
                for (int c = n; c < width; c++) at[c] = 0.0f;                                                       \
            }                                                                                                       \
    }
PACK_ROWS(f32, f32_any)
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

const nki_panels_fn nki_panels[NKI_DTYPES] = {
    [NKI_F32] = pack_f32, [NKI_BF16] = pack_bf16, [NKI_F16] = pack_f16, [NKI_F8E4M3] = pack_e4m3,
    [NKI_F8E4M3FN] = pack_e4m3fn, [NKI_F8E5M2] = pack_e5m2, [NKI_TF32] = pack_f32,
};

int nki_panels_finite(const float *x, size_t n)
{
    uint32_t most = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, 4);
        bits &= 0x7fffffffu;
        most = bits > most ? bits : most;
    }
    return most < 0x7f800000u;
}

static inline int all_zeros(const char *rows, int n)
{
    uint32_t any = 0;
    for (int i = 0; i < n * NKI_PANEL; i++) {
        uint32_t bits;
        memcpy(&bits, rows + i * 4, 4);
        any |= bits;
    }
    return !(any & 0x7fffffffu);
}
int nki_panel_depth(const char *panel, int K)
{
    int end = K;
    for (int from; end > 0; end = from) {
        from = (end - 1) / NKI_PAIRS * NKI_PAIRS;
        const char *at = panel + (size_t)from * NKI_PANEL * 4, *last = panel + (size_t)(end - 1) * NKI_PANEL * 4;
        if (!all_zeros(last, 1) || !all_zeros(at, end - from)) break;
    }
    return end;
}
