// Python interface of elements.hpp: checks the sizes, then computes every row under the contract's modes.
// Functions return nullptr, or an error message; then nothing was read or written.
#include <string_view>

#include "elements.hpp"
#include "math.hpp"
#include "processor.hpp"

namespace lockstep::native {

const Elements* find_elements(const char* name) {
    const std::string_view wanted = name;
    const auto is_wanted = [&](const char* each) { return wanted.empty() || wanted == each; };
#if defined(__x86_64__)
    static const bool has_avx2 = runs_avx2(), has_avx512 = runs_avx512();
    if (is_wanted("avx512") && has_avx512) return &elements_avx512;
    if (is_wanted("avx2") && has_avx2) return &elements_avx2;
#endif
    return is_wanted("portable") ? &elements_portable : nullptr;
}

namespace {

constexpr std::int64_t MAX_COLUMNS = std::int64_t(1) << 24;  // counts up to this are exact as floats

// Rows that begin `stride` elements apart, in memory for `capacity` elements.
template <class T>
struct Rows {
    T* data;
    std::int64_t capacity, rows, columns, stride;

    T* row(std::int64_t i) const { return data + i * stride; }
    bool fits() const {
        if (rows < 0 || columns < 1 || columns > MAX_COLUMNS || stride < columns || capacity < 0) return false;
        return rows == 0 || (data && columns <= capacity && rows - 1 <= (capacity - columns) / stride);
    }
    template <class U>
    bool has_shape_of(const Rows<U>& other) const {
        return rows == other.rows && columns == other.columns;
    }
};
using Floats = Rows<const float>;
using FloatsOut = Rows<float>;

constexpr const char* NO_ISA =
    "this processor does not run that instruction set, or the name is not one of "
    "portable, avx2 and avx512";
constexpr const char* NO_FIT =
    "rows do not fit their memory: there must be 1 to 2^24 columns, a stride of no fewer, and "
    "room for all rows";
constexpr const char* NO_GATE = "the function is none of silu, gelu_tanh, gelu_erf, relu, tanh, sigmoid and identity";
constexpr const char* NO_SHAPE = "the shapes of inputs and outputs differ";

// Calls f(table, index) for each row, after the checks that all operations share.
template <class F, class... More>
const char* each_row(const char* isa, const FloatsOut& out, F f, const More&... inputs) {
    const Elements* table = find_elements(isa);
    if (!table) return NO_ISA;
    if (!out.fits() || !(inputs.fits() && ...)) return NO_FIT;
    if (!(inputs.has_shape_of(out) && ...)) return NO_SHAPE;
    const FloatMode mode;
    for (std::int64_t i = 0; i < out.rows; i++) f(*table, i);
    return nullptr;
}

bool is_positive(double x) { return x > 0.0 && x <= 1.7976931348623157e308; }

// The k greatest of n numbers, k >= 1, greatest first; of equal ones, the lowest index first; -1 if NaN leaves fewer.
void top(const float* x, std::int64_t n, std::int64_t k, std::int64_t* ids) {
    std::int64_t found = 0;
    const auto belongs = [&](std::int64_t i) { return found < k ? x[i] == x[i] : x[i] > x[ids[k - 1]]; };
    for (std::int64_t i = 0; i < n; i++) {
        for (; found == k && i + LANES <= n; i += LANES) {  // usually none of the sixteen does
            const float least = x[ids[k - 1]];
            int greater = 0;
            for (int l = 0; l < LANES; l++) greater |= x[i + l] > least;
            if (greater) break;
        }
        if (i == n || !belongs(i)) continue;
        std::int64_t place = found < k ? found++ : k - 1;
        for (; place && x[i] > x[ids[place - 1]]; place--) ids[place] = ids[place - 1];
        ids[place] = i;
    }
    for (; found < k; found++) ids[found] = -1;
}

}  // namespace
}  // namespace lockstep::native

using namespace lockstep::native;
#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED int native_bits_version() { return BITS_VERSION; }
EXPORTED int native_interface_version() { return INTERFACE_VERSION; }

// 2: usable here; 1: in the library, but not supported by this processor; 0: not in the library.
EXPORTED int native_has_isa(const char* isa) {
    if (!isa) return 0;
    const std::string_view name = isa;
    if (name != "portable" && name != "avx2" && name != "avx512") return 0;
    if (find_elements(isa)) return 2;
#if defined(__x86_64__)
    return 1;
#else
    return 0;
#endif
}

EXPORTED const char* native_norm(const char* isa, const Floats* x, const Floats* weight, float offset, float epsilon,
                                 const FloatsOut* out) {
    if (!weight->fits()) return NO_FIT;
    if (weight->rows != 1 || weight->columns != out->columns)
        return "the norm's weights are not one row of its columns";
    return each_row(
        isa, *out,
        [&](const Elements& table, std::int64_t i) {
            table.norm(x->row(i), weight->data, offset, epsilon, out->columns, out->row(i));
        },
        *x);
}

