/* One pool of threads for the process (nki.h).
 *
 * A job is posted under a lock; the caller works on it too, as worker 0, and closes it when no task is left, so that it
 * never waits for a thread that has not woken up yet. Who comes while a job runs, works alone.
 */
#define _GNU_SOURCE
#include "nki.h"
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>
#if defined(__x86_64__) || defined(__i386__)
#include <xmmintrin.h>
#define RELAX() _mm_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ volatile("yield")
#else
#define RELAX() ((void)0)
#endif

enum { MOST = 256, SPIN_NS = 30000, STACK = 1 << 20 };

static struct {
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    void (*fn)(void *, int64_t, int);
    void *arg;
    int64_t tasks;
    int threads;         /* that exist, without the caller */
    int joined, active;  /* workers of the job, and those that still run */
    atomic_int wanted;   /* workers that may still join */
    atomic_int running;  /* as `active`, to be read without the lock */
    atomic_llong next;   /* task */
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .work = PTHREAD_COND_INITIALIZER, .done = PTHREAD_COND_INITIALIZER};

static atomic_int busy;         /* a job is under way */
static _Thread_local int inside; /* this thread works on one */
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* Floating point as C starts: round to nearest, subnormals kept. Returns what it was before. */
static uint64_t float_default(void)
{
#if defined(__x86_64__)
    uint64_t was = _mm_getcsr();
    _mm_setcsr(0x1f80);
    return was;
#elif defined(__aarch64__)
    uint64_t was;
    __asm__ volatile("mrs %0, fpcr" : "=r"(was));
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0));
    return was;
#else
    return 0;
#endif
}

static void float_restore(uint64_t was)
{
#if defined(__x86_64__)
    _mm_setcsr((unsigned)was);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(was));
#else
    (void)was;
#endif
}

static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Wait a little for the value to become zero, or not zero; what follows checks under the lock. */
static void spin(atomic_int *value, int zero)
{
    for (int64_t end = now() + SPIN_NS; (atomic_load_explicit(value, memory_order_relaxed) == 0) != zero && now() < end;)
        for (int i = 0; i < 16; i++) RELAX();
}

static void take_tasks(void (*fn)(void *, int64_t, int), void *arg, int64_t tasks, int worker)
{
    for (int64_t t; (t = atomic_fetch_add(&pool.next, 1)) < tasks;) fn(arg, t, worker);
}

static void *work(void *unused)
{
    (void)unused;
    inside = 1;
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (!pool.wanted) pthread_cond_wait(&pool.work, &pool.lock);
        pool.wanted--;
        pool.active++;
        pool.running++;
        int worker = ++pool.joined;
        void (*fn)(void *, int64_t, int) = pool.fn;
        void *arg = pool.arg;
        int64_t tasks = pool.tasks;
        pthread_mutex_unlock(&pool.lock);
        float_default(); /* threads inherit the mode of their creator, and a task may change it */
        take_tasks(fn, arg, tasks, worker);
        pthread_mutex_lock(&pool.lock);
        pool.running--;
        if (!--pool.active) pthread_cond_signal(&pool.done);
        pthread_mutex_unlock(&pool.lock);
        spin(&pool.wanted, 0);
        pthread_mutex_lock(&pool.lock);
    }
    return NULL;
}

/* A forked child has none of the threads; locks may be held by threads that are gone. */
static void in_child(void)
{
    pool.lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    pool.work = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    pool.done = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    pool.threads = pool.active = pool.joined = 0;
    atomic_store(&pool.wanted, 0);
    atomic_store(&pool.running, 0);
    atomic_store(&busy, 0);
}

static void at_first(void) { pthread_atfork(NULL, NULL, in_child); }

/* Have n threads, if the system gives them; called with the lock held. */
static void grow(int n)
{
    sigset_t all, was;
    pthread_attr_t attr;
    if (pool.threads >= n || pthread_attr_init(&attr)) return;
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attr, STACK);
    sigfillset(&all); /* signals belong to the threads of the program */
    pthread_sigmask(SIG_SETMASK, &all, &was);
    pthread_t thread;
    while (pool.threads < n && !pthread_create(&thread, &attr, work, NULL)) pool.threads++;
    pthread_sigmask(SIG_SETMASK, &was, NULL);
    pthread_attr_destroy(&attr);
}

void nki_parallel(int threads, int64_t tasks, void (*fn)(void *arg, int64_t task, int worker), void *arg)
{
    uint64_t was = float_default();
    if (threads > MOST) threads = MOST;
    if (threads > tasks) threads = (int)tasks;
    if (threads <= 1 || inside || atomic_exchange(&busy, 1)) {
        for (int64_t t = 0; t < tasks; t++) fn(arg, t, 0);
        float_restore(was);
        return;
    }
    pthread_once(&once, at_first);
    inside = 1;
    pthread_mutex_lock(&pool.lock);
    grow(threads - 1);
    pool.fn = fn;
    pool.arg = arg;
    pool.tasks = tasks;
    pool.joined = 0;
    atomic_store(&pool.next, 0);
    atomic_store(&pool.wanted, threads - 1);
    pthread_cond_broadcast(&pool.work);
    pthread_mutex_unlock(&pool.lock);

    take_tasks(fn, arg, tasks, 0);

    pthread_mutex_lock(&pool.lock);
    atomic_store(&pool.wanted, 0);
    pthread_mutex_unlock(&pool.lock);
    spin(&pool.running, 1);
    pthread_mutex_lock(&pool.lock);
    while (pool.active) pthread_cond_wait(&pool.done, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    inside = 0;
    atomic_store(&busy, 0);
    float_restore(was);
}
