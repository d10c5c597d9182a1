// What kernels of attention over rows that are keys and values at once share: the runs of rows that a row of queries sees, and the merge of splits.
//
// A row of queries sees up to two runs of pool rows, first those of a, then those of b; each is a range of a sequence's rows or a list of them. The keys are numbered through both, and
// split s has numbers s * split_rows and following. Parts are merged as those of paged attention.
#pragma once
#include "rows.cuh"
#include "splits.cuh"

#if ROW_TYPE == 0
typedef PlainRows<F32> Rows;
#elif ROW_TYPE == 1
typedef PlainRows<F16> Rows;
#elif ROW_TYPE == 2
typedef PlainRows<BF16> Rows;
#else
typedef PackedRows Rows;
#endif

// A run of pool rows that a row of queries sees.
struct Run {
    const u8* pool;
    const u32* table;
    const u32* list;
    u32 first, count, page_rows;
    u64 page_bytes;

    // The sequence's row that key `number` of the run is.
    __device__ __forceinline__ u32 row(u32 number) const { return list ? list[number] : first + number; }
    __device__ __forceinline__ const u8* data(u32 row, u32 page) const {
        return pool + page * page_bytes + data_at<Rows>(row % page_rows, WIDTH, ROPE);
    }
    __device__ __forceinline__ const u8* scales(u32 row, u32 page) const {
        return pool + page * page_bytes + scales_at<Rows>(row % page_rows, page_rows, WIDTH, ROPE);
    }
};

// `run` is [rows, 4]: where the row's page table starts, the first pool row, how many, where its list starts (read if there are lists).
__device__ __forceinline__ Run run_of(const u8* pool, const u32* tables, const u32* lists, const u32* runs, u32 row, u32 page_rows, u64 page_bytes) {
    const u32* run = runs + 4 * u64(row);
    return {pool, tables + run[0], lists ? lists + run[3] : nullptr, run[1], run[2], page_rows, page_bytes};
}

KERNEL __launch_bounds__(MERGE_THREADS)
latent_merge(const f32* partial, const f32* partial_ms, const u32* runs_a, const u32* runs_b, const f32* sinks, f32* out, u32 heads, u32 split_rows, u32 splits) {
    const u32 head = blockIdx.x, row = blockIdx.y;
    const u32 end = (runs_a[4 * u64(row) + 2] + runs_b[4 * u64(row) + 2] + split_rows - 1) / split_rows;
    const u64 at = (u64(row) * heads + head) * splits;
    const f32 sink = sinks ? sinks[head] * LOG2_E : -INFINITE;
    merge_splits<VALUE>(partial + at * VALUE, partial_ms + 2 * at, 0, end, sink, out + (u64(row) * heads + head) * VALUE);
}

EXPORT(latent_merge)
