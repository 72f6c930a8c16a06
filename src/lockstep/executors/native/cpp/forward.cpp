// Forward pass: executes each operation of a program on the threads of a pool.
#include "forward.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>

#include "pack.hpp"

namespace lockstep::native {
namespace {

constexpr std::int64_t SHARED_ROWS_PER_THREAD = 24;  // up to this, threads share features
constexpr std::int64_t PARALLEL_ROWS = 8;            // with fewer, one thread normalises rows faster than several
constexpr std::int64_t LINE = 64;

bool is_recurrent(const Op& op) { return op.action == Action::convolve || op.action == Action::delta; }

// True if an operation needs other rows: all operations before it must have run for all rows.
bool attends(const Op& op) { return is_recurrent(op) || (op.action == Action::attention && op.part != Part::store); }

// The largest number of positions that all tables of positions have.
std::int64_t positions_of(const Program& p) {
    std::int64_t least = MAX_PRODUCT_FEATURES;
    for (std::int64_t i = 0; i < p.num_ops; i++)
        if (p.ops[i].action == Action::embed && p.ops[i].num_weights == 2)
            least = std::min(least, p.weights[p.ops[i].first_weight + 1].features - p.ops[i].offset);
    return least;
}

// Index of the operation with which a stage begins, or the end of the body.
std::int64_t stage_begin(const std::vector<Op>& ops, std::int64_t stage, std::int64_t end) {
    for (std::int64_t i = 0; i < end; i++)
        if (stage == 0 || (ops[i].action == Action::attention && ops[i].part == Part::attend && --stage == 0)) return i;
    return end;
}

int threads_of(const Pool* pool) { return pool ? pool->size() : 1; }

// Calls f(i) for each i below count; threads claim them one by one.
template <class F>
void claim(Pool* pool, std::int64_t count, const F& f) {
    std::atomic<std::int64_t> next{0};
    share(pool, std::min<std::int64_t>(count, threads_of(pool)), [&](std::int64_t, std::int64_t) {
        for (std::int64_t i = next++; i < count; i = next++) f(i);
    });
}

}  // namespace

std::uint8_t* Memory::reserve(std::int64_t bytes) {
    if (bytes <= size) return data;
    release();
    data = static_cast<std::uint8_t*>(::operator new(std::size_t(bytes), std::align_val_t(LINE)));
    size = bytes;
    return data;
}

void Memory::release() {
    ::operator delete(data, std::align_val_t(LINE));
    data = nullptr, size = 0;
}

Forward::Forward(const Program& p, const char* isa, Pool* pool)
    : ops(p.ops, p.ops + p.num_ops),
      weights(p.weights, p.weights + p.num_weights),
      buffers(p.buffers, p.buffers + p.num_buffers),
      vectors(p.vectors, p.vectors + p.num_vectors),
      rotaries(p.rotaries, p.rotaries + p.num_rotaries),
      groups_of_layers(p.groups, p.groups + p.num_groups),
      places_in_blocks(p.places, p.places + p.num_places),
      program(p),
      elements(*find_elements(isa)),
      products(*find_products(&elements)),
      kernel(*find_attention(isa)),
      recurrent(*find_recurrent(isa)),
      pool(pool),
      shared_rows(std::max(BLOCK_ROWS, SHARED_ROWS_PER_THREAD * threads_of(pool))),
      places(buffers.size()),
      step_memory(buffers.size()),
      turns(rotaries.size()),
      num_stages(1),
      positions(positions_of(p)),
      adapters(isa) {
    program.ops = ops.data(), program.weights = weights.data();
    program.groups = groups_of_layers.data(), program.places = places_in_blocks.data();
    for (const Op& op : ops) num_stages += op.action == Action::attention && op.part == Part::attend;
    for (std::size_t i = 0; i < buffers.size(); i++) {
        if (buffers[i].life == Life::step || std::int32_t(i) == p.logits) continue;
        places[i] = area_row_bytes;
        area_row_bytes += (buffers[i].row_bytes() + LINE - 1) / LINE * LINE;
    }
    areas.reserve(area_row_bytes * std::max(shared_rows, BLOCK_ROWS * threads_of(pool)));
}

std::uint8_t* Forward::at(std::int32_t buffer, std::int64_t row, const Span& span) const {
    const Buffer& b = buffers[buffer];
    if (buffer == program.logits) return reinterpret_cast<std::uint8_t*>(span.logits + (row - span.first) * b.columns);
    if (b.life == Life::step) return step_memory[buffer].data + row * b.row_bytes();
    return span.area + places[buffer] * span.room + (row - span.first) * b.row_bytes();
}

float* Forward::floats(std::int32_t buffer, std::int64_t row, const Span& span) const {
    return reinterpret_cast<float*>(at(buffer, row, span));
}

Numbers* Forward::groups(std::int32_t buffer, std::int64_t row, const Span& span) const {
    return reinterpret_cast<Numbers*>(at(buffer, row, span));
}

// -- operations -------------------------------------------------------------------------------------------------------

// Multiplies one panel of a weight with `count` rows, some at a time: take(outputs [rows][PANEL], first row, rows);
// and adds what the rows' adapters change.
template <class F>
void Forward::multiply_panel(const Op& op, const Weight& w, std::int64_t panel, const Span& span, std::int64_t first,
                             std::int64_t count, const F& take) const {
    std::int64_t num_tiles = 0;
    if (span.has_tokens) adapters.tiles_of(first, count, num_tiles);
    if (!num_tiles) return multiply_base(op, w, panel, span, first, count, take);
    alignas(LINE) float sums[BLOCK_ROWS * PANEL];
    for (const std::int64_t end = first + count; first < end; first += BLOCK_ROWS) {
        const std::int64_t rows = std::min(BLOCK_ROWS, end - first);
        multiply_base(op, w, panel, span, first, rows, [&](const float* y, std::int64_t row, int some) {
            std::memcpy(sums + (row - first) * PANEL, y, sizeof(float) * std::size_t(some) * PANEL);
        });
        adapt(op, &w - &weights[op.first_weight], panel, first, rows, sums);
        take(sums, first, int(rows));
    }
}

template <class F>
void Forward::multiply_base(const Op& op, const Weight& w, std::int64_t panel, const Span& span, std::int64_t first,
                            std::int64_t count, const F& take) const {
    alignas(LINE) float result[BLOCK_ROWS * PANEL];
    if (w.is_packed()) {
        const Numbers* x = groups(op.in_groups, first, span);
        each_tile(products, w.matrix(), panel, x, count, result,
                  [&](std::int64_t row, int rows) { take(result, first + row, rows); });
        return;
    }
    const std::int64_t feature = panel * PANEL, n = std::min<std::int64_t>(PANEL, w.features - feature);
    const std::int64_t stride = buffers[op.in].columns, size = w.float_type() == 0 ? 4 : 2;
    const void* data = static_cast<const std::uint8_t*>(w.data) + feature * w.columns * size;
    for (std::int64_t row = first; row < first + count; row += BLOCK_ROWS) {
        const std::int64_t rows = std::min(BLOCK_ROWS, first + count - row);
        const float* x = floats(op.in, row, span) + op.in_at;
        products.floats(w.float_type(), data, n, w.columns, x, stride, rows, result, PANEL);
        take(result, row, int(rows));
    }
}

void Forward::product(const Op& op, const Span& span) const {
    std::int64_t count = 0;
    for (std::int32_t i = 0; i < op.num_weights; i++) count += weights[op.first_weight + i].panels();
    const float* bias = op.vector < 0 ? nullptr : vectors.data() + op.vector;
    const auto one_panel = [&](const Weight& w, std::int64_t panel, std::int64_t begin) {
        const std::int64_t n = std::min<std::int64_t>(PANEL, w.features - panel * PANEL), at = begin + panel * PANEL;
        const Ending ending{bias ? bias + at : nullptr, op.divisor, op.factor, op.adds != 0};
        multiply_panel(op, w, panel, span, span.first, span.count, [&](const float* y, std::int64_t first, int rows) {
            float* out = floats(op.out, first, span) + op.out_at + at;
            elements.finish(ending, y, PANEL, rows, n, out, buffers[op.out].columns);
        });
    };
    share(span.pool, count, [&](std::int64_t begin, std::int64_t end) {
        std::int64_t first = 0, features = 0;
        for (std::int32_t i = 0; i < op.num_weights; i++) {
            const Weight& w = weights[op.first_weight + i];
            const std::int64_t last = first + w.panels();
            for (std::int64_t p = std::max(begin, first); p < std::min(end, last); p++) one_panel(w, p - first, features);
            first = last, features += w.features;
        }
    });
}

void Forward::gate(const Op& op, const Span& span) const {
    const Weight &gate = weights[op.first_weight], &up = weights[op.first_weight + op.num_weights - 1];
    const bool is_gated = op.num_weights == 2, is_quantised = buffers[op.out].is_groups;
    const float* biases = op.vector < 0 ? nullptr : vectors.data() + op.vector;
    const auto some_rows = [&](std::int64_t panel, std::int64_t first, std::int64_t count) {
        alignas(LINE) float gates[BLOCK_ROWS * PANEL];
        const std::int64_t n = std::min<std::int64_t>(PANEL, gate.features - panel * PANEL);
        const auto add_biases = [&](const float* begin, float* y, int rows) {
            if (begin) elements.finish({begin + panel * PANEL, 1.f, 1.f, false}, y, PANEL, rows, n, y, PANEL);
        };
        if (is_gated)
            multiply_panel(op, gate, panel, span, first, count, [&](float* y, std::int64_t row, int rows) {
                add_biases(biases, y, rows);
                std::memcpy(gates + (row - first) * PANEL, y, sizeof(float) * std::size_t(rows) * PANEL);
            });
        multiply_panel(op, up, panel, span, first, count, [&](float* y, std::int64_t row, int rows) {
            add_biases(biases && is_gated ? biases + gate.features : biases, y, rows);
            if (!is_gated && n == PANEL) elements.activate(op.function, y, std::int64_t(rows) * PANEL, y);
            for (const std::int64_t end = row + rows; row < end; row++, y += PANEL) {
                float* out = is_quantised ? y : floats(op.out, row, span) + op.out_at + panel * PANEL;
                if (is_gated)
                    elements.gate(op.function, gates + (row - first) * PANEL, y, n, out);
                else if (n < PANEL)
                    elements.activate(op.function, y, n, out);
                else if (!is_quantised)
                    std::memcpy(out, y, sizeof(float) * PANEL);
                if (is_quantised) products.quantise(out, n, groups(op.out, row, span) + panel);
            }
        });
    };
    share(span.pool, gate.panels(), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t panel = begin; panel < end; panel++)
            for (std::int64_t row = 0; row < span.count; row += BLOCK_ROWS)
                some_rows(panel, span.first + row, std::min(BLOCK_ROWS, span.count - row));
    });
}

