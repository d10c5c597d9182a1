// Weights of eight and four bits as checkpoints have them: e4m3 with a scale for each block of 128 by 128, and mxfp4, e2m1 with a power of two for each 32 of a row. Dequantised, and as a
// matrix times few rows. Memory-bound: the weights once for up to four rows of x.
#include "rows.cuh"

__device__ __forceinline__ f32 from_e8m0(u8 byte) {
    if (byte == 255) return __uint_as_float(0x7FC00000u);
    // 2^-127 is no normal number.
    return byte == 0 ? __uint_as_float(0x00400000u) : power_of_two(int(byte) - 127);
}
__device__ __forceinline__ f32 from_e2m1(u32 code) {
    const u32 size = code & 7;
    const f32 x = size < 2 ? 0.5f * f32(size) : (1.0f + 0.5f * f32(size & 1)) * power_of_two(int(size >> 1) - 1);
    return code & 8 ? -x : x;
}

// A matrix of e4m3. Scales are f32, or powers of two in a byte.
struct Fp8 {
    const u8* w;
    const void* scales;
    u32 bytes, cols;
    __device__ __forceinline__ f32 at(u32 row, u32 col) const {
        const u64 block = u64(row / 128) * ((cols + 127) / 128) + col / 128;
        const f32 scale = bytes ? from_e8m0(static_cast<const u8*>(scales)[block]) : static_cast<const f32*>(scales)[block];
        return from_e4m3(w[u64(row) * cols + col]) * scale;
    }
};
// A matrix of mxfp4, two values a byte, the low half first.
struct Mxfp4 {
    const u8* w;
    const void* scales;
    u32 bytes, cols;
    __device__ __forceinline__ f32 at(u32 row, u32 col) const {
        const u64 index = u64(row) * cols + col;
        return from_e2m1(w[index / 2] >> index % 2 * 4 & 15) * from_e8m0(static_cast<const u8*>(scales)[index / 32]);
    }
};

template <class Matrix, class E>
__device__ __forceinline__ void dequant(const Matrix& matrix, typename E::Stored* out, u32 rows) {
    const u64 all = u64(rows) * matrix.cols, step = u64(gridDim.x) * blockDim.x;
    for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < all; i += step) {
        out[i] = E::store(matrix.at(u32(i / matrix.cols), u32(i % matrix.cols)));
    }
}

// One row of weights times up to four rows of x, by a warp; `x_of(r)` is where row r begins. Lane l takes columns l, l + 32, ... in order.
template <class Matrix, class RowOf>
__device__ __forceinline__ void times_rows(const Matrix& matrix, u32 o, u32 count, RowOf x_of, f32 (&sums)[4]) {
#pragma unroll
    for (u32 r = 0; r < 4; r++) sums[r] = 0.0f;
    for (u32 col = threadIdx.x % 32; col < matrix.cols; col += 32) {
        const f32 weight = matrix.at(o, col);
#pragma unroll
        for (u32 r = 0; r < 4; r++) {
            if (r < count) sums[r] = fmaf(weight, x_of(r)[col], sums[r]);
        }
    }
#pragma unroll
    for (u32 r = 0; r < 4; r++) sums[r] = warp_sum(sums[r]);
}

template <class Matrix>
__device__ __forceinline__ void matvec(const Matrix& matrix, const f32* x, const f32* bias, f32* out, u32 out_rows, u32 rows) {
    const u32 o = blockIdx.x * 8 + threadIdx.x / 32, first_row = blockIdx.y * 4, count = min(rows - first_row, 4u), cols = matrix.cols;
    if (o >= out_rows) return;
    x += u64(first_row) * cols;
    f32 sums[4];
    times_rows(matrix, o, count, [=](u32 r) { return x + u64(r) * cols; }, sums);
    if (threadIdx.x % 32 != 0) return;
#pragma unroll
    for (u32 r = 0; r < 4; r++) {
        if (r < count) out[u64(first_row + r) * out_rows + o] = bias ? sums[r] + bias[o] : sums[r];
    }
}

// The same for pairs of rows and experts, four pairs of an expert at a time: `weights`, `scales` and `biases` are addresses by expert.
template <class Matrix>
__device__ __forceinline__ void moe_matvec(const u64* weights, const u64* scales, u32 bytes, const u64* biases, const f32* x, const u32* offsets,
                                           const u32* order, f32* out, u32 out_rows, u32 cols, u32 pairs_a_row) {
    const u32 o = blockIdx.x * 8 + threadIdx.x / 32, expert = blockIdx.z, end = offsets[expert + 1];
    if (o >= out_rows) return;
    const Matrix matrix{reinterpret_cast<const u8*>(weights[expert]), reinterpret_cast<const void*>(scales[expert]), bytes, cols};
    for (u32 first = offsets[expert] + 4 * blockIdx.y; first < end; first += 4 * gridDim.y) {
        const u32 count = min(end - first, 4u);
        f32 sums[4];
        times_rows(matrix, o, count, [=](u32 r) { return x + u64(order[first + r] / pairs_a_row) * cols; }, sums);
        if (threadIdx.x % 32 != 0) continue;
#pragma unroll
        for (u32 r = 0; r < 4; r++) {
            if (r >= count) break;
            const f32 sum = biases ? sums[r] + reinterpret_cast<const f32*>(biases[expert])[o] : sums[r];
            out[u64(order[first + r]) * out_rows + o] = sum;
        }
    }
}

#define NARROW(name, Matrix)                                                                                                 \
    KERNEL __launch_bounds__(256) dequant_##name##_f32(const u8* w, const void* scales, u32 bytes, f32* out, u32 rows, u32 cols) { \
        dequant<Matrix, F32>(Matrix{w, scales, bytes, cols}, out, rows);                                                     \
    }                                                                                                                        \
    KERNEL __launch_bounds__(256) dequant_##name##_bf16(const u8* w, const void* scales, u32 bytes, u16* out, u32 rows, u32 cols) { \
        dequant<Matrix, BF16>(Matrix{w, scales, bytes, cols}, out, rows);                                                    \
    }                                                                                                                        \
    KERNEL __launch_bounds__(256) matvec_##name(const u8* w, const void* scales, u32 bytes, const f32* x, const f32* bias,   \
                                                f32* out, u32 out_rows, u32 cols, u32 rows) {                                \
        matvec(Matrix{w, scales, bytes, cols}, x, bias, out, out_rows, rows);                                                \
    }                                                                                                                        \
    KERNEL __launch_bounds__(256) moe_matvec_##name(const u64* weights, const u64* scales, u32 bytes, const u64* biases,     \
                                                    const f32* x, const u32* offsets, const u32* order, f32* out,            \
                                                    u32 out_rows, u32 cols, u32 pairs_a_row) {                               \
        moe_matvec<Matrix>(weights, scales, bytes, biases, x, offsets, order, out, out_rows, cols, pairs_a_row);             \
    }                                                                                                                        \
    EXPORT(moe_matvec_##name)                                                                                                \
    EXPORT(dequant_##name##_f32)                                                                                             \
    EXPORT(dequant_##name##_bf16)                                                                                            \
    EXPORT(matvec_##name)

NARROW(fp8, Fp8)
NARROW(mxfp4, Mxfp4)
