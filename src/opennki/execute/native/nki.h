/* The native executor: what the tape, the kernels and the lowering (execute/lower.py) agree on.
 *
 * A kernel is lowered to a tape of nki_op. Control flow is jumps; everything that computes is one of the
 * descriptors below, with the addresses of its tiles. All arithmetic is float32, rounded once when it is
 * stored; nothing is contracted (-ffp-contract=off), so every build gives the same bits.
 * Plain C11 with GCC vector extensions; the same source is compiled for each level of CPU.
 */
#ifndef NKI_H
#define NKI_H
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define NKI_ABI 4
#define NKI_RANK 8     /* iteration dimensions of a tile, after those that belong together are joined */
#define NKI_CHUNK 2048 /* elements of a vector register */
#define NKI_LANES 32   /* lanes of a reduction: element index mod 32, then a binary tree (design "Numerics") */

/* Element types in memory; the numbers are those of execute/abi.py. */
enum nki_dtype {
    NKI_F32, NKI_BF16, NKI_F16, NKI_F8E4M3, NKI_F8E4M3FN, NKI_F8E5M2, NKI_TF32,
    NKI_I32, NKI_U32, NKI_I16, NKI_U16, NKI_I8, NKI_U8, NKI_BOOL, NKI_DTYPES
};

/* ---- elementwise: a program of vector operations over rows --------------------------------------------------
 * The iteration space is `outer` dimensions (each point of it is a row) times an inner extent that `inner` more
 * dimensions make up; all of them are in shape[], outer ones first. Phases run one after the other for each row:
 * an ELEMENT phase runs its operations over the inner extent in chunks, a ROW phase once, on one element.
 * Registers hold 32-bit lanes: float32, or the bits of an integer that was loaded raw.
 * A row register (a fold, or what a ROW phase computed) reads as one value for the whole row in later phases; a
 * fold is there from the end of its phase on. Other registers live for one chunk of one phase. A register that has
 * one value per row (a constant, a load with stride 0 in all inner dimensions, functions of such) costs nothing per
 * element. The result is that of the program on whole rows, as long as tiles that are loaded and stored in one phase
 * are the same elements in the same order or do not overlap. Where a store has stride 0 from row to row, a row may load what the
 * one before it has stored; otherwise rows go through the phases in blocks. Elements in memory are aligned to their size.
 *
 * Functions on bits (bitwise_*, invert, shifts) take raw lanes. Their elements have the width of field c (8, 16 or 32
 * bits), and the result is extended to the lane with its sign if field pad is 1, with zeros if it is 0. An immediate
 * operand is then the bits of imm, as it is for NKI_EXACT. Truth (of c in NKI_SELECT and the stores) is that of a
 * float32: not +0 and not -0.
 *
 * A selection by a predicate that is the same everywhere in a run is decided before it: what only the other side needs is not computed.
 *
 * What an element phase computes for the whole row can be kept for later phases (NKI_KEEP, NKI_KEPT). A load or store with
 * pad = 1 is of a tensor in main memory that exceeds the caches: the next row is asked for early, and results go past them.
 */
enum nki_uop_code {
    NKI_LOAD,       /* d = tile a, converted to float32 */
    NKI_LOAD_RAW,   /* d = tile a, integer extended to 32 bits by its own signedness (floats: their bits) */
    NKI_STORE,      /* tile d = register a, converted from float32 with rounding; only where register c is not 0, if c >= 0 */
    NKI_STORE_RAW,  /* tile d = register a: the low bits; only where register c is not 0, if c >= 0 */
    NKI_CONST,      /* d = imm */
    NKI_FUNC,       /* d = function fn (a [, b]); b < 0 and arity 2: the right operand is imm; a < 0: the left one is */
    NKI_SELECT,     /* d = c != 0 ? a : b (bits) */
    NKI_PRED,       /* d = 1.0 where predicate a of the call holds at the element, else 0.0 */
    NKI_INDEX,      /* d = the value of index expression a of the call at the element, as float32; raw int32 if b = 1 */
    NKI_FOLD,       /* row register d = fold of register a over the row by function fn (32 lanes, then the tree) */
    NKI_ROUND,      /* d = a rounded to dtype b and back to float32 */
    NKI_EXACT,      /* raw d = a fn b (add, subtract, multiply, maximum, minimum) in 64 bits, saturated to dtype c; a
                     * float dtype c: the float32 nearest to it. pad: bit 0, lanes of a have a sign; bit 1, those of b */
    NKI_KEEP,       /* register a, made in this phase, is kept as row number d; after everything that makes or reads it */
    NKI_KEPT,       /* d = the elements of kept row a */
    NKI_TREE        /* d = the tree of function fn over an element of each of b tiles, a and those after it: what a fold of a row of
                     * those 2 to 32 elements gives */
};

