// What a compiled graph calls: products and attention by the names and in the manner of torch's C interface. Weights,
// the cache and the tree come as tensors of addresses, so that one graph serves all models of its shape and no call
// knows more than it is given.

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "attend.cpp"
#include "blocks.cpp"

// Rows of the two tensors of int64 numbers; kernels/graph.py writes them.
struct Weights {
    int64_t bits, stored, inputs, outputs;
};

struct Layer {
    int64_t keys, values, keys_strides[2], values_strides[2], window;
};

struct Place {
    int64_t rows, lengths, ancestors, depths, trees, threads;
    Layer layers[1];  // as many as the model has
};

#define TRY(call)                                                    \
    if (const AOTITorchError error = call; error != AOTI_TORCH_SUCCESS) return error;

template <class Pointer>
static AOTITorchError data_of(AtenTensorHandle tensor, Pointer **data) {
    void *found;
    TRY(aoti_torch_get_data_ptr(tensor, &found));
    *data = (Pointer *)found;
    return AOTI_TORCH_SUCCESS;
}

static AOTITorchError empty(int64_t dims, const int64_t *sizes, const int64_t *strides, AtenTensorHandle *made) {
    return aoti_torch_empty_strided(dims, sizes, strides, aoti_torch_dtype_float32(), aoti_torch_device_type_cpu(), 0, made);
}

// x [1, T, K], contiguous, to [1, T, N of all `count` weights from `first` on]
extern "C" AOTITorchError aoti_torch_cpu_medusa_linear(AtenTensorHandle x, AtenTensorHandle weights, int64_t first,
                                                       int64_t count, int64_t outputs, int64_t threads,
                                                       AtenTensorHandle *made) {
    float *from, *to;
    Weights *table;
    int64_t numbers;
    TRY(data_of(x, &from));
    TRY(data_of(weights, &table));
    TRY(aoti_torch_get_numel(x, &numbers));
    const int64_t rows = numbers / table[first].inputs;
    const int64_t sizes[] = {1, rows, outputs}, strides[] = {rows * outputs, outputs, 1};
    TRY(empty(3, sizes, strides, made));
    TRY(data_of(*made, &to));
    const bool in_integers = table[first].bits > IN_INTEGERS;  // of one model all are, or none
    Rounded &shared = rounded_here();
    if (in_integers) shared.resize(rows, table[first].inputs);
#pragma omp parallel num_threads((int)threads)
    {
        const int thread = omp_get_thread_num(), all = omp_get_num_threads();
        const auto product = [&](int64_t i, float *part) {
            return Product{from, rows, table[i].inputs, (const uint8_t *)table[i].stored, part, outputs, table[i].outputs};
        };
        const Rounded *rounded = in_integers ? &round_together(product(first, to), shared, thread, all) : nullptr;
        float *part = to;
        for (int64_t i = first; i < first + count; part += table[i++].outputs) {
            const int bits = (int)table[i].bits;
            in_integers ? share_in_integers(bits - IN_INTEGERS, *rounded, product(i, part), thread, all)
                        : share(bits, product(i, part), thread, all);
        }
    }
    return AOTI_TORCH_SUCCESS;
}

// query [1, Q, T, E], key and value [1, H, T, E], T nodes of all rows one after the other, to [1, T, Q, F]
extern "C" AOTITorchError aoti_torch_cpu_medusa_attend(AtenTensorHandle query, AtenTensorHandle key,
                                                       AtenTensorHandle value, AtenTensorHandle place, int64_t layer,
                                                       double scale, AtenTensorHandle *made) {
    Call c;
    Place *p;
    int64_t *sizes, *strides, *value_sizes;
    TRY(data_of(place, &p));
    TRY(data_of(query, (float **)&c.query));
    TRY(data_of(key, (float **)&c.key));
    TRY(data_of(value, (float **)&c.value));
    TRY(aoti_torch_get_sizes(query, &sizes));
    TRY(aoti_torch_get_sizes(value, &value_sizes));
    c.rows = p->rows, c.query_heads = sizes[1], c.key_heads = value_sizes[1], c.nodes = sizes[2] / p->rows;
    c.width = sizes[3], c.value_width = value_sizes[3];
    // rows stand behind each other in the dimension of nodes
    TRY(aoti_torch_get_strides(query, &strides));
    c.query_strides[0] = strides[2] * c.nodes, c.query_strides[1] = strides[1], c.query_strides[2] = strides[2];
    TRY(aoti_torch_get_strides(key, &strides));
    c.key_strides[0] = strides[2] * c.nodes, c.key_strides[1] = strides[1], c.key_strides[2] = strides[2];
    TRY(aoti_torch_get_strides(value, &strides));
    c.value_strides[0] = strides[2] * c.nodes, c.value_strides[1] = strides[1], c.value_strides[2] = strides[2];
    const Layer &l = p->layers[layer];
    c.keys = (float *)l.keys, c.values = (float *)l.values;
    c.keys_strides[0] = l.keys_strides[0], c.keys_strides[1] = l.keys_strides[1];
    c.values_strides[0] = l.values_strides[0], c.values_strides[1] = l.values_strides[1];
    c.lengths = (const int64_t *)p->lengths, c.ancestors = (const uint8_t *)p->ancestors;
    c.depths = (const int64_t *)p->depths, c.trees = p->trees, c.window = l.window;
    c.scale = (float)scale, c.threads = (int)p->threads;
    const int64_t T = c.rows * c.nodes, Q = c.query_heads, F = c.value_width;
    const int64_t out_sizes[] = {1, T, Q, F}, out_strides[] = {T * Q * F, Q * F, F, 1};
    TRY(empty(4, out_sizes, out_strides, made));
    TRY(data_of(*made, &c.out));
    attend(&c);
    return AOTI_TORCH_SUCCESS;
}
