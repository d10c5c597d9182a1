// Attention over rows that are keys and values at once, by tiles on tensor cores: as latent.cu, with its runs, splits and merge.
//
// A block takes HEADS heads and a split, and walks over the split's rows KEYS at a time. The scores of a tile are products along WIDTH, which the eight warps share: warp w has the sixteen
// heads w % HEAD_TILES and one of COLUMN_PARTS parts of the columns, whose queries stay in its registers. The parts meet in shared memory, where a thread makes the weights
// of some rows for one head; then each warp multiplies the weights of all heads by its own columns of the values. The next tile's rows are on their way to
// shared memory meanwhile; packed rows come as they are and become bf16 there, which holds all their values exactly.
//
// Bound by arithmetic from some 40 heads on: 2 * heads * (WIDTH + VALUE) operations a row (times PARTS) against WIDTH elements of it; with fewer heads by memory.
//
// PARTS 1 rounds queries and weights to the rows' type; PARTS 2 keeps twice its bits, by two products. Sums are f32. Order of accumulation: tiles lie at multiples of KEYS from the split's first
// row, a score is added along each part of the columns and then over the parts; so a row's result does not depend on the rows beside it.
#include "latent.cuh"

#if ROW_TYPE == 1
typedef F16 E;
#else
typedef BF16 E;
#endif

#define THREADS 256
#define WARPS 8
#define KEYS 32

static_assert(ROW_TYPE != 0, "tensor cores would round rows of f32");
static_assert(HEADS == 16 || HEADS == 32 || HEADS == 64, "each warp has one tile of sixteen heads");
static_assert(WIDTH % 8 == 0 && VALUE % 8 == 0 && VALUE <= WIDTH && ROPE % 8 == 0, "pieces of eight elements");

constexpr bool PACKED = ROW_TYPE == 3;
constexpr u32 HEAD_TILES = HEADS / 16, COLUMN_PARTS = WARPS / HEAD_TILES;
// Products take sixteen columns at a time: how many steps there are, and how many a part has at most.
constexpr u32 ALL_STEPS = (WIDTH + 15) / 16, STEPS = (ALL_STEPS + COLUMN_PARTS - 1) / COLUMN_PARTS;
// Tiles of sixteen columns of values, of which each warp has as many as there are.
constexpr u32 VALUE_TILES = (VALUE + 15) / 16, OWN_TILES = (VALUE_TILES + WARPS - 1) / WARPS;
// Rows in shared memory are 16 bytes longer, so that eight of them lie in different banks.
constexpr u32 STRIDE = 16 * ALL_STEPS + 8, SCORE_STRIDE = KEYS + 4, WEIGHT_STRIDE = KEYS + 8;
// A packed row as it comes.
constexpr u32 RAW_BYTES = WIDTH + ROPE, RAW_STRIDE = (RAW_BYTES + 15) / 16 * 16;
constexpr u32 HEAD_THREADS = THREADS / HEADS, THREAD_KEYS = KEYS / HEAD_THREADS;

// Rounds two numbers, the first to the low half; `more` becomes what that leaves of them, rounded too.
__device__ __forceinline__ u32 pack(f32 low, f32 high, u32& more) {
    const u16 a = E::store(low), b = E::store(high);
    more = u32(E::store(low - E::load(a))) | u32(E::store(high - E::load(b))) << 16;
    return u32(a) | u32(b) << 16;
}

// The row of the pool that key `number` of both runs is, and its page.
__device__ __forceinline__ u32 row_of(const Run& a, const Run& b, u32 number) {
    return number < a.count ? a.row(number) : b.row(number - a.count);
}
__device__ __forceinline__ u32 page_of(const Run& a, const Run& b, u32 number, u32 row) {
    return number < a.count ? a.table[row / a.page_rows] : b.table[row / b.page_rows];
}

// Starts the copies of a tile's rows. A warp copies whole rows.
__device__ __forceinline__ void fetch(const u64* places, u8* to) {
    constexpr u32 BYTES = PACKED ? RAW_BYTES : 2 * WIDTH, ROOM = PACKED ? RAW_STRIDE : 2 * STRIDE;
    const u32 lane = threadIdx.x % 32;
#pragma unroll
    for (u32 i = 0; i < KEYS / WARPS; i++) {
        const u32 key = threadIdx.x / 32 + i * WARPS;
        const u8* from = reinterpret_cast<const u8*>(places[key]);
        if (BYTES % 16 == 0 && aligned(from, 16)) {
#pragma unroll
            for (u32 first = 0; first < BYTES; first += 16 * 32) {
                const u32 at = first + 16 * lane;
                if (at < BYTES) cp_async_16(to + key * ROOM + at, from + at);
            }
        } else {
            for (u32 at = lane; at < BYTES; at += 32) to[key * ROOM + at] = from[at];
        }
    }
    cp_async_commit();
}

