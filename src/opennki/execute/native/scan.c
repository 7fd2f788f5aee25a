/* Scans: r[i] = op1(op0(x[i], r[i-1]), y[i]).
 *
 * A step waits for the one before it, so ROWS rows go side by side, each state in a register of its own. Pieces of the
 * rows are first converted to float32 in a buffer: rows of a tile are often a power of two apart, and would push each
 * other out of the cache. */
#include "inner.h"

#define ROWS 8
#define PIECE 256
#define PITCH (PIECE + 16) /* floats from row to row of the buffer */

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

/* x: ROWS rows, replaced by the result. */
typedef void (*stepper)(float *x, const float *y, float *state, int n);

#define DEFINE(OP0, OP1)                                                                                               \
    static void scan_##OP0##_##OP1(float *restrict x, const float *restrict y, float *restrict state, int n) {         \
        float s0 = state[0], s1 = state[1], s2 = state[2], s3 = state[3];                                              \
        float s4 = state[4], s5 = state[5], s6 = state[6], s7 = state[7];                                              \
        for (int i = 0; i < n; i++) {                                                                                  \
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
    /* Rows that are not there take part with zeros. */
    for (int i = 0; i < ROWS * PITCH; i++) xs[i] = ys[i] = 0.0f;
    for (int64_t row = 0; row < k->rows; row += ROWS) {
        const int rows = (int)(k->rows - row < ROWS ? k->rows - row : ROWS);
        for (int r = 0; r < ROWS; r++) {
            state[r] = k->initial;
            if (k->has_initial_tile && r < rows) nki_types[k->i_dtype].load(&state[r], init + (row + r) * k->i_stride, 0, 1);
        }
        for (int64_t i = 0; i < k->n; i += PIECE) {
            const int n = (int)(k->n - i < PIECE ? k->n - i : PIECE);
            for (int r = 0; r < rows; r++) {
                xt->load(xs + r * PITCH, x + (row + r) * k->x_stride[0] + i * k->x_stride[1], k->x_stride[1], n);
                yt->load(ys + r * PITCH, y + (row + r) * k->y_stride[0] + i * k->y_stride[1], k->y_stride[1], n);
            }
            if (fast)
                fast(xs, ys, state, n);
            else
                any_form(k, xs, ys, state, rows, n);
            for (int r = 0; r < rows; r++)
                dt->store(dst + (row + r) * k->d_stride[0] + i * k->d_stride[1], k->d_stride[1], xs + r * PITCH, n);
        }
    }
}
