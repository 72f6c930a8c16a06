#if defined(__x86_64__)
#include "lanes_avx512.hpp"
#include "recurrent_kernel.hpp"

namespace lockstep::native {
const RecurrentKernel recurrent_avx512 = Recurrent<Avx512>::kernel("avx512");
}  // namespace lockstep::native
#endif
