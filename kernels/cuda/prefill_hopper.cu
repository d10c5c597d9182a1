// Attention of many rows over a paged pool, for sm_90a: products of warpgroups, and bulk copies of pages.
//
// A block takes 128 pairs of row and query head that share a KV head: 64 for each of two warpgroups, which compute. One thread of a third starts the copies: keys and values
// of a tile of KEYS positions come in boxes of rows of one page, into one of STAGES places, as soon as both warpgroups have let go of it. Scores are products of queries
// and keys in shared memory, weights come from registers, sums stay in them. A tile's values are multiplied while the softmax of the next tile's scores is taken; and the two
// warpgroups take turns at starting products, so that one's softmax runs beside the other's products.
//
// Bound by arithmetic: 2 * (DIM_K + DIM_V) operations a pair and key against keys and values read once a block.
//
// Order of accumulation: as in prefill.cu, tiles lie at multiples of KEYS from position 0, and a tile that a row does not see leaves its sums as they are to the bit. Queries and
// weights are rounded to the pool's type; sums are f32.
#include "hopper.cuh"

#if KV_TYPE == 1
typedef F16 E;
#define WGMMA wgmma_f16
#else
typedef BF16 E;
#define WGMMA wgmma_bf16
#endif

#define THREADS 384
#define ROWS 128
#define STAGES 2

constexpr u32 KEYS = DIM_K > 128 || DIM_V > 128 ? 64 : 128;
static_assert(DIM_K % 64 == 0 && DIM_V % 64 == 0 && DIM_K <= 256 && DIM_V <= 256, "whole columns of 64 elements");

// Elements of a place for the keys and the values of a tile.
constexpr u32 KEY_TILE = KEYS * DIM_K, VALUE_TILE = KEYS * DIM_V;
// Warps that let go of a place.
constexpr u32 READERS = 8;

// Rounds two numbers, the first to the low half.
__device__ __forceinline__ u32 pack(f32 low, f32 high) { return u32(E::store(low)) | u32(E::store(high)) << 16; }

// What is in shared memory, from a multiple of 1024 on.
struct Shared {
    u16* queries;
    u16* keys;
    u16* values;
    // For each place: its keys have come, its values have, and it is free.
    u64* keys_there;
    u64* values_there;
    u64* free;
};

// Positions whose boxes are copied: those from `first` up to `end`, by whole boxes.
struct Range {
    u32 first, end;
};

template <u32 DIM>
__device__ __forceinline__ void load_tile(u16* to, const void* map, u64* there, const u32* table, Range seen, u32 base, u32 kv_head, u32 kv_heads,
                                          u32 page_tokens, u32 box, u32 first_page) {
    u32 boxes = 0;
    for (u32 at = base; at < base + KEYS; at += box) boxes += at < seen.end && at + box > seen.first;
    barrier_expect(there, boxes * box * DIM * 2);
    for (u32 at = base; at < base + KEYS; at += box) {
        if (at >= seen.end || at + box <= seen.first) continue;
        const u32 row = ((first_page + table[at / page_tokens]) * kv_heads + kv_head) * page_tokens + at % page_tokens;
#pragma unroll
        for (u32 d = 0; d < DIM; d += 64) bulk_load(to + d * KEYS + (at - base) * 64, map, d, row, there);
    }
}

// sums += weights * values, or the scores of a tile: `d` in parts of 128 and 64 columns.
template <u32 COLUMNS, u32 FROM = 0>
struct Parts {
    static constexpr u32 WIDTH = COLUMNS - FROM >= 128 ? 128 : 64;
    static __device__ __forceinline__ void add(f32 (&sums)[COLUMNS / 2], const u32 (&weights)[4], const u16* values) {
        f32(&part)[WIDTH / 2] = *reinterpret_cast<f32(*)[WIDTH / 2]>(&sums[FROM / 2]);
        WGMMA(part, weights, matrix_at(values + FROM * KEYS, KEYS * 128, 1024), true);
        if constexpr (FROM + WIDTH < COLUMNS) Parts<COLUMNS, FROM + WIDTH>::add(sums, weights, values);
    }
};

