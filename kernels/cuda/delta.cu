// The gated delta net: a causal convolution over the last tokens, and a recurrence over a matrix of state for each value head.
//
// The recurrence runs token by token, in prefill too, so that a state that was saved and one that was computed are the same to the bit. A block has a head of a sequence and 32 of its
// columns; a column's state stays in registers of the four threads that have a quarter of its rows each. Decode is bound by memory, the state once read and once written;
// prefill by latency, a token after the other.
//
// A slot is [kernel - 1, channels] inputs of the convolution, oldest first, then [value_heads, key_dim, value_dim]. `seqs` is [n, 6]: first row of the step, rows, slot, whether the slot has a state
// already (else it counts as zeros), first save, saves. `saves` is [m, 2]: after how many rows of this step, to which slot. The sequence's own slot gets the last state.
#include "common.cuh"

// Thread: one channel of one sequence.
KERNEL __launch_bounds__(128) delta_conv(const f32* mixed, const f32* weights, u8* slots, u64 slot_bytes, const u32* seqs, const u32* saves,
                                         f32* out, u32 channels, u32 kernel) {
    const u32 channel = blockIdx.x * blockDim.x + threadIdx.x;
    if (channel >= channels) return;
    const u32* seq = seqs + 6 * u64(blockIdx.y);
    const u32 before = kernel - 1;
    f32* state = reinterpret_cast<f32*>(slots + seq[2] * slot_bytes);
    // At most eight taps; registers, as all indices are known when it is compiled.
    f32 history[7], weight[8];
#pragma unroll
    for (u32 i = 0; i < 7; i++) history[i] = i < before && seq[3] ? state[u64(i) * channels + channel] : 0.0f;
#pragma unroll
    for (u32 i = 0; i < 8; i++) weight[i] = i < kernel ? weights[u64(channel) * kernel + i] : 0.0f;
    for (u32 t = 0; t < seq[1]; t++) {
        const u64 at = u64(seq[0] + t) * channels + channel;
        const f32 x = mixed[at];
        f32 sum = 0.0f, own = 0.0f;
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            if (i < before) sum = fmaf(weight[i], history[i < 7 ? i : 6], sum);
            if (i == before) own = weight[i];
        }
        out[at] = silu(fmaf(own, x, sum));
#pragma unroll
        for (u32 i = 0; i < 7; i++) {
            if (i + 1 < before) history[i] = history[i < 6 ? i + 1 : 6];
            if (i + 1 == before) history[i] = x;
        }
        for (u32 s = 0; s < seq[5]; s++) {
            const u32* save = saves + 2 * (seq[4] + s);
            if (save[0] != t + 1) continue;
            f32* to = reinterpret_cast<f32*>(slots + save[1] * slot_bytes);
#pragma unroll
            for (u32 i = 0; i < 7; i++) {
                if (i < before) to[u64(i) * channels + channel] = history[i];
            }
        }
    }
#pragma unroll
    for (u32 i = 0; i < 7; i++) {
        if (i < before) state[u64(i) * channels + channel] = history[i];
    }
}

// Heads brought to a length, in place: q to key_dim^-0.5, k to 1. A warp a head.
KERNEL __launch_bounds__(128) delta_unit(f32* rows, u32 count, u32 channels, u32 key_heads, u32 key_dim) {
    const u32 index = blockIdx.x * 4 + threadIdx.x / 32;
    if (index >= count * 2 * key_heads) return;
    const u32 head = index % (2 * key_heads);
    f32* x = rows + u64(index / (2 * key_heads)) * channels + u64(head) * key_dim;
    f32 squares = 0.0f;
    for (u32 i = threadIdx.x % 32; i < key_dim; i += 32) squares = fmaf(x[i], x[i], squares);
    const f32 length = head < key_heads ? 1.0f / sqrtf(f32(key_dim)) : 1.0f;
    const f32 factor = length / sqrtf(warp_sum(squares) + 1e-6f);
    for (u32 i = threadIdx.x % 32; i < key_dim; i += 32) x[i] *= factor;
}

#define COLUMNS 32
#define PARTS 4

