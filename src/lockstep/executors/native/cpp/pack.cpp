// Packing: decodes GGUF blocks (Q8_0, Q4_0, Q4_K and others) into groups, and writes groups as panels.
#include "pack.hpp"

#include <algorithm>
#include <cstring>

namespace lockstep::native {
namespace {

// One group of one feature, as stored in a file. The formats are ggml's (ggml-common.h).
struct Stored {
    std::uint8_t code[GROUP];
    std::uint8_t factors[2];        // of scale and offset, or of the scales of both halves
    std::uint8_t scale[2], offset[2];  // f16
};

// Element i in the low half of byte i, element i + 16 in the high half.
void nibbles(const std::uint8_t* at, std::uint8_t* code) {
    for (int i = 0; i < 16; i++) code[i] = at[i] & 15, code[i + 16] = at[i] >> 4;
}

void fifth_bits(const std::uint8_t* at, std::uint8_t* code) {
    for (int i = 0; i < GROUP; i++) code[i] |= (at[i / 8] >> i % 8 & 1) << 4;
}

// Q4_K and Q5_K: eight scales and eight minima of six bits in twelve bytes.
void six_bits(const std::uint8_t* at, int group, std::uint8_t* factors) {
    if (group < 4) {
        factors[0] = at[group] & 63, factors[1] = at[group + 4] & 63;
    } else {
        factors[0] = (at[group + 4] & 15) | at[group - 4] >> 6 << 4;
        factors[1] = at[group + 4] >> 4 | at[group] >> 6 << 4;
    }
}

// Q3_K: factor i of sixteen columns, of six bits in twelve bytes, with the zero point 32.
std::uint8_t q3_factor(const std::uint8_t* at, int i) {
    const int low = at[i % 8] >> i / 8 * 4 & 15, high = at[8 + i % 4] >> i / 4 * 2 & 3;
    return std::uint8_t((low | high << 4) - 32);
}

void read(Kind kind, const std::uint8_t* block, int group, Stored& to) {
    const auto halves = [&](const std::uint8_t* at, bool has_offset) {
        std::memcpy(to.scale, at, 2);
        if (has_offset) std::memcpy(to.offset, at + 2, 2);
    };
    switch (kind) {
        case Kind::q8_0:
            halves(block, false);
            for (int i = 0; i < GROUP; i++) to.code[i] = block[2 + i] ^ 0x80;
            break;
        case Kind::q4_0:
        case Kind::q4_1:
            halves(block, kind == Kind::q4_1);
            nibbles(block + (kind == Kind::q4_1 ? 4 : 2), to.code);
            break;
        case Kind::q5_0:
        case Kind::q5_1: {
            const std::uint8_t* bits = block + (kind == Kind::q5_1 ? 4 : 2);
            halves(block, kind == Kind::q5_1);
            nibbles(bits + 4, to.code);
            fifth_bits(bits, to.code);
            break;
        }
        case Kind::q4_k:
        case Kind::q5_k: {
            halves(block, true);
            to.offset[1] ^= 0x80;  // a minimum is subtracted
            six_bits(block + 4, group, to.factors);
            const std::uint8_t* low = block + (kind == Kind::q5_k ? 48 : 16) + group / 2 * 32;
            for (int i = 0; i < GROUP; i++) to.code[i] = low[i] >> group % 2 * 4 & 15;
            if (kind == Kind::q5_k)
                for (int i = 0; i < GROUP; i++) to.code[i] |= (block[16 + i] >> group & 1) << 4;
            break;
        }
        case Kind::q6_k: {
            const int half = group / 4, run = group % 4;
            const std::uint8_t *low = block + half * 64 + run % 2 * 32, *high = block + 128 + half * 32;
            for (int i = 0; i < GROUP; i++)
                to.code[i] = (low[i] >> run / 2 * 4 & 15) | (high[i] >> run * 2 & 3) << 4;
            to.factors[0] = block[192 + group * 2], to.factors[1] = block[193 + group * 2];
            std::memcpy(to.scale, block + 208, 2);
            break;
        }
        case Kind::q3_k: {
            const std::uint8_t* low = block + 32 + group / 4 * 32;
            for (int i = 0; i < GROUP; i++) to.code[i] = (low[i] >> group % 4 * 2 & 3) | (block[i] >> group & 1) << 2;
            for (int half = 0; half < 2; half++) to.factors[half] = q3_factor(block + 96, group * 2 + half);
            std::memcpy(to.scale, block + 108, 2);
            break;
        }
        case Kind::iq4_nl:
            halves(block, false);
            nibbles(block + 2, to.code);
            break;
        case Kind::iq4_xs: {
            const int low = block[4 + group / 2] >> group % 2 * 4 & 15, high = block[2 + group / 4] >> group % 4 * 2 & 3;
            to.factors[0] = to.factors[1] = std::uint8_t((low | high << 4) - 32);
            halves(block, false);
            nibbles(block + 8 + group * 16, to.code);
            break;
        }
    }
}

// Writes position `feature` of a group, and of the scales before it if there are any.
void write(const Layout& layout, const Stored& from, int feature, std::uint8_t* group, std::uint8_t* super) {
    std::uint8_t* halves = layout.is_super ? super : group;  // of a block: once, before its first group
    if (halves) {
        std::memcpy(halves + feature * 2, from.scale, 2);
        if (layout.has_offsets) std::memcpy(halves + 2 * PANEL + feature * 2, from.offset, 2);
    }
    if (layout.is_super) group[feature] = from.factors[0], group[PANEL + feature] = from.factors[1];
    std::uint8_t* codes = group + layout.codes_at();
    for (int column = 0; column < GROUP; column++) {
        const int quad = column / 4, at = feature * 4 + column % 4, code = from.code[column];
        if (layout.bits == 8) {
            codes[quad * 128 + at] = std::uint8_t(code);
            continue;
        }
        codes[quad % 4 * 128 + at] |= (code & 15) << quad / 4 * 4;
        if (layout.high_bits() == 1) codes[512 + at] |= (code >> 4) << quad;
        if (layout.high_bits() == 2) codes[512 + quad / 4 * 128 + at] |= (code >> 4) << quad % 4 * 2;
    }
}

}  // namespace

void pack(Kind kind, const std::uint8_t* blocks, std::int64_t features, std::int64_t columns, std::uint8_t* panels) {
    const Layout& layout = layout_of(kind);
    const std::int64_t groups = columns / GROUP, in_block = layout.block_columns / GROUP;
    const std::int64_t row_bytes = stored_row_bytes(kind, columns);
    for (std::int64_t first = 0; first < features; first += PANEL) {
        std::uint8_t* at = panels;
        panels += layout.panel_bytes(groups);
        std::memset(at, 0, std::size_t(layout.panel_bytes(groups)));
        const int count = int(std::min<std::int64_t>(PANEL, features - first));
        for (std::int64_t group = 0; group < groups; group++, at += layout.group_bytes()) {
            std::uint8_t* super = layout.is_super && group % SUPER == 0 ? at : nullptr;
            if (super) at += layout.super_bytes();
            for (int feature = 0; feature < count; feature++) {
                Stored stored;
                const std::uint8_t* block =
                    blocks + (first + feature) * row_bytes + group / in_block * layout.block_bytes;
                read(kind, block, int(group % in_block), stored);
                write(layout, stored, feature, at, super);
            }
        }
    }
}

namespace {

float half_at(const std::uint8_t* at) {
    _Float16 half;
    std::memcpy(&half, at, sizeof half);
    return float(half);
}

// The code of column k of a group of one feature.
int code_of(const Layout& layout, const std::uint8_t* group, int feature, int k) {
    const int quad = k / 4;
    const std::uint8_t* at = group + layout.codes_at() + 4 * feature + k % 4;
    if (layout.bits == 8) return at[quad * 128];
    const int low = at[quad % 4 * 128] >> (quad / 4 * 4) & 15;
    if (layout.has_table()) return TABLE[low];
    if (layout.high_bits() == 0) return low;
    if (layout.high_bits() == 1) return low | (at[512] >> quad & 1) << 4;
    return low | (at[512 + quad / 4 * 128] >> (quad % 4 * 2) & 3) << 4;
}

}  // namespace

void unpack_row(const Matrix& w, std::int64_t feature, float* out) {
    const Layout& layout = layout_of(w.kind);
    const std::uint8_t *group = w.panels + feature / PANEL * w.panel_bytes(), *super = nullptr;
    const int f = int(feature % PANEL);
    for (std::int64_t g = 0; g < w.groups(); g++, group += layout.group_bytes()) {
        if (layout.is_super && g % SUPER == 0) super = group, group += layout.super_bytes();
        const float whole = half_at((layout.is_super ? super : group) + 2 * f);
        float offset = layout.has_offsets ? half_at((layout.is_super ? super : group) + 2 * PANEL + 2 * f) : 0.f;
        if (layout.is_super && layout.has_offsets) offset *= float(group[PANEL + f]);
        for (int k = 0; k < GROUP && g * GROUP + k < w.columns; k++) {
            float scale = whole;
            if (layout.has_signed_factors()) scale *= float(std::int8_t(group[k / 16 * PANEL + f]));
            else if (layout.is_super) scale *= float(group[f]);
            out[g * GROUP + k] = float(code_of(layout, group, f, k) - layout.zero) * scale + offset;
        }
    }
}

std::int64_t stored_row_bytes(Kind kind, std::int64_t columns) {
    return columns / layout_of(kind).block_columns * layout_of(kind).block_bytes;
}

void read_row(Kind kind, const std::uint8_t* blocks, std::int64_t columns, float* out) {
    const Layout& layout = layout_of(kind);
    const std::int64_t in_block = layout.block_columns / GROUP;
    for (std::int64_t g = 0; g < columns / GROUP; g++, out += GROUP) {
        Stored stored;
        read(kind, blocks + g / in_block * layout.block_bytes, int(g % in_block), stored);
        const float whole = half_at(stored.scale);
        float offset = layout.has_offsets ? half_at(stored.offset) : 0.f;
        if (layout.is_super && layout.has_offsets) offset *= float(stored.factors[1]);
        for (int k = 0; k < GROUP; k++) {
            float scale = whole;
            if (layout.has_signed_factors()) scale *= float(std::int8_t(stored.factors[k / 16]));
            else if (layout.is_super) scale *= float(stored.factors[0]);
            const int code = layout.has_table() ? TABLE[stored.code[k]] : stored.code[k];
            out[k] = float(code - layout.zero) * scale + offset;
        }
    }
}

}  // namespace lockstep::native
