#if defined(__x86_64__)
#include "lanes_avx512.hpp"
#include "sample.hpp"

namespace lockstep::native {
const Elements elements_avx512 = elements_of<Avx512>("avx512");
}  // namespace lockstep::native
#endif
