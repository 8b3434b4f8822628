// Products in integers: inputs are rounded to 8 bits, 32 of a row with one scale; weights have 4 or 8 bits on a grid, and what
// is summed within a block of 32 are integers. A block's sum, times scale and step, is added to the output in the order
// of the blocks: an output hangs on its row and its weights alone, to the last bit, on every kind of machine.
//
// PANEL outputs stand side by side, four inputs of each in the 32 bits of a lane, as processors multiply bytes.
//
// Letters: M input rows, K inputs, N outputs, R rows at once, B blocks of a row.

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "lanes.h"
#include "wide.h"

static const int FOUR = 4;                   // inputs of a lane
static const int GROUPS = BLOCK / FOUR;      // of a block
static const int LINE = PANEL * FOUR;        // bytes of the quants of four inputs, opened
static const int FEW = 2 * ROWS_AT_ONCE;     // rows up to which a panel isn't opened before
static const float LEAST = 1e-30f;           // below that a block of inputs is nothing: 127 / top would overflow
static const long NUMBERS_ALONE = 32 * 1024;  // of inputs that every thread rounds for itself
static const long OPEN_BYTES = 24 * 1024;    // of an opened stretch of a panel: it stays in the nearest cache

static inline long blocks_of(long K) { return (K + BLOCK - 1) / BLOCK; }

// Rows of inputs in 8 bits, [M, B, 32], past the last input 0; of each block the scale, and the sum of its inputs as
// a number and in quants.
struct Rounded {
    std::vector<int8_t> quants;
    std::vector<float> scales, masses;
    std::vector<int32_t> sums;

    void resize(long M, long K) {
        const long B = blocks_of(K);
        if ((long)quants.size() < M * B * BLOCK) quants.resize(M * B * BLOCK);
        if ((long)scales.size() < M * B) scales.resize(M * B), masses.resize(M * B), sums.resize(M * B);
    }
};

// Block `i` of all rows' blocks from `count` inputs at x.
static inline void round_block(const float *x, long count, long i, Rounded &to) {
    alignas(32) float held[BLOCK] = {};
    memcpy(held, x, count * sizeof(float));
    Floats tops = {}, odd = {};  // odd: 0, unless an input is no finite number
#pragma GCC unroll 4
    for (int k = 0; k < BLOCK; k += LANES) {
        const Floats part = load(held + k), size = part < Floats{} ? -part : part;
        tops = size > tops ? size : tops, odd += part * 0.0f;
    }
    float top = 0;
    for (int lane = 0; lane < LANES; lane++) top = tops[lane] > top ? tops[lane] : top;
    const float inverse = top > LEAST ? 127 / top : 0, scale = top / 127 + ::sum(odd);
    int32_t sum = 0;
    int8_t *quants = to.quants.data() + i * BLOCK;
    for (int k = 0; k < BLOCK; k += LANES) {
        const Ints whole = nearest(load(held + k) * inverse);
        for (int lane = 0; lane < LANES; lane++) quants[k + lane] = (int8_t)whole[lane], sum += whole[lane];
    }
    to.scales[i] = scale, to.masses[i] = scale * (float)sum, to.sums[i] = sum;
}

static inline void round_rows(const float *x, long first, long last, long K, Rounded &to) {
    const long B = blocks_of(K);
    for (long m = first; m < last; m++)
        for (long b = 0; b < B; b++) round_block(x + m * K + b * BLOCK, std::min<long>(BLOCK, K - b * BLOCK), m * B + b, to);
}

// Of the thread that asks: memory that is kept for the next product.
static Rounded &rounded_here() {
    static thread_local Rounded kept;
    return kept;
}

// The rows of a product in 8 bits, by all threads together, or where they are few by each for itself: waiting for each
// other takes longer.
static const Rounded &round_together(const Product &p, Rounded &shared, int thread, int threads) {
    if (p.M * p.K <= NUMBERS_ALONE) {
        Rounded &own = rounded_here();
        own.resize(p.M, p.K);
        round_rows(p.x, 0, p.M, p.K, own);
        return own;
    }
    round_rows(p.x, p.M * thread / threads, p.M * (thread + 1) / threads, p.K, shared);
#pragma omp barrier
    return shared;
}

// 4 bits: a byte holds input i of the first four of eight and input i of the last four above it. Behind the quants of a
// block the steps, then the offsets, of its outputs in 16 bits.
struct PanelOfFour {
    static const bool HAS_OFFSETS = true;
    static const long QUANTS = LINE * GROUPS / 2, BYTES = QUANTS + 2 * PANEL * sizeof(uint16_t);

    // The quants of the inputs 4 g to 4 g + 3 of a block.
    static inline Bytes line(const uint8_t *block, int g) {
        return g % 2 ? high_halves(load_bytes(block + g / 2 * LINE)) : low_halves(load_bytes(block + g / 2 * LINE));
    }
    typedef SmallSums Sums;  // of at most 15 * 127 * 32
};

// 8 bits, 128 standing for 0; then the steps in 16 bits.
struct PanelOfEight {
    static const bool HAS_OFFSETS = false;
    static const long QUANTS = LINE * GROUPS, BYTES = QUANTS + PANEL * sizeof(uint16_t);

    static inline Bytes line(const uint8_t *block, int g) { return load_bytes(block + g * LINE); }
    typedef LargeSums Sums;
};

// What a stretch of a panel's blocks reads; `opened`: the quants of a block stand alone in full bytes, apart from the rest.
struct Part {
    const uint8_t *panel;
    const uint8_t *opened;
    long first, last;  // blocks
};

