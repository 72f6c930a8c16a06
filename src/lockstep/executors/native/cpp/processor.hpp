// Processor features: asks the processor which instruction sets it runs, since a compiler's own answer needs a run-time
// library that not all systems have.
#pragma once

namespace lockstep::native {

bool runs_avx2();    // with fma and conversions of float16
bool runs_avx512();  // also F, BW, VL and VNNI: what the sources of avx512 are compiled for

}  // namespace lockstep::native
