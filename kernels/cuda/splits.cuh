// Attention in splits: blocks leave for each split the sums of a head's values, the largest score and the sum of the weights, and these are merged.
#pragma once
#include "common.cuh"

#define MERGE_THREADS 256
#define MERGE_WARPS 8

// Merges the splits `first` to `end` of a head, by a block: `sums` is [splits, DIM], `ms` [splits, 2]. `sink` is a score more (in powers of two) that has no value, or minus infinity.
//
// Bound by memory, and with few heads by latency: so each warp adds every eighth split, and the factors of as many splits as there are threads are made before. Order of accumulation: a warp's splits, then the warps.
template <u32 DIM>
__device__ __forceinline__ void merge_splits(const f32* sums, const f32* ms, u32 first, u32 end, f32 sink, f32* out) {
    constexpr u32 COLUMNS = (DIM + 31) / 32;
    SHARED(f32, scratch, 32);
    SHARED(f32, factors, MERGE_THREADS);
    SHARED(f32, parts, MERGE_WARPS * DIM);
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    f32 most = sink;
    for (u32 s = first + threadIdx.x; s < end; s += MERGE_THREADS) most = fmaxf(most, ms[2 * s]);
    most = block_max(most, scratch);
    f32 values[COLUMNS], total = 0.0f;
#pragma unroll
    for (u32 c = 0; c < COLUMNS; c++) values[c] = 0.0f;
    for (u32 base = first; base < end; base += MERGE_THREADS) {
        const u32 own = base + threadIdx.x, here = min(end - base, u32(MERGE_THREADS));
        if (own < end) {
            factors[threadIdx.x] = exp2f(ms[2 * own] - most);
            total = fmaf(factors[threadIdx.x], ms[2 * own + 1], total);
        }
        __syncthreads();
#pragma unroll 4
        for (u32 s = warp; s < here; s += MERGE_WARPS) {
#pragma unroll
            for (u32 c = 0; c < COLUMNS; c++) {
                const u32 d = lane + 32 * c;
                if (d < DIM) values[c] = fmaf(factors[s], sums[u64(base + s) * DIM + d], values[c]);
            }
        }
        __syncthreads();
    }
    total = block_sum(total, scratch);
    if (sink != -INFINITE) total += exp2f(sink - most);
#pragma unroll
    for (u32 c = 0; c < COLUMNS; c++) {
        if (lane + 32 * c < DIM) parts[warp * DIM + lane + 32 * c] = values[c];
    }
    __syncthreads();
    for (u32 d = threadIdx.x; d < DIM; d += MERGE_THREADS) {
        f32 value = 0.0f;
        for (u32 w = 0; w < MERGE_WARPS; w++) value += parts[w * DIM + d];
        // A row that sees nothing gives nothing.
        out[d] = first == end ? 0.0f : value / total;
    }
}