typedef struct {
    int32_t code, fn, d, a, b, c;
    float imm;
    int32_t pad;
} nki_uop;

typedef struct {
    int32_t first, count; /* operations of the phase */
    int32_t row;          /* 1: runs once per row, on one element */
    int32_t pad;
} nki_phase;

typedef struct {
    int64_t stride[NKI_RANK]; /* bytes per step of each iteration dimension; 0: the same element again */
    int32_t dtype;
    int32_t pad;
} nki_tile;

/* base + sum(stride * iota) of a predicate (holds where >= 0) or an index expression; the base comes with the call */
typedef struct {
    int64_t stride[NKI_RANK];
} nki_affine_tile;

typedef struct {
    int32_t outer, inner;     /* numbers of dimensions */
    int64_t shape[NKI_RANK];  /* outer ones first */
    int32_t n_phases, n_uops, n_tiles, n_preds, n_indices, n_registers, n_kept, pad;
    const nki_phase *phases;
    const nki_uop *uops;
    const nki_tile *tiles;
    const nki_affine_tile *preds, *indices;
} nki_ew;

/* Run over the part lo..hi of the iteration space (NULL: all of it). `at` has the address of each tile's first
 * element, `pred_base` and `index_base` the bases of predicates and index expressions. A part of an inner
 * dimension is allowed only where nothing folds. */
void nki_ew_run(const nki_ew *k, char *const *at, const int64_t *pred_base, const int64_t *index_base,
                const int64_t *lo, const int64_t *hi);

int nki_abi(void); /* NKI_ABI */

/* Function numbers are positions in the sorted names of isa.scalar.SCALAR (generated into functions.h). d may be a or b. */
typedef void (*nki_fn1)(float *d, const float *a, int n);
typedef void (*nki_fn2)(float *d, const float *a, const float *b, int n);

/* ---- matrix product -------------------------------------------------------------------------------------- */
enum { NKI_WHERES = 2 };
typedef struct {
    int64_t m, n;  /* the predicate is base + m * row + n * column >= 0 */
    int32_t holds; /* or does not */
    int32_t pad;
} nki_where;
typedef struct {
    int32_t K, M, N;
    int32_t s_dtype, m_dtype;             /* floats */
    int64_t s_stride[2], m_stride[2];     /* bytes: contraction row, then column */
    int64_t d_stride[2];                  /* bytes of the float32 result: row m, column n */
    int32_t accumulate;                   /* enum nki_adds */
    int32_t blocks;                       /* products that are added up, one after the other; 0 is 1 */
    int64_t s_block, m_block;             /* bytes from the operands of one to those of the next */
    int32_t dot;                          /* of operands that are summed in pairs: the CPU's dot instructions do, whatever their order of
                                           * additions, and denormals may be zero */
    int32_t n_where;                      /* results are not wanted, and may be anything, where all of these are as they say */
    nki_where where[NKI_WHERES];
} nki_mm;

/* Each product is complete before it is added. Where it is added to zero, -0 becomes 0. */
enum nki_adds { NKI_ADDS_NOTHING, NKI_ADDS_TO_RESULT, NKI_ADDS_TO_ZERO };

/* The order of a sum is the same for every build and size. Operands that are both bfloat16 or float8 are summed in pairs,
 * as CPUs with tiles of bfloat16 do it: of each NKI_PAIRS steps, those of even k are one chain of FMAs from 0, those of
 * odd k another, and the sum of the two is added to the total, which starts from 0. All others are one chain of FMAs
 * over k = 0, 1, ...
 * The result overlaps no operand. `scratch` has nki_mm_scratch(k) bytes, aligned to 64. */
