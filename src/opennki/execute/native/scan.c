/* Scans: r[i] = op1(op0(x[i], r[i-1]), y[i]).
 *
 * A step waits for the one before it, so ROWS rows go side by side in vectors. Squares of 4 x 4 elements are turned, there and back, within
 * lanes of 128 bits: what goes across lanes is done by loads and stores, which leave the few ports of shuffles alone. */
#include "inner.h"

#define LANE 4 /* rows in a lane */
#define LANES 4
#define ROWS (LANE * LANES)
#define PIECE 128
#define PITCH (PIECE + 16) /* floats from row to row of a buffer: no power of two, as such rows push each other out of the cache */
#define UNROLL _Pragma("GCC unroll 16")
#define INLINE static inline __attribute__((always_inline))

/* Where n elements of ROWS rows are, of float32 side by side: the first element of the first row, and bytes from row to row. The
 * result may be in place of x. Only at the end of a row is n no multiple of LANE: elements behind it are then computed as well, and
 * nobody reads the state. */
typedef struct {
    const char *x, *y;
    char *d;
    int64_t x_row, y_row, d_row;
    int64_t skew; /* by how many bytes each LANE of rows is behind the LANE before it */
    int ahead;    /* bytes ahead that lines of x and y are asked for; 0: they are near */
} place;
INLINE void ask(const place *p, int64_t i) {
    UNROLL for (int r = 0; r < ROWS; r++) {
        const int64_t at = i + p->ahead - r / LANE * p->skew;
        __builtin_prefetch(p->x + r * p->x_row + at), __builtin_prefetch(p->y + r * p->y_row + at);
    }
}
typedef void (*stepper)(const place *at, float *state, int64_t n);

/* Vectors of WIDTH lanes, which are at p, p + lane, ... */
#if defined(__AVX2__)
#include <immintrin.h>
INLINE __m128 part(const char *p) { return _mm_loadu_ps((const float *)p); }
#endif
#if defined(__AVX512F__)
#define WIDTH 4
typedef __m512 vec;
INLINE vec load(const char *p, int64_t lane) {
    const vec v = _mm512_insertf32x4(_mm512_castps128_ps512(part(p)), part(p + lane), 1);
    return _mm512_insertf32x4(_mm512_insertf32x4(v, part(p + 2 * lane), 2), part(p + 3 * lane), 3);
}
INLINE void store(char *p, int64_t lane, vec v) {
    _mm_storeu_ps((float *)p, _mm512_castps512_ps128(v));
    _mm_storeu_ps((float *)(p + lane), _mm512_extractf32x4_ps(v, 1));
    _mm_storeu_ps((float *)(p + 2 * lane), _mm512_extractf32x4_ps(v, 2));
    _mm_storeu_ps((float *)(p + 3 * lane), _mm512_extractf32x4_ps(v, 3));
}
#define SHUFFLE(a, b, i, j) _mm512_shuffle_ps(a, b, BITS(i, j))
#elif defined(__AVX2__)
#define WIDTH 2
typedef __m256 vec;
INLINE vec load(const char *p, int64_t lane) { return _mm256_insertf128_ps(_mm256_castps128_ps256(part(p)), part(p + lane), 1); }
INLINE void store(char *p, int64_t lane, vec v) {
    _mm_storeu_ps((float *)p, _mm256_castps256_ps128(v));
    _mm_storeu_ps((float *)(p + lane), _mm256_extractf128_ps(v, 1));
}
#define SHUFFLE(a, b, i, j) _mm256_shuffle_ps(a, b, BITS(i, j))
#else
#define WIDTH 1
typedef float vec __attribute__((vector_size(16)));
INLINE vec load(const char *p, int64_t lane) {
    vec v;
    (void)lane;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}
INLINE void store(char *p, int64_t lane, vec v) {
    (void)lane;
    __builtin_memcpy(p, &v, sizeof v);
}
#if defined(__clang__)
#define SHUFFLE(a, b, i, j) __builtin_shufflevector(a, b, i, j, 4 + i, 4 + j)
#else
#define SHUFFLE(a, b, i, j) __builtin_shuffle(a, b, (bits){i, j, 4 + i, 4 + j})
#endif
#endif
#define BITS(i, j) ((i) | (j) << 2 | (i) << 4 | (j) << 6)
typedef int32_t bits __attribute__((vector_size(16 * WIDTH)));

