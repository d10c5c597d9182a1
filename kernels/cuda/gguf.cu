// Weights of GGUF: dequantised, as a table of embeddings, and as a matrix times few rows.
//
// Bound by memory: the weights are read once for up to four rows of x, which come from the cache.
#include "gguf.cuh"

template <class Format>
__device__ __forceinline__ void dequant(const u8* w, f32* out, u64 elements) {
    // A matrix of whole rows is one long row of blocks; it may have more elements than 32 bits count, pieces of eight it has not.
    const u64 step = u64(gridDim.x) * blockDim.x;
    for (u64 piece = u64(blockIdx.x) * blockDim.x + threadIdx.x; 8 * piece < elements; piece += step) {
        f32 x[8];
        if (8 * piece + 8 <= elements) {
            Format::eight(w, u32(piece), x);
#pragma unroll
            for (u32 i = 0; i < 8; i++) out[8 * piece + i] = x[i];
        } else if constexpr (Format::ELEMENTS == 1) {
            for (u64 i = 8 * piece; i < elements; i++) out[i] = Format::one(w, i);
        }
    }
}

template <class Format>
__device__ __forceinline__ void embed(const u8* table, const u32* ids, f32* out, u32 cols) {
    const u8* row = table + ids[blockIdx.x] * row_bytes<Format>(cols);
    f32* to = out + u64(blockIdx.x) * cols;
    for (u32 first = 8 * threadIdx.x; first < cols; first += 8 * blockDim.x) {
        f32 x[8];
        eight_within<Format>(row, first, cols, x);
        for (u32 i = 0; i < 8 && first + i < cols; i++) to[first + i] = x[i];
    }
}

