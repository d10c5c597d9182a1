// Attention over rows that are keys and values at once: MLA, dense or over picked rows, and DeepSeek-V4's over a window and compressed rows.
//
// A block takes HEADS heads and a split: 16 rows at a time become f32 in shared memory; 128 threads make the scores of 16 rows and 8 heads, then each thread adds values of its columns.
// Plain arithmetic, no tensor cores: for rows of f32, and for sizes that latent_tiles.cu does not take. Bound by arithmetic from 8 heads on: 2 * heads * (WIDTH + VALUE) operations a row of WIDTH elements.
#include "latent.cuh"

#define THREADS 128
#define HEADS 8
#define TILE 16

// An odd stride: sixteen rows lie in different banks.
constexpr u32 STRIDE = WIDTH | 1;
constexpr u32 COLUMNS = (VALUE + THREADS - 1) / THREADS;

// Element i of key `number` of a run.
__device__ __forceinline__ f32 element(const Run& run, u32 number, u32 i) {
    const u32 row = run.row(number), page = run.table[row / run.page_rows];
    return Rows::element(run.data(row, page), run.scales(row, page), i, WIDTH, ROPE);
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
            tile[i / WIDTH * STRIDE + d] = number < a.count ? element(a, number, d) : element(b, number - a.count, d);
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

EXPORT(latent_decode)
