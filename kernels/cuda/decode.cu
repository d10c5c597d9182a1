// Attention of single rows over a paged pool: keys and values are split among blocks, and a second kernel merges the parts.
//
// Bound by memory: the keys and values that a row sees are read once for the GROUP query heads of a block. A key is read by LANES lanes, 16 bytes each,
// so a warp reads 32 / LANES keys at a time; scores are summed over these lanes by shuffles. Every group of lanes keeps a softmax of its own, and the block
// merges them at its end through shared memory.
//
// Order of accumulation: split s holds the positions from s * split_tokens on; the key at offset i of a split belongs to group i % SUBS of it; groups and splits
// are merged in order. So a row's result depends on its position and split_tokens alone.
#include "decode.cuh"

#define THREADS 128

constexpr u32 VEC = 16 / sizeof(Stored);
__device__ constexpr u32 lanes_for(u32 dim) {
    u32 lanes = 1;
    while (lanes < 32 && lanes * VEC < dim) lanes *= 2;
    return lanes;
}
// Lanes that read a key together.
constexpr u32 LANES = lanes_for(DIM_K > DIM_V ? DIM_K : DIM_V);
// Groups of lanes in a block.
constexpr u32 SUBS = THREADS / LANES;
// Times VEC elements of a key or value that a lane holds.
constexpr u32 K_CHUNKS = (DIM_K + LANES * VEC - 1) / (LANES * VEC);
constexpr u32 V_CHUNKS = (DIM_V + LANES * VEC - 1) / (LANES * VEC);
// Keys that a group of lanes has under way at once.
constexpr u32 BATCH = GROUP > 4 || K_CHUNKS > 1 ? 2 : 4;

// What a lane holds of a key or value: chunk c is elements (c * LANES + lane) * VEC and following.
template <u32 DIM, u32 CHUNKS>
struct Piece {
    Stored x[CHUNKS][VEC];

    __device__ __forceinline__ void load(const Stored* row, u32 lane) {
#pragma unroll
        for (u32 c = 0; c < CHUNKS; c++) {
            u32 at = (c * LANES + lane) * VEC;
            if constexpr (DIM % VEC == 0) {
                uint4 raw = make_uint4(0, 0, 0, 0);
                if (at < DIM) raw = *reinterpret_cast<const uint4*>(row + at);
                const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
                for (u32 i = 0; i < VEC; i++) {
                    if constexpr (sizeof(Stored) == 2) {
                        x[c][i] = Stored(words[i / 2] >> (i % 2 * 16));
                    } else {
                        x[c][i] = __uint_as_float(words[i]);
                    }
                }
            } else {
#pragma unroll
                for (u32 i = 0; i < VEC; i++) x[c][i] = at + i < DIM ? row[at + i] : Stored(0);
            }
        }
    }
};

