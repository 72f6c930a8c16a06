// Sixteen floats in one register of AVX-512 (only AVX-512F). Operations: lanes_portable.hpp.
#pragma once

#include <immintrin.h>

#include "bits.hpp"

namespace lockstep::native {
namespace {

struct Avx512 {
    using V = __m512;
    using Mask = __mmask16;
    static constexpr int REGISTERS = 32;
    static V zero() { return _mm512_setzero_ps(); }
    static V set(float x) { return _mm512_set1_ps(x); }
    static V load(const float* at) { return _mm512_loadu_ps(at); }
    static void store(float* at, V x) { _mm512_storeu_ps(at, x); }

    static V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
    static V add(V a, V b) { return _mm512_add_ps(a, b); }
    static V sub(V a, V b) { return _mm512_sub_ps(a, b); }
    static V mul(V a, V b) { return _mm512_mul_ps(a, b); }
    static V div(V a, V b) { return _mm512_div_ps(a, b); }
    static V max(V a, V b) { return _mm512_max_ps(a, b); }
    static V min(V a, V b) { return _mm512_min_ps(a, b); }

    static Mask less(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
    static Mask is_nan(V x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
    static V select(Mask mask, V yes, V no) { return _mm512_mask_blend_ps(mask, no, yes); }

    static V power(V n) {
        return _mm512_castsi512_ps(
            _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
    }

    static V load_half(const std::uint16_t* at) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at)); }
    static V load_brain(const std::uint16_t* at) {
        return _mm512_castsi512_ps(
            _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at)), 16));
    }
    static V load_byte(const std::int8_t* at) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)at)));
    }
    static void store_half(std::uint16_t* at, V x) {
        _mm256_storeu_si256((__m256i*)at, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }

    static void fold(const V* x, float* out) {
        fold(half(x[0]), half(x[1]), half(x[2]), half(x[3]), out);
    }
    static __m256 half(V x) { return _mm256_add_ps(quarters<0>(x), quarters<1>(x)); }
    template <int I>
    static __m256 quarters(V x) {  // not the intrinsics without a mask, of which g++ 12 warns
        return _mm256_castpd_ps(_mm512_maskz_extractf64x4_pd(0xf, _mm512_castps_pd(x), I));
    }
    // The second half of `fold`: four vectors of eight lanes.
    static void fold(__m256 a, __m256 b, __m256 c, __m256 d, float* out) {
        const __m256 ab = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
        const __m256 cd = _mm256_add_ps(_mm256_permute2f128_ps(c, d, 0x20), _mm256_permute2f128_ps(c, d, 0x31));
        // Pairs of lanes: [a c | b d].
        const __m256 pairs = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
        const __m128 ac = _mm256_castps256_ps128(pairs), bd = _mm256_extractf128_ps(pairs, 1);
        const __m128 sums = _mm_add_ps(_mm_shuffle_ps(ac, bd, 0x88), _mm_shuffle_ps(ac, bd, 0xdd));  // a, c, b, d
        _mm_storeu_ps(out, _mm_shuffle_ps(sums, sums, 0xd8));
    }
};

}  // namespace
}  // namespace lockstep::native
