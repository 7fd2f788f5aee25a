/* Elementwise calls that run again and again, as those of loops do: what was prepared for one is kept while addresses are to each other what
 * they were. That decides which tiles are read and written where they are; and predicates that are the same everywhere decide what is
 * left out. Of small tiles preparing takes as long as computing.
 */
#include "run.h"
#include "memo.h"

#include <stdlib.h>
#include <string.h>

enum { ENTRIES = 256, MOST_TILES = 16, MOST_PREDS = 8, MOST_STORES = 4 };

typedef struct {
    run r;
    place_in w;
    char *at[MOST_TILES];
    int64_t low[MOST_TILES], high[MOST_TILES];
    int32_t stored[MOST_STORES];
    int n_stored;
    int8_t uniform[MOST_PREDS], truth[MOST_PREDS];
} ready;

typedef struct {
    int64_t number; /* of a call, and 1 */
    ready *made;
    int never; /* it is not kept */
} entry;

struct nki_memo {
    entry entries[ENTRIES];
    float *vectors;
};

nki_memo *nki_memo_new(void) { return calloc(1, sizeof(nki_memo)); }

void nki_memo_free(nki_memo *memo) {
    if (!memo) return;
    for (int i = 0; i < ENTRIES; i++) free(memo->entries[i].made);
    free(memo->vectors);
    free(memo);
}

static int apart(const ready *m, char *const *at, int x, int y) {
    return at[x] + m->high[x] <= at[y] + m->low[y] || at[y] + m->high[y] <= at[x] + m->low[x];
}

/* Whether what was prepared holds for other addresses and predicates. */
static int holds(const ready *m, char *const *at, const int64_t *pred) {
    const nki_ew *k = m->r.k;
    for (int i = 0; i < k->n_preds; i++)
        if (m->uniform[i] && m->truth[i] != (pred[i] >= 0)) return 0;
    for (int i = 0; i < m->n_stored; i++) {
        const int x = m->stored[i];
        for (int y = 0; y < k->n_tiles; y++)
            if (at[y] - at[x] != m->at[y] - m->at[x] && !(apart(m, m->at, x, y) && apart(m, at, x, y))) return 0;
    }
    return 1;
}

/* Tiles that are stored to; -1 where it is more than are looked at. */
static int stores_of(const nki_ew *k, int32_t *stored) {
    int n = 0;
    for (int i = 0; i < k->n_uops; i++) {
        if (k->uops[i].code != NKI_STORE && k->uops[i].code != NKI_STORE_RAW) continue;
        if (n == MOST_STORES) return -1;
        stored[n++] = k->uops[i].d;
    }
    return n;
}

static int make(nki_memo *memo, entry *e, const nki_ew *k, char *const *at, const int64_t *pred, const int64_t *index) {
    run r;
    int32_t stored[MOST_STORES];
    const int n = stores_of(k, stored);
    if (n < 0 || k->n_tiles > MOST_TILES || k->n_preds > MOST_PREDS || !nki_ew_begin(&r, k, NULL, NULL)) return 0;
    if (!memo->vectors && !(memo->vectors = aligned_alloc(64, NKI_VECTORS))) return 0;
    const size_t head = (sizeof(ready) + 63) & ~(size_t)63;
    if (!e->made && !(e->made = aligned_alloc(64, (head + nki_ew_room(&r) + 127) & ~(size_t)63))) return 0;
    ready *m = e->made;
    m->r = r;
    if (nki_ew_prepare(&m->r, &m->w, (char *)m + head, at, pred, index, NULL) > NKI_VECTORS) return 0;
    nki_ew_vectors(&m->r, memo->vectors);
    m->n_stored = n;
    memcpy(m->stored, stored, sizeof stored);
    for (int i = 0; i < k->n_tiles; i++) m->at[i] = at[i], nki_extent(&m->r, k->tiles + i, m->low + i, m->high + i);
    for (int i = 0; i < k->n_preds; i++) {
        m->uniform[i] = (int8_t)nki_same_everywhere(&m->r, k->preds[i].stride);
        m->truth[i] = pred[i] >= 0;
    }
    return 1;
}

void nki_memo_run(nki_memo *memo, int64_t number, const nki_ew *k, char *const *at, const int64_t *pred, const int64_t *index) {
    entry *e = memo ? memo->entries + number % ENTRIES : NULL;
    if (!e || e->number != number + 1 || e->never) { /* what runs once is not worth it */
        if (e && e->number != number + 1) {
            free(e->made);
            *e = (entry){.number = number + 1};
        }
        nki_ew_run(k, at, pred, index, NULL, NULL);
        return;
    }
    if ((!e->made || !holds(e->made, at, pred)) && !make(memo, e, k, at, pred, index)) {
        e->never = 1;
        nki_ew_run(k, at, pred, index, NULL, NULL);
        return;
    }
    nki_poison(memo->vectors, NKI_VECTORS);
    nki_ew_at(&e->made->r, &e->made->w, at, pred, index);
    nki_ew_go(&e->made->r, &e->made->w);
}
