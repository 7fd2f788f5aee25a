/* Instructions of several steps (steps.h). */
#include "steps.h"

#define MOST 32 /* operands of a step */

static size_t product_scratch(const nki_steps *k) { /* what comes after the temporary tiles */
    return ((size_t)k->scratch + 63) & ~(size_t)63;
}

static int64_t one(const nki_steps *k, const nki_step *s, char *const *at, const int64_t *preds, const int64_t *indices,
                   const int64_t *lo, const int64_t *hi, char *scratch, int64_t *wrong) {
    char *p[MOST];
    int64_t pred[8], index[MOST], low[NKI_RANK], high[NKI_RANK];
    for (int i = 0; i < s->n_operands; i++) {
        const nki_operand *o = s->operands + i;
        p[i] = (o->which >= 0 ? at[o->which] : o->which == -1 ? scratch : (char *)k->constants) + o->offset;
    }
    for (int i = 0; i < s->n_preds; i++) pred[i] = preds[s->preds[i]];
    for (int i = 0; i < s->n_indices; i++) index[i] = indices[s->indices[i]];
    const int64_t *from = NULL, *to = NULL;
    if (lo)
        for (int d = 0; d < s->rank; d++) {
            low[d] = s->axis[d] < 0 ? 0 : lo[s->axis[d]];
            high[d] = s->axis[d] < 0 ? s->extent[d] : hi[s->axis[d]];
            if (low[d] >= high[d]) return 0;
            if (low[d] > 0 || high[d] < s->extent[d]) from = low, to = high;
        }
    switch (s->kind) {
    case NKI_K_EW: nki_ew_run(s->what, p, pred, index, from, to); break;
    case NKI_K_COPY: nki_copy_run(s->what, p[0], p[1], from, to); break;
    case NKI_K_MM: nki_mm_run(s->what, p[0], p[1], p[2], scratch + product_scratch(k)); break;
    case NKI_S_ROUTE: nki_route_run(s->what, p[0], p[1], p[2], scratch + product_scratch(k)); break;
    case NKI_K_SCAN: {
        nki_scan n = *(const nki_scan *)s->what;
        if (from) {
            n.rows = to[0] - from[0], n.n = to[1] - from[1];
            p[0] += from[0] * n.x_stride[0] + from[1] * n.x_stride[1];
            p[1] += from[0] * n.y_stride[0] + from[1] * n.y_stride[1];
            p[2] += from[0] * n.d_stride[0] + from[1] * n.d_stride[1];
            if (s->n_operands > 3) p[3] += from[0] * n.i_stride;
        }
        nki_scan_run(&n, p[0], p[1], s->n_operands > 3 ? p[3] : NULL, p[2]);
        break;
    }
    case NKI_K_PFOLD: {
        nki_pfold n = *(const nki_pfold *)s->what;
        if (from) {
            n.p = to[0] - from[0], n.f = to[1] - from[1];
            p[0] += from[0] * n.x_stride[0] + from[1] * n.x_stride[1];
            p[1] += from[1] * n.d_stride;
        }
        nki_pfold_run(&n, p[0], p[1]);
        break;
    }
    case NKI_S_FETCH: return nki_fetch_run(s->what, p, index, from, to, s->error, wrong);
    case NKI_S_TAKE: nki_take_run(s->what, p[0], p[1], p[2], from, to); break;
    case NKI_S_WIDE: nki_wide_run(s->what, p, index, from, to); break;
    case NKI_S_UNIFORM: nki_uniform_run(s->what, s->n_operands > 1 ? p[1] : NULL, (float *)p[0], index); break;
    case NKI_S_SEED: nki_seed_run(s->what, p[1], p[0], index); break;
    case NKI_S_LARGEST: nki_largest_run(s->what, p[0], p[1]); break;
    case NKI_S_MATCH: nki_match_run(s->what, p[0], p[1], s->n_operands > 4 ? p[4] : NULL, p[2], p[3]); break;
    case NKI_S_SEGMENTS: nki_segments_run(s->what, p[0], (int32_t *)p[1], (int32_t *)p[2]); break;
    }
    return 0;
}

int64_t nki_steps_run(const nki_steps *k, char *const *at, const int64_t *preds, const int64_t *indices, const int64_t *lo,
                      const int64_t *hi, char *scratch, int64_t *wrong) {
    for (int i = 0; i < k->n_steps; i++) {
        const nki_step *s = k->steps + i;
        if (!s->again) {
            int64_t error = one(k, s, at, preds, indices, lo, hi, scratch, wrong);
            if (error) return error;
            continue;
        }
        int64_t low[NKI_RANK], high[NKI_RANK];
        for (int d = 1; d < k->rank; d++) low[d] = lo ? lo[d] : 0, high[d] = hi ? hi[d] : INT64_MAX;
        for (int64_t row = lo ? lo[0] : 0, end = hi ? hi[0] : k->rows; row < end; row++) {
            low[0] = row, high[0] = row + 1;
            for (int j = 0; j < s->again; j++) {
                int64_t error = one(k, s + j, at, preds, indices, low, high, scratch, wrong);
                if (error) return error;
            }
        }
        i += s->again - 1;
    }
    return 0;
}
