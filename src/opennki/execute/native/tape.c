/* The tape: loops and branches as jumps, calls with affine addresses. See nki.h. */
#include "nki.h"

#include <stdlib.h>
#include <string.h>

#include "fpenv.h"

#define MAX_TILES 16

static inline int64_t value(const nki_tape *t, const nki_affine *e, const int64_t *env) {
    int64_t v = e->c;
    const nki_term *term = t->terms + e->first;
    for (int i = 0; i < e->count; i++) v += term[i].coef * env[term[i].var];
    return v;
}

static inline int64_t floor_div(int64_t a, int64_t b) {
    int64_t q = a / b;
    return q - (a % b != 0 && (a % b < 0) != (b < 0));
}

/* One call; 0, or the number of a broken bound. */
static int64_t call(const nki_tape *t, const nki_call *c, const int64_t *env, char *const *buffers, void *scratch,
                    int64_t *wrong) {
    int64_t low[NKI_RANK], high[NKI_RANK];
    const int64_t *lo = NULL, *hi = NULL;
    if (c->n_clips) {
        int partial = 0;
        for (int j = 0; j < c->rank; j++) low[j] = 0, high[j] = c->shape[j];
        for (int i = 0; i < c->n_clips; i++) {
            const nki_guard *p = c->clips + i;
            int64_t base = value(t, &p->base, env);
            if (p->axis < 0) {
                if (base < 0) return 0;
            } else if (p->stride > 0) {
                int64_t first = -floor_div(base, p->stride);
                if (first > low[p->axis]) low[p->axis] = first, partial = 1;
            } else {
                int64_t end = floor_div(base, -p->stride) + 1;
                if (end < high[p->axis]) high[p->axis] = end, partial = 1;
            }
        }
        for (int j = 0; j < c->rank; j++)
            if (low[j] >= high[j]) return 0;
        if (partial) lo = low, hi = high;
    }
    for (int i = 0; i < c->n_bounds; i++) {
        const nki_bound *b = c->bounds + i;
        int64_t first = value(t, &b->base, env), last = first;
        for (int j = 0; j < c->rank; j++) {
            int64_t s = b->stride[j], from = lo ? lo[j] : 0, to = (hi ? hi[j] : c->shape[j]) - 1;
            if (s > 0) first += s * from, last += s * to;
            else first += s * to, last += s * from;
        }
        if (first < 0 || last >= b->size) {
            wrong[0] = first, wrong[1] = last;
            return b->error;
        }
    }
    char *at[MAX_TILES];
    for (int i = 0; i < c->n_addresses; i++)
        at[i] = buffers[c->addresses[i].slot] + value(t, &c->addresses[i].offset, env);
    switch (c->kind) {
    case NKI_K_EW: {
        int64_t preds[8], indices[8];
        for (int i = 0; i < c->n_preds; i++) preds[i] = value(t, c->preds + i, env);
        for (int i = 0; i < c->n_indices; i++) indices[i] = value(t, c->indices + i, env);
        nki_ew_run(c->what, at, preds, indices, lo, hi);
        break;
    }
    case NKI_K_MM: nki_mm_run(c->what, at[0], at[1], at[2], scratch); break;
    case NKI_K_COPY: nki_copy_run(c->what, at[0], at[1], lo, hi); break;
    case NKI_K_SCAN: nki_scan_run(c->what, at[0], at[1], c->n_addresses > 3 ? at[3] : NULL, at[2]); break;
    case NKI_K_PFOLD: nki_pfold_run(c->what, at[0], at[1]); break;
    }
    return 0;
}

static int any(const char *p, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (p[i]) return 1;
    return 0;
}

