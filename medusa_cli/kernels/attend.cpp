// Attention of a few tree nodes over a row's committed tokens and the nodes above each: new keys and values are written
// behind the committed ones, and only the columns in use are read.
//
// Letters: B rows, Q query heads, H key heads, N nodes, T columns a node may look at, E width of keys, F of values.

#include <cmath>
#include <vector>

#include "lanes.h"

static inline float dot(const float *one, const float *other, long size) {
    Floats sums = {};
    long e = 0;
    for (; e + LANES <= size; e += LANES) sums += load(one + e) * load(other + e);
    float total = sum(sums);
    for (; e < size; e++) total += one[e] * other[e];
    return total;
}

// Neighbours of both vectors added up: those of `a` in the even lanes, those of `b` in the odd ones.
static inline Floats add_pairs(Floats a, Floats b) {
    return __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14) +
           __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
}

// The same with pairs of lanes for lanes.
static inline Floats add_fours(Floats a, Floats b) {
    return __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13) +
           __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
}

// The sums of eight vectors, one in each lane.
static inline Floats sums_of(const Floats *v) {
    const Floats low = add_fours(add_pairs(v[0], v[1]), add_pairs(v[2], v[3]));
    const Floats high = add_fours(add_pairs(v[4], v[5]), add_pairs(v[6], v[7]));
    return __builtin_shufflevector(low, high, 0, 1, 2, 3, 8, 9, 10, 11) +
           __builtin_shufflevector(low, high, 4, 5, 6, 7, 12, 13, 14, 15);
}

// scores [T] of a query against keys [T, E]
static void score(const float *query, const float *keys, long count, long width, float scale, float *scores) {
    long t = 0;
    if (width % LANES == 0)
        for (; t + LANES <= count; t += LANES) {
            Floats sums[LANES] = {};
            for (long e = 0; e < width; e += LANES) {
                const Floats part = load(query + e);
#pragma GCC unroll 8
                for (int i = 0; i < LANES; i++) sums[i] += part * load(keys + (t + i) * width + e);
            }
            store(scores + t, sums_of(sums) * scale);
        }
    for (; t < count; t++) scores[t] = dot(query, keys + t * width, width) * scale;
}

