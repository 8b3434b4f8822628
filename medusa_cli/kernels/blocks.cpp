// Products with weights that lie on a grid of 4 or 8 bits. Each block of 32 weights of an output has a step and an
// offset; a weight is step * quant + offset, and that float is what is multiplied: nothing is rounded that the plain
// layer doesn't round too. The sums of an input row don't depend on how many rows there are.
//
// Letters: M input rows, K inputs, N outputs.

#include <cmath>
#include <cstdint>
#include <cstring>

typedef float Floats __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));

static const int LANES = 8;
static const int BLOCK = 32;
static const int MOST_ROWS = 7;  // of a tile: with their weights they fill the registers of AVX2

static inline Floats load(const float *from) {
    Floats lanes;
    memcpy(&lanes, from, sizeof lanes);
    return lanes;
}

static inline Ints load(const uint8_t *from) {
    Ints lanes;
    memcpy(&lanes, from, sizeof lanes);
    return lanes;
}

static inline Floats spread(float value) { return value - Floats{}; }

static inline float sum(Floats lanes) {
    return ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
}

// 64 quants in 32 bytes: lane i holds those of the inputs i, i + 8, i + 16, ... from its lowest bits on.
struct FourBits {
    static long quant_bytes(long K) { return K / 2; }
    static long grid_floats(long K) { return K / BLOCK * 2; }  // step and offset of each block

    template <int M>
    static inline void accumulate(const float *x, long K, const uint8_t *quants, const float *grid, Floats *sums) {
        for (long k = 0; k < K; k += 2 * BLOCK, quants += sizeof(Ints)) {
            const Ints packed = load(quants);
#pragma GCC unroll 2
            for (int block = 0; block < 2; block++, grid += 2) {
                const Floats step = spread(grid[0]), offset = spread(grid[1]);
#pragma GCC unroll 4
                for (int part = 4 * block; part < 4 * block + 4; part++) {
                    const Floats weights = __builtin_convertvector((packed >> (4 * part)) & 15, Floats) * step + offset;
#pragma GCC unroll 8
                    for (int m = 0; m < M; m++) sums[m] += weights * load(x + m * K + k + LANES * part);
                }
            }
        }
    }
};

// 32 signed quants in 32 bytes, lane i as above; the offset is 0.
struct EightBits {
    static long quant_bytes(long K) { return K; }
    static long grid_floats(long K) { return K / BLOCK; }

    template <int M>
    static inline void accumulate(const float *x, long K, const uint8_t *quants, const float *grid, Floats *sums) {
        for (long k = 0; k < K; k += BLOCK, quants += sizeof(Ints), grid++) {
            const Ints packed = load(quants);
            const Floats step = spread(grid[0]);
#pragma GCC unroll 4
            for (int part = 0; part < 4; part++) {
                const Floats weights = __builtin_convertvector((packed << (24 - 8 * part)) >> 24, Floats) * step;
#pragma GCC unroll 8
                for (int m = 0; m < M; m++) sums[m] += weights * load(x + m * K + k + LANES * part);
            }
        }
    }
};

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

// Quant `i` of a row in a lane layout of `bits` bits.
static inline void put(uint32_t *row, int bits, long i, int quant) {
    const long part = i / LANES, parts = 32 / bits;
    const uint32_t field = (uint32_t)quant & ((1u << bits) - 1);
    row[part / parts * LANES + i % LANES] |= field << (bits * (part % parts));
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

template <class Grid, int M>
static void tile(const float *x, long K, const uint8_t *quants, const float *grid, float *y, long N) {
    Floats sums[M] = {};
    Grid::template accumulate<M>(x, K, quants, grid, sums);
    for (int m = 0; m < M; m++) y[m * N] = sum(sums[m]);
}

template <class Grid>
static void any_tile(long M, const float *x, long K, const uint8_t *quants, const float *grid, float *y, long N) {
    switch (M) {
        case 1: return tile<Grid, 1>(x, K, quants, grid, y, N);
        case 2: return tile<Grid, 2>(x, K, quants, grid, y, N);
        case 3: return tile<Grid, 3>(x, K, quants, grid, y, N);
        case 4: return tile<Grid, 4>(x, K, quants, grid, y, N);
        case 5: return tile<Grid, 5>(x, K, quants, grid, y, N);
        case 6: return tile<Grid, 6>(x, K, quants, grid, y, N);
        default: return tile<Grid, MOST_ROWS>(x, K, quants, grid, y, N);
    }
}

// y [M, N] = x [M, K] times the transposed weight [N, K]
template <class Grid>
static void multiply(const float *x, long M, long K, const uint8_t *quants, const float *grid, float *y, long N,
                     int threads) {
    const long tiles = (M + MOST_ROWS - 1) / MOST_ROWS;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long n = 0; n < N; n++) {
        const uint8_t *row_quants = quants + n * Grid::quant_bytes(K);
        const float *row_grid = grid + n * Grid::grid_floats(K);
        for (long t = 0; t < tiles; t++) {
            const long first = M * t / tiles, end = M * (t + 1) / tiles;
            any_tile<Grid>(end - first, x + first * K, K, row_quants, row_grid, y + first * N + n, N);
        }
    }
}

extern "C" void multiply_4(const float *x, long M, long K, const uint8_t *quants, const float *grid, float *y, long N,
                           int threads) {
    multiply<FourBits>(x, M, K, quants, grid, y, N, threads);
}

extern "C" void multiply_8(const float *x, long M, long K, const uint8_t *quants, const float *grid, float *y, long N,
                           int threads) {
    multiply<EightBits>(x, M, K, quants, grid, y, N, threads);
}

// Fills quants (zeros before) and grid from weights [N, K]; returns 0 at the first block that is on no grid.
extern "C" int find_blocks(int bits, const float *weights, long N, long K, uint32_t *quants, float *grid, int threads) {
    const long words = K * bits / 32, numbers = bits == 4 ? 2 : 1;
    bool found = true;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(&& : found)
    for (long n = 0; n < N; n++) {
        int block[BLOCK];
        for (long k = 0; k < K && found; k += BLOCK) {
            float *place = grid + (n * (K / BLOCK) + k / BLOCK) * numbers;
            found = (bits == 4 ? find_four : find_eight)(weights + n * K + k, place, block);
            for (int i = 0; i < BLOCK; i++) put(quants + n * words, bits, k + i, block[i]);
        }
    }
    return found;
}
