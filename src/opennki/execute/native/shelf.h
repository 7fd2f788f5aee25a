/* Packed operands of products that are kept for the length of a run (nki_keep in nki.h). */
#ifndef NKI_SHELF_H
#define NKI_SHELF_H
#include "nki.h"

typedef struct nki_shelf nki_shelf;

/* A shelf for each of n keeps; NULL where n is 0. */
nki_shelf *nki_shelves_new(const nki_keep *keeps, int64_t n);
void nki_shelves_free(nki_shelf *shelves, int64_t n);

/* The packed operand that lies at `at` from a shelf, packed now if this is the first time. NULL where the shelf is full or there is no
 * memory. Thread-safe; of several threads that want the same at once, one packs it. */
const void *nki_shelf_get(nki_shelf *shelves, int number, const nki_mm *k, int moving, const char *at);
#endif
