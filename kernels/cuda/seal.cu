// Checksums of pages: CRC-32C of a page's components, as its seal has them. The host writes and checks the seals themselves.
//
// A checksum is linear: that of a whole is the sum (exclusive or) of those of its parts, each multiplied by x to the number of bits behind it. So each thread takes some rows.
// Bound by memory in principle; in practice by the table look-ups, four bytes a step.
#include "common.cuh"

#define POLYNOMIAL 0x82F63B78u

// The product of two polynomials, bits reflected: bit 31 is the coefficient of 1.
__device__ __forceinline__ u32 times(u32 a, u32 b) {
    u32 product = 0;
    for (u32 i = 0; i < 32; i++) {
        if (a & 0x80000000u) product ^= b;
        a <<= 1;
        b = b & 1 ? b >> 1 ^ POLYNOMIAL : b >> 1;
    }
    return product;
}

// A checksum moved by `bytes` bytes of zeros that follow.
__device__ __forceinline__ u32 moved(u32 crc, u64 bytes) {
    // x^8, squared again and again.
    u32 power = 0x00800000u;
    for (; bytes; bytes >>= 1) {
        if (bytes & 1) crc = times(crc, power);
        power = times(power, power);
    }
    return crc;
}

__device__ __forceinline__ u32 bit_by_bit(u32 crc, u32 bits) {
    for (u32 i = 0; i < bits; i++) crc = crc & 1 ? crc >> 1 ^ POLYNOMIAL : crc >> 1;
    return crc;
}

__device__ __forceinline__ u32 warp_xor(u32 x) {
    for (u32 by = 16; by > 0; by /= 2) x ^= __shfl_xor_sync(FULL, x, by);
    return x;
}

KERNEL __launch_bounds__(256)
seal_checksums(const u8* keys, const u8* values, const u32* pages, u32* checksums, u32 heads, u32 page_tokens, u32 k_bytes, u32 v_bytes,
               u64 k_pool_layer, u64 v_pool_layer, u32 head_major) {
    SHARED(u32, table, 4 * 256);
    SHARED(u32, parts, 8);
    // Table t: the byte, followed by t bytes of zeros.
    u32 entry = bit_by_bit(threadIdx.x, 8);
    table[threadIdx.x] = entry;
    __syncthreads();
    for (u32 t = 1; t < 4; t++) {
        entry = table[entry & 255] ^ entry >> 8;
        table[256 * t + threadIdx.x] = entry;
    }
    __syncthreads();

    const u32 layer = blockIdx.y, row_bytes = blockIdx.z == 0 ? k_bytes : v_bytes, rows = heads * page_tokens;
    const u8* page = blockIdx.z == 0 ? keys + layer * k_pool_layer : values + layer * v_pool_layer;
    page += u64(pages[blockIdx.x]) * rows * row_bytes;
    const u32 each = (rows + 255) / 256, first = min(threadIdx.x * each, rows), end = min(first + each, rows);
    const bool words = (u64(page) | row_bytes) % 4 == 0;
    u32 crc = 0;
    for (u32 r = first; r < end; r++) {
        const u32 row = head_major ? r : r % heads * page_tokens + r / heads;
        const u8* bytes = page + u64(row) * row_bytes;
        if (words) {
            for (u32 i = 0; i < row_bytes; i += 4) {
                crc ^= *reinterpret_cast<const u32*>(bytes + i);
                crc = table[768 + (crc & 255)] ^ table[512 + (crc >> 8 & 255)] ^ table[256 + (crc >> 16 & 255)] ^ table[crc >> 24];
            }
        } else {
            for (u32 i = 0; i < row_bytes; i++) crc = table[(crc ^ bytes[i]) & 255] ^ crc >> 8;
        }
    }
    crc = warp_xor(moved(crc, u64(rows - end) * row_bytes));
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = crc;
    __syncthreads();
    if (threadIdx.x == 0) {
        // The register begins as ones, and ends inverted.
        u32 all = moved(FULL, u64(rows) * row_bytes);
        for (u32 i = 0; i < 8; i++) all ^= parts[i];
        checksums[blockIdx.x * 2 * gridDim.y + blockIdx.z * gridDim.y + layer] = ~all;
    }
}

EXPORT(seal_checksums)
