// Small floating-point formats.
#pragma once
#include <immintrin.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace emu {

inline float from_bf16(uint32_t bits) {
    bits = (bits & 0xffff) << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// To the nearest, ties to even.
inline uint32_t to_bf16(double x) {
    if (x != x) return 0x7fff;
    uint32_t sign = std::signbit(x) ? 0x8000 : 0;
    double m = std::fabs(x);
    if (m == 0) return sign;
    if (m >= 0x1p-126 && m < 0x1p127) {
        uint64_t b;
        std::memcpy(&b, &m, 8);
        b = (b + 0x0fffffffffff + (b >> 45 & 1)) >> 45 << 45;
        std::memcpy(&m, &b, 8);
        float f = (float)m;
        uint32_t bits;
        std::memcpy(&bits, &f, 4);
        return sign | bits >> 16;
    }
    int exponent;
    std::frexp(m, &exponent);  // m = f * 2^exponent, f in [1/2, 1)
    int step = std::max(exponent - 8, -133);
    double rounded = std::ldexp(std::nearbyint(std::ldexp(m, -step)), step);
    float f = (float)rounded;  // exact, or infinite
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    return sign | bits >> 16;
}

inline float from_f16(uint32_t bits) { return _cvtsh_ss((unsigned short)bits); }
inline uint32_t to_f16(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }

inline float e4m3_value(uint32_t code) {
    uint32_t m = code & 7, e = code >> 3 & 15;
    if ((code & 0x7f) == 0x7f) return NAN;
    float x = e ? std::ldexp(8.0f + m, (int)e - 10) : std::ldexp((float)m, -9);
    return code & 128 ? -x : x;
}

inline float from_e4m3(uint32_t code) {
    static const std::vector<float> values = [] {
        std::vector<float> all;
        for (uint32_t code = 0; code < 256; ++code) all.push_back(e4m3_value(code));
        return all;
    }();
    return values[code];
}

inline uint32_t to_e4m3(float x) {
    if (x != x) return 0x7f;
    uint32_t sign = std::signbit(x) ? 128 : 0;
    float m = std::fmin(std::fabs(x), 448.0f);
    int exponent;
    std::frexp(m, &exponent);
    int step = std::max(exponent - 4, -9);
    float rounded = std::ldexp(std::nearbyint(std::ldexp(m, -step)), step);
    for (uint32_t code = 0; code < 0x7f; ++code)
        if (from_e4m3(code) == rounded) return sign | code;
    return sign | 0x7e;
}

}  // namespace emu
