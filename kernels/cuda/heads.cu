// The heads of new rows: norms of queries and keys, their rotation, and the store of keys and values, in one launch.
//
// Bound by memory: queries once read and written, keys and values once read and once written in the pool's type; by themselves these five operations read and write keys and queries twice more. In
// decode, where all of it is a few KiB, it saves four launches a layer. A warp has a head; every element has the bits that `head_rms_norm`, `rope` and `kv_write` give one after another.
#include "heads.cuh"

#define THREADS 128

// Norms and turns a head of `width` elements; `put(i, x)` takes what element i becomes.
template <class Put>
__device__ __forceinline__ void enter(const f32* x, const f32* weight, f32 eps, const f32* cosines, const f32* sines, u32 width, u32 offset, u32 dim,
                                      u32 interleaved, Put put) {
    const u32 lane = threadIdx.x % 32, pairs = dim / 2;
    const f32 factor = weight ? head_factor(x, width, eps) : 1.0f;
    auto normed = [&](u32 i) { return weight ? x[i] * factor * weight_at(weight, i, 0.0f) : x[i]; };
    for (u32 pair = lane; pair < pairs; pair += 32) {
        const u32 first = offset + (interleaved ? 2 * pair : pair), second = interleaved ? first + 1 : first + pairs;
        const f32 a = normed(first), b = normed(second), c = cosines[pair], s = sines[pair];
        put(first, a * c - b * s);
        put(second, a * s + b * c);
    }
    for (u32 i = lane; i < width - dim; i += 32) {
        const u32 at = i < offset ? i : i + dim;
        put(at, normed(at));
    }
}

template <class E>
__device__ __forceinline__ void heads_enter(f32* q, const f32* k, const f32* v, const f32* q_norm, const f32* k_norm, f32 eps, const u32* positions,
                                            const f32* cosines, const f32* sines, typename E::Stored* keys, typename E::Stored* values, const u32* slots,
                                            u32 heads, u32 kv_heads, u32 dk, u32 dv, u32 page_tokens, u32 offset, u32 dim, u32 interleaved) {
    const u32 row = blockIdx.x;
    u32 head = blockIdx.y * (THREADS / 32) + threadIdx.x / 32;
    const u64 table = u64(positions[row]) * (dim / 2);
    if (head < heads) {
        f32* own = q + (u64(row) * heads + head) * dk;
        enter(own, q_norm, eps, cosines + table, sines + table, dk, offset, dim, interleaved, [=](u32 i, f32 x) { own[i] = x; });
        return;
    }
    head -= heads;
    const u32 slot = slots[row];
    const u64 page = slot / page_tokens, token = slot % page_tokens;
    if (head < kv_heads) {
        typename E::Stored* to = keys + ((page * kv_heads + head) * page_tokens + token) * dk;
        enter(k + (u64(row) * kv_heads + head) * dk, k_norm, eps, cosines + table, sines + table, dk, offset, dim, interleaved,
              [=](u32 i, f32 x) { to[i] = E::store(x); });
    } else if (head < 2 * kv_heads) {
        head -= kv_heads;
        const f32* own = v + (u64(row) * kv_heads + head) * dv;
        typename E::Stored* to = values + ((page * kv_heads + head) * page_tokens + token) * dv;
        for (u32 i = threadIdx.x % 32; i < dv; i += 32) to[i] = E::store(own[i]);
    }
}

#define HEADS_ENTER(name, E)                                                                                                                     \
    KERNEL __launch_bounds__(THREADS) name(f32* q, const f32* k, const f32* v, const f32* q_norm, const f32* k_norm, f32 eps,                    \
                                           const u32* positions, const f32* cosines, const f32* sines, E::Stored* keys, E::Stored* values,       \
                                           const u32* slots, u32 heads, u32 kv_heads, u32 dk, u32 dv, u32 page_tokens, u32 offset, u32 dim,      \
                                           u32 interleaved) {                                                                                    \
        heads_enter<E>(q, k, v, q_norm, k_norm, eps, positions, cosines, sines, keys, values, slots, heads, kv_heads, dk, dv, page_tokens,       \
                       offset, dim, interleaved);                                                                                                \
    }                                                                                                                                            \
    EXPORT(name)

HEADS_ENTER(heads_enter_f32, F32)
HEADS_ENTER(heads_enter_f16, F16)
HEADS_ENTER(heads_enter_bf16, BF16)
