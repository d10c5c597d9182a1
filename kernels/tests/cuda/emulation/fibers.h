// A block's threads as fibers of one thread of the machine.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "emulation.h"
#include "hopper.h"

#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace emulation {

[[noreturn]] inline void refuse(const std::string& why) {
    std::fprintf(stderr, "emulation: %s\n", why.c_str());
    std::exit(3);
}

dim3 thread_index, block_index, block_size, grid_size;

// A kernel file's entry point.
struct Entry {
    Kernel kernel;
    Call call;
};
std::map<std::string, Entry>& kernels() {
    static std::map<std::string, Entry> all;
    return all;
}
void add_kernel(const char* name, Kernel kernel, Call call) { kernels()[name] = {kernel, call}; }

// What every thread of a launch calls.
struct Launched {
    std::string name;
    Kernel kernel;
    Call call;
    std::vector<Argument> arguments;
};

namespace {

const Launched* launched = nullptr;

constexpr size_t STACK = 256 * 1024;
constexpr unsigned MOST_THREADS = 1024;

enum class State { ready, barrier, warp, paused, done };

struct Copy {
    void* to;
    const void* from;
    unsigned bytes, valid;
};

struct Fiber {
    State state = State::ready;
    dim3 index{};
    unsigned mask = 0;
    // Exchanges that this lane has begun.
    unsigned exchanges = 0;
    std::vector<Copy> open;
    std::vector<std::vector<Copy>> groups;
    std::vector<Product> open_products;
    std::vector<std::vector<Product>> products;
#ifdef __x86_64__
    void* stack_pointer = nullptr;
#else
    ucontext_t context;
#endif
};

struct Warp {
    Parcel buffers[2][32];
};

struct Shared {
    void* memory;
    unsigned long bytes;
};

std::vector<Fiber> fibers;
std::vector<Warp> warps;
std::map<void*, unsigned long> shared_memory;
std::unique_ptr<unsigned char[]> dynamic_memory;
unsigned char* stacks = nullptr;
unsigned running = 0;
bool copies_at_once = false;
// Whether products of warpgroups are made when they are begun, or when they are waited for.
bool products_at_once = false;
// Bulk copies that have been started.
struct Bulk {
    void* to;
    const void* map;
    unsigned x, y;
    unsigned long long* barrier;
};
std::vector<Bulk> bulks;
// Whether anything happened since the threads that pause last looked.
bool any_progress = false;
// Threads that have arrived at the barriers of warpgroups, and how often each has let go.
struct Meeting {
    unsigned arrived = 0, rounds = 0;
};
std::map<unsigned, Meeting> meetings;
// Those at barriers that warpgroups share, by their number.
std::map<unsigned, Meeting> turns;

void perform(const Copy& copy) {
    std::memset(copy.to, 0, copy.bytes);
    std::memcpy(copy.to, copy.from, copy.valid);
}

#ifdef __x86_64__
void* scheduler_stack = nullptr;
// Saves what a call has to keep, on the old stack, and goes on with the new one.
extern "C" void emulation_switch(void** save, void* load);
asm(R"(
.text
.globl emulation_switch
.type emulation_switch, @function
emulation_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulation_switch, .-emulation_switch
)");
void leave() { emulation_switch(&fibers[running].stack_pointer, scheduler_stack); }
void enter() { emulation_switch(&scheduler_stack, fibers[running].stack_pointer); }
#else
ucontext_t scheduler_context;
void leave() { swapcontext(&fibers[running].context, &scheduler_context); }
void enter() { swapcontext(&scheduler_context, &fibers[running].context); }
#endif

void thread_main() {
    launched->call(launched->kernel, launched->arguments.data(), unsigned(launched->arguments.size()));
    wait_copies(0);
    fibers[running].state = State::done;
    leave();
    std::abort();
}

void prepare(unsigned thread) {
    unsigned char* stack = stacks + thread * STACK;
#ifdef __x86_64__
    // Six registers, the address to go on at, and one that nobody returns to.
    void** top = reinterpret_cast<void**>(stack + STACK) - 8;
    std::memset(top, 0, 64);
    top[6] = reinterpret_cast<void*>(&thread_main);
    fibers[thread].stack_pointer = top;
#else
    ucontext_t& context = fibers[thread].context;
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = STACK;
    context.uc_link = nullptr;
    makecontext(&context, thread_main, 0);
#endif
}

void wait_as(State state) {
    fibers[running].state = state;
    leave();
}

// The first bytes of the 128 of a map, as the tests' drivers make it.
struct Map {
    const unsigned char* base;
    uint64_t rows, row_elements;
    uint32_t box_rows;
};

void perform_bulk(const Bulk& bulk) {
    Map map;
    std::memcpy(&map, bulk.map, sizeof map);
    const uintptr_t to = reinterpret_cast<uintptr_t>(bulk.to);
    if (to % 1024) refuse("a bulk copy to an address that is no multiple of 1024");
    if (bulk.x % 64 || bulk.x + 64 > map.row_elements) refuse("a bulk copy beyond the end of a row");
    for (uint64_t row = 0; row < map.box_rows; row++) {
        for (unsigned piece = 0; piece < 8; piece++) {
            unsigned char* target = reinterpret_cast<unsigned char*>((to + row * 128 + piece * 16) ^ ((to + row * 128) >> 7 & 7) << 4);
            if (bulk.y + row >= map.rows) {
                std::memset(target, 0, 16);
            } else {
                std::memcpy(target, map.base + ((bulk.y + row) * map.row_elements + bulk.x) * 2 + piece * 16, 16);
            }
        }
    }
    barrier_change(bulk.barrier, 0, -int(map.box_rows * 128));
}

// Lets go the lanes of a warp that have all arrived at an operation. False when none has.
bool release_warp(size_t warp) {
    const size_t first = 32 * warp, end = std::min(first + 32, fibers.size());
    bool any = false;
    for (size_t i = first; i < end; i++) {
        if (fibers[i].state != State::warp) continue;
        const unsigned mask = fibers[i].mask;
        bool all = true;
        for (size_t lane = 0; lane < 32; lane++) {
            if (!(mask >> lane & 1)) continue;
            if (first + lane >= end || fibers[first + lane].state == State::done) {
                refuse("a warp operation waits for lane " + std::to_string(lane) + " of warp " + std::to_string(warp) + ", which has ended");
            }
            all &= fibers[first + lane].state == State::warp && fibers[first + lane].mask == mask;
        }
        if (!all) continue;
        for (size_t lane = 0; first + lane < end; lane++) {
            if (mask >> lane & 1) fibers[first + lane].state = State::ready;
        }
        any = true;
    }
    return any;
}

// Each warp in turn runs as far as it comes, so that one may be a whole barrier ahead of another.
void run_block(std::mt19937_64& random, uint64_t seed) {
    std::vector<unsigned> order(warps.size()), lanes(32);
    for (unsigned i = 0; i < order.size(); i++) order[i] = i;
    for (unsigned i = 0; i < 32; i++) lanes[i] = i;
    // Seed 0 keeps the order of thread numbers.
    auto shuffle = [&](std::vector<unsigned>& all) {
        for (size_t i = all.size(); seed != 0 && i > 1; i--) std::swap(all[i - 1], all[random() % i]);
    };
    for (;;) {
        shuffle(order);
        for (unsigned warp : order) {
            shuffle(lanes);
            do {
                for (unsigned lane : lanes) {
                    const unsigned thread = 32 * warp + lane;
                    if (thread >= fibers.size() || fibers[thread].state != State::ready) continue;
                    running = thread;
                    thread_index = fibers[thread].index;
                    enter();
                }
            } while (release_warp(warp) && (any_progress = true));
        }
        size_t at_barrier = 0, in_warp = 0, paused = 0;
        for (const Fiber& fiber : fibers) {
            at_barrier += fiber.state == State::barrier;
            in_warp += fiber.state == State::warp;
            paused += fiber.state == State::paused;
        }
        if (at_barrier + in_warp + paused == 0) break;
        if (paused > 0) {
            // Who waits looks again when something has happened. A bulk copy happens when nothing else can.
            if (!any_progress && !bulks.empty()) {
                const Bulk bulk = bulks.front();
                bulks.erase(bulks.begin());
                perform_bulk(bulk);
                any_progress = true;
            }
            if (!any_progress) refuse("deadlock: " + std::to_string(paused) + " threads wait for what does not happen");
            any_progress = false;
            for (Fiber& fiber : fibers) {
                if (fiber.state == State::paused) fiber.state = State::ready;
            }
            continue;
        }
        if (in_warp > 0) {
            refuse("deadlock: " + std::to_string(at_barrier) + " threads wait at a barrier, " + std::to_string(in_warp) + " in a warp operation");
        }
        for (Fiber& fiber : fibers) {
            if (fiber.state == State::barrier) fiber.state = State::ready;
        }
    }
    for (const auto& turn : turns) {
        if (turn.second.arrived) refuse("the block has ended, and " + std::to_string(turn.second.arrived) + " threads have arrived at barrier " + std::to_string(turn.first) + " for nobody");
    }
    if (!bulks.empty()) refuse("the block has ended, and " + std::to_string(bulks.size()) + " bulk copies have not been waited for");
}

}  // namespace

