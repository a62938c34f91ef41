// What kernels and the emulator share: threads of a kernel as fibers, and inline assembly as calls.
#pragma once
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>

namespace emu {

struct Dim {
    unsigned x, y, z;
};
struct Block;
struct Warp;

// A thread of a kernel. It runs until it has to wait for others.
struct Fiber {
    void* stack_pointer;
    Dim thread;
    unsigned number, lane;
    Block* block;
    Warp* warp;
    void* stack;
    bool done, blocked;
    unsigned cluster_target;  // of a cluster's barrier at which it has arrived
};

// The one that runs in this thread of the machine.
extern __thread Fiber* now;

Dim block_index();
Dim block_size();
Dim grid_size();
void sync_threads();
void sync_warp(unsigned mask);
// Lane `from` of the value; what a lane gives and gets.
uint64_t shuffle(unsigned mask, uint64_t value, unsigned from);
unsigned ballot(unsigned mask, bool vote);
// Gives way to others: waiting for something in memory.
void poll();
uint32_t shared_address(const void* p);

// An operand of inline assembly: where it is, and (of inputs) its value.
struct Operand {
    void* at;
    uint64_t bits;
    unsigned size;
};
template <typename T>
uint64_t bits_of(const T& x) {
    uint64_t bits = 0;
    std::memcpy(&bits, &x, sizeof x);
    return bits;
}
template <typename T>
Operand out(const char*, T& x) {
    return {&x, bits_of(x), sizeof x};
}
template <typename T>
Operand in(const char* constraint, T&& x) {
    // Registers may be read again by what runs in the background; addresses and the like are not.
    bool is_register = std::is_lvalue_reference_v<T> && constraint[0] == 'r';
    void* at = is_register ? (void*)&x : nullptr;
    return {at, bits_of(x), sizeof x};
}

struct Code;
// A text of inline assembly, understood once.
struct Site {
    explicit Site(const char* text);
    const Code* code;
};
void ptx(const Site& site, std::initializer_list<Operand> operands);

// Kernels take the arguments as the driver does: as a list of addresses.
template <typename... A, size_t... I>
void call(void (*kernel)(A...), void** p, std::index_sequence<I...>) {
    kernel(*(std::remove_const_t<A>*)p[I]...);
}
template <typename... A>
void call(void (*kernel)(A...), void** p) {
    call(kernel, p, std::index_sequence_for<A...>());
}
template <typename... A>
constexpr size_t sizes(void (*)(A...), size_t i) {
    const size_t all[] = {sizeof(A)..., 0};
    return all[i];
}

}  // namespace emu
