// New keys and values, rounded to the pool's type, into their pages. Memory-bound.
#include "common.cuh"

template <class E>
__device__ __forceinline__ void put(const f32* row, typename E::Stored* pool, u32 slot, u32 kv_heads, u32 dim, u32 page_tokens) {
    u64 page = slot / page_tokens, token = slot % page_tokens;
    for (u32 i = threadIdx.x; i < kv_heads * dim; i += blockDim.x) {
        u32 head = i / dim, d = i % dim;
        pool[((page * kv_heads + head) * page_tokens + token) * dim + d] = E::store(row[i]);
    }
}

template <class E>
__device__ __forceinline__ void kv_write(const f32* k, const f32* v, typename E::Stored* keys, typename E::Stored* values,
                                         const u32* slots, u32 kv_heads, u32 dk, u32 dv, u32 page_tokens) {
    u32 slot = slots[blockIdx.x];
    put<E>(k + u64(blockIdx.x) * kv_heads * dk, keys, slot, kv_heads, dk, page_tokens);
    put<E>(v + u64(blockIdx.x) * kv_heads * dv, values, slot, kv_heads, dv, page_tokens);
}

#define KV_WRITE(name, E)                                                                                                 \
    KERNEL __launch_bounds__(128) name(const f32* k, const f32* v, E::Stored* keys, E::Stored* values, const u32* slots,  \
                                       u32 kv_heads, u32 dk, u32 dv, u32 page_tokens) {                                  \
        kv_write<E>(k, v, keys, values, slots, kv_heads, dk, dv, page_tokens);                                            \
    }                                                                                                                     \
    EXPORT(name)

KV_WRITE(kv_write_f32, F32)
KV_WRITE(kv_write_f16, F16)
KV_WRITE(kv_write_bf16, BF16)
