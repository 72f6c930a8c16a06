#include "adapter_kernel.hpp"
#include "lanes_portable.hpp"

namespace lockstep::native {
const AdapterKernel adapters_portable = AdapterLanes<Portable>::kernel("portable");
}  // namespace lockstep::native
