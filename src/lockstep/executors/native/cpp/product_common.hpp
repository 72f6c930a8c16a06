// Shared by all product kernels: the scale of a group of activations, and products of float weights.
#pragma once

#include <cstring>
#include <type_traits>

#include "bits.hpp"
#include "elements.hpp"
#include "product.hpp"

namespace lockstep::native {
namespace {

// A tile of one kind: the panel, its groups, the rows and their stride, and the outputs.
using Tile = void (*)(const std::uint8_t*, std::int64_t, const Numbers*, std::int64_t, int, float*, Fetch);

constexpr float LEAST = 0x1p-100f;  // a group with only smaller numbers becomes zero, since its inverse would overflow

struct Scale {
    float scale, inverse;  // the inverse is 0 if all codes are 0
};

// Of a group by the bits of its largest magnitude, which are ordered as the magnitudes are, with infinity and NaN above
// all numbers. A group that has one of those gets NaN, so that all outputs of its row are NaN.
inline Scale scale_of(std::int32_t bits) {
    if (bits >= 0x7f800000) return {with_bits<float>(NAN_BITS), 0.f};
    const float largest = with_bits<float>(bits);
    if (largest < LEAST) return {0.f, 0.f};
    return {largest * (1.f / 127.f), 127.f / largest};
}

// L::group of each 32 columns; the last ones are padded with zeros.
template <class L>
void quantise_row(const float* x, std::int64_t n, Numbers* out) {
    std::int64_t at = 0;
    for (; at + GROUP <= n; at += GROUP) L::group(x + at, *out++);
    if (at == n) return;
    float rest[GROUP] = {};
    std::memcpy(rest, x + at, std::size_t(n - at) * sizeof(float));
    L::group(rest, *out);
}

// Float weights: an output is a sum in sixteen lanes, column c in lane c % 16, by fma in ascending order, then the tree
// of bits.hpp. The last columns are filled with zeros.
template <class L, FloatType T>
struct FloatRows {
    using Stored = std::conditional_t<T == FloatType::f32, float, std::uint16_t>;
    using V = typename L::V;
    static constexpr int TILE = 4;

    static V load(const Stored* at) {
        if constexpr (T == FloatType::f32) return L::load(at);
        else if constexpr (T == FloatType::f16) return L::load_half(at);
        else return L::load_brain(at);
    }

    template <int R>
    static void dot(const Stored* w, std::int64_t columns, const float* x, std::int64_t stride, float* out,
                    std::int64_t out_stride) {
        V acc[R];
        for (int r = 0; r < R; r++) acc[r] = L::zero();
        std::int64_t at = 0;
        for (; at + LANES <= columns; at += LANES) {
            const V weight = load(w + at);
            for (int r = 0; r < R; r++) acc[r] = L::fma(weight, L::load(x + r * stride + at), acc[r]);
        }
        if (at < columns) {
            const std::size_t rest = std::size_t(columns - at);
            Stored last[LANES] = {};
            std::memcpy(last, w + at, rest * sizeof(Stored));
            for (int r = 0; r < R; r++) {
                float numbers[LANES] = {};
                std::memcpy(numbers, x + r * stride + at, rest * sizeof(float));
                acc[r] = L::fma(load(last), L::load(numbers), acc[r]);
            }
        }
        for (int r = 0; r < R; r++) {
            float lanes[LANES];
            L::store(lanes, acc[r]);
            out[r * out_stride] = canonical(sum_of(lanes));
        }
    }

    static void all(const void* weights, std::int64_t features, std::int64_t columns, const float* x,
                    std::int64_t stride, std::int64_t rows, float* out, std::int64_t out_stride) {
        for (std::int64_t feature = 0; feature < features; feature++) {
            const Stored* w = static_cast<const Stored*>(weights) + feature * columns;
            std::int64_t row = 0;
            for (; row + TILE <= rows; row += TILE)
                dot<TILE>(w, columns, x + row * stride, stride, out + row * out_stride + feature, out_stride);
            for (; row < rows; row++) dot<1>(w, columns, x + row * stride, stride, out + row * out_stride + feature, 1);
        }
    }
};

template <class L>
void float_products(int type, const void* weights, std::int64_t features, std::int64_t columns, const float* x,
                    std::int64_t stride, std::int64_t rows, float* out, std::int64_t out_stride) {
    switch (FloatType(type)) {
        case FloatType::f32:
            return FloatRows<L, FloatType::f32>::all(weights, features, columns, x, stride, rows, out, out_stride);
        case FloatType::f16:
            return FloatRows<L, FloatType::f16>::all(weights, features, columns, x, stride, rows, out, out_stride);
        case FloatType::bf16:
            return FloatRows<L, FloatType::bf16>::all(weights, features, columns, x, stride, rows, out, out_stride);
    }
}

}  // namespace
}  // namespace lockstep::native