void Forward::embed(const Op& op, std::int64_t row, const Span& span) const {
    const Weight& table = weights[op.first_weight];
    const std::int64_t id = input.ids[row], n = table.columns;
    float* out = floats(op.out, row, span) + op.out_at;
    row_of(table, id, op.factor, out);
    if (op.vector >= 0) {
        const std::int64_t type = input.types ? input.types[row] : 0;
        elements.add(out, vectors.data() + op.vector + type * n, 1.f, n, out);
    }
    if (op.num_weights < 2) return;
    alignas(LINE) float position[MAX_POSITION_COLUMNS];
    row_of(weights[op.first_weight + 1], row_places[row].position + op.offset, 1.f, position);
    elements.add(out, position, 1.f, n, out);
}

// Row `index` of a table, times a factor.
void Forward::row_of(const Weight& table, std::int64_t index, float factor, float* out) const {
    const std::int64_t n = table.columns;
    if (table.is_stored_blocks()) {
        const Kind kind = table.stored_kind();
        read_row(kind, static_cast<const std::uint8_t*>(table.data) + index * stored_row_bytes(kind, n), n, out);
        return elements.widen(FloatType::f32, out, factor, n, out);
    }
    if (!table.is_packed()) {
        const std::int64_t size = table.float_type() == 0 ? 4 : 2;
        const void* stored = static_cast<const std::uint8_t*>(table.data) + index * n * size;
        return elements.widen(FloatType(table.float_type()), stored, factor, n, out);
    }
    unpack_row(table.matrix(), index, out);
    elements.widen(FloatType::f32, out, factor, n, out);
}

