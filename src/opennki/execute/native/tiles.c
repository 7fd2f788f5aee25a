/* Products of bfloat16 by the tile unit of x86-64 CPUs (AMX): 16 x 32 by 32 x 16 in one instruction; or, where that is asked for, by the
 * dot instructions of their vectors.
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

static int use = -1;  /* not known yet */
static int dots = -1, narrows;

/* Whether the CPU has instructions for vectors of bfloat16. */
static int vectors_there(void) {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 5 & 1;
}

/* Whether those for dot products are worth it: on Intel's CPUs they take as long as four FMAs, of which they would save two. */
static int dots_there(int slow_too) {
    unsigned a, b, c, d;
    return vectors_there() && (slow_too || !__get_cpuid(0, &a, &b, &c, &d) || b != signature_INTEL_ebx);
}

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
    const int now = wanted == NKI_TILES && there();
    __atomic_store_n(&use, now, __ATOMIC_RELAXED);
    __atomic_store_n(&dots, dots_there(wanted == NKI_DOTS), __ATOMIC_RELAXED);
    __atomic_store_n(&narrows, wanted != NKI_NO_TILES && vectors_there(), __ATOMIC_RELAXED);
    return wanted == NKI_DOTS ? dots_there(1) : now;
}

/* An operand is packed in strips of 32 columns, two rows of `deep` tiles each; all strips of a block, then those of the next. Blocks are
 * computed by groups, whose tiles of one strip stay in the first cache. */
enum { GROUP = 16 }; /* tiles along k */
static int deep_of(const nki_mm *k) { return (k->K + DEEP - 1) / DEEP; }
static int64_t strip_of(const nki_mm *k) { return 2 * (int64_t)deep_of(k) * TILE; }
static int64_t strips(int n) { return (n + 2 * SIDE - 1) / (2 * SIDE); }
static int group_of(const nki_mm *k) {
    const int some = GROUP / deep_of(k), all = nki_blocks(k);
    return some < 1 ? 1 : some < all ? some : all;
}
static int worth(const nki_mm *k) { return k->K >= 8 && (int64_t)k->M * k->N >= 2 * SIDE * SIDE; } /* padding would be most of it */

/* Results of one block and of those before it, the strips of one operand, and a strip of the other. */
enum { ROOM = 4 * TILE };
typedef float f32_any __attribute__((aligned(1), may_alias));
typedef int32_t i32_any __attribute__((aligned(1), may_alias));
size_t nki_tiles_scratch(const nki_mm *k) {
    return worth(k) ? (size_t)((strips(k->M) + 1) * strip_of(k) * group_of(k) + 2 * ROOM) : 0;
}

/* Largest and smallest magnitude but for 0, as 16-bit numbers; less one, which makes 0 the largest. */
typedef struct {
    __m512i high, low;
} range;

