/* Elementwise programs as they run: what preparation (elementwise.c) and the single operations (steps.c) share. */
#ifndef NKI_RUN_H
#define NKI_RUN_H
#include "inner.h"

typedef struct op op;
typedef struct run run;
typedef struct chunk chunk;

/* A step of a chain of operations (chains.c): with the lanes or the one value of a slot, or with the tile or fold of an operation. */
typedef struct {
    int32_t kind, slot;
    const op *of;
} nki_link;

enum { MOST_FAR = 4 };
enum { NKI_BLOCK = 4096, NKI_BLOCK_ROWS = 32 }; /* elements and rows that go through the phases together, at most */
enum nki_extent { LANES, ROW, ONE }; /* a slot has a value for each element, for each row, or one that all rows of a block share */
enum nki_place { HERE, TILE, KEPT }; /* where a slot is: a place of its own, a tile in memory, a row that is kept */

struct op {
    void (*go)(const run *r, const op *o, const chunk *c); /* NULL: nothing is left to do */
    int32_t code, fn, d, a, b, c; /* d, a, b, c: slots; -1: none */
    int32_t tile, count;          /* tile, predicate or index expression; tiles that are read, from that on */
    int32_t uniform;              /* one value per row: runs once for all rows of a block */
    int32_t joined;               /* the rows of a chunk are like one row to it */
    int32_t many;                 /* it goes from row to row by itself */
    int32_t unbuffered;           /* it is a chain, and none of its lanes are in chunk buffers */
    int32_t in_place;             /* LOAD, STORE: memory itself is the slot */
    int32_t place, number;        /* enum nki_place of slot d, and which one */
    int32_t dtype, width, sign;
    int32_t far_away;             /* LOAD, STORE: the tile is in main memory */
    nki_lanes *fold;
    const nki_link *links;        /* of a chain that ends with this operation */
    const op *from;               /* what makes the lanes that a store past the caches takes, piece by piece */
};

struct run {
    const nki_ew *k;
    op *ops;
    float **slot;       /* where the lanes of each slot are, in the first row of the chunk; one value per row: those of the block */
    int64_t *pitch;     /* bytes from the lanes of one row of a chunk to those of the next */
    int8_t *is_row;     /* enum nki_extent: the slot has one value per row */
    int8_t *is_narrow;  /* its lanes are bfloat16 */
    int32_t (*used)[2]; /* of each slot: the operation that makes it, and the last one that reads it */
    float *single;      /* storage of row slots */
    float *buffers;     /* chunk buffers */
    float *spare;       /* four chunk buffers for operands and conversions */
    float *kept;        /* whole rows */
    nki_lanes *folds;
    int32_t *buffer;    /* of each slot: the chunk buffer where it is, -2 - that where it was; -1: it is somewhere else */
    const nki_phase *ahead; /* what asks for the next row, of what these loads read: a phase, or a store past the caches */
    const op *asker;
    int32_t next[MOST_FAR], far;
    int64_t shape[NKI_RANK], total; /* elements of a row */
    int rank, outer, inner, n_slots, n_buffers, streams;
    int rows, chunk_rows;   /* of a block, and of a chunk, at most; 1 where a row has several chunks */
    int whole;              /* a row is one chunk, or a part of one */
    uint64_t unbuffered;    /* the phases, of the first 64, whose chunks may be as long as a block: bits */
    int m, l, dim_m, dim_l; /* chunk: m times l elements of each row, along two dimensions; -1: none */
};

/* What an operation runs over: a row of a chunk, all of them, one after the other or joined, or one value for each row of a block. */
struct chunk {
    char *const *tile; /* addresses, in the first row of the block */
    const int64_t *pred, *index;
    int m, l;
    int64_t position; /* of its first element in the row */
    int row, part;    /* number of the row in the block, and in the chunk */
    int rows;         /* rows from that one on, of an operation that goes over them by itself */
};

static inline int64_t nki_along(const int64_t *stride, int dim) { return dim < 0 ? 0 : stride[dim]; }
static inline int64_t nki_to_next_row(const run *r, const int64_t *stride) { return r->outer ? stride[r->outer - 1] : 0; }
static inline char *nki_tile_at(const run *r, const chunk *c, int tile) {
    return c->tile[tile] + c->row * nki_to_next_row(r, r->k->tiles[tile].stride);
}
static inline float *nki_lanes_at(const run *r, const chunk *c, int slot) {
    if (r->is_row[slot]) return r->slot[slot] + c->row;
    return (float *)(void *)((char *)r->slot[slot] + c->part * r->pitch[slot]);
}
static inline int nki_contiguous(const run *r, const nki_tile *t, int m, int l) {
    const int64_t size = nki_types[t->dtype].size;
    return (l == 1 || nki_along(t->stride, r->dim_l) == size) && (m == 1 || nki_along(t->stride, r->dim_m) == l * size);
}
static inline int nki_loads(const op *o) { return o->code == NKI_LOAD || o->code == NKI_LOAD_RAW; }
static inline int nki_stores(const op *o) { return o->code == NKI_STORE || o->code == NKI_STORE_RAW; }