// What a row keeps in its block from stage to stage.
float* Forward::kept(std::int64_t row) const {
    const RowPlace& place = row_places[row];
    return reinterpret_cast<float*>(input.cache + place.block * program.block_bytes + program.kept_at() +
                                    place.position % BLOCK_TOKENS * program.kept_bytes());
}

// Stores the keys and values of one row, which has queries, keys and values side by side.
void Forward::store(const Op& op, const float* x, std::int64_t row) const {
    const KVLayout layout = program.layout(op);
    const RowPlace& place = row_places[row];
    const std::int64_t dim = layout.head_dim;
    std::uint8_t* block = input.cache + place.block * program.block_bytes + program.places[op.place].offset;
    const std::int64_t pairs = op.rotary < 0 ? 0 : rotaries[op.rotary].num_pairs;
    const float* rotary = pairs ? turns[op.rotary].data() + place.position * 2 * pairs : nullptr;
    const auto norm = [&](int number) { return number < op.num_norms ? vectors.data() + op.vector + number * dim : nullptr; };
    const float* keys = x + program.heads * dim;
    const float* values = keys + layout.kv_heads * dim;
    for (int h = 0; h < layout.kv_heads; h++, keys += dim, values += dim)
        kernel.store(layout, {keys, norm(1), rotary, int(2 * pairs), op.epsilon}, {values, norm(2), nullptr, 0, op.epsilon},
                     block + h * layout.head_bytes(), place.position % BLOCK_TOKENS);
}

