// AVX-512 product kernel (VNNI): one instruction adds four unsigned codes times four signed numbers to an int32. The code
// of weight 0 is subtracted by the number at which a group's sum begins.
#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include "lanes_avx512.hpp"
#include "product_common.hpp"

namespace lockstep::native {
namespace {

#define INLINE __attribute__((always_inline)) static inline

struct Group : Avx512 {
    static void group(const float* x, Numbers& out) {
        const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
        const V a = load(x), b = load(x + 16);
        const __m512i most = _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(a), magnitude),
                                              _mm512_and_si512(_mm512_castps_si512(b), magnitude));
        const Scale scale = scale_of(_mm512_reduce_max_epi32(most));
        const V inverse = set(scale.inverse);
        __m128i p = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(mul(a, inverse)));
        __m128i q = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(mul(b, inverse)));
        if (!(scale.inverse > 0.f)) p = q = _mm_setzero_si128();
        out.scale = scale.scale;
        _mm_storeu_si128((__m128i*)out.number, p);
        _mm_storeu_si128((__m128i*)(out.number + 16), q);
        out.sums[0] = sum(p), out.sums[1] = sum(q);
    }
    static std::int16_t sum(__m128i numbers) {
        __m128i four = _mm_dpbusd_epi32(_mm_setzero_si128(), _mm_set1_epi8(1), numbers);
        four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
        return std::int16_t(_mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1))));
    }
};

INLINE __m512i bytes_at(const std::uint8_t* at) { return _mm512_loadu_si512(at); }
INLINE __m512 halves_at(const std::uint8_t* at) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at)); }
INLINE __m512 factors_at(const std::uint8_t* at) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)at)));
}
INLINE __m512i signed_at(const std::uint8_t* at) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)at)); }
INLINE __m512i quad(const Numbers& x, int q) {
    std::int32_t four;
    __builtin_memcpy(&four, x.number + q * 4, 4);
    return _mm512_set1_epi32(four);
}

// Codes of quad Q of sixteen features. `at` is the start of the panel's codes, plus 64 for its second half.
template <Kind K, int Q>
INLINE __m512i codes(const std::uint8_t* at) {
    constexpr Layout layout = layout_of(K);
    if constexpr (layout.bits == 8) return bytes_at(at + Q * 128);
    __m512i low = bytes_at(at + Q % 4 * 128);
    if constexpr (Q >= 4) low = _mm512_srli_epi16(low, 4);
    low = _mm512_and_si512(low, _mm512_set1_epi8(15));
    if constexpr (layout.has_table())
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)TABLE)), low);
    if constexpr (layout.high_bits() == 0) return low;
    // The upper bits of a quad are moved to bit 4.
    constexpr int PLANE = layout.high_bits() == 2 ? Q / 4 : 0, BIT = layout.high_bits() == 2 ? Q % 4 * 2 : Q;
    __m512i high = bytes_at(at + 512 + PLANE * 128);
    if constexpr (BIT < 4) high = _mm512_slli_epi16(high, 4 - BIT);
    if constexpr (BIT > 4) high = _mm512_srli_epi16(high, BIT - 4);
    return _mm512_or_si512(low, _mm512_and_si512(high, _mm512_set1_epi8(layout.high_bits() == 2 ? 0x30 : 0x10)));
}

template <Kind K, int Q, int R>
INLINE void add_quad(const std::uint8_t* at, const Numbers* x, std::int64_t stride, __m512i (&dot)[R][2]) {
    const __m512i first = codes<K, Q>(at), second = codes<K, Q>(at + 64);
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
        const __m512i numbers = quad(x[r * stride], Q);
        dot[r][0] = _mm512_dpbusd_epi32(dot[r][0], first, numbers);
        dot[r][1] = _mm512_dpbusd_epi32(dot[r][1], second, numbers);
    }
}

template <Kind K, int HALF, int R>
INLINE void add_half(const std::uint8_t* at, const Numbers* x, std::int64_t stride, __m512i (&dot)[R][2]) {
    add_quad<K, HALF * 4, R>(at, x, stride, dot);
    add_quad<K, HALF * 4 + 1, R>(at, x, stride, dot);
    add_quad<K, HALF * 4 + 2, R>(at, x, stride, dot);
    add_quad<K, HALF * 4 + 3, R>(at, x, stride, dot);
}