// Makes bf16 of packed rows.
__device__ __forceinline__ void widen(const u8* raw, const u64* scales, u16* rows) {
    constexpr u32 PLAIN = WIDTH - ROPE;
    const u32 lane = threadIdx.x % 32;
#pragma unroll
    for (u32 i = 0; i < KEYS / WARPS; i++) {
        const u32 key = threadIdx.x / 32 + i * WARPS;
        const u8* from = raw + key * RAW_STRIDE;
#pragma unroll
        for (u32 first = 0; first < WIDTH; first += 8 * 32) {
            const u32 d = first + 8 * lane;
            if (d >= WIDTH) continue;
            uint4 eight;
            if (d < PLAIN) {
                const uint2 bytes = *reinterpret_cast<const uint2*>(from + d);
                const f32 scale = power_of_two(int(scales[key] >> d / PACKED_GROUP * 8 & 0xFF) - 127);
                eight = make_uint4(two_from_e4m3(bytes.x, scale), two_from_e4m3(bytes.x >> 16, scale), two_from_e4m3(bytes.y, scale),
                                   two_from_e4m3(bytes.y >> 16, scale));
            } else {
                const uint2* halves = reinterpret_cast<const uint2*>(from + PLAIN + 2 * (d - PLAIN));
                const uint2 low = halves[0], high = halves[1];
                eight = make_uint4(low.x, low.y, high.x, high.y);
            }
            *reinterpret_cast<uint4*>(rows + key * STRIDE + d) = eight;
        }
    }
}

// The eight scales of a packed row.
__device__ __forceinline__ u64 scales_from(const u8* at) {
    u64 all = 0;
#pragma unroll
    for (u32 i = 0; i < PACKED_SCALES; i++) all |= u64(at[i]) << 8 * i;
    return all;
}

KERNEL __launch_bounds__(THREADS)
latent_tiles(const f32* q, const u8* pool_a, const u32* tables_a, const u32* lists_a, const u32* runs_a, u32 page_rows_a, u64 page_bytes_a,
             const u8* pool_b, const u32* tables_b, const u32* lists_b, const u32* runs_b, u32 page_rows_b, u64 page_bytes_b, f32* partial,
             f32* partial_ms, u32 heads, f32 scale, u32 split_rows, u32 splits) {
    DYNAMIC_SHARED(shared_bytes);
    // Two tiles, or one and two of packed rows.
    u16* tiles = reinterpret_cast<u16*>(shared_bytes);
    u8* raw = shared_bytes + 2 * KEYS * STRIDE;
    f32* scores = reinterpret_cast<f32*>(shared_bytes + (PACKED ? 2 * KEYS * STRIDE + 2 * KEYS * RAW_STRIDE : 4 * KEYS * STRIDE));
    u16* weights = reinterpret_cast<u16*>(scores + COLUMN_PARTS * HEADS * SCORE_STRIDE);
    SHARED(u64, places, 2 * KEYS);
    SHARED(u64, row_scales, 2 * KEYS);
    SHARED(f32, kept, HEADS);

    const u32 split = blockIdx.x, first_head = blockIdx.y * HEADS, row = blockIdx.z;
    const Run a = run_of(pool_a, tables_a, lists_a, runs_a, row, page_rows_a, page_bytes_a);
    const Run b = run_of(pool_b, tables_b, lists_b, runs_b, row, page_rows_b, page_bytes_b);
    const u32 all = a.count + b.count, start = split * split_rows, end = min(start + split_rows, all);
    if (start >= all) return;

    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane % 4;
    const u32 head_tile = warp % HEAD_TILES, column_part = warp / HEAD_TILES;
    // Where the scales of this thread's row of the next tile lie.
    const u8* next_scales = nullptr;
    // Says where row `threadIdx.x` of a tile lies; rows past the end are the last one once more, with a weight of 0.
    auto place = [&](u32 tile, u32 number, u32 found, u32 page) {
        const bool in_a = number < a.count;
        places[tile % 2 * KEYS + threadIdx.x] = u64(in_a ? a.data(found, page) : b.data(found, page));
        if constexpr (PACKED) next_scales = in_a ? a.scales(found, page) : b.scales(found, page);
    };
    if (threadIdx.x < KEYS) {
#pragma unroll
        for (u32 tile = 0; tile < 2; tile++) {
            const u32 number = min(start + tile * KEYS + threadIdx.x, end - 1), found = row_of(a, b, number);
            place(tile, number, found, page_of(a, b, number, found));
            if constexpr (PACKED) {
                if (tile == 0) row_scales[threadIdx.x] = scales_from(next_scales);
            }
        }
    }
    if constexpr (WIDTH % 16 != 0) {
        // Columns that only fill up the last step.
        for (u32 i = threadIdx.x; i < (PACKED ? 1 : 2) * KEYS * 8; i += THREADS) tiles[i / 8 * STRIDE + WIDTH + i % 8] = 0;
    }
    __syncthreads();
    fetch(places, PACKED ? raw : shared_bytes);

    u32 query[PARTS][STEPS][4];
#pragma unroll
    for (u32 k = 0; k < STEPS; k++) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const u32 head = first_head + 16 * head_tile + lane / 4 + i % 2 * 8, d = 16 * (column_part * STEPS + k) + i / 2 * 8 + 2 * quad;
            f32 low = 0.0f, high = 0.0f;
            if (head < heads && d < WIDTH) {
                const float2 two = *reinterpret_cast<const float2*>(q + (u64(row) * heads + head) * WIDTH + d);
                low = two.x;
                high = two.y;
            }
            u32 more;
            query[0][k][i] = pack(low, high, more);
            if constexpr (PARTS == 2) query[1][k][i] = more;
        }
    }
    f32 sums[HEAD_TILES][2 * OWN_TILES][4], most = -INFINITE, total = 0.0f;