// ROWS: key_dim / PARTS, rounded up.
template <u32 ROWS>
__device__ __forceinline__ void recur(const f32* rows, const f32* a, const f32* b, const f32* dt_bias, const f32* decay, u8* slots, u64 slot_bytes,
                                      u64 state_at, const u32* seqs, const u32* saves, f32* out, u32 channels, u32 key_heads, u32 value_heads,
                                      u32 key_dim, u32 value_dim) {
    const u32* seq = seqs + 6 * u64(blockIdx.z);
    // A warp has eight columns; the four threads of one are neighbours.
    const u32 head = blockIdx.y, column = blockIdx.x * COLUMNS + threadIdx.x / PARTS, part = threadIdx.x % PARTS;
    const u32 first = part * ROWS;
    const bool there = column < value_dim;
    const u64 place = state_at + 4 * (u64(head) * key_dim * value_dim + column);
    f32 state[ROWS];
    const f32* from = reinterpret_cast<const f32*>(slots + seq[2] * slot_bytes + place);
#pragma unroll
    for (u32 i = 0; i < ROWS; i++) {
        state[i] = there && seq[3] && first + i < key_dim ? from[u64(first + i) * value_dim] : 0.0f;
    }
    const u32 key_head = head / (value_heads / key_heads);
    for (u32 t = 0; t < seq[1]; t++) {
        const u64 row = seq[0] + t;
        const f32* q = rows + row * channels + u64(key_head) * key_dim;
        const f32* k = q + u64(key_heads) * key_dim;
        const f32 rate = sigmoid(b[row * value_heads + head]);
        const f32 x = a[row * value_heads + head] + dt_bias[head];
        const f32 kept = expf(decay[head] * (x > 20.0f ? x : log1pf(expf(x))));
        f32 recalled = 0.0f;
#pragma unroll
        for (u32 i = 0; i < ROWS; i++) {
            state[i] *= kept;
            if (first + i < key_dim) recalled = fmaf(k[first + i], state[i], recalled);
        }
        recalled += __shfl_xor_sync(FULL, recalled, 1);
        recalled += __shfl_xor_sync(FULL, recalled, 2);
        const f32 v = there ? rows[row * channels + 2 * u64(key_heads) * key_dim + u64(head) * value_dim + column] : 0.0f;
        const f32 change = rate * (v - recalled);
        f32 sum = 0.0f;
#pragma unroll
        for (u32 i = 0; i < ROWS; i++) {
            if (first + i >= key_dim) continue;
            state[i] = fmaf(k[first + i], change, state[i]);
            sum = fmaf(q[first + i], state[i], sum);
        }
        sum += __shfl_xor_sync(FULL, sum, 1);
        sum += __shfl_xor_sync(FULL, sum, 2);
        if (there && part == 0) out[(row * value_heads + head) * value_dim + column] = sum;
        for (u32 s = 0; s < seq[5]; s++) {
            const u32* save = saves + 2 * (seq[4] + s);
            if (save[0] != t + 1 || !there) continue;
            f32* to = reinterpret_cast<f32*>(slots + save[1] * slot_bytes + place);
#pragma unroll
            for (u32 i = 0; i < ROWS; i++) {
                if (first + i < key_dim) to[u64(first + i) * value_dim] = state[i];
            }
        }
    }
    if (!there) return;
    f32* to = reinterpret_cast<f32*>(slots + seq[2] * slot_bytes + place);
#pragma unroll
    for (u32 i = 0; i < ROWS; i++) {
        if (first + i < key_dim) to[u64(first + i) * value_dim] = state[i];
    }
}

#define DELTA_RULE(name, ROWS)                                                                                                 \
    KERNEL __launch_bounds__(COLUMNS * PARTS)                                                                                  \
        name(const f32* rows, const f32* a, const f32* b, const f32* dt_bias, const f32* decay, u8* slots, u64 slot_bytes,     \
             u64 state_at, const u32* seqs, const u32* saves, f32* out, u32 channels, u32 key_heads, u32 value_heads,          \
             u32 key_dim, u32 value_dim) {                                                                                     \
        recur<ROWS>(rows, a, b, dt_bias, decay, slots, slot_bytes, state_at, seqs, saves, out, channels, key_heads,            \
                    value_heads, key_dim, value_dim);                                                                          \
    }                                                                                                                          \
    EXPORT(name)

EXPORT(delta_conv)
EXPORT(delta_unit)
DELTA_RULE(delta_rule_32, 8)
DELTA_RULE(delta_rule_64, 16)
DELTA_RULE(delta_rule_128, 32)
DELTA_RULE(delta_rule_256, 64)
