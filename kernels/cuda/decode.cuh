// What kernels of attention of single rows over a paged pool share: the merge of splits.
#pragma once
#include "splits.cuh"

#if KV_TYPE == 0
typedef F32 E;
#elif KV_TYPE == 1
typedef F16 E;
#else
typedef BF16 E;
#endif
typedef E::Stored Stored;

KERNEL __launch_bounds__(MERGE_THREADS)
paged_merge(const f32* partial, const f32* partial_ms, const u32* positions, const f32* sinks, f32* out, u32 heads, u32 window,
            u32 split_tokens, u32 splits) {
    const u32 head = blockIdx.x, row = blockIdx.y;
    const u32 end_position = positions[row] + 1;
    const u32 start_position = window && end_position > window ? end_position - window : 0;
    const u32 first = start_position / split_tokens, end = (end_position - 1) / split_tokens + 1;
    const u64 at = (u64(row) * heads + head) * splits;
    const f32 sink = sinks ? sinks[head] * LOG2_E : -INFINITE;
    merge_splits<DIM_V>(partial + at * DIM_V, partial_ms + 2 * at, first, end, sink, out + (u64(row) * heads + head) * DIM_V);
}

EXPORT(paged_merge)
