// Kernel of low-rank adapters over an instruction set's lanes; adapter_kernel_*.cpp instantiate it.
#pragma once

#include <type_traits>

#include "adapters.hpp"
#include "elements.hpp"

namespace lockstep::native {

template <class L>
struct AdapterLanes {
    using V = typename L::V;
    static constexpr int AHEAD = 1024;  // numbers of A that are fetched before they are needed
    static constexpr int ROWS = L::REGISTERS >= 32 ? ADAPTER_ROWS : 1;  // rows of a tile of sums that fits the registers

    template <FloatType T>
    static V load(const std::uint16_t* at) {
        return T == FloatType::f16 ? L::load_half(at) : L::load_brain(at);
    }

    // Sixteen numbers of a row from a column on; behind the last column they are zeros.
    template <bool IS_QUANTISED>
    static V numbers(const void* x, std::int64_t at, std::int64_t columns) {
        if constexpr (IS_QUANTISED) {
            const Numbers& group = static_cast<const Numbers*>(x)[at / GROUP];
            return L::mul(L::set(group.scale), L::load_byte(group.number + at % GROUP));
        }
        const float* row = static_cast<const float*>(x) + at;
        if (at + LANES <= columns) return L::load(row);
        alignas(64) float rest[LANES] = {};
        __builtin_memcpy(rest, row, std::size_t(columns - at) * sizeof(float));
        return L::load(rest);
    }

    template <FloatType T, bool IS_QUANTISED, int R>
    static void down_rows(const AdapterWeight& w, std::int64_t columns, const void* const* x, float* const* h) {
        const std::int64_t padded = (columns + GROUP - 1) / GROUP * GROUP;
        const std::int64_t last = IS_QUANTISED ? padded : (columns + LANES - 1) / LANES * LANES;
        for (std::int64_t block = 0; block < w.padded_rank(); block += RANK_UNIT) {
            const std::uint16_t* a = w.a + block * padded;
            V acc[R * RANK_UNIT];
            for (V& each : acc) each = L::zero();
            for (std::int64_t at = 0; at < last; at += LANES, a += RANK_UNIT * LANES) {
                for (int line = 0; line < 2; line++) __builtin_prefetch(a + AHEAD + line * 32);
                V weight[RANK_UNIT];
                for (int k = 0; k < RANK_UNIT; k++) weight[k] = load<T>(a + k * LANES);
                for (int r = 0; r < R; r++) {
                    const V number = numbers<IS_QUANTISED>(x[r], at, columns);
                    for (int k = 0; k < RANK_UNIT; k++) acc[r * RANK_UNIT + k] = L::fma(weight[k], number, acc[r * RANK_UNIT + k]);
                }
            }
            for (int r = 0; r < R; r++) L::fold(acc + r * RANK_UNIT, h[r] + block);
        }
    }

    template <FloatType T, int R>
    static void up_rows(const AdapterWeight& w, std::int64_t panel, const float* const* h, float* const* y) {
        const std::uint16_t* b = w.b + panel * w.rank * PANEL;
        V acc[R][2];
        for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = L::zero();
        for (std::int32_t k = 0; k < w.rank; k++, b += PANEL) {
            __builtin_prefetch(b + w.rank * PANEL);  // of the next panel
            const V first = load<T>(b), second = load<T>(b + LANES);
            for (int r = 0; r < R; r++) {
                const V lowered = L::set(h[r][k]);
                acc[r][0] = L::fma(first, lowered, acc[r][0]);
                acc[r][1] = L::fma(second, lowered, acc[r][1]);
            }
        }
        const V scale = L::set(w.scale);
        for (int r = 0; r < R; r++)
            for (int half = 0; half < 2; half++) {
                float* out = y[r] + half * LANES;
                L::store(out, L::add(L::load(out), L::mul(acc[r][half], scale)));
            }
    }

    // Calls f(a constant number of rows, first row) until all rows are done.
    template <class F>
    static void in_parts(int rows, F f) {
        int row = 0;
        if constexpr (ROWS >= 4)
            for (; row + 4 <= rows; row += 4) f(std::integral_constant<int, 4>{}, row);
        if constexpr (ROWS >= 2)
            for (; row + 2 <= rows; row += 2) f(std::integral_constant<int, 2>{}, row);
        for (; row < rows; row++) f(std::integral_constant<int, 1>{}, row);
    }

    template <FloatType T>
    static void down_as(const AdapterWeight& w, std::int64_t columns, bool is_quantised, const void* const* x, int rows,
                        float* const* h) {
        in_parts(rows, [&](auto count, int row) {
            constexpr int R = decltype(count)::value;
            if (is_quantised)
                down_rows<T, true, R>(w, columns, x + row, h + row);
            else
                down_rows<T, false, R>(w, columns, x + row, h + row);
        });
    }

    static void down(const AdapterWeight& w, std::int64_t columns, bool is_quantised, const void* const* x, int rows,
                     float* const* h) {
        if (FloatType(w.a_type) == FloatType::f16)
            down_as<FloatType::f16>(w, columns, is_quantised, x, rows, h);
        else
            down_as<FloatType::bf16>(w, columns, is_quantised, x, rows, h);
    }

    static void up(const AdapterWeight& w, std::int64_t panel, const float* const* h, int rows, float* const* y) {
        in_parts(rows, [&](auto count, int row) {
            constexpr int R = decltype(count)::value;
            if (FloatType(w.b_type) == FloatType::f16)
                up_rows<FloatType::f16, R>(w, panel, h + row, y + row);
            else
                up_rows<FloatType::bf16, R>(w, panel, h + row, y + row);
        });
    }

    static constexpr AdapterKernel kernel(const char* name) { return {name, down, up}; }
};

}  // namespace lockstep::native
