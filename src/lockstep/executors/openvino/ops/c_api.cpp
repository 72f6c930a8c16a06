// Plain functions for those who load the library by themselves: Python, to see what it is, and the tests of the
// kernels.
#include "attention.hpp"

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED int lockstep_version() { return lockstep::VERSION; }

EXPORTED int lockstep_has_kernel(const char* name) { return lockstep::find_kernel(name) != nullptr; }

EXPORTED std::size_t lockstep_block_bytes(int kv_heads, int head_dim, int storage) {
    return lockstep::Layout{kv_heads, head_dim, lockstep::Storage(storage)}.block_bytes();
}

// nullptr, or what is wrong; nothing was done then.
EXPORTED const char* lockstep_attention(const lockstep::Step* step, const char* kernel) {
    const lockstep::Kernel* found = lockstep::find_kernel(kernel);
    return found ? lockstep::attention(*step, *found) : "this processor has no such kernel";
}
