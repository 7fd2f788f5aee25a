/* Copies of elements bit by bit, with any strides (nki.h).
 *
 * Dimensions are put in the order of the destination, and those that belong together joined. What is left inside is a
 * run of bytes, one value again and again, a transpose (the source is contiguous along another dimension), or strided.
 */
#include "nki.h"
#include <stdlib.h>
#include <string.h>

typedef struct {
    int64_t n, d, s; /* extent, bytes per step of destination and source */
} dim;

typedef struct {
    int rank, width; /* width may be 16 here: two elements of 8 as one */
    dim dims[NKI_RANK];
} plan;

typedef struct {
    uint64_t half[2];
} u128;

/* ---- the inner loops ----------------------------------------------------------------------------------------- */

typedef uint8_t v16x1 __attribute__((vector_size(16)));
typedef uint16_t v8x2 __attribute__((vector_size(16)));
typedef uint32_t v4x4 __attribute__((vector_size(16)));
typedef uint64_t v2x8 __attribute__((vector_size(16)));

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (__typeof__(a)){__VA_ARGS__})
#endif
#define LOW_1(a, b) SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define HIGH_1(a, b) SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#define LOW_2(a, b) SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define HIGH_2(a, b) SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#define LOW_4(a, b) SHUFFLE(a, b, 0, 4, 1, 5)
#define HIGH_4(a, b) SHUFFLE(a, b, 2, 6, 3, 7)
#define LOW_8(a, b) SHUFFLE(a, b, 0, 2)
#define HIGH_8(a, b) SHUFFLE(a, b, 1, 3)

/* A square of vectors: merging row i with row i + n/2, log2 n times over, transposes it. */
#define SQUARE(W, V, N, LOG)                                                                                   \
    static inline __attribute__((always_inline)) void square_##W(char *d, int64_t dj, const char *s, int64_t si) \
    {                                                                                                          \
        V x[N], y[N];                                                                                          \
        _Pragma("GCC unroll 16") for (int i = 0; i < N; i++) memcpy(&x[i], s + i * si, 16);                    \
        _Pragma("GCC unroll 4") for (int step = 0; step < LOG; step++)                                         \
        {                                                                                                      \
            _Pragma("GCC unroll 16") for (int i = 0; i < N / 2; i++)                                           \
            {                                                                                                  \
                y[2 * i] = LOW_##W(x[i], x[i + N / 2]);                                                        \
                y[2 * i + 1] = HIGH_##W(x[i], x[i + N / 2]);                                                   \
            }                                                                                                  \
            _Pragma("GCC unroll 16") for (int i = 0; i < N; i++) x[i] = y[i];                                  \
        }                                                                                                      \
        _Pragma("GCC unroll 16") for (int i = 0; i < N; i++) memcpy(d + i * dj, &x[i], 16);                    \
    }
SQUARE(1, v16x1, 16, 4)
SQUARE(2, v8x2, 8, 3)
SQUARE(4, v4x4, 4, 2)
SQUARE(8, v2x8, 2, 1)

#define LOOPS(W, T)                                                                                        \
    static void strided_##W(char *d, const char *s, int64_t n, int64_t dn, int64_t sn)                     \
    {                                                                                                      \
        T x;                                                                                               \
        if (sn == 0) {                                                                                     \
            memcpy(&x, s, W);                                                                              \
            if (dn == W)                                                                                   \
                for (int64_t i = 0; i < n; i++) memcpy(d + i * W, &x, W);                                  \
            else                                                                                           \
                for (int64_t i = 0; i < n; i++) memcpy(d + i * dn, &x, W);                                 \
        } else if (dn == W) {                                                                              \
            for (int64_t i = 0; i < n; i++) memcpy(&x, s + i * sn, W), memcpy(d + i * W, &x, W);           \
        } else if (sn == W) {                                                                              \
            for (int64_t i = 0; i < n; i++) memcpy(&x, s + i * W, W), memcpy(d + i * dn, &x, W);           \
        } else {                                                                                           \
            for (int64_t i = 0; i < n; i++) memcpy(&x, s + i * sn, W), memcpy(d + i * dn, &x, W);          \
        }                                                                                                  \
    }
LOOPS(1, uint8_t)
LOOPS(2, uint16_t)
LOOPS(4, uint32_t)
LOOPS(8, uint64_t)
LOOPS(16, u128)