size_t nki_mm_scratch(const nki_mm *k);
void nki_mm_run(const nki_mm *k, const char *stationary, const char *moving, char *dst, void *scratch);
void nki_mm_vectors(const nki_mm *k, const char *stationary, const char *moving, char *dst, void *scratch); /* without the tile unit */

/* An operand that many products share can be packed once and kept. nki_mm_kept: bytes of the packed stationary (0) or moving
 * (1) operand, 0 where products are not made from packed operands; nki_mm_keep packs it, to a place aligned to 64.
 * nki_mm_kept_run: the product with operands that are kept, or NULL; nki_mm_where_run: with the bases of the predicates that say where it
 * is not wanted. */
size_t nki_mm_kept(const nki_mm *k, int moving);
void nki_mm_keep(const nki_mm *k, int moving, const char *at, void *kept);
void nki_mm_kept_run(const nki_mm *k, const char *stationary, const char *moving, char *dst, void *scratch, const void *kept_s,
                     const void *kept_m);
void nki_mm_where_run(const nki_mm *k, const char *stationary, const char *moving, char *dst, void *scratch, const void *kept_s,
                      const void *kept_m, const int64_t *where);
#define NKI_PAIRS 32
int nki_in_pairs(const nki_mm *k);
static inline int nki_blocks(const nki_mm *k) { return k->blocks > 1 ? k->blocks : 1; }
/* Whether no result of a block of rows and columns is wanted; where: bases, NULL where all are. */
static inline int nki_unwanted(const nki_mm *k, const int64_t *where, int m, int rows, int n, int cols) {
    for (int i = 0; where && i < k->n_where; i++) {
        const nki_where *w = k->where + i;
        const int64_t down = (rows - 1) * w->m, along = (cols - 1) * w->n;
        int64_t low = where[i] + m * w->m + n * w->n, high = low;
        *(down < 0 ? &low : &high) += down, *(along < 0 ? &low : &high) += along;
        if (w->holds ? low < 0 : high >= 0) return 0;
    }
    return where && k->n_where;
}
static inline int nki_adds_then(const nki_mm *k, int block) { return block ? NKI_ADDS_TO_RESULT : k->accumulate; } /* how a block is added */

/* The same by the tile unit of the CPU, for operands that are summed in pairs: where nki_tiles_there says so. What it would round in another
 * way (infinities, NaN, and numbers so small that results may be denormal) is left to vectors. */
int nki_tiles_there(const nki_mm *k);
size_t nki_tiles_scratch(const nki_mm *k);
void nki_tiles_run(const nki_mm *k, const char *stationary, const char *moving, char *dst, void *scratch, const void *kept_s,
                   const void *kept_m, const int64_t *where);
size_t nki_tiles_kept(const nki_mm *k, int moving);
void nki_tiles_keep(const nki_mm *k, int moving, const char *at, void *packed);
/* From now on leave the tile unit alone, and all instructions for bfloat16; use it where it is there (as from the start); or let `dot`
 * products have dot instructions in its place, even slow ones; returns whether that is so. */
enum { NKI_NO_TILES, NKI_TILES, NKI_DOTS };
int nki_tiles_use(int wanted);
int nki_narrows_there(void); /* whether vectors may be made bfloat16 by the instruction for that */

/* ---- copies, bit by bit, of 1, 2, 4 or 8 byte elements with any strides ---------------------------------- */
typedef struct {
    int32_t rank, width;
    int64_t shape[NKI_RANK], d_stride[NKI_RANK], s_stride[NKI_RANK];
} nki_copy;
void nki_copy_run(const nki_copy *k, char *dst, const char *src, const int64_t *lo, const int64_t *hi);
/* d[j][i] = s[i][j] for ni x nj elements of `width` bytes (1, 2, 4, 8), which lie side by side along i in d and along j in s; dj and si: bytes
 * from row to row there. */
void nki_transpose(int width, char *d, const char *s, int64_t ni, int64_t nj, int64_t dj, int64_t si);