void refuse_argument(unsigned index, const char* expected, unsigned bytes) {
    refuse(launched->name + ": argument " + std::to_string(index) + " has to be " + expected + " of " + std::to_string(bytes) + " bytes");
}
void refuse_count(unsigned found, unsigned expected) {
    refuse(launched->name + " takes " + std::to_string(expected) + " arguments, not " + std::to_string(found));
}

void barrier() { wait_as(State::barrier); }
unsigned lane() { return running % 32; }
unsigned char* dynamic_shared() { return dynamic_memory.get(); }

const Parcel* exchange(unsigned mask, const void* parcel, unsigned bytes) {
    Fiber& fiber = fibers[running];
    if (!(mask >> lane() & 1)) refuse("a lane calls a warp operation whose mask leaves it out");
    Parcel* buffer = warps[running / 32].buffers[fiber.exchanges++ % 2];
    std::memcpy(buffer[lane()].bytes, parcel, bytes);
    fiber.mask = mask;
    wait_as(State::warp);
    return buffer;
}

void shared(void* memory, unsigned long bytes) {
    if (shared_memory.emplace(memory, bytes).second) std::memset(memory, 0xFF, bytes);
}

void pause() { wait_as(State::paused); }
void progressed() { any_progress = true; }
void step_back() {
    // Once for those who wait to look, once for them to go on.
    for (unsigned round = 0; round < 2; round++) {
        progressed();
        pause();
    }
}

