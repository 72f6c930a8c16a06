#include "processor.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace lockstep::native {
namespace {

#if defined(__x86_64__)
// Bits of CPUID results, from Intel's Software Developer's Manual, volume 2A.
constexpr unsigned FMA = 1u << 12, OSXSAVE = 1u << 27, AVX = 1u << 28, F16C = 1u << 29;  // leaf 1, ecx
constexpr unsigned AVX2 = 1u << 5, AVX512F = 1u << 16, AVX512BW = 1u << 30, AVX512VL = 1u << 31;  // leaf 7, ebx
constexpr unsigned AVX512VNNI = 1u << 11;                                                         // leaf 7, ecx
constexpr unsigned YMM_STATE = 0x6, ZMM_STATE = 0xe6;  // of XCR0: registers that the operating system saves

struct Processor {
    unsigned one = 0, seven = 0, seven_c = 0, saved = 0;

    Processor() {
        unsigned a, b, c, d;
        if (!__get_cpuid(1, &a, &b, &c, &d)) return;
        one = c;
        if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) seven = b, seven_c = c;
        if (one & OSXSAVE) __asm__("xgetbv" : "=a"(saved), "=d"(d) : "c"(0));
    }
    bool has(unsigned in_one, unsigned in_seven, unsigned in_seven_c, unsigned state) const {
        return (one & in_one) == in_one && (seven & in_seven) == in_seven && (seven_c & in_seven_c) == in_seven_c &&
               (saved & state) == state;
    }
};
#endif

}  // namespace

bool runs_avx2() {
#if defined(__x86_64__)
    return Processor().has(FMA | AVX | F16C, AVX2, 0, YMM_STATE);
#else
    return false;
#endif
}

bool runs_avx512() {
#if defined(__x86_64__)
    return runs_avx2() && Processor().has(0, AVX512F | AVX512BW | AVX512VL, AVX512VNNI, ZMM_STATE);
#else
    return false;
#endif
}

}  // namespace lockstep::native
