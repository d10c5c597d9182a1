// Pages between the device's pools and host memory that the device sees, in any layout of the host; and plain copies of bytes.
//
// Bound by the link: each byte crosses it once, in pieces of 16 bytes where addresses and sizes allow, in the order in which the host has them.
#include "common.cuh"

// One plane (keys or values) of one layer of one page.
struct Plane {
    u8* device;
    u8* host;
    u32 heads, page_tokens, row;
    u64 head_stride, token_stride;

    template <class Unit, bool OUT>
    __device__ __forceinline__ void copy() const {
        const u32 units = row / sizeof(Unit);
        const u64 all = u64(heads) * page_tokens * units;
        const bool heads_inside = head_stride <= token_stride;
        for (u64 i = threadIdx.x; i < all; i += blockDim.x) {
            const u32 unit = u32(i % units), piece = u32(i / units);
            const u32 head = heads_inside ? piece % heads : piece / page_tokens;
            const u32 token = heads_inside ? piece / heads : piece % page_tokens;
            Unit* here = reinterpret_cast<Unit*>(device + (u64(head) * page_tokens + token) * row) + unit;
            Unit* there = reinterpret_cast<Unit*>(host + head * head_stride + token * token_stride) + unit;
            if (OUT) {
                *there = *here;
            } else {
                *here = *there;
            }
        }
    }

    template <bool OUT>
    __device__ __forceinline__ void copy_widest() const {
        const u64 bits = u64(device) | u64(host) | row | head_stride | token_stride;
        if (bits % 16 == 0) {
            copy<uint4, OUT>();
        } else if (bits % 4 == 0) {
            copy<u32, OUT>();
        } else if (bits % 2 == 0) {
            copy<u16, OUT>();
        } else {
            copy<u8, OUT>();
        }
    }
};

template <bool OUT>
__device__ __forceinline__ void kv_pages(u8* keys, u8* values, const u64* jobs, u32 first_layer, u32 heads, u32 page_tokens, u32 k_bytes,
                                         u32 v_bytes, u64 k_pool_layer, u64 v_pool_layer, u64 k_layer, u64 k_head, u64 k_token,
                                         u64 v_layer, u64 v_head, u64 v_token) {
    const u64* job = jobs + 3 * u64(blockIdx.x);
    const u64 layer = first_layer + blockIdx.y, page = job[0];
    const bool key = blockIdx.z == 0;
    const u32 row = key ? k_bytes : v_bytes;
    const u64 in_layer = page * heads * page_tokens * row;
    const Plane plane = {
        key ? keys + layer * k_pool_layer + in_layer : values + layer * v_pool_layer + in_layer,
        reinterpret_cast<u8*>(job[key ? 1 : 2]) + layer * (key ? k_layer : v_layer),
        heads,
        page_tokens,
        row,
        key ? k_head : v_head,
        key ? k_token : v_token,
    };
    plane.copy_widest<OUT>();
}

#define KV_PAGES(name, OUT)                                                                                                       \
    KERNEL __launch_bounds__(256) name(u8* keys, u8* values, const u64* jobs, u32 first_layer, u32 heads, u32 page_tokens,        \
                                       u32 k_bytes, u32 v_bytes, u64 k_pool_layer, u64 v_pool_layer, u64 k_layer, u64 k_head,     \
                                       u64 k_token, u64 v_layer, u64 v_head, u64 v_token) {                                       \
        kv_pages<OUT>(keys, values, jobs, first_layer, heads, page_tokens, k_bytes, v_bytes, k_pool_layer, v_pool_layer, k_layer, \
                      k_head, k_token, v_layer, v_head, v_token);                                                                 \
    }                                                                                                                             \
    EXPORT(name)

KV_PAGES(kv_pages_out, true)
KV_PAGES(kv_pages_in, false)

// The part of `bytes` that is the block's, a multiple of 16 but for the last one.
__device__ __forceinline__ void share_of(u64 bytes, u64& first, u64& end) {
    const u64 share = (bytes / 16 + gridDim.y - 1 + (bytes % 16 != 0)) / gridDim.y * 16;
    first = min(share * blockIdx.y, bytes);
    end = min(first + share, bytes);
}

KERNEL __launch_bounds__(256) bytes_copy(const u64* jobs) {
    const u64* job = jobs + 3 * u64(blockIdx.x);
    u8* to = reinterpret_cast<u8*>(job[0]);
    const u8* from = reinterpret_cast<const u8*>(job[1]);
    u64 first, end;
    share_of(job[2], first, end);
    if ((u64(to) | u64(from)) % 16 == 0) {
        const u64 whole = first + (end - first) / 16 * 16;
        for (u64 i = first + 16 * threadIdx.x; i < whole; i += 16 * blockDim.x) {
            *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(from + i);
        }
        first = whole;
    }
    for (u64 i = first + threadIdx.x; i < end; i += blockDim.x) to[i] = from[i];
}

KERNEL __launch_bounds__(256) bytes_zero(const u64* jobs) {
    const u64* job = jobs + 2 * u64(blockIdx.x);
    u8* to = reinterpret_cast<u8*>(job[0]);
    u64 first, end;
    share_of(job[1], first, end);
    if (u64(to) % 16 == 0) {
        const u64 whole = first + (end - first) / 16 * 16;
        for (u64 i = first + 16 * threadIdx.x; i < whole; i += 16 * blockDim.x) {
            *reinterpret_cast<uint4*>(to + i) = make_uint4(0, 0, 0, 0);
        }
        first = whole;
    }
    for (u64 i = first + threadIdx.x; i < end; i += blockDim.x) to[i] = 0;
}

EXPORT(bytes_copy)
EXPORT(bytes_zero)
