// Rotary embeddings: the table, and the rotation of heads in place. Memory-bound: heads once read and written, tables from the cache.
#include "common.cuh"

KERNEL __launch_bounds__(256)
rope_table(const f64* frequencies, f64 factor, f32* cosines, f32* sines, u32 positions, u32 pairs) {
    u64 at = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= u64(positions) * pairs) return;
    f64 angle = f64(at / pairs) * frequencies[at % pairs];
    cosines[at] = f32(cos(angle) * factor);
    sines[at] = f32(sin(angle) * factor);
}

KERNEL __launch_bounds__(128) rope(f32* x, const u32* positions, const f32* cosines, const f32* sines, u32 heads, u32 head_dim,
                                   u32 offset, u32 dim, u32 interleaved, f32 sign) {
    u32 pairs = dim / 2;
    u64 table = u64(positions[blockIdx.x]) * pairs;
    f32* row = x + u64(blockIdx.x) * heads * head_dim;
    for (u32 i = threadIdx.x; i < heads * pairs; i += blockDim.x) {
        u32 pair = i % pairs;
        f32* head = row + u64(i / pairs) * head_dim + offset;
        u32 first = interleaved ? 2 * pair : pair, second = interleaved ? first + 1 : first + pairs;
        f32 c = cosines[table + pair], s = sign * sines[table + pair];
        f32 a = head[first], b = head[second];
        head[first] = a * c - b * s;
        head[second] = a * s + b * c;
    }
}

EXPORT(rope_table)
EXPORT(rope)
