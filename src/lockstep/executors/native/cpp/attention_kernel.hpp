// Attention kernel: scores, softmax and sums of values for one tile, over an instruction set's lanes. Each
// attention_kernel_*.cpp instantiates it.
#pragma once

#include <cfloat>

#include "attention.hpp"
#include "elementwise.hpp"

namespace lockstep::native {

constexpr std::size_t LINE = 64;  // bytes of a cache line

namespace {
float rounded(float x) { return (x + SHIFT) - SHIFT; }
int lesser(int a, int b) { return a < b ? a : b; }
int greater(int a, int b) { return a > b ? a : b; }
int clamped(int x, int low, int high) { return lesser(greater(x, low), high); }
template <int R>
int least(const int* x) {
    int found = x[0];
    for (int r = 1; r < R; r++) found = lesser(found, x[r]);
    return found;
}
template <int R>
int most(const int* x) {
    int found = x[0];
    for (int r = 1; r < R; r++) found = greater(found, x[r]);
    return found;
}
}  // namespace

// Sixteen stored keys or values as floats.
template <class L, Storage S>
inline typename L::V load_stored(const std::uint8_t* at, std::size_t index) {
    if constexpr (S == Storage::f32) return L::load(reinterpret_cast<const float*>(at) + index);
    if constexpr (S == Storage::f16) return L::load_half(reinterpret_cast<const std::uint16_t*>(at) + index);
    if constexpr (S == Storage::int8) return L::load_byte(reinterpret_cast<const std::int8_t*>(at) + index);
}

// 2^x for x <= 0, and 2^-126 for all that is less: the integral part goes into the exponent, the rest through a
// polynomial of least relative error on [-1/2, 1/2] (8e-8 with its rounding).
template <class L>
inline typename L::V exp2(typename L::V x) {
    const auto shift = L::set(SHIFT);
    x = L::max(L::set(-126.f), x);
    auto whole = L::sub(L::add(x, shift), shift);
    auto part = L::sub(x, whole);
    auto y = L::fma(L::set(0.00015345811f), part, L::set(0.00133999309f));
    y = L::fma(y, part, L::set(0.00961848907f));
    y = L::fma(y, part, L::set(0.0555032864f));
    y = L::fma(y, part, L::set(0.240226462f));
    y = L::fma(y, part, L::set(0.693147182f));
    y = L::fma(y, part, L::set(1.f));
    return L::mul(y, L::power(whole));
}

// The last eight elements of a row whose size is not a multiple of sixteen, padded with zeros.
template <class L, Storage S>
inline typename L::V load_eight(const std::uint8_t* at, std::size_t index) {
    constexpr std::size_t bytes = S == Storage::f32 ? 4 : S == Storage::f16 ? 2 : 1;
    alignas(64) std::uint8_t lanes[LANES * bytes] = {};
    __builtin_memcpy(lanes, at + index * bytes, HEAD_DIM_UNIT * bytes);
    return load_stored<L, S>(lanes, 0);
}

template <class L>
inline float total_of(typename L::V x) {
    alignas(64) float lanes[LANES];
    L::store(lanes, x);
    return sum_of(lanes);
}

template <class L>
inline float largest_of(typename L::V x) {
    alignas(64) float lanes[LANES];
    L::store(lanes, x);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
    return lanes[0];
}

// Keys and values of one segment, by block, and the keys that the next one will read.
struct Segment {
    int number;
    const std::uint8_t* keys[SEGMENT_TOKENS / LANES];  // groups of sixteen
    const std::uint8_t* values[SEGMENT_BLOCKS];
    const std::uint8_t* next[SEGMENT_BLOCKS];  // keys
};

template <class L, Storage S>
struct Attend {
    using V = typename L::V;
    static constexpr int GROUPS = BLOCK_TOKENS / LANES;
    static constexpr int SUMS = L::REGISTERS * 3 / 4;  // registers for sums; the others hold factors
    static constexpr std::size_t ELEMENT = S == Storage::f32 ? 4 : S == Storage::f16 ? 2 : 1;

    static const std::uint8_t* head_of(const Tile& tile, int column) {
        const std::int64_t at = std::int64_t(column - tile.first_column) * tile.num_parts;
        return tile.cache + tile.blocks[at] * tile.block_stride;
    }

