// Sampling kernels: temperature and softmax weights of logits, log-probabilities, norms of vectors, over an instruction
// set's lanes. Each elements_*.cpp instantiates them.
#pragma once

#include "elementwise.hpp"

namespace lockstep::native {

template <class L>
struct Sample {
    using V = typename L::V;
    using M = Math<L>;

    // The sum of term(0) to term(n - 1) in sixteen lanes of doubles.
    template <class F>
    static double sum(std::int64_t n, F term) {
        alignas(64) double lanes[LANES] = {};
        std::int64_t i = 0;
        for (; i + LANES <= n; i += LANES)
            for (int l = 0; l < LANES; l++) lanes[l] += term(i + l);
        for (int l = 0; i + l < n; l++) lanes[l] += term(i + l);
        return sum_of(lanes);
    }
    static double total(const float* x, std::int64_t n) {
        return canonical(sum(n, [&](std::int64_t i) { return double(x[i]); }));
    }
    static double total_64(const double* x, std::int64_t n) {
        return canonical(sum(n, [&](std::int64_t i) { return x[i]; }));
    }
    static double dot(const float* x, const float* y, std::int64_t n) {
        return canonical(sum(n, [&](std::int64_t i) { return double(x[i]) * double(y[i]); }));
    }

    static void unit(const float* x, std::int64_t n, float* out) {
        const double square = sum(n, [&](std::int64_t i) { return double(x[i]) * double(x[i]); });
        const double length = square > 0.0 || square != square ? __builtin_sqrt(square) : 1.0;
        for (std::int64_t i = 0; i < n; i++) out[i] = canonical(float(double(x[i]) / length));
    }

    static void weigh(const float* x, double peak, double temperature, std::int64_t n, double* out) {
        for (std::int64_t i = 0; i < n; i++) out[i] = canonical(exp_64((double(x[i]) - peak) / temperature));
    }

    // Sixteen float weights.
    static V weight(V x, V peak, V inverse) { return M::exp(L::mul(L::sub(x, peak), inverse)); }

    static void weigh_lightly(const float* x, float peak, double temperature, std::int64_t n, float* out) {
        const V highest = L::set(peak), inverse = L::set(float(1.0 / temperature));
        Row<L>::map(n, out, [&](std::int64_t i, auto lanes) { return weight(lanes.load(x + i), highest, inverse); });
    }

    // The greatest element; for a row with NaN, any of its elements, or -inf.
    static float largest(const float* x, std::int64_t n) {
        V found = L::set(-__builtin_inff());
        std::int64_t i = 0;
        for (; i + LANES <= n; i += LANES) found = L::max(found, L::load(x + i));
        alignas(64) float lanes[LANES];
        L::store(lanes, found);
        for (int l = 0; i + l < n; l++) lanes[l] = lanes[l] > x[i + l] ? lanes[l] : x[i + l];
        for (int half = LANES / 2; half; half /= 2)
            for (int l = 0; l < half; l++) lanes[l] = lanes[l] > lanes[l + half] ? lanes[l] : lanes[l + half];
        return lanes[0];
    }

    static double log_total(const float* x, std::int64_t n) {
        const float peak = largest(x, n);
        const V highest = L::set(peak);
        alignas(64) double lanes[LANES] = {};
        Row<L>::each(n, [&](std::int64_t i, auto some) {
            alignas(64) float weights[LANES];
            L::store(weights, M::exp(L::sub(some.load(x + i), highest)));
            const int count = n - i < LANES ? int(n - i) : LANES;
            for (int l = 0; l < count; l++) lanes[l] += double(weights[l]);
        });
        return canonical(log_64(sum_of(lanes)) + double(peak));
    }

    static void softmax(const float* x, double temperature, std::int64_t n, float* out) {
        weigh_lightly(x, largest(x, n), temperature, n, out);
        const double all = total(out, n);
        for (std::int64_t i = 0; i < n; i++) out[i] = canonical(float(double(out[i]) / all));
    }

    static void log_softmax(const float* x, std::int64_t n, float* out) {
        const double all = log_total(x, n);
        for (std::int64_t i = 0; i < n; i++) out[i] = canonical(float(double(x[i]) - all));
    }
};

template <class L>
constexpr Elements elements_of(const char* name) {
    using E = Elementwise<L>;
    using S = Sample<L>;
    return {name,      E::norm,     E::layer_norm, E::add,           E::finish,      E::gate,
            E::activate, E::cap,    E::divide,     E::widen,         E::rotation,    S::weigh,
            S::weigh_lightly, S::total, S::total_64, S::log_total,   S::softmax,     S::log_softmax,
            S::dot,    S::unit};
}

}  // namespace lockstep::native
