/* Packed operands by their address: a hash table with open addressing, without locks. See shelf.h. */
#include "shelf.h"

#include <sched.h>
#include <stdlib.h>

enum { EMPTY, BUSY, READY, WITHOUT }; /* WITHOUT: no place was left */

typedef struct {
    int64_t state, number; /* number: place in the memory */
    const char *at;
} entry;

struct nki_shelf {
    const nki_keep *keep;
    entry *entries;
    int64_t mask, taken; /* entries less 1, a power of two; places that are taken */
    char *memory;
};

nki_shelf *nki_shelves_new(const nki_keep *keeps, int64_t n) {
    nki_shelf *all = n ? calloc((size_t)n, sizeof *all) : NULL;
    for (int64_t i = 0; all && i < n; i++) {
        int64_t size = 4;
        while (size < 2 * keeps[i].places) size *= 2;
        all[i].keep = keeps + i;
        all[i].mask = size - 1;
        all[i].entries = calloc((size_t)size, sizeof(entry));
        all[i].memory = nki_alloc((size_t)(keeps[i].places * keeps[i].bytes));
    }
    return all;
}

void nki_shelves_free(nki_shelf *shelves, int64_t n) {
    for (int64_t i = 0; shelves && i < n; i++) {
        free(shelves[i].entries);
        if (shelves[i].memory) nki_free(shelves[i].memory);
    }
    free(shelves);
}

static const void *packed(const nki_shelf *s, const entry *e) { return s->memory + e->number * s->keep->bytes; }

/* Pack an operand for an entry that is ours. */
static const void *fill(nki_shelf *s, entry *e, const nki_mm *k, int moving, const char *at) {
    e->number = __atomic_fetch_add(&s->taken, 1, __ATOMIC_RELAXED);
    /* the tile unit may have been turned on or off since the tape was lowered, which changes how much that is */
    const int room = e->number < s->keep->places && nki_mm_kept(k, moving) <= (size_t)s->keep->bytes;
    e->at = at;
    if (room) nki_mm_keep(k, moving, at, s->memory + e->number * s->keep->bytes);
    __atomic_store_n(&e->state, room ? READY : WITHOUT, __ATOMIC_RELEASE);
    return room ? packed(s, e) : NULL;
}

const void *nki_shelf_get(nki_shelf *shelves, int number, const nki_mm *k, int moving, const char *at) {
    nki_shelf *s = shelves ? shelves + number : NULL;
    if (!s || !s->entries || !s->memory) return NULL;
    uint64_t place = (uint64_t)(uintptr_t)at * 0x9E3779B97F4A7C15u >> 20;
    for (int64_t tries = 0; tries <= s->mask; tries++, place++) {
        entry *e = s->entries + (place & (uint64_t)s->mask);
        int64_t state = __atomic_load_n(&e->state, __ATOMIC_ACQUIRE);
        if (state == EMPTY && __atomic_compare_exchange_n(&e->state, &state, BUSY, 0, __ATOMIC_ACQUIRE, __ATOMIC_ACQUIRE))
            return fill(s, e, k, moving, at);
        while (state == BUSY) { /* who packs it waits for nobody, and is done sooner than a product with what is not packed */
            sched_yield();
            state = __atomic_load_n(&e->state, __ATOMIC_ACQUIRE);
        }
        if (state == WITHOUT) return NULL;
        if (e->at == at) return packed(s, e);
    }
    return NULL;
}