// The initial value of a group's sum: the sum of its numbers times minus the code of weight 0. It takes one instruction
// for one row; with several rows, the multiplications dominate.
template <int R>
INLINE __m512i begin_with(const Numbers& x, int first, int last) {
    if constexpr (R > 2) return _mm512_set1_epi32(x.sums[0] * first + x.sums[1] * last);
    std::int32_t both;
    __builtin_memcpy(&both, x.sums, 4);
    const __m512i factors = _mm512_set1_epi32(int(std::uint32_t(std::uint16_t(first)) | std::uint32_t(last) << 16));
    return _mm512_dpwssd_epi32(_mm512_setzero_si512(), _mm512_set1_epi32(both), factors);
}

template <Kind K, int R>
INLINE void dots_of(const std::uint8_t* group, const Numbers* x, std::int64_t stride, __m512i (&dot)[R][2]) {
    constexpr Layout layout = layout_of(K);
    const std::uint8_t* at = group + layout.codes_at();
    if constexpr (layout.has_signed_factors()) {
        __m512i part[R][2];
        for (int r = 0; r < R; r++) dot[r][0] = dot[r][1] = begin_with<R>(x[r * stride], -layout.zero, 0);
        for (int r = 0; r < R; r++) part[r][0] = part[r][1] = begin_with<R>(x[r * stride], 0, -layout.zero);
        add_half<K, 0, R>(at, x, stride, dot);
        add_half<K, 1, R>(at, x, stride, part);
        for (int side = 0; side < 2; side++) {
            const __m512i first = signed_at(group + side * 16), last = signed_at(group + PANEL + side * 16);
            for (int r = 0; r < R; r++)
                dot[r][side] = _mm512_add_epi32(_mm512_mullo_epi32(dot[r][side], first),
                                                _mm512_mullo_epi32(part[r][side], last));
        }
    } else {
        for (int r = 0; r < R; r++)
            dot[r][0] = dot[r][1] =
                layout.zero == 0 ? _mm512_setzero_si512() : begin_with<R>(x[r * stride], -layout.zero, -layout.zero);
        add_half<K, 0, R>(at, x, stride, dot);
        add_half<K, 1, R>(at, x, stride, dot);
    }
}

template <Kind K>
INLINE __m512 scales(const std::uint8_t* group, const std::uint8_t* super, int side) {
    if constexpr (!layout_of(K).is_super) return halves_at(group + side * 32);
    const __m512 scale = halves_at(super + side * 32);
    return layout_of(K).has_signed_factors() ? scale : _mm512_mul_ps(scale, factors_at(group + side * 16));
}

template <Kind K>
INLINE __m512 offsets(const std::uint8_t* group, const std::uint8_t* super, int side) {
    if constexpr (!layout_of(K).is_super) return halves_at(group + 2 * PANEL + side * 32);
    return _mm512_mul_ps(halves_at(super + 2 * PANEL + side * 32), factors_at(group + PANEL + side * 16));
}

template <Kind K, int R>
void rows(const std::uint8_t* panel, std::int64_t groups, const Numbers* x, std::int64_t stride, float* out,
          Fetch fetch) {
    constexpr Layout layout = layout_of(K);
    constexpr int GROUP_BYTES = layout.group_bytes(), SUPER_BYTES = layout.super_bytes();
    __m512 acc[R][2];
    for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
    const std::uint8_t *super = nullptr, *next = fetch.next;
    for (std::int64_t g = 0; g < groups; g++, panel += GROUP_BYTES, x++) {
        if constexpr (layout.is_super)
            if (g % SUPER == 0) super = panel, panel += SUPER_BYTES;
        for (int i = 0; i < fetch.lines; i++, next += 64) _mm_prefetch((const char*)next, _MM_HINT_T1);
        __m512i dot[R][2];
        dots_of<K, R>(panel, x, stride, dot);
#pragma GCC unroll 2
        for (int side = 0; side < 2; side++) {
            const __m512 scale = scales<K>(panel, super, side);
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
                const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(x[r * stride].scale));
                acc[r][side] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[r][side]), both, acc[r][side]);
            }
            if constexpr (layout.has_offsets) {
                const __m512 offset = offsets<K>(panel, super, side);
#pragma GCC unroll 6
                for (int r = 0; r < R; r++) {
                    const Numbers& row = x[r * stride];
                    const __m512 sum = _mm512_set1_ps(row.scale * float(row.sums[0] + row.sums[1]));
                    acc[r][side] = _mm512_fmadd_ps(offset, sum, acc[r][side]);
                }
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int side = 0; side < 2; side++) _mm512_storeu_ps(out + r * PANEL + side * 16, acc[r][side]);
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

const Products table = {"avx512", quantise_row<Group>, tile, float_products<Avx512>};

}  // namespace

const Products* products_avx512() { return &table; }

}  // namespace lockstep::native
#else
#include "product.hpp"
namespace lockstep::native {
const Products* products_avx512() { return nullptr; }
}  // namespace lockstep::native
#endif
