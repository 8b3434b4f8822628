// Products with weights that lie on a grid: 4 or 8 bits in blocks, bfloat16, or float32 as it is. In a block of 32 weights
// of an output a weight is step * quant + offset, and that float is what is multiplied: nothing is rounded that the plain
// layer doesn't round too. The sums of an input row don't depend on how many rows there are.
//
// Weights of GROUP outputs stand beside each other, so that one stream of memory feeds several sums at once: a single
// sum would wait for each of its additions.
//
// Letters: M input rows, K inputs, N outputs, O outputs at once; X and S numbers between the rows of x and of y.

#include <cmath>
#include <omp.h>

#include "lanes.h"

static const int IN_INTEGERS = 80;  // added to the bits of weights in panels, whose products are those of int8.h
static const int BLOCK = 32;
static const int RUN = 64;       // inputs whose weights stand together
static const int GROUP = 4;      // outputs whose weights stand together
static const int MOST_ROWS = 8;  // of a tile: with their weights they fill the registers of AVX2
static const long STRETCH = 1024;  // inputs at most that are gone through at once: rows of a tile stay in the nearest cache

// A run of a group: 32 bytes for each output, lane i holding the quants of the inputs i, i + 8, ... from its lowest bits
// on; then step and offset of each output's two blocks.
struct FourBits {
    static const long QUANTS = GROUP * RUN / 2, BYTES = QUANTS + GROUP * 4 * sizeof(float);
    static long group_bytes(long K) { return K / RUN * BYTES; }
    static long bytes_before(long k) { return k / RUN * BYTES; }  // inputs, in a group

    // Those of output `o` of a group for the inputs k to `end` - 1, as numbers.
    static inline void open(const uint8_t *group, long, int o, long k, long end, float *to) {
        for (const uint8_t *run = group + bytes_before(k); k < end; k += RUN, run += BYTES) {
            const float *grid = (const float *)(run + QUANTS) + o * 4;
            Ints packed;
            memcpy(&packed, run + o * sizeof packed, sizeof packed);
#pragma GCC unroll 8
            for (int part = 0; part < 8; part++, to += LANES) {
                const Floats step = spread(grid[part / 4 * 2]), offset = spread(grid[part / 4 * 2 + 1]);
                store(to, multiply_add(__builtin_convertvector((packed >> (4 * part)) & 15, Floats), step, offset));
            }
        }
    }

    template <int M, int O>
    static inline void accumulate(const float *x, long X, long K, const uint8_t *group, int first, Floats *sums) {
        for (long k = 0; k < K; k += RUN, group += BYTES) {
            const float *grid = (const float *)(group + QUANTS) + first * 4;
#pragma GCC unroll 4
            for (int o = 0; o < O; o++) {
                Ints packed;
                memcpy(&packed, group + (first + o) * sizeof packed, sizeof packed);
#pragma GCC unroll 2
                for (int block = 0; block < 2; block++) {
                    const Floats step = spread(grid[o * 4 + block * 2]), offset = spread(grid[o * 4 + block * 2 + 1]);
#pragma GCC unroll 4
                    for (int part = 4 * block; part < 4 * block + 4; part++) {
                        const Floats quants = __builtin_convertvector((packed >> (4 * part)) & 15, Floats);
                        const Floats weights = multiply_add(quants, step, offset);
#pragma GCC unroll 8
                        for (int m = 0; m < M; m++)
                            sums[o * M + m] = multiply_add(weights, load(x + m * X + k + LANES * part), sums[o * M + m]);
                    }
                }
            }
        }
    }
};

// A run of a group: 64 bytes of signed quants for each output, then the steps of each output's two blocks.
struct EightBits {
    static const long QUANTS = GROUP * RUN, BYTES = QUANTS + GROUP * 2 * sizeof(float);
    static long group_bytes(long K) { return K / RUN * BYTES; }
    static long bytes_before(long k) { return k / RUN * BYTES; }  // inputs, in a group

