// The indexer: scores of keys, and the highest of them.
//
// Scores: a block takes one row and 32 keys, which become f32 in shared memory; a thread makes the products of its key with every fourth head. Bound by memory for keys in principle; plain
// arithmetic here: 2 * heads * dim operations a key.
// Top-k: digits of the scores' order, eight bits a pass, then the picked in order of their numbers. Bound by memory: six reads of the scores.
#include "rows.cuh"

#define KEYS 32

template <class Rows>
__device__ __forceinline__ void index_scores(const f32* q, const f32* weights, const u8* pool, const u32* tables, const u32* row_tables,
                                             const u32* counts, f32* scores, u64 stride, u32 heads, u32 dim, u32 page_rows, u64 page_bytes,
                                             f32* shared, f32* parts) {
    const u32 row = blockIdx.y, first = blockIdx.x * KEYS, count = counts[row];
    if (first >= count) return;
    f32* queries = shared;
    f32* keys = queries + heads * dim;
    const u32 stride_keys = dim | 1, here = min(count - first, u32(KEYS));
    const u32* table = tables + row_tables[row];
    for (u32 i = threadIdx.x; i < heads * dim; i += blockDim.x) queries[i] = q[u64(row) * heads * dim + i];
    for (u32 i = threadIdx.x; i < here * dim; i += blockDim.x) {
        const u32 number = first + i / dim, d = i % dim, index = number % page_rows;
        const u8* page = pool + table[number / page_rows] * page_bytes;
        keys[i / dim * stride_keys + d] =
            Rows::element(page + data_at<Rows>(index, dim, 0), page + scales_at<Rows>(index, page_rows, dim, 0), d, dim, 0);
    }
    __syncthreads();
    const u32 key = threadIdx.x % KEYS, part = threadIdx.x / KEYS;
    f32 sum = 0.0f;
    if (key < here) {
        for (u32 head = part; head < heads; head += 4) {
            f32 dot = 0.0f;
            for (u32 d = 0; d < dim; d++) dot = fmaf(queries[head * dim + d], keys[key * stride_keys + d], dot);
            sum = fmaf(weights[u64(row) * heads + head], fmaxf(dot, 0.0f), sum);
        }
    }
    parts[threadIdx.x] = sum;
    __syncthreads();
    if (part == 0 && key < here) {
        scores[row * stride + first + key] = parts[key] + parts[KEYS + key] + parts[2 * KEYS + key] + parts[3 * KEYS + key];
    }
}

#define INDEX_SCORES(name, Rows)                                                                                              \
    KERNEL __launch_bounds__(128) name(const f32* q, const f32* weights, const u8* pool, const u32* tables,                   \
                                       const u32* row_tables, const u32* counts, f32* scores, u64 stride, u32 heads, u32 dim, \
                                       u32 page_rows, u64 page_bytes) {                                                       \
        DYNAMIC_SHARED(shared_bytes);                                                                                         \
        SHARED(f32, parts, 4 * KEYS);                                                                                         \
        index_scores<Rows>(q, weights, pool, tables, row_tables, counts, scores, stride, heads, dim, page_rows, page_bytes,   \
                           reinterpret_cast<f32*>(shared_bytes), parts);                                                      \
    }                                                                                                                         \
    EXPORT(name)

INDEX_SCORES(index_scores_f32, PlainRows<F32>)
INDEX_SCORES(index_scores_f16, PlainRows<F16>)
INDEX_SCORES(index_scores_bf16, PlainRows<BF16>)
INDEX_SCORES(index_scores_packed, PackedKeys)

// A number whose order is that of the scores; no number is the lowest.
__device__ __forceinline__ u32 order_of(f32 x) {
    const u32 bits = __float_as_uint(x != x ? -INFINITE : x);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The sum over the threads before this one, and over all.
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

KERNEL __launch_bounds__(256) top_k(const f32* scores, u64 stride, const u32* counts, u32 k, u32* picked, u32* picked_counts) {
    SHARED(u32, digits, 256);
    SHARED(u32, scratch, 8);
    SHARED(u32, found, 2);
    const u32 row = blockIdx.x, count = counts[row], keep = min(count, k);
    const f32* from = scores + row * stride;
    u32* to = picked + u64(row) * k;
    if (threadIdx.x == 0) picked_counts[row] = keep;
    if (count <= k) {
        for (u32 i = threadIdx.x; i < count; i += 256) to[i] = i;
        return;
    }
    // The k-th highest order, and how many of those equal to it are kept.
    u32 prefix = 0, above = 0;
    for (u32 shift = 24;; shift -= 8) {
        digits[threadIdx.x] = 0;
        __syncthreads();
        for (u32 i = threadIdx.x; i < count; i += 256) {
            const u32 order = order_of(from[i]);
            if (shift == 24 || order >> (shift + 8) == prefix) atomicAdd(&digits[order >> shift & 255], 1u);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            u32 digit = 255, sum = above;
            while (sum + digits[digit] < keep) sum += digits[digit--];
            found[0] = digit;
            found[1] = sum;
        }
        __syncthreads();
        prefix = prefix << 8 | found[0];
        above = found[1];
        if (shift == 0) break;
    }
    const u32 ties = keep - above;
    u32 equal_so_far = 0, kept_so_far = 0;
    for (u32 base = 0; base < count; base += 256) {
        const u32 i = base + threadIdx.x;
        const u32 order = i < count ? order_of(from[i]) : 0;
        const bool equal = i < count && order == prefix;
        u32 equal_here, kept_here;
        const u32 rank = equal_so_far + sum_before(equal, scratch, equal_here);
        const bool in = i < count && (order > prefix || (equal && rank < ties));
        const u32 place = kept_so_far + sum_before(in, scratch, kept_here);
        if (in) to[place] = i;
        equal_so_far += equal_here;
        kept_so_far += kept_here;
    }
}

EXPORT(top_k)
