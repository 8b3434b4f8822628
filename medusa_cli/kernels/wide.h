// PANEL floats, and products of bytes with bytes, in the registers that this kind of machine has.

#pragma once

#include <cstdint>
#include <cstring>

#include "lanes.h"

static const int PANEL = 16;  // outputs side by side

static inline float from_half(uint16_t bits) {
    _Float16 half;
    memcpy(&half, &bits, sizeof half);
    return (float)half;
}

// Tests name a kind (MEDUSA_...) to run it by other means than this machine's.
#if !defined(MEDUSA_VNNI) && (defined(MEDUSA_AVX512) || (defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)))

#define ROWS_AT_ONCE 8

struct Wide {
    __m512 lanes;
    Wide() : lanes(_mm512_setzero_ps()) {}
    Wide(__m512 lanes) : lanes(lanes) {}
};
typedef __m512i Bytes;

static inline Bytes load_bytes(const uint8_t *from) { return _mm512_loadu_si512(from); }
static inline void store_bytes(uint8_t *to, Bytes bytes) { _mm512_storeu_si512(to, bytes); }
static inline Bytes low_halves(Bytes bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi8(15)); }
static inline Bytes high_halves(Bytes bytes) { return low_halves(_mm512_srli_epi16(bytes, 4)); }
static inline Wide load_wide(const float *from) { return _mm512_loadu_ps(from); }
static inline void store_wide(float *to, Wide wide) { _mm512_storeu_ps(to, wide.lanes); }
static inline Wide spread_wide(float value) { return _mm512_set1_ps(value); }
static inline Wide operator*(Wide a, Wide b) { return _mm512_mul_ps(a.lanes, b.lanes); }
static inline Wide multiply_add(Wide a, Wide b, Wide c) { return _mm512_fmadd_ps(a.lanes, b.lanes, c.lanes); }
static inline Wide load_halves_of_panel(const uint8_t *from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
}

struct LargeSums {
    __m512i sums = _mm512_setzero_si512();
    static inline Bytes prepare(Bytes line, int) { return line; }
    static const int PASSES = 1;
    inline void end(int) {}
    inline void add(Bytes line, const int8_t *inputs, bool) {
        int32_t four;
        memcpy(&four, inputs, sizeof four);
        sums = _mm512_dpbusd_epi32(sums, line, _mm512_set1_epi32(four));
    }
    inline Wide total(int32_t less) const {
        return _mm512_cvtepi32_ps(_mm512_sub_epi32(sums, _mm512_set1_epi32(less)));
    }
};
typedef LargeSums SmallSums;

#elif defined(__AVX2__) && defined(__F16C__) && defined(__FMA__)

#define ROWS_AT_ONCE 4

struct Wide {
    __m256 low, high;
    Wide() : low(_mm256_setzero_ps()), high(_mm256_setzero_ps()) {}
    Wide(__m256 low, __m256 high) : low(low), high(high) {}
};
struct Bytes {
    __m256i low, high;
};

static inline Bytes load_bytes(const uint8_t *from) {
    return {_mm256_loadu_si256((const __m256i *)from), _mm256_loadu_si256((const __m256i *)(from + 32))};
}
static inline void store_bytes(uint8_t *to, Bytes bytes) {
    _mm256_storeu_si256((__m256i *)to, bytes.low), _mm256_storeu_si256((__m256i *)(to + 32), bytes.high);
}
static inline Bytes low_halves(Bytes bytes) {
    const __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(bytes.low, mask), _mm256_and_si256(bytes.high, mask)};
}
static inline Bytes high_halves(Bytes bytes) {
    return low_halves({_mm256_srli_epi16(bytes.low, 4), _mm256_srli_epi16(bytes.high, 4)});
}
static inline Wide load_wide(const float *from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
static inline void store_wide(float *to, Wide wide) { _mm256_storeu_ps(to, wide.low), _mm256_storeu_ps(to + 8, wide.high); }
static inline Wide spread_wide(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
static inline Wide operator*(Wide a, Wide b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
static inline Wide multiply_add(Wide a, Wide b, Wide c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
static inline Wide load_halves_of_panel(const uint8_t *from) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)),
            _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + 16)))};
}
static inline __m256i spread_four(const int8_t *inputs) {
    int32_t four;
    memcpy(&four, inputs, sizeof four);
    return _mm256_set1_epi32(four);
}
// Keeps the compiler from working out all products first, for whose sums there are not registers enough.
static inline void in_a_register(__m256i &sums) { asm("" : "+x"(sums)); }

static inline Wide as_floats(__m256i low, __m256i high) { return {_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)}; }

#if defined(MEDUSA_VNNI) || defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__))

#if defined(__AVXVNNI__) && !defined(MEDUSA_VNNI)
#define DOT_OF_BYTES _mm256_dpbusd_avx_epi32
#else
#define DOT_OF_BYTES _mm256_dpbusd_epi32
#endif

