// Attention of many rows over a paged pool by tiles on tensor cores.
//
// A block takes 64 pairs of row and query head that share a KV head, 16 a warp, and walks over the keys that any of them sees in tiles of KEYS positions: scores
// by mma, softmax as it goes (in powers of two, running maximum and sum in registers), values by mma. Keys and values of the next tile are
// on their way to shared memory meanwhile.
//
// Bound by arithmetic: 4 * DIM operations a pair and key (2 * (DIM_K + DIM_V)) against keys and values read once a block.
//
// Order of accumulation: tiles lie at multiples of KEYS from position 0, and a tile that a row does not see leaves its sums as they are to the bit; so a row's result does not
// depend on the rows beside it. Queries and weights are rounded to the pool's type; sums are f32.
#include "common.cuh"

#if KV_TYPE == 1
typedef F16 E;
#else
typedef BF16 E;
#endif

#define THREADS 128
#define ROWS 64

constexpr u32 KEYS = DIM_K > 128 || DIM_V > 128 ? 32 : 64;
// Rows in shared memory are 16 bytes longer, so that eight of them lie in different banks.
constexpr u32 K_STRIDE = DIM_K + 8, V_STRIDE = DIM_V + 8;
// Queries stay in registers where there is room for them.
constexpr bool QUERIES_SHARED = DIM_K > 128;
static_assert(DIM_K % 16 == 0 && DIM_V % 16 == 0, "tensor cores take 16 elements at a time");

// Rounds two numbers, the first to the low half.
__device__ __forceinline__ u32 pack(f32 low, f32 high) { return u32(E::store(low)) | u32(E::store(high)) << 16; }

struct Tile {
    const u16* keys;
    const u16* values;
    const u32* table;
    u32 kv_head, kv_heads, page_tokens, end;

    // Starts the copies of a tile's rows; those from `end` on are zeros.
    __device__ __forceinline__ void fetch(u32 first, u16* to_keys, u16* to_values) const {
        fetch_rows<DIM_K>(keys, first, to_keys);
        fetch_rows<DIM_V>(values, first, to_values);
        cp_async_commit();
    }

    template <u32 DIM>
    __device__ __forceinline__ void fetch_rows(const u16* from, u32 first, u16* to) const {
        constexpr u32 PIECES = DIM / 8;
        for (u32 i = threadIdx.x; i < KEYS * PIECES; i += THREADS) {
            const u32 key = i / PIECES, d = i % PIECES * 8, position = first + key;
            u64 at = 0;
            if (position < end) {
                at = (u64(table[position / page_tokens]) * kv_heads + kv_head) * page_tokens + position % page_tokens;
            }
            cp_async_16(to + key * (DIM + 8) + d, from + at * DIM + d, position < end ? 16 : 0);
        }
    }
};

KERNEL __launch_bounds__(THREADS)
paged_prefill(const f32* q, const u16* keys, const u16* values, const u32* tables, const u32* seqs, const u32* tiles, const f32* sinks,
              f32* out, u32 heads, u32 kv_heads, u32 page_tokens, u32 window, f32 scale) {
    DYNAMIC_SHARED(shared_bytes);
    u16* shared_keys = reinterpret_cast<u16*>(shared_bytes);
    u16* shared_values = shared_keys + 2 * KEYS * K_STRIDE;
    u16* shared_queries = shared_values + 2 * KEYS * V_STRIDE;

    const u32* seq = seqs + 4 * tiles[2 * blockIdx.x];
    const u32 first_pair = tiles[2 * blockIdx.x + 1];
    const u32 first_row = seq[0], rows = seq[1], start = seq[2];
    const u32 kv_head = blockIdx.y, group = heads / kv_heads;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane % 4;

    // The two pairs whose scores this thread has a part of.
    u32 position[2], from[2];
    u64 place[2];
    bool there[2];
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        const u32 pair = first_pair + 16 * warp + lane / 4 + 8 * i;
        there[i] = pair / group < rows;
        position[i] = start + min(pair / group, rows - 1);
        from[i] = window && position[i] + 1 > window ? position[i] + 1 - window : 0;
        place[i] = u64(first_row + min(pair / group, rows - 1)) * heads + kv_head * group + pair % group;
    }
    // Positions that any pair of the tile sees.
    const u32 lowest = start + min(first_pair / group, rows - 1);
    const u32 highest = start + min((first_pair + ROWS - 1) / group, rows - 1);
    const u32 lowest_from = window && lowest + 1 > window ? lowest + 1 - window : 0;
    const u32 highest_from = window && highest + 1 > window ? highest + 1 - window : 0;

    u32 query[QUERIES_SHARED ? 1 : DIM_K / 16][4];
    if constexpr (QUERIES_SHARED) {
        for (u32 i = threadIdx.x; i < ROWS * DIM_K; i += THREADS) {
            const u32 pair = first_pair + i / DIM_K, d = i % DIM_K;
            f32 x = 0.0f;
            if (pair / group < rows) x = q[(u64(first_row + pair / group) * heads + kv_head * group + pair % group) * DIM_K + d];
            shared_queries[i / DIM_K * K_STRIDE + d] = E::store(x);
        }
    } else {
#pragma unroll
        for (u32 k = 0; k < DIM_K / 16; k++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const f32* x = q + place[i % 2] * DIM_K + 16 * k + i / 2 * 8 + 2 * quad;
                query[k][i] = there[i % 2] ? pack(x[0], x[1]) : 0;
            }
        }
    }

    f32 sums[DIM_V / 8][4], most[2] = {-INFINITE, -INFINITE}, total[2] = {0.0f, 0.0f};
