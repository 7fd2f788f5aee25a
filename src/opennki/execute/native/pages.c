/* Large buffers that are used again, as fresh pages cost more than what is computed on them (nki.h).
 *
 * A buffer has a header of 64 bytes before it. Capacities are rounded up to eighths of a power of two, so that
 * buffers of about the same size serve each other.
 */
#define _GNU_SOURCE
#include "nki.h"
#include <pthread.h>
#include <stdlib.h>

enum { HEADER = 64, SLOTS = 128 };
static const size_t MOST = (size_t)256 << 20; /* bytes that are kept */

typedef struct {
    size_t capacity;
    char fill[HEADER - sizeof(size_t)];
} header;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static header *kept[SLOTS]; /* oldest first */
static int n_kept;
static size_t bytes_kept;

static void acquire(void) { pthread_mutex_lock(&lock); }
static void release(void) { pthread_mutex_unlock(&lock); }
static void at_first(void) { pthread_atfork(acquire, release, release); }

static size_t rounded(size_t size)
{
    size_t step = 4096;
    while (step * 16 <= size) step *= 2;
    return (size + step - 1) / step * step;
}

static header *take(int i)
{
    header *h = kept[i];
    bytes_kept -= h->capacity;
    n_kept--;
    for (; i < n_kept; i++) kept[i] = kept[i + 1];
    return h;
}

void *nki_alloc(size_t size)
{
    if (size > SIZE_MAX / 2) return NULL;
    pthread_once(&once, at_first);
    size_t capacity = rounded(size);
    header *h = NULL;
    acquire();
    for (int i = n_kept - 1; i >= 0 && !h; i--) /* the newest first: it may still be in a cache */
        if (kept[i]->capacity == capacity) h = take(i);
    release();
    if (!h && !posix_memalign((void **)&h, HEADER, HEADER + capacity)) h->capacity = capacity;
    return h ? h + 1 : NULL;
}

void nki_free(void *buffer)
{
    if (!buffer) return;
    header *h = (header *)buffer - 1, *gone[SLOTS];
    int n_gone = 0;
    acquire();
    if (h->capacity > MOST) {
        gone[n_gone++] = h;
    } else {
        while (n_kept == SLOTS || bytes_kept + h->capacity > MOST) gone[n_gone++] = take(0);
        kept[n_kept++] = h;
        bytes_kept += h->capacity;
    }
    release();
    while (n_gone) free(gone[--n_gone]);
}

size_t nki_kept(void)
{
    acquire();
    size_t bytes = bytes_kept;
    release();
    return bytes;
}

void nki_trim(void)
{
    for (;;) {
        acquire();
        header *h = n_kept ? take(0) : NULL;
        release();
        if (!h) return;
        free(h);
    }
}
