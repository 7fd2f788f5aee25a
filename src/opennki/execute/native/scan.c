/* Scans: r[i] = op1(op0(x[i], r[i-1]), y[i]).
 *
 * A step waits for the one before it, so ROWS rows go side by side, in a vector or with a register for each. Pieces of the
 * rows are first converted to float32 in a buffer: rows of a tile are often a power of two apart, and would push each
 * other out of the cache. With vectors, rows of float32 mostly need no buffer: skewed(). */
#include "inner.h"

#if defined(__AVX512F__)
#define ROWS 16
#else
#define ROWS 8
#endif
#define PIECE 128
#define PITCH (PIECE + 16) /* floats from row to row of the buffer */

/* Where n elements of ROWS rows are, of float32 side by side: the first element of the first row, and bytes from row to row. The
 * result may be in place of x. Where n is no multiple of LANE, which it is but at the end of a row, elements behind it are computed too,
 * and nobody reads the state. */
typedef struct {
    const char *x, *y;
    char *d;
    int64_t x_row, y_row, d_row;
    int64_t skew; /* by how many bytes each LANE of rows is behind the LANE before it */
} place;
typedef void (*stepper)(const place *at, float *state, int64_t n);

#if defined(__AVX512F__)
/* A vector has a step of 16 rows. Four rows are in each lane of 128 bits, so that squares of 4 x 4 are turned, there and back, within
 * lanes: what goes across them is done by loads and stores, which leave the one port of shuffles alone. */
#include <immintrin.h>
#define LANE 4
#define LANES (ROWS / LANE)
#define ADD(a, b) _mm512_add_ps(a, b)
#define SUBTRACT(a, b) _mm512_sub_ps(a, b)
#define MULTIPLY(a, b) _mm512_mul_ps(a, b)
#define MAXIMUM(a, b) _mm512_mask_mov_ps(_mm512_max_ps(a, b), _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), a)
#define MINIMUM(a, b) _mm512_mask_mov_ps(_mm512_min_ps(a, b), _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), a)
#define UNROLL _Pragma("GCC unroll 16")

static inline __attribute__((always_inline)) __m128 part(const char *p) { return _mm_loadu_ps((const float *)p); }
static inline __attribute__((always_inline)) void turn(__m512 *r) {
    const __m512 a = _mm512_shuffle_ps(r[0], r[1], 0x44), b = _mm512_shuffle_ps(r[2], r[3], 0x44);
    const __m512 c = _mm512_shuffle_ps(r[0], r[1], 0xee), d = _mm512_shuffle_ps(r[2], r[3], 0xee);
    r[0] = _mm512_shuffle_ps(a, b, 0x88), r[1] = _mm512_shuffle_ps(a, b, 0xdd);
    r[2] = _mm512_shuffle_ps(c, d, 0x88), r[3] = _mm512_shuffle_ps(c, d, 0xdd);
}
/* Four steps, each a vector of all rows; `lane`: bytes from a lane's rows to those of the next. */
static inline __attribute__((always_inline)) void get(const char *p, int64_t row, int64_t lane, __m512 *r) {
    UNROLL for (int i = 0; i < LANE; i++, p += row) {
        r[i] = _mm512_insertf32x4(_mm512_castps128_ps512(part(p)), part(p + lane), 1);
        r[i] = _mm512_insertf32x4(_mm512_insertf32x4(r[i], part(p + 2 * lane), 2), part(p + 3 * lane), 3);
    }
    turn(r);
}
static inline __attribute__((always_inline)) void put(char *p, int64_t row, int64_t lane, __m512 *r) {
    turn(r);
    UNROLL for (int i = 0; i < LANE; i++, p += row) {
        _mm_storeu_ps((float *)p, _mm512_castps512_ps128(r[i]));
        _mm_storeu_ps((float *)(p + lane), _mm512_extractf32x4_ps(r[i], 1));
        _mm_storeu_ps((float *)(p + 2 * lane), _mm512_extractf32x4_ps(r[i], 2));
        _mm_storeu_ps((float *)(p + 3 * lane), _mm512_extractf32x4_ps(r[i], 3));
    }
}
#define DEFINE(OP0, OP1)                                                                                               \
    static void scan_##OP0##_##OP1(const place *at, float *state, int64_t n) {                                         \
        const place p = *at;                                                                                           \
        const char *x = p.x, *y = p.y;                                                                                 \
        char *d = p.d;                                                                                                 \
        __m512 s = _mm512_loadu_ps(state);                                                                             \
        for (; n > 0; n -= LANE, x += 16, y += 16, d += 16) {                                                          \
            __m512 a[LANE], b[LANE];                                                                                   \
            get(x, p.x_row, LANE * p.x_row - p.skew, a);                                                               \
            get(y, p.y_row, LANE * p.y_row - p.skew, b);                                                               \
            UNROLL for (int j = 0; j < LANE; j++) a[j] = s = OP1(OP0(a[j], s), b[j]);                                  \
            put(d, p.d_row, LANE * p.d_row - p.skew, a);                                                               \
        }                                                                                                              \
        _mm512_storeu_ps(state, s);                                                                                    \
    }
