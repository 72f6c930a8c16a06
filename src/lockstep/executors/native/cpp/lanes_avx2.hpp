// Sixteen floats in two registers of AVX2, with FMA and F16C. Operations: lanes_portable.hpp.
#pragma once

#include <immintrin.h>

#include "bits.hpp"

namespace lockstep::native {
namespace {

struct Avx2 {
    struct V {
        __m256 a, b;
    };
    using Mask = V;
    static constexpr int REGISTERS = 8;  // pairs
    static V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
    static V set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
    static V load(const float* at) { return {_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)}; }
    static void store(float* at, V x) { _mm256_storeu_ps(at, x.a), _mm256_storeu_ps(at + 8, x.b); }

    static V fma(V x, V y, V z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
    static V add(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
    static V sub(V x, V y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
    static V mul(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
    static V div(V x, V y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
    static V max(V x, V y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
    static V min(V x, V y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }

    static Mask less(V x, V y) { return {_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)}; }
    static Mask is_nan(V x) { return {_mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q), _mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q)}; }
    static V select(Mask mask, V yes, V no) {
        return {_mm256_blendv_ps(no.a, yes.a, mask.a), _mm256_blendv_ps(no.b, yes.b, mask.b)};
    }

    static __m256 power(__m256 n) {
        return _mm256_castsi256_ps(
            _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
    }
    static V power(V n) { return {power(n.a), power(n.b)}; }

    static V load_half(const std::uint16_t* at) {
        return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at)),
                _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(at + 8)))};
    }
    static __m256 brain(const std::uint16_t* at) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)at)), 16));
    }
    static V load_brain(const std::uint16_t* at) { return {brain(at), brain(at + 8)}; }
    static __m256 bytes(const std::int8_t* at) {
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)at)));
    }
    static V load_byte(const std::int8_t* at) { return {bytes(at), bytes(at + 8)}; }
    static void store_half(std::uint16_t* at, V x) {
        _mm_storeu_si128((__m128i*)at, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
        _mm_storeu_si128((__m128i*)(at + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
    }

    static void fold(const V* x, float* out) {
        fold(half(x[0]), half(x[1]), half(x[2]), half(x[3]), out);
    }
    static __m256 half(V x) { return _mm256_add_ps(x.a, x.b); }
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
