// The functions of libnvrtc that qurl uses: kernels are rewritten a little and compiled by g++.
//
// After the preprocessor, inline assembly becomes calls with its operands (ptx.cpp), and every kernel gets a
// function that takes its arguments as a list. The result is a shared library, after its length.
#include <dlfcn.h>
#include <unistd.h>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include "driver.h"

namespace {

struct Program {
    std::string text, name, log, library;
    std::vector<std::pair<std::string, std::string>> headers;
};

std::string folder() {
    Dl_info info;
    dladdr((void*)folder, &info);
    std::string path = info.dli_fname;
    return path.substr(0, path.rfind('/'));
}

std::string read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
}

void write(const std::string& path, const std::string& text) {
    std::ofstream(path, std::ios::binary) << text;
}

// Words of the kernels' language that another step reads.
const char* const WORDS = R"(
#define __device__
#define __forceinline__ inline
#define __global__ EMU_GLOBAL
#define __launch_bounds__(...) EMU_BOUND((__VA_ARGS__))
#define __cluster_dims__(x, y, z) EMU_CLUSTER((x))
#define __shared__ EMU_SHARED
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__
)";

bool is_word(char c) { return std::isalnum((unsigned char)c) || c == '_'; }

size_t after_string(const std::string& t, size_t i) {
    char quote = t[i];
    for (++i; t[i] != quote; ++i)
        if (t[i] == '\\') ++i;
    return i + 1;
}

// The end of what begins with a parenthesis at `i`; calls `at_top` for every character inside of no other.
template <typename F>
size_t after_parentheses(const std::string& t, size_t i, F at_top) {
    for (int depth = 0; i < t.size();) {
        char c = t[i];
        if (c == '"' || c == '\'') {
            i = after_string(t, i);
            continue;
        }
        if (c == ')' || c == '}' || c == ']') --depth;
        if (depth == 0 && c == ')') return i + 1;
        if (depth == 1) at_top(i);
        if (c == '(' || c == '{' || c == '[') ++depth;
        ++i;
    }
    return i;
}

std::string operands(const std::string& part, const char* kind) {
    std::string list;
    for (size_t i = 0; i < part.size();) {
        if (part[i] != '"') {
            ++i;
            continue;
        }
        size_t end = after_string(part, i), open = part.find('(', end);
        size_t close = after_parentheses(part, open, [](size_t) {});
        list += std::string("::emu::") + kind + "(" + part.substr(i, end - i) + ", " +
                part.substr(open + 1, close - open - 2) + "), ";
        i = close;
    }
    return list;
}

// asm volatile("text" : outputs : inputs : what else changes) as a call.
std::string assembly(const std::string& inside) {
    std::vector<size_t> colons;
    after_parentheses("(" + inside + ")", 0, [&](size_t i) {
        if (i > 0 && inside[i - 1] == ':') colons.push_back(i - 1);
    });
    colons.push_back(inside.size());
    auto part = [&](size_t n) {
        return n < colons.size() - 1 ? inside.substr(colons[n] + 1, colons[n + 1] - colons[n] - 1) : "";
    };
    return "::emu::ptx([]() -> const ::emu::Site& { static const ::emu::Site site(" +
           inside.substr(0, colons[0]) + "); return site; }(), {" + operands(part(0), "out") +
           operands(part(1), "in") + "})";
}

std::string rewritten(const std::string& t, std::string& kernels) {
    std::string to;
    for (size_t i = 0; i < t.size();) {
        if (t[i] == '"' || (t[i] == '\'' && !(i > 0 && is_word(t[i - 1])))) {
            size_t end = after_string(t, i);
            to += t.substr(i, end - i);
            i = end;
            continue;
        }
        if (!is_word(t[i])) {
            to += t[i++];
            continue;
        }
        size_t end = i;
        while (end < t.size() && is_word(t[end])) ++end;
        std::string word = t.substr(i, end - i);
        i = end;
        if (word == "EMU_SHARED") {
            bool named = to.size() >= 7 && to.compare(to.size() - 7, 7, "extern ") == 0;
            to += named ? "__thread" : "static __thread";
        } else if (word == "asm") {
            size_t open = t.find('(', i), close = after_parentheses(t, open, [](size_t) {});
            to += assembly(t.substr(open + 1, close - open - 2));
            i = close;
        } else if (word == "EMU_GLOBAL") {
            // void, bounds and cluster in any order, then the name.
            std::string bound = "1024", cluster = "1";
            for (;;) {
                while (!is_word(t[i])) ++i;
                size_t from = i;
                while (is_word(t[i])) ++i;
                std::string next = t.substr(from, i - from);
                if (next == "void") continue;
                if (next == "EMU_BOUND" || next == "EMU_CLUSTER") {
                    size_t open = t.find('(', i), close = after_parentheses(t, open, [](size_t) {});
                    std::string inside = t.substr(open + 2, close - open - 4);
                    if (next == "EMU_BOUND") {
                        int depth = 0;
                        size_t comma = 0;
                        for (; comma < inside.size(); ++comma) {
                            depth += (inside[comma] == '(') - (inside[comma] == ')');
                            if (inside[comma] == ',' && depth == 0) break;
                        }
                        bound = inside.substr(0, comma);
                    } else {
                        cluster = inside;
                    }
                    i = close;
                    continue;
                }
                to += "void " + next;
                const std::string c = "extern \"C\" ";
                kernels += c + "void emu_call_" + next + "(void** p) { emu::call(" + next + ", p); }\n";
                kernels += c + "size_t emu_size_" + next + "(size_t i) { return emu::sizes(" + next;
                kernels += ", i); }\n";
                kernels += c + "unsigned emu_cluster_" + next + " = " + cluster + ";\n";
                kernels += c + "unsigned emu_bound_" + next + " = " + bound + ";\n";
                break;
            }
        } else {
            to += word;
        }
    }
    return to;
}

