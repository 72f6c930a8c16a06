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

// Call f(begin, end) for the share of each thread of count items: items part * count / parts to the next part's. Without
// a pool the caller does all.
template <class F>
void share(Pool* pool, std::int64_t count, const F& f) {
    if (pool == nullptr || pool->size() == 1 || count < 2) return f(0, count);
    struct Call {
        const F& f;
        std::int64_t count;
    } call{f, count};
    pool->run(
        [](void* context, int part, int parts) {
            const Call& call = *static_cast<Call*>(context);
            call.f(call.count * part / parts, call.count * (part + 1) / parts);
        },
        &call);
}

}  // namespace lockstep::native
