/* Folds in the one order of isa/reduce.py: lane i mod 32 takes element i, then a binary tree joins the lanes.
 *
 * Lanes start at the identity, which changes no bit of what comes first, and lanes without elements keep it. */
#include <string.h>
#include "inner.h"
#include "wide.h"

/* a and b: float. The forms of the functions that fold are those of isa/scalar.py. */
#define ADD(a, b) ((a) + (b))
#define MULTIPLY(a, b) ((a) * (b))
#define MAXIMUM(a, b) (((a) > (b) || (a) != (a)) ? (a) : (b))
#define MINIMUM(a, b) (((a) < (b) || (a) != (a)) ? (a) : (b))
#define LOGICAL_AND(a, b) (((a) != 0.0f && (b) != 0.0f) ? 1.0f : 0.0f)
#define LOGICAL_OR(a, b) (((a) != 0.0f || (b) != 0.0f) ? 1.0f : 0.0f)
#define LOGICAL_XOR(a, b) ((((a) != 0.0f) != ((b) != 0.0f)) ? 1.0f : 0.0f)
#define AND(a, b) ((a) & (b))
#define OR(a, b) ((a) | (b))
#define XOR(a, b) ((a) ^ (b))

/* name, type of a lane, the step, and the identity */
#define EACH(X)                                                                                                        \
    X(add, NKI_FN_ADD, nki_f32a, ADD, -0.0f)                                                                           \
    X(multiply, NKI_FN_MULTIPLY, nki_f32a, MULTIPLY, 1.0f)                                                             \
    X(maximum, NKI_FN_MAXIMUM, nki_f32a, MAXIMUM, -__builtin_inff())                                                   \
    X(minimum, NKI_FN_MINIMUM, nki_f32a, MINIMUM, __builtin_inff())                                                    \
    X(logical_and, NKI_FN_LOGICAL_AND, nki_f32a, LOGICAL_AND, 1.0f)                                                    \
    X(logical_or, NKI_FN_LOGICAL_OR, nki_f32a, LOGICAL_OR, 0.0f)                                                       \
    X(logical_xor, NKI_FN_LOGICAL_XOR, nki_f32a, LOGICAL_XOR, 0.0f)                                                    \
    X(bitwise_and, NKI_FN_BITWISE_AND, nki_i32a, AND, -1)                                                              \
    X(bitwise_or, NKI_FN_BITWISE_OR, nki_i32a, OR, 0)                                                                  \
    X(bitwise_xor, NKI_FN_BITWISE_XOR, nki_i32a, XOR, 0)

/* The lanes are copied to locals, which the compiler keeps in vector registers over the loop. */
#define DEFINE(name, number, T, STEP, identity)                                                                        \
    static void steps_##name(T *lanes, const T *x, int64_t steps) {                            \
        T l[NKI_LANES];                                                                                                \
        for (int j = 0; j < NKI_LANES; j++) l[j] = lanes[j];                                                           \
        for (int64_t k = 0; k < steps; k++, x += NKI_LANES)                                                            \
            for (int j = 0; j < NKI_LANES; j++) l[j] = STEP(l[j], x[j]);                                               \
        for (int j = 0; j < NKI_LANES; j++) lanes[j] = l[j];                                                           \
    }                                                                                                                  \
    static void some_##name(T *lanes, const T *x, int n) {                                                             \
        NKI_IVDEP for (int j = 0; j < n; j++) lanes[j] = STEP(lanes[j], x[j]);                                         \
    }                                                                                                                  \
    static void start_##name(T *lanes) {                                                                               \
        for (int j = 0; j < NKI_LANES; j++) lanes[j] = identity;                                                       \
    }                                                                                                                  \
    static void end_##name(T *l) {                                                                                     \
        for (int j = 0; j < 16; j++) l[j] = STEP(l[j], l[j + 16]);                                                     \
        for (int j = 0; j < 8; j++) l[j] = STEP(l[j], l[j + 8]);                                                       \
        for (int j = 0; j < 4; j++) l[j] = STEP(l[j], l[j + 4]);                                                       \
        for (int j = 0; j < 2; j++) l[j] = STEP(l[j], l[j + 2]);                                                       \
        l[0] = STEP(l[0], l[1]);                                                                                       \
    }                                                                                                                  \
    static T short_##name(const T *x, int n) { /* n <= 8: the tree without its missing lanes */                         \
        T a = x[0], b, c, d;                                                                                           \
        if (n == 1) return STEP((T)(identity), a);                                                                     \
        b = x[1];                                                                                                      \
        if (n == 2) return STEP(a, b);                                                                                 \
        c = x[2];                                                                                                      \
        if (n > 3) {                                                                                                   \
            d = x[3];                                                                                                  \
            if (n > 4) a = STEP(a, x[4]);                                                                              \
            if (n > 5) b = STEP(b, x[5]);                                                                              \
            if (n > 6) c = STEP(c, x[6]);                                                                              \
            if (n > 7) d = STEP(d, x[7]);                                                                              \
            b = STEP(b, d);                                                                                            \
        }                                                                                                              \
        a = STEP(a, c);                                                                                                \
        return STEP(a, b);                                                                                             \
    }
