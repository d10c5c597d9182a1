// A weight matrix times many rows, on tensor cores: x and weights become bf16 on their way to shared memory, sums are f32.
//
// A block makes a tile of 128 rows by 128 columns of out, each of its eight warps 64 by 32, from slices of 32 columns of x and weights; the next slice is in registers
// while one is multiplied. With PARTS 2 every number is kept as the sum of two of bf16, 16 bits in all, and products are made of three.
//
// `matmul_grouped` is the same for experts: a block goes through the pairs of its expert, 128 at a time.
//
// Bound by arithmetic: 2 * rows * out_rows * cols operations, times three with PARTS 2. Each element's sum runs over cols in order, whatever the number of rows.
#include "gguf.cuh"

#if FORMAT == 0
typedef Plain<F32> Format;
#elif FORMAT == 1
typedef Plain<F16> Format;
#elif FORMAT == 2
typedef Plain<BF16> Format;
#elif FORMAT == 3
typedef Q4_0 Format;
#elif FORMAT == 4
typedef Q4_1 Format;
#elif FORMAT == 5
typedef Q8_0 Format;
#elif FORMAT == 6
typedef QK<false> Format;
#elif FORMAT == 7
typedef QK<true> Format;
#else
typedef Q6_K Format;
#endif

#define THREADS 256
#define SIDE 128
#define SLICE 32
// 80 bytes: eight rows lie in different banks.
#define STRIDE (SLICE + 8)

// Eight numbers as bf16, and what that leaves.
__device__ __forceinline__ void put_eight(const f32 (&x)[8], u16* to) {
#pragma unroll
    for (u32 i = 0; i < 8; i += 2) {
        const u16 low = f32_to_bf16(x[i]), high = f32_to_bf16(x[i + 1]);
        *reinterpret_cast<u32*>(to + i) = u32(low) | u32(high) << 16;
        if constexpr (PARTS == 2) {
            const u16 more_low = f32_to_bf16(x[i] - bf16_to_f32(low)), more_high = f32_to_bf16(x[i + 1] - bf16_to_f32(high));
            *reinterpret_cast<u32*>(to + SIDE * STRIDE + i) = u32(more_low) | u32(more_high) << 16;
        }
    }
}

// What a thread brings of a slice: two pieces of eight of x, and of the weights.
struct Slice {
    f32 x[2][8], w[2][8];

    template <class RowOf>
    __device__ __forceinline__ void load(const u8* weights, RowOf x_of, u32 first, u32 cols, u32 rows_left, u32 outs_left) {
#pragma unroll
        for (u32 p = 0; p < 2; p++) {
            const u32 at = threadIdx.x + p * THREADS, row = at / 4, col = first + at % 4 * 8;
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                x[p][i] = row < rows_left && col + i < cols ? x_of(row)[col + i] : 0.0f;
                w[p][i] = 0.0f;
            }
            if (row < outs_left && col < cols) eight_within<Format>(weights + row * row_bytes<Format>(cols), col, cols, w[p]);
        }
    }

    __device__ __forceinline__ void store(u16* left, u16* right) const {
#pragma unroll
        for (u32 p = 0; p < 2; p++) {
            const u32 at = threadIdx.x + p * THREADS, place = at / 4 * STRIDE + at % 4 * 8;
            put_eight(x[p], left + place);
            put_eight(w[p], right + place);
        }
    }
};

// A tile: rows of x come from `x_of`, rows of out go to `out_of`, each for `rows_left` rows and `outs_left` columns.
template <class RowOf, class OutOf>
__device__ __forceinline__ void tile(const u8* weights, RowOf x_of, const f32* bias, OutOf out_of, u32 cols, u32 rows_left, u32 outs_left,
                                     u16* left, u16* right) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 warp_row = warp / 4 * 64, warp_out = warp % 4 * 32;
    f32 sums[4][4][4];
