// Low-rank adapters (LoRA) of products. A row of a step may have an adapter, which changes an output y of a base's weight:
//
//     h[k] = the sum of A[k][c] * x[c] over columns, by fma in sixteen lanes and the tree of bits.hpp
//     y    = y + scale * acc, both operations rounded, with acc = fma(B[f][k], h[k], acc) for k in ascending order
//
// directly after the base's product: before biases, divisors, activations and residuals. x is the input of the base's
// product: floats, or of weights in panels scale * number of each group of the quantised row. A row without an adapter
// is not touched.
#pragma once

#include <memory>
#include <vector>

#include "product.hpp"

namespace lockstep::native {

constexpr int MAX_ADAPTERS = 1 << 12;
constexpr int MAX_ADAPTER_RANK = 512;
constexpr int RANK_UNIT = 4;      // rows of A that are stored side by side
constexpr int ADAPTER_ROWS = 4;   // rows that a kernel processes at once

// The change of one weight of a program. Numbers have 16 bits and begin at a cache line:
//
//   a   [rank / 4][columns / 16][4][16], where rank and columns (to a multiple of 32) are filled with zeros
//   b   [panels][rank][32], features filled with zeros
struct AdapterWeight {
    std::int32_t weight, rank;    // the index of the weight in Program::weights
    std::int32_t a_type, b_type;  // of FloatType: f16 or bf16
    float scale;
    std::int32_t unused;
    const std::uint16_t *a, *b;
    std::int64_t a_bytes, b_bytes;

    std::int64_t padded_rank() const { return (rank + RANK_UNIT - 1) / RANK_UNIT * std::int64_t(RANK_UNIT); }
};

// Rows of a step with the same adapter.
struct AdapterTile {
    std::int32_t slot, count;
    std::int32_t rows[ADAPTER_ROWS];
};

// The functions of an instruction set, for 1 to ADAPTER_ROWS rows. All instruction sets give the same bits.
struct AdapterKernel {
    const char* name;
    // h of rows x, which are floats or Numbers: padded_rank() numbers each.
    void (*down)(const AdapterWeight&, std::int64_t columns, bool is_quantised, const void* const* x, int rows, float* const* h);
    // Adds to the outputs y [PANEL] of one panel of each row.
    void (*up)(const AdapterWeight&, std::int64_t panel, const float* const* h, int rows, float* const* y);
};

extern const AdapterKernel adapters_portable, adapters_avx2, adapters_avx512;

// The kernel of an instruction set by its name ("" for the best one); nullptr: this processor does not support it.
const AdapterKernel* find_adapter_kernel(const char* name);

struct Program;

// The adapters of a program by slot, and the rows of a step that use them. Slot 0 stands for none.
class Adapters {
public:
    explicit Adapters(const char* isa) : kernel(*find_adapter_kernel(isa)) {}

    // Fills an empty slot. The numbers are not copied and must not move until the slot is empty. Returns nullptr, or an
    // error message; then nothing was changed.
    const char* load(const Program&, std::int64_t slot, const AdapterWeight* weights, std::int64_t count);
    const char* unload(std::int64_t slot);
    bool has(std::int64_t slot) const { return slot > 0 && slot < std::int64_t(slots.size()) && !slots[slot].empty(); }

    // Groups the rows of a step by slot, chunk by chunk. `begins` are the chunks' first rows, and the number of rows.
    void group(const std::int32_t* slots_of_rows, const std::vector<std::int64_t>& begins);
    void group_none() { tiles.clear(); }
    // The tiles of whole chunks from row `first` on.
    const AdapterTile* tiles_of(std::int64_t first, std::int64_t count, std::int64_t& num_tiles) const;
    // The change of a weight by a slot; nullptr: none.
    const AdapterWeight* find(std::int32_t slot, std::int64_t weight) const {
        const AdapterWeight& found = slots[slot][weight];
        return found.rank ? &found : nullptr;
    }
    // h of a row for the weight of that number in its operation.
    float* lowered(std::int64_t row, std::int64_t number) const { return h.get() + (row * num_parts + number) * max_rank; }

    const AdapterKernel& kernel;

private:
    std::vector<std::vector<AdapterWeight>> slots;  // by slot and weight; rank 0: not changed
    std::int64_t max_rank = 0, num_parts = 1;       // of all adapters; the most weights of an operation
    std::vector<AdapterTile> tiles;
    std::vector<std::int64_t> tiles_at;  // by first row of a chunk: its first tile
    std::unique_ptr<float[]> h;  // [T][num_parts][max_rank]
    std::int64_t size = 0;       // of h
};

}  // namespace lockstep::native
