// Runs a program (program.hpp) over the tokens of a step.
//
// With few rows, threads share the features of each product. With many, each thread takes a block of rows from one
// attention to the next, so that the values between two products stay in its cache. No bit depends on this.
#pragma once

#include <memory>
#include <vector>

#include "adapters.hpp"
#include "program.hpp"
#include "threads.hpp"

namespace lockstep::native {

constexpr std::int64_t MAX_TOKENS = 1 << 20;  // of a step
constexpr std::int64_t BLOCK_ROWS = 48;       // rows that a thread takes through a part of the body

// Block tables of a group with a window.
struct WindowTables {
    const std::int32_t* plan;  // as StepInput::plan, with the tables of this group
    std::int64_t plan_size;
    const std::int32_t* first_columns;  // [S]: the column with which each table begins
};

// A step, or one stage of it: T tokens of S sequences, and the requested results.
struct StepInput {
    std::int64_t num_tokens;
    const std::int64_t* ids;      // [T]
    const std::int32_t* types;    // [T] token types; nullptr: all are 0
    const std::int32_t* plan;     // the format of attention.hpp
    std::int64_t plan_size;
    const WindowTables* windows;
    std::int64_t num_windows;
    // [S][2][blocks of a state]: the state before each sequence's tokens, and the one after them. Both are the same
    // blocks, or have none in common. -1 in the place of all blocks before: that state is zero.
    const std::int32_t* states;
    std::int64_t states_size;
    const std::int32_t* totals;   // total lengths of the sequences of a program with stages; else nullptr
    std::int64_t totals_size, stage;
    std::uint8_t* cache;          // [num_blocks][block_bytes]: the layers, and what rows keep
    std::int64_t block_bytes, num_blocks;
    std::int64_t num_hidden_rows;
    const std::int64_t* hidden_rows;  // tokens whose hidden states are requested
    float* hidden;                    // [num_hidden_rows][hidden columns]
    std::int64_t hidden_size;         // size in floats
    const std::int32_t* adapters;     // [T] slots of adapters, 0: none; nullptr: no token has one
};

// Growing memory that begins at a cache line.
class Memory {
public:
    Memory() = default;
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    ~Memory() { release(); }
    // Grows to at least this many bytes; the previous content is lost. std::bad_alloc: out of memory.
    std::uint8_t* reserve(std::int64_t bytes);


    std::uint8_t* data = nullptr;

private:
    void release();
    std::int64_t size = 0;
};

// A loaded program. One caller at a time.
class Forward {
public:
    // The program must be valid. Its weights are not copied and must not move; everything else is copied.
    // std::bad_alloc: out of memory.
    Forward(const Program&, const char* isa, Pool*);

    // Runs a stage of the body, and after the last one computes the requested hidden states. Returns nullptr, or an error
    // message; then nothing was written.
    const char* step(const StepInput&);
    // Logits of some tokens of the latest step: [num_rows][their columns].
    const char* logits(const std::int64_t* rows, std::int64_t num_rows, float* out, std::int64_t out_size) const;
    // The head's results for vectors in the place of hidden states: [num_rows][hidden columns].
    const char* project(const float* vectors, std::int64_t size, std::int64_t num_rows, float* out, std::int64_t out_size) const;

    // See Adapters. Between two steps.
    const char* load_adapter(std::int64_t slot, const AdapterWeight* of_slot, std::int64_t count);
    const char* unload_adapter(std::int64_t slot) { return adapters.unload(slot); }

private:
    // Rows of a step that are computed together: the first one and their number; their short-lived buffers, and for how
    // many rows these have room; the destination of logits; and the threads that share the work.
    struct Span {
        std::int64_t first, count;
        std::uint8_t* area;
        std::int64_t room;
        float* logits;
        Pool* pool;
        bool has_tokens = false;  // true for rows of a step, which may have adapters
    };

    const char* fault(const StepInput&) const;
    const char* tables_fault(const StepInput&) const;
    const char* adapters_fault(const StepInput&) const;
    void group_by_adapter(const StepInput&);
    Step step_of(std::int32_t group, const StepInput&) const;
    void prepare(const StepInput&);
    std::int64_t num_chunks(std::int64_t tokens) const;
    std::int64_t chunk_begin(std::int64_t chunk, std::int64_t tokens) const;
    void run_segment(std::int64_t first, std::int64_t last);
    void lower(const Op&, const Span&) const;
    void adapt(const Op&, std::int64_t number, std::int64_t panel, std::int64_t first, std::int64_t count, float* y) const;
    Workers workers() const;
    States states_of(const StepInput&) const;
    const char* attend(const Op&);
    void recur(const Op&);
    template <class F, class G>
    void run_rows(std::int64_t num_rows, std::int64_t first, std::int64_t last, float* logits, const F& put,
                  const G& take) const;
    void gather(const std::int64_t* rows, std::int64_t count, const Span&) const;
    void turn_positions(const std::int32_t* totals, std::int64_t num_sequences);
    void run_ops(std::int64_t first, std::int64_t last, const Span&) const;
    void one_row(const Op&, std::int64_t row, const Span&) const;
    void embed(const Op&, std::int64_t row, const Span&) const;
    void store(const Op&, const float* x, std::int64_t row) const;
    void one_part(const Op&, const float* x, float* out) const;
    void row_of(const Weight& table, std::int64_t index, float factor, float* out) const;
    float* kept(std::int64_t row) const;
    void product(const Op&, const Span&) const;
    void gate(const Op&, const Span&) const;
    template <class F>
    void multiply_panel(const Op&, const Weight&, std::int64_t panel, const Span&, std::int64_t first, std::int64_t count,
                        const F& take) const;
    template <class F>
    void multiply_base(const Op&, const Weight&, std::int64_t panel, const Span&, std::int64_t first, std::int64_t count,
                       const F& take) const;

    float* floats(std::int32_t buffer, std::int64_t row, const Span&) const;
    Numbers* groups(std::int32_t buffer, std::int64_t row, const Span&) const;
    std::uint8_t* at(std::int32_t buffer, std::int64_t row, const Span&) const;

    std::vector<Op> ops;
    std::vector<Weight> weights;
    std::vector<Buffer> buffers;
    std::vector<float> vectors;
    std::vector<Rotary> rotaries;
    std::vector<Group> groups_of_layers;
    std::vector<Place> places_in_blocks;
    Program program;  // its arrays are the ones above
    const Elements& elements;
    const Products& products;
    const AttentionKernel& kernel;
    const RecurrentKernel& recurrent;
    Pool* pool;
    std::int64_t shared_rows;  // up to this many rows, threads share features
    std::int64_t area_row_bytes = 0;
    std::vector<std::int64_t> places;  // of short-lived buffers, in an area, for each row that it has room for
    Memory areas;                      // one for each thread, or one for the rows that threads share
    std::vector<Memory> step_memory;   // of buffers that exist for a step
    std::vector<std::vector<float>> turns;  // by rotation: [T][2 * num_pairs]; with stages: by position
    std::int64_t num_stages, positions;      // positions: rows of the table of positions
    struct RowPlace {
        std::int32_t block, position;
    };
    std::vector<RowPlace> row_places;  // [T], of a program with stages
    Adapters adapters;
    StepInput input{};
    std::int64_t num_tokens = 0;  // of the latest step; 0: it failed
};

}  // namespace lockstep::native
