// Experts: the router's choice, the order of pairs by expert, and the sum of what experts give.
//
// A pair is a row and one of its k experts; pair i belongs to row i / k. The products in between are `moe_matvec` (moe_matvec.cu) and `matmul_grouped` (matmul.cu).
// Bound by latency but for the sum, which is bound by memory.
#include "common.cuh"

// A number whose order is that of the floats; no number is the lowest.
__device__ __forceinline__ u32 order_of(f32 x) {
    const u32 bits = __float_as_uint(x != x ? -INFINITE : x);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The place of the highest of `x`, the first among equals; it is struck out by becoming the lowest NaN.
#define TAKEN __uint_as_float(0xFFFFFFFFu)
__device__ __forceinline__ u32 take_highest(f32* x, u32 count) {
    u64 best = 0;
    for (u32 i = threadIdx.x; i < count; i += 32) {
        if (__float_as_uint(x[i]) != 0xFFFFFFFFu) best = max(best, u64(order_of(x[i])) << 32 | (FULL - i));
    }
    for (u32 by = 16; by > 0; by /= 2) best = max(best, __shfl_xor_sync(FULL, best, by));
    const u32 at = FULL - u32(best);
    __syncwarp();
    if (threadIdx.x == 0) x[at] = TAKEN;
    __syncwarp();
    return at;
}

// One warp a row. `scoring`: 0 softmax, 1 softmax of the chosen, 2 sigmoid, 3 square root of softplus.
KERNEL __launch_bounds__(32) route(const f32* logits, const f32* bias, const u32* ids, const u32* by_token, u32* experts, f32* weights,
                                   u32 count, u32 k, u32 scoring, u32 groups, u32 chosen_groups, u32 renormalize, f32 factor) {
    DYNAMIC_SHARED(shared_bytes);
    f32* scores = reinterpret_cast<f32*>(shared_bytes);
    f32* choice = scores + count;
    f32* sums = choice + count;
    const u32 row = blockIdx.x, lane = threadIdx.x;
    logits += u64(row) * count;
    f32 most = -INFINITE, all = 0.0f;
    if (scoring == 0) {
        for (u32 i = lane; i < count; i += 32) most = fmaxf(most, logits[i]);
        most = warp_max(most);
        for (u32 i = lane; i < count; i += 32) all += expf(logits[i] - most);
        all = warp_sum(all);
    }
    for (u32 i = lane; i < count; i += 32) {
        const f32 x = logits[i];
        f32 score = x;
        if (scoring == 0) score = expf(x - most) / all;
        if (scoring == 2) score = sigmoid(x);
        if (scoring == 3) score = sqrtf(x > 20.0f ? x : log1pf(expf(x)));
        scores[i] = score;
        choice[i] = bias ? score + bias[i] : score;
    }
    __syncwarp();
    if (!by_token && groups > 1) {
        const u32 size = count / groups;
        for (u32 g = lane; g < groups; g += 32) {
            // The sum of the group's two best.
            f32 first = -INFINITE, second = -INFINITE;
            for (u32 i = 0; i < size; i++) {
                const f32 x = choice[g * size + i];
                if (x > first) {
                    second = first;
                    first = x;
                } else if (x > second) {
                    second = x;
                }
            }
            sums[g] = size > 1 ? first + second : first;
        }
        __syncwarp();
        for (u32 i = 0; i < chosen_groups; i++) take_highest(sums, groups);
        for (u32 i = lane; i < count; i += 32) {
            if (__float_as_uint(sums[i / size]) != 0xFFFFFFFFu) choice[i] = -INFINITE;
        }
        __syncwarp();
    }
    u32* mine = experts + u64(row) * k;
    for (u32 i = 0; i < k; i++) {
        const u32 expert = by_token ? by_token[u64(ids[row]) * k + i] : take_highest(choice, count);
        if (lane == 0) mine[i] = expert;
    }
    if (lane != 0) return;
    f32* out = weights + u64(row) * k;
    f32 sum = 0.0f, top = -INFINITE;
    for (u32 i = 0; i < k; i++) top = fmaxf(top, scores[mine[i]]);
    for (u32 i = 0; i < k; i++) {
        out[i] = scoring == 1 ? expf(scores[mine[i]] - top) : scores[mine[i]];
        sum += out[i];
    }
    // The softmax of the chosen has a sum of 1.
    if (scoring == 1) {
        for (u32 i = 0; i < k; i++) out[i] /= sum;
        sum = 0.0f;
        for (u32 i = 0; i < k; i++) sum += out[i];
    }
    for (u32 i = 0; i < k; i++) out[i] = (renormalize ? out[i] / (sum + 1e-20f) : out[i]) * factor;
}

// The sum over the threads before this one, and over all 256.
__device__ __forceinline__ u32 sum_before(u32 x, u32* scratch, u32& all) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 sum = x;
    for (u32 by = 1; by < 32; by *= 2) {
        const u32 from = __shfl_up_sync(FULL, sum, by);
        if (lane >= by) sum += from;
    }
    if (lane == 31) scratch[warp] = sum;
    __syncthreads();
    all = 0;
    for (u32 i = 0; i < 8; i++) {
        if (i < warp) sum += scratch[i];
        all += scratch[i];
    }
    __syncthreads();
    return sum - x;
}