    // Prefetches a line to the L2 cache, since L1 is too small for a segment's keys and values.
    static void fetch(const std::uint8_t* at) { __builtin_prefetch(at, 0, 2); }

    // Scores of R rows against N groups of keys, in units of the softmax's exponent. `to_values`: from a group of keys
    // to the values of the same tokens, which are fetched meanwhile.
    template <int R, int N>
    static void scores(const float* queries, const std::uint8_t* const* keys, std::size_t to_values, int dim,
                       float* out) {
        V sum[R][N];
        for (int r = 0; r < R; r++)
            for (int n = 0; n < N; n++) sum[r][n] = L::zero();
        for (int d = 0; d < dim; d++) {
            const std::size_t index = std::size_t(d) * LANES;
            V key[N];
            for (int n = 0; n < N; n++) key[n] = load_stored<L, S>(keys[n], index);
            if (index * ELEMENT % LINE == 0)
                for (int n = 0; n < N; n++) fetch(keys[n] + to_values + index * ELEMENT);
            for (int r = 0; r < R; r++) {
                V query = L::set(queries[d * R + r]);
                for (int n = 0; n < N; n++) sum[r][n] = L::fma(query, key[n], sum[r][n]);
            }
        }
        for (int r = 0; r < R; r++)
            for (int n = 0; n < N; n++) L::store(out + r * SEGMENT_TOKENS + n * LANES, sum[r][n]);
    }

    // Add to R rows' dimensions from `at`, N vectors of them, the values of the segment's tokens `from` to `to` - 1
    // times their weights. The next segment's keys, which take as much room, are fetched meanwhile.
    template <int R, int N, bool EIGHT = false>
    static void values(const float* weights, const Segment& segment, int dim, int at, int from, int to, Share* rows) {
        V sum[R][N];
        for (int r = 0; r < R; r++)
            for (int n = 0; n < N; n++) sum[r][n] = L::load(rows[r].values + at + n * LANES);
        for (int token = from; token < to; token++) {
            const int block = token / BLOCK_TOKENS;
            const std::size_t index = std::size_t(token % BLOCK_TOKENS) * dim + at;
            V value[N];
            for (int n = 0; n < N; n++)
                value[n] = EIGHT ? load_eight<L, S>(segment.values[block], index)
                                 : load_stored<L, S>(segment.values[block], index + n * LANES);
            for (std::size_t n = 0; n < N * LANES * ELEMENT; n += LINE)
                fetch(segment.next[block] + index * ELEMENT + n);
            for (int r = 0; r < R; r++) {
                V weight = L::set(weights[r * SEGMENT_TOKENS + token]);
                for (int n = 0; n < N; n++) sum[r][n] = L::fma(weight, value[n], sum[r][n]);
            }
        }
        for (int r = 0; r < R; r++)
            for (int n = 0; n < N; n++) L::store(rows[r].values + at + n * LANES, sum[r][n]);
    }

    // The same for all dimensions, as many at once as fit into the registers.
    template <int R>
    static void all_values(const float* weights, const Segment& segment, int dim, int from, int to, Share* rows) {
        if (from >= to) return;
        int at = 0;
        if constexpr (8 * R <= SUMS)
            for (; at + 8 * LANES <= dim; at += 8 * LANES) values<R, 8>(weights, segment, dim, at, from, to, rows);
        if constexpr (4 * R <= SUMS)
            for (; at + 4 * LANES <= dim; at += 4 * LANES) values<R, 4>(weights, segment, dim, at, from, to, rows);
        if constexpr (2 * R <= SUMS)
            for (; at + 2 * LANES <= dim; at += 2 * LANES) values<R, 2>(weights, segment, dim, at, from, to, rows);
        for (; at + LANES <= dim; at += LANES) values<R, 1>(weights, segment, dim, at, from, to, rows);
        if (at < dim) values<R, 1, true>(weights, segment, dim, at, from, to, rows);
    }