void warpgroup_arrive(unsigned number) {
    if (number == 0 || number > 15) refuse("the barrier of a warpgroup has a number from 1 to 15");
    // By the warpgroup as well: its threads alone meet here.
    Meeting& meeting = meetings[running / 128 * 16 + number];
    const unsigned round = meeting.rounds;
    if (++meeting.arrived == 128) {
        meeting.arrived = 0;
        meeting.rounds++;
        progressed();
        return;
    }
    while (meeting.rounds == round) pause();
}

void meet(unsigned number, unsigned threads, bool wait) {
    if (number == 0 || number > 15) refuse("a barrier has a number from 1 to 15");
    Meeting& meeting = turns[number];
    const unsigned round = meeting.rounds;
    if (++meeting.arrived == threads) {
        meeting.arrived = 0;
        meeting.rounds++;
        progressed();
    } else {
        while (wait && meeting.rounds == round) pause();
    }
}

void barrier_change(unsigned long long* at, unsigned arrivals, int bytes) {
    Barrier barrier;
    std::memcpy(&barrier, at, sizeof barrier);
    if (arrivals > barrier.pending) refuse("more threads arrive at a barrier than it was made for");
    barrier.pending = static_cast<unsigned short>(barrier.pending - arrivals);
    barrier.bytes += bytes;
    if (barrier.pending == 0 && barrier.bytes == 0) {
        barrier.phase ^= 1;
        barrier.pending = barrier.arrivals;
        progressed();
    }
    std::memcpy(at, &barrier, sizeof barrier);
}
bool barrier_phase(const unsigned long long* at) {
    Barrier barrier;
    std::memcpy(&barrier, at, sizeof barrier);
    return barrier.phase;
}

void bulk_later(void* to, const void* map, unsigned x, unsigned y, unsigned long long* barrier) {
    if (copies_at_once) {
        perform_bulk({to, map, x, y, barrier});
    } else {
        bulks.push_back({to, map, x, y, barrier});
    }
    progressed();
}