int64_t nki_tape_run(const nki_tape *t, int64_t from, int64_t to, int64_t *env, char *const *buffers, void *scratch,
                     nki_callback back, int64_t *wrong) {
    int64_t pc = from;
    while (pc < to) {
        const nki_op *o = t->ops + pc++;
        switch (o->code) {
        case NKI_OP_END: return 0;
        case NKI_OP_FOR:
            env[o->a] = 0;
            if (!o->n) pc = o->b;
            break;
        case NKI_OP_NEXT:
            if (++env[o->a] < o->n) pc = o->b;
            break;
        case NKI_OP_IF:
            if (value(t, t->affines + o->a, env) < 0) pc = o->b;
            break;
        case NKI_OP_JUMP: pc = o->b; break;
        case NKI_OP_DIV: env[o->a] = floor_div(value(t, t->affines + o->b, env), o->n); break;
        case NKI_OP_RUN: {
            int64_t error = call(t, t->calls + o->a, env, buffers, scratch, wrong);
            if (error) return error;
            break;
        }
        case NKI_OP_ZERO: memset(buffers[o->a], 0, (size_t)o->n); break;
        case NKI_OP_BACK:
            if (back(o->a)) return -1;
            break;
        case NKI_OP_TEST: {
            const nki_address *p = t->addresses + o->a;
            if (any(buffers[p->slot] + value(t, &p->offset, env), o->n * o->c)) pc = o->b;
            break;
        }
        }
    }
    return 0;
}

/* A run from Python, on one thread, in the floating-point mode of the interpreter. */
int64_t nki_tape_serial(const nki_tape *t, int64_t from, int64_t to, int64_t *env, char *const *buffers, nki_callback back,
                        int64_t *wrong) {
    void *scratch = t->scratch ? aligned_alloc(64, ((size_t)t->scratch + 63) & ~(size_t)63) : NULL;
    nki_fp saved = nki_fp_enter();
    int64_t error = nki_tape_run(t, from, to, env, buffers, scratch, back, wrong);
    nki_fp_leave(saved);
    free(scratch);
    return error;
}

typedef struct {
    const nki_tape *t;
    int64_t *envs;
    char *const *buffers;
    void *scratch[64];
    int64_t from, to, var, failed, error, wrong[2];
} job;

static void failed(job *j, int64_t task, int64_t error, const int64_t *wrong) {
    static char lock;
    while (__atomic_test_and_set(&lock, __ATOMIC_ACQUIRE)) {}
    if (j->failed < 0 || task < j->failed) {
        j->failed = task, j->error = error;
        j->wrong[0] = wrong[0], j->wrong[1] = wrong[1];
    }
    __atomic_clear(&lock, __ATOMIC_RELEASE);
}

static void *scratch_of(job *j, int worker) {
    if (!j->scratch[worker] && j->t->scratch)
        j->scratch[worker] = aligned_alloc(64, ((size_t)j->t->scratch + 63) & ~(size_t)63);
    return j->scratch[worker];
}

static int64_t finish(job *j, int64_t *wrong) {
    for (int i = 0; i < 64; i++) free(j->scratch[i]);
    if (j->failed < 0) return 0;
    wrong[0] = j->wrong[0], wrong[1] = j->wrong[1];
    return j->error;
}

static void program(void *arg, int64_t task, int worker) {
    job *j = arg;
    int64_t wrong[2] = {0, 0};
    nki_fp saved = nki_fp_enter();
    int64_t error = nki_tape_run(j->t, 0, j->t->n_ops, j->envs + task * j->t->n_env, j->buffers + worker * j->t->n_buffers,
                                 scratch_of(j, worker), NULL, wrong);
    nki_fp_leave(saved);
    if (error) failed(j, task, error, wrong);
}

int64_t nki_tape_programs(const nki_tape *t, int64_t programs, int64_t *envs, int threads, char *const *buffers,
                          int64_t *wrong) {
    job j = {.t = t, .envs = envs, .buffers = buffers, .failed = -1};
    nki_parallel(threads > 64 ? 64 : threads, programs, program, &j);
    return finish(&j, wrong);
}

static void iteration(void *arg, int64_t task, int worker) {
    job *j = arg;
    int64_t wrong[2] = {0, 0}, *env = j->envs + worker * j->t->n_env;
    env[j->var] = task;
    nki_fp saved = nki_fp_enter();
    int64_t error = nki_tape_run(j->t, j->from, j->to, env, j->buffers + worker * j->t->n_buffers, scratch_of(j, worker),
                                 NULL, wrong);
    nki_fp_leave(saved);
    if (error) failed(j, task, error, wrong);
}

int64_t nki_tape_loop(const nki_tape *t, int64_t at, int64_t *envs, int threads, char *const *buffers, int64_t *wrong) {
    const nki_op *loop = t->ops + at;
    job j = {.t = t, .envs = envs, .buffers = buffers, .from = at + 1, .to = loop->b - 1, .var = loop->a, .failed = -1};
    nki_parallel(threads > 64 ? 64 : threads, loop->n, iteration, &j);
    return finish(&j, wrong);
}