/* Four steps, each of all rows of a vector. SHUFFLE has elements i and j of each lane of a, then those of b. */
INLINE void turn(vec *r) {
    const vec a = SHUFFLE(r[0], r[1], 0, 1), b = SHUFFLE(r[2], r[3], 0, 1), c = SHUFFLE(r[0], r[1], 2, 3), d = SHUFFLE(r[2], r[3], 2, 3);
    r[0] = SHUFFLE(a, b, 0, 2), r[1] = SHUFFLE(a, b, 1, 3), r[2] = SHUFFLE(c, d, 0, 2), r[3] = SHUFFLE(c, d, 1, 3);
}
INLINE void get(const char *p, int64_t row, int64_t lane, vec *r) {
    UNROLL for (int i = 0; i < LANE; i++) r[i] = load(p + i * row, lane);
    turn(r);
}
INLINE void put(char *p, int64_t row, int64_t lane, vec *r) {
    turn(r);
    UNROLL for (int i = 0; i < LANE; i++) store(p + i * row, lane, r[i]);
}
INLINE vec choose(bits mask, vec yes, vec no) { return (vec)((mask & (bits)yes) | (~mask & (bits)no)); }
#define ADD(a, b) ((a) + (b))
#define SUBTRACT(a, b) ((a) - (b))
#define MULTIPLY(a, b) ((a) * (b))
#define MAXIMUM(a, b) choose(((a) > (b)) | ((a) != (a)), a, b)
#define MINIMUM(a, b) choose(((a) < (b)) | ((a) != (a)), a, b)

#define DEFINE(OP0, OP1)                                                                                               \
    static void scan_##OP0##_##OP1(const place *at, float *state, int64_t n) {                                         \
        const place p = *at;                                                                                           \
        const int64_t xl = LANE * p.x_row - p.skew, yl = LANE * p.y_row - p.skew, dl = LANE * p.d_row - p.skew;        \
        vec s[LANES / WIDTH], a[LANE], b[LANE];                                                                        \
        __builtin_memcpy(s, state, sizeof s);                                                                          \
        for (int64_t i = 0; i < 4 * n; i += 16) {                                                                      \
            if (p.ahead && !(i & 63)) ask(&p, i);                                                                      \
            UNROLL for (int v = 0; v < LANES / WIDTH; v++) {                                                           \
                get(p.x + i + v * WIDTH * xl, p.x_row, xl, a);                                                         \
                get(p.y + i + v * WIDTH * yl, p.y_row, yl, b);                                                         \
                UNROLL for (int j = 0; j < LANE; j++) a[j] = s[v] = OP1(OP0(a[j], s[v]), b[j]);                        \
                put(p.d + i + v * WIDTH * dl, p.d_row, dl, a);                                                         \
            }                                                                                                          \
        }                                                                                                              \
        __builtin_memcpy(state, s, sizeof s);                                                                          \
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
        const place buffers = {(char *)g->xs, (char *)g->ys, (char *)g->xs, row, row, row, 0, 0};
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

/* Whole groups of float32 rows are read and written where they are: lines are asked for before they are
 * needed, and nothing is moved twice. A line is used in four turns, between which it has to stay in the first cache. Where rows are
 * multiples of half a page apart it has 12 places for all of them, enough for x, y and the result of one LANE of rows: each LANE goes
 * SKEW columns, two lines, behind the one before it. (With one line, loads of a lane would meet stores of another, not yet done, at the
 * same place of a page, and wait.) The first and the last columns, where not all lanes take part, go in pieces. Returns the column
 * that pieces go on from. */
#define SKEW 32
#define AHEAD 512 /* the CPU's own prefetch cannot follow as many rows as these */
static int64_t skewed(const group *g) {
    const nki_scan *k = g->k;
    const int crowded = k->x_stride[0] % 2048 == 0 || k->y_stride[0] % 2048 == 0 || k->d_stride[0] % 2048 == 0;
    const int64_t behind = crowded ? SKEW : 0, first = (LANES - 1) * behind, n = (k->n - first) & -LANE;
    if (!g->fast || k->x_dtype != NKI_F32 || k->y_dtype != NKI_F32 || k->d_dtype != NKI_F32 || k->x_stride[1] != 4 ||
        k->y_stride[1] != 4 || k->d_stride[1] != 4 || n < 2 * first)
        return 0;
    for (int lane = 0; lane < LANES - 1 && behind; lane++) piece(g, 0, (lane + 1) * LANE, lane * behind, behind, behind);
    const int64_t start = first * 4;
    const place at = {g->x + start, g->y + start, g->d + start, k->x_stride[0], k->y_stride[0], k->d_stride[0], 4 * behind, AHEAD};
    g->fast(&at, g->state, n);
    for (int lane = 1; lane < LANES && behind; lane++) piece(g, lane * LANE, ROWS, first + n + (lane - 1) * behind, behind, behind);
    return first + n;
}

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
