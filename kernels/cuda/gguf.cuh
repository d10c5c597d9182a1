// Weight formats: plain floats and GGUF's blocks, eight elements at a time.
//
// A format says how many elements and bytes a block has, and gives the values of elements 8 * piece to 8 * piece + 7 of a row. Scales have 11 significant bits and quants at
// most 8, so the product of a scale and a quant is exact, and a value is rounded once: the same as that of the CPU.
#pragma once
#include "common.cuh"

__device__ __forceinline__ f32 half_at(const u8* p) { return f16_to_f32(*reinterpret_cast<const u16*>(p)); }

// Eight bytes at an even address.
__device__ __forceinline__ void bytes_8(const u8* p, u32 (&out)[8]) {
    const u16* halves = reinterpret_cast<const u16*>(p);
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        u32 both = halves[i];
        out[2 * i] = both & 255;
        out[2 * i + 1] = both >> 8;
    }
}

template <class E>
struct Plain {
    static constexpr u32 ELEMENTS = 1, BYTES = sizeof(typename E::Stored);
    static __device__ __forceinline__ void eight(const u8* row, u32 piece, f32 (&out)[8]) {
        typedef typename E::Stored Stored;
        const Stored* x = reinterpret_cast<const Stored*>(row) + 8 * u64(piece);
        if (aligned(x, 16)) {
            u32 words[2 * sizeof(Stored)];
#pragma unroll
            for (u32 i = 0; i < sizeof(Stored) / 2; i++) {
                const uint4 raw = reinterpret_cast<const uint4*>(x)[i];
                words[4 * i] = raw.x;
                words[4 * i + 1] = raw.y;
                words[4 * i + 2] = raw.z;
                words[4 * i + 3] = raw.w;
            }
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                if constexpr (sizeof(Stored) == 2) {
                    out[i] = E::load(Stored(words[i / 2] >> (i % 2 * 16)));
                } else {
                    out[i] = __uint_as_float(words[i]);
                }
            }
        } else {
#pragma unroll
            for (u32 i = 0; i < 8; i++) out[i] = E::load(x[i]);
        }
    }
    static __device__ __forceinline__ f32 one(const u8* row, u64 at) {
        return E::load(reinterpret_cast<const typename E::Stored*>(row)[at]);
    }
};

struct Q4_0 {
    static constexpr u32 ELEMENTS = 32, BYTES = 18;
    static __device__ __forceinline__ void eight(const u8* row, u32 piece, f32 (&out)[8]) {
        const u8* block = row + u64(piece / 4) * BYTES;
        u32 quants[8], shift = piece % 4 / 2 * 4;
        bytes_8(block + 2 + piece % 2 * 8, quants);
        f32 d = half_at(block);
#pragma unroll
        for (u32 i = 0; i < 8; i++) out[i] = d * (f32(quants[i] >> shift & 15) - 8.0f);
    }
};

struct Q4_1 {
    static constexpr u32 ELEMENTS = 32, BYTES = 20;
    static __device__ __forceinline__ void eight(const u8* row, u32 piece, f32 (&out)[8]) {
        const u8* block = row + u64(piece / 4) * BYTES;
        u32 quants[8], shift = piece % 4 / 2 * 4;
        bytes_8(block + 4 + piece % 2 * 8, quants);
        f32 d = half_at(block), m = half_at(block + 2);
#pragma unroll
        for (u32 i = 0; i < 8; i++) out[i] = d * f32(quants[i] >> shift & 15) + m;
    }
};

struct Q8_0 {
    static constexpr u32 ELEMENTS = 32, BYTES = 34;
    static __device__ __forceinline__ void eight(const u8* row, u32 piece, f32 (&out)[8]) {
        const u8* block = row + u64(piece / 4) * BYTES;
        u32 quants[8];
        bytes_8(block + 2 + piece % 4 * 8, quants);
        f32 d = half_at(block);
#pragma unroll
        for (u32 i = 0; i < 8; i++) out[i] = d * f32(static_cast<signed char>(quants[i]));
    }
};

// Scale and minimum, six bits each, of sub-block j of the 12 scale bytes of Q4_K and Q5_K.
__device__ __forceinline__ void k_scale_min(const u8* s, u32 j, u32& scale, u32& minimum) {
    if (j < 4) {
        scale = s[j] & 63;
        minimum = s[j + 4] & 63;
    } else {
        scale = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
        minimum = (s[j + 4] >> 4) | (s[j] >> 6) << 4;
    }
}

// Q4_K, and with a fifth bit Q5_K.
template <bool FIVE>
struct QK {
    static constexpr u32 ELEMENTS = 256, BYTES = FIVE ? 176 : 144;
    static __device__ __forceinline__ void eight(const u8* row, u32 piece, f32 (&out)[8]) {
        const u8* block = row + u64(piece / 32) * BYTES;
        // First element within the block, and its sub-block of 32.
        u32 e = piece % 32 * 8, j = e / 32, scale, minimum, quants[8];
        k_scale_min(block + 4, j, scale, minimum);
        f32 d = half_at(block) * f32(scale), m = half_at(block + 2) * f32(minimum);
        bytes_8(block + (FIVE ? 48 : 16) + e / 64 * 32 + e % 32, quants);
        u32 high[8] = {};
        if constexpr (FIVE) bytes_8(block + 16 + e % 32, high);
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            u32 quant = (quants[i] >> j % 2 * 4 & 15) | (high[i] >> j & 1) << 4;
            out[i] = d * f32(quant) - m;
        }
    }
};

struct Q6_K {
    static constexpr u32 ELEMENTS = 256, BYTES = 210;
    static __device__ __forceinline__ void eight(const u8* row, u32 piece, f32 (&out)[8]) {
        const u8* block = row + u64(piece / 32) * BYTES;
        u32 e = piece % 32 * 8, half = e / 128, quarter = e % 128 / 32, l = e % 32, low[8], high[8];
        bytes_8(block + half * 64 + quarter % 2 * 32 + l, low);
        bytes_8(block + 128 + half * 32 + l, high);
        f32 scale = half_at(block + 208) * f32(static_cast<signed char>(block[192 + e / 16]));
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            u32 quant = (low[i] >> quarter / 2 * 4 & 15) | (high[i] >> quarter * 2 & 3) << 4;
            out[i] = scale * (f32(quant) - 32.0f);
        }
    }
};

template <class Format>
__device__ __forceinline__ u64 row_bytes(u32 cols) {
    return u64(cols / Format::ELEMENTS) * Format::BYTES;
}
// Elements `first` to `first + 7` of a row, those from `cols` on as zeros.
template <class Format>
__device__ __forceinline__ void eight_within(const u8* row, u32 first, u32 cols, f32 (&out)[8]) {
    if (first + 8 <= cols) {
        Format::eight(row, first / 8, out);
    } else if constexpr (Format::ELEMENTS == 1) {
#pragma unroll
        for (u32 i = 0; i < 8; i++) out[i] = first + i < cols ? Format::one(row, first + i) : 0.0f;
    } else {
        // A row is whole blocks.
#pragma unroll
        for (u32 i = 0; i < 8; i++) out[i] = 0.0f;
    }
}
