// The indexer's scores by tiles on tensor cores: as index.cu.
//
// A block takes one row and BLOCK_KEYS keys, 32 at a time for each of its four warps, which go their own ways. A warp copies its keys to a place of its own, takes them into registers, and starts the
// copies of its next ones; then it multiplies them with the queries of sixteen heads at a time, which all warps have in shared memory, and adds what the heads say of each key.
//
// Bound by arithmetic: 2 * heads * dim operations a key (times PARTS) against dim elements of it, 256 a byte for 64 heads of 128 and packed keys.
//
// PARTS 1 rounds queries to the keys' type (bf16 for packed ones, whose values it holds exactly), PARTS 2 keeps twice its bits, by two products. Sums are f32. Order of accumulation: each score is
// a sum over heads 0, 8, 16, ..., one over heads 1, 9, ..., and so on; then over these. It does not depend on what is beside it.
#include "rows.cuh"

#define THREADS 128
#define KEYS 32
#define BLOCK_KEYS 512
#define MOST_STEPS 8

// Rounds two numbers, the first to the low half; `more` becomes what that leaves of them, rounded too.
template <class E>
__device__ __forceinline__ u32 pack(f32 low, f32 high, u32& more) {
    const u16 a = E::store(low), b = E::store(high);
    more = u32(E::store(low - E::load(a))) | u32(E::store(high - E::load(b))) << 16;
    return u32(a) | u32(b) << 16;
}

// How keys lie in shared memory, and what products take of them: of key 8 n + lane / 4 the elements 16 k + 2 * (lane % 4) and the next, and those eight further on.
template <class E>
struct PlainTile {
    typedef E Type;
    typedef PlainRows<E> Rows;
    static constexpr u32 PIECES = 16;
    static __device__ __forceinline__ u32 stride(u32 dim) { return 2 * dim + 16; }
    static __device__ __forceinline__ void take(const u8* keys, u32 stride, u32 k, u32 (&out)[KEYS / 8][2]) {
        const u32 lane = threadIdx.x % 32;
#pragma unroll
        for (u32 n = 0; n < KEYS / 16; n++) {
            u32 both[4];
            ldmatrix_x4(both, keys + (16 * n + lane / 16 * 8 + lane % 8) * stride + 32 * k + lane / 8 % 2 * 16);
            out[2 * n][0] = both[0];
            out[2 * n][1] = both[1];
            out[2 * n + 1][0] = both[2];
            out[2 * n + 1][1] = both[3];
        }
    }
    static __device__ __forceinline__ f32 scale(const u8*) { return 1.0f; }
};
struct PackedTile {
    typedef BF16 Type;
    typedef PackedKeys Rows;
    static constexpr u32 PIECES = 8;
    static __device__ __forceinline__ u32 stride(u32 dim) { return dim + 16; }
    static __device__ __forceinline__ void take(const u8* keys, u32 stride, u32 k, u32 (&out)[KEYS / 8][2]) {
        const u32 lane = threadIdx.x % 32;
#pragma unroll
        for (u32 n = 0; n < KEYS / 8; n++) {
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                out[n][i] = two_from_e4m3(*reinterpret_cast<const u16*>(keys + (8 * n + lane / 4) * stride + 16 * k + 8 * i + 2 * (lane % 4)), 1.0f);
            }
        }
    }
    static __device__ __forceinline__ f32 scale(const u8* at) { return __uint_as_float(at[0] | at[1] << 8 | at[2] << 16 | u32(at[3]) << 24); }
};

