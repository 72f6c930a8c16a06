// Calls the operator's library as a stream of OpenVINO does: from an arena of so many of TBB's threads.
#include <oneapi/tbb/global_control.h>
#include <oneapi/tbb/task_arena.h>

using Attention = const char* (*)(const void* step, const char* kernel);

extern "C" const char* in_arena(int threads, Attention attention, const void* step, const char* kernel, int* seen) {
    // Unasked, TBB starts no more threads than the processor has cores.
    tbb::global_control control(tbb::global_control::max_allowed_parallelism, threads);
    tbb::task_arena arena(threads);
    return arena.execute([&] {
        *seen = tbb::this_task_arena::max_concurrency();
        return attention(step, kernel);
    });
}
