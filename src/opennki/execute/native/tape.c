/* The tape: loops and branches as jumps, calls with affine addresses. See nki.h. */
#include "nki.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fpenv.h"
#include "memo.h"
#include "shelf.h"
#include "steps.h"

#define MAX_TILES 64
#define MAX_EXPRESSIONS 32

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
static int64_t call(const nki_tape *t, nki_shelf *shelves, nki_memo *memo, const nki_call *c, const int64_t *env, char *const *buffers,
                    void *scratch, int64_t *wrong) {
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
        if (partial && !c->whole) lo = low, hi = high;
    }
    for (int i = 0; i < c->n_bounds; i++) {
        const nki_bound *b = c->bounds + i;
        int64_t first = value(t, &b->base, env), last = first;
        for (int j = 0; j < c->rank; j++) {
            int64_t s = b->stride[j], from = lo ? lo[j] : 0, to = (hi ? hi[j] : c->shape[j]) - 1;
            if (s > 0) first += s * from, last += s * to;
            else first += s * to, last += s * from;
        }
        first += b->low, last += b->high;
        if (first < 0 || last >= b->size) {
            wrong[0] = first, wrong[1] = last;
            return b->error;
        }
    }
    if (c->kind == NKI_K_MM || c->kind == NKI_K_STEPS) nki_poison(scratch, (size_t)t->scratch);
    char *at[MAX_TILES];
    for (int i = 0; i < c->n_addresses; i++)
        at[i] = buffers[c->addresses[i].slot] + value(t, &c->addresses[i].offset, env);
    switch (c->kind) {
    case NKI_K_EW: {
        int64_t preds[MAX_EXPRESSIONS], indices[MAX_EXPRESSIONS];
        for (int i = 0; i < c->n_preds; i++) preds[i] = value(t, c->preds + i, env);
        for (int i = 0; i < c->n_indices; i++) indices[i] = value(t, c->indices + i, env);
        if (lo)
            nki_ew_run(c->what, at, preds, indices, lo, hi);
        else
            nki_memo_run(memo, c - t->calls, c->what, at, preds, indices);
        break;
    }
    case NKI_K_MM: {
        const void *kept[2];
        for (int i = 0; i < 2; i++) kept[i] = c->keep[i] < 0 ? NULL : nki_shelf_get(shelves, c->keep[i], c->what, i, at[i]);
        int64_t where[NKI_WHERES];
        for (int i = 0; i < c->n_preds && i < NKI_WHERES; i++) where[i] = value(t, c->preds + i, env);
        nki_mm_where_run(c->what, at[0], at[1], at[2], scratch, kept[0], kept[1], c->n_preds ? where : NULL);
        break;
    }
    case NKI_K_COPY: nki_copy_run(c->what, at[0], at[1], lo, hi); break;
    case NKI_K_SCAN: nki_scan_run(c->what, at[0], at[1], c->n_addresses > 3 ? at[3] : NULL, at[2]); break;
    case NKI_K_PFOLD: nki_pfold_run(c->what, at[0], at[1]); break;
    case NKI_K_STEPS: {
        int64_t preds[MAX_EXPRESSIONS], indices[MAX_EXPRESSIONS];
        for (int i = 0; i < c->n_preds; i++) preds[i] = value(t, c->preds + i, env);
        for (int i = 0; i < c->n_indices; i++) indices[i] = value(t, c->indices + i, env);
        int64_t error = nki_steps_run(c->what, at, preds, indices, lo, hi, scratch, wrong);
        return error ? error + c->keep[0] : 0;
    }
    }
    return 0;
}

int nki_poisoned;
void nki_poison_from_now(int wanted) { nki_poisoned = wanted; }

/* Where the time of each call goes, while somebody asks: nanoseconds and runs of call i in [2 i] and [2 i + 1]. */
static int64_t *spent;
void nki_tape_profile(int64_t *table) { __atomic_store_n(&spent, table, __ATOMIC_RELEASE); }

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static int64_t timed(int64_t *table, int number, const nki_tape *t, nki_shelf *shelves, nki_memo *memo, const int64_t *env, char *const *buffers,
                     void *scratch, int64_t *wrong) {
    int64_t start = nanoseconds(), error = call(t, shelves, memo, t->calls + number, env, buffers, scratch, wrong);
    __atomic_fetch_add(table + 2 * number, nanoseconds() - start, __ATOMIC_RELAXED);
    __atomic_fetch_add(table + 2 * number + 1, 1, __ATOMIC_RELAXED);
    return error;
}

