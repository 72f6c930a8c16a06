#if defined(__x86_64__)
#include "adapter_kernel.hpp"
#include "lanes_avx2.hpp"

namespace lockstep::native {
const AdapterKernel adapters_avx2 = AdapterLanes<Avx2>::kernel("avx2");
}  // namespace lockstep::native
#endif