// e^x for x <= 0, within 2 units of the last place (the reduction and polynomial of Cephes' expf).
static inline Floats exponential(Floats x) {
    const Floats least = spread(-87.0f);
    x = x < least ? least : x;
    const Floats shifted = x * 1.44269504088896341f - 0.5f;
    const Ints whole = __builtin_convertvector(shifted, Ints);  // towards 0: x <= 0, so this rounds to the nearest
    const Floats n = __builtin_convertvector(whole, Floats);
    const Floats r = x - n * 0.693359375f - n * -2.12194440e-4f;
    Floats p = spread(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    Floats scale;
    const Ints bits = (whole + 127) << 23;
    memcpy(&scale, &bits, sizeof scale);
    return p * scale;
}

// What a call is about; strides in floats over rows, heads and nodes, the last one of each tensor being 1.
struct Call {
    const float *query, *key, *value;
    long query_strides[3], key_strides[3], value_strides[3];
    float *keys, *values;  // of the layer's cache
    long keys_strides[2], values_strides[2];
    const int64_t *lengths;    // of the rows, without the nodes
    const uint8_t *ancestors;  // [X, N, N]
    const int64_t *depths;     // [X, N]
    long trees;                // X: 1 or B
    long window;               // 0: none
    float *out;                // [B, N, Q, F]
    long rows, query_heads, key_heads, nodes, width, value_width;
    float scale;
    int threads;
};

static void write_nodes(const Call &c, long b) {
    for (long h = 0; h < c.key_heads; h++)
        for (long n = 0; n < c.nodes; n++) {
            const long column = c.lengths[b] + n;
            memcpy(c.keys + b * c.keys_strides[0] + h * c.keys_strides[1] + column * c.width,
                   c.key + b * c.key_strides[0] + h * c.key_strides[1] + n * c.key_strides[2], c.width * sizeof(float));
            memcpy(c.values + b * c.values_strides[0] + h * c.values_strides[1] + column * c.value_width,
                   c.value + b * c.value_strides[0] + h * c.value_strides[1] + n * c.value_strides[2],
                   c.value_width * sizeof(float));
        }
}

// Scores become shares of the mass; columns from `first` on, padded with lanes that count for nothing.
static void softmax(float *scores, long count) {
    float top = -INFINITY;
    for (long t = 0; t < count; t++) top = std::fmax(top, scores[t]);
    const long padded = (count + LANES - 1) / LANES * LANES;
    for (long t = count; t < padded; t++) scores[t] = -INFINITY;
    Floats sums = {};
    for (long t = 0; t < padded; t += LANES) {
        const Floats raised = exponential(load(scores + t) - top);
        // what may not be looked at has no share at all
        const Floats shares = load(scores + t) == spread(-INFINITY) ? Floats{} : raised;
        store(scores + t, shares);
        sums += shares;
    }
    const float share = 1.0f / sum(sums);
    for (long t = 0; t < padded; t += LANES) store(scores + t, load(scores + t) * share);
}

// out [F] = shares [T] times values [T, F]
static void weigh(const float *shares, const float *values, long count, long width, float *out) {
    long f = 0;
    for (; f + 4 * LANES <= width; f += 4 * LANES) {
        Floats a = {}, b = {}, c = {}, d = {};
        for (long t = 0; t < count; t++) {
            const float *from = values + t * width + f;
            const Floats share = spread(shares[t]);
            a += share * load(from), b += share * load(from + LANES);
            c += share * load(from + 2 * LANES), d += share * load(from + 3 * LANES);
        }
        store(out + f, a), store(out + f + LANES, b), store(out + f + 2 * LANES, c), store(out + f + 3 * LANES, d);
    }
    for (; f < width; f++) {
        float total = 0;
        for (long t = 0; t < count; t++) total += shares[t] * values[t * width + f];
        out[f] = total;
    }
}

// All nodes of one query head of one row.
static void attend_head(const Call &c, long b, long q, std::vector<float> &scores) {
    const long h = q / (c.query_heads / c.key_heads), length = c.lengths[b], x = c.trees == 1 ? 0 : b;
    const uint8_t *ancestors = c.ancestors + x * c.nodes * c.nodes;
    const int64_t *depths = c.depths + x * c.nodes;
    const float *keys = c.keys + b * c.keys_strides[0] + h * c.keys_strides[1];
    const float *values = c.values + b * c.values_strides[0] + h * c.values_strides[1];
    scores.resize(length + c.nodes + LANES);
    for (long n = 0; n < c.nodes; n++) {
        const float *query = c.query + b * c.query_strides[0] + q * c.query_strides[1] + n * c.query_strides[2];
        // columns before `first` lie outside the window of this node
        const long position = length + depths[n];
        const long first = c.window && position >= c.window ? position - c.window + 1 : 0;
        const long start = first < length ? first : length, count = length + c.nodes - start;
        score(query, keys + start * c.width, count, c.width, c.scale, scores.data());
        for (long m = 0; m < c.nodes; m++) {
            const bool seen = ancestors[n * c.nodes + m] && (!c.window || depths[n] - depths[m] < c.window);
            if (!seen) scores[length + m - start] = -INFINITY;
        }
        softmax(scores.data(), count);
        weigh(scores.data(), values + start * c.value_width, count, c.value_width,
              c.out + ((b * c.nodes + n) * c.query_heads + q) * c.value_width);
    }
}

extern "C" void attend(const Call *call) {
    const Call &c = *call;
    for (long b = 0; b < c.rows; b++) write_nodes(c, b);
#pragma omp parallel num_threads(c.threads)
    {
        std::vector<float> scores;
#pragma omp for schedule(static)
        for (long task = 0; task < c.rows * c.query_heads; task++)
            attend_head(c, task / c.query_heads, task % c.query_heads, scores);
    }
}