template <class Panel, int R, bool OPENED>
static inline void rows_of_part(const Part &p, const Rounded &x, long m, long B, Wide *sums) {
    for (long b = p.first; b < p.last; b++) {
        const uint8_t *block = p.panel + b * Panel::BYTES;
        const int8_t *inputs = x.quants.data() + (m * B + b) * BLOCK;
        typename Panel::Sums whole[R];
#pragma GCC unroll 2
        for (int pass = 0; pass < Panel::Sums::PASSES; pass++) {
#pragma GCC unroll 8
            for (int g = 0; g < GROUPS; g++) {
                const Bytes line = OPENED ? load_bytes(p.opened + ((b - p.first) * GROUPS + g) * LINE) : Panel::line(block, g);
                const Bytes ready = Panel::Sums::prepare(line, pass);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) whole[r].add(ready, inputs + r * B * BLOCK + g * FOUR, g == 0);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) whole[r].end(pass);
            asm volatile("" ::: "memory");  // inputs are read again in the next pass: there are no registers to keep them
        }
        const Wide steps = load_halves_of_panel(block + Panel::QUANTS);
        const Wide offsets = Panel::HAS_OFFSETS ? load_halves_of_panel(block + Panel::QUANTS + PANEL * sizeof(uint16_t)) : Wide();
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const long i = (m + r) * B + b;
            const Wide sum = whole[r].total(Panel::HAS_OFFSETS ? 0 : 128 * x.sums[i]);
            sums[r] = multiply_add(sum * spread_wide(x.scales[i]), steps, sums[r]);
            if (Panel::HAS_OFFSETS) sums[r] = multiply_add(spread_wide(x.masses[i]), offsets, sums[r]);
        }
    }
}

// R rows from m on, into the first `count` outputs at y.
template <class Panel, int R, bool OPENED>
static void side_of(const Part &p, const Rounded &x, long m, long B, float *y, long S, int count) {
    Wide sums[R];
    alignas(64) float held[PANEL];
    for (int r = 0; r < R; r++) {
        if (p.first == 0)
            sums[r] = Wide();
        else if (count == PANEL)
            sums[r] = load_wide(y + r * S);
        else
            memcpy(held, y + r * S, count * sizeof(float)), sums[r] = load_wide(held);
    }
    rows_of_part<Panel, R, OPENED>(p, x, m, B, sums);
    for (int r = 0; r < R; r++) {
        if (count == PANEL)
            store_wide(y + r * S, sums[r]);
        else
            store_wide(held, sums[r]), memcpy(y + r * S, held, count * sizeof(float));
    }
}

template <class Panel, bool OPENED>
static void any_side_of(int R, const Part &p, const Rounded &x, long m, long B, float *y, long S, int count) {
    switch (R) {
        case 1: return side_of<Panel, 1, OPENED>(p, x, m, B, y, S, count);
        case 2: return side_of<Panel, 2, OPENED>(p, x, m, B, y, S, count);
        case 3: return side_of<Panel, 3, OPENED>(p, x, m, B, y, S, count);
#if ROWS_AT_ONCE > 4
        case 4: return side_of<Panel, 4, OPENED>(p, x, m, B, y, S, count);
        case 5: return side_of<Panel, 5, OPENED>(p, x, m, B, y, S, count);
#endif
#if ROWS_AT_ONCE > 6
        case 6: return side_of<Panel, 6, OPENED>(p, x, m, B, y, S, count);
        case 7: return side_of<Panel, 7, OPENED>(p, x, m, B, y, S, count);
#endif
        default: return side_of<Panel, ROWS_AT_ONCE, OPENED>(p, x, m, B, y, S, count);
    }
}

// All rows of one part, as evenly in turns as can be.
template <class Panel, bool OPENED>
static void all_rows(const Part &p, const Rounded &x, const Product &to, long n) {
    const long turns = (to.M + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, B = blocks_of(to.K);
    const int count = (int)std::min<long>(PANEL, to.N - n);
    for (long t = 0; t < turns; t++) {
        const long m = to.M * t / turns, end = to.M * (t + 1) / turns;
        any_side_of<Panel, OPENED>((int)(end - m), p, x, m, B, to.y + m * to.S + n, to.S, count);
    }
}

// The share of thread `thread` of the products with rows that are rounded.
template <class Panel>
static void whole_products(const Rounded &x, const Product &p, int thread, int threads) {
    const long panels = (p.N + PANEL - 1) / PANEL, B = blocks_of(p.K), bytes = B * Panel::BYTES;
    const long at_once = OPEN_BYTES / (LINE * GROUPS);
    alignas(64) uint8_t opened[OPEN_BYTES];
    for (long i = panels * thread / threads; i < panels * (thread + 1) / threads; i++) {
        const uint8_t *panel = p.weights + i * bytes;
        if (p.M <= FEW) {
            all_rows<Panel, false>({panel, nullptr, 0, B}, x, p, i * PANEL);
            continue;
        }
        for (long b = 0; b < B; b += at_once) {
            const Part part = {panel, opened, b, std::min(B, b + at_once)};
            for (long each = b; each < part.last; each++)
                for (int g = 0; g < GROUPS; g++)
                    store_bytes(opened + ((each - b) * GROUPS + g) * LINE, Panel::line(panel + each * Panel::BYTES, g));
            all_rows<Panel, true>(part, x, p, i * PANEL);
        }
    }
}

static void share_in_integers(int bits, const Rounded &x, const Product &p, int thread, int threads) {
    bits == 4 ? whole_products<PanelOfFour>(x, p, thread, threads) : whole_products<PanelOfEight>(x, p, thread, threads);
}

static inline long panel_bytes(int bits, long K) {
    return blocks_of(K) * (bits == 4 ? PanelOfFour::BYTES : PanelOfEight::BYTES);
}
