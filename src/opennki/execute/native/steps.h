/* Instructions that take several native kernels: their steps, and the kernels that only steps use. */
#ifndef NKI_STEPS_H
#define NKI_STEPS_H
#include "nki.h"

/* Numbers of kinds go on from those of calls. */
enum nki_step_kind {
    NKI_S_FETCH = 32, /* a tile whose indices are read from memory: gathered or scattered */
    NKI_S_TAKE,       /* elements of rows by position */
    NKI_S_WIDE,       /* an elementwise program over 64-bit integers */
    NKI_S_UNIFORM,    /* random numbers */
    NKI_S_SEED,       /* the state of the generator */
    NKI_S_LARGEST,    /* the largest values of rows, in descending order */
    NKI_S_MATCH,      /* where values occur in rows */
    NKI_S_SEGMENTS,   /* first and last position of runs of equal elements */
    NKI_S_ROUTE       /* rows of the stationary operand that the moving one passes on, else the product */
};

/* Where an operand is: at an address of the call (which >= 0), in scratch memory (-1) or among the constants (-2). */
typedef struct {
    int32_t which, pad;
    int64_t offset; /* bytes */
} nki_operand;

typedef struct {
    int32_t kind, rank;         /* rank: dimensions of the descriptor */
    const void *what;
    int64_t extent[NKI_RANK];
    int32_t axis[NKI_RANK];     /* the dimension of the call's iteration space that narrows it; -1: none */
    int32_t n_operands, n_preds, n_indices;
    int32_t again;              /* > 0: this and the next again - 1 steps run for one row of the iteration space after the other */
    int64_t error; /* counted from 1 in its call */
    const nki_operand *operands;
    const int32_t *preds, *indices; /* numbers among those of the call */
} nki_step;

typedef struct {
    int32_t n_steps, rank;
    int64_t rows;         /* of the iteration space */
    const nki_step *steps;
    const char *constants;
    int64_t scratch;      /* bytes, besides what products need */
} nki_steps;

/* The steps of a call over the part lo..hi of its iteration space (NULL: all of it). Returns 0, or the error of a step. */
int64_t nki_steps_run(const nki_steps *k, char *const *at, const int64_t *preds, const int64_t *indices, const int64_t *lo,
                      const int64_t *hi, char *scratch, int64_t *wrong);

/* ---- indices that are read from memory ----------------------------------------------------------------------
 * Operands: the tensor, the tile on the other side, the index tiles; last, with `skip` or `masked`, one byte for each element
 * of the tile. A gather with `skip` writes whether the element is inside (those outside are element 0); a scatter leaves out
 * what is outside, and, with `masked`, elements whose byte is 0. Without `skip` an index outside is an error; wrong: the
 * dimension, the first such index, and the first such element of the flattened tensor. */
#define NKI_AXES NKI_RANK
typedef struct {
    int64_t size, unit;         /* elements of the dimension; bytes of a step along it */
    int64_t stride[NKI_RANK];   /* steps of the index for each dimension of the tile */
    int64_t step;               /* bytes from one element of the index tile to the next; 0: it has one */
    int32_t dtype, axis;
} nki_axis;
typedef struct {
    int32_t rank, width, scatter, skip, masked, n_axes;
    int64_t shape[NKI_RANK], t_stride[NKI_RANK], o_stride[NKI_RANK], m_stride[NKI_RANK]; /* tensor, tile, bytes of truth */
    nki_axis axes[NKI_AXES];
} nki_fetch;
/* index: affine part of the offset in the tensor (bytes), then that of each axis. */
int64_t nki_fetch_run(const nki_fetch *k, char *const *at, const int64_t *index, const int64_t *lo, const int64_t *hi,
                      int64_t error, int64_t *wrong);

/* ---- out[i, j] = rows[i, positions[i, j]]; `poison` where the position is outside ------------------------------ */
typedef struct {
    int64_t rows, n, size; /* n positions a row; elements of a row */
    int64_t x_stride[2], p_stride[2], d_stride[2];
    int32_t p_dtype, width;
    uint64_t poison;
} nki_take;
void nki_take_run(const nki_take *k, const char *x, const char *positions, char *dst, const int64_t *lo, const int64_t *hi);

/* ---- elementwise programs over 64-bit integers ----------------------------------------------------------------
 * Tiles are integers, or floats that are whole numbers when they are loaded. Stores saturate, or keep the low bits (b = 1);
 * floats get the nearest float32, rounded to the dtype. Registers wrap at 64 bits. */
#define NKI_I64 NKI_DTYPES /* a dtype of temporary tiles */
enum nki_wide_code {
    NKI_W_LOAD, NKI_W_STORE, NKI_W_CONST, NKI_W_INDEX, NKI_W_SELECT, NKI_W_ADD, NKI_W_SUBTRACT, NKI_W_MULTIPLY, NKI_W_MAXIMUM,
    NKI_W_MINIMUM, NKI_W_EQUAL, NKI_W_NOT_EQUAL, NKI_W_LESS, NKI_W_LESS_EQUAL, NKI_W_GREATER, NKI_W_GREATER_EQUAL
};
typedef struct {
    int32_t code, d, a, b, c, pad; /* as nki_uop; STORE: tile d = register a, where register c is not 0 if c >= 0 */
    int64_t imm;
} nki_wop;
typedef struct {
    int32_t rank, n_ops, n_tiles, n_registers;
    int64_t shape[NKI_RANK];
    const nki_wop *ops;
    const nki_tile *tiles;
    const nki_affine_tile *indices;
} nki_wide;
void nki_wide_run(const nki_wide *k, char *const *at, const int64_t *index, const int64_t *lo, const int64_t *hi);
int64_t nki_whole(int dtype, const char *p); /* an element as an integer */

/* ---- random numbers: isa/rng.py and the keys of isa/language_ops.py --------------------------------------------
 * index: seed of the run, then the iterations. The state has 128 float32, `state` NULL: there is none. */
typedef struct {
    int64_t n, call;
    int64_t state_stride;
    int32_t n_index, dtype; /* dtype of the seed operand */
} nki_random;
void nki_uniform_run(const nki_random *k, const char *state, float *dst, const int64_t *index);
void nki_seed_run(const nki_random *k, const char *seed, char *state, const int64_t *index);

/* ---- searches in rows of float32 ------------------------------------------------------------------------------- */
typedef struct {
    int64_t rows, n, count;
    int64_t x_stride[2], v_stride[2], m_stride[2], d_stride[2], t_stride[2]; /* data, values, mask, result, what was taken */
    int32_t backwards, masked;
} nki_search;
void nki_largest_run(const nki_search *k, const char *x, char *dst);
/* dst: float32 positions, 2^32 - 1 where there is none; taken: float32 truth. mask: float32 truth, used if `masked`. */
void nki_match_run(const nki_search *k, const char *x, const char *values, const char *mask, char *dst, char *taken);

/* Runs of equal elements of one row; 0 is padding. x: float32, or 32-bit integers if `raw`. int32 results. */
typedef struct {
    int64_t n, x_stride;
    int32_t raw, pad;
} nki_segments;
void nki_segments_run(const nki_segments *k, const char *x, int32_t *first, int32_t *last);

/* ---- transposition by the Tensor Engine -------------------------------------------------------------------------
 * Where each column of the moving operand has a single 1, the result has the rows of the stationary one that they select,
 * transposed; else it is the product. The descriptor is that of a product without accumulation. */
void nki_route_run(const nki_mm *k, const char *stationary, const char *moving, char *dst, void *scratch);
#endif