typedef struct { /* where a walk over the dimensions is */
    char **tile;
    int64_t *pred, *index;
} place_in;

/* A call in its parts (elementwise.c). nki_ew_begin: 0 where there is nothing to do; nki_ew_prepare, in memory of nki_ew_room bytes: bytes of
 * vectors that it needs, which nki_ew_vectors gives it. What was prepared can go again from other addresses (nki_ew_at) that are to each other
 * what the first ones were, see memo.c. */
enum { NKI_VECTORS = 131072 }; /* bytes of vectors that most calls do with */
int nki_ew_begin(run *r, const nki_ew *k, const int64_t *lo, const int64_t *hi);
size_t nki_ew_room(const run *r);
size_t nki_ew_prepare(run *r, place_in *w, char *p, char *const *at, const int64_t *pred_base, const int64_t *index_base, const int64_t *lo);
void nki_ew_at(const run *r, const place_in *w, char *const *at, const int64_t *pred_base, const int64_t *index_base);
void nki_ew_vectors(run *r, float *vectors);
void nki_ew_go(const run *r, place_in *w);
/* Lowest byte of a tile, from its address, and that after the highest. */
void nki_extent(const run *r, const nki_tile *t, int64_t *low, int64_t *high);
int nki_same_everywhere(const run *r, const int64_t *stride);

/* A selection by a predicate that nothing else reads, and where in a row that holds: from *yes up to *no. */
void nki_choose_parts(const run *r, const op *o, const chunk *c);
void nki_holds(const run *r, const op *o, const chunk *c, int64_t *yes, int64_t *no);
void nki_trees(const run *r, const op *o, const chunk *c);
/* How an operation runs, after everything else about it and its phase, which ends there, is known. */
void nki_choose_step(const run *r, op *o, const op *end);
/* A function whose results only a store past the caches reads, right after it, makes them as they are stored. */
void nki_feed_streams(const run *r, const nki_phase *p);

/* `chosen`: of each selection by a predicate that is the same everywhere the register that is the result, else -1; `without`: the
 * operations that then nothing needs. `known`: room for the registers: their truth, and then whether they are needed. */
void nki_decide(const run *r, const int64_t *pred, int32_t *known, int32_t *chosen, int8_t *without);
/* Makes chains of the operations of a phase, when everything else about them is known; `links`: room for three per operation. Returns
 * whether nothing is left that needs a chunk buffer. */
int nki_find_chains(const run *r, const nki_phase *p, nki_link *links);

static inline void nki_ask(const char *line) {
    __builtin_prefetch(line, 0, 3);
    __asm__ volatile("" ::"r"(line)); /* GCC takes a function without effects away */
}

/* Memory that is read from one end to the other: the line to ask for while that at p is used. It is of one of the next four pages, which are asked
 * for side by side, as a core gets a third more from several pages than from one after the other. nki_ask_group: all four, while the
 * NKI_GROUP bytes at p are used. */
enum { NKI_PAGE = 4096, NKI_PAGES = 4, NKI_GROUP = 64 * NKI_PAGES };
static inline const char *nki_ahead(const char *p) {
    const uintptr_t inside = (uintptr_t)p & (NKI_PAGES * NKI_PAGE - 1);
    return p - inside + NKI_PAGES * NKI_PAGE + inside / 64 % NKI_PAGES * NKI_PAGE + inside / NKI_GROUP * 64;
}
static inline void nki_ask_group(const char *p) {
    const char *line = nki_ahead(p);
    for (int i = 0; i < NKI_PAGES; i++) nki_ask(line + i * NKI_PAGE);
}

/* What to ask for while a chunk is used of a tile in main memory: NULL where it is in pieces. Where the tile is `linear` nki_ahead of what is
 * used, else the same part of the rows that come next. */
enum { LONG_ROW = 8192, LEAST_STREAM = 256 };
typedef struct {
    const char *at;
    int64_t bytes; /* of the chunk, or for each line of another one */
    int linear;
} nki_asked;
nki_asked nki_next(const run *r, const op *o, const chunk *c);
static inline void nki_ask_for(const nki_asked *a, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) nki_ask(a->linear ? nki_ahead(a->at + i) : a->at + i);
}
int nki_may_ask(const run *r, const op *o); /* whether a store has the time to ask for it */

void nki_stream_end(void); /* after stores past the caches, before anybody else reads */
#endif
