// Products: weights times rows of activations, and the order of their floating-point operations. Both have a scale for
// each group of 32 columns, so that a group's sum is one of integers, exact in any order. The rest of an output is a sum
// of floats over groups in ascending order:
//
//     acc = fma(float(sum of code * number), weight_scale * row_scale, acc)
//     acc = fma(weight_offset, row_scale * float(sum of numbers), acc)        of weights with offsets
//
// An output is therefore a function of its row of activations and its row of weights, whatever the tile, the number of
// rows, the thread and the instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lockstep::native {

constexpr int GROUP = 32;     // columns that share a scale
constexpr int PANEL = 32;     // output features that are stored side by side
constexpr int SUPER = 8;      // groups of a block of 256 columns
constexpr int MAX_TILE = 6;   // rows of activations that a kernel processes at once
constexpr int MAX_PRODUCT_COLUMNS = 1 << 20;
constexpr int MAX_PRODUCT_FEATURES = 1 << 24;

enum class Kind : int { q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k, q6_k, q3_k, iq4_nl, iq4_xs };
constexpr int KINDS = 11;

// One group of a row of activations.
struct Numbers {
    float scale;
    std::int16_t sums[2];  // of the first and the last sixteen numbers
    std::int8_t number[GROUP];
};
static_assert(sizeof(Numbers) == 40, "quantised rows are arrays of these");

// A panel has the groups of its 32 features one after the other. A group begins with its scales and then has the codes
// of all features: byte 4 f + c of a quad of columns is column c of feature f.
//
//   q8_0          scales f16[32]; codes 8 quads [128], the stored ones plus 128
//   q4_0, q4_1    scales f16[32] (offsets f16[32]); 4 x [128]: quad j in the low, quad j + 4 in the high half of a byte
//   q5_0, q5_1    the same, then [128] fifth bits: bit q of a byte is quad q's
//   q4_k, q5_k    factors u8[32] of scales, u8[32] of offsets, then as q4_1 and q5_1; before each eight groups the f16[32]
//                 that multiply them, those of offsets with their sign turned
//   q6_k          factors i8[32] of the first and i8[32] of the last sixteen columns; 4 x [128]; 2 x [128] upper bits: bits
//                 2 j and 2 j + 1 are those of quads j and j + 4; before each eight groups f16[32] scales
//   q3_k, iq4_xs  factors and scales as q6_k; 4 x [128] as q4_0. Both factors of iq4_xs are the same
//   iq4_nl        the same as q4_0; codes of it and of iq4_xs are places in TABLE
struct Layout {
    int bits;  // of a code
    int zero;  // the code of weight 0, or that of TABLE; 0 where there are offsets
    bool has_offsets, is_super;
    int block_columns, block_bytes;  // in a GGUF file

    constexpr bool has_table() const { return bits == 4 && zero == 128; }
    constexpr bool has_signed_factors() const { return is_super && !has_offsets; }  // one for each sixteen columns
    constexpr int high_bits() const { return bits == 8 ? 0 : bits - 4; }
    constexpr int codes_at() const { return is_super || !has_offsets ? 64 : 128; }
    constexpr int group_bytes() const { return codes_at() + (bits == 8 ? 1024 : 512 + 128 * high_bits()); }
    constexpr int super_bytes() const { return is_super ? (has_offsets ? 128 : 64) : 0; }
    constexpr std::int64_t panel_bytes(std::int64_t groups) const {
        return groups * group_bytes() + (is_super ? groups / SUPER * super_bytes() : 0);
    }
};

constexpr Layout LAYOUTS[KINDS] = {
    {8, 128, false, false, 32, 34}, {4, 8, false, false, 32, 18}, {4, 0, true, false, 32, 20},
    {5, 16, false, false, 32, 22},  {5, 0, true, false, 32, 24},  {4, 0, true, true, 256, 144},
    {5, 0, true, true, 256, 176},   {6, 32, false, true, 256, 210},
    {4, 4, false, true, 256, 110},  {4, 128, false, false, 32, 18}, {4, 128, false, true, 256, 136},
};
constexpr const Layout& layout_of(Kind kind) { return LAYOUTS[int(kind)]; }
constexpr int tile_rows(Kind kind) {
    return layout_of(kind).high_bits() || layout_of(kind).has_signed_factors() ? 4 : MAX_TILE;
}

