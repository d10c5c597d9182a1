// Attention of single rows over a paged pool, by tiles on tensor cores: as decode.cu, with its splits and merge, for query heads that share a KV head.
//
// A block takes the GROUP heads (of sixteen rows of a tile) that share a KV head, and a split. Its warps go their own ways: each has every WARPS-th sixteen keys of the split, copies them with their values to places of
// its own in shared memory, while it works on those before, and keeps a softmax of its own; the block merges them at its end. No warp waits for another before that.
//
// Bound by memory: keys and values are read once for all heads of the block. With dimensions of 128 a warp has some 200 instructions for 8 KiB, an eighth of what would keep a multiprocessor from
// reading at its share of an H200's bandwidth; its blocks have 100 KiB under way, of the 40 that this bandwidth needs at a latency of a microsecond.
//
// Order of accumulation: split s holds the positions from s * split_tokens on; sixteen keys at offset 16 i of a split belong to warp i % WARPS; warps and splits are merged in order. Queries and
// weights are rounded to the pool's type; sums are f32. So a row's result depends on its position and split_tokens alone.
#include "decode.cuh"

#define KEYS 16
#define ROWS 16

// Wide heads have fewer warps, so that two places of each fit into the smallest shared memory.
constexpr u32 WARPS = DIM_K > 128 || DIM_V > 128 ? 2 : 4;
constexpr u32 THREADS = 32 * WARPS;
// Rows in shared memory are 16 bytes longer, so that eight of them lie in different banks.
constexpr u32 K_STRIDE = DIM_K + 8, V_STRIDE = DIM_V + 8, PLACE = KEYS * (K_STRIDE + V_STRIDE);
// Queries stay in registers where there is room for them.
constexpr bool QUERIES_SHARED = DIM_K > 128;
static_assert(KV_TYPE != 0, "tensor cores would round f32");
static_assert(DIM_K % 16 == 0 && DIM_V % 16 == 0, "tensor cores take 16 elements at a time");
static_assert(GROUP >= 1 && GROUP <= ROWS, "the rows of a tile");
static_assert(2 * WARPS * PLACE * 2 >= WARPS * ROWS * DIM_V * 4, "what warps leave for the merge lies where keys and values did");

// Rounds two numbers, the first to the low half.
__device__ __forceinline__ u32 pack(f32 low, f32 high) { return u32(E::store(low)) | u32(E::store(high)) << 16; }

// Starts the copies of a warp's sixteen rows of DIM elements; lane i % 16 knows where row i lies, or that nobody sees it, which makes zeros.
template <u32 DIM>
__device__ __forceinline__ void fetch_rows(const u16* from, u64 at, u32 seen, u16* to) {
    constexpr u32 PIECES = DIM / 8;
    const u32 lane = threadIdx.x % 32;
#pragma unroll
    for (u32 first = 0; first < KEYS * PIECES; first += 32) {
        const u32 key = (first + lane) / PIECES, d = (first + lane) % PIECES * 8;
        const u64 row = __shfl_sync(FULL, at, key);
        cp_async_16(to + key * (DIM + 8) + d, from + row * DIM + d, seen >> key & 1 ? 16 : 0);
    }
}

