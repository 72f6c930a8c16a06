// AVX2 product kernel. Its maddubs multiplies unsigned by signed bytes and adds pairs in sixteen bits, where it
// saturates. It never does here: numbers are from -127 to 127, and the most that is added before the sum is widened to 32
// bits is
//
//     8 bits    one pair      2 * 128 * 127 = 32,512    (magnitudes of weights; their signs are given to the numbers;
//                                                       also of values of TABLE)
//     4 bits    eight pairs  16 *  15 * 127 = 30,480
//     5 bits    four pairs    8 *  31 * 127 = 31,496
//     6 bits    two pairs     4 *  63 * 127 = 32,004    all below 2^15 = 32,768
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "lanes_avx2.hpp"
#include "product_common.hpp"

namespace lockstep::native {
namespace {

#define INLINE __attribute__((always_inline)) static inline

constexpr int pairs_in_16_bits(int bits) { return bits == 8 ? 1 : bits == 4 ? 8 : bits == 5 ? 4 : 2; }
constexpr int largest_code(int bits) { return bits == 8 ? 128 : (1 << bits) - 1; }
constexpr bool never_saturates(int bits) { return pairs_in_16_bits(bits) * 2 * largest_code(bits) * 127 < 1 << 15; }
static_assert(never_saturates(4) && never_saturates(5) && never_saturates(6) && never_saturates(8));

struct Group : Avx2 {
    static void group(const float* x, Numbers& out) {
        const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
        __m256i most = _mm256_setzero_si256();
        for (int i = 0; i < 4; i++)
            most = _mm256_max_epi32(most, _mm256_and_si256(_mm256_loadu_si256((const __m256i*)(x + i * 8)), magnitude));
        __m128i four = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
        four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
        four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1));
        const Scale scale = scale_of(_mm_cvtsi128_si32(four));
        const __m256 inverse = _mm256_set1_ps(scale.inverse);
        __m256i n[4];
        for (int i = 0; i < 4; i++) n[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i * 8), inverse));
        // Both packs work in halves of a register: eights of bytes lie in the order 0 2 4 6 1 3 5 7 of fours.
        __m256i all = _mm256_packs_epi16(_mm256_packs_epi32(n[0], n[1]), _mm256_packs_epi32(n[2], n[3]));
        all = _mm256_permutevar8x32_epi32(all, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        if (!(scale.inverse > 0.f)) all = _mm256_setzero_si256();
        out.scale = scale.scale;
        _mm256_storeu_si256((__m256i*)out.number, all);
        out.sums[0] = sum(_mm256_castsi256_si128(all)), out.sums[1] = sum(_mm256_extracti128_si256(all, 1));
    }
    static std::int16_t sum(__m128i numbers) {
        __m128i four = _mm_madd_epi16(_mm_maddubs_epi16(_mm_set1_epi8(1), numbers), _mm_set1_epi16(1));
        four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
        return std::int16_t(_mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1))));
    }
};

INLINE __m256i bytes_at(const std::uint8_t* at) { return _mm256_loadu_si256((const __m256i*)at); }
INLINE __m256 halves_at(const std::uint8_t* at) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at)); }
INLINE __m256 factors_at(const std::uint8_t* at) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)at)));
}
INLINE __m256i signed_at(const std::uint8_t* at) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)at)); }
INLINE __m256i quad(const Numbers& x, int q) {
    std::int32_t four;
    __builtin_memcpy(&four, x.number + q * 4, 4);
    return _mm256_set1_epi32(four);
}

// Codes of quad q of eight features.
template <Kind K, int HALF>
INLINE __m256i codes(const std::uint8_t* at, int j) {
    constexpr Layout layout = layout_of(K);
    __m256i low = bytes_at(at + j * 128);
    if constexpr (HALF) low = _mm256_srli_epi16(low, 4);
    low = _mm256_and_si256(low, _mm256_set1_epi8(15));
    if constexpr (layout.high_bits() == 0) return low;
    // The upper bits of a quad are moved to bit 4.
    const int bit = layout.high_bits() == 2 ? j * 2 : HALF * 4 + j;
    __m256i high = bytes_at(at + 512 + (layout.high_bits() == 2 ? HALF * 128 : 0));
    high = _mm256_sll_epi16(high, _mm_cvtsi32_si128(bit < 4 ? 4 - bit : 0));
    high = _mm256_srl_epi16(high, _mm_cvtsi32_si128(bit > 4 ? bit - 4 : 0));
    return _mm256_or_si256(low, _mm256_and_si256(high, _mm256_set1_epi8(layout.high_bits() == 2 ? 0x30 : 0x10)));
}

