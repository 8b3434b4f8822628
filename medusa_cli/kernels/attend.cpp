// Attention of tree nodes over a row's committed tokens and the nodes above each: new keys and values are written behind
// the committed ones, and only the columns in use are read. A node's numbers are those of its path read as a text.
//
// Letters: B rows, Q query heads, H key heads, N nodes, T columns a node may look at, E width of keys, F of values.

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "lanes.h"

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

// Lanes added in the order of sums_of: a score is the same alone and among others.
static inline float dot(const float *one, const float *other, long size) {
    Floats l = {};
    long e = 0;
    for (; e + LANES <= size; e += LANES) l = multiply_add(load(one + e), load(other + e), l);
    float total = ((l[0] + l[1]) + (l[2] + l[3])) + ((l[4] + l[5]) + (l[6] + l[7]));
    for (; e < size; e++) total = std::fma(one[e], other[e], total);
    return total;
}

// scores [T] of each of R queries against keys [T, E]
template <int R>
static void score(const float *const *queries, const float *keys, long count, long width, float scale, float *const *scores) {
    const int AT_ONCE = LANES / R;  // keys
    long t = 0;
    if (width % LANES == 0)
        for (; t + AT_ONCE <= count; t += AT_ONCE) {
            Floats sums[LANES] = {};
            for (long e = 0; e < width; e += LANES) {
                Floats parts[AT_ONCE];
#pragma GCC unroll 8
                for (int i = 0; i < AT_ONCE; i++) parts[i] = load(keys + (t + i) * width + e);
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) {
                    const Floats query = load(queries[r] + e);
#pragma GCC unroll 8
                    for (int i = 0; i < AT_ONCE; i++)
                        sums[r * AT_ONCE + i] = multiply_add(query, parts[i], sums[r * AT_ONCE + i]);
                }
            }
            float found[LANES];
            store(found, sums_of(sums) * scale);
            for (int r = 0; r < R; r++) memcpy(scores[r] + t, found + r * AT_ONCE, AT_ONCE * sizeof(float));
        }
    for (; t < count; t++)
        for (int r = 0; r < R; r++) scores[r][t] = dot(queries[r], keys + t * width, width) * scale;
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

static const int MOST_TOGETHER = 4;  // queries that go through the keys of one head side by side

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

// Scores become shares of the mass, padded with lanes that have none.
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

// Of each tree, whom each node sees among the nodes, those of smaller depth first: of a path, its text. The first `lead` of
// them are the nodes 0, 1, ...: with the committed columns one stretch; all of them are where the tree is a chain.
struct Paths {
    std::vector<long> lead;
    std::vector<std::vector<int>> rest;  // behind the lead

    void find(const Call &c) {
        lead.assign(c.trees * c.nodes, 0);
        if ((long)rest.size() < c.trees * c.nodes) rest.resize(c.trees * c.nodes);
        for (long i = 0; i < c.trees * c.nodes; i++) find(c, i / c.nodes, i % c.nodes);
    }

    void find(const Call &c, long x, long n) {
        const uint8_t *seen = c.ancestors + (x * c.nodes + n) * c.nodes;
        const int64_t *depths = c.depths + x * c.nodes;
        long &same = lead[x * c.nodes + n];
        while (same < c.nodes && seen[same] && depths[same] == same) same++;
        std::vector<int> &others = rest[x * c.nodes + n];
        others.clear();
        for (const uint8_t *next = seen + same; (next = (const uint8_t *)memchr(next, 1, seen + c.nodes - next)); next++)
            others.push_back((int)(next - seen));
        std::stable_sort(others.begin(), others.end(), [&](int one, int other) { return depths[one] < depths[other]; });
    }
};

// What one query looks at: the columns from `first` to `end` - 1, then single ones. In this order they are its text,
// whatever the tree: so its sums are those of the same text without one.
struct Sight {
    const float *query;
    float *out, *scores;
    long first, end;
    const int *rest;  // nodes
    long count;       // of these

    long size() const { return end - first + count; }
};

static Sight sight_of(const Call &c, const Paths &paths, long b, long q, long n, float *scores) {
    const long x = c.trees == 1 ? 0 : b, i = x * c.nodes + n, length = c.lengths[b], position = length + c.depths[i];
    const std::vector<int> &rest = paths.rest[i];
    // what lies before `first` is outside the window of this node
    const long first = c.window && position >= c.window ? position - c.window + 1 : 0, end = length + paths.lead[i];
    long skipped = 0;
    while (skipped < (long)rest.size() && length + c.depths[x * c.nodes + rest[skipped]] < first) skipped++;
    return {c.query + b * c.query_strides[0] + q * c.query_strides[1] + n * c.query_strides[2],
            c.out + ((b * c.nodes + n) * c.query_heads + q) * c.value_width,
            scores,
            std::min(first, end),
            end,
            rest.data() + skipped,
            (long)rest.size() - skipped};
}