KERNEL __launch_bounds__(THREADS, 1)
paged_prefill_hopper(const f32* q, const void* key_map, const void* value_map, const u32* tables, const u32* seqs, const u32* tiles, const f32* sinks,
                     f32* out, u32 heads, u32 kv_heads, u32 page_tokens, u32 window, f32 scale, u32 first_page, u32 box) {
    DYNAMIC_SHARED(shared_bytes);
    Shared shared;
    shared.queries = reinterpret_cast<u16*>((u64(shared_bytes) + 1023) / 1024 * 1024);
    shared.keys = shared.queries + ROWS * DIM_K;
    shared.values = shared.keys + STAGES * KEY_TILE;
    shared.keys_there = reinterpret_cast<u64*>(shared.values + STAGES * VALUE_TILE);
    shared.values_there = shared.keys_there + STAGES;
    shared.free = shared.values_there + STAGES;

    const u32* seq = seqs + 4 * tiles[2 * blockIdx.x];
    const u32 first_pair = tiles[2 * blockIdx.x + 1];
    const u32 first_row = seq[0], rows = seq[1], start = seq[2];
    const u32* table = tables + seq[3];
    const u32 kv_head = blockIdx.y, group = heads / kv_heads;

    // Positions that any pair of the block sees.
    const u32 lowest = start + min(first_pair / group, rows - 1);
    const u32 highest = start + min((first_pair + ROWS - 1) / group, rows - 1);
    const u32 lowest_from = window && lowest + 1 > window ? lowest + 1 - window : 0;
    const u32 first_base = lowest_from / KEYS * KEYS;
    const Range seen = {lowest_from, highest + 1};

    if (threadIdx.x == 0) {
        for (u32 i = 0; i < STAGES; i++) {
            barrier_make(shared.keys_there + i, 1);
            barrier_make(shared.values_there + i, 1);
            barrier_make(shared.free + i, READERS);
        }
        barriers_made();
    }
    __syncthreads();

    const u32 warpgroup = threadIdx.x / 128;
    if (warpgroup == 0) {
        registers_give<24>();
        if (threadIdx.x != 0) return;
        map_acquire(key_map);
        map_acquire(value_map);
        u32 turn = 0;
        for (u32 base = first_base; base <= highest; base += KEYS, turn++) {
            const u32 place = turn % STAGES;
            if (turn >= STAGES) barrier_wait(shared.free + place, (turn / STAGES - 1) % 2);
            load_tile<DIM_K>(shared.keys + place * KEY_TILE, key_map, shared.keys_there + place, table, seen, base, kv_head, kv_heads, page_tokens,
                             box, first_page);
            load_tile<DIM_V>(shared.values + place * VALUE_TILE, value_map, shared.values_there + place, table, seen, base, kv_head, kv_heads,
                             page_tokens, box, first_page);
        }
        return;
    }
    registers_take<240>();

    const u32 thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, quad = lane % 4;
    const u32 own_row = 64 * (warpgroup - 1);
    // The two pairs whose scores this thread has a part of.
    u32 position[2], from[2];
    u64 pair_at[2];
    bool there[2];
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        const u32 pair = first_pair + own_row + 16 * warp + lane / 4 + 8 * i;
        there[i] = pair / group < rows;
        position[i] = start + min(pair / group, rows - 1);
        from[i] = window && position[i] + 1 > window ? position[i] + 1 - window : 0;
        pair_at[i] = u64(first_row + min(pair / group, rows - 1)) * heads + kv_head * group + pair % group;
    }
    const u32 own_lowest = start + min((first_pair + own_row) / group, rows - 1);
    const u32 own_highest = start + min((first_pair + own_row + 63) / group, rows - 1);
    const u32 own_highest_from = window && own_highest + 1 > window ? own_highest + 1 - window : 0;

    for (u32 i = thread; i < 64 * (DIM_K / 8); i += 128) {
        const u32 row = own_row + i / (DIM_K / 8), piece = i % (DIM_K / 8), pair = first_pair + row;
        uint4 packed = make_uint4(0, 0, 0, 0);
        if (pair / group < rows) {
            const f32* x = q + (u64(first_row + pair / group) * heads + kv_head * group + pair % group) * DIM_K + 8 * piece;
            const float4 a = reinterpret_cast<const float4*>(x)[0], b = reinterpret_cast<const float4*>(x)[1];
            packed = make_uint4(pack(a.x, a.y), pack(a.z, a.w), pack(b.x, b.y), pack(b.z, b.w));
        }
        u16* to = shared.queries + piece / 8 * ROWS * 64 + row * 64 + (piece % 8 ^ row % 8) * 8;
        *reinterpret_cast<uint4*>(to) = packed;
    }
    shared_fence();
    warpgroup_barrier(warpgroup);

    f32 sums[DIM_V / 2], scores[KEYS / 2], most[2] = {-INFINITE, -INFINITE}, total[2] = {0.0f, 0.0f}, kept[2];
    u32 weights[KEYS / 16][4];
