// Program checks: reads a program from its encoded form and refuses operations that do not fit their buffers.
#include "program.hpp"

#include <initializer_list>

#include "pack.hpp"

namespace lockstep::native {
namespace {

constexpr std::int64_t MAX_OPS = 1 << 20;

bool is_within(std::int64_t index, std::int64_t count) { return index >= 0 && index < count; }

// True if `count` numbers of Program::vectors exist from an index on.
bool has_numbers(const Program& p, std::int64_t at, std::int64_t count) {
    return at >= 0 && count >= 0 && at <= p.num_vectors && count <= p.num_vectors - at;
}

// Columns [at, at + count) of a buffer of floats.
bool has_floats(const Program& p, std::int32_t buffer, std::int64_t at, std::int64_t count) {
    if (!is_within(buffer, p.num_buffers) || p.buffers[buffer].is_groups) return false;
    return at >= 0 && count >= 1 && at + count <= p.buffers[buffer].columns;
}

bool has_groups(const Program& p, std::int32_t buffer, std::int64_t columns) {
    return is_within(buffer, p.num_buffers) && p.buffers[buffer].is_groups && p.buffers[buffer].columns == columns;
}

const char* weight_fault(const Weight& w) {
    if (!is_within(w.type, NUM_TYPES)) return "a weight has no known type";
    if (w.features < 1 || w.features > MAX_PRODUCT_FEATURES || w.columns < 1 || w.columns > MAX_PRODUCT_COLUMNS)
        return "a weight does not have 1 to 2^24 features and 1 to 2^20 columns";
    if (w.is_stored_blocks()) {
        if (w.columns % layout_of(w.stored_kind()).block_columns) return "a weight's columns are no whole blocks";
        return w.data && w.bytes >= w.features * stored_row_bytes(w.stored_kind(), w.columns) ? nullptr : "a weight is cut";
    }
    if (!w.is_packed())
        return w.data && w.bytes >= w.features * w.columns * (w.float_type() ? 2 : 4) ? nullptr : "a weight is cut";
    const Matrix m = w.matrix();
    if (layout_of(m.kind).is_super && m.groups() % SUPER) return "a weight's columns are no whole blocks";
    return w.data && w.bytes >= m.count() * m.panel_bytes() ? nullptr : "a weight is cut";
}

// Checks the weights of a product or a gate: all have as many columns as their input.
const char* operand_fault(const Program& p, const Op& op, std::int64_t& features) {
    features = 0;
    if (op.num_weights < 1 || op.first_weight < 0 || op.first_weight > p.num_weights - op.num_weights)
        return "an operation's weights are not there";
    for (std::int32_t i = 0; i < op.num_weights; i++) {
        const Weight& w = p.weights[op.first_weight + i];
        if (w.is_stored_blocks()) return "a product's weights are not packed";
        if (w.is_packed() ? !has_groups(p, op.in_groups, w.columns) : !has_floats(p, op.in, op.in_at, w.columns))
            return "an operation's input does not have the columns of its weights";
        features += w.features;
    }
    return nullptr;
}

// Kept columns [at, at + count) of a row.
bool has_kept(const Program& p, std::int64_t at, std::int64_t count) {
    return at >= 0 && count >= 1 && at + count <= p.kept;
}

// True if `bytes` at a place lie in a block of a group of that kind.
bool has_room(const Program& p, std::int64_t place, std::int64_t bytes, bool is_state) {
    if (!is_within(place, p.num_places)) return false;
    const Place& at = p.places[place];
    if (!is_within(at.group, p.num_groups) || bool(p.groups[at.group].is_state) != is_state) return false;
    return is_within(at.part, p.groups[at.group].num_parts) && at.offset >= 0 && at.offset % PLACE_UNIT == 0 &&
           bytes <= p.kept_at() && at.offset <= p.kept_at() - bytes;
}

const char* heads_fault(const Program& p, const Op& op) {
    if (op.kv_heads < 1 || p.heads % op.kv_heads) return "the query heads are no multiple of the KV heads";
    if (op.columns < HEAD_DIM_UNIT || op.columns % HEAD_DIM_UNIT || op.columns > MAX_HEAD_DIM)
        return "a head's size is not a multiple of 8 up to 512";
    if (op.rotary != -1 && !is_within(op.rotary, p.num_rotaries)) return "attention has no such rotation";
    if (op.rotary != -1 && 2 * p.rotaries[op.rotary].num_pairs > op.columns) return "a rotation has more dimensions than a head";
    if (op.num_norms < 0 || op.num_norms > 3) return "more than queries, keys and values are normalised";
    if (op.num_norms && !has_numbers(p, op.vector, std::int64_t(op.num_norms) * op.columns)) return "attention's norms are not there";
    if (op.sinks != -1 && !has_numbers(p, op.sinks, p.heads)) return "attention's sinks are not there";
    if (op.query_period < 0) return "attention's queries have no such period";
    if (!has_room(p, op.place, std::int64_t(p.layout(op).block_bytes()), false)) return "attention has no place in a block";
    const std::int32_t window = p.groups[p.places[op.place].group].window;
    return op.window < 0 || (window && op.window != window) ? "attention has another window than its group" : nullptr;
}

const char* attention_fault(const Program& p, const Op& op) {
    if (op.part < Part::whole || op.part > Part::read) return "attention has no such part";
    if ((op.part == Part::whole || op.part == Part::read) != (p.kept == 0))
        return "attention has the parts of another kind of program";
    if (const char* wrong = heads_fault(p, op)) return wrong;
    const std::int64_t queries = std::int64_t(p.heads) * op.columns, keys = std::int64_t(op.kv_heads) * op.columns;
    const std::int64_t projected = op.part == Part::read ? queries : queries + 2 * keys;
    if (op.part == Part::attend) {
        if (!has_kept(p, op.in_at, queries)) return "attention's queries are not kept";
    } else if (!has_floats(p, op.in, op.in_at, projected) || p.buffers[op.in].columns != projected) {
        return "attention's input has other heads";
    }
    if (op.part == Part::store) return nullptr;
    if (!has_floats(p, op.out, op.out_at, queries) || p.buffers[op.out].columns != queries) return "attention's output has other heads";
    if ((op.part != Part::attend && p.buffers[op.in].life != Life::step) || p.buffers[op.out].life != Life::step)
        return "attention needs all rows of its buffers";
    return nullptr;
}

// The parts of columns of a norm, a product, a copy, or a product with one number of the input for each part.
const char* parts_fault(const Program& p, const Op& op) {
    if (op.heads < 1 || op.heads > MAX_PARTS || op.stride < 0) return "an operation has less than one part, or more than 2^16";
    const std::int64_t last = (op.heads - 1) * std::int64_t(op.stride), size = op.action == Action::scale_parts ? 1 : op.columns;
    if (op.columns < 1 || !has_floats(p, op.in, op.in_at, last + size)) return "an operation's input is not there";
    return has_floats(p, op.out, op.out_at, std::int64_t(op.heads) * op.columns) ? nullptr : "an operation's output has no room";
}

// Convolutions and delta rules read other rows than the one that they write, and keep states.
const char* recurrence_fault(const Program& p, const Op& op) {
    if (p.kept) return "a program with stages has no states";
    const bool is_delta = op.action == Action::delta;
    if (const char* wrong = is_delta ? delta_fault(p.delta) : convolution_fault(op.columns, op.taps, op.function)) return wrong;
    const std::int64_t columns = is_delta ? p.delta.columns() : op.columns, results = is_delta ? p.delta.values() : op.columns;
    if (!has_floats(p, op.in, op.in_at, columns)) return "an operation's input is not there";
    if (!has_floats(p, op.out, op.out_at, results) || op.in == op.out) return "an operation's output has no room";
    if (p.buffers[op.in].life != Life::step || p.buffers[op.out].life != Life::step) return "a recurrence needs all rows of its buffers";
    if (!is_delta && !has_numbers(p, op.vector, std::int64_t(op.taps + 1) * op.columns)) return "a convolution's weights are not there";
    const std::int64_t pieces = is_delta ? p.delta.value_heads : 1;
    const std::int64_t bytes = is_delta ? p.delta.piece_bytes() : (op.taps - 1) * std::int64_t(op.columns) * std::int64_t(sizeof(float));
    for (std::int64_t i = 0; i < pieces; i++)
        if (!has_room(p, op.place + i, bytes, true)) return "a state has no place in a block";
    return nullptr;
}

const char* op_fault(const Program& p, const Op& op) {
    for (const std::int32_t buffer : {op.in, op.in_groups})
        if (buffer != -1 && !is_within(buffer, p.num_buffers)) return "an operation's input is not there";
    const bool has_output = op.action != Action::save && (op.action != Action::attention || op.part != Part::store);
    if (has_output ? !is_within(op.out, p.num_buffers) : op.out != -1) return "an operation's output has no room";
    std::int64_t features = 0;
    switch (op.action) {
        case Action::embed: {
            if (op.num_weights < 1 || op.num_weights > 2 || op.first_weight < 0 ||
                op.first_weight > p.num_weights - op.num_weights)
                return "there is no table to embed from";
            const Weight &w = p.weights[op.first_weight], &positions = p.weights[op.first_weight + op.num_weights - 1];
            if (w.features != p.vocab_size) return "the table does not have the vocabulary's size";
            if (positions.columns != w.columns || op.offset < 0 || (op.num_weights == 2 && w.columns > MAX_POSITION_COLUMNS))
                return "the positions have no table of these columns";
            if (op.columns < 0 || op.columns > MAX_TOKEN_TYPES || (op.vector != -1) != (op.columns > 0))
                return "an embedding has no such token types";
            if (op.vector != -1 && !has_numbers(p, op.vector, w.columns * op.columns)) return "an embedding's numbers are not there";
            return has_floats(p, op.out, op.out_at, w.columns) ? nullptr : "an embedding has no room";
        }
        case Action::norm:
            if (!has_numbers(p, op.vector, (op.centred ? 2 : 1) * std::int64_t(op.columns)))
                return "a norm's weights are not there";
            return parts_fault(p, op);
        case Action::add:
        case Action::scale:
        case Action::cap:
            if (!has_floats(p, op.in, op.in_at, op.columns)) return "an operation's input is not there";
            return has_floats(p, op.out, op.out_at, op.columns) ? nullptr : "an operation's output has no room";
        case Action::quantise:
            if (!has_floats(p, op.in, op.in_at, op.columns)) return "an operation's input is not there";
            return has_groups(p, op.out, op.columns) ? nullptr : "quantised rows have no room";
        case Action::product:
            if (const char* wrong = operand_fault(p, op, features)) return wrong;
            if (op.vector != -1 && !has_numbers(p, op.vector, features)) return "a product's biases are not there";
            return has_floats(p, op.out, op.out_at, features) ? nullptr : "a product has no room";
        case Action::gate:
            if (const char* wrong = operand_fault(p, op, features)) return wrong;
            if (op.num_weights > 2 || features != op.num_weights * p.weights[op.first_weight].features)
                return "a gate needs one weight, or two of one size";
            if (op.function < Gate::silu || int(op.function) >= GATES) return "there is no such function of a gate";
            if (op.vector != -1 && !has_numbers(p, op.vector, features)) return "a gate's biases are not there";
            features /= op.num_weights;
            return has_groups(p, op.out, features) || has_floats(p, op.out, op.out_at, features) ? nullptr : "a gate has no room";
        case Action::attention:
            return attention_fault(p, op);
        case Action::multiply:
            if (op.function < Gate::silu || int(op.function) >= GATES) return "there is no such function of a gate";
            [[fallthrough]];
        case Action::copy:
        case Action::scale_parts:
            return op.in == op.out ? "an operation's output has no room" : parts_fault(p, op);
        case Action::rates:
            if (op.columns < 1 || op.columns > MAX_STATE_HEADS) return "a delta rule has less than one head, or more than 1024";
            if (!has_numbers(p, op.vector, 2 * std::int64_t(op.columns))) return "the rates of a delta rule are not there";
            if (!has_floats(p, op.in, op.in_at, 2 * std::int64_t(op.columns))) return "an operation's input is not there";
            return has_floats(p, op.out, op.out_at, 2 * std::int64_t(op.columns)) ? nullptr : "an operation's output has no room";
        case Action::convolve:
        case Action::delta:
            return recurrence_fault(p, op);
        case Action::load:
            if (!has_kept(p, op.in_at, op.columns)) return "an operation's kept columns are not there";
            return has_floats(p, op.out, op.out_at, op.columns) ? nullptr : "an operation's output has no room";
        case Action::save:
            if (!has_kept(p, op.out_at, op.columns)) return "an operation's kept columns are not there";
            return has_floats(p, op.in, op.in_at, op.columns) ? nullptr : "an operation's input is not there";
    }
    return "there is no such operation";
}

const char* blocks_fault(const Program& p) {
    if (p.heads < 1 || p.heads > 1 << 16) return "there are no query heads, or more than 2^16";
    if (p.kept < 0 || p.kept > MAX_PRODUCT_COLUMNS) return "a row keeps more than 2^20 numbers";
    if (!is_within(p.storage, 3)) return "keys and values have no such precision";
    if (p.num_groups < 1 || p.num_groups > MAX_GROUPS || !p.groups || p.num_places < 1 || !p.places)
        return "the program has no groups or places";
    if (p.kept_at() < 0 || p.block_bytes > MAX_BLOCK_BYTES) return "a block has no room for what rows keep, or more than 2^30 bytes";
    for (std::int64_t i = 0; i < p.num_groups; i++) {
        const Group& group = p.groups[i];
        if (group.num_parts < 1 || group.num_parts > MAX_PARTS || group.window < 0) return "a group has no known shape";
        if (i == 0 ? group.window || group.is_state : (group.window > 0) == (group.is_state != 0) || (group.is_state && i + 1 < p.num_groups))
            return "the first group has all columns, others have a window, and the last one may be of states";
    }
    return nullptr;
}

// Checks the buffers of results.
const char* results_fault(const Program& p) {
    for (const std::int32_t buffer : {p.state, p.gathered, p.hidden})
        if (!has_floats(p, buffer, 0, 1)) return "a result has no buffer";
    if (p.logits == -1 ? p.num_ops != p.head_begin : !has_floats(p, p.logits, 0, 1)) return "a result has no buffer";
    if (p.state == p.logits || p.gathered == p.logits || p.hidden == p.logits) return "only the head has logits";
    if (p.buffers[p.gathered].columns != p.buffers[p.state].columns) return "gathered rows are not those of the state";
    if (p.buffers[p.gathered].life != Life::rows || p.buffers[p.hidden].life != Life::rows)
        return "only the body works on whole steps";
    return p.buffers[p.state].life == Life::step ? nullptr : "a result's buffer has another shape";
}

}  // namespace

const char* fault_of(const Program& p) {
    if (p.num_ops < 1 || p.num_ops > MAX_OPS || p.final_begin < 1 || p.head_begin < p.final_begin || p.num_ops < p.head_begin)
        return "the parts of the program are not in order";
    if (p.num_weights < 1 || p.num_buffers < 1 || p.num_vectors < 0 || p.num_rotaries < 0) return "the program has no memory";
    if (!p.ops || !p.weights || !p.buffers || (p.num_vectors && !p.vectors) || (p.num_rotaries && !p.rotaries))
        return "the program has no memory";
    if (const char* wrong = blocks_fault(p)) return wrong;
    for (std::int64_t i = 0; i < p.num_buffers; i++) {
        const Buffer& b = p.buffers[i];
        if (b.columns < 1 || b.columns > MAX_PRODUCT_FEATURES || (b.life != Life::step && b.life != Life::rows))
            return "a buffer has no known shape";
    }
    for (std::int64_t i = 0; i < p.num_rotaries; i++)
        if (p.rotaries[i].num_pairs < 1 || p.rotaries[i].num_pairs > MAX_HEAD_DIM / 2 ||
            !has_numbers(p, p.rotaries[i].vector, p.rotaries[i].num_pairs))
            return "a rotation's frequencies are not there";
    if (const char* wrong = results_fault(p)) return wrong;
    for (std::int64_t i = 0; i < p.num_weights; i++)
        if (const char* wrong = weight_fault(p.weights[i])) return wrong;
    for (std::int64_t i = 0; i < p.num_ops; i++) {
        const Op& op = p.ops[i];
        if (const char* wrong = op_fault(p, op)) return wrong;
        if (i < p.head_begin && p.logits >= 0 && (op.in == p.logits || op.out == p.logits)) return "only the head has logits";
        const bool uses_tokens = op.action == Action::embed || op.action == Action::attention ||
                                 op.action == Action::load || op.action == Action::save ||
                                 op.action == Action::convolve || op.action == Action::delta;
        const auto is_of_step = [&](std::int32_t buffer) { return buffer >= 0 && p.buffers[buffer].life == Life::step; };
        if (i >= p.final_begin && (uses_tokens || is_of_step(op.in) || is_of_step(op.in_groups) || is_of_step(op.out)))
            return "only the body works on whole steps";
    }
    return nullptr;
}

}  // namespace lockstep::native
