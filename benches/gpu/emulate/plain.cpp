// Instructions of a thread alone: words of memory, conversions, arithmetic, and what is nothing here.
#include "numbers.h"
#include "ptx.h"

namespace emu {

// Words from shared memory or to it, one after the other.
template <bool STORES>
void shared_words(Env& e, const Statement& s) {
    size_t count = s.items.size() - 1;
    const Item& address = STORES ? s.items[0] : s.items[count];
    uint8_t* at = shared(e.get(address), count * 4);
    for (size_t i = 0; i < count; ++i) {
        if (STORES) {
            uint32_t word = e.get(s.items[1 + i]);
            std::memcpy(at + 4 * i, &word, 4);
        } else {
            uint32_t word;
            std::memcpy(&word, at + 4 * i, 4);
            e.set(s.items[i], (uint64_t)word);
        }
    }
}

static void global_load(Env& e, const Statement& s) {
    size_t count = s.items.size() - 1;
    uint32_t* at = (uint32_t*)e.get(s.items[count]);
    if ((uint64_t)at % (4 * count)) fail("%s from an address that is not aligned", s.name.c_str());
    for (size_t i = 0; i < count; ++i) e.set(s.items[i], (uint64_t)__atomic_load_n(at + i, __ATOMIC_SEQ_CST));
}

static void global_store(Env& e, const Statement& s) {
    size_t count = s.items.size() - 1;
    uint32_t* at = (uint32_t*)e.get(s.items[0]);
    if ((uint64_t)at % (4 * count)) fail("%s to an address that is not aligned", s.name.c_str());
    bool adds = s.name.rfind("red.", 0) == 0;
    for (size_t i = 0; i < count; ++i) {
        uint32_t word = e.get(s.items[1 + i]);
        if (adds) {
            float x;
            std::memcpy(&x, at + i, 4);
            x += e.real(s.items[1 + i]);
            std::memcpy(&word, &x, 4);
        }
        __atomic_store_n(at + i, word, __ATOMIC_SEQ_CST);
    }
}

static uint32_t lane_of(uint64_t word, int i) { return word >> (16 * i) & 0xffff; }

const Instructions& plain_instructions() {
    static const Instructions all = {
        {"fence.", RUN {}},
        {"griddepcontrol.wait", RUN { wait_for_previous(); }},
        {"griddepcontrol.", RUN {}},
        {"setmaxnreg.", RUN {}},
        {"createpolicy.", RUN { e.set(ITEM(0), (uint64_t)0); }},
        {"ld.shared", shared_words<false>},
        {"st.shared", shared_words<true>},
        {"ld.relaxed.gpu.global", RUN {
             global_load(e, s);
             poll();
         }},
        {"st.relaxed.gpu.global", RUN {
             global_store(e, s);
             signalled();
         }},
        {"ld.global", global_load},
        {"st.global", global_store},
        {"red.global.add", global_store},
        {"setp.ne.b32", RUN {
             bool differ = (uint32_t)e.get(ITEM(1)) != (uint32_t)e.get(ITEM(2));
             e.set(ITEM(0), (uint64_t)differ);
         }},
        {"fma.rn.bf16x2", RUN {
             uint64_t x = e.get(ITEM(1)), y = e.get(ITEM(2)), z = e.get(ITEM(3)), r = 0;
             for (int i = 0; i < 2; ++i) {
                 double product = std::fma((double)from_bf16(lane_of(x, i)), (double)from_bf16(lane_of(y, i)),
                                           (double)from_bf16(lane_of(z, i)));
                 r |= (uint64_t)to_bf16(product) << (16 * i);
             }
             e.set(ITEM(0), r);
         }},
        {"sub.rn.f16x2", RUN {
             uint64_t x = e.get(ITEM(1)), y = e.get(ITEM(2)), r = 0;
             for (int i = 0; i < 2; ++i)
                 r |= (uint64_t)to_f16(from_f16(lane_of(x, i)) - from_f16(lane_of(y, i))) << (16 * i);
             e.set(ITEM(0), r);
         }},
        {"mul.rn.f16x2", RUN {
             uint64_t x = e.get(ITEM(1)), y = e.get(ITEM(2)), r = 0;
             for (int i = 0; i < 2; ++i)
                 r |= (uint64_t)to_f16(from_f16(lane_of(x, i)) * from_f16(lane_of(y, i))) << (16 * i);
             e.set(ITEM(0), r);
         }},
        {"cvt.rn.bf16x2.f32", RUN {
             e.set(ITEM(0), (uint64_t)(to_bf16(e.real(ITEM(1))) << 16 | to_bf16(e.real(ITEM(2)))));
         }},
        {"cvt.rn.f16x2.f32", RUN {
             e.set(ITEM(0), (uint64_t)(to_f16(e.real(ITEM(1))) << 16 | to_f16(e.real(ITEM(2)))));
         }},
        {"cvt.rn.satfinite.e4m3x2.f32", RUN {
             e.set(ITEM(0), (uint64_t)(to_e4m3(e.real(ITEM(1))) << 8 | to_e4m3(e.real(ITEM(2)))));
         }},
        {"cvt.rn.f16x2.e4m3x2", RUN {
             uint32_t x = e.get(ITEM(1));
             e.set(ITEM(0), (uint64_t)(to_f16(from_e4m3(x >> 8 & 255)) << 16 | to_f16(from_e4m3(x & 255))));
         }},
        {"cvt.rni.s32.f32", RUN {
             float x = e.real(ITEM(1));
             double r = x != x ? 0.0 : std::fmin(std::fmax(std::nearbyint((double)x), -0x1p31), 0x1p31 - 1);
             e.set(ITEM(0), (uint64_t)(uint32_t)(int32_t)r);
         }},
        {"cvt.pack.sat.s8.s32.b32", RUN {
             auto saturated = [](int32_t x) { return (uint32_t)std::min(std::max(x, -128), 127) & 255; };
             uint32_t high = saturated(e.get(ITEM(1))), low = saturated(e.get(ITEM(2)));
             e.set(ITEM(0), (uint64_t)(high << 8 | low | (uint32_t)e.get(ITEM(3)) << 16));
         }},
        {"ex2.approx.ftz.f32", RUN { e.set(ITEM(0), std::exp2(e.real(ITEM(1)))); }},
        {"rcp.approx.ftz.f32", RUN { e.set(ITEM(0), 1.0f / e.real(ITEM(1))); }},
        {"mov.b32", RUN {
             // One to one, two halves from one, or one from two halves.
             if (s.items.size() == 2) return e.set(ITEM(0), e.get(ITEM(1)));
             bool splits = s.name == "mov.b32{";
             if (splits) {
                 uint64_t x = e.get(ITEM(2));
                 e.set(ITEM(0), x & 0xffff);
                 return e.set(ITEM(1), x >> 16 & 0xffff);
             }
             e.set(ITEM(0), (e.get(ITEM(1)) & 0xffff) | e.get(ITEM(2)) << 16);
         }},
        {"mov.f32", RUN { e.set(ITEM(0), e.get(ITEM(1))); }},
        {"mov.b64", RUN { e.set(ITEM(0), (e.get(ITEM(1)) & 0xffffffff) | e.get(ITEM(2)) << 32); }},
        {"mov.u32 %tid.x", RUN { e.set(ITEM(0), (uint64_t)now->thread.x); }},
        {"mov.u32 %ctaid.x", RUN { e.set(ITEM(0), (uint64_t)block_index().x); }},
    };
    return all;
}

}  // namespace emu
