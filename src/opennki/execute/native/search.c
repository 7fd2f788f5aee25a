/* Searches in rows: the largest values, where values occur, runs of equal elements. See isa/vector_topk.py. */
#include <stdlib.h>
#include <string.h>
#include "convert.h"
#include "steps.h"

static inline float at(const char *p, const int64_t *stride, int64_t row, int64_t i) {
    return *(const nki_f32a *)(p + row * stride[0] + i * stride[1]);
}

/* Integers in the order of the floats: -0 below +0, every NaN above infinity. */
static inline int32_t key(float x) {
    int32_t bits = (int32_t)(x != x ? 0x7fc00000u : nki_bits(x));
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

void nki_largest_run(const nki_search *k, const char *x, char *dst) {
    int32_t *best = malloc((size_t)k->count * sizeof *best);
    if (!best) abort();
    for (int64_t row = 0; row < k->rows; row++) {
        int64_t have = 0;
        for (int64_t i = 0; i < k->n; i++) {
            const int32_t v = key(at(x, k->x_stride, row, i));
            if (have == k->count && v <= best[have - 1]) continue;
            int64_t j = have < k->count ? have++ : have - 1;
            for (; j > 0 && best[j - 1] < v; j--) best[j] = best[j - 1];
            best[j] = v;
        }
        for (int64_t j = 0; j < have; j++) {
            const int32_t v = best[j];
            *(nki_f32a *)(dst + row * k->d_stride[0] + j * k->d_stride[1]) = nki_float((uint32_t)(v ^ ((v >> 31) & 0x7fffffff)));
        }
    }
    free(best);
}

void nki_match_run(const nki_search *k, const char *x, const char *values, const char *mask, char *dst, char *taken) {
    for (int64_t row = 0; row < k->rows; row++) {
        char *t = taken + row * k->t_stride[0];
        for (int64_t i = 0; i < k->n; i++) *(nki_f32a *)(t + i * k->t_stride[1]) = 0.0f;
        for (int64_t turn = 0; turn < k->count; turn++) {
            const int64_t j = k->backwards ? k->count - 1 - turn : turn;
            const float wanted = at(values, k->v_stride, row, j);
            float found = 0x1p32f; /* 2^32 - 1, as a float32 */
            for (int64_t i = 0; i < k->n; i++) {
                nki_f32a *used = (nki_f32a *)(t + i * k->t_stride[1]);
                if (at(x, k->x_stride, row, i) != wanted || *used != 0.0f) continue;
                if (mask && at(mask, k->m_stride, row, i) == 0.0f) continue;
                *used = 1.0f;
                found = (float)i;
                break;
            }
            *(nki_f32a *)(dst + row * k->d_stride[0] + j * k->d_stride[1]) = found;
        }
    }
}

void nki_segments_run(const nki_segments *k, const char *x, int32_t *first, int32_t *last) {
#define SAME(i, j) (k->raw ? INTEGER(i) == INTEGER(j) : NUMBER(i) == NUMBER(j))
#define INTEGER(i) (*(const nki_i32a *)(x + (i) * k->x_stride))
#define NUMBER(i) (*(const nki_f32a *)(x + (i) * k->x_stride))
    for (int64_t i = 0; i < k->n; i++) first[i] = (int32_t)(i && SAME(i, i - 1) ? first[i - 1] : i);
    for (int64_t i = k->n - 1; i >= 0; i--) last[i] = (int32_t)(i < k->n - 1 && SAME(i, i + 1) ? last[i + 1] : i + 1);
    for (int64_t i = 0; i < k->n; i++)
        if (k->raw ? INTEGER(i) == 0 : NUMBER(i) == 0.0f) first[i] = (int32_t)k->n, last[i] = -1;
}

void nki_route_run(const nki_mm *k, const char *stationary, const char *moving, char *dst, void *scratch) {
    const nki_type *ms = &nki_types[k->m_dtype], *ss = &nki_types[k->s_dtype];
    int64_t *rows = malloc((size_t)k->N * sizeof *rows);
    if (!rows) abort();
    int single = 1;
    for (int64_t n = 0; n < k->N && single; n++) {
        rows[n] = -1;
        for (int64_t i = 0; i < k->K; i++) {
            float v;
            ms->load(&v, moving + i * k->m_stride[0] + n * k->m_stride[1], 0, 1);
            if (v == 0.0f) continue;
            if (v != 1.0f || rows[n] >= 0) {
                single = 0;
                break;
            }
            rows[n] = i;
        }
        single &= rows[n] >= 0;
    }
    if (!single)
        nki_mm_run(k, stationary, moving, dst, scratch);
    else
        for (int64_t m = 0; m < k->M; m++)
            for (int64_t n = 0; n < k->N; n++) {
                float v;
                ss->load(&v, stationary + rows[n] * k->s_stride[0] + m * k->s_stride[1], 0, 1);
                *(nki_f32a *)(dst + m * k->d_stride[0] + n * k->d_stride[1]) = v;
            }
    free(rows);
}
