/* Scans: r[i] = op1(op0(x[i], r[i-1]), y[i]).
 *
 * A step waits for the one before it, so ROWS rows go side by side, in a vector or with a register for each. Pieces of the
 * rows are first converted to float32 in a buffer: rows of a tile are often a power of two apart, and would push each
 * other out of the cache. */
#include "inner.h"

#if defined(__AVX512F__)
#define ROWS 16
#else
#define ROWS 8
#endif
#define PIECE 128
#define PITCH (PIECE + 16) /* floats from row to row of the buffer */

/* The next pieces of the rows of x, y and the result: bytes from row to row and from element to element. They are on their way to the
 * cache while this one is computed: rows are far apart, and pieces too short for the CPU to see where they go. */
typedef struct {
    const char *at[3];
    int64_t row[3], element[3];
    int rows;
} next;
static inline void ask(const next *a, int i) {
    for (int w = 0; w < 3; w++) {
        const char *p = a->at[w] + i * a->element[w];
        for (int r = 0; r < a->rows; r++, p += a->row[w]) {
            __builtin_prefetch(p, 0, 2);
            __asm__ volatile("" ::"r"(p));
        }
    }
}

/* x: ROWS rows, replaced by the result. */
typedef void (*stepper)(float *x, const float *y, float *state, int n, const next *ahead);

#if defined(__AVX512F__)
/* A vector has a step of 16 rows: squares of 16 x 16 are turned in registers, there and back. */
#include <immintrin.h>
#define ADD(a, b) _mm512_add_ps(a, b)
#define SUBTRACT(a, b) _mm512_sub_ps(a, b)
#define MULTIPLY(a, b) _mm512_mul_ps(a, b)
#define MAXIMUM(a, b) _mm512_mask_mov_ps(_mm512_max_ps(a, b), _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), a)
#define MINIMUM(a, b) _mm512_mask_mov_ps(_mm512_min_ps(a, b), _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), a)
#define UNROLL _Pragma("GCC unroll 16")