struct LargeSums {
    __m256i low = _mm256_setzero_si256(), high = _mm256_setzero_si256();
    static inline Bytes prepare(Bytes line, int) { return line; }
    static const int PASSES = 1;
    inline void end(int) {}
    inline void add(Bytes line, const int8_t *inputs, bool) {
        const __m256i four = spread_four(inputs);
        low = DOT_OF_BYTES(low, line.low, four), high = DOT_OF_BYTES(high, line.high, four);
    }
    inline Wide total(int32_t less) const {
        const __m256i each = _mm256_set1_epi32(less);
        return as_floats(_mm256_sub_epi32(low, each), _mm256_sub_epi32(high, each));
    }
};
typedef LargeSums SmallSums;

#else

// Pairs are summed in 16 bits: a block of weights of 4 bits fits, 15 * 127 * 16.
struct SmallSums {
    __m256i low, high;
    static inline Bytes prepare(Bytes line, int) { return line; }
    static const int PASSES = 1;
    inline void end(int) {}
    inline void add(Bytes line, const int8_t *inputs, bool first) {
        const __m256i four = spread_four(inputs);
        const __m256i l = _mm256_maddubs_epi16(line.low, four), h = _mm256_maddubs_epi16(line.high, four);
        low = first ? l : _mm256_add_epi16(low, l), high = first ? h : _mm256_add_epi16(high, h);
        in_a_register(low), in_a_register(high);
    }
    inline Wide total(int32_t) const {
        const __m256i ones = _mm256_set1_epi16(1);
        return as_floats(_mm256_madd_epi16(low, ones), _mm256_madd_epi16(high, ones));
    }
};

// Weights of 8 bits don't: their lower and their upper four bits are gone through one after the other.
struct LargeSums {
    static const int PASSES = 2;
    __m256i low, high, low_total, high_total;
    static inline Bytes prepare(Bytes line, int pass) { return pass ? high_halves(line) : low_halves(line); }
    inline void add(Bytes line, const int8_t *inputs, bool first) {
        const __m256i four = spread_four(inputs);
        const __m256i l = _mm256_maddubs_epi16(line.low, four), h = _mm256_maddubs_epi16(line.high, four);
        low = first ? l : _mm256_add_epi16(low, l), high = first ? h : _mm256_add_epi16(high, h);
        in_a_register(low), in_a_register(high);
    }
    inline void end(int pass) {
        const __m256i worth = _mm256_set1_epi16(pass ? 16 : 1);
        const __m256i l = _mm256_madd_epi16(low, worth), h = _mm256_madd_epi16(high, worth);
        low_total = pass ? _mm256_add_epi32(low_total, l) : l, high_total = pass ? _mm256_add_epi32(high_total, h) : h;
    }
    inline Wide total(int32_t less) const {
        const __m256i each = _mm256_set1_epi32(less);
        return as_floats(_mm256_sub_epi32(low_total, each), _mm256_sub_epi32(high_total, each));
    }
};

#endif

#else

#define ROWS_AT_ONCE 4

struct Wide {
    float lanes[PANEL] = {};
};
struct Bytes {
    uint8_t each[PANEL * 4];
};

static inline Bytes load_bytes(const uint8_t *from) {
    Bytes bytes;
    memcpy(bytes.each, from, sizeof bytes.each);
    return bytes;
}
static inline void store_bytes(uint8_t *to, Bytes bytes) { memcpy(to, bytes.each, sizeof bytes.each); }
static inline Bytes low_halves(Bytes bytes) {
    for (uint8_t &each : bytes.each) each &= 15;
    return bytes;
}
static inline Bytes high_halves(Bytes bytes) {
    for (uint8_t &each : bytes.each) each >>= 4;
    return bytes;
}
static inline Wide load_wide(const float *from) {
    Wide wide;
    memcpy(wide.lanes, from, sizeof wide.lanes);
    return wide;
}
static inline void store_wide(float *to, Wide wide) { memcpy(to, wide.lanes, sizeof wide.lanes); }
static inline Wide spread_wide(float value) {
    Wide wide;
    for (float &lane : wide.lanes) lane = value;
    return wide;
}
static inline Wide operator*(Wide a, Wide b) {
    for (int i = 0; i < PANEL; i++) a.lanes[i] = a.lanes[i] * b.lanes[i];
    return a;
}
static inline Wide multiply_add(Wide a, Wide b, Wide c) {
    for (int i = 0; i < PANEL; i++) c.lanes[i] = __builtin_fmaf(a.lanes[i], b.lanes[i], c.lanes[i]);
    return c;
}
static inline Wide load_halves_of_panel(const uint8_t *from) {
    Wide wide;
    for (int i = 0; i < PANEL; i++) {
        uint16_t bits;
        memcpy(&bits, from + i * sizeof bits, sizeof bits);
        wide.lanes[i] = from_half(bits);
    }
    return wide;
}

struct LargeSums {
    int32_t sums[PANEL] = {};
    static inline Bytes prepare(Bytes line, int) { return line; }
    static const int PASSES = 1;
    inline void end(int) {}
    inline void add(const Bytes &line, const int8_t *inputs, bool) {
        for (int o = 0; o < PANEL; o++)
            for (int i = 0; i < 4; i++) sums[o] += line.each[o * 4 + i] * inputs[i];
    }
    inline Wide total(int32_t less) const {
        Wide wide;
        for (int o = 0; o < PANEL; o++) wide.lanes[o] = (float)(sums[o] - less);
        return wide;
    }
};
typedef LargeSums SmallSums;

#endif
