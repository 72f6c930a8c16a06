// Adapters in a forward pass: the rows of a step that use them, and what they add to its products.
#include <algorithm>
#include <new>

#include "forward.hpp"

namespace lockstep::native {

const char* Forward::load_adapter(std::int64_t slot, const AdapterWeight* of_slot, std::int64_t count) try {
    return adapters.load(program, slot, of_slot, count);
} catch (const std::bad_alloc&) {
    return "there is no memory for the adapter";
}

// Chunks of a step's rows, of at most BLOCK_ROWS. One thread takes all features of a chunk, or all threads share those of
// all chunks.
std::int64_t Forward::num_chunks(std::int64_t tokens) const {
    const std::int64_t least = (tokens + BLOCK_ROWS - 1) / BLOCK_ROWS;
    return tokens <= shared_rows ? least : std::max<std::int64_t>(least, pool ? pool->size() : 1);
}

std::int64_t Forward::chunk_begin(std::int64_t chunk, std::int64_t tokens) const {
    return tokens <= shared_rows ? std::min(chunk * BLOCK_ROWS, tokens) : tokens * chunk / num_chunks(tokens);
}

// Groups the rows of a step by adapter, in each chunk of its own.
void Forward::group_by_adapter(const StepInput& step) {
    if (!step.adapters) return adapters.group_none();
    std::vector<std::int64_t> begins;
    for (std::int64_t chunk = 0; chunk <= num_chunks(step.num_tokens); chunk++) begins.push_back(chunk_begin(chunk, step.num_tokens));
    adapters.group(step.adapters, begins);
}

// Computes the inputs of the second products of adapters, for an operation that multiplies.
void Forward::lower(const Op& op, const Span& span) const {
    std::int64_t num_tiles = 0;
    const AdapterTile* tiles = span.has_tokens ? adapters.tiles_of(span.first, span.count, num_tiles) : nullptr;
    if (!num_tiles) return;
    share(span.pool, num_tiles * op.num_weights, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; i++) {
            const AdapterTile& tile = tiles[i / op.num_weights];
            const std::int64_t number = i % op.num_weights;
            const Weight& w = weights[op.first_weight + number];
            const AdapterWeight* change = adapters.find(tile.slot, op.first_weight + number);
            if (!change) continue;
            const void* x[ADAPTER_ROWS];
            float* h[ADAPTER_ROWS];
            for (int r = 0; r < tile.count; r++) {
                const std::int64_t row = tile.rows[r];
                if (w.is_packed())
                    x[r] = groups(op.in_groups, row, span);
                else
                    x[r] = floats(op.in, row, span) + op.in_at;
                h[r] = adapters.lowered(row, number);
            }
            adapters.kernel.down(*change, w.columns, w.is_packed(), x, tile.count, h);
        }
    });
}

// Adds what adapters change to the outputs [count][PANEL] of a panel of an operation's weight of that number.
void Forward::adapt(const Op& op, std::int64_t number, std::int64_t panel, std::int64_t first, std::int64_t count, float* y) const {
    std::int64_t num_tiles = 0;
    const AdapterTile* tile = adapters.tiles_of(first, count, num_tiles);
    for (const AdapterTile* end = tile + num_tiles; tile < end; tile++) {
        const AdapterWeight* change = adapters.find(tile->slot, op.first_weight + number);
        if (!change) continue;
        const float* h[ADAPTER_ROWS];
        float* out[ADAPTER_ROWS];
        for (int r = 0; r < tile->count; r++)
            h[r] = adapters.lowered(tile->rows[r], number), out[r] = y + (tile->rows[r] - first) * PANEL;
        adapters.kernel.up(*change, panel, h, tile->count, out);
    }
}

}  // namespace lockstep::native
