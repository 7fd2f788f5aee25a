/* Products of bfloat16 by the tile unit of x86-64 CPUs (AMX): 16 x 32 by 32 x 16 in one instruction.
 *
 * The unit sums in the order of pairs (nki.h), each step an FMA that is rounded once. It takes denormals for zeros, and
 * gives zeros in the place of denormals; operands whose products are whole multiples of a normal number never meet them,
 * and their exponents tell. Where they may, and where there are infinities or NaN, nki_mm_run goes on without the unit.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <string.h>
#include "convert.h"

#if defined(__x86_64__) && defined(__AVX512BW__) && defined(__linux__) && (__GNUC__ >= 11 || __clang_major__ >= 12)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define WITH_TILES __attribute__((target("amx-tile,amx-bf16")))

enum { SIDE = 16, DEEP = NKI_PAIRS, TILE = SIDE * DEEP * 2 }; /* rows or columns, k, and bytes of a tile */
enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };         /* arch_prctl */
enum { SMALLEST = 142 }; /* sum of the exponents (biased) of two numbers, 14 places above the smallest normal one */

static int use = -1; /* not known yet */

static int there(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1)) return 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return 0;
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low >> 17 & 3) != 3) return 0;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

int nki_tiles_use(int wanted) {
    const int now = wanted && there();
    __atomic_store_n(&use, now, __ATOMIC_RELAXED);
    return now;
}

static int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

size_t nki_tiles_scratch(const nki_mm *k) {
    const int64_t K = up(k->K, DEEP), M = up(k->M, 2 * SIDE);
    const int64_t wide = k->M > k->N ? k->M : k->N;
    return (size_t)(K * M * 2 + K * 2 * SIDE * 2 + 4 * TILE + 2 * up(wide, 64) * 2);
}

/* Largest and smallest magnitude but for 0, as 16-bit numbers; less one, which makes 0 the largest. */
typedef struct {
    __m512i high, low;
} range;

static inline void look(range *r, __m512i v) {
    const __m512i one = _mm512_set1_epi16(1), u = _mm512_sub_epi16(_mm512_and_si512(v, _mm512_set1_epi16(0x7fff)), one);
    r->low = _mm512_min_epu16(r->low, u);
    r->high = _mm512_max_epu16(r->high, _mm512_add_epi16(u, one));
}

/* Smallest exponent but for that of 0 (255: all are 0); -1 where the unit would not do. */
static int smallest(const range *r) {
    uint16_t high[32], low[32], top = 0, bottom = 0xffff;
    _mm512_storeu_si512(high, r->high);
    _mm512_storeu_si512(low, r->low);
    for (int i = 0; i < 32; i++) {
        top = high[i] > top ? high[i] : top;
        bottom = low[i] < bottom ? low[i] : bottom;
    }
    if (top >= 0x7f80 || bottom + 1 < 0x80) return -1;
    return bottom == 0xffff ? 255 : (bottom + 1) >> 7;
}

typedef struct {
    int dtype, n;
    int64_t k_step, step; /* bytes from k to k + 1, and from column to column */
    const char *at;
} operand;

/* `n` elements as bfloat16, where they are or in `room`. */
static const uint16_t *narrow(const operand *o, const char *at, int64_t step, int n, uint16_t *room) {
    if (o->dtype == NKI_BF16) {
        if (step == 2) return (const uint16_t *)at;
        for (int i = 0; i < n; i++) memcpy(&room[i], at + i * step, 2);
        return room;
    }
    float wide[128];
    for (int i = 0; i < n; i += 128) {
        const int some = n - i < 128 ? n - i : 128;
        nki_types[o->dtype].load(wide, at + i * step, step, some); /* exact: float8 has fewer bits, and normal exponents here */
        for (int j = 0; j < some; j++) room[i + j] = (uint16_t)(nki_bits(wide[j]) >> 16);
    }
    return room;
}

static __mmask32 first_of(int n) { return n >= 32 ? ~0u : n <= 0 ? 0u : (1u << n) - 1; }

/* 16 x 16 of 32 bits, in place. */
static inline void transpose(__m512i *r) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]), t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]), r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]), r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88), t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88), t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
}

/* 16 columns from `first` on and 32 k from `k0` on, as 16 rows of 16 pairs of k: a row for each column, or, `turned`, for
 * each pair. What is not there is 0. */
static void pack(const operand *o, int K, int k0, int first, int turned, char *tile, range *r, uint16_t *room) {
    __m512i row[SIDE];
    const int n = o->n - first < SIDE ? o->n - first : SIDE, deep = K - k0 < DEEP ? K - k0 : DEEP;
    const char *at = o->at + first * o->step + k0 * o->k_step;
    if (o->k_step == 2 && o->dtype == NKI_BF16) { /* pairs are there: rows for columns */
        for (int i = 0; i < SIDE; i++) {
            row[i] = _mm512_setzero_si512();
            if (i < n) row[i] = _mm512_maskz_loadu_epi16(first_of(deep), at + i * o->step);
            look(r, row[i]);
        }
        turned = !turned;
    } else if (o->dtype == NKI_BF16 && o->step == 2 && n == SIDE && deep == DEEP) {
#pragma GCC unroll 4
        for (int i = 0; i < SIDE; i++, at += 2 * o->k_step) {
            const __m512i even = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)at));
            const __m512i odd = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)(at + o->k_step)));
            row[i] = _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
            look(r, row[i]);
        }
    } else {
        for (int i = 0; i < SIDE; i++) {
            __m256i even = _mm256_setzero_si256(), odd = even;
            const __mmask16 some = (__mmask16)first_of(n);
            if (2 * i < deep) even = _mm256_maskz_loadu_epi16(some, narrow(o, at + 2 * i * o->k_step, o->step, n, room));
            if (2 * i + 1 < deep) odd = _mm256_maskz_loadu_epi16(some, narrow(o, at + (2 * i + 1) * o->k_step, o->step, n, room));
            row[i] = _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
            look(r, row[i]);
        }
    }
    if (!turned) transpose(row);
    for (int i = 0; i < SIDE; i++) _mm512_store_si512(tile + i * DEEP * 2, row[i]);
}