KERNEL __launch_bounds__(THREADS, 2)
paged_decode_tiles(const f32* q, const Stored* keys, const Stored* values, const u32* tables, const u32* row_tables, const u32* positions,
                   f32* partial, f32* partial_ms, u32 heads, u32 kv_heads, u32 page_tokens, u32 window, f32 scale, u32 split_tokens, u32 splits) {
    DYNAMIC_SHARED(shared_bytes);
    SHARED(f32, maxima, WARPS * ROWS);
    SHARED(f32, totals, WARPS * ROWS);
    const u32 split = blockIdx.x, row = blockIdx.z, first_head = blockIdx.y * GROUP;
    const u32 end_position = positions[row] + 1;
    const u32 start_position = window && end_position > window ? end_position - window : 0;
    const u32 split_start = split * split_tokens;
    const u32 split_end = min(split_start + split_tokens, end_position);
    if (split_start >= end_position || split_start + split_tokens <= start_position) return;

    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane % 4;
    const u32 kv_head = first_head / (heads / kv_heads);
    const u32* table = tables + row_tables[row];
    u16* own = reinterpret_cast<u16*>(shared_bytes) + warp * 2 * PLACE;

    // Where key lane % 16 of sixteen lies, and which of them the row sees.
    auto find = [&](u32 base, u32& seen) {
        const u32 position = base + lane % KEYS;
        const bool sees = position >= start_position && position < split_end;
        seen = __ballot_sync(FULL, sees) & 0xFFFF;
        return sees ? (u64(table[position / page_tokens]) * kv_heads + kv_head) * page_tokens + position % page_tokens : u64(0);
    };
    auto fetch = [&](u32 place, u64 at, u32 seen) {
        u16* to = own + place * PLACE;
        fetch_rows<DIM_K>(keys, at, seen, to);
        fetch_rows<DIM_V>(values, at, seen, to + KEYS * K_STRIDE);
        cp_async_commit();
    };

    // Whole steps of the block before the window are left out; they would change nothing.
    constexpr u32 STEP = WARPS * KEYS;
    const u32 skipped = start_position > split_start ? (start_position - split_start) / STEP * STEP : 0;
    u32 base = split_start + skipped + warp * KEYS, seen, next_seen = 0, place = 0;
    u64 next = find(base, seen);
    fetch(0, next, seen);
    if (base + STEP < split_end) next = find(base + STEP, next_seen);

    u32 query[QUERIES_SHARED ? 1 : DIM_K / 16][4];
    u16* shared_queries = reinterpret_cast<u16*>(shared_bytes) + WARPS * 2 * PLACE;
    const f32* own_q = q + (u64(row) * heads + first_head) * DIM_K;
    if constexpr (QUERIES_SHARED) {
        for (u32 i = threadIdx.x; i < ROWS * DIM_K; i += THREADS) {
            shared_queries[i / DIM_K * K_STRIDE + i % DIM_K] = E::store(i / DIM_K < GROUP ? own_q[i] : 0.0f);
        }
        __syncthreads();
    } else {
#pragma unroll
        for (u32 k = 0; k < DIM_K / 16; k++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const u32 head = lane / 4 + i % 2 * 8;
                float2 two = make_float2(0.0f, 0.0f);
                if (head < GROUP) two = *reinterpret_cast<const float2*>(own_q + head * DIM_K + 16 * k + i / 2 * 8 + 2 * quad);
                query[k][i] = pack(two.x, two.y);
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

    for (; base < split_end; base += STEP, place ^= 1) {
        const u32 sees = seen;
        if (base + STEP < split_end) {
            fetch(place ^ 1, next, next_seen);
            seen = next_seen;
            if (base + 2 * STEP < split_end) next = find(base + 2 * STEP, next_seen);
            cp_async_wait<1>();
        } else {
            cp_async_wait<0>();
        }
        __syncwarp();
        const u16* own_keys = own + place * PLACE;
        const u16* own_values = own_keys + KEYS * K_STRIDE;

        f32 scores[2][4];
#pragma unroll
        for (u32 n = 0; n < 2; n++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) scores[n][i] = 0.0f;
        }
#pragma unroll
        for (u32 k = 0; k < DIM_K / 16; k++) {
            u32 a[4], both[4];
            if constexpr (QUERIES_SHARED) {
                ldmatrix_x4(a, shared_queries + lane % 16 * K_STRIDE + 16 * k + lane / 16 * 8);
            } else {
#pragma unroll
                for (u32 i = 0; i < 4; i++) a[i] = query[k][i];
            }
            ldmatrix_x4(both, own_keys + (lane / 16 * 8 + lane % 8) * K_STRIDE + 16 * k + lane / 8 % 2 * 8);
            const u32 left[2] = {both[0], both[1]}, right[2] = {both[2], both[3]};
            E::mma(scores[0], a, left);
            E::mma(scores[1], a, right);
        }
        f32 kept[2];
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            f32 now = most[i];
#pragma unroll
            for (u32 n = 0; n < 2; n++) {
#pragma unroll
                for (u32 j = 0; j < 2; j++) {
                    f32& score = scores[n][2 * i + j];
                    score = sees >> (8 * n + 2 * quad + j) & 1 ? score * to_log2 : -INFINITE;
                    now = fmaxf(now, score);
                }
            }
            // Four lanes have a head's scores.
            now = fmaxf(now, __shfl_xor_sync(FULL, now, 1));
            now = fmaxf(now, __shfl_xor_sync(FULL, now, 2));
            // Nothing seen yet: any finite number does, all factors are 0.
            const f32 below = now == -INFINITE ? 0.0f : now;
            kept[i] = exp2f(most[i] - below);
            most[i] = now;
            f32 sum = 0.0f;
#pragma unroll
            for (u32 n = 0; n < 2; n++) {
#pragma unroll
                for (u32 j = 0; j < 2; j++) {
                    f32& score = scores[n][2 * i + j];
                    score = exp2f(score - below);
                    sum += score;
                }
            }
            total[i] = fmaf(total[i], kept[i], sum);
        }
#pragma unroll
        for (u32 n = 0; n < DIM_V / 8; n++) {
            sums[n][0] *= kept[0];
            sums[n][1] *= kept[0];
            sums[n][2] *= kept[1];
            sums[n][3] *= kept[1];
        }
        // What a lane has of two tiles of scores is what it gives of one of weights.
        const u32 weights[4] = {pack(scores[0][0], scores[0][1]), pack(scores[0][2], scores[0][3]), pack(scores[1][0], scores[1][1]),
                                pack(scores[1][2], scores[1][3])};
#pragma unroll
        for (u32 n = 0; n < DIM_V / 16; n++) {
            u32 both[4];
            ldmatrix_x4_trans(both, own_values + lane % 16 * V_STRIDE + 16 * n + lane / 16 * 8);
            const u32 left[2] = {both[0], both[1]}, right[2] = {both[2], both[3]};
            E::mma(sums[2 * n], weights, left);
            E::mma(sums[2 * n + 1], weights, right);
        }
        // The next copies go where this warp has read.
        __syncwarp();
    }

    // A warp whose keys all lie past the end has copies under way that nobody waited for.
    cp_async_wait<0>();
    __syncthreads();
    f32* outs = reinterpret_cast<f32*>(shared_bytes);
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        const u32 head = lane / 4 + 8 * i;
        f32 sum = total[i];
        sum += __shfl_xor_sync(FULL, sum, 1);
        sum += __shfl_xor_sync(FULL, sum, 2);
        if (quad == 0) {
            maxima[warp * ROWS + head] = most[i];
            totals[warp * ROWS + head] = sum;
        }
#pragma unroll
        for (u32 n = 0; n < DIM_V / 8; n++) {
            *reinterpret_cast<float2*>(outs + (warp * ROWS + head) * DIM_V + 8 * n + 2 * quad) = make_float2(sums[n][2 * i], sums[n][2 * i + 1]);
        }
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < GROUP * DIM_V; i += THREADS) {
        const u32 head = i / DIM_V, d = i % DIM_V;
        f32 all = -INFINITE;
        for (u32 w = 0; w < WARPS; w++) all = fmaxf(all, maxima[w * ROWS + head]);
        f32 value = 0.0f, sum = 0.0f;
        for (u32 w = 0; w < WARPS; w++) {
            // At least one warp has seen a key, so `all` is finite.
            const f32 factor = exp2f(maxima[w * ROWS + head] - all);
            value = fmaf(factor, outs[(w * ROWS + head) * DIM_V + d], value);
            sum = fmaf(factor, totals[w * ROWS + head], sum);
        }
        const u64 at = (u64(row) * heads + first_head + head) * splits + split;
        partial[at * DIM_V + d] = value;
        if (d == 0) {
            partial_ms[2 * at] = all;
            partial_ms[2 * at + 1] = sum;
        }
    }
}

EXPORT(paged_decode_tiles)
