#if defined(__x86_64__)
#include "lanes_avx2.hpp"
#include "sample.hpp"

namespace lockstep::native {
const Elements elements_avx2 = elements_of<Avx2>("avx2");
}  // namespace lockstep::native
#endif
