#if defined(__x86_64__)
#include "adapter_kernel.hpp"
#include "lanes_avx512.hpp"

namespace lockstep::native {
const AdapterKernel adapters_avx512 = AdapterLanes<Avx512>::kernel("avx512");
}  // namespace lockstep::native
#endif
