// A forward pass as data: the operations of a model in order, and the memory that they read and write. Python builds it
// (program.py), and `Forward` runs it.
//
// A program has three parts. The body computes the state after the last layer from the token ids of a step. The final
// part computes the hidden states of the requested rows, and the head computes their logits. Every operation except
// attention computes each row separately.
#pragma once

#include "attention.hpp"
#include "elements.hpp"
#include "product.hpp"

namespace lockstep::native {

// Operations on the rows of buffers. `vector` is an index into Program::vectors.
//
//   embed      out = row `id` of the table * factor
//   norm       out = RMS norm of in, with epsilon and the weights at `vector`
//   quantise   out = in, as groups of int8 numbers
//   product    y = in times each of the weights in turn, side by side; + the biases at `vector`; / divisor;
//              then out = y, or out = out + y * factor if `adds`
//   gate       out = function(in times the first weight) * (in times the second one)
//   add        out = out + in * factor
//   attention  out = attention of queries, keys and values in `in`, with norms of heads at `vector`
enum class Action : std::int32_t { embed, norm, quantise, product, gate, add, attention };
constexpr int ACTIONS = 7;

struct Op {
    Action action;
    std::int32_t in;         // a buffer of floats; -1: none
    std::int32_t in_groups;  // a buffer of groups, for weights in panels; -1: none
    std::int32_t out;
    std::int32_t in_at, out_at;  // the first column
    std::int32_t columns;        // of norm, quantise and add
    std::int32_t first_weight, num_weights;
    std::int32_t vector;  // -1: none
    std::int32_t layer, window, rotary;  // of attention; rotary -1: heads are not rotated
    std::int32_t adds;
    Gate function;
    float epsilon, factor, divisor, scale;  // scale: of attention scores
};

constexpr int NUM_TYPES = KINDS + 3;  // of weights: kinds of panels, then F32, F16 and BF16 as they are stored

struct Weight {
    std::int64_t type, features, columns;
    const void* data;
    std::int64_t bytes;

    bool is_packed() const { return type < KINDS; }
    int float_type() const { return int(type) - KINDS; }
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
    std::int32_t state, gathered, hidden, logits;  // buffers: result of the body, its rows for the rest, and results
    std::int32_t num_layers, heads, kv_heads, head_dim;
    std::int32_t storage, vocab_size;
};

// Checks a program. Returns nullptr, or an error message. A valid program never accesses memory that it does not name.
const char* fault_of(const Program&);

}  // namespace lockstep::native