// One block an expert: its pairs, in order, behind those of the experts before it. The experts are those from number `first` on; pairs of
// others are left out.
KERNEL __launch_bounds__(256) moe_sort(const u32* experts, u32 pairs, u32 first, u32* offsets, u32* order) {
    SHARED(u32, scratch, 8);
    const u32 expert = first + blockIdx.x;
    u32 below = 0, at;
    for (u32 i = threadIdx.x; i < pairs; i += 256) below += experts[i] >= first && experts[i] < expert;
    sum_before(below, scratch, at);
    if (threadIdx.x == 0) offsets[blockIdx.x] = at;
    for (u32 base = 0; base < pairs; base += 256) {
        const u32 i = base + threadIdx.x;
        const bool own = i < pairs && experts[i] == expert;
        u32 here;
        const u32 place = sum_before(own, scratch, here);
        if (own) order[at + place] = i;
        at += here;
    }
    if (threadIdx.x == 0 && blockIdx.x == gridDim.x - 1) offsets[gridDim.x] = at;
}

// A row's sum of what its experts give, in order of their numbers, of those `count` from number `first` on.
KERNEL __launch_bounds__(256) moe_combine(const f32* outputs, const u32* experts, const f32* weights, f32* y, u32 k, u32 width, u32 first,
                                          u32 count) {
    SHARED(u32, places, 64);
    const u64 row = blockIdx.x;
    experts += row * k;
    if (threadIdx.x < k) {
        u32 rank = 0;
        for (u32 i = 0; i < k; i++) {
            rank += experts[i] < experts[threadIdx.x] || (experts[i] == experts[threadIdx.x] && i < threadIdx.x);
        }
        places[rank] = threadIdx.x;
    }
    __syncthreads();
    for (u32 d = threadIdx.x; d < width; d += blockDim.x) {
        f32 sum = 0.0f;
        for (u32 i = 0; i < k; i++) {
            if (experts[places[i]] - first >= count) continue;
            sum = fmaf(weights[row * k + places[i]], outputs[(row * k + places[i]) * width + d], sum);
        }
        y[row * width + d] = sum;
    }
}

// y += factor * x, row by row; the factor is the sigmoid of the row's gate where there are gates, else 1.
KERNEL __launch_bounds__(256) add_gated_rows(f32* y, const f32* x, const f32* gates, u32 width) {
    const u64 row = blockIdx.x;
    const f32 factor = gates ? sigmoid(gates[row]) : 1.0f;
    for (u32 d = threadIdx.x; d < width; d += blockDim.x) y[row * width + d] = fmaf(factor, x[row * width + d], y[row * width + d]);
}

EXPORT(route)
EXPORT(moe_sort)
EXPORT(moe_combine)
EXPORT(add_gated_rows)