// The values of IQ4_NL and IQ4_XS by code, plus 128.
constexpr std::uint8_t TABLE[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

// The part of the next panel that a tile prefetches.
struct Fetch {
    const std::uint8_t* next;
    int lines;  // of 64 bytes, for each group
};

struct Products {
    const char* name;
    // Converts one row of n columns to groups; the last group is padded with zeros.
    void (*quantise)(const float* x, std::int64_t n, Numbers* out);
    // Multiplies one panel with `rows` rows, 1 to tile_rows(kind), whose groups begin `stride` apart, into
    // out[rows][PANEL].
    void (*tile)(Kind kind, const std::uint8_t* panel, std::int64_t groups, const Numbers* x, std::int64_t stride,
                 int rows, float* out, Fetch fetch);
    // Rows of float weights, type as in FloatType, stored one after the other: out[row * out_stride + feature].
    void (*floats)(int type, const void* weights, std::int64_t features, std::int64_t columns, const float* x,
                   std::int64_t x_stride, std::int64_t rows, float* out, std::int64_t out_stride);
};

const Products* products_portable();
const Products* products_avx2();  // null if the source is not compiled for that instruction set
const Products* products_avx512();

struct Elements;
// The products of the same instruction set as a table of row operations; nullptr of nullptr.
const Products* find_products(const Elements*);

class Pool;

struct Matrix {
    Kind kind;
    std::int64_t features, columns;
    const std::uint8_t* panels;

    std::int64_t groups() const { return (columns + GROUP - 1) / GROUP; }
    std::int64_t count() const { return (features + PANEL - 1) / PANEL; }
    std::int64_t panel_bytes() const { return layout_of(kind).panel_bytes(groups()); }
};

constexpr int FETCH_FROM_ROWS = 5;  // with fewer rows, hardware prefetching is as good

// Multiplies one panel with rows, in tiles of almost equal size. Calls take(first row, rows) after each, whose outputs
// are in `result` [MAX_TILE][PANEL].
template <class F>
void each_tile(const Products& isa, const Matrix& w, std::int64_t panel, const Numbers* x, std::int64_t rows,
               float* result, const F& take) {
    const std::int64_t groups = w.groups(), bytes = w.panel_bytes(), most = tile_rows(w.kind);
    const std::int64_t tiles = (rows + most - 1) / most;
    const std::uint8_t* codes = w.panels + panel * bytes;
    const bool fetches = rows >= FETCH_FROM_ROWS && panel + 1 < w.count();
    const int lines = fetches ? int((bytes + 64 * groups * tiles - 1) / (64 * groups * tiles)) : 0;
    for (std::int64_t tile = 0, row = 0; tile < tiles; tile++) {
        const int now = int(rows / tiles + (tile < rows % tiles));
        isa.tile(w.kind, codes, groups, x + row * groups, groups, now, result,
                 {codes + bytes + tile * lines * groups * 64, lines});
        take(row, now);
        row += now;
    }
}

void quantise(const Products& isa, Pool* pool, const float* x, std::int64_t stride, std::int64_t rows,
              std::int64_t columns, Numbers* out);
void multiply(const Products& isa, Pool* pool, const Matrix& weights, const Numbers* x, std::int64_t rows, float* out,
              std::int64_t stride);
void multiply_floats(const Products& isa, Pool* pool, int type, const void* weights, std::int64_t features,
                     std::int64_t columns, const float* x, std::int64_t x_stride, std::int64_t rows, float* out,
                     std::int64_t stride);

}  // namespace lockstep::native
