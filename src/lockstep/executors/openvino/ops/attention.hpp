// Attention over paged KV blocks: what a step of one layer is, how a block lies in memory, and what a kernel offers.
//
// The promise: a row (one query head of one token) is a function of its query and of the keys and values before it, bit
// for bit, whatever else is computed beside it, in whatever tile, on however many threads. So the order of every sum is
// fixed by positions alone: a score sums over the head's dimensions, ascending; keys are taken in segments that begin
// at multiples of SEGMENT_TOKENS; within one, values are summed by ascending position; segments are folded in that
// order.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lockstep {

constexpr int LANES = 16;            // keys whose scores are computed side by side
constexpr int BLOCK_TOKENS = 32;     // tokens of a KV block, as in OpenVINO's own operator
constexpr int SEGMENT_TOKENS = 128;  // changes bits: whoever raises it gets another environment (VERSION)
constexpr int SEGMENT_BLOCKS = SEGMENT_TOKENS / BLOCK_TOKENS;
constexpr int MAX_ROWS = 12;  // rows of a tile
constexpr int MAX_HEAD_DIM = 256;
constexpr int VERSION = 1;  // raised with every change of bits or layout

enum class Storage : int { f32, f16, int8 };

// A block holds its KV heads one after the other; a head its keys [BLOCK_TOKENS / LANES][head_dim][LANES], its values
// [BLOCK_TOKENS][head_dim] and, in int8, their scales: keys' [BLOCK_TOKENS] and values' [BLOCK_TOKENS], f32.
struct Layout {
    int kv_heads, head_dim;
    Storage storage;

    std::size_t element_bytes() const { return storage == Storage::f32 ? 4 : storage == Storage::f16 ? 2 : 1; }
    std::size_t values() const { return std::size_t(BLOCK_TOKENS) * head_dim * element_bytes(); }
    std::size_t scales() const { return 2 * values(); }
    std::size_t head_bytes() const {
        return scales() + (storage == Storage::int8 ? 2 * BLOCK_TOKENS * sizeof(float) : 0);
    }
    std::size_t block_bytes() const { return kv_heads * head_bytes(); }
};

// Rows of one sequence and one KV head. Row r sees the keys at positions begin[r] to end[r] - 1.
struct Tile {
    Layout layout;
    const std::uint8_t* cache;   // the head's part of block 0
    const std::int32_t* blocks;  // the sequence's table
    int num_blocks;
    const std::uint8_t* next[SEGMENT_BLOCKS];  // the keys to be fetched while the last segment is computed
    float scale;
    int num_rows;
    const float* queries[MAX_ROWS];
    int begin[MAX_ROWS], end[MAX_ROWS];
};

// A row's softmax over some segments: the sum of its weights 2^(score - peak), and of values times weights. A weight
// below zero: no segment yet, and whatever is in the others means nothing.
struct Share {
    float peak, weight;
    float* values;  // [head_dim]
};

// What an instruction set implements. Every implementation gives the same bits.
struct Kernel {
    const char* name;
    int max_rows;  // of a tile, for which there are registers
    void (*store)(const Layout&, const float* key, const float* value, std::uint8_t* head, int slot);
    void (*attend)(const Tile&, int first_segment, int last_segment, Share* rows);
    void (*fold)(Share& total, const Share& next, int head_dim);
};

extern const Kernel avx512_kernel, avx2_kernel, portable_kernel;

// The best one for this processor, or the one named by `name` ("" for the best); nullptr: it has not what that takes.
const Kernel* find_kernel(const char* name);

// One layer of a step: T tokens of S sequences.
struct Step {
    Layout layout;
    int heads, window;  // window: keys that a row sees at most, itself included; 0: all
    float scale;
    std::int64_t num_tokens, num_sequences, num_blocks, num_table_entries;
    const float *queries, *keys, *values;  // [T][heads or kv_heads][head_dim]
    const std::int32_t* past;              // [S]: tokens already in the blocks
    const std::int32_t* begins;            // [S + 1]: where each sequence's tokens begin
    const std::int32_t* blocks;            // all tables, one after the other
    const std::int32_t* table_begins;      // [S + 1]
    std::uint8_t* cache;                   // [num_blocks][block_bytes]
    float* out;                            // [T][heads][head_dim]
};

// Write the step's keys and values to their blocks, and attend. Returns nullptr, or what is wrong with the step; then
// nothing was read or written.
const char* attention(const Step&, const Kernel&);

}  // namespace lockstep
