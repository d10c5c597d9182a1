// Runs the kernels that are linked to it: reads commands from standard input, and writes buffers that are asked for to standard output.
//
// Numbers are little endian; a name is its length (4 bytes) and its bytes.
// `A` id, bytes (8), content                    a buffer, exactly so long
// `F` id, offset (8), target id, offset (8)     writes the address of a buffer's byte into another buffer
// `L` name, grid (3 x 4), block (3 x 4), shared (4), seed (8), number of arguments (4), each
//     `p` id, offset (8) | `n` (null) | `v` size (1), bytes
// `R` id                                        the buffer's content comes back, its length (8) first
// `N`                                           the kernels' names come back, their number (4) first, each as a name
#include "fibers.h"

namespace {

void read_bytes(void* to, size_t bytes) {
    if (std::fread(to, 1, bytes, stdin) != bytes) emulation::refuse("the commands end within one");
}
template <class T>
T read() {
    T out;
    read_bytes(&out, sizeof(T));
    return out;
}
std::string read_name() {
    std::string name(read<uint32_t>(), ' ');
    read_bytes(name.data(), name.size());
    return name;
}

struct Buffer {
    // From malloc, so that the sanitizer knows its ends.
    unsigned char* bytes = nullptr;
    uint64_t size = 0;
};
std::map<uint32_t, Buffer> buffers;

Buffer& buffer(uint32_t id) {
    auto found = buffers.find(id);
    if (found == buffers.end()) emulation::refuse("there is no buffer " + std::to_string(id));
    return found->second;
}

void allocate() {
    uint32_t id = read<uint32_t>();
    Buffer made;
    made.size = read<uint64_t>();
    void* memory = nullptr;
    if (posix_memalign(&memory, 256, made.size ? made.size : 1) != 0) emulation::refuse("no memory is left");
    made.bytes = static_cast<unsigned char*>(memory);
    read_bytes(made.bytes, made.size);
    buffers[id] = made;
}

void fix() {
    Buffer& place = buffer(read<uint32_t>());
    uint64_t offset = read<uint64_t>();
    Buffer& target = buffer(read<uint32_t>());
    uint64_t address = reinterpret_cast<uint64_t>(target.bytes) + read<uint64_t>();
    std::memcpy(place.bytes + offset, &address, 8);
}

void launch() {
    std::string name = read_name();
    dim3 grid = read<dim3>(), block = read<dim3>();
    uint32_t shared = read<uint32_t>();
    uint64_t seed = read<uint64_t>();
    std::vector<emulation::Argument> arguments(read<uint32_t>());
    for (emulation::Argument& argument : arguments) {
        std::memset(&argument, 0, sizeof argument);
        switch (read<char>()) {
            case 'p': {
                argument.pointer = true;
                unsigned char* base = buffer(read<uint32_t>()).bytes;
                argument.address = base + read<uint64_t>();
                break;
            }
            case 'n': argument.pointer = true; break;
            case 'v':
                argument.size = read<uint8_t>();
                read_bytes(argument.bytes, argument.size);
                break;
            default: emulation::refuse("an argument of an unknown kind");
        }
    }
    auto kernel = emulation::kernels().find(name);
    if (kernel == emulation::kernels().end()) emulation::refuse("there is no kernel " + name);
    emulation::Launched launched = {name, kernel->second.kernel, kernel->second.call, arguments};
    emulation::run(launched, grid, block, shared, seed);
}

void give() {
    Buffer& from = buffer(read<uint32_t>());
    std::fwrite(&from.size, 8, 1, stdout);
    std::fwrite(from.bytes, 1, from.size, stdout);
    std::fflush(stdout);
}

void names() {
    uint32_t count = uint32_t(emulation::kernels().size());
    std::fwrite(&count, 4, 1, stdout);
    for (const auto& entry : emulation::kernels()) {
        uint32_t length = uint32_t(entry.first.size());
        std::fwrite(&length, 4, 1, stdout);
        std::fwrite(entry.first.data(), 1, length, stdout);
    }
    std::fflush(stdout);
}

}  // namespace

int main() {
    for (int command = std::getchar(); command != EOF; command = std::getchar()) {
        switch (command) {
            case 'A': allocate(); break;
            case 'F': fix(); break;
            case 'L': launch(); break;
            case 'R': give(); break;
            case 'N': names(); break;
            default: emulation::refuse("an unknown command");
        }
    }
    for (auto& entry : buffers) std::free(entry.second.bytes);
    return 0;
}
