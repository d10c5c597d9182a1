// From logits to tokens, one block a row: penalties, the largest, log-softmax, and the draw with top-k, top-p and min-p.
//
// Weights are sums of integers (40 bits behind the point), so that they do not depend on the order in which threads add them. Thresholds are found by
// digits of the logits' order, eight bits a pass. Bound by memory: the row is read once for `argmax`, up to eleven times (from the cache) for `sample`.
#include "common.cuh"

#define THREADS 256
#define NOT_A_NUMBER 0xFFFFFFFFu
#define NOTHING_LEFT 0xFFFFFFFEu

// A number whose order is that of the floats.
__device__ __forceinline__ u32 order_of(f32 x) {
    const u32 bits = __float_as_uint(x);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ u64 block_sum_u64(u64 x, u64* scratch) {
    for (u32 by = 16; by > 0; by /= 2) x += __shfl_xor_sync(FULL, x, by);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    u64 sum = 0;
    for (u32 i = 0; i < THREADS / 32; i++) sum += scratch[i];
    __syncthreads();
    return sum;
}

__device__ __forceinline__ u64 block_max_u64(u64 x, u64* scratch) {
    for (u32 by = 16; by > 0; by /= 2) x = max(x, __shfl_xor_sync(FULL, x, by));
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    u64 most = 0;
    for (u32 i = 0; i < THREADS / 32; i++) most = max(most, scratch[i]);
    __syncthreads();
    return most;
}

// The sum over the threads before this one.
__device__ __forceinline__ u64 sum_before(u64 x, u64* scratch) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u64 sum = x;
    for (u32 by = 1; by < 32; by *= 2) {
        const u64 from = __shfl_up_sync(FULL, sum, by);
        if (lane >= by) sum += from;
    }
    if (lane == 31) scratch[warp] = sum;
    __syncthreads();
    for (u32 i = 0; i < warp; i++) sum += scratch[i];
    __syncthreads();
    return sum - x;
}

// The token with the largest logit, of equal ones the first; or a mark.
__device__ __forceinline__ u32 largest(const f32* row, u32 vocab, u64* scratch) {
    u64 best = 0, bad = 0;
    for (u32 i = threadIdx.x; i < vocab; i += THREADS) {
        const f32 x = row[i];
        if (x != x) bad = 1;
        // Zeros of both signs are equal.
        best = max(best, u64(order_of(x == 0.0f ? 0.0f : x)) << 32 | (FULL - i));
    }
    bad = block_max_u64(bad, scratch);
    best = block_max_u64(best, scratch);
    if (bad) return NOT_A_NUMBER;
    return u32(best >> 32) == order_of(-INFINITE) ? NOTHING_LEFT : FULL - u32(best);
}

KERNEL __launch_bounds__(THREADS) argmax(const f32* logits, u32 vocab, u32* ids) {
    SHARED(u64, scratch, THREADS / 32);
    const u32 id = largest(logits + u64(blockIdx.x) * vocab, vocab, scratch);
    if (threadIdx.x == 0) ids[blockIdx.x] = id;
}

KERNEL __launch_bounds__(THREADS) penalise(f32* logits, u32 vocab, const u32* entries, const f32* penalties, u32 n) {
    const u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= n) return;
    const u32 row = entries[3 * i], token = entries[3 * i + 1], count = entries[3 * i + 2];
    const f32 frequency = penalties[3 * row], presence = penalties[3 * row + 1], repetition = penalties[3 * row + 2];
    f32& logit = logits[u64(row) * vocab + token];
    const f32 x = logit - (frequency * f32(count) + presence);
    logit = x > 0.0f ? x / repetition : x * repetition;
}

KERNEL __launch_bounds__(THREADS) bias_logits(f32* logits, u32 vocab, const u32* places, const f32* values, u32 n) {
    const u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i < n) logits[u64(places[2 * i]) * vocab + places[2 * i + 1]] += values[i];
}

KERNEL __launch_bounds__(THREADS) log_softmax(const f32* logits, u32 vocab, f32* out) {
    SHARED(f32, scratch, 32);
    const f32* row = logits + u64(blockIdx.x) * vocab;
    f32* to = out + u64(blockIdx.x) * vocab;
    f32 most = -INFINITE;
    for (u32 i = threadIdx.x; i < vocab; i += THREADS) most = fmaxf(most, row[i]);
    most = block_max(most, scratch);
    f32 sum = 0.0f;
    for (u32 i = threadIdx.x; i < vocab; i += THREADS) sum += expf(row[i] - most);
    const f32 all = logf(block_sum(sum, scratch));
    for (u32 i = threadIdx.x; i < vocab; i += THREADS) to[i] = row[i] - most - all;
}

// A row whose largest logit is known.
struct Row {
    const f32* logits;
    u32 vocab;
    f32 most, temperature;

    // At most 1.
    __device__ __forceinline__ f32 weight(u32 i) const {
        if (most == INFINITE) return logits[i] == most ? 1.0f : 0.0f;
        return expf((logits[i] - most) / temperature);
    }
    __device__ __forceinline__ u64 fixed(u32 i) const { return u64(weight(i) * 1099511627776.0f); }
};

