#if defined(__x86_64__)
#include "attention_kernel.hpp"
#include "lanes_avx512.hpp"

namespace lockstep::native {
const AttentionKernel attention_avx512 = Implementation<Avx512>::kernel("avx512", 12);
}  // namespace lockstep::native
#endif
