#if defined(__x86_64__)
#include "lanes_avx2.hpp"
#include "recurrent_kernel.hpp"

namespace lockstep::native {
const RecurrentKernel recurrent_avx2 = Recurrent<Avx2>::kernel("avx2");
}  // namespace lockstep::native
#endif
