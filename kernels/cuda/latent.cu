// Attention over rows that are keys and values at once: MLA, dense or over picked rows, and DeepSeek-V4's over a window and compressed rows.
//
// A row of queries sees up to two runs of pool rows, first those of a, then those of b; each is a range of a sequence's rows or a list of them. The keys are numbered through both, and
// split s has numbers s * split_rows and following. Parts are merged as those of paged attention.
//
// A block takes HEADS heads and a split: 16 rows at a time become f32 in shared memory; 128 threads make the scores of 16 rows and 8 heads, then each thread adds values of its columns.
// Plain arithmetic, no tensor cores: correct first. Bound by arithmetic from 8 heads on: 2 * heads * (WIDTH + VALUE) operations a row of WIDTH elements.
#include "rows.cuh"

#if ROW_TYPE == 0
typedef PlainRows<F32> Rows;
#elif ROW_TYPE == 1
typedef PlainRows<F16> Rows;
#elif ROW_TYPE == 2
typedef PlainRows<BF16> Rows;
#else
typedef PackedRows Rows;
#endif

#define THREADS 128
#define HEADS 8
#define TILE 16

// An odd stride: sixteen rows lie in different banks.
constexpr u32 STRIDE = WIDTH | 1;
constexpr u32 COLUMNS = (VALUE + THREADS - 1) / THREADS;

// A run of pool rows that a row of queries sees.
struct Run {
    const u8* pool;
    const u32* table;
    const u32* list;
    u32 first, count, page_rows;
    u64 page_bytes;

    __device__ __forceinline__ f32 element(u32 number, u32 i) const {
        const u32 row = list ? list[number] : first + number;
        const u8* page = pool + table[row / page_rows] * page_bytes;
        return Rows::element(page + data_at<Rows>(row % page_rows, WIDTH, ROPE),
                             page + scales_at<Rows>(row % page_rows, page_rows, WIDTH, ROPE), i, WIDTH, ROPE);
    }
};

// `run` is [rows, 4]: where the row's page table starts, the first pool row, how many, where its list starts (read if there are lists).
__device__ __forceinline__ Run run_of(const u8* pool, const u32* tables, const u32* lists, const u32* runs, u32 row, u32 page_rows, u64 page_bytes) {
    const u32* run = runs + 4 * u64(row);
    return {pool, tables + run[0], lists ? lists + run[3] : nullptr, run[1], run[2], page_rows, page_bytes};
}

