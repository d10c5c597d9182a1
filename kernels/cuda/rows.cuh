// Rows in pages of opaque bytes: plain elements, rows of e4m3 with powers of two (a bf16 part at the end), index keys of e4m3 with one scale.
//
// A page has the data of all its rows first, then the scales of all its rows. The bytes are those of the CPU's `pack_row` and `pack_key`.
#pragma once
#include "common.cuh"

#define PACKED_GROUP 64
#define PACKED_SCALES 8
#define E4M3_LARGEST 448.0f

// 2 to a power of normal numbers.
__device__ __forceinline__ f32 power_of_two(int exponent) { return __uint_as_float(u32(exponent + 127) << 23); }

// To nearest, halves to even; what is larger than the largest value becomes that.
__device__ __forceinline__ u8 to_e4m3(f32 x) {
    const u32 bits = __float_as_uint(x), sign = bits >> 24 & 0x80;
    const f32 size = fabsf(x);
    if (size != size) return u8(sign | 0x7F);
    if (size >= E4M3_LARGEST) return u8(sign | 0x7E);
    // Below 2^-6 steps are 2^-9; eight of them are the code of 2^-6.
    if (size < 0.015625f) return u8(sign | u32(rintf(size * 512.0f)));
    const int exponent = int(bits >> 23 & 255) - 127;
    return u8(sign | u32((exponent + 7) * 8 + int(rintf(size * power_of_two(-exponent) * 8.0f)) - 8));
}

__device__ __forceinline__ f32 from_e4m3(u8 byte) {
    const u32 exponent = byte >> 3 & 15, fraction = byte & 7;
    f32 x;
    if (exponent == 15 && fraction == 7) {
        x = __uint_as_float(0x7FC00000u);
    } else if (exponent == 0) {
        x = f32(fraction) / 512.0f;
    } else {
        x = (1.0f + f32(fraction) / 8.0f) * power_of_two(int(exponent) - 7);
    }
    return byte & 0x80 ? -x : x;
}

// Two bytes of e4m3, the first in the low byte, times a power of two, as two of bf16.
__device__ __forceinline__ u32 two_from_e4m3(u32 bytes, f32 scale) {
    u32 out = 0;
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        const u32 byte = bytes >> 8 * i & 0xFF;
        // As bits of an f32 the exponent is too small by 120, also of the smallest numbers.
        f32 x = __uint_as_float((byte & 0x80) << 24 | (byte & 0x7F) << 20) * power_of_two(120) * scale;
        if ((byte & 0x7F) == 0x7F) x = __uint_as_float(0x7FC00000u);
        out |= u32(f32_to_bf16(x)) << 16 * i;
    }
    return out;
}

// Kinds of rows; `element` reads element i of row `index` of a page.
template <class E>
struct PlainRows {
    static __device__ __forceinline__ u32 data_bytes(u32 width, u32) { return width * u32(sizeof(typename E::Stored)); }
    static __device__ __forceinline__ u32 scale_bytes() { return 0; }
    static __device__ __forceinline__ f32 element(const u8* data, const u8*, u32 i, u32, u32) {
        return E::load(reinterpret_cast<const typename E::Stored*>(data)[i]);
    }
};
struct PackedRows {
    static __device__ __forceinline__ u32 data_bytes(u32 width, u32 rope) { return width + rope; }
    static __device__ __forceinline__ u32 scale_bytes() { return PACKED_SCALES; }
    static __device__ __forceinline__ f32 element(const u8* data, const u8* scales, u32 i, u32 width, u32 rope) {
        const u32 plain = width - rope;
        if (i < plain) return from_e4m3(data[i]) * power_of_two(int(scales[i / PACKED_GROUP]) - 127);
        const u8* half = data + plain + 2 * (i - plain);
        return bf16_to_f32(u16(half[0] | half[1] << 8));
    }
};
struct PackedKeys {
    static __device__ __forceinline__ u32 data_bytes(u32 width, u32) { return width; }
    static __device__ __forceinline__ u32 scale_bytes() { return 4; }
    static __device__ __forceinline__ f32 element(const u8* data, const u8* scale, u32 i, u32, u32) {
        const u32 bits = scale[0] | scale[1] << 8 | scale[2] << 16 | u32(scale[3]) << 24;
        return from_e4m3(data[i]) * __uint_as_float(bits);
    }
};

// Where a row's data and scales lie in its page.
template <class Rows>
__device__ __forceinline__ u64 data_at(u32 index, u32 width, u32 rope) {
    return u64(index) * Rows::data_bytes(width, rope);
}
template <class Rows>
__device__ __forceinline__ u64 scales_at(u32 index, u32 page_rows, u32 width, u32 rope) {
    return u64(page_rows) * Rows::data_bytes(width, rope) + u64(index) * Rows::scale_bytes();
}