// out [F] of each of R queries: shares times values. What all see is read once for all.
template <int R>
static void weigh(const Sight *sights, long first, long end, const float *values, const float *nodes, long width) {
    const int AT_ONCE = R == 1 ? 4 : R == 2 ? 4 : 2;  // registers of values
    long f = 0;
    for (; f + LANES <= width; f += f + AT_ONCE * LANES <= width ? AT_ONCE * LANES : LANES) {
        const int parts = f + AT_ONCE * LANES <= width ? AT_ONCE : 1;
        const auto over = [&](auto fixed) {
            constexpr int P = decltype(fixed)::value;
            Floats sums[R][P] = {};
            const auto add = [&](int r, long t, const float *from) {
                const Floats share = spread(sights[r].scores[t]);
#pragma GCC unroll 4
                for (int p = 0; p < P; p++) sums[r][p] = multiply_add(share, load(from + p * LANES), sums[r][p]);
            };
            for (int r = 0; r < R; r++)
                for (long t = sights[r].first; t < first; t++) add(r, t - sights[r].first, values + t * width + f);
            for (long t = first; t < end; t++)
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) add(r, t - sights[r].first, values + t * width + f);
            for (int r = 0; r < R; r++) {
                const Sight &s = sights[r];
                for (long t = end; t < s.end; t++) add(r, t - s.first, values + t * width + f);
                for (long i = 0; i < s.count; i++) add(r, s.end - s.first + i, nodes + s.rest[i] * width + f);
                for (int p = 0; p < P; p++) store(s.out + f + p * LANES, sums[r][p]);
            }
        };
        parts == 1 ? over(std::integral_constant<int, 1>()) : over(std::integral_constant<int, AT_ONCE>());
    }
    for (; f < width; f++)
        for (int r = 0; r < R; r++) {
            const Sight &s = sights[r];
            float total = 0;
            for (long t = s.first; t < s.end; t++) total = std::fma(s.scores[t - s.first], values[t * width + f], total);
            for (long i = 0; i < s.count; i++)
                total = std::fma(s.scores[s.end - s.first + i], nodes[s.rest[i] * width + f], total);
            s.out[f] = total;
        }
}

// R queries of one row and key head.
template <int R>
static void attend_together(const Call &c, long b, long h, const Sight *sights) {
    const float *keys = c.keys + b * c.keys_strides[0] + h * c.keys_strides[1], *new_keys = keys + c.lengths[b] * c.width;
    const float *values = c.values + b * c.values_strides[0] + h * c.values_strides[1];
    long first = sights[0].first, end = sights[0].end;  // columns that all see
    for (int r = 1; r < R; r++) first = std::max(first, sights[r].first), end = std::min(end, sights[r].end);
    if (first > end) {  // windows that don't meet
        for (int r = 0; r < R; r++) attend_together<1>(c, b, h, sights + r);
        return;
    }
    const float *queries[R];
    float *scores[R];
    for (int r = 0; r < R; r++) queries[r] = sights[r].query, scores[r] = sights[r].scores + first - sights[r].first;
    score<R>(queries, keys + first * c.width, end - first, c.width, c.scale, scores);
    for (int r = 0; r < R; r++) {
        const Sight &s = sights[r];
        float *before = s.scores, *behind = s.scores + end - s.first, *alone = s.scores + s.end - s.first;
        score<1>(&s.query, keys + s.first * c.width, first - s.first, c.width, c.scale, &before);
        score<1>(&s.query, keys + end * c.width, s.end - end, c.width, c.scale, &behind);
        for (long i = 0; i < s.count; i++) alone[i] = dot(s.query, new_keys + s.rest[i] * c.width, c.width) * c.scale;
        softmax(s.scores, s.size());
    }
    weigh<R>(sights, first, end, values, values + c.lengths[b] * c.value_width, c.value_width);
}

// Queries `from` to `to` - 1 of those that look at one key head of a row: all heads of the first node, of the next, ...
static void attend_some(const Call &c, const Paths &paths, long b, long h, long from, long to, std::vector<float> &scores) {
    const long heads = c.query_heads / c.key_heads, most = c.lengths[b] + c.nodes + LANES;
    if ((long)scores.size() < MOST_TOGETHER * most) scores.resize(MOST_TOGETHER * most);
    Sight sights[MOST_TOGETHER];
    for (long i = from; i < to; i++)
        sights[i - from] = sight_of(c, paths, b, h * heads + i % heads, i / heads, scores.data() + (i - from) * most);
    const Sight *next = sights;
    long left = to - from;
    for (; left >= 4; left -= 4, next += 4) attend_together<4>(c, b, h, next);
    for (; left >= 2; left -= 2, next += 2) attend_together<2>(c, b, h, next);
    for (; left >= 1; left -= 1, next += 1) attend_together<1>(c, b, h, next);
}

extern "C" void attend(const Call *call) {
    const Call &c = *call;
    for (long b = 0; b < c.rows; b++) write_nodes(c, b);
    static thread_local Paths kept;  // every layer asks: memory is taken once
    Paths &paths = kept;
    paths.find(c);
    const long queries = c.nodes * (c.query_heads / c.key_heads), shared = c.rows * c.key_heads;
    long together = MOST_TOGETHER;  // fewer where threads would get shares of unlike size
    while (together > 1 && shared * ((queries + together - 1) / together) < 4 * c.threads) together /= 2;
    const long tasks = (queries + together - 1) / together;
#pragma omp parallel num_threads(c.threads)
    {
        std::vector<float> scores;
#pragma omp for schedule(static, 1)  // neighbours look at about as many columns
        for (long task = 0; task < shared * tasks; task++) {
            const long i = task / tasks, from = task % tasks * together;
            attend_some(c, paths, i / c.key_heads, i % c.key_heads, from, std::min(queries, from + together), scores);
        }
    }
}
