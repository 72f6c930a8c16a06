// Portable product kernel: the reference of the other kernels, one number at a time.
#include <algorithm>

#include "lanes_portable.hpp"
#include "product_common.hpp"

namespace lockstep::native {
namespace {

struct Group : Portable {
    // Rounds x to the nearest integer, ties to even; |x| is below 2^22.
    static int nearest(float x) {
        const float shifted = x + 0x1.8p23f;
        return int(with_bits<std::uint32_t>(shifted) & 0x7fffff) - 0x400000;
    }
    static void group(const float* x, Numbers& out) {
        std::int32_t largest = 0;
        for (int i = 0; i < GROUP; i++)
            largest = std::max(largest, std::int32_t(with_bits<std::uint32_t>(x[i]) & 0x7fffffff));
        const Scale scale = scale_of(largest);
        out.scale = scale.scale;
        for (int half = 0; half < 2; half++) {
            int sum = 0;
            for (int i = half * 16; i < half * 16 + 16; i++) {
                const int number = scale.inverse > 0.f ? nearest(x[i] * scale.inverse) : 0;
                out.number[i] = std::int8_t(number), sum += number;
            }
            out.sums[half] = std::int16_t(sum);
        }
    }
};

float half(const std::uint8_t* at) { return Portable::widened(std::uint16_t(at[0] | at[1] << 8)); }

// Codes of one feature of a group, columns in ascending order.
void codes_of(const Layout& layout, const std::uint8_t* codes, int feature, int (&out)[GROUP]) {
    for (int column = 0; column < GROUP; column++) {
        const int quad = column / 4, at = feature * 4 + column % 4;
        if (layout.bits == 8) {
            out[column] = codes[quad * 128 + at];
            continue;
        }
        out[column] = codes[quad % 4 * 128 + at] >> quad / 4 * 4 & 15;
        if (layout.has_table()) out[column] = TABLE[out[column]];
        if (layout.high_bits() == 1) out[column] |= (codes[512 + at] >> quad & 1) << 4;
        if (layout.high_bits() == 2) out[column] |= (codes[512 + quad / 4 * 128 + at] >> quad % 4 * 2 & 3) << 4;
    }
}

// acc plus one group of one row, with the feature's codes.
float plus_group(const Layout& layout, const std::uint8_t* group, const std::uint8_t* super, int feature,
                 const int (&codes)[GROUP], const Numbers& x, float acc) {
    int dots[2] = {};
    for (int i = 0; i < GROUP; i++) dots[i / 16] += (codes[i] - layout.zero) * x.number[i];
    const float scale = half((layout.is_super ? super : group) + feature * 2);
    if (layout.has_signed_factors()) {
        const int dot = dots[0] * std::int8_t(group[feature]) + dots[1] * std::int8_t(group[PANEL + feature]);
        return __builtin_fmaf(float(dot), scale * x.scale, acc);
    }
    const float factor = layout.is_super ? scale * float(group[feature]) : scale;
    acc = __builtin_fmaf(float(dots[0] + dots[1]), factor * x.scale, acc);
    if (!layout.has_offsets) return acc;
    const float stored = half((layout.is_super ? super : group) + 2 * PANEL + feature * 2);
    const float offset = layout.is_super ? stored * float(group[PANEL + feature]) : stored;
    return __builtin_fmaf(offset, x.scale * float(x.sums[0] + x.sums[1]), acc);
}

void tile(Kind kind, const std::uint8_t* panel, std::int64_t groups, const Numbers* x, std::int64_t stride, int rows,
          float* out, Fetch) {
    const Layout& layout = layout_of(kind);
    for (int i = 0; i < rows * PANEL; i++) out[i] = 0.f;
    const std::uint8_t* super = nullptr;
    for (std::int64_t g = 0; g < groups; g++, panel += layout.group_bytes()) {
        if (layout.is_super && g % SUPER == 0) super = panel, panel += layout.super_bytes();
        for (int feature = 0; feature < PANEL; feature++) {
            int codes[GROUP];
            codes_of(layout, panel + layout.codes_at(), feature, codes);
            for (int r = 0; r < rows; r++) {
                float& acc = out[r * PANEL + feature];
                acc = plus_group(layout, panel, super, feature, codes, x[r * stride + g], acc);
            }
        }
    }
}

const Products table = {"portable", quantise_row<Group>, tile, float_products<Portable>};

}  // namespace

const Products* products_portable() { return &table; }

}  // namespace lockstep::native
