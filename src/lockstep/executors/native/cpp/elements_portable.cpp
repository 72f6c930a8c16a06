#include "lanes_portable.hpp"
#include "sample.hpp"

namespace lockstep::native {
const Elements elements_portable = elements_of<Portable>("portable");
}  // namespace lockstep::native
