// Products, sums and gathers, element by element. Memory-bound: each array once.
#include "common.cuh"

// Calls `body` with each index below `len`, whatever the grid.
template <class Body>
__device__ __forceinline__ void each(u64 len, Body body) {
    u64 step = u64(gridDim.x) * blockDim.x;
    for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < len; i += step) body(i);
}

KERNEL __launch_bounds__(256) silu_mul(f32* gate, const f32* up, u64 len) {
    each(len, [=](u64 i) { gate[i] = silu(gate[i]) * up[i]; });
}

KERNEL __launch_bounds__(256) silu_mul_clamped(f32* gate, const f32* up, u64 len, f32 limit) {
    each(len, [=](u64 i) { gate[i] = silu(fminf(gate[i], limit)) * fminf(fmaxf(up[i], -limit), limit); });
}

KERNEL __launch_bounds__(256) gpt_oss_mul(f32* gate, const f32* up, u64 len, f32 alpha, f32 limit) {
    each(len, [=](u64 i) {
        f32 g = fminf(gate[i], limit);
        gate[i] = (fminf(fmaxf(up[i], -limit), limit) + 1.0f) * (g * sigmoid(g * alpha));
    });
}

KERNEL __launch_bounds__(256) sigmoid_mul(f32* x, const f32* gate, u64 len) {
    each(len, [=](u64 i) { x[i] *= sigmoid(gate[i]); });
}

KERNEL __launch_bounds__(256) add(f32* x, const f32* delta, u64 len) {
    each(len, [=](u64 i) { x[i] += delta[i]; });
}

KERNEL __launch_bounds__(256) fill(f32* x, f32 value, u64 len) {
    each(len, [=](u64 i) { x[i] = value; });
}

KERNEL __launch_bounds__(256) gather_rows(const f32* x, const u32* indices, f32* out, u32 width, u32 rows) {
    for (u32 row = blockIdx.x; row < rows; row += gridDim.x) {
        const f32* from = x + u64(indices[row]) * width;
        f32* to = out + u64(row) * width;
        for (u32 i = threadIdx.x; i < width; i += blockDim.x) to[i] = from[i];
    }
}

KERNEL __launch_bounds__(256) scale(f32* x, f32 factor, u64 len) {
    each(len, [=](u64 i) { x[i] *= factor; });
}

KERNEL __launch_bounds__(256) copy_columns(const f32* from, f32* to, u64 from_stride, u64 to_stride, u32 width, u32 rows) {
    each(u64(rows) * width, [=](u64 i) { to[i / width * to_stride + i % width] = from[i / width * from_stride + i % width]; });
}

EXPORT(silu_mul)
EXPORT(silu_mul_clamped)
EXPORT(gpt_oss_mul)
EXPORT(sigmoid_mul)
EXPORT(add)
EXPORT(fill)
EXPORT(gather_rows)
EXPORT(scale)
EXPORT(copy_columns)
