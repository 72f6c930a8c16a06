// Runs a program (program.hpp) over the tokens of a step.
//
// With few rows threads share the features of each product; with many, each thread takes a block of rows from one
// attention to the next, so that what is between two products stays in its cache. No bit depends on either.
#pragma once

#include <memory>
#include <vector>

#include "program.hpp"
#include "threads.hpp"

namespace lockstep::native {

// A step: T tokens, and what is wanted of them.
struct StepInput {
    std::int64_t num_tokens;
    const std::int64_t* ids;      // [T]
    const std::int32_t* plan;     // as attention has it
    std::int64_t plan_size;
    std::uint8_t* cache;          // [num_blocks][num_layers][block_bytes]
    std::int64_t num_layers, num_blocks;
    std::int64_t num_hidden_rows;
    const std::int64_t* hidden_rows;  // tokens of which hidden states are wanted
    float* hidden;                    // [num_hidden_rows][hidden columns]
    std::int64_t hidden_size;         // floats that it holds
};

// Memory that begins at a cache line and grows.
class Memory {
public:
    Memory() = default;
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    ~Memory() { release(); }
    // At least so many bytes; what was there is lost. std::bad_alloc: there is none.
    std::uint8_t* reserve(std::int64_t bytes);


    std::uint8_t* data = nullptr;

private:
    void release();
    std::int64_t size = 0;
};

// A loaded program. One caller at a time.
class Forward {
public:
    // The program must have no fault; its weights stay where they are, everything else is copied. std::bad_alloc: there is
    // no memory.
    Forward(const Program&, const char* isa, Pool*);

    // Run the body, and make the hidden states that are wanted. nullptr, or what is wrong; then nothing was written.
    const char* step(const StepInput&);
    // Logits of some tokens of the latest step: [num_rows][vocab_size].
    const char* logits(const std::int64_t* rows, std::int64_t num_rows, float* out, std::int64_t out_size) const;

private:
    struct Span;
    const char* fault(const StepInput&) const;
    void prepare(const StepInput&);
    void run_segment(std::int64_t first, std::int64_t last);
    const char* attend(const Op&);
    template <class F>
    void run_rows(const std::int64_t* rows, std::int64_t num_rows, std::int64_t first, std::int64_t last, float* logits,
                  const F& take) const;
    void run_ops(std::int64_t first, std::int64_t last, const Span&) const;
    void one_row(const Op&, std::int64_t row, const Span&) const;
    void embed(const Op&, std::int64_t row, const Span&) const;
    void product(const Op&, const Span&) const;
    void gate(const Op&, const Span&) const;
    template <class F>
    void multiply_panel(const Op&, const Weight&, std::int64_t panel, const Span&, std::int64_t first, std::int64_t count,
                        const F& take) const;

    float* floats(std::int32_t buffer, std::int64_t row, const Span&) const;
    Numbers* groups(std::int32_t buffer, std::int64_t row, const Span&) const;
    std::uint8_t* at(std::int32_t buffer, std::int64_t row, const Span&) const;

    std::vector<Op> ops;
    std::vector<Weight> weights;
    std::vector<Buffer> buffers;
    std::vector<float> vectors;
    std::vector<Rotary> rotaries;
    Program program;  // its arrays are the ones above
    const Elements& elements;
    const Products& products;
    const AttentionKernel& kernel;
    Pool* pool;
    std::int64_t shared_rows;  // so many rows at most are computed with threads that share features
    std::int64_t area_row_bytes = 0;
    std::vector<std::int64_t> places;  // of buffers of short life, in an area, for each row that it has room for
    Memory areas;                      // one for each thread, or one for the rows that threads share
    std::vector<Memory> step_memory;   // of buffers that live for a step
    std::vector<std::vector<float>> turns;  // by rotation: [T][2 * num_pairs]
    StepInput input{};
    std::int64_t num_tokens = 0;  // of the latest step; 0: it failed
};

}  // namespace lockstep::native
