// Statements of inline assembly, parsed, and the instructions that there are.
#pragma once
#include <string>
#include <utility>
#include <vector>
#include "block.h"

namespace emu {

// NAMED are registers of a thread that several texts name, by a number or (BY_OPERAND) an operand's value.
struct Item {
    enum { OPERAND, LOCAL, NUMBER, NOTHING, NAMED, BY_OPERAND } kind;
    int64_t value;
};
struct Env;
struct Statement {
    std::string name;
    std::vector<Item> items;
    int guard = -1;  // a local
    bool negated = false;
    int target = -1;  // of a branch
    void (*run)(Env&, const Statement&) = nullptr;
    mutable int kind = 0;  // of numbers, once it has been asked for
};
struct Code {
    std::vector<Statement> statements;
};

struct Env {
    const Operand* operands;
    uint32_t* named;
    uint64_t locals[8] = {};

    uint32_t& register_of(const Item& item) const {
        uint64_t number = item.kind == Item::NAMED ? item.value : operands[item.value].bits;
        if (number >= NAMED_REGISTERS) fail("register %lu of a thread", number);
        return named[number];
    }
    uint64_t get(const Item& item) const {
        if (item.kind == Item::LOCAL) return locals[item.value];
        if (item.kind == Item::NUMBER) return item.value;
        if (item.kind != Item::OPERAND) return register_of(item);
        const Operand& o = operands[item.value];
        uint64_t bits = o.bits;
        if (o.at) bits = 0, std::memcpy(&bits, o.at, o.size);
        return bits;
    }
    float real(const Item& item) const {
        uint32_t bits = get(item);
        float x;
        std::memcpy(&x, &bits, 4);
        return x;
    }
    void set(const Item& item, uint64_t bits) {
        if (item.kind == Item::LOCAL) locals[item.value] = bits;
        if (item.kind == Item::NAMED || item.kind == Item::BY_OPERAND) register_of(item) = bits;
        if (item.kind != Item::OPERAND) return;
        const Operand& o = operands[item.value];
        std::memcpy(o.at, &bits, o.size);
    }
    void set(const Item& item, float x) {
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        set(item, (uint64_t)bits);
    }
};

// An instruction of a whole warp.
template <void (*DO)(Gather&, const Statement&)>
void together(Env& e, const Statement& s) {
    gather(0xffffffffu, &s, &e, [](Gather& g) { DO(g, *(const Statement*)g.what); });
}

// Instructions by what their names begin with; the first that fits is taken.
typedef void (*Run)(Env&, const Statement&);
typedef std::vector<std::pair<const char*, Run>> Instructions;
const Instructions& mma_instructions();
const Instructions& copy_instructions();
const Instructions& plain_instructions();

#define RUN [](Env & e, const Statement& s)
#define ITEM(i) (s.items[i])

}  // namespace emu
