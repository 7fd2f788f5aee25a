/* What the sources of elementwise programs, folds and scans share. */
#ifndef NKI_INNER_H
#define NKI_INNER_H
#include "convert.h"
#include "functions.h"

#if defined(__clang__)
#define NKI_IVDEP _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define NKI_IVDEP _Pragma("GCC ivdep")
#else
#define NKI_IVDEP
#endif

/* A function of two operands in each of its forms. d may be one of the operands. */
typedef struct {
    nki_fn2 vv, vs, sv; /* two vectors; the right, or the left operand one number for all of d */
    float (*one)(float a, float b);
} nki_two;
typedef struct {
    nki_fn1 v;
    float (*one)(float a);
} nki_one;
extern const nki_one nki_functions1[NKI_FUNCTIONS]; /* NULL: of another arity, or on bits */
extern const nki_two nki_functions2[NKI_FUNCTIONS];

/* Functions that take and give bfloat16 as well: d and a are float32 (0) or bfloat16 (1), b also one number (2). NULL: no such. */
typedef void (*nki_narrow_fn)(void *d, const void *a, const void *b, int n);
typedef struct {
    nki_narrow_fn form[2][2][3];
} nki_forms;
extern const nki_forms nki_narrows[NKI_FUNCTIONS];

int nki_on_bits(int fn);
/* A function on bits; b is not read for invert. Lanes of `width` bits are extended with their sign, or with zeros. */
void nki_bits_run(int fn, int width, int sign, int32_t *d, const int32_t *a, const int32_t *b, int n);

/* a fn b in 64 bits, saturated; the fields of NKI_EXACT. */
void nki_exact_run(int fn, int dtype, int sign, float *d, const float *a, const float *b, int n);
/* The bits of `yes` where mask is not 0, else those of `no`. */
void nki_choose(float *d, const float *yes, const float *no, const float *mask, int n);
/* Elements of `size` bytes, with `stride` bytes between those of d, where mask is not 0. */
void nki_put_some(char *d, int64_t stride, int size, const char *s, const float *mask, int n);

/* ---- folds: 32 lanes and a tree ---- */
typedef struct {
    float lanes[NKI_LANES] __attribute__((aligned(64)));
} nki_lanes;
void nki_fold_start(nki_lanes *s, int fn);
/* Elements position .. position + n of the row. */
void nki_fold_add(nki_lanes *s, int fn, const float *x, int n, int64_t position);
float nki_fold_end(nki_lanes *s, int fn);
/* Whole rows of n elements, with `pitch` bytes from one to the next. */
void nki_fold_whole(int fn, float *d, const float *x, int64_t pitch, int rows, int n);
/* A row of at most 32 elements. */
float nki_fold_short(int fn, const float *x, int n);
#endif
