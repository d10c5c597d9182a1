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

// A warp makes one element of up to four rows of out; lane l takes columns l, l + 32, ... in order.
template <class Matrix>
__device__ __forceinline__ void matvec(const Matrix& matrix, const f32* x, const f32* bias, f32* out, u32 out_rows, u32 rows) {
    const u32 o = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32, cols = matrix.cols;
    const u32 first_row = blockIdx.y * 4, count = min(rows - first_row, 4u);
    if (o >= out_rows) return;
    x += u64(first_row) * cols;
    f32 sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (u32 col = lane; col < cols; col += 32) {
        const f32 weight = matrix.at(o, col);
#pragma unroll
        for (u32 r = 0; r < 4; r++) {
            if (r < count) sums[r] = fmaf(weight, x[u64(r) * cols + col], sums[r]);
        }
    }
#pragma unroll
    for (u32 r = 0; r < 4; r++) {
        const f32 sum = warp_sum(sums[r]);
        if (lane == 0 && r < count) out[u64(first_row + r) * out_rows + o] = bias ? sum + bias[o] : sum;
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
    EXPORT(dequant_##name##_f32)                                                                                             \
    EXPORT(dequant_##name##_bf16)                                                                                            \
    EXPORT(matvec_##name)

NARROW(fp8, Fp8)
NARROW(mxfp4, Mxfp4)