#pragma unroll
    for (u32 n = 0; n < DIM_V / 8; n++) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) sums[n][i] = 0.0f;
    }
    const f32 to_log2 = scale * LOG2_E;
    const Tile tile = {keys, values, tables + seq[3], kv_head, kv_heads, page_tokens, highest + 1};
    u32 buffer = 0, base = lowest_from / KEYS * KEYS;
    tile.fetch(base, shared_keys, shared_values);
    for (; base <= highest; base += KEYS, buffer ^= 1) {
        if (base + KEYS <= highest) {
            const u32 other = buffer ^ 1;
            tile.fetch(base + KEYS, shared_keys + other * KEYS * K_STRIDE, shared_values + other * KEYS * V_STRIDE);
            cp_async_wait<1>();
        } else {
            cp_async_wait<0>();
        }
        __syncthreads();
        const u16* tile_keys = shared_keys + buffer * KEYS * K_STRIDE;
        const u16* tile_values = shared_values + buffer * KEYS * V_STRIDE;

        f32 scores[KEYS / 8][4];
#pragma unroll
        for (u32 n = 0; n < KEYS / 8; n++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) scores[n][i] = 0.0f;
        }
#pragma unroll
        for (u32 k = 0; k < DIM_K / 16; k++) {
            u32 a[4];
            if constexpr (QUERIES_SHARED) {
                // Matrices: rows 0-7 and 8-15 at the first eight columns, then at the others.
                ldmatrix_x4(a, shared_queries + (16 * warp + lane % 16) * K_STRIDE + 16 * k + lane / 16 * 8);
            } else {
#pragma unroll
                for (u32 i = 0; i < 4; i++) a[i] = query[k][i];
            }
#pragma unroll
            for (u32 n = 0; n < KEYS / 16; n++) {
                u32 both[4];
                ldmatrix_x4(both, tile_keys + (16 * n + lane / 16 * 8 + lane % 8) * K_STRIDE + 16 * k + lane / 8 % 2 * 8);
                const u32 left[2] = {both[0], both[1]}, right[2] = {both[2], both[3]};
                E::mma(scores[2 * n], a, left);
                E::mma(scores[2 * n + 1], a, right);
            }
        }

        const bool whole = base + KEYS - 1 <= lowest && base >= highest_from;
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            f32 now = most[i];
#pragma unroll
            for (u32 n = 0; n < KEYS / 8; n++) {
#pragma unroll
                for (u32 j = 0; j < 2; j++) {
                    const u32 key = base + 8 * n + 2 * quad + j;
                    f32& score = scores[n][2 * i + j];
                    score = whole || (key <= position[i] && key >= from[i]) ? score * to_log2 : -INFINITE;
                    now = fmaxf(now, score);
                }
            }
            // Four threads have a row's scores.
            now = fmaxf(now, __shfl_xor_sync(FULL, now, 1));
            now = fmaxf(now, __shfl_xor_sync(FULL, now, 2));
            const f32 below = now == -INFINITE ? 0.0f : now;
            const f32 kept = exp2f(most[i] - below);
            most[i] = now;
            f32 sum = 0.0f;
#pragma unroll
            for (u32 n = 0; n < KEYS / 8; n++) {
#pragma unroll
                for (u32 j = 0; j < 2; j++) {
                    f32& score = scores[n][2 * i + j];
                    score = exp2f(score - below);
                    sum += score;
                }
            }
            total[i] = fmaf(total[i], kept, sum);
#pragma unroll
            for (u32 n = 0; n < DIM_V / 8; n++) {
                sums[n][2 * i] *= kept;
                sums[n][2 * i + 1] *= kept;
            }
        }

#pragma unroll
        for (u32 k = 0; k < KEYS / 16; k++) {
            // What a thread has of two tiles of scores is what it gives of one of weights.
            const u32 a[4] = {pack(scores[2 * k][0], scores[2 * k][1]), pack(scores[2 * k][2], scores[2 * k][3]),
                              pack(scores[2 * k + 1][0], scores[2 * k + 1][1]), pack(scores[2 * k + 1][2], scores[2 * k + 1][3])};
#pragma unroll
            for (u32 n = 0; n < DIM_V / 16; n++) {
                u32 both[4];
                ldmatrix_x4_trans(both, tile_values + (16 * k + lane % 16) * V_STRIDE + 16 * n + lane / 16 * 8);
                const u32 left[2] = {both[0], both[1]}, right[2] = {both[2], both[3]};
                E::mma(sums[2 * n], a, left);
                E::mma(sums[2 * n + 1], a, right);
            }
        }
        __syncthreads();
    }

#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        f32 sum = total[i];
        sum += __shfl_xor_sync(FULL, sum, 1);
        sum += __shfl_xor_sync(FULL, sum, 2);
        if (sinks) sum += exp2f(sinks[place[i] % heads] * LOG2_E - most[i]);
        if (!there[i]) continue;
#pragma unroll
        for (u32 n = 0; n < DIM_V / 8; n++) {
            f32* to = out + place[i] * DIM_V + 8 * n + 2 * quad;
            to[0] = sums[n][2 * i] / sum;
            to[1] = sums[n][2 * i + 1] / sum;
        }
    }
}

EXPORT(paged_prefill)