    // Shares of one segment for R rows, of which row r sees the segment's tokens from[r] to to[r] - 1.
    template <int R>
    static void attend_segment(const Tile& tile, const Segment& segment, const float* queries, const int* from,
                               const int* to, Share* rows) {
        const int dim = tile.layout.head_dim;
        const int first = least<R>(from), last = most<R>(to);
        alignas(64) float weights[R * SEGMENT_TOKENS];
        constexpr int N = SUMS / R > 8 ? 8 : SUMS / R > 1 ? SUMS / R : 1;
        int group = first / LANES;
        for (; (group + N - 1) * LANES < last; group += N)
            scores<R, N>(queries, segment.keys + group, tile.layout.values(), dim, weights + group * LANES);
        for (; group * LANES < last; group++)
            scores<R, 1>(queries, segment.keys + group, tile.layout.values(), dim, weights + group * LANES);
        for (int r = 0; r < R; r++) {
            soften(tile, segment.number, weights + r * SEGMENT_TOKENS, from[r], to[r], rows[r]);
            for (int d = 0; d < dim; d += LANES) L::store(rows[r].values + d, L::zero());
        }
        // Tokens that all rows see are loaded once for all rows. A row never reads tokens that it does not see, not
        // even with a weight of zero, since a later token may contain NaN.
        const int begin = most<R>(from), end = greater(begin, least<R>(to));
        for (int r = 0; r < R; r++)
            all_values<1>(weights + r * SEGMENT_TOKENS, segment, dim, from[r], lesser(begin, to[r]), rows + r);
        all_values<R>(weights, segment, dim, begin, end, rows);
        for (int r = 0; r < R; r++)
            all_values<1>(weights + r * SEGMENT_TOKENS, segment, dim, greater(end, from[r]), to[r], rows + r);
    }

    // Finds the segment's tokens `from` to `to` - 1.
    static Segment segment_of(const Tile& tile, int number, bool is_last, int from, int to) {
        Segment segment;
        segment.number = number;
        for (int b = from / BLOCK_TOKENS; b * BLOCK_TOKENS < to; b++) {
            const std::uint8_t* head = head_of(tile, number * SEGMENT_BLOCKS + b);
            segment.values[b] = head + tile.layout.values();
            for (int g = 0; g < GROUPS; g++) segment.keys[b * GROUPS + g] = head + g * (tile.layout.values() / GROUPS);
            const int next = lesser((number + 1) * SEGMENT_BLOCKS + b, tile.num_columns - 1);
            segment.next[b] = is_last ? tile.next[b] : head_of(tile, next);
        }
        return segment;
    }

    // Converts the scores of a row to the weights of its values; tokens that it does not see get zero.
    static void soften(const Tile& tile, int number, float* scores, int from, int to, Share& row) {
        alignas(64) float seen[LANES];
        const int first = from / LANES, last = (to + LANES - 1) / LANES;
        V peak = L::set(-__builtin_inff());
        for (int g = first; g < last; g++) {
            if constexpr (S == Storage::int8)
                L::store(scores + g * LANES, L::mul(L::load(scores + g * LANES), scales(tile, number, g, 0)));
            if (g * LANES < from || (g + 1) * LANES > to)
                for (int i = 0; i < LANES; i++)
                    if (g * LANES + i < from || g * LANES + i >= to) scores[g * LANES + i] = -__builtin_inff();
            peak = L::max(peak, L::load(scores + g * LANES));
        }
        row.peak = largest_of<L>(peak);
        const V highest = L::set(row.peak);
        V sum = L::zero();
        for (int g = first; g < last; g++) {
            V weight = exp2<L>(L::sub(L::load(scores + g * LANES), highest));
            L::store(scores + g * LANES, weight);
            if (g * LANES < from || (g + 1) * LANES > to) {
                for (int i = 0; i < LANES; i++)
                    seen[i] = g * LANES + i >= from && g * LANES + i < to ? scores[g * LANES + i] : 0.f;
                L::store(scores + g * LANES, L::load(seen));
                weight = L::load(seen);
            }
            sum = L::add(sum, weight);
            if constexpr (S == Storage::int8) L::store(scores + g * LANES, L::mul(weight, scales(tile, number, g, 1)));
        }
        row.weight = total_of<L>(sum);
    }

    // Scales of a group of keys (`which` 0) or values (1).
    static V scales(const Tile& tile, int number, int group, int which) {
        const std::uint8_t* head = head_of(tile, number * SEGMENT_BLOCKS + group / GROUPS);
        return L::load(reinterpret_cast<const float*>(head + tile.layout.scales()) + which * BLOCK_TOKENS +
                       group % GROUPS * LANES);
    }

