// DeepSeek-V4's compressor: states of tokens, and rows that are means of several tokens' values, channel by channel, weighted by the softmax of their scores.
//
// Memory-bound: every state once. Norm, rotation and storing of the rows are the kernels of norm.cu, rope.cu and rows.cu.
#include "common.cuh"

// A token's state: its values, then its scores with the position's part added.
KERNEL __launch_bounds__(256)
compress_states(const f32* values, const f32* scores, const f32* ape, const u32* positions, f32* states, u32 width, u32 ratio) {
    const u64 row = blockIdx.x;
    const f32* added = ape + u64(positions[row] % ratio) * width;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) {
        states[2 * row * width + i] = values[row * width + i];
        states[(2 * row + 1) * width + i] = scores[row * width + i] + added[i];
    }
}

// `sources` is [rows, tokens]: addresses of states, null for tokens that there are not. With `overlap` the first half of a row's tokens gives its first `dim` channels, the second half the others.
KERNEL __launch_bounds__(256) compress_rows(const u64* sources, f32* out, u32 tokens, u32 dim, u32 width, u32 overlap) {
    const u64* row = sources + u64(blockIdx.x) * tokens;
    for (u32 channel = threadIdx.x; channel < dim; channel += blockDim.x) {
        f32 most = -INFINITE;
        for (u32 t = 0; t < tokens; t++) {
            const u32 at = channel + (overlap && t >= tokens / 2 ? dim : 0);
            if (row[t]) most = fmaxf(most, reinterpret_cast<const f32*>(row[t])[width + at]);
        }
        f32 sum = 0.0f, total = 0.0f;
        for (u32 t = 0; t < tokens; t++) {
            if (!row[t]) continue;
            const f32* state = reinterpret_cast<const f32*>(row[t]);
            const u32 at = channel + (overlap && t >= tokens / 2 ? dim : 0);
            const f32 weight = expf(state[width + at] - most);
            sum = fmaf(weight, state[at], sum);
            total += weight;
        }
        out[u64(blockIdx.x) * dim + channel] = sum / total;
    }
}

EXPORT(compress_states)
EXPORT(compress_rows)
