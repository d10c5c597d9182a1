// Kernels of one file as a library: launches them with addresses of this process.
#include KERNEL_FILE

#include "fibers.h"

#define VISIBLE extern "C" __attribute__((visibility("default")))

VISIBLE int kvdock_has(const char* name) { return emulation::kernels().count(name) != 0; }

// `sizes` holds 0 for an address, else the bytes of a number; `values` the address or the number in the first bytes.
VISIBLE void kvdock_launch(const char* name, const unsigned* grid, const unsigned* block, unsigned shared, unsigned long long seed,
                           unsigned count, const unsigned* sizes, const unsigned long long* values) {
    std::vector<emulation::Argument> arguments(count);
    for (unsigned i = 0; i < count; i++) {
        arguments[i].pointer = sizes[i] == 0;
        arguments[i].address = reinterpret_cast<void*>(values[i]);
        arguments[i].size = sizes[i];
        std::memcpy(arguments[i].bytes, &values[i], 8);
    }
    auto kernel = emulation::kernels().find(name);
    if (kernel == emulation::kernels().end()) emulation::refuse(std::string("there is no kernel ") + name);
    emulation::Launched launched = {name, kernel->second.kernel, kernel->second.call, arguments};
    emulation::run(launched, dim3{grid[0], grid[1], grid[2]}, dim3{block[0], block[1], block[2]}, shared, seed);
}