// The tokens at or above a place in the order by logits: those above `order`, and the first `ties` of those at it.
struct Threshold {
    u32 order, ties;
    __device__ __forceinline__ bool stricter_than(const Threshold& other) const {
        return order > other.order || (order == other.order && ties < other.ties);
    }
};

// Where the running sum along the order passes `limit`: of tokens (BY_COUNT; the limit-th is the last one kept), or of weights (the first token that brings
// the sum above the limit is the last one kept).
template <bool BY_COUNT>
__device__ Threshold threshold(const Row& row, u64 limit, u32* counts, u64* sums, u64* found) {
    u32 prefix = 0;
    u64 above = 0;
    for (u32 shift = 24;; shift -= 8) {
        counts[threadIdx.x] = 0;
        sums[threadIdx.x] = 0;
        __syncthreads();
        for (u32 i = threadIdx.x; i < row.vocab; i += THREADS) {
            const u32 order = order_of(row.logits[i]);
            if (shift < 24 && order >> (shift + 8) != prefix) continue;
            atomicAdd(&counts[order >> shift & 255], 1u);
            if (!BY_COUNT) atomicAdd(&sums[order >> shift & 255], row.fixed(i));
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            u64 sum = above;
            u32 digit = 255;
            for (;; digit--) {
                const u64 here = BY_COUNT ? u64(counts[digit]) : sums[digit];
                if (digit == 0 || (BY_COUNT ? sum + here >= limit : sum + here > limit)) break;
                sum += here;
            }
            found[0] = digit;
            found[1] = sum;
        }
        __syncthreads();
        const u32 digit = u32(found[0]);
        above = found[1];
        prefix = prefix << 8 | digit;
        if (shift == 0) {
            const u32 equal = counts[digit];
            u64 ties = BY_COUNT ? limit - above : equal;
            if (!BY_COUNT && sums[digit] > 0) ties = (limit - above) / (sums[digit] / equal) + 1;
            __syncthreads();
            return {prefix, u32(min(ties, u64(equal)))};
        }
        __syncthreads();
    }
}

KERNEL __launch_bounds__(THREADS) sample(const f32* logits, u32 vocab, const f32* temperatures, const u32* top_ks, const f32* top_ps,
                                         const f32* min_ps, const f64* uniforms, u32* ids) {
    SHARED(u64, scratch, THREADS / 32);
    SHARED(u32, counts, 256);
    SHARED(u64, sums, 256);
    SHARED(u64, found, 2);
    Row row = {logits + u64(blockIdx.x) * vocab, vocab, 0.0f, temperatures[blockIdx.x]};
    const u32 best = largest(row.logits, vocab, scratch);
    if (best >= NOTHING_LEFT || row.temperature <= 0.0f) {
        if (threadIdx.x == 0) ids[blockIdx.x] = best;
        return;
    }
    row.most = row.logits[best];

    const u32 top_k = top_ks[blockIdx.x];
    const f32 top_p = top_ps[blockIdx.x], min_p = min_ps[blockIdx.x];
    Threshold kept = {0, FULL};
    if (top_p < 1.0f) {
        u64 mine = 0;
        for (u32 i = threadIdx.x; i < vocab; i += THREADS) mine += row.fixed(i);
        const u64 all = block_sum_u64(mine, scratch);
        kept = threshold<false>(row, u64(f64(top_p) * f64(all)), counts, sums, found);
    }
    if (top_k > 0 && top_k < vocab) {
        const Threshold by_count = threshold<true>(row, top_k, counts, sums, found);
        if (by_count.stricter_than(kept)) kept = by_count;
    }

    // Each thread has a run of tokens, so that runs lie in order of ids.
    const u32 each = (vocab + THREADS - 1) / THREADS, first = min(threadIdx.x * each, vocab), end = min(first + each, vocab);
    u64 equal = 0;
    for (u32 i = first; i < end; i++) equal += order_of(row.logits[i]) == kept.order;
    const u64 equal_before = sum_before(equal, scratch);
    // The running sum of kept weights up to a token beyond `limit`, which `id` becomes.
    auto walk = [&](u64 sum, u64 limit, u32& id) {
        u64 ties = equal_before;
        for (u32 i = first; i < end; i++) {
            const u32 order = order_of(row.logits[i]);
            const bool in = order > kept.order || (order == kept.order && ties < kept.ties);
            ties += order == kept.order;
            if (!in || row.weight(i) < min_p) continue;
            sum += row.fixed(i);
            if (sum > limit) {
                id = i;
                break;
            }
        }
        return sum;
    };
    u32 id = NOTHING_LEFT;
    const u64 mine = walk(0, ~0ull, id);
    const u64 before = sum_before(mine, scratch), all = block_sum_u64(mine, scratch);
    // The largest weighs 1, so the sum is not 0.
    const u64 point = min(u64(uniforms[blockIdx.x] * f64(all)), all - 1);
    if (before <= point && point < before + mine) {
        walk(before, point, id);
        ids[blockIdx.x] = id;
    }
}

EXPORT(argmax)
EXPORT(penalise)
EXPORT(bias_logits)
EXPORT(log_softmax)
EXPORT(sample)