// An operation that computes each row separately.
void Forward::one_row(const Op& op, std::int64_t row, const Span& span) const {
    if (op.action == Action::embed) return embed(op, row, span);
    const float* x = op.action == Action::load ? kept(row) + op.in_at : floats(op.in, row, span) + op.in_at;
    if (op.action == Action::attention) return store(op, x, row);
    if (op.action == Action::quantise) return products.quantise(x, op.columns, groups(op.out, row, span));
    float* out = op.action == Action::save ? kept(row) + op.out_at : floats(op.out, row, span) + op.out_at;
    if (op.action == Action::load || op.action == Action::save)
        std::memcpy(out, x, sizeof(float) * std::size_t(op.columns));
    else if (op.action == Action::add)
        elements.add(out, x, op.factor, op.columns, out);
    else if (op.action == Action::scale)
        elements.widen(FloatType::f32, x, op.factor, op.columns, out);
    else if (op.action == Action::cap)
        elements.cap(x, op.factor, op.columns, out);
    else if (op.action == Action::rates)
        rates(x, vectors.data() + op.vector, op.columns, out);
    else
        for (std::int32_t head = 0; head < op.heads; head++, x += op.stride, out += op.columns) one_part(op, x, out);
}

// An operation on one part of a row's columns.
void Forward::one_part(const Op& op, const float* x, float* out) const {
    if (op.action == Action::copy)
        std::memcpy(out, x, sizeof(float) * std::size_t(op.columns));
    else if (op.action == Action::multiply)
        elements.gate(op.function, x, out, op.columns, out);
    else if (op.action == Action::scale_parts)
        elements.widen(FloatType::f32, out, *x, op.columns, out);
    else if (op.centred)
        elements.layer_norm(x, vectors.data() + op.vector, op.epsilon, op.columns, out);
    else
        elements.norm(x, vectors.data() + op.vector, 0.f, op.epsilon, op.columns, out);
}

void Forward::run_ops(std::int64_t first, std::int64_t last, const Span& span) const {
    for (std::int64_t i = first; i < last; i++) {
        const Op& op = ops[i];
        if (op.action == Action::product) {
            lower(op, span), product(op, span);
        } else if (op.action == Action::gate) {
            lower(op, span), gate(op, span);
        } else {
            share(span.count < PARALLEL_ROWS ? nullptr : span.pool, span.count, [&](std::int64_t begin, std::int64_t end) {
                for (std::int64_t row = begin; row < end; row++) one_row(op, span.first + row, span);
            });
        }
    }
}