#else
/* Keeps the compiler from gathering the states into vectors, which it would take apart again at once. */
#if defined(__x86_64__)
#define ALONE(x) __asm__("" : "+x"(x))
#elif defined(__aarch64__)
#define ALONE(x) __asm__("" : "+w"(x))
#else
#define ALONE(x) (void)0
#endif

#define LANE ROWS
#define LANES 1
#define ADD(a, b) ((a) + (b))
#define SUBTRACT(a, b) ((a) - (b))
#define MULTIPLY(a, b) ((a) * (b))
#define MAXIMUM(a, b) (((a) > (b) || (a) != (a)) ? (a) : (b))
#define MINIMUM(a, b) (((a) < (b) || (a) != (a)) ? (a) : (b))

#define DEFINE(OP0, OP1)                                                                                               \
    static void scan_##OP0##_##OP1(const place *at, float *state, int64_t n) {                                         \
        float *restrict x = (float *)at->d; /* the buffer, as below */                                                 \
        const float *restrict y = (const float *)at->y;                                                                \
        float s0 = state[0], s1 = state[1], s2 = state[2], s3 = state[3];                                              \
        float s4 = state[4], s5 = state[5], s6 = state[6], s7 = state[7];                                              \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            STEP(OP0, OP1, 0) STEP(OP0, OP1, 1) STEP(OP0, OP1, 2) STEP(OP0, OP1, 3)                                    \
            STEP(OP0, OP1, 4) STEP(OP0, OP1, 5) STEP(OP0, OP1, 6) STEP(OP0, OP1, 7)                                    \
        }                                                                                                              \
        state[0] = s0, state[1] = s1, state[2] = s2, state[3] = s3;                                                    \
        state[4] = s4, state[5] = s5, state[6] = s6, state[7] = s7;                                                    \
    }
