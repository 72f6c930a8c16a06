#include "attention_kernel.hpp"
#include "lanes_portable.hpp"

namespace lockstep::native {
const AttentionKernel attention_portable = Implementation<Portable>::kernel("portable", 6);
}  // namespace lockstep::native