// -- a step -----------------------------------------------------------------------------------------------------------

// Runs the operations between two attentions.
void Forward::run_segment(std::int64_t first, std::int64_t last) {
    const std::int64_t tokens = input.num_tokens;
    if (tokens <= shared_rows) return run_ops(first, last, {0, tokens, areas.data, tokens, nullptr, pool, true});
    const std::int64_t threads = threads_of(pool), count = num_chunks(tokens);
    std::atomic<std::int64_t> next{0};
    share(pool, threads, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t thread = begin; thread < end; thread++) {
            std::uint8_t* area = areas.data + thread * BLOCK_ROWS * area_row_bytes;
            for (std::int64_t i = next++; i < count; i = next++) {
                const std::int64_t from = chunk_begin(i, tokens), to = chunk_begin(i + 1, tokens);
                run_ops(first, last, {from, to - from, area, BLOCK_ROWS, nullptr, nullptr, true});
            }
        }
    });
}

const char* Forward::attend(const Op& op) {
    const bool rotates = op.rotary >= 0, is_kept = op.part == Part::attend;
    const Place& place = program.places[op.place];
    Step step = step_of(place.group, input);
    step.layout = program.layout(op), step.part = place.part;
    step.heads = program.heads, step.window = op.window;
    step.rotary_dim = rotates ? 2 * rotaries[op.rotary].num_pairs : 0;
    step.scale = op.scale, step.epsilon = op.epsilon;
    step.query_period = op.query_period, step.query_beta = op.query_beta;
    step.num_norms = op.num_norms, step.only_reads = op.part == Part::read;
    step.projected = is_kept ? nullptr : reinterpret_cast<const float*>(step_memory[op.in].data);
    step.rotary = rotates ? turns[op.rotary].data() : nullptr;
    step.norms = op.num_norms ? vectors.data() + op.vector : nullptr;
    step.sinks = op.sinks < 0 ? nullptr : vectors.data() + op.sinks;
    const std::int64_t queries_at = program.kept_at() + op.in_at * std::int64_t(sizeof(float));
    step.cache = input.cache + place.offset, step.block_stride = program.block_bytes;
    if (is_kept) step.queries = input.cache + queries_at, step.query_stride = program.kept_bytes();
    step.queries_bytes = input.num_blocks * step.block_stride - queries_at;
    step.out = reinterpret_cast<float*>(step_memory[op.out].data);
    step.projected_size = is_kept ? 0 : input.num_tokens * buffers[op.in].columns;
    step.rotary_size = rotates ? std::int64_t(turns[op.rotary].size()) : 0;
    step.norms_size = std::int64_t(op.num_norms) * step.layout.head_dim;
    step.sinks_size = step.sinks ? program.heads : 0;
    step.cache_bytes = input.num_blocks * step.block_stride - place.offset;
    step.out_size = input.num_tokens * buffers[op.out].columns;
    return attention(step, kernel, workers());
}

Workers Forward::workers() const {
    const auto run = [](void* pool, std::int64_t count, void (*item)(void*, std::int64_t), void* work) {
        claim(static_cast<Pool*>(pool), count, [&](std::int64_t i) { item(work, i); });
    };
    return {threads_of(pool), run, pool};
}

// A convolution or a delta rule over all rows of the step.
void Forward::recur(const Op& op) {
    const float* x = reinterpret_cast<const float*>(step_memory[op.in].data) + op.in_at;
    float* out = reinterpret_cast<float*>(step_memory[op.out].data) + op.out_at;
    const std::int64_t x_stride = buffers[op.in].columns, out_stride = buffers[op.out].columns;
    const Place* places = program.places + op.place;
    if (op.action == Action::delta)
        return delta_rule({program.delta, x, out, x_stride, out_stride, places}, states_of(input), recurrent, workers());
    const float* weights = vectors.data() + op.vector;
    const float* biases = weights + std::int64_t(op.taps) * op.columns;
    convolve({x, out, x_stride, out_stride, op.columns, weights, biases, op.taps, op.function, *places}, states_of(input), recurrent,
             workers());
}

