// What kernels that work on heads share.
#pragma once
#include "common.cuh"

__device__ __forceinline__ f32 weight_at(const f32* weight, u32 i, f32 offset) { return weight ? weight[i] + offset : 1.0f; }

// The factor of a head's RMS norm, by a warp.
__device__ __forceinline__ f32 head_factor(const f32* x, u32 width, f32 eps) {
    f32 squares = 0.0f;
    for (u32 i = threadIdx.x % 32; i < width; i += 32) squares = fmaf(x[i], x[i], squares);
    return 1.0f / sqrtf(warp_sum(squares) / f32(width) + eps);
}