/* ---- scan along the flattened free elements of each row --------------------------------------------------
 * r[i] = op1(op0(x[i], r[i-1]), y[i]); reverse0: op0(r, x), reverse1: op1(y, .). Function numbers of two operands. */
typedef struct {
    int64_t rows, n;
    int64_t x_stride[2], y_stride[2], d_stride[2], i_stride; /* row, element; i: initial value of each row */
    int32_t x_dtype, y_dtype, d_dtype, i_dtype;
    int32_t op0, op1, reverse0, reverse1;
    int32_t has_initial_tile, pad; /* else `initial` */
    float initial;
    int32_t pad2;
} nki_scan;
void nki_scan_run(const nki_scan *k, const char *x, const char *y, const char *init, char *dst);

/* ---- fold over the partitions: result[f] = fold over p of x[p, f], lanes are p mod 32 ---------------------- */
typedef struct {
    int64_t p, f;
    int64_t x_stride[2];
    int64_t d_stride;
    int32_t x_dtype, d_dtype, fn, pad;
} nki_pfold;
void nki_pfold_run(const nki_pfold *k, const char *x, char *dst);

/* ---- the tape ----------------------------------------------------------------------------------------------
 * env holds the values of loop indices and program ids. An affine expression is const + sum(coef * env[var]).
 */
typedef struct {
    int64_t c;
    int32_t first, count; /* terms */
} nki_affine;

typedef struct {
    int64_t coef;
    int64_t var;
} nki_term;

/* Address of a tile: buffer `slot`, byte offset. */
typedef struct {
    nki_affine offset;
    int64_t slot;
} nki_address;

/* An index that is not proven to be inside: base + sum(stride * iota) over the part of the iteration space that runs, and
 * base + low .. high more besides, lies in 0 .. size-1; else the run stops with `error`. */
typedef struct {
    nki_affine base;
    int64_t stride[NKI_RANK];
    int64_t low, high;
    int64_t size;
    int64_t error;
} nki_bound;

/* A mask: base + stride * iota(axis) >= 0 narrows the axis; axis < 0: base >= 0 or nothing runs. */
typedef struct {
    nki_affine base;
    int64_t axis, stride;
} nki_guard;

enum nki_kind { NKI_K_EW, NKI_K_MM, NKI_K_COPY, NKI_K_SCAN, NKI_K_PFOLD, NKI_K_STEPS }; /* STEPS: see steps.h */

typedef struct {
    int32_t kind, rank;
    const void *what; /* the descriptor */
    int64_t shape[NKI_RANK]; /* iteration space, for masks and bounds */
    int32_t n_addresses, n_bounds, n_clips, n_preds, n_indices;
    int32_t whole;   /* clips decide whether it runs, and narrow nothing */
    int32_t keep[2]; /* of a product: number of the nki_keep of each operand; -1: it is not kept. Of steps: errors before its own */
    const nki_address *addresses;
    const nki_bound *bounds;
    const nki_guard *clips;
    const nki_affine *preds, *indices;
} nki_call;

enum nki_op_code {
    NKI_OP_END,
    NKI_OP_FOR,   /* env[a] = 0; if n == 0 jump to b; c: iterations may run on several threads */
    NKI_OP_NEXT,  /* env[a]++; if it is below n jump to b */
    NKI_OP_IF,    /* affine a < 0: jump to b */
    NKI_OP_JUMP,  /* to b */
    NKI_OP_DIV,   /* env[a] = floor(affine b / n) */
    NKI_OP_RUN,   /* call a */
    NKI_OP_ZERO,  /* clear n bytes of buffer a */
    NKI_OP_BACK,  /* ask Python: callback(a); stop when it returns non-zero */
    NKI_OP_TEST,  /* any of n elements side by side at address a is not 0: jump to b; c: bytes of an element, + 256 for floats */
    NKI_OP_MARK   /* use a of a watched tensor: mark what it writes, or ask for what it reads */
};

typedef struct {
    int32_t code, a, b, c;
    int64_t n;
} nki_op;

/* A use of a watched tensor. Its buffer has a byte per cell, cells[] of them, each of cell[] elements, along its axes. A write
 * (error 0) marks the cells from base + low to base + high. A read asks for the cells of the elements base + moving * index,
 * for each index of shape[0 .. rank-1]; one that is not marked stops the run with `error`, and its place in shape in `wrong`. */