void Product::perform() const {
    const unsigned warp = running / 32 % 4, group = lane() / 4, pair = lane() % 4;
    float left[2][16];
    for (unsigned i = 0; i < 2; i++) {
        for (unsigned k = 0; k < 16; k++) left[i][k] = from_registers ? rows[i][k] : to_f32(a.element(16 * warp + group + 8 * i, k));
    }
    for (unsigned n = 0; n < columns / 8; n++) {
        for (unsigned j = 0; j < 2; j++) {
            const unsigned column = 8 * n + 2 * pair + j;
            double sums[2];
            for (unsigned i = 0; i < 2; i++) sums[i] = keep ? d[4 * n + 2 * i + j] : 0.0;
            for (unsigned k = 0; k < 16; k++) {
                const double right = to_f32(from_registers ? b.element(k, column) : b.element(column, k));
                for (unsigned i = 0; i < 2; i++) sums[i] += left[i][k] * right;
            }
            for (unsigned i = 0; i < 2; i++) d[4 * n + 2 * i + j] = float(sums[i]);
        }
    }
}

void product_later(const Product& product) {
    if (products_at_once) {
        product.perform();
    } else {
        // Nobody reads these sums before they are there.
        for (unsigned i = 0; !product.keep && i < product.columns / 2; i++) product.d[i] = NAN;
        fibers[running].open_products.push_back(product);
    }
}
void products_commit() {
    Fiber& fiber = fibers[running];
    fiber.products.push_back(std::move(fiber.open_products));
    fiber.open_products.clear();
}
void products_wait(unsigned left) {
    auto& groups = fibers[running].products;
    while (groups.size() > left) {
        for (const Product& product : groups.front()) product.perform();
        groups.erase(groups.begin());
    }
}

void copy_later(void* to, const void* from, unsigned bytes, unsigned valid) {
    if (reinterpret_cast<uintptr_t>(to) % bytes || reinterpret_cast<uintptr_t>(from) % bytes) refuse("an asynchronous copy is not aligned");
    // The hardware may copy at once, or as late as it is waited for: whole launches do the one or the other, so that what relies on either is seen.
    if (copies_at_once) {
        perform({to, from, bytes, valid});
    } else {
        fibers[running].open.push_back({to, from, bytes, valid});
    }
}
void commit_copies() {
    Fiber& fiber = fibers[running];
    fiber.groups.push_back(std::move(fiber.open));
    fiber.open.clear();
}
void wait_copies(unsigned groups_left) {
    auto& groups = fibers[running].groups;
    while (groups.size() > groups_left) {
        for (const Copy& copy : groups.front()) perform(copy);
        groups.erase(groups.begin());
    }
}

// Runs the blocks of a grid one after another, in an order that the seed picks too.
void run(const Launched& what, dim3 grid, dim3 block, uint32_t shared_bytes, uint64_t seed) {
    unsigned threads = block.x * block.y * block.z;
    if (threads == 0 || threads > MOST_THREADS) refuse("a block of " + std::to_string(threads) + " threads");
    if (!stacks) {
        void* memory = mmap(nullptr, STACK * MOST_THREADS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) refuse("no memory for stacks");
        stacks = static_cast<unsigned char*>(memory);
    }
    std::mt19937_64 random(seed);
    launched = &what;
    copies_at_once = seed % 2 == 1;
    products_at_once = seed / 2 % 2 == 1;
    block_size = block;
    grid_size = grid;
    uint64_t blocks = uint64_t(grid.x) * grid.y * grid.z;
    for (uint64_t i = 0; i < blocks; i++) {
        // A step that shares no factor with the number of blocks would do; backwards is enough.
        uint64_t at = seed % 2 ? blocks - 1 - i : i;
        block_index = {unsigned(at % grid.x), unsigned(at / grid.x % grid.y), unsigned(at / grid.x / grid.y)};
        fibers.assign(threads, Fiber());
        bulks.clear();
        meetings.clear();
        turns.clear();
        warps.resize((threads + 31) / 32);
        dynamic_memory.reset(new unsigned char[shared_bytes]);
        std::memset(dynamic_memory.get(), 0xFF, shared_bytes);
        for (auto& memory : shared_memory) std::memset(memory.first, 0xFF, memory.second);
        for (unsigned thread = 0; thread < threads; thread++) {
            fibers[thread].index = {thread % block.x, thread / block.x % block.y, thread / block.x / block.y};
            prepare(thread);
        }
        run_block(random, seed);
    }
}

}  // namespace emulation