template <int R>
INLINE void widen(__m256i (&pairs)[R], __m256i (&dot)[R]) {
    for (int r = 0; r < R; r++) {
        dot[r] = _mm256_add_epi32(dot[r], _mm256_madd_epi16(pairs[r], _mm256_set1_epi16(1)));
        pairs[r] = _mm256_setzero_si256();
    }
}

// Sixteen columns of codes of fewer than eight bits. Loops over quads stay loops: unrolled, GCC regroups the sums and
// moves registers to the stack.
template <Kind K, int HALF, int R>
INLINE void add_half(const std::uint8_t* at, const Numbers* x, std::int64_t stride, __m256i (&pairs)[R],
                     __m256i (&dot)[R]) {
    constexpr int PAIRS = pairs_in_16_bits(layout_of(K).bits);
#pragma GCC unroll 1
    for (int j = 0; j < 4; j++) {
        const __m256i w = codes<K, HALF>(at, j);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++)
            pairs[r] = _mm256_add_epi16(pairs[r], _mm256_maddubs_epi16(w, quad(x[r * stride], HALF * 4 + j)));
        if (PAIRS == 2 && j % 2) widen<R>(pairs, dot);
    }
    if (PAIRS == 4 || (PAIRS == 8 && (HALF || layout_of(K).has_signed_factors()))) widen<R>(pairs, dot);
}

// Weights of quad q of eight features, as signed bytes: codes of eight bits, or values of TABLE.
template <Kind K>
INLINE __m256i signed_weights(const std::uint8_t* at, int q) {
    const __m256i plus = _mm256_set1_epi8(-128);  // codes are the weights plus 128
    if constexpr (layout_of(K).bits == 8) return _mm256_xor_si256(bytes_at(at + q * 128), plus);
    const __m256i low = _mm256_srl_epi16(bytes_at(at + q % 4 * 128), _mm_cvtsi32_si128(q / 4 * 4));
    const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)TABLE));
    return _mm256_shuffle_epi8(_mm256_xor_si256(table, plus), _mm256_and_si256(low, _mm256_set1_epi8(15)));
}

// Quads `begin` to `end`.
template <Kind K, int R>
INLINE void add_signed(const std::uint8_t* at, const Numbers* x, std::int64_t stride, int begin, int end,
                       __m256i (&dot)[R]) {
#pragma GCC unroll 1
    for (int q = begin; q < end; q++) {
        const __m256i w = signed_weights<K>(at, q);
        const __m256i magnitude = _mm256_abs_epi8(w);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            const __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(quad(x[r * stride], q), w));
            dot[r] = _mm256_add_epi32(dot[r], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
        }
    }
}

// Computes eight features, which begin at `feature`.
template <Kind K, int R>
INLINE void dots_of(const std::uint8_t* group, int feature, const Numbers* x, std::int64_t stride, __m256i (&dot)[R]) {
    constexpr Layout layout = layout_of(K);
    const std::uint8_t* at = group + layout.codes_at() + feature * 4;
    __m256i pairs[R], part[R];
    for (int r = 0; r < R; r++) pairs[r] = dot[r] = part[r] = _mm256_setzero_si256();
    constexpr bool IS_SIGNED = layout.bits == 8 || layout.has_table();
    if constexpr (layout.has_signed_factors()) {
        if constexpr (IS_SIGNED) {
            add_signed<K, R>(at, x, stride, 0, 4, dot);
            add_signed<K, R>(at, x, stride, 4, 8, part);
        } else {
            add_half<K, 0, R>(at, x, stride, pairs, dot);
            add_half<K, 1, R>(at, x, stride, pairs, part);
        }
        const __m256i first = signed_at(group + feature), last = signed_at(group + PANEL + feature);
        for (int r = 0; r < R; r++) {
            const Numbers& row = x[r * stride];
            if constexpr (!IS_SIGNED) {
                dot[r] = _mm256_sub_epi32(dot[r], _mm256_set1_epi32(row.sums[0] * layout.zero));
                part[r] = _mm256_sub_epi32(part[r], _mm256_set1_epi32(row.sums[1] * layout.zero));
            }
            dot[r] = _mm256_add_epi32(_mm256_mullo_epi32(dot[r], first), _mm256_mullo_epi32(part[r], last));
        }
    } else if constexpr (IS_SIGNED) {
        add_signed<K, R>(at, x, stride, 0, 8, dot);
    } else {
        add_half<K, 0, R>(at, x, stride, pairs, dot);
        add_half<K, 1, R>(at, x, stride, pairs, dot);
        if constexpr (layout.zero != 0)
            for (int r = 0; r < R; r++) {
                const Numbers& row = x[r * stride];
                dot[r] = _mm256_sub_epi32(dot[r], _mm256_set1_epi32((row.sums[0] + row.sums[1]) * layout.zero));
            }
    }
}