// `weights` has the norm's weights in its first row and its biases in its second one.
EXPORTED const char* native_layer_norm(const char* isa, const Floats* x, const Floats* weights, float epsilon,
                                       const FloatsOut* out) {
    if (!weights->fits()) return NO_FIT;
    if (weights->rows != 2 || weights->columns != out->columns || weights->stride != out->columns)
        return "the norm's weights and biases are not two rows of its columns";
    return each_row(
        isa, *out,
        [&](const Elements& table, std::int64_t i) {
            table.layer_norm(x->row(i), weights->data, epsilon, out->columns, out->row(i));
        },
        *x);
}

EXPORTED const char* native_add(const char* isa, const Floats* x, const Floats* y, float factor, const FloatsOut* out) {
    return each_row(
        isa, *out,
        [&](const Elements& table, std::int64_t i) {
            table.add(x->row(i), y->row(i), factor, out->columns, out->row(i));
        },
        *x, *y);
}

EXPORTED const char* native_gate(const char* isa, int function, const Floats* gate, const Floats* up,
                                 const FloatsOut* out) {
    if (function < 0 || function >= GATES) return NO_GATE;
    return each_row(
        isa, *out,
        [&](const Elements& table, std::int64_t i) {
            table.gate(Gate(function), gate->row(i), up->row(i), out->columns, out->row(i));
        },
        *gate, *up);
}

EXPORTED const char* native_activate(const char* isa, int function, const Floats* x, const FloatsOut* out) {
    if (function < 0 || function >= GATES) return NO_GATE;
    return each_row(
        isa, *out,
        [&](const Elements& table, std::int64_t i) {
            table.activate(Gate(function), x->row(i), out->columns, out->row(i));
        },
        *x);
}

EXPORTED const char* native_cap(const char* isa, const Floats* x, float cap, const FloatsOut* out) {
    if (!is_positive(cap)) return "the cap is not a positive number";
    return each_row(
        isa, *out, [&](const Elements& table, std::int64_t i) { table.cap(x->row(i), cap, out->columns, out->row(i)); },
        *x);
}

EXPORTED const char* native_divide(const char* isa, const Floats* x, float divisor, const FloatsOut* out) {
    return each_row(
        isa, *out,
        [&](const Elements& table, std::int64_t i) { table.divide(x->row(i), divisor, out->columns, out->row(i)); },
        *x);
}

// Copies out->rows rows of a table by their numbers. The table's row i begins at byte i * row_bytes.
EXPORTED const char* native_embed(const char* isa, int type, const std::uint8_t* table, std::int64_t table_bytes,
                                  std::int64_t row_bytes, const std::int64_t* ids, float factor, const FloatsOut* out) {
    if (type < 0 || type > int(FloatType::bf16)) return "the table's numbers are none of f32, f16 and bf16";
    if (!out->fits()) return NO_FIT;
    const std::int64_t least = out->columns * (FloatType(type) == FloatType::f32 ? 4 : 2);
    if (!table || row_bytes < least || table_bytes < row_bytes) return "the table's rows are shorter than the output's";
    if (!ids && out->rows) return "no ids are given";
    for (std::int64_t i = 0; i < out->rows; i++)
        if (ids[i] < 0 || ids[i] >= table_bytes / row_bytes) return "an id is not a row of the table";
    return each_row(isa, *out, [&](const Elements& elements, std::int64_t i) {
        elements.widen(FloatType(type), table + ids[i] * row_bytes, factor, out->columns, out->row(i));
    });
}

// Computes out->rows rows of cosines and sines for positions. There are half as many frequencies as columns.
EXPORTED const char* native_rotation(const char* isa, const Floats* frequencies, const std::int64_t* positions,
                                     float factor, const FloatsOut* out) {
    if (!frequencies->fits() || !out->fits()) return NO_FIT;
    if (frequencies->rows != 1 || 2 * frequencies->columns != out->columns)
        return "there are not twice as many columns as frequencies";
    if (!positions && out->rows) return "no positions are given";
    float greatest = 0;
    for (std::int64_t i = 0; i < frequencies->columns; i++) {
        if (!(frequencies->data[i] >= 0 && frequencies->data[i] <= MAX_ANGLE))
            return "a frequency is negative or not a number";
        greatest = frequencies->data[i] > greatest ? frequencies->data[i] : greatest;
    }
    for (std::int64_t i = 0; i < out->rows; i++)
        if (positions[i] < 0 || positions[i] > std::int64_t(MAX_ANGLE) || double(positions[i]) * greatest > MAX_ANGLE)
            return "a position is negative, or its angle is above 2^24";
    return each_row(isa, *out, [&](const Elements& table, std::int64_t i) {
        table.rotation(frequencies->data, positions[i], factor, frequencies->columns, out->row(i));
    });
}

// base^exponents, for positive bases: e^(exponent * log(base)).
EXPORTED const char* native_powers(double base, const double* exponents, std::int64_t n, double* out) {
    if (!is_positive(base)) return "the base is not a positive number";
    if (n < 0 || (n && !(exponents && out))) return "no exponents or no room for powers are given";
    const FloatMode mode;
    const double logarithm = log_64(base);
    for (std::int64_t i = 0; i < n; i++) out[i] = canonical(exp_64(exponents[i] * logarithm));
    return nullptr;
}

