// A pool of threads that take fixed shares of a piece of work. Results never depend on how many there are, because each
// share writes outputs of its own.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace lockstep::native {

constexpr int MAX_THREADS = 256;

// Threads beside the caller's, which takes the first share. They poll for a short time after a piece of work and then
// sleep, so that an idle pool uses no processor. One caller at a time; others wait.
class Pool {
public:
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int size() const { return int(workers.size()) + 1; }
    // Call work(context, part, size()) once for each part, and return when all have ended.
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

constexpr int CHUNKS = 4;  // into which each thread's part is cut

// Call f(begin, end) for parts of count items, in any order. Each thread begins with a part of its own, one item after the
// other, and then takes over chunks that others have not come to: a thread that another process delays does not delay
// all. Without a pool the caller does all.
template <class F>
void share(Pool* pool, std::int64_t count, const F& f) {
    if (pool == nullptr || pool->size() == 1 || count < 2) return f(0, count);
    struct alignas(64) Next {
        std::atomic<int> chunk;
    };
    Next next[MAX_THREADS];  // by part; those that there are get a value
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
