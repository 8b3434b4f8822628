// Products in integers as their definition says them: one output of one row at a time, no registers, no panels.

#include <cmath>
#include <cstdint>

static const long BLOCK = 32;

// y [M, N] of x [M, K] and weights quants * step + offset: quants [N, K], steps and offsets [N, blocks].
extern "C" void multiply_plainly(const float *x, long M, long K, const int32_t *quants, const float *steps, const float *offsets,
                                 float *y, long N) {
    const long blocks = (K + BLOCK - 1) / BLOCK;
    for (long m = 0; m < M; m++)
        for (long n = 0; n < N; n++) {
            float total = 0;
            for (long b = 0; b < blocks; b++) {
                const long end = (b + 1) * BLOCK < K ? (b + 1) * BLOCK : K;
                float top = 0;
                for (long k = b * BLOCK; k < end; k++) top = std::fmax(top, std::fabs(x[m * K + k]));
                const float inverse = top > 1e-30f ? 127 / top : 0, scale = top / 127;
                int32_t products = 0, inputs = 0;
                for (long k = b * BLOCK; k < end; k++) {
                    const int32_t input = (int32_t)std::rint(x[m * K + k] * inverse);
                    products += input * quants[n * K + k], inputs += input;
                }
                const float worth = (float)products * scale;
                total = std::fma(worth, steps[n * blocks + b], total);
                if (offsets) {
                    const float mass = scale * (float)inputs;
                    total = std::fma(mass, offsets[n * blocks + b], total);
                }
            }
            y[m * N + n] = total;
        }
}