KERNEL __launch_bounds__(THREADS)
latent_decode(const f32* q, const u8* pool_a, const u32* tables_a, const u32* lists_a, const u32* runs_a, u32 page_rows_a, u64 page_bytes_a,
              const u8* pool_b, const u32* tables_b, const u32* lists_b, const u32* runs_b, u32 page_rows_b, u64 page_bytes_b, f32* partial,
              f32* partial_ms, u32 heads, f32 scale, u32 split_rows, u32 splits) {
    DYNAMIC_SHARED(shared_bytes);
    f32* queries = reinterpret_cast<f32*>(shared_bytes);
    f32* tile = queries + HEADS * WIDTH;
    SHARED(f32, weights, HEADS * TILE);
    SHARED(f32, most, HEADS);
    SHARED(f32, total, HEADS);
    SHARED(f32, kept, HEADS);
    const u32 split = blockIdx.x, first_head = blockIdx.y * HEADS, row = blockIdx.z;
    const Run a = run_of(pool_a, tables_a, lists_a, runs_a, row, page_rows_a, page_bytes_a);
    const Run b = run_of(pool_b, tables_b, lists_b, runs_b, row, page_rows_b, page_bytes_b);
    const u32 all = a.count + b.count, start = split * split_rows, end = min(start + split_rows, all);
    if (start >= all) return;

    const u32 heads_here = min(heads - first_head, u32(HEADS));
    for (u32 i = threadIdx.x; i < HEADS * WIDTH; i += THREADS) {
        const u32 h = i / WIDTH;
        queries[i] = h < heads_here ? q[(u64(row) * heads + first_head + h) * WIDTH + i % WIDTH] * (scale * LOG2_E) : 0.0f;
    }
    if (threadIdx.x < HEADS) {
        most[threadIdx.x] = -INFINITE;
        total[threadIdx.x] = 0.0f;
    }
    f32 out[HEADS][COLUMNS];
#pragma unroll
    for (u32 h = 0; h < HEADS; h++) {
#pragma unroll
        for (u32 c = 0; c < COLUMNS; c++) out[h][c] = 0.0f;
    }
    for (u32 base = start; base < end; base += TILE) {
        const u32 here = min(end - base, u32(TILE));
        __syncthreads();
        for (u32 i = threadIdx.x; i < here * WIDTH; i += THREADS) {
            const u32 number = base + i / WIDTH, d = i % WIDTH;
            tile[i / WIDTH * STRIDE + d] = number < a.count ? a.element(number, d) : b.element(number - a.count, d);
        }
        __syncthreads();
        // Thread t: row t % 16, head t / 16.
        const u32 key = threadIdx.x % TILE, head = threadIdx.x / TILE;
        f32 score = -INFINITE;
        if (key < here) {
            score = 0.0f;
            for (u32 d = 0; d < WIDTH; d++) score = fmaf(queries[head * WIDTH + d], tile[key * STRIDE + d], score);
        }
        f32 now = score;
        for (u32 by = TILE / 2; by > 0; by /= 2) now = fmaxf(now, __shfl_xor_sync(FULL, now, by));
        const f32 before = most[head];
        now = fmaxf(now, before);
        const f32 weight = exp2f(score - now);
        f32 sum = weight;
        for (u32 by = TILE / 2; by > 0; by /= 2) sum += __shfl_xor_sync(FULL, sum, by);
        weights[head * TILE + key] = weight;
        // All sixteen have read the maximum before.
        __syncwarp();
        if (key == 0) {
            kept[head] = exp2f(before - now);
            most[head] = now;
            total[head] = fmaf(total[head], kept[head], sum);
        }
        __syncthreads();
#pragma unroll
        for (u32 h = 0; h < HEADS; h++) {
#pragma unroll
            for (u32 c = 0; c < COLUMNS; c++) out[h][c] *= kept[h];
        }
        for (u32 k = 0; k < here; k++) {
#pragma unroll
            for (u32 c = 0; c < COLUMNS; c++) {
                const u32 d = threadIdx.x + c * THREADS;
                const f32 value = d < VALUE ? tile[k * STRIDE + d] : 0.0f;
#pragma unroll
                for (u32 h = 0; h < HEADS; h++) out[h][c] = fmaf(weights[h * TILE + k], value, out[h][c]);
            }
        }
    }
#pragma unroll
    for (u32 h = 0; h < HEADS; h++) {
        if (h >= heads_here) break;
        const u64 at = (u64(row) * heads + first_head + h) * splits + split;
#pragma unroll
        for (u32 c = 0; c < COLUMNS; c++) {
            const u32 d = threadIdx.x + c * THREADS;
            if (d < VALUE) partial[at * VALUE + d] = out[h][c];
        }
        if (threadIdx.x == 0) {
            partial_ms[2 * at] = most[h];
            partial_ms[2 * at + 1] = total[h];
        }
    }
}

KERNEL __launch_bounds__(THREADS)
latent_merge(const f32* partial, const f32* partial_ms, const u32* runs_a, const u32* runs_b, const f32* sinks, f32* out, u32 heads, u32 split_rows, u32 splits) {
    const u32 head = blockIdx.x, row = blockIdx.y;
    const u32 end = (runs_a[4 * u64(row) + 2] + runs_b[4 * u64(row) + 2] + split_rows - 1) / split_rows;
    const u64 at = (u64(row) * heads + head) * splits;
    f32 most = sinks ? sinks[head] * LOG2_E : -INFINITE;
    for (u32 s = 0; s < end; s++) most = fmaxf(most, partial_ms[2 * (at + s)]);
    f32 total = sinks ? exp2f(sinks[head] * LOG2_E - most) : 0.0f;
    for (u32 s = 0; s < end; s++) total = fmaf(exp2f(partial_ms[2 * (at + s)] - most), partial_ms[2 * (at + s) + 1], total);
    for (u32 d = threadIdx.x; d < VALUE; d += THREADS) {
        f32 value = 0.0f;
        for (u32 s = 0; s < end; s++) value = fmaf(exp2f(partial_ms[2 * (at + s)] - most), partial[(at + s) * VALUE + d], value);
        // A row that sees nothing gives nothing.
        out[(u64(row) * heads + head) * VALUE + d] = end == 0 ? 0.0f : value / total;
    }
}

EXPORT(latent_decode)
EXPORT(latent_merge)
