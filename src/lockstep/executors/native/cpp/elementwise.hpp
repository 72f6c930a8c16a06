// Row operations of a forward pass over an instruction set's lanes; elements_*.cpp instantiate them.
#pragma once

#include "elements.hpp"
#include "math.hpp"

namespace lockstep::native {

// The lanes of a row: sixteen at a time, and the rest of a row that is not a multiple of sixteen, padded with zeros.
template <class L>
struct Row {
    using V = typename L::V;

    struct Whole {
        V load(const float* at) const { return L::load(at); }
        template <FloatType T>
        V load_as(const void* x, std::int64_t i) const {
            if constexpr (T == FloatType::f32) return L::load(static_cast<const float*>(x) + i);
            if constexpr (T == FloatType::f16) return L::load_half(static_cast<const std::uint16_t*>(x) + i);
            if constexpr (T == FloatType::bf16) return L::load_brain(static_cast<const std::uint16_t*>(x) + i);
        }
        void store(float* at, V x) const { L::store(at, x); }
        V only(V x) const { return x; }
    };
    struct Part {
        int count;
        V load(const float* at) const { return load_as<FloatType::f32>(at, 0); }
        template <FloatType T>
        V load_as(const void* x, std::int64_t i) const {
            constexpr std::size_t bytes = T == FloatType::f32 ? 4 : 2;
            alignas(64) unsigned char lanes[LANES * bytes] = {};
            __builtin_memcpy(lanes, static_cast<const unsigned char*>(x) + i * bytes, count * bytes);
            return Whole{}.template load_as<T>(lanes, 0);
        }
        void store(float* at, V x) const {
            alignas(64) float lanes[LANES];
            L::store(lanes, x);
            __builtin_memcpy(at, lanes, count * sizeof(float));
        }
        // x with zeros in the lanes that the row does not have.
        V only(V x) const {
            alignas(64) float lanes[LANES] = {};
            store(lanes, x);
            return L::load(lanes);
        }
    };

    // Calls f(index, lanes) for each sixteen of n elements.
    template <class F>
    static void each(std::int64_t n, F f) {
        std::int64_t i = 0;
        for (; i + LANES <= n; i += LANES) f(i, Whole{});
        if (i < n) f(i, Part{int(n - i)});
    }

    // out = f(index, lanes), with canonical NaN.
    template <class F>
    static void map(std::int64_t n, float* out, F f) {
        each(n, [&](std::int64_t i, auto lanes) { lanes.store(out + i, Math<L>::canonical(f(i, lanes))); });
    }
};

template <class L>
struct Elementwise {
    using V = typename L::V;
    using M = Math<L>;

    static void norm(const float* x, const float* weight, float offset, float epsilon, std::int64_t n, float* out) {
        V squares = L::zero();
        Row<L>::each(n, [&](std::int64_t i, auto lanes) {
            const V each = lanes.load(x + i);
            squares = L::fma(each, each, squares);
        });
        alignas(64) float sums[LANES];
        L::store(sums, squares);
        const V scale = L::set(1.f / __builtin_sqrtf(sum_of(sums) / float(n) + epsilon)), added = L::set(offset);
        Row<L>::map(n, out, [&](std::int64_t i, auto lanes) {
            return L::mul(L::mul(lanes.load(x + i), scale), L::add(lanes.load(weight + i), added));
        });
    }

    static void layer_norm(const float* x, const float* weights, float epsilon, std::int64_t n, float* out) {
        V total = L::zero();
        Row<L>::each(n, [&](std::int64_t i, auto lanes) { total = L::add(total, lanes.load(x + i)); });
        alignas(64) float sums[LANES];
        L::store(sums, total);
        V variance = L::zero();
        const V mean = L::set(sum_of(sums) / float(n));
        Row<L>::each(n, [&](std::int64_t i, auto lanes) {
            const V distance = lanes.only(L::sub(lanes.load(x + i), mean));
            variance = L::fma(distance, distance, variance);
        });
        L::store(sums, variance);
        const V scale = L::set(1.f / __builtin_sqrtf(sum_of(sums) / float(n) + epsilon));
        Row<L>::map(n, out, [&](std::int64_t i, auto lanes) {
            const V each = L::mul(L::sub(lanes.load(x + i), mean), scale);
            return L::fma(each, lanes.load(weights + i), lanes.load(weights + n + i));
        });
    }

    static void add(const float* x, const float* y, float factor, std::int64_t n, float* out) {
        Row<L>::map(n, out, [&](std::int64_t i, auto lanes) {
            return L::add(lanes.load(x + i), L::mul(lanes.load(y + i), L::set(factor)));
        });
    }

