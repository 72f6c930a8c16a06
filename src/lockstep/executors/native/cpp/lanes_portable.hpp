// Sixteen floats in an array: the reference of the other instruction sets, and the implementation for processors that
// have none of them. What each operation means is written here; lanes_avx2.hpp and lanes_avx512.hpp have the same ones.
#pragma once

#include "bits.hpp"

namespace lockstep::native {
namespace {

struct Portable {
    struct V {
        float lane[LANES];
    };
    struct Mask {
        bool lane[LANES];
    };
    static constexpr int REGISTERS = 8;  // number of vectors that fit into the registers

    template <class F>
    static V each(F f) {
        V x;
        for (int i = 0; i < LANES; i++) x.lane[i] = f(i);
        return x;
    }
    static V zero() { return set(0.f); }
    static V set(float x) {
        return each([&](int) { return x; });
    }
    static V load(const float* at) {
        return each([&](int i) { return at[i]; });
    }
    static void store(float* at, const V& x) { __builtin_memcpy(at, x.lane, sizeof x.lane); }

    // a * b + c with one rounding.
    static V fma(const V& a, const V& b, const V& c) {
        return each([&](int i) { return __builtin_fmaf(a.lane[i], b.lane[i], c.lane[i]); });
    }
    static V add(const V& a, const V& b) {
        return each([&](int i) { return a.lane[i] + b.lane[i]; });
    }
    static V sub(const V& a, const V& b) {
        return each([&](int i) { return a.lane[i] - b.lane[i]; });
    }
    static V mul(const V& a, const V& b) {
        return each([&](int i) { return a.lane[i] * b.lane[i]; });
    }
    static V div(const V& a, const V& b) {
        return each([&](int i) { return a.lane[i] / b.lane[i]; });
    }
    // The second operand if one is NaN.
    static V max(const V& a, const V& b) {
        return each([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
    }
    static V min(const V& a, const V& b) {
        return each([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
    }

    // False if one is NaN.
    static Mask less(const V& a, const V& b) {
        Mask mask;
        for (int i = 0; i < LANES; i++) mask.lane[i] = a.lane[i] < b.lane[i];
        return mask;
    }
    static Mask is_nan(const V& x) {
        Mask mask;
        for (int i = 0; i < LANES; i++) mask.lane[i] = x.lane[i] != x.lane[i];
        return mask;
    }
    static V select(const Mask& mask, const V& yes, const V& no) {
        return each([&](int i) { return mask.lane[i] ? yes.lane[i] : no.lane[i]; });
    }

    // 2^n of an integral n from -126 to 127; any number for another n.
    static V power(const V& n) {
        return each([&](int i) {
            const int exponent = n.lane[i] >= -126.f && n.lane[i] <= 127.f ? int(n.lane[i]) : 0;
            return with_bits<float>(std::uint32_t(exponent + 127) << 23);
        });
    }

    // Widens numbers of other precisions exactly.
    static V load_half(const std::uint16_t* at) {
        return each([&](int i) { return widened(at[i]); });
    }
    static V load_brain(const std::uint16_t* at) {
        return each([&](int i) { return with_bits<float>(std::uint32_t(at[i]) << 16); });
    }
    static V load_byte(const std::int8_t* at) {
        return each([&](int i) { return float(at[i]); });
    }
    // Rounds to the nearest binary16, ties to even.
    static void store_half(std::uint16_t* at, const V& x) {
        for (int i = 0; i < LANES; i++) at[i] = halved(x.lane[i]);
    }

    // The sums of the lanes of four vectors, each by the tree of `sum_of`.
    static void fold(const V* x, float* out) {
        for (int i = 0; i < 4; i++) {
            V lanes = x[i];
            out[i] = sum_of(lanes.lane);
        }
    }

    // IEEE 754 binary16: subnormal numbers are integers times 2^-24.
    static float widened(std::uint16_t half) {
        const std::uint32_t sign = std::uint32_t(half & 0x8000) << 16, exponent = half >> 10 & 31,
                            fraction = half & 0x3ff;
        if (exponent == 0) return with_bits<float>(sign | with_bits<std::uint32_t>(float(fraction) * 0x1p-24f));
        if (exponent == 31) return with_bits<float>(sign | 0x7f800000 | fraction << 13 | (fraction ? 0x400000 : 0));
        return with_bits<float>(sign | (exponent + 112) << 23 | fraction << 13);
    }
    static std::uint16_t halved(float x) {
        const std::uint32_t bits = with_bits<std::uint32_t>(x), sign = bits >> 16 & 0x8000,
                            magnitude = bits & 0x7fffffff;
        if (magnitude > 0x7f800000) return sign | 0x7e00 | (magnitude >> 13 & 0x3ff);
        if (magnitude >= 0x477ff000) return sign | 0x7c00;
        if (magnitude < 0x38800000)
            return sign | std::uint16_t(with_bits<std::uint32_t>(with_bits<float>(magnitude) + 0.5f) -
                                        with_bits<std::uint32_t>(0.5f));
        const std::uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
        return sign | std::uint16_t((rounded >> 13) - (112 << 10));
    }
};

}  // namespace
}  // namespace lockstep::native