    template <int R>
    static void some_rows(const Tile& tile, int at, int first_segment, int last_segment, Share* rows) {
        const int dim = tile.layout.head_dim;
        alignas(64) float queries[R * MAX_HEAD_DIM], sums[R * MAX_HEAD_DIM];
        Share shares[R];
        for (int r = 0; r < R; r++) {
            shares[r].values = sums + r * padded(dim);
            rows[r].weight = -1.f;
            alignas(64) float query[MAX_HEAD_DIM];
            prepare(tile.queries[at + r], dim, query);
            for (int d = 0; d < dim; d++) queries[d * R + r] = query[d] * tile.scale;
        }
        for (int number = first_segment; number < last_segment; number++) {
            int from[R], to[R];
            for (int r = 0; r < R; r++) {
                from[r] = clamped(tile.begin[at + r] - number * SEGMENT_TOKENS, 0, SEGMENT_TOKENS);
                to[r] = clamped(tile.end[at + r] - number * SEGMENT_TOKENS, 0, SEGMENT_TOKENS);
            }
            const Segment segment = segment_of(tile, number, number + 1 == last_segment, least<R>(from), most<R>(to));
            attend_segment<R>(tile, segment, queries, from, to, shares);
            for (int r = 0; r < R; r++)
                if (from[r] < to[r]) fold(rows[r], shares[r], dim);
        }
    }

    static void attend(const Tile& tile, int first_segment, int last_segment, Share* rows) {
        int at = 0;
        while (at < tile.num_rows) {
            const int left = tile.num_rows - at;
            auto some = [&](auto function, int count) {
                function(tile, at, first_segment, last_segment, rows + at);
                at += count;
            };
            if (left >= 12 && L::REGISTERS >= 32)
                some(some_rows<12>, 12);
            else if (left >= 8 && L::REGISTERS >= 32)
                some(some_rows<8>, 8);
            else if (left >= 6)
                some(some_rows<6>, 6);
            else if (left >= 4)
                some(some_rows<4>, 4);
            else if (left >= 3)
                some(some_rows<3>, 3);
            else if (left >= 2)
                some(some_rows<2>, 2);
            else
                some(some_rows<1>, 1);
        }
    }

    // Adds a later segment's share to a row's total.
    static void fold(Share& total, const Share& next, int dim) {
        if (next.weight < 0) return;
        if (total.weight < 0) {
            total.peak = next.peak, total.weight = next.weight;
            for (int d = 0; d < dim; d += LANES) L::store(total.values + d, L::load(next.values + d));
            return;
        }
        const float peak = total.peak > next.peak ? total.peak : next.peak;
        const V before = exp2<L>(L::set(total.peak - peak)), after = exp2<L>(L::set(next.peak - peak));
        alignas(64) float weight[LANES];
        L::store(weight, L::fma(L::set(next.weight), after, L::mul(L::set(total.weight), before)));
        total.peak = peak, total.weight = weight[0];
        for (int d = 0; d < dim; d += LANES)
            L::store(total.values + d,
                     L::fma(L::load(next.values + d), after, L::mul(L::load(total.values + d), before)));
    }

    // Normalises and rotates a query or key, with zeros up to padded(dim).
    static void prepare(const Raw& raw, int dim, float* __restrict out) {
        Row<L>::each(dim, [&](std::int64_t d, auto lanes) { L::store(out + d, lanes.load(raw.x + d)); });
        if (raw.norm) {
            V sum = L::zero();
            for (int d = 0; d < dim; d += LANES) sum = L::fma(L::load(out + d), L::load(out + d), sum);
            const V scale = L::set(1.f / __builtin_sqrtf(total_of<L>(sum) / dim + raw.epsilon));
            Row<L>::each(dim, [&](std::int64_t d, auto lanes) {
                L::store(out + d, L::mul(L::mul(L::load(out + d), scale), lanes.load(raw.norm + d)));
            });
        }
        const int half = raw.rotary_dim / 2;
        const float* __restrict cosines = raw.rotary, * __restrict sines = raw.rotary + half;
        for (int i = 0; i < half; i++) {
            const float first = out[i], second = out[i + half];
            out[i] = first * cosines[i] - second * sines[i];
            out[i + half] = second * cosines[i] + first * sines[i];
        }
    }

