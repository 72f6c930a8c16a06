// A forward pass as data: the operations of a model in order, and the memory that they read and write. Python builds it
// (program.py), and `Forward` runs it.
//
// A program has three parts. The body computes the state after the last layer from the token ids of a step. The final
// part computes the hidden states of the requested rows, and the head computes their logits. Every operation except
// attention computes each row separately.
//
// Keys, values and states of sequences lie in blocks of one pool. A group of layers has a column of blocks for every
// BLOCK_TOKENS positions, or for a whole state; `Place` tells where a layer lies in the column of its group.
//
// Where attention looks both ways, a row needs the keys and values of later ones. Such a program has stages: each
// `attend` begins the next one, which may run when the stage before it has run for all rows of a sequence. Between two
// stages, a row's values stay in its KV block: `save` writes them, `load` and `attend` read them.
#pragma once

#include "attention.hpp"
#include "elements.hpp"
#include "product.hpp"
#include "recurrent.hpp"

namespace lockstep::native {

// Operations on the rows of buffers. `vector` is an index into Program::vectors.
//
//   embed      out = row `id` of the table * factor; + those of the `columns` rows of numbers at `vector` that is the
//              token's type; + row (position + offset) of the second weight, if there is one
//   norm       out = RMS norm of in, with epsilon and the weights at `vector`; if `centred`, the norm of its distances
//              from their mean, with the weights and then the biases at `vector`
//   quantise   out = in, as groups of int8 numbers
//   product    y = in times each of the weights in turn, side by side; + the biases at `vector`; / divisor;
//              then out = y, or out = out + y * factor if `adds`
//   gate       out = function(in times the first weight) * (in times the second one), or without the second factor if
//              there is one weight; the biases at `vector`, side by side, are added to the products
//   add        out = out + in * factor
//   attention  out = attention of queries, keys and values in `in`, with heads of `columns` dimensions. `num_norms` norms
//              of heads at `vector`: of queries, keys and values, in this order. Keys and values lie at `place`. By its
//              part, this only stores the keys and values of `in`; or it only attends, with the queries that are kept
//              from column in_at on; or `in` has only queries, which read the keys and values of another layer
//   scale      out = in * factor
//   cap        out = factor * tanh(in / factor)
//   multiply   out = function(in) * out
//   copy       out = in
//   scale_parts  each part of out = itself * its number in `in`
//   rates      out = betas and decays of a delta rule with `columns` value heads, of its inputs in `in` (`rates` of
//              recurrent.hpp). At `vector` are the rates, and then the biases
//   convolve   out = function(convolution of `columns` channels of in over `taps` rows). At `vector` are weights
//              [taps][columns], and then biases. The state lies at `place`
//   delta      out = the delta rule of Program::delta over in. The states of the value heads lie at the places from
//              `place` on
//   load       out = the row's kept columns from in_at on
//   save       the row's kept columns from out_at on = in
//
// Norms, multiply, copy and scale_parts process `heads` parts of `columns` columns, one by one. They begin `stride`
// columns apart in `in`, and lie side by side in `out`.
enum class Action : std::int32_t {
    embed, norm, quantise, product, gate, add, attention, load, save, multiply, copy, rates, convolve, delta, scale, cap,
    scale_parts
};
enum class Part : std::int32_t { whole, store, attend, read };

struct Op {
    Action action;
    std::int32_t in;         // a buffer of floats; -1: none
    std::int32_t in_groups;  // a buffer of groups, for weights in panels; -1: none
    std::int32_t out;
    std::int32_t in_at, out_at;  // the first column
    // Of operations of rows; of embed the number of token types; of attention a head's size; of rates the value heads; of
    // convolve the channels.
    std::int32_t columns;
    std::int32_t first_weight, num_weights;
    std::int32_t vector;  // -1: none
    std::int32_t place;   // the first one in Program::places
    // Of attention; rotary -1: heads are not rotated; sinks: scores in Program::vectors, -1: none; query_period: see Step.
    std::int32_t window, rotary, kv_heads, num_norms, sinks, query_period;
    std::int32_t adds, offset, centred;
    std::int32_t heads, stride, taps;
    Part part;
    Gate function;
    float epsilon, factor, divisor, scale, query_beta;  // the last two are of attention
};

constexpr int MAX_POSITION_COLUMNS = 1 << 13;  // of a table of positions
constexpr int MAX_TOKEN_TYPES = 1 << 10;
constexpr int MAX_GROUPS = 1 << 10, MAX_PARTS = 1 << 16;
constexpr std::int64_t MAX_BLOCK_BYTES = std::int64_t(1) << 30;

// Types of weights: kinds of panels; F32, F16 and BF16 as they are stored; and kinds of blocks as a file stores them, of
// which `embed` can read rows.
constexpr int NUM_TYPES = KINDS + 3 + KINDS;

struct Weight {
    std::int64_t type, features, columns;
    const void* data;
    std::int64_t bytes;

