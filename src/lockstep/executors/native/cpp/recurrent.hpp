// Recurrent operations: layers whose state is of a fixed size for each sequence and changes with every token.
//
// The promise: a row is a function of the state before its chunk and of the chunk's rows up to it, bit for bit, whatever
// else is computed beside it. Recurrences run token by token, and each of their operations has one order. So a sequence
// gives the same bits whole, in chunks of any sizes, and token by token.
//
//   convolution   y[t] = function(bias + w[0] x[t - taps + 1] + ... + w[taps - 1] x[t]), channel by channel, by `fma` in
//                 this order. The state is the last taps - 1 inputs, the oldest first.
//   delta rule    for each value head, with the state S [key_dim][value_dim], S' = decay * S, and u = (v - decay * S^T k)
//                 * beta: S = fma(k, u, S'), y = S^T q. Both sums run over the key's dimensions by `fma`, ascending, from
//                 0 on. This is the gated delta rule (Yang, Kautz and Hatamizadeh, 2024).
//
// A state's source blocks are never written, unless the target blocks are the same ones.
#pragma once

#include "attention.hpp"
#include "elements.hpp"

namespace lockstep::native {

constexpr int MAX_TAPS = 64;
constexpr int MAX_STATE_DIM = 1024;  // of keys and values of a delta rule
constexpr int MAX_STATE_HEADS = 1024;
constexpr int CHANNELS = 512;   // of a convolution that one thread takes at a time
constexpr int PLACE_UNIT = 4;   // offsets in blocks are multiples of this

// Where a layer's keys and values, or a piece of its state, lie in a column.
struct Place {
    std::int32_t group, part;  // part: block of the column
    std::int64_t offset;       // first byte in the block
};

// The states of a step's S sequences.
struct States {
    std::int64_t num_sequences, num_parts, num_blocks, block_bytes;
    const std::int32_t* begins;  // [S + 1]: where each sequence's rows begin
    const std::int32_t* blocks;  // [S][2][num_parts]: those before the step, -1 for a state of zeros, and those after it
    std::uint8_t* cache;         // [num_blocks][block_bytes]

    const std::int32_t* of(std::int64_t sequence) const { return blocks + 2 * num_parts * sequence; }
    float* at(std::int32_t block, const Place& place) const {
        return reinterpret_cast<float*>(cache + block * block_bytes + place.offset);
    }
    // nullptr: zeros.
    const float* before(std::int64_t sequence, const Place& place) const {
        const std::int32_t block = of(sequence)[place.part];
        return block < 0 ? nullptr : at(block, place);
    }
    float* after(std::int64_t sequence, const Place& place) const {
        return at(of(sequence)[num_parts + place.part], place);
    }
};

// A causal convolution of all rows of a step.
struct Convolution {
    const float* x;  // [T], rows x_stride apart
    float* out;      // [T], rows out_stride apart
    std::int64_t x_stride, out_stride, channels;
    const float* weights;  // [taps][channels]
    const float* bias;     // nullptr: none
    std::int64_t taps;     // from 2 on
    Gate function;         // silu or identity
    Place place;           // [taps - 1][channels]
};

struct DeltaShape {
    std::int32_t key_heads, value_heads, key_dim, value_dim;
    // Value head v reads key head v / (value_heads / key_heads) or, if this is not 0, v % key_heads.
    std::int32_t is_tiled;

    std::int64_t keys() const { return std::int64_t(key_heads) * key_dim; }
    std::int64_t values() const { return std::int64_t(value_heads) * value_dim; }
    std::int64_t channels() const { return 2 * keys() + values(); }
    std::int64_t columns() const { return channels() + 2 * std::int64_t(value_heads); }
    std::int64_t piece_bytes() const { return std::int64_t(key_dim) * value_dim * std::int64_t(sizeof(float)); }
    std::int32_t key_head(std::int32_t head) const {
        return is_tiled ? head % key_heads : head / (value_heads / key_heads);
    }
};

// The delta rule over all rows of a step.
struct DeltaRule {
    DeltaShape shape;
    const float* x;  // [T]: queries, keys and values of all heads, then the betas and the decays of value heads
    float* out;      // [T][value_heads][value_dim]
    std::int64_t x_stride, out_stride;
    const Place* places;  // [value_heads]: [key_dim][value_dim]
};

// Some channels of one sequence.
struct ConvolutionTile {
    const float* x;
    float* out;
    std::int64_t x_stride, out_stride, rows, count;
    const float *weights, *bias;
    std::int64_t weights_stride, taps;
    Gate function;
    const float* before;
    float* after;
    std::int64_t state_stride;
};

// Some value columns of one head of one sequence.
struct DeltaTile {
    const float *queries, *keys, *values, *betas, *decays;  // of the first row, the others x_stride apart
    float* out;
    std::int64_t x_stride, out_stride, rows;
    int key_dim, count;
    const float* before;  // nullptr: zeros
    float* after;
    std::int64_t state_stride;
};

// The functions of an instruction set. All instruction sets give the same bits.
struct RecurrentKernel {
    const char* name;
    void (*convolve)(const ConvolutionTile&);
    void (*delta)(const DeltaTile&);
};

extern const RecurrentKernel recurrent_portable, recurrent_avx2, recurrent_avx512;

// The kernel of an instruction set by its name ("" for the best one); nullptr: this processor does not support it.
const RecurrentKernel* find_recurrent(const char* name);

// Betas and decays of `heads` value heads: out = the logistic functions of b, then e^(rate * log(1 + e^(a + bias))).
// x has b and a; numbers the rates and the biases. In doubles, and the results rounded.
void rates(const float* x, const float* numbers, std::int64_t heads, float* out);

// Checks the table of states of a step of this many rows. Returns nullptr, or an error message.
const char* states_fault(const States&, std::int64_t num_rows);

// Check the shapes of operations, and the place of a piece of a state of so many bytes. Buffers are the caller's to check.
const char* convolution_fault(std::int64_t channels, std::int64_t taps, Gate function);
const char* delta_fault(const DeltaShape&);
const char* place_fault(const Place&, std::int64_t bytes, std::int64_t num_parts, std::int64_t block_bytes);

// Compute a step's rows and states. All arguments must have been checked.
void convolve(const Convolution&, const States&, const RecurrentKernel&, const Workers&);
void delta_rule(const DeltaRule&, const States&, const RecurrentKernel&, const Workers&);

}  // namespace lockstep::native