EACH(DEFINE)

/* Maxima and minima by single instructions as long as nothing is NaN: whatever is joined first, the last of what is equal wins, so four
 * steps are joined before they meet the lanes, which wait less often. With NaN, which stays where it comes first, all over again. */
#if defined(__AVX512F__)
#define DEFINE_WIDE(name, op)                                                                                          \
    static void wide_##name(nki_f32a *lanes, const nki_f32a *x, int64_t steps) {                                       \
        __m512 l[2] = {_mm512_loadu_ps(lanes), _mm512_loadu_ps(lanes + 16)};                                           \
        __mmask16 numbers[2] = {_mm512_cmp_ps_mask(l[0], l[1], _CMP_ORD_Q), 0xffff};                                   \
        const nki_f32a *at = x;                                                                                        \
        int64_t k = steps;                                                                                             \
        for (; k >= 4; k -= 4, at += 4 * NKI_LANES)                                                                    \
            for (int j = 0; j < 2; j++) {                                                                              \
                const __m512 a = _mm512_loadu_ps(at + j * 16), b = _mm512_loadu_ps(at + NKI_LANES + j * 16);           \
                const __m512 c = _mm512_loadu_ps(at + 2 * NKI_LANES + j * 16), d = _mm512_loadu_ps(at + 3 * NKI_LANES + j * 16); \
                numbers[0] = _mm512_mask_cmp_ps_mask(numbers[0], a, b, _CMP_ORD_Q);                                    \
                numbers[1] = _mm512_mask_cmp_ps_mask(numbers[1], c, d, _CMP_ORD_Q);                                    \
                l[j] = op(l[j], op(op(a, b), op(c, d)));                                                               \
            }                                                                                                          \
        for (; k > 0; k--, at += NKI_LANES) {                                                                          \
            const __m512 a = _mm512_loadu_ps(at), b = _mm512_loadu_ps(at + 16);                                        \
            numbers[0] = _mm512_mask_cmp_ps_mask(numbers[0], a, b, _CMP_ORD_Q);                                        \
            l[0] = op(l[0], a), l[1] = op(l[1], b);                                                                    \
        }                                                                                                              \
        if (__builtin_expect((numbers[0] & numbers[1]) != 0xffff, 0)) return steps_##name(lanes, x, steps);            \
        _mm512_storeu_ps(lanes, l[0]);                                                                                 \
        _mm512_storeu_ps(lanes + 16, l[1]);                                                                            \
    }
DEFINE_WIDE(maximum, _mm512_max_ps)
DEFINE_WIDE(minimum, _mm512_min_ps)
#define steps_maximum wide_maximum
#define steps_minimum wide_minimum
#endif

/* Subtraction adds elements of the other sign, except for the first of the row. */
static void steps_negated(nki_f32a *lanes, const nki_f32a *x, int64_t steps) {
    float l[NKI_LANES];
    for (int j = 0; j < NKI_LANES; j++) l[j] = lanes[j];
    for (int64_t k = 0; k < steps; k++, x += NKI_LANES)
        for (int j = 0; j < NKI_LANES; j++) l[j] = l[j] + -x[j];
    for (int j = 0; j < NKI_LANES; j++) lanes[j] = l[j];
}
static void some_negated(nki_f32a *lanes, const nki_f32a *x, int n) {
    for (int j = 0; j < n; j++) lanes[j] = lanes[j] + -x[j];
}

