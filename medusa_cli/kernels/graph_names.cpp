// The names that compiled graphs call, and nothing else: graph.cpp's functions behind addresses that are set once.
//
// Graphs find their functions among the names of the whole process. A library that puts its own names there puts those
// of all that it is linked with there too, and torch's would then stand before those of other libraries' own parts.

#include <cstdint>

typedef int32_t (*Linear)(void *, void *, int64_t, int64_t, int64_t, int64_t, void **);
typedef int32_t (*Attend)(void *, void *, void *, void *, int64_t, double, void **);

static Linear linear;
static Attend attend;

extern "C" void set_functions(Linear for_linear, Attend for_attend) {
    linear = for_linear;
    attend = for_attend;
}

extern "C" int32_t aoti_torch_cpu_medusa_linear(void *x, void *weights, int64_t first, int64_t count, int64_t outputs,
                                                int64_t threads, void **made) {
    return linear(x, weights, first, count, outputs, threads, made);
}

extern "C" int32_t aoti_torch_cpu_medusa_attend(void *query, void *key, void *value, void *place, int64_t layer,
                                                double scale, void **made) {
    return attend(query, key, value, place, layer, scale, made);
}
