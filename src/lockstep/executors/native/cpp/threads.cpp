#include "threads.hpp"

#include "bits.hpp"

namespace lockstep::native {
namespace {

constexpr int POLLS = 2000;  // 20 to 60 microseconds, the time between the products of a small model's step

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

}  // namespace

Pool::Pool(int threads) {
    workers.reserve(std::size_t(threads > 1 ? threads - 1 : 0));
    try {
        for (int part = 1; part < threads; part++) workers.emplace_back([this, part] { work(part); });
    } catch (...) {
        stop();
        throw;
    }
}

Pool::~Pool() { stop(); }

void Pool::stop() {
    {
        const std::lock_guard<std::mutex> lock(mutex);
        stopping = true;
    }
    started.notify_all();
    for (std::thread& worker : workers) worker.join();
}

void Pool::run(void (*work)(void*, int, int), void* with) {
    const std::lock_guard<std::mutex> caller(callers);
    {
        const std::lock_guard<std::mutex> lock(mutex);
        function = work;
        context = with;
        running.store(int(workers.size()), std::memory_order_relaxed);
        round.fetch_add(1, std::memory_order_release);
    }
    started.notify_all();
    work(with, 0, size());
    for (int i = 0; i < POLLS && running.load(std::memory_order_acquire); i++) pause();
    std::unique_lock<std::mutex> lock(mutex);
    ended.wait(lock, [this] { return running.load(std::memory_order_acquire) == 0; });
}

void Pool::work(int part) {
    const FloatMode mode;
    for (std::uint64_t done = 0;;) {
        for (int i = 0; i < POLLS && round.load(std::memory_order_acquire) == done; i++) pause();
        {
            std::unique_lock<std::mutex> lock(mutex);
            started.wait(lock, [&] { return stopping || round.load(std::memory_order_relaxed) != done; });
            if (stopping) return;
            done = round.load(std::memory_order_relaxed);
        }
        function(context, part, size());
        const std::lock_guard<std::mutex> lock(mutex);
        if (running.fetch_sub(1, std::memory_order_acq_rel) == 1) ended.notify_one();
    }
}

}  // namespace lockstep::native