/* Source contiguous along j, destination along i: d[j][i] = s[i][j]. Blocks of one line of the source by one of the
 * destination, so that either is read or written once. */
#define TRANSPOSE(W, N)                                                                                          \
    static void transpose_##W(char *d, const char *s, int64_t ni, int64_t nj, int64_t dj, int64_t si)            \
    {                                                                                                            \
        enum { B = 64 / W };                                                                                     \
        int64_t fi = ni - ni % N, fj = nj - nj % N;                                                              \
        for (int64_t j0 = 0; j0 < fj; j0 += B)                                                                   \
            for (int64_t i0 = 0; i0 < fi; i0 += B)                                                               \
                for (int64_t i = i0; i < i0 + B && i < fi; i += N)                                               \
                    for (int64_t j = j0; j < j0 + B && j < fj; j += N)                                           \
                        square_##W(d + j * dj + i * W, dj, s + i * si + j * W, si);                              \
        for (int64_t i = fi; i < ni; i++) strided_##W(d + i * W, s + i * si, nj, dj, W);                         \
        for (int64_t j = fj; j < nj; j++) strided_##W(d + j * dj, s + j * W, fi, W, si);                         \
    }
TRANSPOSE(1, 16)
TRANSPOSE(2, 8)
TRANSPOSE(4, 4)
TRANSPOSE(8, 2)

static void strided(int width, char *d, const char *s, const dim *x)
{
    switch (width) {
    case 1: return strided_1(d, s, x->n, x->d, x->s);
    case 2: return strided_2(d, s, x->n, x->d, x->s);
    case 4: return strided_4(d, s, x->n, x->d, x->s);
    case 8: return strided_8(d, s, x->n, x->d, x->s);
    default: return strided_16(d, s, x->n, x->d, x->s);
    }
}

void nki_transpose(int width, char *d, const char *s, int64_t ni, int64_t nj, int64_t dj, int64_t si)
{
    switch (width) {
    case 1: return transpose_1(d, s, ni, nj, dj, si);
    case 2: return transpose_2(d, s, ni, nj, dj, si);
    case 4: return transpose_4(d, s, ni, nj, dj, si);
    default: return transpose_8(d, s, ni, nj, dj, si);
    }
}

/* ---- the plan ------------------------------------------------------------------------------------------------ */

static int64_t magnitude(int64_t x) { return x < 0 ? -x : x; }

/* The part of the copy that is wanted, with steps of the destination that are not negative, largest first.
 * Returns 0 if nothing is to be copied. */
static int make_plan(plan *p, const nki_copy *k, char **dst, const char **src, const int64_t *lo, const int64_t *hi)
{
    p->rank = 0;
    p->width = k->width;
    for (int i = 0; i < k->rank; i++) {
        int64_t from = lo ? lo[i] : 0, to = hi ? hi[i] : k->shape[i];
        dim x = {to - from, k->d_stride[i], k->s_stride[i]};
        if (x.n <= 0) return 0;
        *dst += from * x.d;
        *src += from * x.s;
        if (x.d == 0) { /* the last one stays */
            *src += (x.n - 1) * x.s;
            continue;
        }
        if (x.n == 1) continue;
        if (x.d < 0) {
            *dst += (x.n - 1) * x.d;
            *src += (x.n - 1) * x.s;
            x.d = -x.d;
            x.s = -x.s;
        }
        int at = p->rank++;
        for (; at > 0 && p->dims[at - 1].d < x.d; at--) p->dims[at] = p->dims[at - 1];
        p->dims[at] = x;
    }
    return 1;
}

static void join_dims(plan *p)
{
    int last = 0;
    for (int i = 1; i < p->rank; i++) {
        dim *a = &p->dims[last], b = p->dims[i];
        if (a->d == b.d * b.n && a->s == b.s * b.n)
            *a = (dim){a->n * b.n, b.d, b.s};
        else
            p->dims[++last] = b;
    }
    p->rank = p->rank ? last + 1 : 0;
    if (!p->rank) return;
    dim in = p->dims[p->rank - 1]; /* a short run is one wider element */
    int64_t bytes = in.n * p->width;
    if (in.d == p->width && in.s == p->width && bytes <= 16 && !(bytes & (bytes - 1))) {
        p->width = (int)bytes;
        p->rank--;
    }
}

