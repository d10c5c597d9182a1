// What all kernels use. For NVRTC: no host header is included.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef float f32;
typedef double f64;

#define KERNEL extern "C" __global__ void
#define FULL 0xFFFFFFFFu

#ifdef KVDOCK_EMULATION
#include "emulation.h"
#else

// Names an entry point; the tests call kernels by these names.
#define EXPORT(name)
// Static shared memory, aligned for the widest accesses.
#define SHARED(type, name, count) __shared__ __align__(16) type name[count]
// The shared memory whose size the launch gives.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) u8 name[]

__device__ __forceinline__ u16 f32_to_f16(f32 x) {
    u16 out;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(x));
    return out;
}
__device__ __forceinline__ f32 f16_to_f32(u16 x) {
    f32 out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(x));
    return out;
}
__device__ __forceinline__ u16 f32_to_bf16(f32 x) {
    u16 out;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(x));
    return out;
}
__device__ __forceinline__ f32 bf16_to_f32(u16 x) { return __uint_as_float(u32(x) << 16); }

// The address of shared memory in its own window.
__device__ __forceinline__ u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

// Starts a copy of 16 bytes to shared memory; those beyond `valid` become zeros and are not read.
__device__ __forceinline__ void cp_async_16(void* to, const void* from, u32 valid = 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(valid) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until no more than the last LEFT groups of this thread are under way.
template <u32 LEFT>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// Four 8 x 8 matrices of two-byte elements; lane i names row i % 8 of matrix i / 8.
__device__ __forceinline__ void ldmatrix_x4(u32 (&out)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(row))
                 : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&out)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// c += a * b for tiles of 16 x 16 and 16 x 8.
__device__ __forceinline__ void mma_bf16(f32 (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_f16(f32 (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif

#define INFINITE __uint_as_float(0x7F800000u)
#define LOG2_E 1.4426950408889634f

// Element types of pools.
struct F32 {
    typedef f32 Stored;
    static __device__ __forceinline__ f32 load(Stored x) { return x; }
    static __device__ __forceinline__ Stored store(f32 x) { return x; }
};
struct F16 {
    typedef u16 Stored;
    static __device__ __forceinline__ f32 load(Stored x) { return f16_to_f32(x); }
    static __device__ __forceinline__ Stored store(f32 x) { return f32_to_f16(x); }
    static __device__ __forceinline__ void mma(f32 (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) { mma_f16(c, a, b); }
};
struct BF16 {
    typedef u16 Stored;
    static __device__ __forceinline__ f32 load(Stored x) { return bf16_to_f32(x); }
    static __device__ __forceinline__ Stored store(f32 x) { return f32_to_bf16(x); }
    static __device__ __forceinline__ void mma(f32 (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) { mma_bf16(c, a, b); }
};

__device__ __forceinline__ f32 sigmoid(f32 x) { return 1.0f / (1.0f + expf(-x)); }
__device__ __forceinline__ f32 silu(f32 x) { return x / (1.0f + expf(-x)); }

// The sum over a warp, the same bits in every lane.
__device__ __forceinline__ f32 warp_sum(f32 x) {
    for (u32 by = 16; by > 0; by /= 2) x += __shfl_xor_sync(FULL, x, by);
    return x;
}
__device__ __forceinline__ f32 warp_max(f32 x) {
    for (u32 by = 16; by > 0; by /= 2) x = fmaxf(x, __shfl_xor_sync(FULL, x, by));
    return x;
}

// The sum over a block of whole warps, the same bits in every thread. `scratch` holds 32 numbers and is free to be used again at once.
__device__ __forceinline__ f32 block_sum(f32 x, f32* scratch) {
    u32 warp = threadIdx.x / 32, warps = (blockDim.x + 31) / 32;
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) scratch[warp] = x;
    __syncthreads();
    f32 sum = 0.0f;
    for (u32 i = 0; i < warps; i++) sum += scratch[i];
    __syncthreads();
    return sum;
}
__device__ __forceinline__ f32 block_max(f32 x, f32* scratch) {
    u32 warp = threadIdx.x / 32, warps = (blockDim.x + 31) / 32;
    x = warp_max(x);
    if (threadIdx.x % 32 == 0) scratch[warp] = x;
    __syncthreads();
    f32 most = scratch[0];
    for (u32 i = 1; i < warps; i++) most = fmaxf(most, scratch[i]);
    __syncthreads();
    return most;
}

// Whether an address is good for accesses of `bytes`.
__device__ __forceinline__ bool aligned(const void* p, u32 bytes) { return u64(p) % bytes == 0; }