template <class Tile>
__device__ __forceinline__ void index_tiles(const f32* q, const f32* weights, const u8* pool, const u32* tables, const u32* row_tables, const u32* counts,
                                            f32* scores, u64 stride, u32 heads, u32 dim, u32 page_rows, u64 page_bytes, u8* shared) {
    typedef typename Tile::Type E;
    typedef typename Tile::Rows Rows;
    const u32 row = blockIdx.y, count = counts[row], first = blockIdx.x * BLOCK_KEYS, end = min(first + BLOCK_KEYS, count);
    if (first >= count) return;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, steps = dim / 16, all_heads = (heads + 15) / 16 * 16;
    // 16 bytes more, so that eight rows lie in different banks.
    const u32 query_stride = dim + 8, key_stride = Tile::stride(dim), key_bytes = Rows::data_bytes(dim, 0);
    f32* shared_weights = reinterpret_cast<f32*>(shared);
    u16* queries = reinterpret_cast<u16*>(shared_weights + all_heads);
    u8* keys = shared + 4 * all_heads + PARTS * all_heads * query_stride * 2 + warp * KEYS * key_stride;
    const u32* table = tables + row_tables[row];

    // Where the key of this lane lies, and its scale; keys past the end are the last one once more.
    const u8* at = nullptr;
    const u8* scale_at = nullptr;
    auto find = [&](u32 base) {
        const u32 number = min(base + lane, end - 1), index = number % page_rows;
        const u8* page = pool + table[number / page_rows] * page_bytes;
        at = page + data_at<Rows>(index, dim, 0);
        scale_at = page + scales_at<Rows>(index, page_rows, dim, 0);
    };
    auto fetch = [&] {
        constexpr u32 AT_ONCE = 32 / Tile::PIECES;
#pragma unroll
        for (u32 i = 0; i < KEYS; i += AT_ONCE) {
            const u32 key = i + lane / Tile::PIECES;
            const u8* from = reinterpret_cast<const u8*>(__shfl_sync(FULL, u64(at), key));
            if (aligned(from, 16)) {
                const u32 byte = 16 * (lane % Tile::PIECES);
                if (byte < key_bytes) cp_async_16(keys + key * key_stride + byte, from + byte);
            } else {
                for (u32 byte = lane % Tile::PIECES; byte < key_bytes; byte += Tile::PIECES) keys[key * key_stride + byte] = from[byte];
            }
        }
        cp_async_commit();
    };
    u32 base = first + warp * KEYS;
    if (base < end) {
        find(base);
        fetch();
    }
    for (u32 i = threadIdx.x; i < all_heads * (dim / 2); i += THREADS) {
        const u32 head = i / (dim / 2), d = i % (dim / 2) * 2;
        float2 two = make_float2(0.0f, 0.0f);
        if (head < heads) two = *reinterpret_cast<const float2*>(q + (u64(row) * heads + head) * dim + d);
        u32 more;
        *reinterpret_cast<u32*>(queries + head * query_stride + d) = pack<E>(two.x, two.y, more);
        if constexpr (PARTS == 2) *reinterpret_cast<u32*>(queries + (all_heads + head) * query_stride + d) = more;
    }
    for (u32 head = threadIdx.x; head < all_heads; head += THREADS) shared_weights[head] = head < heads ? weights[u64(row) * heads + head] : 0.0f;
    __syncthreads();

    for (; base < end; base += THREADS) {
        cp_async_wait<0>();
        __syncwarp();
        u32 key[MOST_STEPS][KEYS / 8][2];
#pragma unroll
        for (u32 k = 0; k < MOST_STEPS; k++) {
            if (k < steps) Tile::take(keys, key_stride, k, key[k]);
        }
        const f32 scale = Tile::scale(scale_at);
        __syncwarp();
        if (base + THREADS < end) {
            find(base + THREADS);
            fetch();
        }

        f32 sums[KEYS / 8][2];
#pragma unroll
        for (u32 n = 0; n < KEYS / 8; n++) sums[n][0] = sums[n][1] = 0.0f;
        for (u32 head = 0; head < all_heads; head += 16) {
            f32 products[KEYS / 8][4];
#pragma unroll
            for (u32 n = 0; n < KEYS / 8; n++) {
#pragma unroll
                for (u32 i = 0; i < 4; i++) products[n][i] = 0.0f;
            }
#pragma unroll
            for (u32 k = 0; k < MOST_STEPS; k++) {
                if (k >= steps) continue;
#pragma unroll
                for (u32 p = 0; p < PARTS; p++) {
                    u32 query[4];
                    ldmatrix_x4(query, queries + (p * all_heads + head + lane % 16) * query_stride + 16 * k + lane / 16 * 8);
#pragma unroll
                    for (u32 n = 0; n < KEYS / 8; n++) E::mma(products[n], query, key[k][n]);
                }
            }
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                const f32 weight = shared_weights[head + lane / 4 + 8 * i];
#pragma unroll
                for (u32 n = 0; n < KEYS / 8; n++) {
#pragma unroll
                    for (u32 j = 0; j < 2; j++) sums[n][j] = fmaf(weight, fmaxf(products[n][2 * i + j], 0.0f), sums[n][j]);
                }
            }
        }
#pragma unroll
        for (u32 n = 0; n < KEYS / 8; n++) {
#pragma unroll
            for (u32 j = 0; j < 2; j++) {
                f32 sum = sums[n][j];
                for (u32 by = 4; by < 32; by *= 2) sum += __shfl_xor_sync(FULL, sum, by);
                // A scale is not negative, so it may wait for the sum.
                const u32 number = 8 * n + 2 * (lane % 4) + j;
                sum *= __shfl_sync(FULL, scale, number);
                if (lane < 4 && base + number < end) scores[row * stride + base + number] = sum;
            }
        }
    }
}

#define INDEX_TILES(name, Tile)                                                                                                          \
    KERNEL __launch_bounds__(THREADS) name(const f32* q, const f32* weights, const u8* pool, const u32* tables, const u32* row_tables,   \
                                           const u32* counts, f32* scores, u64 stride, u32 heads, u32 dim, u32 page_rows,                \
                                           u64 page_bytes) {                                                                             \
        DYNAMIC_SHARED(shared_bytes);                                                                                                    \
        index_tiles<Tile>(q, weights, pool, tables, row_tables, counts, scores, stride, heads, dim, page_rows, page_bytes, shared_bytes); \
    }                                                                                                                                    \
    EXPORT(name)

INDEX_TILES(index_tiles_f16, PlainTile<F16>)
INDEX_TILES(index_tiles_bf16, PlainTile<BF16>)
INDEX_TILES(index_tiles_packed, PackedTile)
