#if defined(__x86_64__)
#include "attention_kernel.hpp"
#include "lanes_avx2.hpp"

namespace lockstep::native {
const AttentionKernel attention_avx2 = Implementation<Avx2>::kernel("avx2", 6);
}  // namespace lockstep::native
#endif