#pragma unroll
    for (u32 i = 0; i < DIM_V / 2; i++) sums[i] = 0.0f;
#pragma unroll
    for (u32 i = 0; i < KEYS / 2; i++) scores[i] = 0.0f;
    const f32 to_log2 = scale * LOG2_E;

    // Begins scores = queries * keys of a tile, once these have come.
    auto begin_scores = [&](u32 turn) {
        const u32 place = turn % STAGES;
        barrier_wait(shared.keys_there + place, turn / STAGES % 2);
        hold(scores);
        wgmma_begin();
#pragma unroll
        for (u32 k = 0; k < DIM_K / 16; k++) {
            const Matrix own = matrix_at(shared.queries + k / 4 * ROWS * 64 + own_row * 64 + k % 4 * 16, 0, 1024);
            const Matrix all = matrix_at(shared.keys + place * KEY_TILE + k / 4 * KEYS * 64 + k % 4 * 16, 0, 1024);
            WGMMA(scores, own, all, k > 0);
        }
        wgmma_commit();
    };
    // Waits for the values of a tile.
    auto values_of = [&](u32 turn, u32 base) {
        const u32 place = turn % STAGES;
        u16* values = shared.values + place * VALUE_TILE;
        barrier_wait(shared.values_there + place, turn / STAGES % 2);
        if (base < seen.first || base + KEYS > seen.end) {
            // Rows that nobody sees have a weight of 0, which takes away all but what is no number.
            for (u32 i = thread; i < KEYS * (DIM_V / 8); i += 128) {
                const u32 key = i / (DIM_V / 8), piece = i % (DIM_V / 8);
                if (base + key >= seen.first && base + key < seen.end) continue;
                u16* to = values + piece / 8 * KEYS * 64 + key * 64 + piece % 8 * 8;
                *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
            }
            shared_fence();
            warpgroup_barrier(warpgroup);
        }
        return values;
    };
    // Begins sums += weights * values.
    auto begin_sums = [&](const u16* values) {
        hold(sums);
        wgmma_begin();
#pragma unroll
        for (u32 k = 0; k < KEYS / 16; k++) Parts<DIM_V>::add(sums, weights[k], values + k * 16 * 64);
        wgmma_commit();
    };
    // Makes weights of scores, up to the sum of their row, which `total` becomes; says in `kept` what is left of the sums before.
    auto soften = [&](u32 base) {
        const bool whole = base + KEYS - 1 <= own_lowest && base >= own_highest_from;
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            f32 now = most[i];
#pragma unroll
            for (u32 n = 0; n < KEYS / 8; n++) {
#pragma unroll
                for (u32 j = 0; j < 2; j++) {
                    const u32 key = base + 8 * n + 2 * quad + j;
                    f32& score = scores[4 * n + 2 * i + j];
                    score = whole || (key <= position[i] && key >= from[i]) ? score * to_log2 : -INFINITE;
                    now = fmaxf(now, score);
                }
            }
            // Four threads have a row's scores.
            now = fmaxf(now, __shfl_xor_sync(FULL, now, 1));
            now = fmaxf(now, __shfl_xor_sync(FULL, now, 2));
            const f32 below = now == -INFINITE ? 0.0f : now;
            kept[i] = exp2f(most[i] - below);
            most[i] = now;
            f32 sum = 0.0f;
#pragma unroll
            for (u32 n = 0; n < KEYS / 8; n++) {
#pragma unroll
                for (u32 j = 0; j < 2; j++) {
                    f32& score = scores[4 * n + 2 * i + j];
                    score = exp2f(score - below);
                    sum += score;
                }
            }
            total[i] = fmaf(total[i], kept[i], sum);
        }
    };
    // The weights of the next product with values; no product may be under way.
    auto take_weights = [&] {
#pragma unroll
        for (u32 n = 0; n < DIM_V / 8; n++) {
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                sums[4 * n + 2 * i] *= kept[i];
                sums[4 * n + 2 * i + 1] *= kept[i];
            }
        }
