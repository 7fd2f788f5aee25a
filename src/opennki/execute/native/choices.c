/* Choices that are made before anything runs: a predicate that is the same everywhere is that of a branch. */
#include <string.h>
#include "run.h"

int nki_same_everywhere(const run *r, const int64_t *stride) {
    for (int i = 0; i < r->rank; i++)
        if (stride[i] && r->shape[i] > 1) return 0;
    return 1;
}
void nki_decide(const run *r, const int64_t *pred, int32_t *known, int32_t *chosen, int8_t *without) {
    const nki_ew *k = r->k;
    int any = 0;
    memset(without, 0, (size_t)k->n_uops);
    memset(chosen, 0xff, (size_t)k->n_uops * sizeof *chosen);
    for (int i = 0; i < k->n_preds; i++) any |= nki_same_everywhere(r, k->preds[i].stride);
    if (!any) return;
    memset(known, 0xff, (size_t)k->n_registers * sizeof *known);
    for (int i = 0; i < k->n_uops; i++) {
        const nki_uop *u = &k->uops[i];
        if (u->code == NKI_STORE || u->code == NKI_STORE_RAW || u->code == NKI_KEEP) continue;
        if (u->code == NKI_SELECT && u->a >= 0 && u->b >= 0 && u->c >= 0 && known[u->c] >= 0) chosen[i] = known[u->c] ? u->a : u->b;
        known[u->d] = u->code == NKI_PRED && nki_same_everywhere(r, k->preds[u->a].stride) ? pred[u->a] >= 0 : -1;
    }
    memset(known, 0, (size_t)k->n_registers * sizeof *known);
    for (int i = k->n_uops - 1; i >= 0; i--) {
        const nki_uop *u = &k->uops[i];
        const int stores = u->code == NKI_STORE || u->code == NKI_STORE_RAW || u->code == NKI_KEEP;
        if (!stores) {
            without[i] = !known[u->d];
            known[u->d] = 0;
            if (without[i]) continue;
        }
        if (chosen[i] >= 0) {
            known[chosen[i]] = 1;
            continue;
        }
        const int leaf = u->code == NKI_LOAD || u->code == NKI_LOAD_RAW || u->code == NKI_PRED || u->code == NKI_INDEX || u->code == NKI_KEPT ||
                         u->code == NKI_TREE || u->code == NKI_CONST;
        if (!leaf && u->a >= 0) known[u->a] = 1;
        if ((u->code == NKI_FUNC || u->code == NKI_SELECT || u->code == NKI_EXACT) && u->b >= 0) known[u->b] = 1;
        if ((u->code == NKI_SELECT || stores) && u->c >= 0) known[u->c] = 1;
    }
}
