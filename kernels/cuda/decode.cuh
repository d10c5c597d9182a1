// What kernels of attention of single rows over a paged pool share: the merge of splits.
#pragma once
#include "common.cuh"

#if KV_TYPE == 0
typedef F32 E;
#elif KV_TYPE == 1
typedef F16 E;
#else
typedef BF16 E;
#endif
typedef E::Stored Stored;

#define MERGE_THREADS 128

KERNEL __launch_bounds__(MERGE_THREADS)
paged_merge(const f32* partial, const f32* partial_ms, const u32* positions, const f32* sinks, f32* out, u32 heads, u32 window,
            u32 split_tokens, u32 splits) {
    const u32 head = blockIdx.x, row = blockIdx.y;
    const u32 end_position = positions[row] + 1;
    const u32 start_position = window && end_position > window ? end_position - window : 0;
    const u32 first = start_position / split_tokens, end = (end_position - 1) / split_tokens + 1;
    const u64 at = (u64(row) * heads + head) * splits;
    f32 most = sinks ? sinks[head] * LOG2_E : -INFINITE;
    for (u32 s = first; s < end; s++) most = fmaxf(most, partial_ms[2 * (at + s)]);
    f32 total = sinks ? exp2f(sinks[head] * LOG2_E - most) : 0.0f;
    for (u32 s = first; s < end; s++) {
        total = fmaf(exp2f(partial_ms[2 * (at + s)] - most), partial_ms[2 * (at + s) + 1], total);
    }
    for (u32 d = threadIdx.x; d < DIM_V; d += MERGE_THREADS) {
        f32 value = 0.0f;
        for (u32 s = first; s < end; s++) {
            value = fmaf(exp2f(partial_ms[2 * (at + s)] - most), partial[(at + s) * DIM_V + d], value);
        }
        out[(u64(row) * heads + head) * DIM_V + d] = value / total;
    }
}

EXPORT(paged_merge)