// Runs the final part and the head over some rows, as many at a time as there is room for: put(row, count, span) writes
// their inputs, and take(row, count, span) reads their results.
template <class F, class G>
void Forward::run_rows(std::int64_t num_rows, std::int64_t first, std::int64_t last, float* logits, const F& put,
                       const G& take) const {
    const std::int64_t columns = program.logits < 0 ? 0 : buffers[program.logits].columns;
    for (std::int64_t row = 0; row < num_rows; row += shared_rows) {
        const std::int64_t count = std::min(shared_rows, num_rows - row);
        const Span span{0, count, areas.data, count, logits ? logits + row * columns : nullptr, pool};
        put(row, count, span);
        run_ops(first, last, span);
        take(row, count, span);
    }
}

// Copies the states of some rows of the latest step to the inputs of the final part.
void Forward::gather(const std::int64_t* rows, std::int64_t count, const Span& span) const {
    const std::size_t bytes = buffers[program.state].row_bytes();
    for (std::int64_t i = 0; i < count; i++)
        std::memcpy(at(program.gathered, i, span), at(program.state, rows[i], span), bytes);
}

const char* Forward::step(const StepInput& step) try {
    if (const char* wrong = fault(step)) return wrong;
    num_tokens = 0;
    prepare(step);
    std::int64_t first = stage_begin(ops, step.stage, program.final_begin);
    const std::int64_t last = stage_begin(ops, step.stage + 1, program.final_begin);
    for (std::int64_t i = first; i <= last; i++) {
        if (i < last && !attends(ops[i])) continue;
        run_segment(first, i);
        first = i + 1;
        if (i < last)
            if (const char* wrong = is_recurrent(ops[i]) ? (recur(ops[i]), nullptr) : attend(ops[i])) return wrong;
    }
    if (step.stage + 1 < num_stages) return nullptr;
    const std::int64_t columns = buffers[program.hidden].columns;
    run_rows(step.num_hidden_rows, program.final_begin, program.head_begin, nullptr,
             [&](std::int64_t row, std::int64_t count, const Span& span) { gather(step.hidden_rows + row, count, span); },
             [&](std::int64_t row, std::int64_t count, const Span& span) {
                 std::memcpy(step.hidden + row * columns, floats(program.hidden, 0, span), sizeof(float) * count * columns);
             });
    num_tokens = step.num_tokens;
    return nullptr;
} catch (const std::bad_alloc&) {
    return "there is no memory for the step";
}

const char* Forward::logits(const std::int64_t* rows, std::int64_t num_rows, float* out, std::int64_t out_size) const {
    if (program.logits < 0) return "the program has no head";
    const std::int64_t columns = buffers[program.logits].columns;
    if (num_rows < 0 || num_rows > MAX_TOKENS || (num_rows && (!rows || !out || out_size / num_rows < columns)))
        return "logits have no room";
    for (std::int64_t i = 0; i < num_rows; i++)
        if (rows[i] < 0 || rows[i] >= num_tokens) return "a row is not of the latest step";
    run_rows(num_rows, program.final_begin, program.num_ops, out,
             [&](std::int64_t row, std::int64_t count, const Span& span) { gather(rows + row, count, span); },
             [](std::int64_t, std::int64_t, const Span&) {});
    return nullptr;
}

const char* Forward::project(const float* vectors, std::int64_t size, std::int64_t num_rows, float* out,
                             std::int64_t out_size) const {
    if (program.logits < 0) return "the program has no head";
    const std::int64_t columns = buffers[program.hidden].columns, results = buffers[program.logits].columns;
    if (num_rows < 0 || num_rows > MAX_TOKENS || (num_rows && (!vectors || size / num_rows < columns)))
        return "there are fewer vectors";
    if (num_rows && (!out || out_size / num_rows < results)) return "the results have no room";
    run_rows(num_rows, program.head_begin, program.num_ops, out,
             [&](std::int64_t row, std::int64_t count, const Span& span) {
                 std::memcpy(floats(program.hidden, 0, span), vectors + row * columns, sizeof(float) * count * columns);
             },
             [](std::int64_t, std::int64_t, const Span&) {});
    return nullptr;
}

}  // namespace lockstep::native