#define STEP(OP0, OP1, r)                                                                                              \
    {                                                                                                                  \
        float t = OP0(x[r * PITCH + i], s##r);                                                                         \
        s##r = OP1(t, y[r * PITCH + i]);                                                                               \
        ALONE(s##r);                                                                                                   \
        x[r * PITCH + i] = s##r;                                                                                       \
    }
#endif
#define DEFINE_ALL(OP0)                                                                                                \
    DEFINE(OP0, ADD) DEFINE(OP0, SUBTRACT) DEFINE(OP0, MULTIPLY) DEFINE(OP0, MAXIMUM) DEFINE(OP0, MINIMUM)
DEFINE_ALL(ADD) DEFINE_ALL(SUBTRACT) DEFINE_ALL(MULTIPLY) DEFINE_ALL(MAXIMUM) DEFINE_ALL(MINIMUM)

static stepper fast_form(const nki_scan *k) {
    /* Sides do not matter to add and multiply; other operators with their sides changed take the general way. */
    if (k->reverse0 && k->op0 != NKI_FN_ADD && k->op0 != NKI_FN_MULTIPLY) return 0;
    if (k->reverse1 && k->op1 != NKI_FN_ADD && k->op1 != NKI_FN_MULTIPLY) return 0;
#define PAIR(OP0, OP1) if (k->op0 == NKI_FN_##OP0 && k->op1 == NKI_FN_##OP1) return scan_##OP0##_##OP1;
#define PAIRS(OP0) PAIR(OP0, ADD) PAIR(OP0, SUBTRACT) PAIR(OP0, MULTIPLY) PAIR(OP0, MAXIMUM) PAIR(OP0, MINIMUM)
    PAIRS(ADD) PAIRS(SUBTRACT) PAIRS(MULTIPLY) PAIRS(MAXIMUM) PAIRS(MINIMUM)
    return 0;
}

typedef struct { /* ROWS rows, or the last of them */
    const nki_scan *k;
    const char *x, *y; /* where the first of the rows begins */
    char *d;
    stepper fast;
    float *xs, *ys, *state;
} group;

/* n columns of the rows `from` to `to` by way of the buffers; each LANE of rows is `skew` columns behind the one before it. */
static void piece(const group *g, int from, int to, int64_t at, int64_t skew, int n) {
    const nki_scan *k = g->k;
    const nki_type *xt = &nki_types[k->x_dtype], *yt = &nki_types[k->y_dtype], *dt = &nki_types[k->d_dtype];
    float state[ROWS];
    for (int r = from; r < to; r++) {
        const int64_t i = at - r / LANE * skew;
        xt->load(g->xs + r * PITCH, g->x + r * k->x_stride[0] + i * k->x_stride[1], k->x_stride[1], n);
        yt->load(g->ys + r * PITCH, g->y + r * k->y_stride[0] + i * k->y_stride[1], k->y_stride[1], n);
    }
    for (int r = 0; r < ROWS; r++) state[r] = g->state[r];
    if (g->fast) {
        const int64_t row = PITCH * (int)sizeof(float);
        const place buffers = {(char *)g->xs, (char *)g->ys, (char *)g->xs, row, row, row, 0};
        g->fast(&buffers, state, n);
    } else {
        float (*f0)(float, float) = nki_functions2[k->op0].one, (*f1)(float, float) = nki_functions2[k->op1].one;
        for (int i = 0; i < n; i++)
            for (int r = from; r < to; r++) {
                float a = g->xs[r * PITCH + i], b = g->ys[r * PITCH + i], s = state[r];
                float t = k->reverse0 ? f0(s, a) : f0(a, s);
                state[r] = g->xs[r * PITCH + i] = k->reverse1 ? f1(b, t) : f1(t, b);
            }
    }
    for (int r = from; r < to; r++) {
        g->state[r] = state[r];
        dt->store(g->d + r * k->d_stride[0] + (at - r / LANE * skew) * k->d_stride[1], k->d_stride[1], g->xs + r * PITCH, n);
    }
}

#if LANES > 1
/* Whole groups of float32 rows are read and written where they are: the CPU sees far enough ahead to ask for lines before they are
 * needed, and nothing is moved twice. A line is used in four turns, between which it has to stay in the first cache: where rows are
 * multiples of half a page apart, its 12 ways hold those of x, y and the result for 4 rows, so each lane of rows goes SKEW columns
 * behind the one before it. Two lines, as stores of a lane are then long done when loads of another come to the same place of a page.
 * The first and the last columns, where not all lanes take part, go in pieces. Returns the column that pieces go on from. */
#define SKEW 32
static int64_t skewed(const group *g) {
    const nki_scan *k = g->k;
    const int crowded = k->x_stride[0] % 2048 == 0 || k->y_stride[0] % 2048 == 0 || k->d_stride[0] % 2048 == 0;
    const int64_t behind = crowded ? SKEW : 0, first = (LANES - 1) * behind, n = (k->n - first) & -LANE;
    if (!g->fast || k->x_dtype != NKI_F32 || k->y_dtype != NKI_F32 || k->d_dtype != NKI_F32 || k->x_stride[1] != 4 ||
        k->y_stride[1] != 4 || k->d_stride[1] != 4 || n < 2 * first)
        return 0;
    for (int lane = 0; lane < LANES - 1 && behind; lane++) piece(g, 0, (lane + 1) * LANE, lane * behind, behind, behind);
    const int64_t start = first * 4;
    const place at = {g->x + start, g->y + start, g->d + start, k->x_stride[0], k->y_stride[0], k->d_stride[0], 4 * behind};
    g->fast(&at, g->state, n);
    for (int lane = 1; lane < LANES && behind; lane++) piece(g, lane * LANE, ROWS, first + n + (lane - 1) * behind, behind, behind);
    return first + n;
}
#else
#define skewed(g) 0
#endif

void nki_scan_run(const nki_scan *k, const char *x, const char *y, const char *init, char *dst) {
    float xs[ROWS * PITCH] __attribute__((aligned(64))), ys[ROWS * PITCH] __attribute__((aligned(64))), state[ROWS];
    group g = {k, x, y, dst, fast_form(k), xs, ys, state};
    /* Rows that are not there take part with zeros. */
    for (int i = 0; i < ROWS * PITCH; i++) xs[i] = ys[i] = 0.0f;
    for (int64_t row = 0; row < k->rows; row += ROWS) {
        const int rows = (int)(k->rows - row < ROWS ? k->rows - row : ROWS);
        g.x = x + row * k->x_stride[0], g.y = y + row * k->y_stride[0], g.d = dst + row * k->d_stride[0];
        for (int r = 0; r < ROWS; r++) {
            state[r] = k->initial;
            if (k->has_initial_tile && r < rows) nki_types[k->i_dtype].load(&state[r], init + (row + r) * k->i_stride, 0, 1);
        }
        int64_t i = rows == ROWS ? skewed(&g) : 0;
        for (int n; i < k->n; i += n) {
            n = (int)(k->n - i < PIECE ? k->n - i : PIECE);
            piece(&g, 0, rows, i, 0, n);
        }
    }
}
