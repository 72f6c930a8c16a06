#include "lanes_portable.hpp"
#include "recurrent_kernel.hpp"

namespace lockstep::native {
const RecurrentKernel recurrent_portable = Recurrent<Portable>::kernel("portable");
}  // namespace lockstep::native