// One row of weights times up to four rows of x, by a warp; `x_of(r)` is where row r begins. Lane l takes pieces l, l + 32, ... of eight elements in order; then lanes are
// added in a tree, so that every lane has the sums.
template <class Format, class RowOf>
__device__ __forceinline__ void times_rows(const u8* weights, u32 cols, u32 count, RowOf x_of, f32 (&sums)[4]) {
#pragma unroll
    for (u32 r = 0; r < 4; r++) sums[r] = 0.0f;
    for (u32 first = 8 * (threadIdx.x % 32); first < cols; first += 256) {
        f32 weight[8];
        eight_within<Format>(weights, first, cols, weight);
        const u32 here = min(cols - first, 8u);
#pragma unroll
        for (u32 r = 0; r < 4; r++) {
            if (r >= count) break;
            const f32* from = x_of(r) + first;
            if (here == 8 && aligned(from, 16)) {
                const float4 a = *reinterpret_cast<const float4*>(from), b = *reinterpret_cast<const float4*>(from + 4);
                const f32 eight[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
                for (u32 i = 0; i < 8; i++) sums[r] = fmaf(weight[i], eight[i], sums[r]);
            } else {
#pragma unroll
                for (u32 i = 0; i < 8; i++) {
                    if (i < here) sums[r] = fmaf(weight[i], from[i], sums[r]);
                }
            }
        }
    }
#pragma unroll
    for (u32 r = 0; r < 4; r++) sums[r] = warp_sum(sums[r]);
}

// Rows of x and of out lie `x_stride` and `out_stride` elements apart; group z has weights, columns of x and columns of out of its own.
template <class Format>
__device__ __forceinline__ void matvec(const u8* w, const f32* x, const f32* bias, f32* out, u32 out_rows, u32 cols, u32 rows, u64 x_stride,
                                       u64 out_stride) {
    const u32 o = blockIdx.x * 8 + threadIdx.x / 32, first_row = blockIdx.y * 4, count = min(rows - first_row, 4u);
    if (o >= out_rows) return;
    const u64 group = blockIdx.z;
    x += group * cols + first_row * x_stride;
    out += group * out_rows + first_row * out_stride;
    f32 sums[4];
    times_rows<Format>(w + (group * out_rows + o) * row_bytes<Format>(cols), cols, count, [=](u32 r) { return x + r * x_stride; }, sums);
    if (threadIdx.x % 32 != 0) return;
#pragma unroll
    for (u32 r = 0; r < 4; r++) {
        if (r < count) out[r * out_stride + o] = bias ? sums[r] + bias[o] : sums[r];
    }
}

// The same for pairs of rows and experts, four pairs of an expert at a time: `weights` and `biases` are addresses by expert.
template <class Format>
__device__ __forceinline__ void moe_matvec(const u64* weights, const u64* biases, const f32* x, const u32* offsets, const u32* order, f32* out,
                                           u32 out_rows, u32 cols, u32 pairs_a_row) {
    const u32 o = blockIdx.x * 8 + threadIdx.x / 32, expert = blockIdx.z, end = offsets[expert + 1];
    if (o >= out_rows) return;
    const u8* row = reinterpret_cast<const u8*>(weights[expert]) + o * row_bytes<Format>(cols);
    for (u32 first = offsets[expert] + 4 * blockIdx.y; first < end; first += 4 * gridDim.y) {
        const u32 count = min(end - first, 4u);
        f32 sums[4];
        times_rows<Format>(row, cols, count, [=](u32 r) { return x + u64(order[first + r] / pairs_a_row) * cols; }, sums);
        if (threadIdx.x % 32 != 0) continue;
#pragma unroll
        for (u32 r = 0; r < 4; r++) {
            if (r >= count) break;
            const f32 bias = biases ? reinterpret_cast<const f32*>(biases[expert])[o] : 0.0f;
            out[u64(order[first + r]) * out_rows + o] = biases ? sums[r] + bias : sums[r];
        }
    }
}

#define FORMAT(name, Format)                                                                                             \
    KERNEL __launch_bounds__(256) dequant_##name(const u8* w, f32* out, u64 elements) { dequant<Format>(w, out, elements); } \
    KERNEL __launch_bounds__(128) embed_##name(const u8* table, const u32* ids, f32* out, u32 cols) {                    \
        embed<Format>(table, ids, out, cols);                                                                            \
    }                                                                                                                    \
    KERNEL __launch_bounds__(256) matvec_##name(const u8* w, const f32* x, const f32* bias, f32* out, u32 out_rows,      \
                                                u32 cols, u32 rows) {                                                    \
        matvec<Format>(w, x, bias, out, out_rows, cols, rows, cols, out_rows);                                           \
    }                                                                                                                    \
    KERNEL __launch_bounds__(256) matvec_groups_##name(const u8* w, const f32* x, f32* out, u32 out_rows, u32 cols,      \
                                                       u32 rows, u64 x_stride, u64 out_stride) {                         \
        matvec<Format>(w, x, nullptr, out, out_rows, cols, rows, x_stride, out_stride);                                  \
    }                                                                                                                    \
    KERNEL __launch_bounds__(256) moe_matvec_##name(const u64* weights, const u64* biases, const f32* x,                 \
                                                    const u32* offsets, const u32* order, f32* out, u32 out_rows,        \
                                                    u32 cols, u32 pairs_a_row) {                                         \
        moe_matvec<Format>(weights, biases, x, offsets, order, out, out_rows, cols, pairs_a_row);                        \
    }                                                                                                                    \
    EXPORT(dequant_##name)                                                                                               \
    EXPORT(embed_##name)                                                                                                 \
    EXPORT(matvec_##name)                                                                                                \
    EXPORT(matvec_groups_##name)                                                                                         \
    EXPORT(moe_matvec_##name)

FORMAT(f32, Plain<F32>)
FORMAT(f16, Plain<F16>)
FORMAT(bf16, Plain<BF16>)
FORMAT(q4_0, Q4_0)
FORMAT(q4_1, Q4_1)
FORMAT(q8_0, Q8_0)
FORMAT(q4_k, QK<false>)
FORMAT(q5_k, QK<true>)
FORMAT(q6_k, Q6_K)