    static void finish(const Ending& ending, const float* y, std::int64_t stride, std::int64_t rows, std::int64_t n,
                       float* out, std::int64_t out_stride) {
        const V divisor = L::set(ending.divisor), factor = L::set(ending.factor);
        for (; rows; rows--, y += stride, out += out_stride)
            Row<L>::map(n, out, [&](std::int64_t i, auto lanes) {
                V x = lanes.load(y + i);
                if (ending.bias) x = L::add(x, lanes.load(ending.bias + i));
                if (ending.divisor != 1.f) x = L::div(x, divisor);
                return ending.adds ? L::add(lanes.load(out + i), L::mul(x, factor)) : x;
            });
    }

    // x / (1 + e^-y): x times the logistic function of y.
    static V logistic(V x, V y) { return L::div(x, L::add(L::set(1.f), M::exp(L::sub(L::zero(), y)))); }

    static V gated(Gate function, V x) {
        switch (function) {
            case Gate::silu:
                return logistic(x, x);
            case Gate::gelu_tanh: {
                // (1 + tanh(u)) / 2 is the logistic function of 2 u, with u = sqrt(2 / pi) (x + 0.044715 x^3).
                const V cubic = L::fma(L::set(0.0713548163f), L::mul(x, x), L::set(1.59576912f));
                return logistic(x, L::mul(x, cubic));
            }
            case Gate::relu:
                return L::max(L::zero(), x);  // in this order NaN stays
            case Gate::tanh:
                return M::tanh(x);
            case Gate::sigmoid:
                return logistic(L::set(1.f), x);
            case Gate::identity:
                return x;
            case Gate::gelu_erf:
                break;
        }
        const V erf = M::erf(L::mul(x, L::set(0.707106781f)));
        return L::mul(L::mul(L::set(0.5f), x), L::add(L::set(1.f), erf));
    }

    static void gate(Gate function, const float* gate, const float* up, std::int64_t n, float* out) {
        Row<L>::map(n, out, [&](std::int64_t i, auto lanes) {
            return L::mul(gated(function, lanes.load(gate + i)), lanes.load(up + i));
        });
    }

    static void activate(Gate function, const float* x, std::int64_t n, float* out) {
        switch (function) {
            case Gate::silu:
                return activate_by<Gate::silu>(x, n, out);
            case Gate::gelu_tanh:
                return activate_by<Gate::gelu_tanh>(x, n, out);
            case Gate::gelu_erf:
                return activate_by<Gate::gelu_erf>(x, n, out);
            case Gate::relu:
                return activate_by<Gate::relu>(x, n, out);
            case Gate::tanh:
                return activate_by<Gate::tanh>(x, n, out);
            case Gate::sigmoid:
                return activate_by<Gate::sigmoid>(x, n, out);
            case Gate::identity:
                return activate_by<Gate::identity>(x, n, out);
        }
    }
    template <Gate F>
    static void activate_by(const float* x, std::int64_t n, float* out) {
        Row<L>::map(n, out, [&](std::int64_t i, auto lanes) { return gated(F, lanes.load(x + i)); });
    }

    static void cap(const float* x, float cap, std::int64_t n, float* out) {
        Row<L>::map(n, out, [&](std::int64_t i, auto lanes) {
            return L::mul(L::set(cap), M::tanh(L::div(lanes.load(x + i), L::set(cap))));
        });
    }

    static void divide(const float* x, float divisor, std::int64_t n, float* out) {
        Row<L>::map(n, out, [&](std::int64_t i, auto lanes) { return L::div(lanes.load(x + i), L::set(divisor)); });
    }

    template <FloatType T>
    static void widen_as(const void* x, float factor, std::int64_t n, float* out) {
        Row<L>::map(n, out, [&](std::int64_t i, auto lanes) {
            return L::mul(lanes.template load_as<T>(x, i), L::set(factor));
        });
    }
    static void widen(FloatType type, const void* x, float factor, std::int64_t n, float* out) {
        switch (type) {
            case FloatType::f32:
                return widen_as<FloatType::f32>(x, factor, n, out);
            case FloatType::f16:
                return widen_as<FloatType::f16>(x, factor, n, out);
            case FloatType::bf16:
                return widen_as<FloatType::bf16>(x, factor, n, out);
        }
    }

    static void rotation(const float* frequencies, std::int64_t position, float factor, std::int64_t n, float* out) {
        for (std::int64_t i = 0; i < n; i++) {
            const Turned turn = turned(double(float(position) * frequencies[i]));
            out[i] = float(turn.cos) * factor;
            out[n + i] = float(turn.sin) * factor;
        }
    }
};

}  // namespace lockstep::native
