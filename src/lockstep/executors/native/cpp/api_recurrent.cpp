// Python interface of recurrent.hpp. Functions return nullptr, or an error message; then nothing was read or written.
#include "recurrent.hpp"

#define EXPORTED extern "C" __attribute__((visibility("default")))

using namespace lockstep::native;

namespace {

constexpr const char* NO_ISA = "this processor does not run that instruction set";
constexpr const char* NO_MEMORY = "rows do not fit their memory";

bool fits(std::int64_t rows, std::int64_t columns, std::int64_t stride, std::int64_t size) {
    return stride >= columns && size >= columns && (rows < 2 || stride <= (size - columns) / (rows - 1));
}

Workers workers_or_this_thread(const Workers* workers) { return workers ? *workers : Workers{1, nullptr, nullptr}; }

}  // namespace

// x and out have room for x_size and out_size numbers.
EXPORTED const char* native_convolve(const char* isa, const Convolution* all, const States* states, std::int64_t num_rows,
                                     std::int64_t x_size, std::int64_t out_size, const Workers* workers) {
    const RecurrentKernel* kernel = find_recurrent(isa);
    if (!kernel) return NO_ISA;
    if (const char* wrong = states_fault(*states, num_rows)) return wrong;
    if (const char* wrong = convolution_fault(all->channels, all->taps, all->function)) return wrong;
    const std::int64_t bytes = (all->taps - 1) * all->channels * std::int64_t(sizeof(float));
    if (const char* wrong = place_fault(all->place, bytes, states->num_parts, states->block_bytes)) return wrong;
    if (!fits(num_rows, all->channels, all->x_stride, x_size) || !fits(num_rows, all->channels, all->out_stride, out_size))
        return NO_MEMORY;
    const FloatMode mode;
    convolve(*all, *states, *kernel, workers_or_this_thread(workers));
    return nullptr;
}

EXPORTED const char* native_delta_rule(const char* isa, const DeltaRule* all, const States* states, std::int64_t num_rows,
                                       std::int64_t x_size, std::int64_t out_size, const Workers* workers) {
    const RecurrentKernel* kernel = find_recurrent(isa);
    if (!kernel) return NO_ISA;
    if (const char* wrong = states_fault(*states, num_rows)) return wrong;
    if (const char* wrong = delta_fault(all->shape)) return wrong;
    for (std::int32_t head = 0; head < all->shape.value_heads; head++)
        if (const char* wrong =
                place_fault(all->places[head], all->shape.piece_bytes(), states->num_parts, states->block_bytes))
            return wrong;
    if (!fits(num_rows, all->shape.columns(), all->x_stride, x_size) ||
        !fits(num_rows, all->shape.values(), all->out_stride, out_size))
        return NO_MEMORY;
    const FloatMode mode;
    delta_rule(*all, *states, *kernel, workers_or_this_thread(workers));
    return nullptr;
}

EXPORTED void native_rates(const float* x, const float* numbers, std::int64_t heads, float* out) {
    const FloatMode mode;
    rates(x, numbers, heads, out);
}
