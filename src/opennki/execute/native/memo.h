/* Elementwise calls that are prepared once for many runs (memo.c), of one thread. */
#ifndef NKI_MEMO_H
#define NKI_MEMO_H
#include "nki.h"

typedef struct nki_memo nki_memo;
nki_memo *nki_memo_new(void); /* NULL without memory: then nothing is kept */
void nki_memo_free(nki_memo *memo);

/* nki_ew_run over all of the iteration space. `number`: of the call, which always has the same descriptor. */
void nki_memo_run(nki_memo *memo, int64_t number, const nki_ew *k, char *const *at, const int64_t *pred, const int64_t *index);
#endif
