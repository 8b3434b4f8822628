// Products of many rows: the weights of PANEL outputs are opened into the nearest cache, a span of inputs at a time, and go
// through all rows from there. An output is a lane here, so no lanes are summed up at the end.
//
// Letters: M input rows, K inputs, N outputs, as in blocks.cpp.

#pragma once

#include <vector>

#include "lanes.h"
#include "wide.h"

static const int SIDE_ROWS = 6;   // rows of a tile: their sums, a panel's weights and an input fill the registers of AVX2
static const long SPAN = 256;     // inputs that are opened at once: 16 KiB of weights
static const long APART = SPAN + 2;  // numbers between rows: inputs of one place lie in different banks of the cache
static const long MOST_AT_ONCE = 192;  // rows gone through before the next span: their inputs stay in the second cache

// Four columns of eight rows, APART apart, become four rows of PANEL.
static inline void turn(const float *from, float *to) {
    Floats rows[4], pairs[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) rows[i] = load_halves(from + i * APART, from + (i + 4) * APART);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        pairs[i] = __builtin_shuffle(rows[2 * i], rows[2 * i + 1], (Ints){0, 8, 1, 9, 4, 12, 5, 13});
        pairs[i + 2] = __builtin_shuffle(rows[2 * i], rows[2 * i + 1], (Ints){2, 10, 3, 11, 6, 14, 7, 15});
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        store(to + 2 * i * PANEL, __builtin_shuffle(pairs[2 * i], pairs[2 * i + 1], (Ints){0, 1, 8, 9, 4, 5, 12, 13}));
        store(to + (2 * i + 1) * PANEL, __builtin_shuffle(pairs[2 * i], pairs[2 * i + 1], (Ints){2, 3, 10, 11, 6, 7, 14, 15}));
    }
}

// Weights of outputs n to n + PANEL - 1 and inputs k to `end` - 1, [inputs, PANEL]; any numbers for outputs past the last.
template <class Grid>
static void open_panel(const Product &p, long n, long k, long end, float *panel) {
    float rows[LANES * APART];
    for (int half = 0; half < PANEL && n + half < p.N; half += LANES) {
        for (long o = 0; o < LANES && n + half + o < p.N; o++) {
            const uint8_t *group = p.weights + (n + half + o) / GROUP * Grid::group_bytes(p.K);
            Grid::open(group, p.K, (int)((n + half + o) % GROUP), k, end, rows + o * APART);
        }
        for (long i = 0; i < end - k; i += 4) turn(rows + i, panel + i * PANEL + half);
    }
}

// R rows of x, APART apart, times an opened panel, into the first `count` outputs at y; later spans are added.
template <int R>
static inline void side(const float *x, const float *panel, long inputs, float *y, long S, int count, bool later) {
    Floats sums[R][2] = {};
    for (long k = 0; k < inputs; k++) {
        const Floats low = load(panel + k * PANEL), high = load(panel + k * PANEL + LANES);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            const Floats input = spread(x[r * APART + k]);
            sums[r][0] = multiply_add(low, input, sums[r][0]);
            sums[r][1] = multiply_add(high, input, sums[r][1]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
        float *to = y + r * S;
        if (count == PANEL) {
            store(to, later ? load(to) + sums[r][0] : sums[r][0]);
            store(to + LANES, later ? load(to + LANES) + sums[r][1] : sums[r][1]);
        } else {
            for (int o = 0; o < count; o++) {
                const float sum = sums[r][o / LANES][o % LANES];
                to[o] = later ? to[o] + sum : sum;
            }
        }
    }
}

static inline void any_side(int R, const float *x, const float *panel, long inputs, float *y, long S, int count, bool later) {
    switch (R) {
        case 1: return side<1>(x, panel, inputs, y, S, count, later);
        case 2: return side<2>(x, panel, inputs, y, S, count, later);
        case 3: return side<3>(x, panel, inputs, y, S, count, later);
        case 4: return side<4>(x, panel, inputs, y, S, count, later);
        case 5: return side<5>(x, panel, inputs, y, S, count, later);
        default: return side<SIDE_ROWS>(x, panel, inputs, y, S, count, later);
    }
}

// Inputs k to `end` - 1 of rows first to `last` - 1, APART apart: a tile's rows lie beside each other.
static void lay_side_by_side(const Product &p, long first, long last, long k, long end, float *rows) {
    for (long m = first; m < last; m++) memcpy(rows + (m - first) * APART, p.x + m * p.K + k, (end - k) * sizeof(float));
}

// The share of thread `thread`.
template <class Grid>
static void many_products(const Product &p, int thread, int threads) {
    const long panels = (p.N + PANEL - 1) / PANEL, from = panels * thread / threads, to = panels * (thread + 1) / threads;
    std::vector<float> rows(MOST_AT_ONCE * APART);
    alignas(64) float panel[SPAN * PANEL];
    for (long first = 0; first < p.M; first += MOST_AT_ONCE) {
        const long last = first + MOST_AT_ONCE < p.M ? first + MOST_AT_ONCE : p.M;
        for (long k = 0; k < p.K; k += SPAN) {
            const long end = k + SPAN < p.K ? k + SPAN : p.K;
            lay_side_by_side(p, first, last, k, end, rows.data());
            for (long n = from * PANEL; n < to * PANEL; n += PANEL) {
                open_panel<Grid>(p, n, k, end, panel);
                const int count = (int)(p.N - n < PANEL ? p.N - n : PANEL);
                for (long m = first; m < last; m += SIDE_ROWS) {
                    const int R = (int)(last - m < SIDE_ROWS ? last - m : SIDE_ROWS);
                    any_side(R, rows.data() + (m - first) * APART, panel, end - k, p.y + m * p.S + n, p.S, count, k > 0);
                }
            }
        }
    }
}