/* 32 x 32 results in `out`, from two rows of packed tiles. */
static WITH_TILES void block(const char *a, const char *b, int64_t row, int deep, char *out, int64_t pitch) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int i = 0; i < deep; i++, a += TILE, b += TILE) {
        _tile_loadd(4, a, DEEP * 2);
        _tile_loadd(6, b, DEEP * 2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + row, DEEP * 2);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a + row, DEEP * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out, pitch);
    _tile_stored(1, out + SIDE * 4, pitch);
    _tile_stored(2, out + SIDE * pitch, pitch);
    _tile_stored(3, out + SIDE * pitch + SIDE * 4, pitch);
}

static void put(const nki_mm *k, char *d, const float *from, int rows, int cols) {
    for (int i = 0; i < rows; i++, from += 2 * SIDE) {
        char *to = d + i * k->d_stride[0];
        if (k->d_stride[1] == 4)
            for (int j = 0; j < cols; j += SIDE) {
                const __mmask16 some = (__mmask16)first_of(cols - j < SIDE ? cols - j : SIDE);
                __m512 v = _mm512_load_ps(from + j);
                if (k->accumulate) v = _mm512_add_ps(_mm512_maskz_loadu_ps(some, to + j * 4), v);
                _mm512_mask_storeu_ps(to + j * 4, some, v);
            }
        else
            for (int j = 0; j < cols; j++) {
                float v = from[j], before;
                if (k->accumulate) {
                    memcpy(&before, to + j * k->d_stride[1], 4);
                    v = before + v;
                }
                memcpy(to + j * k->d_stride[1], &v, 4);
            }
    }
}

static WITH_TILES void begin(void) {
    static const struct __attribute__((aligned(64))) {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } all = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    _tile_loadconfig(&all);
}
static WITH_TILES void end(void) { _tile_release(); }

int nki_tiles_run(const nki_mm *k, const char *stationary, const char *moving, char *dst, void *scratch) {
    int used = __atomic_load_n(&use, __ATOMIC_RELAXED);
    if (used < 0) used = nki_tiles_use(1);
    if (!used || k->K < 8 || (int64_t)k->M * k->N < 2 * SIDE * SIDE) return 0; /* padding would be most of it */
    const operand a = {k->s_dtype, k->M, k->s_stride[0], k->s_stride[1], stationary};
    const operand b = {k->m_dtype, k->N, k->m_stride[0], k->m_stride[1], moving};
    const int deep = (k->K + DEEP - 1) / DEEP;
    const int64_t row = (int64_t)deep * TILE;
    char *left = scratch, *right = left + up(k->M, 2 * SIDE) / SIDE * row, *p = right + 2 * row;
    float *out = (float *)p;
    uint16_t *room = (uint16_t *)(p + 4 * TILE);
    range in_a = {_mm512_setzero_si512(), _mm512_set1_epi16(-1)};
    for (int m = 0; m < up(k->M, 2 * SIDE); m += SIDE)
        for (int i = 0; i < deep; i++) pack(&a, k->K, i * DEEP, m, 0, left + m / SIDE * row + i * TILE, &in_a, room);
    const int of_a = smallest(&in_a);
    if (of_a < 0) return 0;
    begin();
    for (int n = 0; n < k->N; n += 2 * SIDE) {
        range in_b = {_mm512_setzero_si512(), _mm512_set1_epi16(-1)};
        for (int j = 0; j < 2; j++)
            for (int i = 0; i < deep; i++) pack(&b, k->K, i * DEEP, n + j * SIDE, 1, right + j * row + i * TILE, &in_b, room);
        const int of_b = smallest(&in_b), cols = k->N - n < 2 * SIDE ? k->N - n : 2 * SIDE;
        if (of_b < 0 || of_a + of_b < SMALLEST) { /* the same columns without the unit */
            nki_mm rest = *k;
            end();
            rest.N = k->N - n;
            nki_mm_vectors(&rest, stationary, moving + n * k->m_stride[1], dst + n * k->d_stride[1], scratch);
            return 1;
        }
        for (int m = 0; m < k->M; m += 2 * SIDE) {
            const int rows = k->M - m < 2 * SIDE ? k->M - m : 2 * SIDE;
            char *d = dst + m * k->d_stride[0] + n * k->d_stride[1];
            const int straight = !k->accumulate && k->d_stride[1] == 4 && rows == 2 * SIDE && cols == 2 * SIDE;
            block(left + m / SIDE * row, right, row, deep, straight ? d : p, straight ? k->d_stride[0] : 2 * SIDE * 4);
            if (!straight) put(k, d, out, rows, cols);
        }
    }
    end();
    return 1;
}

#else
int nki_tiles_use(int wanted) {
    (void)wanted;
    return 0;
}
size_t nki_tiles_scratch(const nki_mm *k) {
    (void)k;
    return 0;
}
int nki_tiles_run(const nki_mm *k, const char *stationary, const char *moving, char *dst, void *scratch) {
    (void)k, (void)stationary, (void)moving, (void)dst, (void)scratch;
    return 0;
}
#endif
