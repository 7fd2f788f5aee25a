/* The floating-point mode of the interpreter: denormals are kept. XLA flushes them on the threads it lends. */
#ifndef NKI_FPENV_H
#define NKI_FPENV_H
#if defined(__x86_64__)
#include <xmmintrin.h>
typedef unsigned nki_fp;
static inline nki_fp nki_fp_enter(void) {
    unsigned mode = _mm_getcsr();
    _mm_setcsr(0x1f80);
    return mode;
}
static inline void nki_fp_leave(nki_fp mode) { _mm_setcsr(mode); }
#elif defined(__aarch64__)
#include <stdint.h>
typedef uint64_t nki_fp;
static inline nki_fp nki_fp_enter(void) {
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    __asm__ volatile("msr fpcr, %0" ::"r"((uint64_t)0));
    return mode;
}
static inline void nki_fp_leave(nki_fp mode) { __asm__ volatile("msr fpcr, %0" ::"r"(mode)); }
#else
typedef int nki_fp;
static inline nki_fp nki_fp_enter(void) { return 0; }
static inline void nki_fp_leave(nki_fp mode) { (void)mode; }
#endif
#endif
