// Recurrent operations divided among threads: checks their shapes, and cuts the work of a step into tiles.
#include "recurrent.hpp"

#include <algorithm>

#include "math.hpp"

namespace lockstep::native {
namespace {

constexpr int ITEMS_PER_THREAD = 4;                // with fewer, heads are split so that threads end together
constexpr std::int64_t PART_COLUMNS = 64;          // value columns of a part of a head
constexpr std::int64_t FEW_CHANNELS = 1 << 15;     // up to this, one thread convolves rows faster than several
constexpr std::int64_t MAX_CHANNELS = 1 << 20;

// Calls todo(i) for each i below count, under the contract's modes on every thread.
template <class Do>
void for_each(const Workers& workers, std::int64_t count, bool is_shared, const Do& todo) {
    if (!is_shared || count < 2 || workers.threads < 2) {
        for (std::int64_t i = 0; i < count; i++) todo(i);
        return;
    }
    const auto item = [](void* work, std::int64_t i) {
        const FloatMode mode;
        (*static_cast<const Do*>(work))(i);
    };
    workers.run(workers.pool, count, item, const_cast<Do*>(&todo));
}

}  // namespace

void rates(const float* x, const float* numbers, std::int64_t heads, float* out) {
    const float *b = x, *a = x + heads, *rate = numbers, *bias = numbers + heads;
    for (std::int64_t h = 0; h < heads; h++) {
        const double shifted = double(a[h] + bias[h]), magnitude = shifted > 0.0 ? shifted : -shifted;
        const double soft = (shifted > 0.0 ? shifted : 0.0) + log_64(1.0 + exp_64(-magnitude));
        const double beta = 1.0 / (1.0 + exp_64(-double(b[h]))), decay = exp_64(double(rate[h]) * soft);
        out[h] = canonical(float(beta)), out[heads + h] = canonical(float(decay));
    }
}

const char* states_fault(const States& states, std::int64_t num_rows) {
    if (states.num_sequences < 1 || states.num_parts < 1 || !states.begins || !states.blocks || !states.cache)
        return "the step has no states";
    if (states.begins[0] != 0 || states.begins[states.num_sequences] != num_rows)
        return "the sequences' beginnings do not cover the rows";
    for (std::int64_t s = 0; s < states.num_sequences; s++) {
        if (states.begins[s + 1] <= states.begins[s]) return "a sequence with a state has no rows";
        const std::int32_t* blocks = states.of(s);
        for (std::int64_t i = 0; i < states.num_parts; i++) {
            if (blocks[i] < -1 || blocks[i] >= states.num_blocks || (blocks[i] == -1) != (blocks[0] == -1))
                return "a block of a state before the step is not of this pool";
            const std::int32_t target = blocks[states.num_parts + i];
            if (target < 0 || target >= states.num_blocks) return "a block of a state after the step is not of this pool";
        }
    }
    return nullptr;
}

const char* convolution_fault(std::int64_t channels, std::int64_t taps, Gate function) {
    if (channels < 1 || channels > MAX_CHANNELS) return "a convolution does not have 1 to 2^20 channels";
    if (taps < 2 || taps > MAX_TAPS) return "a convolution does not have 2 to 64 taps";
    if (function != Gate::silu && function != Gate::identity) return "a convolution has no such function";
    return nullptr;
}

const char* delta_fault(const DeltaShape& shape) {
    if (shape.key_heads < 1 || shape.value_heads < 1 || shape.value_heads > MAX_STATE_HEADS ||
        shape.value_heads % shape.key_heads)
        return "a delta rule's value heads are no multiple of its key heads, up to 1024";
    if (shape.key_dim < 1 || shape.key_dim > MAX_STATE_DIM || shape.value_dim < 1 || shape.value_dim > MAX_STATE_DIM)
        return "a delta rule does not have 1 to 1024 dimensions of keys and values";
    return nullptr;
}

const char* place_fault(const Place& place, std::int64_t bytes, std::int64_t num_parts, std::int64_t block_bytes) {
    if (place.part < 0 || place.part >= num_parts) return "a piece of a state is in none of its blocks";
    if (place.offset < 0 || place.offset % PLACE_UNIT || place.offset > block_bytes ||
        bytes > block_bytes - place.offset)
        return "a piece of a state is not inside its block";
    return nullptr;
}

void convolve(const Convolution& all, const States& states, const RecurrentKernel& kernel, const Workers& workers) {
    const std::int64_t tiles = (all.channels + CHANNELS - 1) / CHANNELS;
    const bool is_shared = states.begins[states.num_sequences] * all.channels > FEW_CHANNELS;
    for_each(workers, states.num_sequences * tiles, is_shared, [&](std::int64_t i) {
        const std::int64_t sequence = i / tiles, channel = i % tiles * CHANNELS, row = states.begins[sequence];
        const float* before = states.before(sequence, all.place);
        ConvolutionTile tile;
        tile.x = all.x + row * all.x_stride + channel, tile.x_stride = all.x_stride;
        tile.out = all.out + row * all.out_stride + channel, tile.out_stride = all.out_stride;
        tile.rows = states.begins[sequence + 1] - row, tile.count = std::min<std::int64_t>(CHANNELS, all.channels - channel);
        tile.weights = all.weights + channel, tile.weights_stride = all.channels, tile.taps = all.taps;
        tile.bias = all.bias ? all.bias + channel : nullptr, tile.function = all.function;
        tile.before = before ? before + channel : nullptr;
        tile.after = states.after(sequence, all.place) + channel, tile.state_stride = all.channels;
        kernel.convolve(tile);
    });
}

void delta_rule(const DeltaRule& all, const States& states, const RecurrentKernel& kernel, const Workers& workers) {
    const DeltaShape& shape = all.shape;
    const std::int64_t heads = shape.value_heads, dim = shape.value_dim, items = states.num_sequences * heads;
    const std::int64_t wanted = std::max<std::int64_t>(1, ITEMS_PER_THREAD * workers.threads / items);
    const std::int64_t parts = std::min(wanted, (dim + PART_COLUMNS - 1) / PART_COLUMNS);
    const std::int64_t part_columns = ((dim + parts - 1) / parts + LANES - 1) / LANES * LANES;
    for_each(workers, items * parts, true, [&](std::int64_t i) {
        const std::int64_t sequence = i / (heads * parts), head = i / parts % heads, column = i % parts * part_columns;
        if (column >= dim) return;
        const std::int64_t row = states.begins[sequence], key_head = shape.key_head(std::int32_t(head));
        const float *x = all.x + row * all.x_stride, *before = states.before(sequence, all.places[head]);
        DeltaTile tile;
        tile.queries = x + key_head * shape.key_dim, tile.keys = tile.queries + shape.keys();
        tile.values = x + 2 * shape.keys() + head * dim + column;
        tile.betas = x + shape.channels() + head, tile.decays = tile.betas + heads;
        tile.out = all.out + row * all.out_stride + head * dim + column;
        tile.x_stride = all.x_stride, tile.out_stride = all.out_stride;
        tile.rows = states.begins[sequence + 1] - row;
        tile.key_dim = shape.key_dim, tile.count = int(std::min(part_columns, dim - column));
        tile.before = before ? before + column : nullptr;
        tile.after = states.after(sequence, all.places[head]) + column, tile.state_stride = dim;
        kernel.delta(tile);
    });
}

const RecurrentKernel* find_recurrent(const char* name) {
    const Elements* found = find_elements(name);
    if (!found) return nullptr;
#if defined(__x86_64__)
    if (found == &elements_avx512) return &recurrent_avx512;
    if (found == &elements_avx2) return &recurrent_avx2;
#endif
    return &recurrent_portable;
}

}  // namespace lockstep::native