static inline __attribute__((always_inline)) void turn(__m512 *r) {
    __m512 t[16];
    UNROLL for (int i = 0; i < 16; i += 2) t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]), t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    UNROLL for (int i = 0; i < 16; i += 4) {
        for (int j = 0; j < 2; j++) {
            const __m512d low = _mm512_castps_pd(t[i + j]), high = _mm512_castps_pd(t[i + j + 2]);
            r[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high)), r[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
        }
    }
    UNROLL for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88), t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88), t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
    }
    UNROLL for (int i = 0; i < 8; i++) {
        r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
    }
}
static inline __attribute__((always_inline)) void square(const float *p, __m512 *r) {
    UNROLL for (int i = 0; i < 16; i++) r[i] = _mm512_load_ps(p + i * PITCH);
    turn(r);
}
#define DEFINE(OP0, OP1)                                                                                               \
    static void scan_##OP0##_##OP1(float *restrict x, const float *restrict y, float *restrict state, int n, const next *ahead) { \
        __m512 s = _mm512_loadu_ps(state);                                                                             \
        for (int i = 0; i < n; i += 16) {                                                                              \
            __m512 a[16], b[16];                                                                                       \
            ask(ahead, i);                                                                                             \
            square(x + i, a);                                                                                          \
            square(y + i, b);                                                                                          \
            const int some = n - i < 16 ? n - i : 16;                                                                  \
            if (some == 16)                                                                                            \
                UNROLL for (int j = 0; j < 16; j++) a[j] = s = OP1(OP0(a[j], s), b[j]);                                \
            else                                                                                                       \
                for (int j = 0; j < some; j++) a[j] = s = OP1(OP0(a[j], s), b[j]);                                     \
            turn(a);                                                                                                   \
            UNROLL for (int j = 0; j < 16; j++) _mm512_store_ps(x + i + j * PITCH, a[j]);                              \
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

#define ADD(a, b) ((a) + (b))
#define SUBTRACT(a, b) ((a) - (b))
#define MULTIPLY(a, b) ((a) * (b))
#define MAXIMUM(a, b) (((a) > (b) || (a) != (a)) ? (a) : (b))
#define MINIMUM(a, b) (((a) < (b) || (a) != (a)) ? (a) : (b))

#define DEFINE(OP0, OP1)                                                                                               \
    static void scan_##OP0##_##OP1(float *restrict x, const float *restrict y, float *restrict state, int n, const next *ahead) { \
        float s0 = state[0], s1 = state[1], s2 = state[2], s3 = state[3];                                              \
        float s4 = state[4], s5 = state[5], s6 = state[6], s7 = state[7];                                              \
        for (int i = 0; i < n; i++) {                                                                                  \
            if (i % 16 == 0) ask(ahead, i);                                                                            \
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

static void any_form(const nki_scan *k, float *x, const float *y, float *state, int rows, int n) {
    float (*f0)(float, float) = nki_functions2[k->op0].one, (*f1)(float, float) = nki_functions2[k->op1].one;
    for (int i = 0; i < n; i++)
        for (int r = 0; r < rows; r++) {
            float a = x[r * PITCH + i], b = y[r * PITCH + i], s = state[r];
            float t = k->reverse0 ? f0(s, a) : f0(a, s);
            state[r] = x[r * PITCH + i] = k->reverse1 ? f1(b, t) : f1(t, b);
        }
}

void nki_scan_run(const nki_scan *k, const char *x, const char *y, const char *init, char *dst) {
    float xs[ROWS * PITCH] __attribute__((aligned(64))), ys[ROWS * PITCH] __attribute__((aligned(64))), state[ROWS];
    const nki_type *xt = &nki_types[k->x_dtype], *yt = &nki_types[k->y_dtype], *dt = &nki_types[k->d_dtype];
    const stepper fast = fast_form(k);
    /* After the first piece, those of rows of float32 begin with a line of the caches: vectors on two lines take twice as long. */
    const int64_t size = nki_types[k->x_dtype].size, short_of = -(intptr_t)x & 63; /* bytes to the next line */
    const int64_t lead = k->x_stride[1] == size && k->x_stride[0] % 64 == 0 && short_of && short_of % size == 0 ? short_of / size : PIECE;
    /* Rows that are not there take part with zeros. */
    for (int i = 0; i < ROWS * PITCH; i++) xs[i] = ys[i] = 0.0f;
    for (int64_t row = 0; row < k->rows; row += ROWS) {
        const int rows = (int)(k->rows - row < ROWS ? k->rows - row : ROWS);
        for (int r = 0; r < ROWS; r++) {
            state[r] = k->initial;
            if (k->has_initial_tile && r < rows) nki_types[k->i_dtype].load(&state[r], init + (row + r) * k->i_stride, 0, 1);
        }
        for (int64_t i = 0, n = lead; i < k->n; i += n, n = PIECE) {
            n = k->n - i < n ? k->n - i : n;
            const int64_t then = i + n;
            const next ahead = {{x + row * k->x_stride[0] + then * k->x_stride[1], y + row * k->y_stride[0] + then * k->y_stride[1],
                                 dst + row * k->d_stride[0] + then * k->d_stride[1]},
                                {k->x_stride[0], k->y_stride[0], k->d_stride[0]},
                                {k->x_stride[1], k->y_stride[1], k->d_stride[1]},
                                then < k->n ? rows : 0};
            for (int r = 0; r < rows; r++) {
                xt->load(xs + r * PITCH, x + (row + r) * k->x_stride[0] + i * k->x_stride[1], k->x_stride[1], n);
                yt->load(ys + r * PITCH, y + (row + r) * k->y_stride[0] + i * k->y_stride[1], k->y_stride[1], n);
            }
            if (fast)
                fast(xs, ys, state, n, &ahead);
            else
                any_form(k, xs, ys, state, rows, n);
            for (int r = 0; r < rows; r++)
                dt->store(dst + (row + r) * k->d_stride[0] + i * k->d_stride[1], k->d_stride[1], xs + r * PITCH, n);
        }
    }
}
