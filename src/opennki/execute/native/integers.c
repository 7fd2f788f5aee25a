/* Elementwise programs over 64-bit integers (steps.h). */
#include <stdlib.h>
#include <string.h>
#include "convert.h"
#include "steps.h"

#define LANES 128

int64_t nki_whole(int dtype, const char *p) {
    switch (dtype) {
    case NKI_I32: return *(const nki_i32a *)p;
    case NKI_U32: return *(const nki_u32a *)p;
    case NKI_I16: return *(const nki_i16a *)p;
    case NKI_U16: return *(const nki_u16a *)p;
    case NKI_I8: return *(const nki_i8a *)p;
    case NKI_U8:
    case NKI_BOOL: return *(const uint8_t *)p;
    case NKI_I64: {
        int64_t v;
        memcpy(&v, p, 8);
        return v;
    }
    default: {
        float v;
        nki_types[dtype].load(&v, p, 0, 1);
        return v >= -0x1p63f && v < 0x1p63f ? (int64_t)v : 0;
    }
    }
}

static void load(int dtype, int64_t *d, const char *s, int64_t stride, int n) {
#define LOAD(T)                                                                                                        \
    for (int i = 0; i < n; i++) d[i] = *(const T *)(s + i * stride);                                                   \
    break;
    switch (dtype) {
    case NKI_I32: LOAD(nki_i32a)
    case NKI_U32: LOAD(nki_u32a)
    case NKI_I16: LOAD(nki_i16a)
    case NKI_U16: LOAD(nki_u16a)
    case NKI_I8: LOAD(nki_i8a)
    case NKI_U8:
    case NKI_BOOL: LOAD(uint8_t)
    default:
        for (int i = 0; i < n; i++) d[i] = nki_whole(dtype, s + i * stride);
    }
}

static inline int64_t clamp(int64_t v, int64_t low, int64_t high) { return v < low ? low : v > high ? high : v; }

static void store(int dtype, int wraps, char *d, int64_t stride, const int64_t *a, const int64_t *mask, int n) {
#define STORE(T, low, high)                                                                                            \
    for (int i = 0; i < n; i++)                                                                                        \
        if (!mask || mask[i]) *(T *)(d + i * stride) = (T)(wraps ? a[i] : clamp(a[i], low, high));                     \
    break;
    switch (dtype) {
    case NKI_I32: STORE(nki_i32a, INT32_MIN, INT32_MAX)
    case NKI_U32: STORE(nki_u32a, 0, UINT32_MAX)
    case NKI_I16: STORE(nki_i16a, INT16_MIN, INT16_MAX)
    case NKI_U16: STORE(nki_u16a, 0, UINT16_MAX)
    case NKI_I8: STORE(nki_i8a, INT8_MIN, INT8_MAX)
    case NKI_U8: STORE(uint8_t, 0, UINT8_MAX)
    case NKI_BOOL:
        for (int i = 0; i < n; i++)
            if (!mask || mask[i]) d[i * stride] = a[i] != 0;
        break;
    case NKI_I64:
        for (int i = 0; i < n; i++)
            if (!mask || mask[i]) memcpy(d + i * stride, a + i, 8);
        break;
    default:
        for (int i = 0; i < n; i++)
            if (!mask || mask[i]) {
                float v = (float)a[i];
                nki_types[dtype].store(d + i * stride, 0, &v, 1);
            }
    }
}

#define EACH(e)                                                                                                        \
    for (int i = 0; i < n; i++) d[i] = (int64_t)(e);                                                                   \
    break;

static void row(const nki_wide *k, char *const *at, const int64_t *index, int64_t (*r)[LANES], int n) {
    const int last = k->rank - 1;
    for (const nki_wop *o = k->ops, *end = o + k->n_ops; o < end; o++) {
        int64_t *d = o->code == NKI_W_STORE ? NULL : r[o->d];
        const int64_t *a = o->a >= 0 ? r[o->a] : NULL, *b = o->b >= 0 ? r[o->b] : NULL;
        switch (o->code) {
        case NKI_W_LOAD: load(k->tiles[o->a].dtype, d, at[o->a], k->tiles[o->a].stride[last], n); break;
        case NKI_W_STORE:
            store(k->tiles[o->d].dtype, o->b == 1, at[o->d], k->tiles[o->d].stride[last], a, o->c >= 0 ? r[o->c] : NULL, n);
            break;
        case NKI_W_CONST: EACH(o->imm)
        case NKI_W_INDEX: EACH(index[o->a] + i * k->indices[o->a].stride[last])
        case NKI_W_SELECT: EACH(r[o->c][i] ? a[i] : b[i])
        case NKI_W_ADD: EACH((uint64_t)a[i] + (uint64_t)b[i])
        case NKI_W_SUBTRACT: EACH((uint64_t)a[i] - (uint64_t)b[i])
        case NKI_W_MULTIPLY: EACH((uint64_t)a[i] * (uint64_t)b[i])
        case NKI_W_MAXIMUM: EACH(a[i] > b[i] ? a[i] : b[i])
        case NKI_W_MINIMUM: EACH(a[i] < b[i] ? a[i] : b[i])
        case NKI_W_EQUAL: EACH(a[i] == b[i])
        case NKI_W_NOT_EQUAL: EACH(a[i] != b[i])
        case NKI_W_LESS: EACH(a[i] < b[i])
        case NKI_W_LESS_EQUAL: EACH(a[i] <= b[i])
        case NKI_W_GREATER: EACH(a[i] > b[i])
        case NKI_W_GREATER_EQUAL: EACH(a[i] >= b[i])
        }
    }
}

void nki_wide_run(const nki_wide *k, char *const *first, const int64_t *index, const int64_t *lo, const int64_t *hi) {
    char *at[32];
    int64_t value[8], i[NKI_RANK], from[NKI_RANK], to[NKI_RANK];
    const int last = k->rank - 1;
    int n_indices = 0;
    for (const nki_wop *o = k->ops, *end = o + k->n_ops; o < end; o++)
        if (o->code == NKI_W_INDEX && o->a >= n_indices) n_indices = o->a + 1;
    for (int d = 0; d < k->rank; d++) {
        i[d] = from[d] = lo ? lo[d] : 0, to[d] = hi ? hi[d] : k->shape[d];
        if (from[d] >= to[d]) return;
    }
    int64_t(*registers)[LANES] = malloc((size_t)k->n_registers * sizeof *registers);
    if (!registers) abort();
    for (;;) {
        const int n = (int)(to[last] - i[last] < LANES ? to[last] - i[last] : LANES);
        for (int t = 0; t < k->n_tiles; t++) {
            at[t] = first[t];
            for (int d = 0; d < k->rank; d++) at[t] += i[d] * k->tiles[t].stride[d];
        }
        for (int t = 0; t < n_indices; t++) {
            value[t] = index[t];
            for (int d = 0; d < k->rank; d++) value[t] += i[d] * k->indices[t].stride[d];
        }
        row(k, at, value, registers, n);
        i[last] += n;
        int d = last;
        while (d >= 0 && i[d] >= to[d]) {
            i[d] = from[d];
            if (--d >= 0) i[d]++;
        }
        if (d < 0) break;
    }
    free(registers);
}