KERNEL __launch_bounds__(THREADS)
paged_decode(const f32* q, const Stored* keys, const Stored* values, const u32* tables, const u32* row_tables, const u32* positions,
             f32* partial, f32* partial_ms, u32 heads, u32 kv_heads, u32 page_tokens, u32 window, f32 scale, u32 split_tokens, u32 splits) {
    SHARED(f32, maxima, SUBS * GROUP);
    SHARED(f32, sums, SUBS * GROUP);
    SHARED(f32, outs, SUBS * GROUP * DIM_V);
    const u32 split = blockIdx.x, row = blockIdx.z, first_head = blockIdx.y * GROUP;
    const u32 end_position = positions[row] + 1;
    const u32 start_position = window && end_position > window ? end_position - window : 0;
    const u32 split_start = split * split_tokens;
    const u32 split_end = min(split_start + split_tokens, end_position);
    if (split_start >= end_position || split_start + split_tokens <= start_position) return;

    const u32 lane = threadIdx.x % LANES, sub = threadIdx.x / LANES;
    const u32 kv_head = first_head / (heads / kv_heads);
    const u32* table = tables + row_tables[row];

    f32 query[GROUP][K_CHUNKS][VEC], out[GROUP][V_CHUNKS][VEC], most[GROUP], sum[GROUP];
#pragma unroll
    for (u32 g = 0; g < GROUP; g++) {
        most[g] = -INFINITE;
        sum[g] = 0.0f;
        const f32* head = q + (u64(row) * heads + first_head + g) * DIM_K;
#pragma unroll
        for (u32 c = 0; c < K_CHUNKS; c++) {
#pragma unroll
            for (u32 i = 0; i < VEC; i++) {
                u32 d = (c * LANES + lane) * VEC + i;
                query[g][c][i] = d < DIM_K ? head[d] * (scale * LOG2_E) : 0.0f;
            }
        }
#pragma unroll
        for (u32 c = 0; c < V_CHUNKS; c++) {
#pragma unroll
            for (u32 i = 0; i < VEC; i++) out[g][c][i] = 0.0f;
        }
    }

    // Whole steps before the window are left out; they would change nothing.
    const u32 step = SUBS * BATCH;
    const u32 skipped = start_position > split_start ? (start_position - split_start) / step * step : 0;
    // The bound is the same for all lanes of the block, so that shuffles meet.
    for (u32 base = split_start + skipped; base < split_end; base += step) {
        Piece<DIM_K, K_CHUNKS> key[BATCH];
        Piece<DIM_V, V_CHUNKS> value[BATCH];
        bool seen[BATCH];
#pragma unroll
        for (u32 j = 0; j < BATCH; j++) {
            const u32 position = base + j * SUBS + sub;
            seen[j] = position >= start_position && position < split_end;
            if (seen[j]) {
                const u64 page = table[position / page_tokens];
                const u64 at = (page * kv_heads + kv_head) * page_tokens + position % page_tokens;
                key[j].load(keys + at * DIM_K, lane);
                value[j].load(values + at * DIM_V, lane);
            }
        }
        f32 score[GROUP][BATCH];
#pragma unroll
        for (u32 j = 0; j < BATCH; j++) {
#pragma unroll
            for (u32 g = 0; g < GROUP; g++) {
                f32 dot = 0.0f;
                if (seen[j]) {
#pragma unroll
                    for (u32 c = 0; c < K_CHUNKS; c++) {
#pragma unroll
                        for (u32 i = 0; i < VEC; i++) dot = fmaf(query[g][c][i], E::load(key[j].x[c][i]), dot);
                    }
                }
#pragma unroll
                for (u32 by = LANES / 2; by > 0; by /= 2) dot += __shfl_xor_sync(FULL, dot, by);
                score[g][j] = seen[j] ? dot : -INFINITE;
            }
        }
#pragma unroll
        for (u32 g = 0; g < GROUP; g++) {
            f32 now = most[g];
#pragma unroll
            for (u32 j = 0; j < BATCH; j++) now = fmaxf(now, score[g][j]);
            // Nothing seen yet: any finite number does, all factors are 0.
            const f32 base_score = now == -INFINITE ? 0.0f : now;
            const f32 kept = exp2f(most[g] - base_score);
            most[g] = now;
            sum[g] *= kept;
#pragma unroll
            for (u32 c = 0; c < V_CHUNKS; c++) {
#pragma unroll
                for (u32 i = 0; i < VEC; i++) out[g][c][i] *= kept;
            }
#pragma unroll
            for (u32 j = 0; j < BATCH; j++) {
                if (!seen[j]) continue;
                const f32 p = exp2f(score[g][j] - base_score);
                sum[g] += p;
#pragma unroll
                for (u32 c = 0; c < V_CHUNKS; c++) {
#pragma unroll
                    for (u32 i = 0; i < VEC; i++) out[g][c][i] = fmaf(p, E::load(value[j].x[c][i]), out[g][c][i]);
                }
            }
        }
    }

#pragma unroll
    for (u32 g = 0; g < GROUP; g++) {
        if (lane == 0) {
            maxima[sub * GROUP + g] = most[g];
            sums[sub * GROUP + g] = sum[g];
        }
#pragma unroll
        for (u32 c = 0; c < V_CHUNKS; c++) {
#pragma unroll
            for (u32 i = 0; i < VEC; i++) {
                u32 d = (c * LANES + lane) * VEC + i;
                if (d < DIM_V) outs[(sub * GROUP + g) * DIM_V + d] = out[g][c][i];
            }
        }
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < GROUP * DIM_V; i += THREADS) {
        const u32 g = i / DIM_V, d = i % DIM_V;
        f32 all = -INFINITE;
        for (u32 s = 0; s < SUBS; s++) all = fmaxf(all, maxima[s * GROUP + g]);
        f32 value = 0.0f, total = 0.0f;
        for (u32 s = 0; s < SUBS; s++) {
            // At least one group has seen a key, so `all` is finite.
            const f32 factor = exp2f(maxima[s * GROUP + g] - all);
            value = fmaf(factor, outs[(s * GROUP + g) * DIM_V + d], value);
            total = fmaf(factor, sums[s * GROUP + g], total);
        }
        const u64 at = (u64(row) * heads + first_head + g) * splits + split;
        partial[at * DIM_V + d] = value;
        if (d == 0) {
            partial_ms[2 * at] = all;
            partial_ms[2 * at + 1] = total;
        }
    }
}

EXPORT(paged_decode)
