// Attention over paged KV blocks: a step of one layer, the memory layout of a block, and the interface of a kernel.
//
// The promise: a row (one query head of one token) is a function of its query and of the keys and values before it, bit
// for bit, whatever else is computed beside it, in whatever tile, on however many threads. So the order of every sum is
// fixed by positions alone: a score sums over the head's dimensions, ascending; keys are taken in segments that begin
// at multiples of SEGMENT_TOKENS; within one, values are summed by ascending position; segments are folded in that
// order.
#pragma once

#include "bits.hpp"

namespace lockstep::native {

constexpr int BLOCK_TOKENS = 32;     // tokens of a KV block
constexpr int SEGMENT_TOKENS = 128;  // affects bits: a change must increase BITS_VERSION
constexpr int SEGMENT_BLOCKS = SEGMENT_TOKENS / BLOCK_TOKENS;
constexpr int MAX_ROWS = 12;  // rows of a tile
constexpr int MAX_HEAD_DIM = 512;
constexpr int HEAD_DIM_UNIT = 8;  // head sizes are multiples of this

// A head's size in the kernels' own arrays: a multiple of the lanes.
constexpr int padded(int head_dim) { return (head_dim + LANES - 1) / LANES * LANES; }

enum class Storage : int { f32, f16, int8 };

// A block holds its KV heads one after the other; a head its keys [BLOCK_TOKENS / LANES][head_dim][LANES], its values
// [BLOCK_TOKENS][head_dim] and, in int8, their scales: keys' [BLOCK_TOKENS] and values' [BLOCK_TOKENS], f32.
struct KVLayout {
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

// A query or a key as the product computed it, with its RMS norm and then its rotation, which are applied first.
struct Raw {
    const float* x;       // [head_dim]
    const float* norm;    // [head_dim]: the norm's weights; nullptr: no norm
    const float* rotary;  // [rotary_dim]: cosines of the pairs (i, i + rotary_dim / 2), then their sines
    int rotary_dim;       // leading dimensions that are rotated
    float epsilon;        // of the norm
};

// Rows of one sequence and one KV head. Row r sees the keys at positions begin[r] to end[r] - 1.
struct Tile {
    KVLayout layout;
    const std::uint8_t* cache;   // the head's part of block 0
    std::int64_t block_stride;   // see Step
    const std::int32_t* blocks;  // the sequence's table, from the layer's first block on
    int num_parts;               // blocks of a column
    int first_column, num_columns;  // the first one of the table, and the number of those up to the last one
    const std::uint8_t* next[SEGMENT_BLOCKS];  // the keys to be fetched while the last segment is computed
    float scale;
    int num_rows;
    Raw queries[MAX_ROWS];
    int begin[MAX_ROWS], end[MAX_ROWS];
};

// A row's softmax over some segments: the sum of its weights 2^(score - peak), and of values times weights. A weight
// below zero means that there is no segment yet; then the other fields are undefined.
struct Share {
    float peak, weight;
    float* values;  // [padded(head_dim)]
};

// The functions of an instruction set. All instruction sets give the same bits.
struct AttentionKernel {
    const char* name;
    int max_rows;  // of a tile, as many as fit into the registers
    void (*store)(const KVLayout&, const Raw& key, const Raw& value, std::uint8_t* head, int slot);
    void (*attend)(const Tile&, int first_segment, int last_segment, Share* rows);
    void (*fold)(Share& total, const Share& next, int head_dim);
};

extern const AttentionKernel attention_portable, attention_avx2, attention_avx512;

// The kernel of an instruction set by its name ("" for the best one); nullptr: this processor does not support it.
const AttentionKernel* find_attention(const char* name);

// Distributes a step's items: `run` calls item(work, i) for each i below count, in any order, on any threads, and
// returns when all calls have returned. Results do not depend on it.
struct Workers {
    int threads;
    void (*run)(void* pool, std::int64_t count, void (*item)(void* work, std::int64_t i), void* work);
    void* pool;
};

// One layer of a step: T tokens of S sequences. If their total lengths are given, attention looks both ways.
struct Step {
    KVLayout layout;
    // window, 0: none. Without total lengths, a row sees at most so many keys, itself included; with them, at most half
    // as many on each side of it.
    int heads, window, rotary_dim;
    float scale, epsilon;
    // A table has num_parts blocks for every BLOCK_TOKENS positions, of which the layer has the one number `part`.
    int num_parts, part;
    int num_norms, only_reads;  // only_reads: rows have queries only, and another layer stored the keys and values
    std::int64_t num_tokens, num_blocks, plan_size;
    const float* projected;  // [T][heads + 2 * kv_heads][head_dim]: queries, keys, values
    const float* rotary;     // [T][rotary_dim]; with total lengths: by position
    const float* norms;      // [num_norms][head_dim]: of queries, keys and values, as far as these have any
    // S; [S] tokens already in the blocks; [S + 1] where each sequence's tokens begin; [S + 1] where its block table
    // begins; all tables, one after the other.
    const std::int32_t* plan;
    const std::int32_t* first_columns;  // [S]: the column with which each table begins; nullptr: the first one
    std::uint8_t* cache;        // [num_blocks], each of block_bytes
    std::int64_t block_stride;  // bytes from one of them to the next; other layers' blocks are in between
    float* out;                 // [T][heads][head_dim]
    const std::int32_t* totals;  // [S], and the table of each sequence is as long; nullptr: attention is causal
    // Queries of the tokens in their blocks, of which all keys and values are there, so that this only attends:
    // [num_blocks][BLOCK_TOKENS], each token's `query_stride` bytes after the one before, blocks apart as the cache is.
    // nullptr: queries are projected, and keys and values are stored first.
    const std::uint8_t* queries;
    std::int64_t query_stride;
    std::int64_t projected_size, rotary_size, norms_size, cache_bytes, out_size, totals_size, queries_bytes;  // of arrays
};

// Checks plan, tables and total lengths of a step, without its memory. Returns nullptr, or an error message.
const char* plan_fault(const Step&);

// Writes the step's keys and values to their blocks, and attends. Returns nullptr, or an error message; then nothing
// was read or written.
const char* attention(const Step&, const AttentionKernel&, const Workers&);

}  // namespace lockstep::native