void nki_fold_start(nki_lanes *s, int fn) {
    switch (fn) {
    case NKI_FN_SUBTRACT: start_add(s->lanes); break;
#define CASE(name, number, T, STEP, identity) case number: start_##name((T *)s->lanes); break;
        EACH(CASE)
#undef CASE
    }
}

#define PARTS(T, STEPS, SOME)                                                                                          \
    do {                                                                                                               \
        T *l = (T *)s->lanes;                                                                                          \
        const T *v = (const T *)x;                                                                                     \
        if (first) {                                                                                                   \
            int some = NKI_LANES - first < n ? NKI_LANES - first : n;                                                  \
            SOME(l + first, v, some);                                                                                  \
            v += some, n -= some;                                                                                      \
        }                                                                                                              \
        STEPS(l, v, n / NKI_LANES);                                                                                    \
        SOME(l, v + n / NKI_LANES * NKI_LANES, n % NKI_LANES);                                                         \
    } while (0)

void nki_fold_add(nki_lanes *s, int fn, const float *x, int n, int64_t position) {
    if (n <= 0) return;
    if (fn == NKI_FN_SUBTRACT && position == 0) {
        s->lanes[0] = s->lanes[0] + x[0];
        x++, n--, position++;
    }
    int first = (int)(position % NKI_LANES);
    switch (fn) {
    case NKI_FN_SUBTRACT: PARTS(nki_f32a, steps_negated, some_negated); break;
#define CASE(name, number, T, STEP, identity) case number: PARTS(T, steps_##name, some_##name); break;
        EACH(CASE)
#undef CASE
    }
}

float nki_fold_end(nki_lanes *s, int fn) {
    switch (fn) {
    case NKI_FN_SUBTRACT: end_add(s->lanes); break;
#define CASE(name, number, T, STEP, identity) case number: end_##name((T *)s->lanes); break;
        EACH(CASE)
#undef CASE
    }
    return s->lanes[0];
}

float nki_fold_short(int fn, const float *x, int n) {
    if (n > 8 || fn == NKI_FN_SUBTRACT) {
        nki_lanes s;
        nki_fold_start(&s, fn);
        nki_fold_add(&s, fn, x, n, 0);
        return nki_fold_end(&s, fn);
    }
    float r = 0.0f;
    switch (fn) {
#define CASE(name, number, T, STEP, identity) case number: *(T *)&r = short_##name((const T *)x, n); break;
        EACH(CASE)
#undef CASE
    }
    return r;
}

#if defined(__AVX512F__)
/* Whole rows, with the lanes in registers from the first element to the last step of the tree. */
static inline __mmask16 up_to(int n) { return (__mmask16)(n >= 16 ? 0xffff : n > 0 ? (1 << n) - 1 : 0); }
static float whole_add(const float *x, int n) {
    __m512 a = _mm512_set1_ps(-0.0f), b = a;
    int i = 0;
    for (; i + NKI_LANES <= n; i += NKI_LANES) a = _mm512_add_ps(a, _mm512_loadu_ps(x + i)), b = _mm512_add_ps(b, _mm512_loadu_ps(x + i + 16));
    if (i < n) {
        const __mmask16 low = up_to(n - i), high = up_to(n - i - 16);
        a = _mm512_mask_add_ps(a, low, a, _mm512_maskz_loadu_ps(low, x + i));
        b = _mm512_mask_add_ps(b, high, b, _mm512_maskz_loadu_ps(high, x + i + 16));
    }
    return nki_tree_add(_mm512_add_ps(a, b));
}
#define WHOLE_OF(name, op)                                                                                             \
    static float whole_##name(const float *x, int n) {                                                                 \
        nki_lanes s;                                                                                                   \
        start_##name(s.lanes);                                                                                         \
        steps_##name(s.lanes, x, n / NKI_LANES);                                                                       \
        __m512 a = _mm512_load_ps(s.lanes), b = _mm512_load_ps(s.lanes + 16);                                          \
        const int done = n / NKI_LANES * NKI_LANES;                                                                    \
        const __mmask16 low = up_to(n - done), high = up_to(n - done - 16);                                            \
        const __m512 c = _mm512_maskz_loadu_ps(low, x + done), d = _mm512_maskz_loadu_ps(high, x + done + 16);         \
        if ((_mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q) | _mm512_cmp_ps_mask(c, d, _CMP_UNORD_Q))) { /* NaN */             \
            some_##name(s.lanes, x + done, n - done);                                                                  \
            end_##name(s.lanes);                                                                                       \
            return s.lanes[0];                                                                                         \
        }                                                                                                              \
        a = _mm512_mask_##op##_ps(a, low, a, c), b = _mm512_mask_##op##_ps(b, high, b, d);                             \
        return nki_tree_##name(_mm512_##op##_ps(a, b));                                                                    \
    }
