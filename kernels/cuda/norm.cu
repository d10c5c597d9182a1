// RMS norm, plain, fused with the residual add, by heads, gated; layer norm.
//
// Memory-bound: a row is read once (twice through the cache) and written once. Statistics are f32. Thread t sums elements t, t + 256, ... in
// order, and the sums are added in a fixed tree, so a row's bits do not depend on its neighbours.
#include "heads.cuh"

#define NORM_THREADS 256

// The norm of a row by a whole block; `x` is read again by the thread that has read it before.
__device__ __forceinline__ void norm_row(const f32* x, const f32* weight, f32* out, u32 width, f32 eps, f32 offset, f32* scratch) {
    f32 squares = 0.0f;
    for (u32 i = threadIdx.x; i < width; i += NORM_THREADS) squares = fmaf(x[i], x[i], squares);
    f32 factor = 1.0f / sqrtf(block_sum(squares, scratch) / f32(width) + eps);
    for (u32 i = threadIdx.x; i < width; i += NORM_THREADS) out[i] = x[i] * factor * weight_at(weight, i, offset);
}

KERNEL __launch_bounds__(NORM_THREADS) rms_norm(const f32* x, const f32* weight, f32* out, u32 width, f32 eps, f32 offset) {
    SHARED(f32, scratch, 32);
    u64 row = u64(blockIdx.x) * width;
    norm_row(x + row, weight, out + row, width, eps, offset, scratch);
}

KERNEL __launch_bounds__(NORM_THREADS)
add_rms_norm(f32* x, const f32* delta, const f32* weight, f32* out, u32 width, f32 eps, f32 offset) {
    SHARED(f32, scratch, 32);
    u64 row = u64(blockIdx.x) * width;
    for (u32 i = threadIdx.x; i < width; i += NORM_THREADS) x[row + i] += delta[row + i];
    norm_row(x + row, weight, out + row, width, eps, offset, scratch);
}

// One warp a head.
KERNEL __launch_bounds__(128) head_rms_norm(f32* x, const f32* weight, u32 heads, u32 width, f32 eps, f32 offset) {
    u32 head = blockIdx.x * 4 + threadIdx.x / 32;
    if (head >= heads) return;
    x += u64(head) * width;
    f32 factor = head_factor(x, width, eps);
    for (u32 i = threadIdx.x % 32; i < width; i += 32) x[i] = x[i] * factor * weight_at(weight, i, offset);
}

KERNEL __launch_bounds__(128)
gated_rms_norm(const f32* x, const f32* gate, const f32* weight, f32* out, u32 heads, u32 width, f32 eps) {
    u32 head = blockIdx.x * 4 + threadIdx.x / 32;
    if (head >= heads) return;
    u64 at = u64(head) * width;
    f32 factor = head_factor(x + at, width, eps);
    for (u32 i = threadIdx.x % 32; i < width; i += 32) out[at + i] = x[at + i] * factor * weight[i] * silu(gate[at + i]);
}

KERNEL __launch_bounds__(NORM_THREADS) layer_norm(const f32* x, const f32* weight, const f32* bias, f32* out, u32 width, f32 eps) {
    SHARED(f32, scratch, 32);
    u64 row = u64(blockIdx.x) * width;
    x += row;
    out += row;
    f32 sum = 0.0f;
    for (u32 i = threadIdx.x; i < width; i += NORM_THREADS) sum += x[i];
    f32 mean = block_sum(sum, scratch) / f32(width);
    f32 squares = 0.0f;
    for (u32 i = threadIdx.x; i < width; i += NORM_THREADS) squares = fmaf(x[i] - mean, x[i] - mean, squares);
    f32 factor = 1.0f / sqrtf(block_sum(squares, scratch) / f32(width) + eps);
    for (u32 i = threadIdx.x; i < width; i += NORM_THREADS) out[i] = (x[i] - mean) * factor * weight[i] + bias[i];
}

EXPORT(rms_norm)
EXPORT(add_rms_norm)
EXPORT(head_rms_norm)
EXPORT(gated_rms_norm)
EXPORT(layer_norm)