#pragma unroll
    for (u32 m = 0; m < HEAD_TILES; m++) {
#pragma unroll
        for (u32 n = 0; n < 2 * OWN_TILES; n++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) sums[m][n][i] = 0.0f;
        }
    }
    const f32 to_log2 = scale * LOG2_E;
    const u32 own_head = threadIdx.x / HEAD_THREADS, own_keys = threadIdx.x % HEAD_THREADS * THREAD_KEYS;

    u32 tile = 0;
    for (u32 base = start; base < end; base += KEYS, tile++) {
        cp_async_wait<0>();
        __syncthreads();
        if (base + KEYS < end) fetch(places + (tile + 1) % 2 * KEYS, PACKED ? raw + (tile + 1) % 2 * KEYS * RAW_STRIDE : shared_bytes + (tile + 1) % 2 * KEYS * STRIDE * 2);
        u16* rows = tiles;
        if constexpr (PACKED) {
            widen(raw + tile % 2 * KEYS * RAW_STRIDE, row_scales + tile % 2 * KEYS, rows);
            __syncthreads();
        } else {
            rows += tile % 2 * KEYS * STRIDE;
        }
        // Where the rows of the tile after the next one lie is found in steps, whose loads take their time beside products.
        const u32 later = min(base + 2 * KEYS + threadIdx.x, end - 1);
        u32 found = 0, page = 0;
        u64 scales_then = 0;
        if (threadIdx.x < KEYS) {
            found = row_of(a, b, later);
            if constexpr (PACKED) scales_then = scales_from(next_scales);
        }

        f32 products[KEYS / 8][4];
#pragma unroll
        for (u32 n = 0; n < KEYS / 8; n++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) products[n][i] = 0.0f;
        }
#pragma unroll
        for (u32 k = 0; k < STEPS; k++) {
            const u32 step = column_part * STEPS + k;
            if (ALL_STEPS % COLUMN_PARTS != 0 && step >= ALL_STEPS) continue;
#pragma unroll
            for (u32 n = 0; n < KEYS / 16; n++) {
                u32 both[4];
                ldmatrix_x4(both, rows + (16 * n + lane / 16 * 8 + lane % 8) * STRIDE + 16 * step + lane / 8 % 2 * 8);
                const u32 left[2] = {both[0], both[1]}, right[2] = {both[2], both[3]};
#pragma unroll
                for (u32 p = 0; p < PARTS; p++) {
                    E::mma(products[2 * n], query[p][k], left);
                    E::mma(products[2 * n + 1], query[p][k], right);
                }
            }
        }
#pragma unroll
        for (u32 n = 0; n < KEYS / 8; n++) {
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                const u32 head = column_part * HEADS + 16 * head_tile + lane / 4 + 8 * i;
                *reinterpret_cast<float2*>(scores + head * SCORE_STRIDE + 8 * n + 2 * quad) = make_float2(products[n][2 * i], products[n][2 * i + 1]);
            }
        }
        __syncthreads();

        f32 score[THREAD_KEYS], now = most;
#pragma unroll
        for (u32 j = 0; j < THREAD_KEYS; j += 2) {
            float2 both = make_float2(0.0f, 0.0f);
#pragma unroll
            for (u32 part = 0; part < COLUMN_PARTS; part++) {
                const float2 two = *reinterpret_cast<const float2*>(scores + (part * HEADS + own_head) * SCORE_STRIDE + own_keys + j);
                both.x += two.x;
                both.y += two.y;
            }
            score[j] = base + own_keys + j < end ? both.x * to_log2 : -INFINITE;
            score[j + 1] = base + own_keys + j + 1 < end ? both.y * to_log2 : -INFINITE;
            now = fmaxf(now, fmaxf(score[j], score[j + 1]));
        }