/* Whether one of n elements is not zero; floats are not that are -0. */
static int any(const char *p, int64_t n, int size, int floats) {
    for (int64_t i = 0; i < n; i++)
        for (int j = 0; j < size; j++)
            if (p[i * size + j] & (floats && j == size - 1 ? 0x7f : 0xff)) return 1;
    return 0;
}

static void mark(const nki_watch *w, const int64_t *base, char *cells) {
    int64_t from[NKI_RANK], to[NKI_RANK], at[NKI_RANK];
    for (int i = 0; i < w->axes; i++) {
        int64_t low = floor_div(base[i] + w->low[i], w->cell[i]), high = floor_div(base[i] + w->high[i], w->cell[i]);
        from[i] = at[i] = low > 0 ? low : 0; /* what a mask leaves out may be outside */
        to[i] = high < w->cells[i] - 1 ? high : w->cells[i] - 1;
        if (from[i] > to[i]) return;
    }
    for (int i = 0; i >= 0;) {
        int64_t place = 0;
        for (int j = 0; j < w->axes; j++) place = place * w->cells[j] + at[j];
        __atomic_store_n(cells + place, 1, __ATOMIC_RELAXED);
        for (i = w->axes - 1; i >= 0; i--) {
            if (++at[i] <= to[i]) break;
            at[i] = from[i];
        }
    }
}

/* The number of the first element in a cell that nobody marked, -1 for none. */
static int64_t unmarked(const nki_watch *w, const int64_t *base, const char *cells) {
    int64_t at[NKI_RANK] = {0};
    for (int64_t number = 0;; number++) {
        int64_t place = 0;
        for (int i = 0; i < w->axes; i++) {
            int64_t index = base[i];
            for (int j = 0; j < w->rank; j++) index += w->moving[i][j] * at[j];
            place = place * w->cells[i] + index / w->cell[i];
        }
        if (!__atomic_load_n(cells + place, __ATOMIC_RELAXED)) return number;
        int j = w->rank - 1;
        for (; j >= 0; j--) {
            if (++at[j] < w->shape[j]) break;
            at[j] = 0;
        }
        if (j < 0) return -1;
    }
}

/* Who runs: memory of each thread, and scratch memory, made when it is first needed. */
typedef struct {
    const nki_tape *t;
    char *const *buffers; /* a row for each thread */
    int threads;
    void *scratch[64];
    nki_memo *memo[64];
    nki_callback back;
} team;

/* Tasks of a team: iterations of a loop (ops from .. to), or programs. */
typedef struct {
    team *all;
    nki_shelf *shelves; /* of the program that a loop is in */
    int64_t *envs;
    int64_t from, to, var, failed, error, wrong[3];
} job;

static void *scratch_of(team *all, int worker) {
    if (!all->scratch[worker] && all->t->scratch)
        all->scratch[worker] = aligned_alloc(64, ((size_t)all->t->scratch + 63) & ~(size_t)63);
    return all->scratch[worker];
}

static nki_memo *memo_of(team *all, int worker) {
    if (!all->memo[worker]) all->memo[worker] = nki_memo_new();
    return all->memo[worker];
}

static void dismiss(team *all) {
    for (int i = 0; i < 64; i++) free(all->scratch[i]), nki_memo_free(all->memo[i]);
}

static int64_t loop(team *all, nki_shelf *shelves, int64_t at, const int64_t *env, int64_t *wrong);

/* Ops from .. to by one thread of a team; `serial`: it is the one that may start the others. `shelves`: what is kept of products, for
 * one run of a program, as arguments change from run to run. */