EXPORTED double native_log(double x) {
    const FloatMode mode;
    return log_64(x);
}

EXPORTED const char* native_weigh(const char* isa, const float* x, std::int64_t n, double peak, double temperature,
                                  double* out) {
    const Elements* table = find_elements(isa);
    if (!table) return NO_ISA;
    if (n < 0 || (n && !(x && out))) return "no numbers or no room for weights are given";
    if (!is_positive(temperature)) return "the temperature is not a positive number";
    const FloatMode mode;
    table->weigh(x, peak, temperature, n, out);
    return nullptr;
}

EXPORTED const char* native_weigh_lightly(const char* isa, const float* x, std::int64_t n, float peak,
                                          double temperature, float* out) {
    const Elements* table = find_elements(isa);
    if (!table) return NO_ISA;
    if (n < 0 || (n && !(x && out))) return "no numbers or no room for weights are given";
    if (!is_positive(temperature)) return "the temperature is not a positive number";
    const FloatMode mode;
    table->weigh_lightly(x, peak, temperature, n, out);
    return nullptr;
}

// The sum of n floats or, if bits is 64, of n doubles.
EXPORTED const char* native_total(const char* isa, int bits, const void* x, std::int64_t n, double* out) {
    const Elements* table = find_elements(isa);
    if (!table) return NO_ISA;
    if (n < 0 || (n && !x) || !out) return "no numbers or no room for their sum are given";
    const FloatMode mode;
    *out =
        bits == 64 ? table->total_64(static_cast<const double*>(x), n) : table->total(static_cast<const float*>(x), n);
    return nullptr;
}

EXPORTED const char* native_log_total(const char* isa, const float* x, std::int64_t n, double* out) {
    const Elements* table = find_elements(isa);
    if (!table) return NO_ISA;
    if (n < 1 || n > MAX_COLUMNS || !x || !out) return "no numbers or no room for the logarithm of their sum are given";
    const FloatMode mode;
    *out = table->log_total(x, n);
    return nullptr;
}

EXPORTED const char* native_softmax(const char* isa, const Floats* x, double temperature, const FloatsOut* out) {
    if (!is_positive(temperature)) return "the temperature is not a positive number";
    return each_row(
        isa, *out,
        [&](const Elements& table, std::int64_t i) {
            table.softmax(x->row(i), temperature, out->columns, out->row(i));
        },
        *x);
}

EXPORTED const char* native_log_softmax(const char* isa, const Floats* x, const FloatsOut* out) {
    return each_row(
        isa, *out,
        [&](const Elements& table, std::int64_t i) { table.log_softmax(x->row(i), out->columns, out->row(i)); }, *x);
}

// For each row: the log-probability of its token, and the k most likely tokens with theirs, most likely first; of
// equal ones, the lowest first. ids and top: [rows][k].
EXPORTED const char* native_logprobs(const char* isa, const Floats* x, const std::int64_t* tokens, std::int64_t k,
                                     double* logprobs, std::int64_t* ids, double* top_logprobs) {
    const Elements* table = find_elements(isa);
    if (!table) return NO_ISA;
    if (!x->fits()) return NO_FIT;
    if (k < 0 || k > x->columns) return "more tokens are wanted than there are";
    if (x->rows && (!tokens || !logprobs || (k && !(ids && top_logprobs)))) return "no tokens or no room are given";
    for (std::int64_t i = 0; i < x->rows; i++)
        if (tokens[i] < 0 || tokens[i] >= x->columns) return "a token is not in the vocabulary";
    const FloatMode mode;
    for (std::int64_t i = 0; i < x->rows; i++, ids += k, top_logprobs += k) {
        const float* row = x->row(i);
        const double total = table->log_total(row, x->columns);
        logprobs[i] = canonical(double(row[tokens[i]]) - total);
        if (k) top(row, x->columns, k, ids);
        for (std::int64_t j = 0; j < k; j++)
            top_logprobs[j] = ids[j] < 0 ? with_bits<double>(NAN_BITS_64) : canonical(double(row[ids[j]]) - total);
    }
    return nullptr;
}

EXPORTED const char* native_unit(const char* isa, const Floats* x, const FloatsOut* out) {
    return each_row(
        isa, *out, [&](const Elements& table, std::int64_t i) { table.unit(x->row(i), out->columns, out->row(i)); },
        *x);
}

// The inner product of each row of x with y; for unit vectors, the cosine of their angle.
EXPORTED const char* native_dot(const char* isa, const Floats* x, const Floats* y, double* out) {
    const Elements* table = find_elements(isa);
    if (!table) return NO_ISA;
    if (!x->fits() || !y->fits()) return NO_FIT;
    if (y->rows != 1 || x->columns != y->columns) return NO_SHAPE;
    if (x->rows && !out) return "no room for products is given";
    const FloatMode mode;
    for (std::int64_t i = 0; i < x->rows; i++) out[i] = table->dot(x->row(i), y->data, x->columns);
    return nullptr;
}
