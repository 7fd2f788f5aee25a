/* Random numbers: Philox4x32-10 as isa/rng.py defines it, under the keys of isa/language_ops.py. */
#include <math.h>
#include <string.h>
#include "convert.h"
#include "steps.h"

#define WORDS 64 /* 32-bit words of the state, two float32 each */
#define MOST 128 /* integers of a key */

static uint64_t mix(uint64_t h) { /* the finaliser of SplitMix64 */
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9u;
    h = (h ^ (h >> 27)) * 0x94D049BB133111EBu;
    return h ^ (h >> 31);
}

static int unpacked(const nki_random *k, const char *state, uint32_t *words) {
    if (!state) return 0;
    for (int i = 0; i < WORDS; i++) {
        float low = *(const nki_f32a *)(state + 2 * i * k->state_stride), high = *(const nki_f32a *)(state + (2 * i + 1) * k->state_stride);
        words[i] = (uint32_t)(uint16_t)low | (uint32_t)(uint16_t)high << 16;
    }
    return words[0] != 0;
}

void nki_uniform_run(const nki_random *k, const char *state, float *dst, const int64_t *index) {
    uint32_t words[WORDS];
    uint64_t values[MOST + 2];
    int n = 0;
    values[n++] = 0; /* the seed, and how many follow */
    values[n++] = 0;
    if (unpacked(k, state, words)) {
        const int seeded = (int)(words[3] < WORDS - 4 ? words[3] : WORDS - 4), here = k->n_index - 1;
        int common = 0;
        while (common < seeded && common < here && words[4 + common] == (uint32_t)index[1 + common]) common++;
        values[0] = words[1];
        values[n++] = (uint32_t)k->call - words[2];
        values[n++] = (uint64_t)(seeded - common);
        for (int i = common; i < here; i++) values[n++] = (uint32_t)index[1 + i];
    } else {
        values[0] = (uint64_t)index[0];
        values[n++] = (uint64_t)k->call;
        for (int i = 1; i < k->n_index; i++) values[n++] = (uint64_t)index[i];
    }
    values[1] = (uint64_t)(n - 2);
    uint64_t key = 0x243F6A8885A308D3u, upper = 0x13198A2E03707344u;
    for (int i = 0; i < n; i++) {
        key = mix((key + 0x9E3779B97F4A7C15u) ^ values[i]);
        upper = mix((upper + 0xD1B54A32D192ED03u) ^ values[i]);
    }
    for (int64_t block = 0; block * 4 < k->n; block++) {
        uint32_t c0 = (uint32_t)block, c1 = (uint32_t)(block >> 32), c2 = (uint32_t)upper, c3 = (uint32_t)(upper >> 32);
        uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
        for (int round = 0; round < 10; round++) {
            const uint64_t p0 = (uint64_t)c0 * 0xD2511F53u, p1 = (uint64_t)c2 * 0xCD9E8D57u;
            c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
            c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
            c1 = (uint32_t)p1, c3 = (uint32_t)p0;
            k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
        }
        const uint32_t made[4] = {c0, c1, c2, c3};
        for (int j = 0; j < 4 && block * 4 + j < k->n; j++) dst[block * 4 + j] = (float)(made[j] >> 8) * 0x1p-24f;
    }
}

void nki_seed_run(const nki_random *k, const char *seed, char *state, const int64_t *index) {
    uint32_t words[WORDS] = {1};
    if (k->dtype >= NKI_I32) {
        words[1] = (uint32_t)nki_whole(k->dtype, seed);
    } else {
        float value;
        nki_types[k->dtype].load(&value, seed, 0, 1);
        if (isfinite(value)) { /* the integer part, modulo 2^32 */
            double low = fmod(trunc((double)value), 0x1p32);
            words[1] = (uint32_t)(int64_t)low;
        }
    }
    words[2] = (uint32_t)k->call;
    const int positions = k->n_index - 1 < WORDS - 4 ? k->n_index - 1 : WORDS - 4;
    words[3] = (uint32_t)positions;
    for (int i = 0; i < positions; i++) words[4 + i] = (uint32_t)index[1 + i];
    for (int i = 0; i < WORDS; i++) {
        *(nki_f32a *)(state + 2 * i * k->state_stride) = (float)(words[i] & 0xffff);
        *(nki_f32a *)(state + (2 * i + 1) * k->state_stride) = (float)(words[i] >> 16);
    }
}
