// A pool of threads that process fixed shares of the work. Results never depend on the number of threads, because each
// share writes its own outputs.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace lockstep::native {

constexpr int MAX_THREADS = 256;

// Threads in addition to the caller's, which takes the first share. They poll for a short time after a piece of work
// and then sleep, so that an idle pool uses no processor time. One caller at a time; others wait.
class Pool {
public:
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int size() const { return int(workers.size()) + 1; }
    // Calls work(context, part, size()) once for each part, and returns when all calls have returned.
    void run(void (*work)(void*, int, int), void* context);

private:
    void work(int part);
    void stop();

    std::mutex callers, mutex;
    std::condition_variable started, ended;
    std::atomic<std::uint64_t> round{0};
    std::atomic<int> running{0};
    bool stopping = false;
    void (*function)(void*, int, int) = nullptr;
    void* context = nullptr;
    std::vector<std::thread> workers;
};

constexpr int CHUNKS = 4;  // number of chunks of each thread's part

// Calls f(begin, end) for parts of count items, in any order. Each thread begins with its own part, chunk by chunk, and
// then takes chunks that others have not started, so that a thread delayed by another process does not delay all.
// Without a pool the caller does all work.
template <class F>
void share(Pool* pool, std::int64_t count, const F& f) {
    if (pool == nullptr || pool->size() == 1 || count < 2) return f(0, count);
    struct alignas(64) Next {
        std::atomic<int> chunk;
    };
    Next next[MAX_THREADS];  // by part; only the existing parts are initialised
    for (int part = 0; part < pool->size(); part++) next[part].chunk.store(0, std::memory_order_relaxed);
    struct Call {
        const F& f;
        std::int64_t count;
        Next* next;
    } call{f, count, next};
    pool->run(
        [](void* context, int part, int parts) {
            Call& call = *static_cast<Call*>(context);
            const std::int64_t pieces = std::int64_t(parts) * CHUNKS;
            for (int other = 0; other < parts; other++) {
                const int owner = (part + other) % parts;
                for (int i = call.next[owner].chunk++; i < CHUNKS; i = call.next[owner].chunk++) {
                    const std::int64_t piece = std::int64_t(owner) * CHUNKS + i;
                    const std::int64_t begin = call.count * piece / pieces, end = call.count * (piece + 1) / pieces;
                    if (begin < end) call.f(begin, end);
                }
            }
        },
        &call);
}

}  // namespace lockstep::native
