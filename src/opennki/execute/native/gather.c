/* Elements by indices that are read from memory: tiles of tensors (fetch), and elements of rows (take). */
#include <string.h>
#include "convert.h"
#include "steps.h"

static inline void move(int width, char *d, const char *s) {
    switch (width) {
    case 1: *d = *s; break;
    case 2: memcpy(d, s, 2); break;
    case 4: memcpy(d, s, 4); break;
    default: memcpy(d, s, (size_t)width); break;
    }
}

/* ---- tiles --------------------------------------------------------------------------------------------------- */

/* The index of an axis at a point of the tile. */
static inline int64_t index_at(const nki_fetch *k, const nki_axis *a, int64_t base, const char *tile, const int64_t *i) {
    int64_t v = base + nki_whole(a->dtype, tile + i[0] * a->step);
    for (int d = 0; d < k->rank; d++) v += a->stride[d] * i[d];
    return v;
}

static inline int advance(const nki_fetch *k, int from, int64_t *i, const int64_t *lo, const int64_t *hi) {
    for (int d = k->rank - 1; d >= from; d--) {
        if (++i[d] < hi[d]) return 1;
        i[d] = lo[d];
    }
    return 0;
}

static int64_t report(const nki_fetch *k, char *const *at, const int64_t *index, const int64_t *lo, const int64_t *hi,
                      int64_t error, int64_t *wrong) {
    int64_t i[NKI_RANK];
    int axis = k->n_axes, found = 0;
    memcpy(i, lo, sizeof i);
    do {
        int64_t offset = index[0];
        int outside = 0;
        for (int d = 0; d < k->rank; d++) offset += k->t_stride[d] * i[d];
        for (int a = 0; a < k->n_axes; a++) {
            const nki_axis *x = k->axes + a;
            int64_t v = index_at(k, x, index[1 + a], at[2 + a], i);
            offset += nki_whole(x->dtype, at[2 + a] + i[0] * x->step) * x->unit;
            if (v >= 0 && v < x->size) continue;
            outside = 1;
            if (a < axis) axis = a, wrong[0] = x->axis, wrong[1] = v;
        }
        if (outside && !found) found = 1, wrong[2] = offset / k->width;
    } while (advance(k, 0, i, lo, hi));
    return error;
}

int64_t nki_fetch_run(const nki_fetch *k, char *const *at, const int64_t *index, const int64_t *low, const int64_t *high,
                      int64_t error, int64_t *wrong) {
    int64_t i[NKI_RANK] = {0}, lo[NKI_RANK] = {0}, hi[NKI_RANK] = {1};
    for (int d = 0; d < k->rank; d++) {
        lo[d] = low ? low[d] : 0, hi[d] = high ? high[d] : k->shape[d];
        if (lo[d] >= hi[d]) return 0;
    }
    char *tensor = at[0], *tile = at[1], *truth = k->skip || k->masked ? at[2 + k->n_axes] : NULL;
    nki_copy rest = {.rank = k->rank - 1, .width = k->width};
    for (int d = 1; d < k->rank; d++) {
        rest.shape[d - 1] = hi[d] - lo[d];
        rest.d_stride[d - 1] = (k->scatter ? k->t_stride : k->o_stride)[d];
        rest.s_stride[d - 1] = (k->scatter ? k->o_stride : k->t_stride)[d];
    }
    memcpy(i, lo, sizeof i);
    for (int64_t row = lo[0]; row < hi[0]; row++) {
        int64_t base = index[0] + row * k->t_stride[0], other = row * k->o_stride[0];
        int inside = 1;
        for (int a = 0; a < k->n_axes; a++) {
            const nki_axis *x = k->axes + a;
            int64_t v = nki_whole(x->dtype, at[2 + a] + row * x->step), first = index[1 + a] + v + row * x->stride[0], last = first;
            base += v * x->unit;
            for (int d = 1; d < k->rank; d++) {
                first += x->stride[d] * (x->stride[d] < 0 ? hi[d] - 1 : lo[d]);
                last += x->stride[d] * (x->stride[d] < 0 ? lo[d] : hi[d] - 1);
            }
            inside &= first >= 0 && last < x->size;
        }
        if (!inside && !k->skip) return report(k, at, index, lo, hi, error, wrong);
        if (inside && !truth) {
            for (int d = 1; d < k->rank; d++) base += lo[d] * k->t_stride[d], other += lo[d] * k->o_stride[d];
            char *d = k->scatter ? tensor + base : tile + other;
            const char *s = k->scatter ? tile + other : tensor + base;
            if (k->rank < 2)
                move(k->width, d, s);
            else
                nki_copy_run(&rest, d, s, NULL, NULL);
            continue;
        }
        memcpy(i, lo, sizeof i);
        i[0] = row;
        do {
            int64_t from = base, to = other, m = row * k->m_stride[0];
            int good = 1;
            for (int d = 1; d < k->rank; d++)
                from += i[d] * k->t_stride[d], to += i[d] * k->o_stride[d], m += i[d] * k->m_stride[d];
            for (int a = 0; a < k->n_axes; a++) {
                int64_t v = index_at(k, k->axes + a, index[1 + a], at[2 + a], i);
                good &= v >= 0 && v < k->axes[a].size;
            }
            if (k->scatter) {
                if (good && (!k->masked || truth[m])) move(k->width, tensor + from, tile + to);
            } else {
                move(k->width, tile + to, tensor + (good ? from : 0));
                if (truth) truth[m] = (char)good;
            }
        } while (advance(k, 1, i, lo, hi));
    }
    return 0;
}

/* ---- elements of rows ------------------------------------------------------------------------------------------ */
#define TAKE(T)                                                                                                        \
    for (int64_t j = j0; j < j1; j++) {                                                                                \
        int64_t p = nki_whole(k->p_dtype, at + j * k->p_stride[1]);                                                     \
        T v = (T)k->poison;                                                                                            \
        if (p >= 0 && p < k->size) memcpy(&v, row + p * k->x_stride[1], sizeof v);                                     \
        memcpy(d + j * k->d_stride[1], &v, sizeof v);                                                                  \
    }

void nki_take_run(const nki_take *k, const char *x, const char *positions, char *dst, const int64_t *lo, const int64_t *hi) {
    const int64_t i0 = lo ? lo[0] : 0, i1 = hi ? hi[0] : k->rows, j0 = lo ? lo[1] : 0, j1 = hi ? hi[1] : k->n;
    for (int64_t i = i0; i < i1; i++) {
        const char *row = x + i * k->x_stride[0], *at = positions + i * k->p_stride[0];
        char *d = dst + i * k->d_stride[0];
        switch (k->width) {
        case 1: TAKE(uint8_t) break;
        case 2: TAKE(uint16_t) break;
        case 4: TAKE(uint32_t) break;
        default: TAKE(uint64_t) break;
        }
    }
}