    static inline void open(const uint8_t *group, long, int o, long k, long end, float *to) {
        for (const uint8_t *run = group + bytes_before(k); k < end; k += RUN, run += BYTES)
            for (int block = 0; block < 2; block++) {
                Ints packed;
                memcpy(&packed, run + o * RUN + block * BLOCK, sizeof packed);
                const Floats step = spread(((const float *)(run + QUANTS))[o * 2 + block]);
#pragma GCC unroll 4
                for (int part = 0; part < 4; part++, to += LANES)
                    store(to, __builtin_convertvector((packed << (24 - 8 * part)) >> 24, Floats) * step);
            }
    }

    template <int M, int O>
    static inline void accumulate(const float *x, long X, long K, const uint8_t *group, int first, Floats *sums) {
        for (long k = 0; k < K; k += RUN, group += BYTES) {
            const float *grid = (const float *)(group + QUANTS) + first * 2;
#pragma GCC unroll 4
            for (int o = 0; o < O; o++)
#pragma GCC unroll 2
                for (int block = 0; block < 2; block++) {
                    Ints packed;
                    memcpy(&packed, group + (first + o) * RUN + block * BLOCK, sizeof packed);
                    const Floats step = spread(grid[o * 2 + block]);
#pragma GCC unroll 4
                    for (int part = 0; part < 4; part++) {
                        const Floats weights = __builtin_convertvector((packed << (24 - 8 * part)) >> 24, Floats) * step;
                        const float *inputs = x + k + block * BLOCK + LANES * part;
#pragma GCC unroll 8
                        for (int m = 0; m < M; m++)
                            sums[o * M + m] = multiply_add(weights, load(inputs + m * X), sums[o * M + m]);
                    }
                }
        }
    }
};

static inline Floats widen(const float *from) { return load(from); }

static inline Floats widen(const uint16_t *from) {  // bfloat16: the upper half of a float32
    typedef uint16_t Halves __attribute__((vector_size(16)));
    Halves halves;
    memcpy(&halves, from, sizeof halves);
    const Ints bits = __builtin_convertvector(halves, Ints) << 16;
    Floats lanes;
    memcpy(&lanes, &bits, sizeof lanes);
    return lanes;
}

// Rows of numbers as they are: float32, or bfloat16.
template <class Number>
struct Plain {
    static long group_bytes(long K) { return GROUP * K * sizeof(Number); }
    static long bytes_before(long k) { return k * sizeof(Number); }

    static inline void open(const uint8_t *group, long K, int o, long k, long end, float *to) {
        for (const Number *row = (const Number *)group + o * K; k < end; k += LANES, to += LANES) store(to, widen(row + k));
    }

    template <int M, int O>
    static inline void accumulate(const float *x, long X, long K, const uint8_t *group, int first, Floats *sums) {
        const Number *rows = (const Number *)group + first * X;
        for (long k = 0; k < K; k += LANES)
#pragma GCC unroll 4
            for (int o = 0; o < O; o++) {
                const Floats weights = widen(rows + o * X + k);
#pragma GCC unroll 8
                for (int m = 0; m < M; m++)
                    sums[o * M + m] = multiply_add(weights, load(x + m * X + k), sums[o * M + m]);
            }
    }
};

// A stretch of inputs of a group: from x and the weights of its first input on. Later stretches are added to y.
struct Stretch {
    const float *x;
    long X;  // between the rows of x
    long K;
    const uint8_t *group;
    float *y;
    long S;
    bool later;
};

template <class Grid, int M, int O>
static inline void tile(const Stretch &s, int first) {
    Floats sums[M * O] = {};
    Grid::template accumulate<M, O>(s.x, s.X, s.K, s.group, first, sums);
    for (int o = 0; o < O; o++)
        for (int m = 0; m < M; m++) {
            float *y = s.y + m * s.S + first + o;
            *y = s.later ? *y + sum(sums[o * M + m]) : sum(sums[o * M + m]);
        }
}

// `count` outputs of a group, as many at once as there are registers for.
template <class Grid, int M>
static void tiles(const Stretch &s, int count) {
    const int O = M <= 3 ? GROUP : M <= 5 ? 2 : 1;
    int n = 0;
    for (; n + O <= count; n += O) tile<Grid, M, O>(s, n);
    for (; n < count; n++) tile<Grid, M, 1>(s, n);
}

