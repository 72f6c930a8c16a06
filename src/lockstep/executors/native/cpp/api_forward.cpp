// Python interface of forward.hpp. Functions return nullptr, or an error message.
#include <new>

#include "forward.hpp"

#define EXPORTED extern "C" __attribute__((visibility("default")))

using namespace lockstep::native;

// The program's weights must not move until native_forward_free.
EXPORTED const char* native_forward_make(const Program* program, const char* isa, void* pool, void** made) {
    if (program == nullptr || made == nullptr) return "there is no program";
    if (isa == nullptr || find_elements(isa) == nullptr) return "this processor does not run that instruction set";
    if (const char* wrong = fault_of(*program)) return wrong;
    try {
        *made = new Forward(*program, isa, static_cast<Pool*>(pool));
    } catch (const std::bad_alloc&) {
        return "there is no memory for the program";
    }
    return nullptr;
}

EXPORTED void native_forward_free(void* forward) { delete static_cast<Forward*>(forward); }

EXPORTED const char* native_forward_step(void* forward, const StepInput* step) {
    if (forward == nullptr || step == nullptr) return "there is no program or no step";
    const FloatMode mode;
    return static_cast<Forward*>(forward)->step(*step);
}

// The adapter's numbers must not move until the slot is empty.
EXPORTED const char* native_forward_load_adapter(void* forward, std::int64_t slot, const AdapterWeight* weights,
                                                 std::int64_t count) {
    if (forward == nullptr) return "there is no program";
    return static_cast<Forward*>(forward)->load_adapter(slot, weights, count);
}

EXPORTED const char* native_forward_unload_adapter(void* forward, std::int64_t slot) {
    if (forward == nullptr) return "there is no program";
    return static_cast<Forward*>(forward)->unload_adapter(slot);
}

EXPORTED const char* native_forward_project(void* forward, const float* vectors, std::int64_t size, std::int64_t num_rows,
                                            float* out, std::int64_t out_size) {
    if (forward == nullptr) return "there is no program";
    const FloatMode mode;
    return static_cast<Forward*>(forward)->project(vectors, size, num_rows, out, out_size);
}

EXPORTED const char* native_forward_logits(void* forward, const std::int64_t* rows, std::int64_t num_rows, float* out,
                                           std::int64_t out_size) {
    if (forward == nullptr) return "there is no program";
    const FloatMode mode;
    return static_cast<Forward*>(forward)->logits(rows, num_rows, out, out_size);
}