#pragma unroll
    for (u32 m = 0; m < 4; m++) {
#pragma unroll
        for (u32 n = 0; n < 4; n++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) sums[m][n][i] = 0.0f;
        }
    }
    Slice slice;
    slice.load(weights, x_of, 0, cols, rows_left, outs_left);
    for (u32 first = 0; first < cols; first += SLICE) {
        slice.store(left, right);
        __syncthreads();
        if (first + SLICE < cols) slice.load(weights, x_of, first + SLICE, cols, rows_left, outs_left);
#pragma unroll
        for (u32 k = 0; k < SLICE; k += 16) {
            // The parts' products: both large, then one large and one small.
#pragma unroll
            for (u32 product = 0; product < (PARTS == 2 ? 3 : 1); product++) {
                const u16* a_part = left + (product == 2 ? SIDE * STRIDE : 0);
                const u16* b_part = right + (product == 1 ? SIDE * STRIDE : 0);
                u32 a[4][4], b[4][2];
#pragma unroll
                for (u32 m = 0; m < 4; m++) {
                    ldmatrix_x4(a[m], a_part + (warp_row + 16 * m + lane % 16) * STRIDE + k + lane / 16 * 8);
                }
#pragma unroll
                for (u32 n = 0; n < 4; n += 2) {
                    u32 both[4];
                    ldmatrix_x4(both, b_part + (warp_out + 8 * n + lane / 16 * 8 + lane % 8) * STRIDE + k + lane / 8 % 2 * 8);
                    b[n][0] = both[0];
                    b[n][1] = both[1];
                    b[n + 1][0] = both[2];
                    b[n + 1][1] = both[3];
                }
#pragma unroll
                for (u32 m = 0; m < 4; m++) {
#pragma unroll
                    for (u32 n = 0; n < 4; n++) mma_bf16(sums[m][n], a[m], b[n]);
                }
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (u32 m = 0; m < 4; m++) {
#pragma unroll
        for (u32 n = 0; n < 4; n++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const u32 row = warp_row + 16 * m + lane / 4 + i / 2 * 8, o = warp_out + 8 * n + lane % 4 * 2 + i % 2;
                if (row < rows_left && o < outs_left) out_of(row)[o] = bias ? sums[m][n][i] + bias[o] : sums[m][n][i];
            }
        }
    }
}

KERNEL __launch_bounds__(THREADS) matmul(const u8* w, const f32* x, const f32* bias, f32* out, u32 out_rows, u32 cols, u32 rows) {
    SHARED(u16, left, PARTS * SIDE * STRIDE);
    SHARED(u16, right, PARTS * SIDE * STRIDE);
    const u32 first_out = blockIdx.x * SIDE, first_row = blockIdx.y * SIDE;
    x += u64(first_row) * cols;
    out += u64(first_row) * out_rows + first_out;
    tile(w + first_out * row_bytes<Format>(cols), [=](u32 row) { return x + u64(row) * cols; }, bias ? bias + first_out : nullptr,
         [=](u32 row) { return out + u64(row) * out_rows; }, cols, rows - first_row, out_rows - first_out, left, right);
}

KERNEL __launch_bounds__(THREADS) matmul_grouped(const u64* weights, const u64* biases, const f32* x, const u32* offsets, const u32* order,
                                                 f32* out, u32 out_rows, u32 cols, u32 pairs_a_row) {
    SHARED(u16, left, PARTS * SIDE * STRIDE);
    SHARED(u16, right, PARTS * SIDE * STRIDE);
    const u32 first_out = blockIdx.x * SIDE, expert = blockIdx.z, end = offsets[expert + 1];
    const u8* w = reinterpret_cast<const u8*>(weights[expert]) + first_out * row_bytes<Format>(cols);
    const f32* bias = biases ? reinterpret_cast<const f32*>(biases[expert]) + first_out : nullptr;
    out += first_out;
    for (u32 first = offsets[expert] + SIDE * blockIdx.y; first < end; first += SIDE * gridDim.y) {
        tile(w, [=](u32 row) { return x + u64(order[first + row] / pairs_a_row) * cols; }, bias,
             [=](u32 row) { return out + u64(order[first + row]) * out_rows; }, cols, end - first, out_rows - first_out, left, right);
    }
}

EXPORT(matmul)
EXPORT(matmul_grouped)