template <class Grid>
static void any_tiles(long M, const Stretch &s, int count) {
    switch (M) {
        case 1: return tiles<Grid, 1>(s, count);
        case 2: return tiles<Grid, 2>(s, count);
        case 3: return tiles<Grid, 3>(s, count);
        case 4: return tiles<Grid, 4>(s, count);
        case 5: return tiles<Grid, 5>(s, count);
        case 6: return tiles<Grid, 6>(s, count);
        case 7: return tiles<Grid, 7>(s, count);
        default: return tiles<Grid, MOST_ROWS>(s, count);
    }
}

struct Product {
    const float *x;
    long M, K;
    const uint8_t *weights;
    float *y;
    long S, N;
};

#include "int8.h"
#include "panels.h"

// One stretch (from input k to `end`) of one group of outputs, for all rows.
template <class Grid>
static void group_stretch(const Product &p, long g, long k, long end) {
    const long row_tiles = (p.M + MOST_ROWS - 1) / MOST_ROWS, n = g * GROUP;
    const int count = (int)(p.N - n < GROUP ? p.N - n : GROUP);
    const uint8_t *group = p.weights + g * Grid::group_bytes(p.K) + Grid::bytes_before(k);
    for (long t = 0; t < row_tiles; t++) {
        const long first = p.M * t / row_tiles, last = p.M * (t + 1) / row_tiles;
        any_tiles<Grid>(last - first, {p.x + first * p.K + k, p.K, end - k, group, p.y + first * p.S + n, p.S, k > 0},
                        count);
    }
}

// The share of thread `thread`. Few rows go through the weights in their order; many go stretch by stretch, so that a
// tile's rows stay in the nearest cache. The sums are the same.
template <class Grid>
static void products(const Product &p, int thread, int threads) {
    const long groups = (p.N + GROUP - 1) / GROUP, first = groups * thread / threads, last = groups * (thread + 1) / threads;
    const long stretches = (p.K + STRETCH - 1) / STRETCH, runs = (p.K + RUN - 1) / RUN;
    const auto start = [&](long i) { const long k = runs * i / stretches * RUN; return k < p.K ? k : p.K; };
    if (p.M <= 5 || stretches == 1) {
        for (long g = first; g < last; g++)
            for (long i = 0; i < stretches; i++) group_stretch<Grid>(p, g, start(i), start(i + 1));
    } else {
        for (long i = 0; i < stretches; i++)
            for (long g = first; g < last; g++) group_stretch<Grid>(p, g, start(i), start(i + 1));
    }
}

// The share of thread `thread`, of few rows.
static void share(int bits, const Product &p, int thread, int threads) {
    switch (bits) {
        case 4: return products<FourBits>(p, thread, threads);
        case 8: return products<EightBits>(p, thread, threads);
        case 16: return products<Plain<uint16_t>>(p, thread, threads);
        default: return products<Plain<float>>(p, thread, threads);
    }
}

static void share_of_many(int bits, const Product &p, int thread, int threads) {
    switch (bits) {
        case 4: return many_products<FourBits>(p, thread, threads);
        case 8: return many_products<EightBits>(p, thread, threads);
        case 16: return many_products<Plain<uint16_t>>(p, thread, threads);
        default: return many_products<Plain<float>>(p, thread, threads);
    }
}

// y [M, N] = x [M, K] times the transposed weights [N, K]: `bits` tells how these are stored. Up to `few` rows the sums of a
// row don't depend on how many there are, and beyond them neither; in integers they never do.
extern "C" void multiply(int bits, const float *x, long M, long K, const void *weights, float *y, long N, long few,
                         int threads) {
    const Product p = {x, M, K, (const uint8_t *)weights, y, N, N};
    Rounded &rounded = rounded_here();
    if (bits > IN_INTEGERS) rounded.resize(M, K);
#pragma omp parallel num_threads(threads)
    {
        const int thread = omp_get_thread_num(), all = omp_get_num_threads();
        if (bits > IN_INTEGERS)
            share_in_integers(bits - IN_INTEGERS, round_together(p, rounded, thread, all), p, thread, all);
        else
            (M <= few ? share : share_of_many)(bits, p, thread, all);
    }
}

template <class Grid>
static void write_dense(const uint8_t *weights, long N, long K, float *dense) {
    for (long n = 0; n < N; n++)
        Grid::open(weights + n / GROUP * Grid::group_bytes(K), K, (int)(n % GROUP), 0, K, dense + n * K);
}

