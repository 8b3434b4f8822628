// Eight floats side by side, in whatever vector registers the machine has.

#pragma once

#include <cstdint>
#include <cstring>

#ifdef __FMA__
#include <immintrin.h>
#endif

typedef float Floats __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));

static const long LANES = 8;

static inline Floats load(const float *from) {
    Floats lanes;
    memcpy(&lanes, from, sizeof lanes);
    return lanes;
}

// Four floats from one place and four from another.
static inline Floats load_halves(const float *low, const float *high) {
#ifdef __FMA__
    return (Floats)_mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(low)), _mm_loadu_ps(high), 1);
#else
    Floats lanes;
    memcpy(&lanes, low, sizeof lanes / 2), memcpy((char *)&lanes + sizeof lanes / 2, high, sizeof lanes / 2);
    return lanes;
#endif
}

static inline void store(float *to, Floats lanes) { memcpy(to, &lanes, sizeof lanes); }

static inline Floats spread(float value) { return value - Floats{}; }

static inline float sum(Floats lanes) {
    return ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
}

// The nearest whole numbers, a half to the even one.
static inline Ints nearest(Floats lanes) {
#ifdef __FMA__
    return (Ints)_mm256_cvtps_epi32((__m256)lanes);
#else
    Ints whole;
    for (int lane = 0; lane < 8; lane++) whole[lane] = (int32_t)__builtin_rintf(lanes[lane]);
    return whole;
#endif
}

// a * b + c, rounded once. Compilers contract such sums here and not there, and then equal rows differ in their bits.
static inline Floats multiply_add(Floats a, Floats b, Floats c) {
#ifdef __FMA__
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}
