// What hopper.cuh stands for, on the CPU.
//
// Bulk copies happen at once, or as late as somebody waits for them, and so do products, by the seed of the launch. What a product reads of shared memory it reads when it happens.
#pragma once

#include "emulation.h"

namespace emulation {

// Lets others run.
void pause();
// Something has happened that who waits may wait for.
void progressed();
// Lets others run, until those who wait have seen what has happened, and have done what follows.
void step_back();
void bulk_later(void* to, const void* map, unsigned x, unsigned y, unsigned long long* barrier);
void warpgroup_arrive(unsigned number);
// Arrives at a barrier of `threads` threads of any warpgroups; waits there, or goes on.
void meet(unsigned number, unsigned threads, bool wait);

// A barrier, as it lies in shared memory.
struct Barrier {
    unsigned short pending;
    unsigned short arrivals : 15;
    unsigned short phase : 1;
    int bytes;
};
static_assert(sizeof(Barrier) == 8, "as large as a barrier");

void barrier_change(unsigned long long* barrier, unsigned arrivals, int bytes);
bool barrier_phase(const unsigned long long* barrier);

// An operand of a product. `column` and `eight` are as in hopper.cuh.
struct Operand {
    const unsigned char* start;
    unsigned column, eight;

    // The element at `row` of the rows that lie there, and `at` along them.
    unsigned short element(unsigned row, unsigned at) const {
        uintptr_t place = reinterpret_cast<uintptr_t>(start) + at / 64 * column + row / 8 * eight + row % 8 * 128 + at % 64 * 2;
        place ^= (place >> 7 & 7) << 4;
        unsigned short out;
        std::memcpy(&out, reinterpret_cast<const void*>(place), 2);
        return out;
    }
};

// A product of a warpgroup, this lane's part of it.
struct Product {
    float* d;
    unsigned columns;
    bool keep, from_registers;
    // Rows lane / 4 and lane / 4 + 8 of the warp's, where a is in registers.
    float rows[2][16];
    Operand a, b;
    float (*to_f32)(unsigned short);

    void perform() const;
};
void product_later(const Product& product);
void products_commit();
void products_wait(unsigned left);

}  // namespace emulation

inline void barrier_make(unsigned long long* barrier, unsigned arrivals) {
    emulation::Barrier made{};
    made.pending = static_cast<unsigned short>(arrivals);
    made.arrivals = static_cast<unsigned short>(arrivals & 0x7FFF);
    std::memcpy(barrier, &made, sizeof made);
}
inline void barriers_made() {}
// Others run before this thread goes on: what it lets go of may be overwritten at once.
inline void barrier_arrive(unsigned long long* barrier) {
    emulation::barrier_change(barrier, 1, 0);
    emulation::step_back();
}
inline void barrier_expect(unsigned long long* barrier, unsigned bytes) { emulation::barrier_change(barrier, 1, static_cast<int>(bytes)); }
inline void barrier_wait(unsigned long long* barrier, unsigned parity) {
    while (emulation::barrier_phase(barrier) == (parity != 0)) emulation::pause();
}
inline void warpgroup_barrier(unsigned number) { emulation::warpgroup_arrive(number); }
inline void turn_wait(unsigned number) { emulation::meet(number, 256, true); }
inline void turn_give(unsigned number) { emulation::meet(number, 256, false); }
inline void shared_fence() {}
inline void map_acquire(const void*) {}
inline void bulk_load(void* to, const void* map, unsigned x, unsigned y, unsigned long long* barrier) {
    emulation::bulk_later(to, map, x, y, barrier);
}
template <unsigned COUNT>
void registers_give() {}
template <unsigned COUNT>
void registers_take() {}

typedef emulation::Operand Matrix;
inline Matrix matrix_at(const void* start, unsigned column, unsigned eight) {
    return {static_cast<const unsigned char*>(start), column, eight};
}
inline void wgmma_begin() {}
inline void wgmma_commit() { emulation::products_commit(); }
template <unsigned LEFT>
void wgmma_wait() {
    emulation::products_wait(LEFT);
}
template <unsigned COUNT>
void hold(float (&)[COUNT]) {}

template <unsigned COUNT>
void wgmma_of(float (&d)[COUNT], Matrix a, Matrix b, bool keep, float (*to_f32)(unsigned short)) {
    emulation::Product product{};
    product.d = d;
    product.columns = 2 * COUNT;
    product.keep = keep;
    product.a = a;
    product.b = b;
    product.to_f32 = to_f32;
    emulation::product_later(product);
}
template <unsigned COUNT>
void wgmma_of(float (&d)[COUNT], const unsigned (&a)[4], Matrix b, bool keep, float (*to_f32)(unsigned short)) {
    emulation::Product product{};
    product.d = d;
    product.columns = 2 * COUNT;
    product.keep = keep;
    product.from_registers = true;
    product.b = b;
    product.to_f32 = to_f32;
    // The layout of a in `mma_m16n8k16`.
    const emulation::Parcel* all = emulation::exchange(0xFFFFFFFFu, a, sizeof a);
    for (unsigned t = 0; t < 4; t++) {
        unsigned theirs[4];
        std::memcpy(theirs, all[emulation::lane() / 4 * 4 + t].bytes, sizeof theirs);
        for (unsigned i = 0; i < 4; i++) {
            float* row = product.rows[i % 2] + i / 2 * 8 + 2 * t;
            row[0] = to_f32(static_cast<unsigned short>(theirs[i]));
            row[1] = to_f32(static_cast<unsigned short>(theirs[i] >> 16));
        }
    }
    emulation::product_later(product);
}
template <unsigned COUNT, class A>
void wgmma_bf16(float (&d)[COUNT], const A& a, Matrix b, bool keep) {
    wgmma_of(d, a, b, keep, bf16_to_f32);
}
template <unsigned COUNT, class A>
void wgmma_f16(float (&d)[COUNT], const A& a, Matrix b, bool keep) {
    wgmma_of(d, a, b, keep, f16_to_f32);
}
