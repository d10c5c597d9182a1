// Kernels by name, called with arguments that came as bytes. Nothing heavy is included: this is compiled with every kernel file.
#pragma once

#include <type_traits>
#include <utility>

namespace emulation {

// An argument of a launch: an address, or the bytes of a number.
struct Argument {
    bool pointer;
    void* address;
    unsigned size;
    unsigned char bytes[8];
};

[[noreturn]] void refuse_argument(unsigned index, const char* expected, unsigned bytes);
[[noreturn]] void refuse_count(unsigned found, unsigned expected);

template <class T>
T argument(const Argument* all, unsigned index) {
    const Argument& from = all[index];
    T out{};
    if constexpr (std::is_pointer_v<T>) {
        if (!from.pointer) refuse_argument(index, "a pointer", 8);
        out = static_cast<T>(from.address);
    } else {
        if (from.pointer || from.size != sizeof(T)) refuse_argument(index, "a number", sizeof(T));
        std::memcpy(&out, from.bytes, sizeof(T));
    }
    return out;
}

// A kernel that lost its type, and how it is called all the same.
using Kernel = void (*)();
using Call = void (*)(Kernel kernel, const Argument* all, unsigned count);
void add_kernel(const char* name, Kernel kernel, Call call);

template <class... A, size_t... I>
void call_with(void (*kernel)(A...), const Argument* all, std::index_sequence<I...>) {
    kernel(argument<A>(all, I)...);
}

struct Registration {
    template <class... A>
    Registration(const char* name, void (*kernel)(A...)) {
        add_kernel(name, reinterpret_cast<Kernel>(kernel), [](Kernel erased, const Argument* all, unsigned count) {
            if (count != sizeof...(A)) refuse_count(count, sizeof...(A));
            call_with(reinterpret_cast<void (*)(A...)>(erased), all, std::index_sequence_for<A...>{});
        });
    }
};

}  // namespace emulation

#define EXPORT(name) static emulation::Registration registration_of_##name(#name, &name);