int shell(const std::string& command, std::string& log, const std::string& at) {
    int status = std::system((command + " > " + at + "/log 2>&1").c_str());
    log += read(at + "/log");
    return status;
}

}  // namespace

// The version stands in the names of what is cached: it changes with what makes and calls kernels, which the
// rest of the emulator may do without.
EXPORT int nvrtcVersion(int* major, int* minor) {
    static const unsigned hash = [] {
        unsigned h = 2166136261u;
        for (const char* name : {"/kernel.h", "/runtime.h", "/compiler.cpp"})
            for (unsigned char c : read(folder() + name)) h = (h ^ c) * 16777619u;
        return h;
    }();
    return *major = 99, *minor = hash >> 4, 0;
}
EXPORT int nvrtcCreateProgram(
    Program** program, const char* text, const char* name, int count, const char* const* headers,
    const char* const* names
) {
    *program = new Program{text, name, "", "", {}};
    for (int i = 0; i < count; ++i) (*program)->headers.emplace_back(names[i], headers[i]);
    return 0;
}
EXPORT int nvrtcCompileProgram(Program* p, int count, const char* const* options) {
    char at[] = "/tmp/emulate-XXXXXX";
    if (!mkdtemp(at)) return 1;
    std::string in = at, defines;
    for (int i = 0; i < count; ++i) {
        std::string option = options[i], arch = "--gpu-architecture=sm_";
        if (option.rfind("-D", 0) == 0) defines += " '" + option + "'";
        if (option.rfind(arch, 0) == 0) {
            defines += " -D__CUDA_ARCH__=" + std::to_string(std::atoi(option.c_str() + arch.size()) * 10);
            if (option.back() == 'a') defines += " -D__CUDA_ARCH_FEAT_SM90_ALL";
        }
    }
    for (auto& [name, text] : p->headers) write(in + "/" + name, text);
    write(in + "/words.h", WORDS);
    write(in + "/" + p->name, p->text);
    std::string preprocess = "g++ -E -x c++ -std=c++17 -I" + in + " -include " + in + "/words.h" + defines;
    int status = shell(preprocess + " " + in + "/" + p->name + " -o " + in + "/text.ii", p->log, in);
    if (status == 0) {
        std::string text = read(in + "/text.ii"), kernels;
        // What is not said to lie at a multiple of 1024 does not, whereas static variables lie as they say.
        bool aligned = text.find("smem[]") != std::string::npos;
        std::string name = aligned ? "smem" : "dynamic", skew = aligned ? "0" : "528";
        write(in + "/kernels.cpp",
              "#include \"kernel.h\"\nalignas(1024) __thread unsigned char emu_storage[(256 << 10) + 1024];\n"
              "asm(\".globl " + name + "\\n.type " + name + ", @tls_object\\n.set " + name +
                  ", emu_storage + " + skew + "\");\n"
                  "extern \"C\" unsigned char* emu_dynamic() { return emu_storage + " + skew + "; }\n"
                  "extern \"C\" unsigned emu_skew = " + skew + ";\n" + rewritten(text, kernels) + "\n" +
                  kernels);
        std::string shim = folder();
        std::string flags = "-O2 -march=native -std=c++20 -ffp-contract=off -fno-strict-aliasing -shared";
        // What a GPU faults on, or computes something else from (memory.cpp says where).
        flags += " -fsanitize=alignment,bounds,shift-exponent -fsanitize-undefined-trap-on-error";
        // What it calls is found where it is loaded (driver.cpp).
        status = shell("g++ " + flags + " -I" + shim + " " + in + "/kernels.cpp -o " + in +
                           "/kernels.so -fPIC -w", p->log, in);
    }
    if (status == 0) {
        std::string library = read(in + "/kernels.so");
        uint64_t bytes = library.size();
        p->library.assign((const char*)&bytes, 8);
        p->library += library;
    }
    if (std::getenv("EMULATE_KEEP")) {
        std::fprintf(stderr, "emulator: %s is in %s\n", p->name.c_str(), at);
    } else {
        std::string ignored;
        (void)!std::system(("rm -r " + in).c_str());
    }
    return status == 0 ? 0 : 6;
}
EXPORT int nvrtcGetProgramLogSize(Program* p, size_t* size) { return *size = p->log.size() + 1, 0; }
EXPORT int nvrtcGetProgramLog(Program* p, char* to) {
    return std::memcpy(to, p->log.c_str(), p->log.size() + 1), 0;
}
EXPORT int nvrtcGetCUBINSize(Program* p, size_t* size) { return *size = p->library.size(), 0; }
EXPORT int nvrtcGetCUBIN(Program* p, char* to) {
    return std::memcpy(to, p->library.data(), p->library.size()), 0;
}
EXPORT int nvrtcDestroyProgram(Program** p) { return delete *p, 0; }