typedef struct {
    int64_t slot, error;
    int32_t rank, axes;
    int64_t shape[NKI_RANK];
    nki_affine base[NKI_RANK];
    int64_t moving[NKI_RANK][NKI_RANK]; /* of each axis: elements per step of each dimension of shape */
    int64_t low[NKI_RANK], high[NKI_RANK], cell[NKI_RANK], cells[NKI_RANK];
} nki_watch;

/* An operand of a product in a tensor that nobody writes, which later runs of the call meet again: at up to `places` places,
 * each of which is packed when it is first met, into `bytes` bytes. */
typedef struct {
    int64_t places, bytes;
} nki_keep;

typedef struct {
    const nki_op *ops;
    const nki_call *calls;
    const nki_affine *affines;
    const nki_term *terms;
    const nki_address *addresses;
    const nki_watch *watches;
    const nki_keep *keeps;
    int64_t n_ops, n_env, n_buffers, scratch, n_keeps;
} nki_tape;

/* What a run asks Python for: the interpreter's step of an instruction without a native form. */
typedef int32_t (*nki_callback)(int32_t index);

/* Run a tape for Python, in the floating-point mode of the interpreter. `buffers` has a row of pointers for each of `threads`
 * threads, `env` the values of the variables; loops that are marked parallel run on up to that many threads, each with its
 * row. Nothing in such a loop may call back. Returns 0, or -1 when a callback stopped the run, or the number (>= 1) of the
 * check that failed (of the lowest iteration where there are several), with its first and last index in `wrong`. */
int64_t nki_tape_serial(const nki_tape *t, int64_t *env, int threads, char *const *buffers, nki_callback back, int64_t *wrong);

/* From now on, add the nanoseconds and the runs of call i of the tapes that run to table[2 i] and table[2 i + 1]; NULL: no more. */
void nki_tape_profile(int64_t *table);

/* Whether temporary memory is filled with NaN before each call, so that what reads it before it is written is seen: for tests. */
extern int nki_poisoned;
static inline void nki_poison(void *memory, size_t bytes) {
    if (__builtin_expect(nki_poisoned, 0) && bytes) memset(memory, 0xff, bytes);
}
void nki_poison_from_now(int wanted);

/* The same for `programs` programs (rows of `envs`), side by side on up to `threads` threads. Programs must not depend on each
 * other, and nothing may call back. The lowest program that failed counts. */
int64_t nki_tape_programs(const nki_tape *t, int64_t programs, int64_t *envs, int threads, char *const *buffers,
                          int64_t *wrong);

/* ---- conversion, for tests ------------------------------------------------------------------------------- */
void nki_to_float(int dtype, const void *src, float *dst, int64_t n);   /* contiguous */
void nki_from_float(int dtype, const float *src, void *dst, int64_t n); /* contiguous, rounded as the interpreter rounds */
void nki_call1(int fn, float *d, const float *a, int64_t n);
void nki_call2(int fn, float *d, const float *a, const float *b, int64_t n);

/* ---- buffers that are used again --------------------------------------------------------------------------
 * Aligned to 64, contents undefined; NULL if there is no memory. At most 256 MiB are kept after nki_free. Thread-safe. */
void *nki_alloc(size_t size);
void nki_free(void *buffer);
size_t nki_kept(void); /* bytes kept for later */
void nki_trim(void);   /* give them back to the system */

/* ---- threads ----------------------------------------------------------------------------------------------
 * Run fn(arg, task, worker) for tasks 0..tasks-1, each once, on at most `threads` threads including the caller; worker
 * < threads says which one, for scratch. Which worker gets a task is not defined. Returns when all are done. A call
 * from within a task, or while another thread's call is under way, runs in the caller alone (worker 0). Tasks run in
 * the default floating-point mode (subnormals kept), also on one thread; the caller's mode is restored.
 * A forked child starts threads of its own; a task must not fork. */
void nki_parallel(int threads, int64_t tasks, void (*fn)(void *arg, int64_t task, int worker), void *arg);

#endif
