// A GPU for tests: the kernels of kernels/cuda, compiled by a C++ compiler, run on one CPU thread.
//
// A block's threads are fibers, which run one at a time. Warp after warp, in an order that the seed picks anew after every barrier, runs as far as it comes: to a barrier
// that all have to reach, or to its end. So what lacks a barrier reads what is not there yet, or what is not there any more. Threads that are never let go are an error.
// Shared memory begins every block as NaN. Warp operations exchange values through two buffers in turns: a lane is never more than
// one exchange ahead of another. Asynchronous copies are made at once or
// when they are waited for, by the seed. Who lets go of a place in shared memory stands back until others have filled it again.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct dim3 {
    unsigned x, y, z;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }

namespace emulation {

// What a lane gives to the others of its warp.
struct Parcel {
    alignas(16) unsigned char bytes[64];
};

// The running thread, and where it stands in the grid.
extern dim3 thread_index, block_index, block_size, grid_size;

void barrier();
// Gives `parcel` to the lanes of `mask`, and waits until all of them have given theirs, which then stand in the result by lane.
const Parcel* exchange(unsigned mask, const void* parcel, unsigned bytes);
unsigned lane();
unsigned char* dynamic_shared();
// Shared memory of a kernel: it is NaN when a block begins.
void shared(void* memory, unsigned long bytes);
void copy_later(void* to, const void* from, unsigned bytes, unsigned valid);
void commit_copies();
void wait_copies(unsigned groups_left);

template <class T>
T from_lane(unsigned mask, T value, unsigned source) {
    static_assert(sizeof(T) <= sizeof(Parcel), "a value that fits");
    const Parcel* all = exchange(mask, &value, sizeof(T));
    if (!(mask >> source & 1)) {
        std::fprintf(stderr, "emulation: a shuffle reads lane %u, which is not in its mask %#x\n", source, mask);
        std::abort();
    }
    T out;
    std::memcpy(&out, all[source].bytes, sizeof(T));
    return out;
}

}  // namespace emulation

#define threadIdx (emulation::thread_index)
#define blockIdx (emulation::block_index)
#define blockDim (emulation::block_size)
#define gridDim (emulation::grid_size)

#define SHARED(type, name, count)                \
    alignas(16) static type name[count];         \
    emulation::shared(name, sizeof(type) * (count))
#define DYNAMIC_SHARED(name) unsigned char* name = emulation::dynamic_shared()

inline void __syncthreads() { emulation::barrier(); }
inline void __syncwarp(unsigned mask = 0xFFFFFFFFu) { emulation::exchange(mask, "", 0); }
inline void __threadfence() {}

template <class T>
T __shfl_sync(unsigned mask, T value, unsigned source, unsigned width = 32) {
    unsigned lane = emulation::lane();
    return emulation::from_lane(mask, value, (lane & ~(width - 1)) | (source & (width - 1)));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, unsigned flip) {
    return emulation::from_lane(mask, value, emulation::lane() ^ flip);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by) {
    unsigned lane = emulation::lane();
    return emulation::from_lane(mask, value, lane >= by ? lane - by : lane);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by) {
    unsigned lane = emulation::lane();
    return emulation::from_lane(mask, value, lane + by < 32 ? lane + by : lane);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
    unsigned char mine = predicate != 0;
    const emulation::Parcel* all = emulation::exchange(mask, &mine, 1);
    unsigned out = 0;
    for (unsigned lane = 0; lane < 32; lane++) {
        if ((mask >> lane & 1) && all[lane].bytes[0]) out |= 1u << lane;
    }
    return out;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }

// Threads run one at a time, so these are what they are called.
template <class T>
T atomicAdd(T* at, T value) {
    T before = *at;
    *at = before + value;
    return before;
}
template <class T>
T atomicMax(T* at, T value) {
    T before = *at;
    if (value > before) *at = value;
    return before;
}
template <class T>
T atomicMin(T* at, T value) {
    T before = *at;
    if (value < before) *at = value;
    return before;
}
template <class T>
T atomicOr(T* at, T value) {
    T before = *at;
    *at = before | value;
    return before;
}

