// Functions as polynomials of our own: over sixteen floats, and over doubles one by one. Tests hold their errors below
// the bounds that are stated here, in units of the last place (ulp) of the exact result's float or double.
#pragma once

#include "bits.hpp"

namespace lockstep::native {

constexpr float SHIFT = 12582912.f;            // 1.5 * 2^23: adding and subtracting it rounds to an integer
constexpr double SHIFT_64 = 6755399441055744;  // 1.5 * 2^52, for doubles

template <class L>
struct Math {
    using V = typename L::V;

    static V rounded(V x) { return L::sub(L::add(x, L::set(SHIFT)), L::set(SHIFT)); }

    // x with NAN_BITS where it is NaN.
    static V canonical(V x) { return L::select(L::is_nan(x), L::set(with_bits<float>(NAN_BITS)), x); }

    // c[0] + c[1] x + ..., from the last coefficient on.
    template <int N>
    static V polynomial(const float (&c)[N], V x) {
        V y = L::set(c[N - 1]);
        for (int i = N - 2; i >= 0; i--) y = L::fma(y, x, L::set(c[i]));
        return y;
    }

    // e^x: error below 1.1 ulp, denormal results included. x = n log 2 + r; e^r is a polynomial of degree 6
    // on |r| <= log(2) / 2 (3.1e-9), and 2^n is multiplied in two steps, for n has more values than exponents.
    static V exp(V x) {
        static constexpr float c[] = {0.49999994f, 0.166665196f, 0.0416683927f, 0.00836878084f, 0.00138144626f};
        x = L::min(L::set(89.f), L::max(L::set(-104.f), x));
        const V n = rounded(L::mul(x, L::set(1.44269504f)));
        V r = L::fma(n, L::set(-0x1.62e4p-1f), x);  // log 2 in two parts: n times the first is exact
        r = L::fma(n, L::set(-0x1.7f7d1cp-20f), r);
        const V y = L::add(L::fma(polynomial(c, r), L::mul(r, r), r), L::set(1.f));
        const V half = rounded(L::mul(n, L::set(0.5f)));
        return L::mul(L::mul(y, L::power(half)), L::power(L::sub(n, half)));
    }

    // Error below 2 ulp. An odd polynomial up to 0.625, above it 1 - 2 / (e^2|x| + 1) with the sign of x.
    static V tanh(V x) {
        static constexpr float c[] = {-0.333332837f, 0.133314863f, -0.0537431166f, 0.0206492804f, -0.00571551593f};
        const V magnitude = L::max(x, L::sub(L::zero(), x)), square = L::mul(x, x);
        const V small = L::fma(L::mul(polynomial(c, square), square), x, x);
        const V power = exp(L::add(magnitude, magnitude));
        const V large = L::sub(L::set(1.f), L::div(L::set(2.f), L::add(power, L::set(1.f))));
        return L::select(L::less(magnitude, L::set(0.625f)), small, with_sign_of(x, large));
    }

    // Error below 2 ulp. An odd polynomial up to 1; above it 1 - e^p(|x|) with the sign of x, where p approximates the
    // logarithm of the complement; above 4 the float next to the result is 1.
    static V erf(V x) {
        static constexpr float c[] = {0.128379166f,   -0.37612626f,     0.112835839f,   -0.0268537663f,
                                      0.00518823182f, -0.000800926704f, 7.85053053e-05f};
        static constexpr float d[] = {0.000188043574f, -1.12957847f,    -0.633219838f,   -0.108418606f,
                                      0.0252082758f,   -0.00420456845f, 0.000441337645f, -2.16869539e-05f};
        const V magnitude = L::max(x, L::sub(L::zero(), x)), square = L::mul(x, x);
        const V small = L::fma(polynomial(c, square), x, x);
        const V large = L::sub(L::set(1.f), exp(polynomial(d, L::min(L::set(4.f), magnitude))));
        return L::select(L::less(magnitude, L::set(1.f)), small, with_sign_of(x, large));
    }

