// Kernels of recurrent.hpp over an instruction set's lanes; each recurrent_kernel_*.cpp instantiates them.
#pragma once

#include "elementwise.hpp"
#include "recurrent.hpp"

namespace lockstep::native {

namespace {
alignas(64) constexpr float ZEROS[CHANNELS] = {};
}

template <class L>
struct Recurrent {
    using V = typename L::V;
    using M = Math<L>;

    // -- convolution --------------------------------------------------------------------------------------------------

    static void convolve(const ConvolutionTile& tile) {
        tile.function == Gate::silu ? convolve_all<Gate::silu>(tile) : convolve_all<Gate::identity>(tile);
    }

    // The row of inputs at an index from the chunk's first row on, which may lie before it.
    static const float* input(const ConvolutionTile& tile, std::int64_t index) {
        if (index >= 0) return tile.x + index * tile.x_stride;
        return tile.before ? tile.before + (index + tile.taps - 1) * tile.state_stride : ZEROS;
    }

    template <Gate F>
    static void convolve_all(const ConvolutionTile& tile) {
        const int taps = int(tile.taps);
        for (std::int64_t row = 0; row < tile.rows; row++) {
            const float* x[MAX_TAPS];
            for (int i = 0; i < taps; i++) x[i] = input(tile, row - taps + 1 + i);
            Row<L>::map(tile.count, tile.out + row * tile.out_stride, [&](std::int64_t c, auto lanes) {
                V y = tile.bias ? lanes.load(tile.bias + c) : L::zero();
                const float* weights = tile.weights + c;
                for (int i = 0; i < taps; i++, weights += tile.weights_stride)
                    y = L::fma(lanes.load(weights), lanes.load(x[i] + c), y);
                return Elementwise<L>::gated(F, y);
            });
        }
        // A later row never depends on an earlier one of the new state, so both states may be the same.
        for (int i = 0; i < taps - 1; i++)
            __builtin_memmove(tile.after + i * tile.state_stride, input(tile, tile.rows - taps + 1 + i),
                              std::size_t(tile.count) * sizeof(float));
    }

    // -- delta rule ---------------------------------------------------------------------------------------------------

    // Columns that are processed at once, in vectors. Over many rows, their part of the state stays in the L1 cache; over
    // a single one, the state is read once from memory, in whole lines.
    static constexpr int MANY = 2, ONE = L::REGISTERS >= 32 ? 8 : 4;

    // sums = S^T k.
    template <int N>
    static void sums(const float* state, std::int64_t stride, const float* keys, int key_dim, V* out) {
        V sum[N];
        for (int n = 0; n < N; n++) sum[n] = L::zero();
        for (int d = 0; d < key_dim; d++, state += stride) {
            const V key = L::set(keys[d]);
            for (int n = 0; n < N; n++) sum[n] = L::fma(key, L::load(state + n * LANES), sum[n]);
        }
        for (int n = 0; n < N; n++) out[n] = sum[n];
    }

    // One token: reads a state, writes the next one, gives the output, and in the same pass `sums` of the next token's
    // key. The last state of a chunk has canonical NaN.
    template <int N, bool HAS_NEXT>
    static void token(const float* state, std::int64_t stride, float* to, std::int64_t to_stride, int key_dim,
                      const float* queries, const float* keys, const float* next_keys, V decay, const V* changes, V* out,
                      V* next) {
        V y[N], z[N], u[N];
        for (int n = 0; n < N; n++) y[n] = z[n] = L::zero(), u[n] = changes[n];
        for (int d = 0; d < key_dim; d++, state += stride, to += to_stride) {
            const V key = L::set(keys[d]), query = L::set(queries[d]);
            const V next_key = HAS_NEXT ? L::set(next_keys[d]) : L::zero();
            for (int n = 0; n < N; n++) {
                const V s = L::fma(key, u[n], L::mul(L::load(state + n * LANES), decay));
                y[n] = L::fma(query, s, y[n]);
                if (HAS_NEXT) z[n] = L::fma(next_key, s, z[n]);
                L::store(to + n * LANES, HAS_NEXT ? s : M::canonical(s));
            }
        }
        for (int n = 0; n < N; n++) out[n] = y[n], next[n] = z[n];
    }

    // All rows for N vectors of columns from `at` on. `local` has room for the state between two rows.
    template <int N, class Lanes>
    static void columns(const DeltaTile& tile, int at, const float* before, std::int64_t before_stride, float* after,
                        std::int64_t after_stride, float* local, Lanes lanes) {
        V sum[N], out[N];
        sums<N>(before, before_stride, tile.keys, tile.key_dim, sum);
        for (std::int64_t row = 0; row < tile.rows; row++) {
            const std::int64_t x = row * tile.x_stride;
            const V decay = L::set(tile.decays[x]), beta = L::set(tile.betas[x]);
            V change[N];
            for (int n = 0; n < N; n++) {
                const V value = lanes.load(tile.values + x + at + n * LANES);
                change[n] = L::mul(L::sub(value, L::mul(decay, sum[n])), beta);
            }
            const bool is_last = row + 1 == tile.rows;
            const float *queries = tile.queries + x, *keys = tile.keys + x, *next = keys + tile.x_stride;
            const float* from = row ? local : before;
            const std::int64_t stride = row ? N * LANES : before_stride;
            if (is_last)
                token<N, false>(from, stride, after, after_stride, tile.key_dim, queries, keys, nullptr, decay, change,
                                out, sum);
            else
                token<N, true>(from, stride, local, N * LANES, tile.key_dim, queries, keys, next, decay, change, out,
                               sum);
            for (int n = 0; n < N; n++)
                lanes.store(tile.out + row * tile.out_stride + at + n * LANES, M::canonical(out[n]));
        }
    }

    template <int N>
    static int whole_columns(const DeltaTile& tile, int at) {
        alignas(64) float local[MAX_STATE_DIM * MANY * LANES];
        for (; at + N * LANES <= tile.count; at += N * LANES) {
            const float* before = tile.before ? tile.before + at : ZEROS;
            columns<N>(tile, at, before, tile.before ? tile.state_stride : 0, tile.after + at, tile.state_stride, local,
                       typename Row<L>::Whole{});
        }
        return at;
    }

    // The last columns, fewer than a vector has: with a copy of their part of the state.
    static void last_columns(const DeltaTile& tile, int at) {
        alignas(64) float local[MAX_STATE_DIM * LANES];
        const typename Row<L>::Part lanes{tile.count - at};
        for (int d = 0; d < tile.key_dim; d++)
            L::store(local + d * LANES, tile.before ? lanes.load(tile.before + d * tile.state_stride + at) : L::zero());
        columns<1>(tile, at, local, LANES, local, LANES, local, lanes);
        for (int d = 0; d < tile.key_dim; d++)
            lanes.store(tile.after + d * tile.state_stride + at, L::load(local + d * LANES));
    }

    static void delta(const DeltaTile& tile) {
        int at = 0;
        if (tile.rows == 1) at = whole_columns<ONE>(tile, at);
        at = whole_columns<MANY>(tile, at);
        at = whole_columns<1>(tile, at);
        if (at < tile.count) last_columns(tile, at);
    }

    static constexpr RecurrentKernel kernel(const char* name) { return {name, convolve, delta}; }
};

}  // namespace lockstep::native
