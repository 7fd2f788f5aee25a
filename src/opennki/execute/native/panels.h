/* Operands of matrix products as panels of float32: K rows of `width` columns each, one panel after the other, zeros behind the last column. */
#ifndef NKI_PANELS_H
#define NKI_PANELS_H
#include "nki.h"

/* Columns of a panel of what is broadcast, and of one that is read as vectors, which packing has forms of its own for; and the most columns
 * that are packed in one call. */
#if defined(__AVX512F__)
enum { NKI_PANEL = 12, NKI_PANEL_OF_VECTORS = 32 };
#elif defined(__AVX2__) && defined(__FMA__)
enum { NKI_PANEL = 6, NKI_PANEL_OF_VECTORS = 16 };
#elif defined(__aarch64__)
enum { NKI_PANEL = 12, NKI_PANEL_OF_VECTORS = 8 };
#else
enum { NKI_PANEL = 4, NKI_PANEL_OF_VECTORS = 8 };
#endif
enum { NKI_PANELS_AT_ONCE = 480 };

/* Pack `cols` columns of K rows of `src`: by the number of the dtype (NULL: no float), with bytes from row to row and from column to
 * column. */
typedef void (*nki_panels_fn)(const char *src, const int64_t *stride, int K, int cols, int width, float *dst);
extern const nki_panels_fn nki_panels[NKI_DTYPES];

/* Whether n floats of panels are finite; and how many of K rows of a panel of what is broadcast are left when those at the end that are all
 * zeros are not counted, in whole steps of NKI_PAIRS. Summed in pairs, zeros times finite numbers add 0 to a total that begins with 0, and so
 * is never -0. */
int nki_panels_finite(const float *x, size_t n);
int nki_panel_depth(const char *panel, int K);
#endif
