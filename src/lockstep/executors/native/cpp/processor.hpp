// Processor features: which instruction sets this processor has, from CPUID, since compiler builtins need a run-time
// library that some compilers lack.
#pragma once

namespace lockstep::native {

bool runs_avx2();    // includes fma and conversions of float16
bool runs_avx512();  // includes F, BW, VL and VNNI, for which the avx512 sources are compiled

}  // namespace lockstep::native