template <Kind K>
INLINE __m256 scales(const std::uint8_t* group, const std::uint8_t* super, int feature) {
    if constexpr (!layout_of(K).is_super) return halves_at(group + feature * 2);
    const __m256 scale = halves_at(super + feature * 2);
    return layout_of(K).has_signed_factors() ? scale : _mm256_mul_ps(scale, factors_at(group + feature));
}

template <Kind K>
INLINE __m256 offsets(const std::uint8_t* group, const std::uint8_t* super, int feature) {
    if constexpr (!layout_of(K).is_super) return halves_at(group + 2 * PANEL + feature * 2);
    return _mm256_mul_ps(halves_at(super + 2 * PANEL + feature * 2), factors_at(group + PANEL + feature));
}

// Groups in the outer loop and features in the inner: weights are read once and in order, sums stay in the L1 cache.
template <Kind K, int R>
void rows(const std::uint8_t* panel, std::int64_t groups, const Numbers* x, std::int64_t stride, float* out,
          Fetch fetch) {
    constexpr Layout layout = layout_of(K);
    constexpr int GROUP_BYTES = layout.group_bytes(), SUPER_BYTES = layout.super_bytes();
    for (int i = 0; i < R * PANEL; i += 8) _mm256_storeu_ps(out + i, _mm256_setzero_ps());
    const std::uint8_t *super = nullptr, *next = fetch.next;
    for (std::int64_t g = 0; g < groups; g++, panel += GROUP_BYTES, x++) {
        if constexpr (layout.is_super)
            if (g % SUPER == 0) super = panel, panel += SUPER_BYTES;
        for (int i = 0; i < fetch.lines; i++, next += 64) _mm_prefetch((const char*)next, _MM_HINT_T1);
        for (int feature = 0; feature < PANEL; feature += 8) {
            __m256i dot[R];
            dots_of<K, R>(panel, feature, x, stride, dot);
            const __m256 scale = scales<K>(panel, super, feature);
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
                const Numbers& row = x[r * stride];
                float* at = out + r * PANEL + feature;
                __m256 acc = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[r]), _mm256_mul_ps(scale, _mm256_set1_ps(row.scale)),
                                             _mm256_loadu_ps(at));
                if constexpr (layout.has_offsets)
                    acc = _mm256_fmadd_ps(offsets<K>(panel, super, feature),
                                          _mm256_set1_ps(row.scale * float(row.sums[0] + row.sums[1])), acc);
                _mm256_storeu_ps(at, acc);
            }
        }
    }
}

template <Kind K>
void some_rows(const std::uint8_t* panel, std::int64_t groups, const Numbers* x, std::int64_t stride, int count,
               float* out, Fetch fetch) {
    switch (count) {
        case 1:
            return rows<K, 1>(panel, groups, x, stride, out, fetch);
        case 2:
            return rows<K, 2>(panel, groups, x, stride, out, fetch);
        case 3:
            return rows<K, 3>(panel, groups, x, stride, out, fetch);
        case 4:
            return rows<K, 4>(panel, groups, x, stride, out, fetch);
    }
    if constexpr (tile_rows(K) == 6) {
        if (count == 5) return rows<K, 5>(panel, groups, x, stride, out, fetch);
        return rows<K, 6>(panel, groups, x, stride, out, fetch);
    }
}

void tile(Kind kind, const std::uint8_t* panel, std::int64_t groups, const Numbers* x, std::int64_t stride, int count,
          float* out, Fetch fetch) {
    static constexpr Tile TILES[KINDS] = {some_rows<Kind::q8_0>, some_rows<Kind::q4_0>, some_rows<Kind::q4_1>,
                                          some_rows<Kind::q5_0>, some_rows<Kind::q5_1>, some_rows<Kind::q4_k>,
                                          some_rows<Kind::q5_k>, some_rows<Kind::q6_k>, some_rows<Kind::q3_k>,
                                          some_rows<Kind::iq4_nl>, some_rows<Kind::iq4_xs>};
    TILES[int(kind)](panel, groups, x, stride, count, out, fetch);
}

const Products table = {"avx2", quantise_row<Group>, tile, float_products<Avx2>};

}  // namespace

const Products* products_avx2() { return &table; }

}  // namespace lockstep::native
#else
#include "product.hpp"
namespace lockstep::native {
const Products* products_avx2() { return nullptr; }
}  // namespace lockstep::native
#endif
