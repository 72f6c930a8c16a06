// Python interface of attention.hpp.
#include "attention.hpp"

#define EXPORTED extern "C" __attribute__((visibility("default")))

using namespace lockstep::native;

// Bytes of one block of one layer; 0: such heads are not supported.
EXPORTED std::size_t native_block_bytes(int kv_heads, int head_dim, int storage) {
    if (kv_heads < 1 || head_dim < 1 || head_dim > MAX_HEAD_DIM || storage < 0 || storage > int(Storage::int8))
        return 0;
    return KVLayout{kv_heads, head_dim, Storage(storage)}.block_bytes();
}

// Returns nullptr, or an error message; then nothing was read or written. Without workers, this thread does all work.
EXPORTED const char* native_attention(const char* isa, const Step* step, const Workers* workers) {
    const AttentionKernel* kernel = find_attention(isa);
    if (!kernel) return "this processor does not run that instruction set";
    const FloatMode mode;
    return attention(*step, *kernel, workers ? *workers : Workers{1, nullptr, nullptr});
}