// The weights [N, K] of a grid of 4 or 8 bits as floats.
extern "C" void open_blocks(int bits, const uint8_t *stored, long N, long K, float *dense) {
    bits == 4 ? write_dense<FourBits>(stored, N, K, dense) : write_dense<EightBits>(stored, N, K, dense);
}

// Bytes that weights [N, K] take on a grid of 4 or 8 bits.
extern "C" long stored_bytes(int bits, long N, long K) {
    return (N + GROUP - 1) / GROUP * (bits == 4 ? FourBits::group_bytes(K) : EightBits::group_bytes(K));
}

// The nearest float16: steps are stored as such, so a step worked out from rounded weights is only nearly right.
static inline float nearest_half(float value) {
    if (std::fabs(value) < 6.103515625e-5f) return std::rint(value * 16777216.0f) / 16777216.0f;  // a subnormal one
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    bits = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFFu;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// The quants of a block of weights; false unless they give back every weight to the last bit.
static inline bool quantise(const float *weights, float step, float offset, int least, int most, int *quants) {
    bool same = true;
    for (int i = 0; i < BLOCK; i++) {
        const float place = step == 0 ? 0 : std::rint((weights[i] - offset) / step);
        quants[i] = (int)std::fmin(std::fmax(place, (float)least), (float)most);
        same &= std::fma((float)quants[i], step, offset) == weights[i];
    }
    return same;
}

// Quant `i` of a run of up to 64 in a lane layout of `bits` bits.
static inline void put(uint32_t *run, int bits, long i, int quant) {
    const long part = i / LANES, parts = 32 / bits;
    const uint32_t field = (uint32_t)quant & ((1u << bits) - 1);
    run[part / parts * LANES + i % LANES] |= field << (bits * (part % parts));
}

// The grid of a block, by how files make it: from the smallest weight in 15 steps to the largest (Q4_1), or 8 steps
// from the weight farthest from 0 to 0 (Q4_0).
static bool find_four(const float *weights, float *grid, int *quants) {
    float low = weights[0], high = weights[0];
    for (int i = 1; i < BLOCK; i++) low = std::fmin(low, weights[i]), high = std::fmax(high, weights[i]);
    const float far = std::fabs(low) >= std::fabs(high) ? low : high;
    grid[0] = nearest_half((high - low) / 15), grid[1] = low;
    if (quantise(weights, grid[0], grid[1], 0, 15, quants)) return true;
    grid[0] = nearest_half(far / -8), grid[1] = far;
    return quantise(weights, grid[0], grid[1], 0, 15, quants);
}

// Q8_0: the weight farthest from 0 is 127 steps from it.
static bool find_eight(const float *weights, float *grid, int *quants) {
    float far = 0;
    for (int i = 0; i < BLOCK; i++) far = std::fmax(far, std::fabs(weights[i]));
    grid[0] = nearest_half(far / 127);
    return quantise(weights, grid[0], 0, -127, 127, quants);
}

// Fills `stored` (zeros before) from weights [N, K] in 4 or 8 bits; returns 0 at the first block that is on no grid.
extern "C" int find_blocks(int bits, const float *weights, long N, long K, uint8_t *stored, int threads) {
    const long numbers = bits == 4 ? 2 : 1, run_quants = RUN * bits / 8;
    const long quants_bytes = bits == 4 ? FourBits::QUANTS : EightBits::QUANTS;
    const long run_bytes = bits == 4 ? FourBits::BYTES : EightBits::BYTES;
    bool found = true;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(&& : found)
    for (long n = 0; n < N; n++) {
        int quants[BLOCK];
        for (long k = 0; k < K && found; k += BLOCK) {
            uint8_t *run = stored + (n / GROUP * (K / RUN) + k / RUN) * run_bytes;
            const long block = k % RUN / BLOCK;
            float *grid = (float *)(run + quants_bytes) + (n % GROUP * 2 + block) * numbers;
            found = (bits == 4 ? find_four : find_eight)(weights + n * K + k, grid, quants);
            uint32_t *place = (uint32_t *)(run + n % GROUP * run_quants);
            for (int i = 0; i < BLOCK; i++) put(place, bits, block * BLOCK + i, quants[i]);
        }
    }
    return found;
}

// Bytes of weights [N, K] in panels.
extern "C" long bytes_in_panels(int bits, long N, long K) { return (N + PANEL - 1) / PANEL * panel_bytes(bits, K); }

static inline uint16_t to_half(float value) {
    const _Float16 half = (_Float16)value;
    uint16_t bits;
    memcpy(&bits, &half, sizeof bits);
    return bits;
}

// Panels (zeros before) from weights in blocks of 4 bits; returns 0 at the first step or offset that isn't a half.
extern "C" int lay_panels_of_four(const uint8_t *stored, long N, long K, uint8_t *panels, int threads) {
    bool found = true;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(&& : found)
    for (long n = 0; n < N; n++)
        for (long k = 0; k < K && found; k += BLOCK) {
            const uint8_t *run = stored + n / GROUP * FourBits::group_bytes(K) + FourBits::bytes_before(k);
            const uint32_t *packed = (const uint32_t *)(run + n % GROUP * 32);
            const float *grid = (const float *)(run + FourBits::QUANTS) + n % GROUP * 4 + k % RUN / BLOCK * 2;
            uint8_t *block = panels + n / PANEL * panel_bytes(4, K) + k / BLOCK * PanelOfFour::BYTES;
            for (int i = 0; i < BLOCK; i++) {
                const long place = k % RUN + i;
                const uint8_t quant = packed[place % LANES] >> (4 * (place / LANES)) & 15;
                block[i / 8 * LINE + n % PANEL * FOUR + i % FOUR] |= quant << (i % 8 / FOUR * 4);
            }
            uint16_t *numbers = (uint16_t *)(block + PanelOfFour::QUANTS) + n % PANEL;
            numbers[0] = to_half(grid[0]), numbers[PANEL] = to_half(grid[1]);
            found = from_half(numbers[0]) == grid[0] && from_half(numbers[PANEL]) == grid[1];
        }
    return found;
}

// Panels (zeros before) of the nearest weights on a grid of 8 bits, by the rule of Q8_0.
extern "C" void lay_panels_of_eight(const float *weights, long N, long K, uint8_t *panels, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long n = 0; n < N; n++)
        for (long k = 0; k < K; k += BLOCK) {
            const long count = std::min<long>(BLOCK, K - k);
            const float *from = weights + n * K + k;
            float far = 0;
            for (long i = 0; i < count; i++) far = std::fmax(far, std::fabs(from[i]));
            const float step = nearest_half(far / 127);
            uint8_t *block = panels + n / PANEL * panel_bytes(8, K) + k / BLOCK * PanelOfEight::BYTES;
            for (int i = 0; i < BLOCK; i++) {
                const float quant = step == 0 || i >= count ? 0 : std::rint(from[i] / step);
                block[i / FOUR * LINE + n % PANEL * FOUR + i % FOUR] = (uint8_t)(std::fmin(std::fmax(quant, -127), 127) + 128);
            }
            ((uint16_t *)(block + PanelOfEight::QUANTS))[n % PANEL] = to_half(step);
        }
}

template <class Panel>
static void open_all(const uint8_t *panels, long N, long K, float *dense) {
    for (long n = 0; n < N; n++)
        for (long k = 0; k < K; k++) {
            const uint8_t *block = panels + (n / PANEL * blocks_of(K) + k / BLOCK) * Panel::BYTES;
            uint8_t line[LINE];
            store_bytes(line, Panel::line(block, (int)(k % BLOCK / FOUR)));
            const float quant = line[n % PANEL * FOUR + k % FOUR];
            const uint16_t *numbers = (const uint16_t *)(block + Panel::QUANTS) + n % PANEL;
            const float step = from_half(numbers[0]);
            dense[n * K + k] = Panel::HAS_OFFSETS ? std::fma(quant, step, from_half(numbers[PANEL])) : (quant - 128) * step;
        }
}

// The weights [N, K] in panels as floats.
extern "C" void open_panels(int bits, const uint8_t *panels, long N, long K, float *dense) {
    bits == 4 ? open_all<PanelOfFour>(panels, N, K, dense) : open_all<PanelOfEight>(panels, N, K, dense);
}
