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
    // Rows and features of a tile: as many sums as there are registers for, beside those of the factors.
    static constexpr int ROWS = L::REGISTERS >= 32 ? 6 : 2, FEATURES = L::REGISTERS >= 32 ? 4 : 2;

    static V load(const Stored* at) {
        if constexpr (T == FloatType::f32) return L::load(at);
        else if constexpr (T == FloatType::f16) return L::load_half(at);
        else return L::load_brain(at);
    }

    template <int R, int F>
    static void tile(const Stored* w, std::int64_t columns, const float* x, std::int64_t stride, float* out,
                     std::int64_t out_stride) {
        V acc[R * F];
        for (int i = 0; i < R * F; i++) acc[i] = L::zero();
        std::int64_t at = 0;
        for (; at + LANES <= columns; at += LANES) {
            V weight[F];
            for (int f = 0; f < F; f++) weight[f] = load(w + f * columns + at);
            for (int r = 0; r < R; r++) {
                const V number = L::load(x + r * stride + at);
                for (int f = 0; f < F; f++) acc[r * F + f] = L::fma(weight[f], number, acc[r * F + f]);
            }
        }
        if (at < columns) {
            const std::size_t rest = std::size_t(columns - at);
            for (int f = 0; f < F; f++) {
                Stored last[LANES] = {};
                std::memcpy(last, w + f * columns + at, rest * sizeof(Stored));
                for (int r = 0; r < R; r++) {
                    float numbers[LANES] = {};
                    std::memcpy(numbers, x + r * stride + at, rest * sizeof(float));
                    acc[r * F + f] = L::fma(load(last), L::load(numbers), acc[r * F + f]);
                }
            }
        }
        float sums[(R * F + 3) / 4 * 4];
        int done = 0;
        for (; done + 4 <= R * F; done += 4) L::fold(acc + done, sums + done);
        for (; done < R * F; done++) {
            float lanes[LANES];
            L::store(lanes, acc[done]);
            sums[done] = sum_of(lanes);
        }
        for (int r = 0; r < R; r++)
            for (int f = 0; f < F; f++) out[r * out_stride + f] = canonical(sums[r * F + f]);
    }

    // Some rows with all features, so that the rows stay in the L1 cache.
    template <int R>
    static void some_rows(const Stored* w, std::int64_t features, std::int64_t columns, const float* x,
                          std::int64_t stride, float* out, std::int64_t out_stride) {
        std::int64_t feature = 0;
        for (; feature + FEATURES <= features; feature += FEATURES)
            tile<R, FEATURES>(w + feature * columns, columns, x, stride, out + feature, out_stride);
        for (; feature < features; feature++) tile<R, 1>(w + feature * columns, columns, x, stride, out + feature, out_stride);
    }

    static void all(const void* weights, std::int64_t features, std::int64_t columns, const float* x,
                    std::int64_t stride, std::int64_t rows, float* out, std::int64_t out_stride) {
        const Stored* w = static_cast<const Stored*>(weights);
        for (; rows >= ROWS; rows -= ROWS, x += ROWS * stride, out += ROWS * out_stride)
            some_rows<ROWS>(w, features, columns, x, stride, out, out_stride);
        for (; rows >= 2; rows -= 2, x += 2 * stride, out += 2 * out_stride)
            some_rows<2>(w, features, columns, x, stride, out, out_stride);
        if (rows) some_rows<1>(w, features, columns, x, stride, out, out_stride);
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