#pragma unroll
        for (u32 by = HEAD_THREADS / 2; by > 0; by /= 2) now = fmaxf(now, __shfl_xor_sync(FULL, now, by));
        const f32 below = now == -INFINITE ? 0.0f : now, left_of_sums = exp2f(most - below);
        most = now;
        f32 sum = 0.0f;
#pragma unroll
        for (u32 j = 0; j < THREAD_KEYS; j += 2) {
            const f32 low = exp2f(score[j] - below), high = exp2f(score[j + 1] - below);
            sum += low;
            sum += high;
            u32 more;
            u16* to = weights + own_head * WEIGHT_STRIDE + own_keys + j;
            *reinterpret_cast<u32*>(to) = pack(low, high, more);
            if constexpr (PARTS == 2) *reinterpret_cast<u32*>(to + HEADS * WEIGHT_STRIDE) = more;
        }
#pragma unroll
        for (u32 by = HEAD_THREADS / 2; by > 0; by /= 2) sum += __shfl_xor_sync(FULL, sum, by);
        total = fmaf(total, left_of_sums, sum);
        if (own_keys == 0) kept[own_head] = left_of_sums;
        if (threadIdx.x < KEYS) page = page_of(a, b, later, found);
        __syncthreads();

#pragma unroll
        for (u32 m = 0; m < HEAD_TILES; m++) {
            const f32 upper = kept[16 * m + lane / 4], lower = kept[16 * m + lane / 4 + 8];
            // A factor of 1 changes nothing, and is what most tiles have.
            if (!__any_sync(FULL, upper != 1.0f || lower != 1.0f)) continue;
#pragma unroll
            for (u32 n = 0; n < 2 * OWN_TILES; n++) {
                sums[m][n][0] *= upper;
                sums[m][n][1] *= upper;
                sums[m][n][2] *= lower;
                sums[m][n][3] *= lower;
            }
        }
#pragma unroll
        for (u32 k = 0; k < KEYS / 16; k++) {
            u32 weight[PARTS][HEAD_TILES][4];
#pragma unroll
            for (u32 p = 0; p < PARTS; p++) {
#pragma unroll
                for (u32 m = 0; m < HEAD_TILES; m++) {
                    ldmatrix_x4(weight[p][m], weights + (p * HEADS + 16 * m + lane % 16) * WEIGHT_STRIDE + 16 * k + lane / 16 * 8);
                }
            }
#pragma unroll
            for (u32 n = 0; n < OWN_TILES; n++) {
                const u32 column = 16 * (warp * OWN_TILES + n);
                if (VALUE_TILES % WARPS != 0 && column >= VALUE) continue;
                u32 both[4];
                ldmatrix_x4_trans(both, rows + (16 * k + lane % 16) * STRIDE + column + lane / 16 * 8);
                const u32 left[2] = {both[0], both[1]}, right[2] = {both[2], both[3]};
#pragma unroll
                for (u32 m = 0; m < HEAD_TILES; m++) {
#pragma unroll
                    for (u32 p = 0; p < PARTS; p++) {
                        E::mma(sums[m][2 * n], weight[p][m], left);
                        E::mma(sums[m][2 * n + 1], weight[p][m], right);
                    }
                }
            }
        }
        if (threadIdx.x < KEYS) {
            if constexpr (PACKED) row_scales[(tile + 1) % 2 * KEYS + threadIdx.x] = scales_then;
            place(tile, later, found, page);
        }
    }

    const u64 first_part = (u64(row) * heads + first_head) * splits + split;
    if (own_keys == 0 && first_head + own_head < heads) {
        partial_ms[2 * (first_part + u64(own_head) * splits)] = most;
        partial_ms[2 * (first_part + u64(own_head) * splits) + 1] = total;
    }
#pragma unroll
    for (u32 m = 0; m < HEAD_TILES; m++) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const u32 head = 16 * m + lane / 4 + 8 * i;
            if (first_head + head >= heads) continue;
            f32* to = partial + (first_part + u64(head) * splits) * VALUE;
#pragma unroll
            for (u32 n = 0; n < 2 * OWN_TILES; n++) {
                const u32 column = 16 * warp * OWN_TILES + 8 * n + 2 * quad;
                if (column < VALUE) *reinterpret_cast<float2*>(to + column) = make_float2(sums[m][n][2 * i], sums[m][n][2 * i + 1]);
            }
        }
    }
}

EXPORT(latent_tiles)