    bool is_packed() const { return type < KINDS; }
    bool is_stored_blocks() const { return type >= KINDS + 3; }
    int float_type() const { return int(type) - KINDS; }
    Kind stored_kind() const { return Kind(type - KINDS - 3); }
    std::int64_t panels() const { return (features + PANEL - 1) / PANEL; }
    Matrix matrix() const { return {Kind(type), features, columns, static_cast<const std::uint8_t*>(data)}; }
};

enum class Life : std::int32_t { step, rows };  // lifetime of a buffer: all rows of a step, or some rows temporarily

struct Buffer {
    std::int32_t columns;
    std::int32_t is_groups;  // else floats
    Life life;
    std::int32_t unused;

    std::int64_t row_bytes() const {
        return is_groups ? std::int64_t(columns + GROUP - 1) / GROUP * std::int64_t(sizeof(Numbers))
                         : std::int64_t(columns) * std::int64_t(sizeof(float));
    }
};

// Layers whose keys and values, or states, a sequence keeps in the same way.
struct Group {
    std::int32_t num_parts;  // blocks of a column
    std::int32_t window;     // positions that its layers see, where earlier columns may be missing; 0: all are there
    std::int32_t is_state;   // a sequence has one column, whose content changes with every token
};

// Frequencies of a rotation, in Program::vectors.
struct Rotary {
    std::int32_t vector, num_pairs;
    float factor;
};

struct Program {
    const Op* ops;
    std::int64_t num_ops, final_begin, head_begin;  // the body begins at 0
    const Weight* weights;
    std::int64_t num_weights;
    const Buffer* buffers;
    std::int64_t num_buffers;
    const float* vectors;
    std::int64_t num_vectors;  // numbers
    const Rotary* rotaries;
    std::int64_t num_rotaries;
    // Buffers: result of the body, its rows for the rest, and results. Without a head, there are no logits: -1.
    std::int32_t state, gathered, hidden, logits;
    std::int32_t heads, storage, vocab_size;
    std::int32_t kept;  // floats of each row that stay at the end of its block from stage to stage; 0: one stage
    const Group* groups;
    std::int64_t num_groups;  // the first one has all columns; a group of states is the last one
    const Place* places;
    std::int64_t num_places, block_bytes;
    DeltaShape delta;  // of all delta rules

    KVLayout layout(const Op& op) const { return {op.kv_heads, op.columns, Storage(storage)}; }
    std::int64_t kept_bytes() const { return kept * std::int64_t(sizeof(float)); }
    std::int64_t kept_at() const { return block_bytes - BLOCK_TOKENS * kept_bytes(); }
    // Groups with a window, which follow the first one.
    std::int64_t num_windows() const { return num_groups - 1 - (state_parts() > 0); }
    // Blocks of a state; 0: no layer has one.
    std::int32_t state_parts() const { return groups[num_groups - 1].is_state ? groups[num_groups - 1].num_parts : 0; }
};

// Checks a program. Returns nullptr, or an error message. A valid program never accesses memory that it does not name.
const char* fault_of(const Program&);

}  // namespace lockstep::native
