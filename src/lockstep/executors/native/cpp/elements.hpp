// Operations on rows between the products of a forward pass, and on rows of logits for sampling.
#pragma once

#include "bits.hpp"

namespace lockstep::native {

enum class Gate : int { silu, gelu_tanh, gelu_erf, relu, tanh, sigmoid, identity };
constexpr int GATES = 7;
enum class FloatType : int { f32, f16, bf16 };

// Each function takes one row of n numbers, n >= 1, and may write its result over a row that it reads. A row depends
// only on itself, so rows may be distributed over threads in any way. All instruction sets give the same bits.
// The final steps of a product's outputs: the bias is added (nullptr: none), they are divided, and then stored or,
// times the factor, added to the present values.
struct Ending {
    const float* bias;
    float divisor, factor;
    bool adds;
};

struct Elements {
    const char* name;

    // out = x / sqrt(mean(x^2) + epsilon) * (weight + offset).
    void (*norm)(const float* x, const float* weight, float offset, float epsilon, std::int64_t n, float* out);
    // out = (x - mean) / sqrt(mean((x - mean)^2) + epsilon) * weight + bias; there are n weights, then n biases.
    void (*layer_norm)(const float* x, const float* weights, float epsilon, std::int64_t n, float* out);
    // out = x + y * factor, both operations rounded.
    void (*add)(const float* x, const float* y, float factor, std::int64_t n, float* out);
    // Writes rows of outputs, which begin `stride` apart, to rows that begin `out_stride` apart.
    void (*finish)(const Ending&, const float* y, std::int64_t stride, std::int64_t rows, std::int64_t n, float* out,
                   std::int64_t out_stride);
    // out = function(gate) * up.
    void (*gate)(Gate function, const float* gate, const float* up, std::int64_t n, float* out);
    // out = function(x).
    void (*activate)(Gate function, const float* x, std::int64_t n, float* out);
    // out = cap * tanh(x / cap).
    void (*cap)(const float* x, float cap, std::int64_t n, float* out);
    void (*divide)(const float* x, float divisor, std::int64_t n, float* out);
    // out = x * factor, of a row as it is stored.
    void (*widen)(FloatType type, const void* x, float factor, std::int64_t n, float* out);
    // Cosines of position * frequency times the factor, then their sines: out has 2 n numbers. As in the models'
    // training code the angle is a float, the rounded product.
    void (*rotation)(const float* frequencies, std::int64_t position, float factor, std::int64_t n, float* out);

    // out = e^((x - peak) / temperature): in doubles; and in floats, with a rounded inverse of the temperature.
    void (*weigh)(const float* x, double peak, double temperature, std::int64_t n, double* out);
    void (*weigh_lightly)(const float* x, float peak, double temperature, std::int64_t n, float* out);
    // Sums in doubles.
    double (*total)(const float* x, std::int64_t n);
    double (*total_64)(const double* x, std::int64_t n);
    // log(sum(e^x)), with exponentials in floats and the sum in doubles; NaN for a row with NaN or inf, or with only
    // -inf.
    double (*log_total)(const float* x, std::int64_t n);
    // Probabilities e^((x - max) / temperature) / sum(...), and logarithms of those of temperature 1.
    void (*softmax)(const float* x, double temperature, std::int64_t n, float* out);
    void (*log_softmax)(const float* x, std::int64_t n, float* out);
    // The inner product in doubles, in which each product of two floats is exact.
    double (*dot)(const float* x, const float* y, std::int64_t n);
    // out = x / length; a row of zeros is not changed.
    void (*unit)(const float* x, std::int64_t n, float* out);
};

extern const Elements elements_portable, elements_avx2, elements_avx512;

// The table of an instruction set by its name ("" for the best one); nullptr: this processor does not support it.
const Elements* find_elements(const char* name);

}  // namespace lockstep::native