    static V with_sign_of(V x, V magnitude) {
        return L::select(L::less(x, L::zero()), L::sub(L::zero(), magnitude), magnitude);
    }
};

// Doubles: multiplications and additions without fma, so that a compiler may compute several side by side and
// processors without it lose nothing.
namespace {

template <int N>
inline double polynomial(const double (&c)[N], double x) {
    double y = c[N - 1];
    for (int i = N - 2; i >= 0; i--) y = y * x + c[i];
    return y;
}

// 2^n of an integral n from -1022 to 1023, without a branch: SHIFT_64 puts n into the lowest bits.
inline double power_64(double n) { return with_bits<double>((with_bits<std::uint64_t>(n + SHIFT_64) + 1023) << 52); }

// e^x: error below 1.1 ulp, denormal results included. Taylor's series of degree 13 on |r| <= log(2) / 2.
inline double exp_64(double x) {
    constexpr double c[] = {1.0 / 2,       1.0 / 6,        1.0 / 24,        1.0 / 120,
                            1.0 / 720,     1.0 / 5040,     1.0 / 40320,     1.0 / 362880,
                            1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800};
    x = x < -746.0 ? -746.0 : x;
    x = x > 710.0 ? 710.0 : x;
    const double n = (x * 0x1.71547652b82fep0 + SHIFT_64) - SHIFT_64;
    const double r = (x - n * 0x1.62e42fefa38p-1) - n * 0x1.ef35793c7673p-45;
    const double y = 1.0 + (r + r * r * polynomial(c, r));
    const double half = (n * 0.5 + SHIFT_64) - SHIFT_64;
    return y * power_64(half) * power_64(n - half);
}

// The natural logarithm: error below 2 ulp. x = 2^e m with m from sqrt(1/2) to sqrt(2); the series of the inverse
// hyperbolic tangent of (m - 1) / (m + 1).
inline double log_64(double x) {
    constexpr double c[] = {1.0 / 3,  1.0 / 5,  1.0 / 7,  1.0 / 9,  1.0 / 11,
                            1.0 / 13, 1.0 / 15, 1.0 / 17, 1.0 / 19, 1.0 / 21};
    if (!(x > 0.0)) return x == 0.0 ? with_bits<double>(std::uint64_t(0xfff) << 52) : with_bits<double>(NAN_BITS_64);
    if (x > 1.7976931348623157e308) return x;
    double exponent = 0.0;
    if (x < 0x1p-1022) x *= 0x1p54, exponent = -54.0;
    std::uint64_t bits = with_bits<std::uint64_t>(x);
    exponent += double(std::int64_t(bits >> 52) - 1023);
    double m = with_bits<double>((bits & 0xfffffffffffff) | std::uint64_t(1023) << 52);
    if (m > 1.4142135623730951) m *= 0.5, exponent += 1.0;
    const double f = m - 1.0, s = f / (2.0 + f), square = s * s, half = 0.5 * f * f;
    // 2 s + 2 s^3 (...) without the rounding of 2 s: f - f^2 / 2 + s (f^2 / 2 + 2 s^2 (...)).
    const double tail = s * (half + 2.0 * square * polynomial(c, square)) + exponent * 0x1.ef35793c7673p-45;
    return exponent * 0x1.62e42fefa38p-1 + (f - (half - tail));
}

constexpr double MAX_ANGLE = 16777216.0;  // 2^24

struct Turned {
    double cos, sin;
};

// Both functions of an angle up to MAX_ANGLE: absolute error below 2^-52. pi / 2 in three parts, of which the first two
// times n are exact; Taylor's series on |r| <= pi / 4.
inline Turned turned(double angle) {
    constexpr double sines[] = {-1.0 / 6,        1.0 / 120,        -1.0 / 5040,          1.0 / 362880,
                                -1.0 / 39916800, 1.0 / 6227020800, -1.0 / 1307674368000, 1.0 / 355687428096000};
    constexpr double cosines[] = {-1.0 / 2,       1.0 / 24,        -1.0 / 720,         1.0 / 40320,
                                  -1.0 / 3628800, 1.0 / 479001600, -1.0 / 87178291200, 1.0 / 20922789888000};
    const double shifted = angle * 0x1.45f306dc9c883p-1 + SHIFT_64, n = shifted - SHIFT_64;
    const double r = ((angle - n * 0x1.921fb54p0) - n * 0x1.10b4612p-30) - n * -0x1.676733ae8fe48p-60;
    const double square = r * r;
    const double sine = r + r * square * polynomial(sines, square), cosine = 1.0 + square * polynomial(cosines, square);
    const std::uint64_t quarter = with_bits<std::uint64_t>(shifted) & 3;  // of the turn
    const double cos = quarter & 1 ? sine : cosine, sin = quarter & 1 ? cosine : sine;
    return {quarter == 1 || quarter == 2 ? -cos : cos, quarter >= 2 ? -sin : sin};
}

}  // namespace
}  // namespace lockstep::native