/* Bytes from the first to behind the last that dimensions from `first` on touch; *low: how far before the base. */
static int64_t span(const plan *p, int first, int of_source, int64_t *low)
{
    int64_t before = 0, after = p->width;
    for (int i = first; i < p->rank; i++) {
        int64_t reach = (p->dims[i].n - 1) * (of_source ? p->dims[i].s : p->dims[i].d);
        *(reach < 0 ? &before : &after) += reach;
    }
    *low = before;
    return after - before;
}

static int disjoint(const plan *p, const char *dst, const char *src)
{
    int64_t d_low, s_low, d_span = span(p, 0, 0, &d_low), s_span = span(p, 0, 1, &s_low);
    intptr_t d = (intptr_t)dst + d_low, s = (intptr_t)src + s_low;
    if (d + d_span <= s || s + s_span <= d) return 1;
    if (!p->rank || p->dims[0].d != magnitude(p->dims[0].s)) return 0;
    /* rows of one memory: columns that do not meet are enough */
    int64_t row = p->dims[0].d;
    d_span = span(p, 1, 0, &d_low);
    s_span = span(p, 1, 1, &s_low);
    int64_t apart = (int64_t)(((intptr_t)src + s_low) - ((intptr_t)dst + d_low)) % row;
    if (apart < 0) apart += row;
    return apart >= d_span && apart + s_span <= row;
}

static int same(const plan *p, const char *dst, const char *src)
{
    if (dst != src) return 0;
    for (int i = 0; i < p->rank; i++)
        if (p->dims[i].d != p->dims[i].s) return 0;
    return 1;
}

static void copy_block(const plan *p, int inner, char *d, const char *s)
{
    const dim *x = p->dims + p->rank - 1;
    if (inner == 2) {
        const dim *j = x - 1;
        return nki_transpose(p->width, d, s, x->n, j->n, j->d, x->s);
    }
    if (x->d == p->width && x->s == p->width)
        memcpy(d, s, (size_t)(x->n * p->width));
    else
        strided(p->width, d, s, x);
}

/* Copy where source and destination do not meet. */
static void run(plan *p, char *dst, const char *src)
{
    join_dims(p);
    if (!p->rank) {
        p->rank = 1;
        p->dims[0] = (dim){1, p->width, p->width};
    }
    int inner = 1;
    const dim in = p->dims[p->rank - 1];
    if (in.d == p->width && in.s != p->width && in.s != 0 && p->width <= 8)
        for (int j = p->rank - 2; j >= 0 && inner == 1; j--)
            if (p->dims[j].s == p->width) { /* to stand next to the inner one */
                dim t = p->dims[j];
                memmove(&p->dims[j], &p->dims[j + 1], (size_t)(p->rank - 2 - j) * sizeof t);
                p->dims[p->rank - 2] = t;
                inner = 2;
            }
    int outer = p->rank - inner;
    int64_t at[NKI_RANK] = {0};
    for (;;) {
        copy_block(p, inner, dst, src);
        int i = outer - 1;
        for (; i >= 0; i--) {
            dst += p->dims[i].d;
            src += p->dims[i].s;
            if (++at[i] < p->dims[i].n) break;
            dst -= p->dims[i].n * p->dims[i].d;
            src -= p->dims[i].n * p->dims[i].s;
            at[i] = 0;
        }
        if (i < 0) return;
    }
}

void nki_copy_run(const nki_copy *k, char *dst, const char *src, const int64_t *lo, const int64_t *hi)
{
    plan p;
    if (!make_plan(&p, k, &dst, &src, lo, hi) || same(&p, dst, src)) return;
    if (disjoint(&p, dst, src)) return run(&p, dst, src);
    /* The source is read completely first: into a dense copy, dimension by dimension. */
    plan in = p, out = p;
    int64_t bytes = p.width;
    for (int i = p.rank - 1; i >= 0; i--) {
        in.dims[i].d = out.dims[i].s = bytes;
        bytes *= p.dims[i].n;
    }
    char *all = nki_alloc((size_t)bytes);
    if (!all) abort(); /* tiles are small; there is no way to report it */
    run(&in, all, src);
    run(&out, dst, all);
    nki_free(all);
}
