// The instructions of other processors in those of this one, by the library SIMDe where it is installed.

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <immintrin.h>

static inline simde__m512 halves_to_floats(simde__m256i halves) {
    simde__m512_private floats;
    floats.m256[0] = simde__m256_from_private(simde__m256_to_private(_mm256_cvtph_ps(_mm256_castsi256_si128(halves))));
    floats.m256[1] = simde__m256_from_private(simde__m256_to_private(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))));
    return simde__m512_from_private(floats);
}

static inline simde__m512 whole_to_floats(simde__m512i whole) {
    const simde__m512i_private from = simde__m512i_to_private(whole);
    simde__m512_private floats;
    for (int i = 0; i < 16; i++) floats.f32[i] = (float)from.i32[i];
    return simde__m512_from_private(floats);
}

#undef _mm512_cvtepi32_ps
#define _mm512_cvtepi32_ps(whole) whole_to_floats(whole)
#undef _mm512_cvtph_ps
#define _mm512_cvtph_ps(halves) halves_to_floats(halves)