static int64_t run(team *all, nki_shelf *shelves, int worker, int serial, int64_t from, int64_t to, int64_t *env, int64_t *wrong) {
    const nki_tape *t = all->t;
    char *const *buffers = all->buffers + worker * t->n_buffers;
    void *scratch = scratch_of(all, worker);
    nki_memo *memo = memo_of(all, worker);
    int64_t pc = from, *table = __atomic_load_n(&spent, __ATOMIC_ACQUIRE);
    while (pc < to) {
        const nki_op *o = t->ops + pc++;
        switch (o->code) {
        case NKI_OP_END: return 0;
        case NKI_OP_FOR:
            env[o->a] = 0;
            if (!o->n) {
                pc = o->b;
            } else if (o->c && serial && all->threads > 1) {
                int64_t error = loop(all, shelves, pc - 1, env, wrong);
                if (error) return error;
                pc = o->b;
            }
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
            int64_t error = table ? timed(table, o->a, t, shelves, memo, env, buffers, scratch, wrong)
                                  : call(t, shelves, memo, t->calls + o->a, env, buffers, scratch, wrong);
            if (error) return error;
            break;
        }
        case NKI_OP_MARK: {
            const nki_watch *w = t->watches + o->a;
            int64_t base[NKI_RANK];
            for (int i = 0; i < w->axes; i++) base[i] = value(t, &w->base[i], env);
            if (!w->error) {
                mark(w, base, buffers[w->slot]);
            } else if ((base[0] = unmarked(w, base, buffers[w->slot])) >= 0) {
                wrong[0] = wrong[1] = base[0];
                return w->error;
            }
            break;
        }
        case NKI_OP_ZERO: memset(buffers[o->a], 0, (size_t)o->n); break;
        case NKI_OP_BACK:
            if (all->back(o->a)) return -1;
            break;
        case NKI_OP_TEST: {
            const nki_address *p = t->addresses + o->a;
            if (any(buffers[p->slot] + value(t, &p->offset, env), o->n, o->c & 255, o->c >> 8)) pc = o->b;
            break;
        }
        }
    }
    return 0;
}

static void failed(job *j, int64_t task, int64_t error, const int64_t *wrong) {
    static char lock;
    while (__atomic_test_and_set(&lock, __ATOMIC_ACQUIRE)) {}
    if (j->failed < 0 || task < j->failed) {
        j->failed = task, j->error = error;
        memcpy(j->wrong, wrong, sizeof j->wrong);
    }
    __atomic_clear(&lock, __ATOMIC_RELEASE);
}

static int64_t finish(const job *j, int64_t *wrong) {
    if (j->failed < 0) return 0;
    memcpy(wrong, j->wrong, sizeof j->wrong);
    return j->error;
}

static void task(job *j, nki_shelf *shelves, int64_t number, int worker, int64_t *env) {
    int64_t wrong[3] = {0};
    nki_fp saved = nki_fp_enter();
    int64_t error = run(j->all, shelves, worker, 0, j->from, j->to, env, wrong);
    nki_fp_leave(saved);
    if (error) failed(j, number, error, wrong);
}

static void iteration(void *arg, int64_t number, int worker) {
    job *j = arg;
    int64_t *env = j->envs + worker * j->all->t->n_env;
    env[j->var] = number;
    task(j, j->shelves, number, worker, env);
}

static void program(void *arg, int64_t number, int worker) {
    job *j = arg;
    const nki_tape *t = j->all->t;
    nki_shelf *shelves = nki_shelves_new(t->keeps, t->n_keeps);
    task(j, shelves, number, worker, j->envs + number * t->n_env);
    nki_shelves_free(shelves, t->n_keeps);
}

/* The loop whose FOR is op `at`, on the threads of a team. */
static int64_t loop(team *all, nki_shelf *shelves, int64_t at, const int64_t *env, int64_t *wrong) {
    const nki_tape *t = all->t;
    const nki_op *o = t->ops + at;
    int64_t *envs = malloc((size_t)(all->threads * t->n_env) * sizeof(int64_t));
    if (!envs) abort();
    for (int i = 0; i < all->threads; i++) memcpy(envs + i * t->n_env, env, (size_t)t->n_env * sizeof(int64_t));
    job j = {.all = all, .shelves = shelves, .envs = envs, .from = at + 1, .to = o->b - 1, .var = o->a, .failed = -1};
    nki_parallel(all->threads, o->n, iteration, &j);
    free(envs);
    return finish(&j, wrong);
}

int64_t nki_tape_serial(const nki_tape *t, int64_t *env, int threads, char *const *buffers, nki_callback back, int64_t *wrong) {
    team all = {.t = t, .buffers = buffers, .threads = threads > 64 ? 64 : threads, .back = back};
    nki_fp saved = nki_fp_enter();
    nki_shelf *shelves = nki_shelves_new(t->keeps, t->n_keeps);
    int64_t error = run(&all, shelves, 0, 1, 0, t->n_ops, env, wrong);
    nki_shelves_free(shelves, t->n_keeps);
    nki_fp_leave(saved);
    dismiss(&all);
    return error;
}

int64_t nki_tape_programs(const nki_tape *t, int64_t programs, int64_t *envs, int threads, char *const *buffers,
                          int64_t *wrong) {
    team all = {.t = t, .buffers = buffers, .threads = threads > 64 ? 64 : threads};
    job j = {.all = &all, .envs = envs, .from = 0, .to = t->n_ops, .failed = -1};
    nki_parallel(all.threads, programs, program, &j);
    dismiss(&all);
    return finish(&j, wrong);
}