inline unsigned __float_as_uint(float x) {
    unsigned bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
inline float __uint_as_float(unsigned bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
template <class T>
T min(T a, T b) {
    return b < a ? b : a;
}
template <class T>
T max(T a, T b) {
    return a < b ? b : a;
}

// IEEE half precision, to nearest, halves to even.
inline unsigned short f32_to_f16(float x) {
    unsigned bits = __float_as_uint(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
    if (magnitude > 0x7F800000) return static_cast<unsigned short>(sign | 0x7E00);
    if (magnitude >= 0x477FF000) return static_cast<unsigned short>(sign | 0x7C00);
    if (magnitude < 0x38800000) {
        // Below 2^-14 steps are 2^-24; adding 0.5 leaves them in the low bits, rounded.
        return static_cast<unsigned short>(sign | (__float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3F000000));
    }
    magnitude += 0xFFF + (magnitude >> 13 & 1);
    return static_cast<unsigned short>(sign | (magnitude - 0x38000000) >> 13);
}
inline float f16_to_f32(unsigned short half) {
    unsigned sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31, fraction = half & 0x3FF;
    if (exponent == 31) return __uint_as_float(sign | 0x7F800000 | fraction << 13);
    float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                    : __uint_as_float((exponent + 112) << 23 | fraction << 13);
    return sign ? -magnitude : magnitude;
}
inline unsigned short f32_to_bf16(float x) {
    unsigned bits = __float_as_uint(x);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FFF;
    return static_cast<unsigned short>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
inline float bf16_to_f32(unsigned short bits) { return __uint_as_float(static_cast<unsigned>(bits) << 16); }

// cp.async of 16 bytes, of which those beyond `valid` are zeros.
inline void cp_async_16(void* to, const void* from, unsigned valid = 16) { emulation::copy_later(to, from, 16, valid); }
inline void cp_async_commit() { emulation::commit_copies(); }
template <unsigned LEFT>
void cp_async_wait() {
    emulation::wait_copies(LEFT);
}

// ldmatrix.x4: lane i names row i % 8 of matrix i / 8, eight elements of two bytes. A lane gets of each matrix the elements
// 2 * (lane % 4) and the next of row lane / 4; transposed, of column lane / 4.
inline void ldmatrix_x4(unsigned (&out)[4], const void* row) {
    const emulation::Parcel* rows = emulation::exchange(0xFFFFFFFFu, row, 16);
    unsigned lane = emulation::lane();
    for (unsigned m = 0; m < 4; m++) std::memcpy(&out[m], rows[8 * m + lane / 4].bytes + 4 * (lane % 4), 4);
}
inline void ldmatrix_x4_trans(unsigned (&out)[4], const void* row) {
    const emulation::Parcel* rows = emulation::exchange(0xFFFFFFFFu, row, 16);
    unsigned lane = emulation::lane();
    for (unsigned m = 0; m < 4; m++) {
        unsigned short pair[2];
        for (unsigned i = 0; i < 2; i++) std::memcpy(&pair[i], rows[8 * m + 2 * (lane % 4) + i].bytes + 2 * (lane / 4), 2);
        std::memcpy(&out[m], pair, 4);
    }
}

// mma.sync.m16n8k16, sums in f32. With g = lane / 4 and t = lane % 4 a lane holds
// A: rows g and g + 8 at columns 2t, 2t + 1 (registers 0, 1) and at columns 2t + 8, 2t + 9 (registers 2, 3);
// B: rows 2t, 2t + 1 (register 0) and 2t + 8, 2t + 9 (register 1) of column g;
// C: columns 2t, 2t + 1 of row g (0, 1) and of row g + 8 (2, 3).
template <class Convert>
void mma_m16n8k16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2], Convert to_f32) {
    float mine[12];
    for (unsigned i = 0; i < 4; i++) {
        mine[2 * i] = to_f32(static_cast<unsigned short>(a[i]));
        mine[2 * i + 1] = to_f32(static_cast<unsigned short>(a[i] >> 16));
    }
    for (unsigned i = 0; i < 2; i++) {
        mine[8 + 2 * i] = to_f32(static_cast<unsigned short>(b[i]));
        mine[9 + 2 * i] = to_f32(static_cast<unsigned short>(b[i] >> 16));
    }
    const emulation::Parcel* all = emulation::exchange(0xFFFFFFFFu, mine, sizeof mine);
    unsigned lane = emulation::lane(), group = lane / 4, pair = lane % 4;
    double sums[4] = {c[0], c[1], c[2], c[3]};
    for (unsigned t = 0; t < 4; t++) {
        const float* left = reinterpret_cast<const float*>(all[4 * group + t].bytes);
        for (unsigned column = 0; column < 2; column++) {
            const float* right = reinterpret_cast<const float*>(all[4 * (2 * pair + column) + t].bytes) + 8;
            for (unsigned i = 0; i < 2; i++) {
                sums[column] += static_cast<double>(left[i]) * right[i] + static_cast<double>(left[4 + i]) * right[2 + i];
                sums[2 + column] += static_cast<double>(left[2 + i]) * right[i] + static_cast<double>(left[6 + i]) * right[2 + i];
            }
        }
    }
    for (unsigned i = 0; i < 4; i++) c[i] = static_cast<float>(sums[i]);
}
inline void mma_bf16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) { mma_m16n8k16(c, a, b, bf16_to_f32); }
inline void mma_f16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) { mma_m16n8k16(c, a, b, f16_to_f32); }

// Kernels by name, for the runner.
#include "launch.h"