    static void store(const KVLayout& layout, const Raw& raw_key, const Raw& raw_value, std::uint8_t* head, int slot) {
        const int dim = layout.head_dim;
        alignas(64) float key[MAX_HEAD_DIM], value[MAX_HEAD_DIM];
        prepare(raw_key, dim, key);
        prepare(raw_value, dim, value);
        std::uint8_t* keys = head + slot / LANES * (layout.values() / GROUPS);
        std::uint8_t* values = head + layout.values();
        const int lane = slot % LANES;
        if constexpr (S == Storage::f32) {
            for (int d = 0; d < dim; d++) reinterpret_cast<float*>(keys)[d * LANES + lane] = canonical(key[d]);
            for (int d = 0; d < dim; d++) reinterpret_cast<float*>(values)[slot * dim + d] = canonical(value[d]);
        } else if constexpr (S == Storage::f16) {
            std::uint16_t halves[LANES];
            Row<L>::each(dim, [&](std::int64_t d, auto lanes) {
                const int count = dim - int(d) < LANES ? dim - int(d) : LANES;
                L::store_half(halves, Math<L>::canonical(L::load(key + d)));
                for (int i = 0; i < count; i++)
                    reinterpret_cast<std::uint16_t*>(keys)[(d + i) * LANES + lane] = halves[i];
                L::store_half(halves, Math<L>::canonical(lanes.load(value + d)));
                __builtin_memcpy(reinterpret_cast<std::uint16_t*>(values) + slot * dim + d, halves,
                                 count * sizeof *halves);
            });
        } else {
            float* scales = reinterpret_cast<float*>(head + layout.scales());
            scales[slot] = quantise(
                key, dim, [&](int d, std::int8_t x) { reinterpret_cast<std::int8_t*>(keys)[d * LANES + lane] = x; });
            scales[BLOCK_TOKENS + slot] = quantise(
                value, dim, [&](int d, std::int8_t x) { reinterpret_cast<std::int8_t*>(values)[slot * dim + d] = x; });
        }
    }

    // Converts a vector to int8 with one scale; its largest magnitude is 127. If it is not finite, the scale is NaN.
    template <class Put>
    static float quantise(const float* x, int dim, Put put) {
        float largest = 0;
        bool is_finite = true;
        for (int d = 0; d < dim; d++) {
            const float magnitude = __builtin_fabsf(x[d]);
            largest = magnitude > largest ? magnitude : largest;
            is_finite = is_finite && magnitude <= FLT_MAX;
        }
        const float inverse = is_finite && largest > 127.f / FLT_MAX ? 127.f / largest : 0.f;  // never infinite
        for (int d = 0; d < dim; d++) put(d, is_finite ? std::int8_t(rounded(x[d] * inverse)) : 0);
        return is_finite ? largest / 127.f : with_bits<float>(NAN_BITS);
    }
};

template <class L>
struct Implementation {
    static void store(const KVLayout& layout, const Raw& key, const Raw& value, std::uint8_t* head, int slot) {
        switch (layout.storage) {
            case Storage::f32:
                return Attend<L, Storage::f32>::store(layout, key, value, head, slot);
            case Storage::f16:
                return Attend<L, Storage::f16>::store(layout, key, value, head, slot);
            case Storage::int8:
                return Attend<L, Storage::int8>::store(layout, key, value, head, slot);
        }
    }
    static void attend(const Tile& tile, int first_segment, int last_segment, Share* rows) {
        switch (tile.layout.storage) {
            case Storage::f32:
                return Attend<L, Storage::f32>::attend(tile, first_segment, last_segment, rows);
            case Storage::f16:
                return Attend<L, Storage::f16>::attend(tile, first_segment, last_segment, rows);
            case Storage::int8:
                return Attend<L, Storage::int8>::attend(tile, first_segment, last_segment, rows);
        }
    }
    static constexpr AttentionKernel kernel(const char* name, int max_rows) {
        return {name, max_rows, store, attend, Attend<L, Storage::f32>::fold};
    }
};

}  // namespace lockstep::native
