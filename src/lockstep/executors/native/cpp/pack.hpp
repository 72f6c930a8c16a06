// Packing: writes the weights of a GGUF file, block by block, as panels of product.hpp. Nothing is rounded: a panel has
// the codes, scales and offsets of the file, in another order.
#pragma once

#include "product.hpp"

namespace lockstep::native {

// Converts rows of `features` weights, stored one after the other as blocks, to panels; columns are whole blocks.
// Unused features of the last panel get codes and scales of 0.
void pack(Kind kind, const std::uint8_t* blocks, std::int64_t features, std::int64_t columns, std::uint8_t* panels);

// Converts one row of packed weights to floats [columns]: (code - zero) * scale + offset, with at most two roundings.
void unpack_row(const Matrix& weights, std::int64_t feature, float* out);

// Bytes of one row of weights as a file stores them; columns are whole blocks.
std::int64_t stored_row_bytes(Kind kind, std::int64_t columns);

// Converts one row of weights as a file stores them to the same floats.
void read_row(Kind kind, const std::uint8_t* blocks, std::int64_t columns, float* out);

}  // namespace lockstep::native