WHOLE_OF(maximum, max)
WHOLE_OF(minimum, min)
#endif

static float whole(int fn, const float *x, int n) {
    if (n <= NKI_LANES) return nki_fold_short(fn, x, n);
    nki_lanes s;
    nki_fold_start(&s, fn);
    nki_fold_add(&s, fn, x, n, 0);
    return nki_fold_end(&s, fn);
}

void nki_fold_whole(int fn, float *d, const float *x, int64_t pitch, int rows, int n) {
#define ROWS(call) for (int i = 0; i < rows; i++, x = (const float *)(const void *)((const char *)x + pitch)) d[i] = call
    switch (fn) {
#if defined(__AVX512F__)
    case NKI_FN_ADD: ROWS(whole_add(x, n)); break;
    case NKI_FN_MAXIMUM: ROWS(whole_maximum(x, n)); break;
    case NKI_FN_MINIMUM: ROWS(whole_minimum(x, n)); break;
#endif
    default: ROWS(whole(fn, x, n));
    }
#undef ROWS
}

/* ---- over the partitions: lanes are rows of a block of columns, which stays in the cache ------------------------- */
#define COLUMNS 128

/* One step of all lanes or of a part of the tree: a = a fn b. */
static void join(int fn, float *a, const float *b, int n) {
    if (nki_on_bits(fn))
        nki_bits_run(fn, 32, 1, (int32_t *)a, (const int32_t *)a, (const int32_t *)b, n);
    else
        nki_functions2[fn == NKI_FN_SUBTRACT ? NKI_FN_ADD : fn].vv(a, a, b, n);
}

void nki_pfold_run(const nki_pfold *k, const char *x, char *dst) {
    float lanes[NKI_LANES][COLUMNS] __attribute__((aligned(64))), row[COLUMNS] __attribute__((aligned(64)));
    const nki_type *from = &nki_types[k->x_dtype], *to = &nki_types[k->d_dtype];
    const int raw = nki_on_bits(k->fn);
    const nki_loader load = raw ? from->load_raw : from->load;
    const int plain = !raw && k->x_dtype == NKI_F32 && k->x_stride[1] == 4;
    nki_lanes start;
    nki_fold_start(&start, k->fn);
    for (int64_t f = 0; f < k->f; f += COLUMNS) {
        const int n = (int)(k->f - f < COLUMNS ? k->f - f : COLUMNS);
        const int used = (int)(k->p < 1 ? 1 : (k->p < NKI_LANES ? k->p : NKI_LANES));
        const char *at = x + f * k->x_stride[1];
        for (int j = 0; j < used; j++)
            for (int i = 0; i < n; i++) lanes[j][i] = start.lanes[0];
        for (int64_t p = 0; p < k->p; p++, at += k->x_stride[0]) {
            const float *v = row;
            if (plain)
                v = (const float *)at;
            else
                load(row, at, k->x_stride[1], n);
            if (k->fn == NKI_FN_SUBTRACT && p) {
                for (int i = 0; i < n; i++) row[i] = -v[i];
                v = row;
            }
            join(k->fn, lanes[p % NKI_LANES], v, n);
        }
        int left = used;
        for (int half = NKI_LANES / 2; half; half /= 2)
            if (left > half) {
                for (int j = 0; j < left - half; j++) join(k->fn, lanes[j], lanes[j + half], n);
                left = half;
            }
        (raw ? to->store_raw : to->store)(dst + f * k->d_stride, k->d_stride, lanes[0], n);
    }
}
