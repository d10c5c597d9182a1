// New rows into pages of opaque bytes, rounded or packed. Memory-bound: a row once read, once written.
#include "rows.cuh"

template <class E>
__device__ __forceinline__ void write_plain(const f32* x, u8* pool, const u32* slots, u32 width, u32 page_rows, u64 page_bytes) {
    const u32 slot = slots[blockIdx.x];
    typename E::Stored* to = reinterpret_cast<typename E::Stored*>(pool + slot / page_rows * page_bytes) + u64(slot % page_rows) * width;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) to[i] = E::store(x[u64(blockIdx.x) * width + i]);
}

KERNEL __launch_bounds__(128) rows_write_f32(const f32* x, u8* pool, const u32* slots, u32 width, u32 page_rows, u64 page_bytes) {
    write_plain<F32>(x, pool, slots, width, page_rows, page_bytes);
}
KERNEL __launch_bounds__(128) rows_write_f16(const f32* x, u8* pool, const u32* slots, u32 width, u32 page_rows, u64 page_bytes) {
    write_plain<F16>(x, pool, slots, width, page_rows, page_bytes);
}
KERNEL __launch_bounds__(128) rows_write_bf16(const f32* x, u8* pool, const u32* slots, u32 width, u32 page_rows, u64 page_bytes) {
    write_plain<BF16>(x, pool, slots, width, page_rows, page_bytes);
}

__device__ __forceinline__ f32 as_bf16(f32 x) { return bf16_to_f32(f32_to_bf16(x)); }

// A warp takes groups of 64 in turn.
KERNEL __launch_bounds__(128)
rows_write_packed(const f32* x, u8* pool, const u32* slots, u32 width, u32 rope, u32 page_rows, u64 page_bytes) {
    const u32 slot = slots[blockIdx.x], lane = threadIdx.x % 32, plain = width - rope;
    u8* page = pool + slot / page_rows * page_bytes;
    u8* data = page + data_at<PackedRows>(slot % page_rows, width, rope);
    u8* scales = page + scales_at<PackedRows>(slot % page_rows, page_rows, width, rope);
    const f32* row = x + u64(blockIdx.x) * width;
    for (u32 group = threadIdx.x / 32; group < PACKED_SCALES; group += 4) {
        const u32 first = group * PACKED_GROUP, end = min(first + PACKED_GROUP, plain);
        if (first >= plain) {
            if (lane == 0) scales[group] = 0;
            continue;
        }
        f32 most = 1e-4f;
        for (u32 i = first + lane; i < end; i += 32) most = fmaxf(most, fabsf(as_bf16(row[i])));
        const u32 bits = __float_as_uint(warp_max(most) / E4M3_LARGEST);
        // The power of two at or above.
        const int exponent = int(bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0);
        const f32 factor = power_of_two(-exponent);
        for (u32 i = first + lane; i < end; i += 32) data[i] = to_e4m3(as_bf16(row[i]) * factor);
        if (lane == 0) scales[group] = u8(exponent + 127);
    }
    for (u32 i = threadIdx.x; i < rope; i += blockDim.x) {
        const u16 half = f32_to_bf16(row[plain + i]);
        data[plain + 2 * i] = u8(half);
        data[plain + 2 * i + 1] = u8(half >> 8);
    }
}

KERNEL __launch_bounds__(128) keys_write_packed(const f32* x, u8* pool, const u32* slots, u32 width, u32 page_rows, u64 page_bytes) {
    SHARED(f32, scratch, 32);
    const u32 slot = slots[blockIdx.x];
    u8* page = pool + slot / page_rows * page_bytes;
    u8* data = page + data_at<PackedKeys>(slot % page_rows, width, 0);
    u8* scale = page + scales_at<PackedKeys>(slot % page_rows, page_rows, width, 0);
    const f32* row = x + u64(blockIdx.x) * width;
    f32 most = 1e-4f;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) most = fmaxf(most, fabsf(as_bf16(row[i])));
    const f32 factor = block_max(most, scratch) / E4M3_LARGEST;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) data[i] = to_e4m3(as_bf16(row[i]) / factor);
    if (threadIdx.x < 4) scale[threadIdx.x] = u8(__float_as_uint(factor) >> 8 * threadIdx.x);
}

EXPORT(rows_write_f32)
EXPORT(rows_write_f16)
EXPORT(rows_write_bf16)
EXPORT(rows_write_packed)
EXPORT(keys_write_packed)
