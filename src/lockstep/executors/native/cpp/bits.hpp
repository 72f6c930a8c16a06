// The bit contract: the rules by which a result has the same bits on every processor, with any number of threads,
// beside any other rows. docs/native.md lists, for each operation, the order of its steps.
//
// 1. Each operation of floats is one IEEE operation, rounded to the nearest, ties to even, denormals kept. A fused
//    multiply-add stands only where the source has `fma`: sources are compiled without contraction and fast arithmetic.
// 2. A sum runs in LANES lanes: lane l adds the elements l, l + LANES, ... in ascending order, and `sum_of` folds the
//    lanes as a fixed tree. No thread takes part of a row.
// 3. `max(a, b)` is `a > b ? a : b`, and `min(a, b)` is `a < b ? a : b`: the second operand where one is NaN.
// 4. Functions are polynomials of our own (math.hpp); nothing calls the mathematical functions of the C library but
//    `fmaf`, which is exact.
// 5. A NaN that leaves an operation is NAN_BITS. Inside an operation its payload depends on the processor.
// 6. Rounding and denormal modes are set at each call from outside and in each thread of a pool (`FloatMode`), whatever
//    modes the caller has, and the caller's are restored.
//
// Each instruction set compiles the headers of kernels for itself, so functions in them have internal linkage: the
// linker could otherwise take one from a translation unit whose instructions this processor does not have.
#pragma once

#include <cstddef>
#include <cstdint>
#if defined(__x86_64__)
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

namespace lockstep::native {

constexpr int INTERFACE_VERSION = 4;  // increased with every change of kinds, structures or functions that Python uses
constexpr int BITS_VERSION = 1;  // increased with every change of a result's bits
constexpr int LANES = 16;
constexpr std::uint32_t NAN_BITS = 0x7fc00000;             // of a float
constexpr std::uint64_t NAN_BITS_64 = 0x7ff8000000000000;  // of a double

namespace {

// Sets the contract's modes during its lifetime: rounding to the nearest, denormals kept, no traps.
class FloatMode {
public:
#if defined(__x86_64__)
    FloatMode() : before(_mm_getcsr()) { _mm_setcsr(0x1f80); }
    ~FloatMode() { _mm_setcsr(before); }
#else
    FloatMode() {
        std::fegetenv(&before);
        std::fesetenv(FE_DFL_ENV);
    }
    ~FloatMode() { std::fesetenv(&before); }
#endif
    FloatMode(const FloatMode&) = delete;
    FloatMode& operator=(const FloatMode&) = delete;

private:
#if defined(__x86_64__)
    unsigned before;
#else
    std::fenv_t before;
#endif
};

template <class To, class From>
inline To with_bits(From x) {
    static_assert(sizeof(To) == sizeof(From), "bits are kept, so the sizes must be equal");
    To y;
    __builtin_memcpy(&y, &x, sizeof y);
    return y;
}

inline double canonical(double x) { return x == x ? x : with_bits<double>(NAN_BITS_64); }
inline float canonical(float x) { return x == x ? x : with_bits<float>(NAN_BITS); }

// The fixed tree of a sum's lanes: lane i and i + 8, then i and i + 4, and so on. Changes the lanes.
template <class T>
inline T sum_of(T* lanes) {
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

}  // namespace
}  // namespace lockstep::native
