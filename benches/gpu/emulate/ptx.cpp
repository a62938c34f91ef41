// Inline assembly: a text is parsed once into statements, and run with the operands of a thread. Of PTX it
// knows registers of the text's own and one array of them for all texts, predicates, labels and branches; the
// instructions are in mma.cpp, copies.cpp and plain.cpp, as the PTX manual has them.
#include "ptx.h"
#include <algorithm>
#include <map>

namespace emu {

// A word with what belongs to names: dots and double colons.
static std::string word_at(const std::string& t, size_t& i) {
    size_t from = i;
    for (; i < t.size(); ++i) {
        if (t.compare(i, 2, "::") == 0) ++i;
        else if (!std::isalnum((unsigned char)t[i]) && t[i] != '_' && t[i] != '.') break;
    }
    return t.substr(from, i - from);
}

// The array of registers that all texts know, once a text has declared it (.reg .f32 name<64>).
static std::string array;

Site::Site(const char* text) : code(nullptr) {
    Code* c = new Code;
    code = c;
    std::string t = text;
    std::map<std::string, int> locals, labels;
    std::vector<std::pair<size_t, std::string>> branches;
    auto skip = [&](size_t& i) {
        while (i < t.size() && (std::isspace((unsigned char)t[i]) || t[i] == ';')) ++i;
    };
    for (size_t i = 0; skip(i), i < t.size();) {
        if (t[i] == '{' || t[i] == '}') {
            ++i;
            continue;
        }
        Statement s;
        if (t[i] == '@') {
            s.negated = t[++i] == '!';
            if (s.negated) ++i;
            std::string name = word_at(t, i);
            if (!locals.count(name)) fail("no register %s in: %s", name.c_str(), text);
            s.guard = locals[name];
            skip(i);
        }
        std::string name = word_at(t, i);
        if (t[i] == ':') {
            labels[name] = c->statements.size();
            ++i;
            continue;
        }
        size_t end = t.find(';', i);
        if (end == std::string::npos) end = t.size();
        std::string rest = t.substr(i, end - i);
        i = end;
        if (name == ".reg") {
            size_t at = rest.find_first_of(" \t", rest.find('.'));
            for (size_t k = at; k < rest.size();) {
                if (std::isalpha((unsigned char)rest[k])) {
                    std::string local = word_at(rest, k);
                    if (rest[k] == '<') {
                        array = local;
                        break;
                    }
                    int next = locals.size();
                    locals[local] = next;
                } else {
                    ++k;
                }
            }
            if (locals.size() > 8) fail("more registers than expected in: %s", text);
            continue;
        }
        s.name = name;
        if (name == "bra") {
            size_t k = rest.find_first_not_of(" \t");
            branches.emplace_back(c->statements.size(), word_at(rest, k));
            c->statements.push_back(s);
            continue;
        }
        if (name == "mov.b32" && rest.find('{') < rest.find(',')) s.name += "{";
        for (size_t k = 0; k < rest.size();) {
            char ch = rest[k];
            if (ch == '%' && k + 1 < rest.size() && std::isdigit((unsigned char)rest[k + 1])) {
                size_t length;
                s.items.push_back({Item::OPERAND, std::stoll(rest.substr(k + 1), &length)});
                k += 1 + length;
            } else if (ch == '%') {
                k += rest[k + 1] == '%' ? 2 : 1;
                s.name += " %" + word_at(rest, k);
            } else if (rest.compare(k, 2, "0f") == 0) {
                s.items.push_back({Item::NUMBER, std::stoll(rest.substr(k + 2, 8), nullptr, 16)});
                k += 10;
            } else if (std::isdigit((unsigned char)ch)) {
                size_t length;
                bool real = rest.find('.', k) != std::string::npos && s.name.rfind("createpolicy", 0) == 0;
                int64_t value = real ? (std::stod(rest.substr(k), &length), 0)
                                     : (int64_t)std::stoull(rest.substr(k), &length, 0);
                s.items.push_back({Item::NUMBER, value});
                k += length;
            } else if (ch == '_' && !std::isalnum((unsigned char)rest[k + 1])) {
                s.items.push_back({Item::NOTHING, 0});
                ++k;
            } else if (std::isalpha((unsigned char)ch)) {
                std::string local = word_at(rest, k);
                std::string number = local.substr(std::min(local.size(), array.size()));
                if (locals.count(local)) {
                    s.items.push_back({Item::LOCAL, locals[local]});
                } else if (array.empty() || local.compare(0, array.size(), array) != 0) {
                    fail("no register %s in: %s", local.c_str(), text);
                } else if (number.empty() && rest[k] == '%') {
                    size_t length;
                    s.items.push_back({Item::BY_OPERAND, std::stoll(rest.substr(k + 1), &length)});
                    k += 1 + length;
                } else {
                    s.items.push_back({Item::NAMED, std::stoll(number)});
                }
            } else {
                ++k;
            }
        }
        for (const Instructions* some : {&mma_instructions(), &copy_instructions(), &plain_instructions()})
            for (auto& [prefix, run] : *some)
                if (!s.run && s.name.rfind(prefix, 0) == 0) s.run = run;
        if (!s.run) fail("an instruction that is not known: %s", s.name.c_str());
        c->statements.push_back(s);
    }
    for (auto& [at, label] : branches) {
        if (!labels.count(label)) fail("no label %s in: %s", label.c_str(), text);
        c->statements[at].target = labels[label];
    }
}

void ptx(const Site& site, std::initializer_list<Operand> operands) {
    Env env;
    env.operands = operands.begin();
    env.named = now->block->named[now->number].data();
    const std::vector<Statement>& all = site.code->statements;
    for (size_t i = 0; i < all.size(); ++i) {
        const Statement& s = all[i];
        if (s.guard >= 0 && (env.locals[s.guard] != 0) == s.negated) continue;
        if (s.target >= 0) {
            i = s.target - 1;
            continue;
        }
        s.run(env, s);
    }
}

}  // namespace emu
