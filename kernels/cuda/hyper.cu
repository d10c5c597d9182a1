// Hyper-connections: a sublayer reads a mix of four streams and is added back to them by another. A block a row. Memory-bound: the streams once in, once out.
//
// `mixes` is the row's streams times the mixing matrix, as `matvec` makes it, not yet over the row's root mean square.
#include "common.cuh"

#define STREAMS 4

__device__ __forceinline__ f32 row_factor(const f32* row, u32 width, f32 eps, f32* scratch) {
    f32 squares = 0.0f;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) squares = fmaf(row[i], row[i], squares);
    return 1.0f / sqrtf(block_sum(squares, scratch) / f32(width) + eps);
}

// Softmax by rows, then columns and rows brought to a sum of 1 in turns, columns first and last.
__device__ __forceinline__ void doubly_stochastic(f32 (&c)[STREAMS][STREAMS], u32 rounds, f32 eps) {
#pragma unroll
    for (u32 j = 0; j < STREAMS; j++) {
        f32 most = c[j][0], sum = 0.0f;
#pragma unroll
        for (u32 k = 1; k < STREAMS; k++) most = fmaxf(most, c[j][k]);
#pragma unroll
        for (u32 k = 0; k < STREAMS; k++) {
            c[j][k] = expf(c[j][k] - most);
            sum += c[j][k];
        }
#pragma unroll
        for (u32 k = 0; k < STREAMS; k++) c[j][k] = c[j][k] / sum + eps;
    }
    for (u32 round = 0; round < rounds; round++) {
        if (round > 0) {
#pragma unroll
            for (u32 j = 0; j < STREAMS; j++) {
                const f32 sum = c[j][0] + c[j][1] + c[j][2] + c[j][3] + eps;
#pragma unroll
                for (u32 k = 0; k < STREAMS; k++) c[j][k] /= sum;
            }
        }
#pragma unroll
        for (u32 k = 0; k < STREAMS; k++) {
            const f32 sum = c[0][k] + c[1][k] + c[2][k] + c[3][k] + eps;
#pragma unroll
            for (u32 j = 0; j < STREAMS; j++) c[j][k] /= sum;
        }
    }
}

// `backs` is [rows, 20]: what each stream takes of the sublayer's output, then of stream j for stream k at 4 + 4 * j + k.
KERNEL __launch_bounds__(256) hyper_enter(const f32* streams, const f32* mixes, const f32* base, const f32* scale, f32* input, f32* backs,
                                          u32 hidden, u32 rounds, f32 eps, f32 norm_eps) {
    SHARED(f32, scratch, 32);
    SHARED(f32, before, STREAMS);
    const u64 row = blockIdx.x;
    const f32* x = streams + row * STREAMS * hidden;
    const f32 factor = row_factor(x, STREAMS * hidden, norm_eps, scratch);
    if (threadIdx.x == 0) {
        const f32* mix = mixes + row * (2 + STREAMS) * STREAMS;
        f32* back = backs + row * (1 + STREAMS) * STREAMS;
        auto at = [&](u32 index, u32 kind) { return mix[index] * factor * scale[kind] + base[index]; };
        f32 among[STREAMS][STREAMS];
#pragma unroll
        for (u32 j = 0; j < STREAMS; j++) {
            before[j] = sigmoid(at(j, 0)) + eps;
            back[j] = 2.0f * sigmoid(at(STREAMS + j, 1));
#pragma unroll
            for (u32 k = 0; k < STREAMS; k++) among[j][k] = at((2 + j) * STREAMS + k, 2);
        }
        doubly_stochastic(among, rounds, eps);
#pragma unroll
        for (u32 j = 0; j < STREAMS; j++) {
#pragma unroll
            for (u32 k = 0; k < STREAMS; k++) back[STREAMS + STREAMS * j + k] = among[j][k];
        }
    }
    __syncthreads();
    for (u32 d = threadIdx.x; d < hidden; d += blockDim.x) {
        f32 sum = 0.0f;
        for (u32 j = 0; j < STREAMS; j++) sum = fmaf(before[j], x[j * hidden + d], sum);
        input[row * hidden + d] = sum;
    }
}

KERNEL __launch_bounds__(256) hyper_leave(f32* streams, const f32* backs, const f32* y, u32 hidden) {
    const u64 row = blockIdx.x;
    f32* x = streams + row * STREAMS * hidden;
    const f32* back = backs + row * (1 + STREAMS) * STREAMS;
    for (u32 d = threadIdx.x; d < hidden; d += blockDim.x) {
        f32 old[STREAMS];
#pragma unroll
        for (u32 j = 0; j < STREAMS; j++) old[j] = x[j * hidden + d];
#pragma unroll
        for (u32 k = 0; k < STREAMS; k++) {
            f32 sum = back[k] * y[row * hidden + d];
#pragma unroll
            for (u32 j = 0; j < STREAMS; j++) sum = fmaf(back[STREAMS + STREAMS * j + k], old[j], sum);
            x[k * hidden + d] = sum;
        }
    }
}

// `mixes` is [rows, 4].
KERNEL __launch_bounds__(256)
hyper_head(const f32* streams, const f32* mixes, const f32* base, f32 scale, f32* out, u32 hidden, f32 eps, f32 norm_eps) {
    SHARED(f32, scratch, 32);
    const u64 row = blockIdx.x;
    const f32* x = streams + row * STREAMS * hidden;
    const f32 factor = row_factor(x, STREAMS * hidden, norm_eps, scratch);
    f32 weight[STREAMS];
#pragma unroll
    for (u32 j = 0; j < STREAMS; j++) weight[j] = sigmoid(mixes[row * STREAMS + j] * factor * scale + base[j]) + eps;
    for (u32 d = threadIdx.x; d < hidden; d += blockDim.x) {
        f32 sum = 0.0f;
#pragma unroll
        for (u32 j = 0; j < STREAMS; j++) sum = fmaf(weight[j], x[j * hidden + d], sum);
        out[row * hidden + d] = sum;
    }
}

EXPORT(hyper_enter)
EXPORT(hyper_leave)
EXPORT(hyper_head)