static inline void look(range *r, __m512i v) {
    const __m512i u = _mm512_and_si512(v, _mm512_set1_epi16(0x7fff));
    r->low = _mm512_min_epu16(r->low, _mm512_sub_epi16(u, _mm512_set1_epi16(1)));
    r->high = _mm512_max_epu16(r->high, u);
}
static inline range nothing(void) { return (range){_mm512_setzero_si512(), _mm512_set1_epi16(-1)}; }

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
    int64_t k_step, step, block; /* bytes from k to k + 1, from column to column, and from block to block */
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
    if (o->k_step == 2 && o->dtype == NKI_BF16 && turned == 0 && n == SIDE && deep == DEEP) { /* it is a tile already */
        range even = *r, odd = nothing();
#pragma GCC unroll 8
        for (int i = 0; i < SIDE; i += 2, at += 2 * o->step, tile += 2 * DEEP * 2) {
            const __m512i a = _mm512_loadu_si512(at), b = _mm512_loadu_si512(at + o->step);
            _mm512_store_si512(tile, a), _mm512_store_si512(tile + DEEP * 2, b);
            look(&even, a), look(&odd, b);
        }
        *r = (range){_mm512_max_epu16(even.high, odd.high), _mm512_min_epu16(even.low, odd.low)};
        return;
    }
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
static WITH_TILES void block_of_tiles(const char *a, const char *b, int64_t row, int deep, char *out, int64_t pitch) {
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

/* Add `from` to `sum`, both 32 x 32 and side by side. */
static void join(float *sum, const float *from) {
    for (int i = 0; i < ROOM / 4; i += SIDE) _mm512_store_ps(sum + i, _mm512_add_ps(_mm512_load_ps(sum + i), _mm512_load_ps(from + i)));
}

/* Add `sum`, of which rows x cols are results, to what is there, in its place. */
static void add_before(const nki_mm *k, const char *d, float *sum, int rows, int cols) {
    for (int i = 0; i < rows; i++, sum += 2 * SIDE)
        for (int j = 0; j < cols; j++) sum[j] = *(const f32_any *)(d + i * k->d_stride[0] + j * k->d_stride[1]) + sum[j];
}

/* Store `sum + more`, or `sum` where there is no more; `before`: what is there is added first. */
static void put(const nki_mm *k, int before, char *d, const float *sum, const float *more, int rows, int cols) {
    for (int i = 0; i < rows; i++, sum += 2 * SIDE, more += more ? 2 * SIDE : 0) {
        char *to = d + i * k->d_stride[0];
        if (k->d_stride[1] == 4)
            for (int j = 0; j < cols; j += SIDE) {
                const __mmask16 some = (__mmask16)first_of(cols - j < SIDE ? cols - j : SIDE);
                __m512 v = _mm512_load_ps(sum + j);
                if (before) v = _mm512_add_ps(_mm512_maskz_loadu_ps(some, to + j * 4), v);
                if (more) v = _mm512_add_ps(v, _mm512_load_ps(more + j));
                _mm512_mask_storeu_ps(to + j * 4, some, v);
            }
        else
            for (int j = 0; j < cols; j++) {
                f32_any *at = (f32_any *)(void *)(to + j * k->d_stride[1]);
                const float v = before ? *at + sum[j] : sum[j];
                *at = more ? v + more[j] : v;
            }
    }
}

/* The same by the dot instructions of vectors: each lane has a column, each of 8 rows its own sums. */
#define WITH_DOTS __attribute__((target("avx512bf16")))
static WITH_DOTS void block_of_dots(const char *a, const char *b, int64_t row, int deep, char *out, int64_t pitch) {
    enum { AT_ONCE = 8 };
    for (int m = 0; m < 2 * SIDE; m += AT_ONCE) {
        __m512 sum[AT_ONCE][2];
        const char *left = a + m / SIDE * row + m % SIDE * DEEP * 2;
#pragma GCC unroll 8
        for (int i = 0; i < AT_ONCE; i++) sum[i][0] = sum[i][1] = _mm512_setzero_ps();
        for (int t = 0; t < deep; t++)
            for (int pair = 0; pair < SIDE; pair++) {
                const __m512bh low = (__m512bh)_mm512_load_si512(b + t * TILE + pair * 64);
                const __m512bh high = (__m512bh)_mm512_load_si512(b + row + t * TILE + pair * 64);
#pragma GCC unroll 8
                for (int i = 0; i < AT_ONCE; i++) {
                    const __m512bh one = (__m512bh)_mm512_set1_epi32(*(const i32_any *)(const void *)(left + t * TILE + i * 64 + pair * 4));
                    sum[i][0] = _mm512_dpbf16_ps(sum[i][0], one, low);
                    sum[i][1] = _mm512_dpbf16_ps(sum[i][1], one, high);
                }
            }
#pragma GCC unroll 8
        for (int i = 0; i < AT_ONCE; i++) {
            _mm512_storeu_ps(out + (m + i) * pitch, sum[i][0]);
            _mm512_storeu_ps(out + (m + i) * pitch + 64, sum[i][1]);
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

/* 32 columns from `first` on, packed; their smallest exponent. *depth: tiles along k up to the last one that is not all zeros. */
static int pack_strip(const operand *o, int K, int first, int turned, char *to, int *depth) {
    range all = nothing();
    uint16_t room[2 * SIDE];
    const int64_t half = (int64_t)(K + DEEP - 1) / DEEP * TILE;
    *depth = 0;
    for (int k0 = 0; k0 < K; k0 += DEEP, to += TILE) {
        range r = nothing();
        pack(o, K, k0, first, turned, to, &r, room);
        pack(o, K, k0, first + SIDE, turned, to + half, &r, room);
        if (_mm512_test_epi16_mask(r.high, r.high)) *depth = k0 / DEEP + 1;
        all = (range){_mm512_max_epu16(all.high, r.high), _mm512_min_epu16(all.low, r.low)};
    }
    return smallest(&all);
}

/* All columns of some blocks. */
static int pack_all(const operand *o, const nki_mm *k, int blocks, int turned, char *to) {
    int least = 255, depth;
    operand one = *o;
    for (int i = 0; i < blocks; i++, one.at += o->block)
        for (int first = 0; first < o->n; first += 2 * SIDE, to += strip_of(k)) {
            const int e = pack_strip(&one, k->K, first, turned, to, &depth);
            least = e < least ? e : least;
        }
    return least;
}

static operand operand_of(const nki_mm *k, int moving, const char *at) {
    if (moving) return (operand){k->m_dtype, k->N, k->m_stride[0], k->m_stride[1], k->m_block, at};
    return (operand){k->s_dtype, k->M, k->s_stride[0], k->s_stride[1], k->s_block, at};
}

static int used(void) {
    const int now = __atomic_load_n(&use, __ATOMIC_RELAXED);
    return now < 0 ? nki_tiles_use(NKI_TILES) : now;
}

int nki_narrows_there(void) { return used(), __atomic_load_n(&narrows, __ATOMIC_RELAXED); }

/* What computes a product from packed operands; NONE: nothing here. */
enum way { NONE, UNIT, DOTS };
static enum way way_of(const nki_mm *k) { return !worth(k) ? NONE : used() ? UNIT : k->dot && __atomic_load_n(&dots, __ATOMIC_RELAXED) ? DOTS : NONE; }

static int64_t block_of(const nki_mm *k, int n) { return strips(n) * strip_of(k); } /* all strips of a block */

int nki_tiles_there(const nki_mm *k) { return way_of(k) != NONE; }

size_t nki_tiles_kept(const nki_mm *k, int moving) { return (size_t)(block_of(k, moving ? k->N : k->M) * nki_blocks(k)) + 64; }

/* The smallest exponent is behind the strips. */
static int32_t *exponent_of(const nki_mm *k, int moving, const void *packed) {
    return (int32_t *)(void *)((char *)(uintptr_t)packed + block_of(k, moving ? k->N : k->M) * nki_blocks(k));
}

void nki_tiles_keep(const nki_mm *k, int moving, const char *at, void *packed) {
    const operand o = operand_of(k, moving, at);
    *exponent_of(k, moving, packed) = pack_all(&o, k, nki_blocks(k), moving, packed);
}

/* Strips of one operand: those of block i begin at at + i * block, one is strip_of apart from the next. */
typedef struct {
    const char *at;
    int64_t block;
} packed;

/* The results of a strip of rows and one of columns, from some blocks. `depth`: of each block, how many tiles along k are not all zeros in
 * one of them; the others add nothing to numbers that are finite, and sums that begin with 0 are never -0. */
static void meet(const nki_mm *k, enum way way, int adds, int blocks, packed a, packed b, const int *depth, int m, int n, char *dst,
                 char *room) {
    const int rows = k->M - m < 2 * SIDE ? k->M - m : 2 * SIDE, cols = k->N - n < 2 * SIDE ? k->N - n : 2 * SIDE;
    const int before = adds == NKI_ADDS_TO_RESULT, whole = k->d_stride[1] == 4 && rows == 2 * SIDE && cols == 2 * SIDE;
    const int64_t half = strip_of(k) / 2, pitch = 2 * SIDE * 4;
    void (*const block)(const char *, const char *, int64_t, int, char *, int64_t) = way == UNIT ? block_of_tiles : block_of_dots;
    char *d = dst + m * k->d_stride[0] + n * k->d_stride[1];
    if (blocks == 1 && whole && !before) {
        block(a.at, b.at, half, depth[0], d, k->d_stride[0]);
        return;
    }
    float *sum = (float *)(void *)room, *more = NULL;
    block(a.at, b.at, half, depth[0], room, pitch);
    if (before && blocks > 1) add_before(k, d, sum, rows, cols);
    for (int i = 1; i < blocks; i++) {
        if (!depth[i]) continue;
        if (more) join(sum, more);
        more = (float *)(void *)(room + ROOM);
        block(a.at + i * a.block, b.at + i * b.block, half, depth[i], (char *)more, pitch);
    }
    put(k, before && blocks == 1, d, sum, more, rows, cols);
}

/* Some blocks. `kept`: the same of operands that are kept, else NULL. Where the unit would not do, the rest is computed without it. */
static void group(const nki_mm *k, enum way way, const operand *a, const operand *b, char *dst, char *scratch, const char *kept_a,
                  const char *kept_b, int of_a, int of_b, const int64_t *where) {
    const int blocks = k->blocks;
    const int64_t strip = strip_of(k), step = 2 * SIDE;
    char *room = scratch, *right = room + 2 * ROOM, *left = right + strip * blocks;
    nki_mm rest = *k;
    const operand *by = kept_b ? a : b; /* whose strips are packed as they come, and stay in the first cache while those of the other go by */
    int least = kept_b ? of_b : kept_a ? of_a : pack_all(a, k, blocks, 0, left);
    const packed all = {kept_b ? kept_b : kept_a ? kept_a : left, block_of(k, kept_b ? k->N : k->M)};
    if (kept_b && kept_a) least = least + of_a < SMALLEST ? -1 : least;
    if (way == UNIT) begin();
    for (int first = 0; first < by->n; first += (int)step) {
        packed one = {right, strip};
        int fits = least >= 0 || k->dot, depth[GROUP], finite = least >= 0;
        if (kept_b && kept_a) {
            one = (packed){kept_a + first / step * strip, block_of(k, k->M)};
        } else if (fits) {
            operand part = *by;
            for (int i = 0; i < blocks && fits; i++, part.at += by->block) {
                const int e = pack_strip(&part, k->K, first, by == b, right + i * strip, &depth[i]);
                fits = (e >= 0 && e + least >= SMALLEST) || k->dot;
                finite &= e >= 0;
            }
        }
        for (int i = 0; i < blocks && (!finite || (kept_a && kept_b)); i++) depth[i] = deep_of(k);
        if (!fits) {
            if (way == UNIT) end();
            *(by == a ? &rest.M : &rest.N) -= first;
            nki_mm_vectors(&rest, a->at + (by == a) * first * a->step, b->at + (by == b) * first * b->step,
                           dst + first * k->d_stride[by == b], scratch);
            return;
        }
        packed other = all;
        for (int n = 0; n < (by == a ? k->N : k->M); n += (int)step, other.at += strip) {
            if (nki_unwanted(k, where, by == a ? first : n, 2 * SIDE, by == a ? n : first, 2 * SIDE)) continue;
            if (by == a)
                meet(k, way, k->accumulate, blocks, one, other, depth, first, n, dst, room);
            else
                meet(k, way, k->accumulate, blocks, other, one, depth, n, first, dst, room);
        }
    }
    if (way == UNIT) end();
}

void nki_tiles_run(const nki_mm *k, const char *stationary, const char *moving, char *dst, void *scratch, const void *kept_s,
                   const void *kept_m, const int64_t *where) {
    const enum way way = way_of(k);
    operand a = operand_of(k, 0, stationary), b = operand_of(k, 1, moving);
    const int of_a = kept_s ? *exponent_of(k, 0, kept_s) : 0, of_b = kept_m ? *exponent_of(k, 1, kept_m) : 0, all = nki_blocks(k);
    nki_mm some = *k;
    for (int i = 0; i < all; i += some.blocks) {
        some.blocks = all - i < group_of(k) ? all - i : group_of(k);
        some.accumulate = nki_adds_then(k, i);
        group(&some, way, &a, &b, dst, scratch, kept_s ? (const char *)kept_s + i * block_of(k, k->M) : NULL,
              kept_m ? (const char *)kept_m + i * block_of(k, k->N) : NULL, of_a, of_b, where);
        a.at += some.blocks * a.block, b.at += some.blocks * b.block;
    }
}

#else
int nki_narrows_there(void) { return 0; }
int nki_tiles_use(int wanted) {
    (void)wanted;
    return 0;
}
size_t nki_tiles_scratch(const nki_mm *k) {
    (void)k;
    return 0;
}
int nki_tiles_there(const nki_mm *k) {
    (void)k;
    return 0;
}
size_t nki_tiles_kept(const nki_mm *k, int moving) {
    (void)k, (void)moving;
    return 0;
}
void nki_tiles_keep(const nki_mm *k, int moving, const char *at, void *packed) {
    (void)k, (void)moving, (void)at, (void)packed;
}
void nki_tiles_run(const nki_mm *k, const char *stationary, const char *moving, char *dst, void *scratch, const void *kept_s,
                   const void *kept_m, const int64_t *where) {
    (void)where, (void)k, (void)stationary, (void)moving, (void)dst, (void)scratch, (void)kept_s, (void)kept_m;
}
#endif