#pragma unroll
        for (u32 k = 0; k < KEYS / 16; k++) {
            // What a thread has of two tiles of scores is what it gives of one of weights.
#pragma unroll
            for (u32 i = 0; i < 4; i++) weights[k][i] = pack(scores[8 * k + 2 * i], scores[8 * k + 2 * i + 1]);
        }
    };

    // The turn to start products goes from one warpgroup to the other, the first one having it first; each waits for its own at a barrier of its own. Both have as many, and the second one's
    // last is followed by none.
    const u32 own_turn = 2 + warpgroup, other_turn = 7 - own_turn;
    auto give_turn = [&](u32 base) {
        if (warpgroup == 1 || base + KEYS <= highest) turn_give(other_turn);
    };
    if (warpgroup == 2) turn_give(other_turn);
    turn_wait(own_turn);
    begin_scores(0);
    give_turn(first_base);
    wgmma_wait<0>();
    hold(scores);
    soften(first_base);
    take_weights();
    u32 turn = 1;
    for (u32 base = first_base + KEYS; base <= highest; base += KEYS, turn++) {
        // The values of the tile before are multiplied while the scores of this one become weights.
        const u16* values = values_of(turn - 1, base - KEYS);
        turn_wait(own_turn);
        begin_scores(turn);
        begin_sums(values);
        give_turn(base);
        wgmma_wait<1>();
        hold(scores);
        soften(base);
        wgmma_wait<0>();
        hold(sums);
        if (lane == 0) barrier_arrive(shared.free + (turn - 1) % STAGES);
        take_weights();
    }
    begin_sums(values_of(turn - 1, first_base + (turn - 1) * KEYS));
    wgmma_wait<0>();
    hold(sums);

#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        f32 sum = total[i];
        sum += __shfl_xor_sync(FULL, sum, 1);
        sum += __shfl_xor_sync(FULL, sum, 2);
        if (sinks) sum += exp2f(sinks[pair_at[i] % heads] * LOG2_E - most[i]);
        if (!there[i]) continue;
#pragma unroll
        for (u32 n = 0; n < DIM_V / 8; n++) {
            f32* to = out + pair_at[i] * DIM_V + 8 * n + 2 * quad;
            to[0] = sums[4 * n + 2 * i] / sum;
            to[1] = sums[4 * n + 2 * i + 1] / sum;
        }
    }
}

EXPORT(paged_prefill_hopper)
