// Threads that share the work of a pass.
//
// A pass is a sequence of *phases*, and each phase has as many *parts* as the pool. A phase begins when all parts of the
// previous one have ended. Threads claim parts: first the one with their own number, then any unclaimed one. So a thread
// that the kernel preempts delays at most the part that it runs, and a sleeping thread delays nothing. A part's result
// depends on its number alone, not on the number of threads.
#pragma once
#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace paceline {

class ThreadPool {
   public:
    using Part = std::function<void(int phase, int part, int thread)>;

    explicit ThreadPool(int parts) : parts_(parts), claimed_(new Counter[parts]) {
        for (int self = 1; self < parts; self++) threads_.emplace_back([this, self] { serve(self); });
    }
    ~ThreadPool() {
        stopping_ = true;
        wake();
        for (std::thread& thread : threads_) thread.join();
    }
    int parts() const { return parts_; }

    // Runs the parts of phases 0 to `phases` - 1, and returns when all have ended. Calls must not overlap.
    void run(int phases, const Part& part) {
        if (parts_ == 1 || one_core()) {
            for (int phase = 0; phase < phases; phase++)
                for (int p = 0; p < parts_; p++) part(phase, p, 0);
            return;
        }
        job_ = &part;
        first_ = last_.load(std::memory_order_relaxed);
        last_.store(first_ + phases, std::memory_order_release);  // from here on parts can be claimed
        wake();
        take_parts(0);
    }

   private:
    struct alignas(64) Counter {  // on a cache line of its own
        std::atomic<int64_t> value{0};
    };

    // Phases are numbered over the pool's lifetime. A thread claims a part by raising the part's counter from the phase to
    // the next. The run of a claimed part has not ended, so `job_` and `first_` are that run's.
    void take_parts(int self) {
        for (;;) {
            int64_t phase = ended_.value.load(std::memory_order_acquire) / parts_;
            if (phase >= last_.load(std::memory_order_acquire)) return;
            for (int i = 0; i < parts_; i++) {
                int part = (self + i) % parts_;
                int64_t free = phase;
                if (claimed_[part].value.load(std::memory_order_relaxed) != phase) continue;
                if (!claimed_[part].value.compare_exchange_strong(free, phase + 1, std::memory_order_acq_rel)) continue;
                (*job_)((int)(phase - first_), part, self);
                ended_.value.fetch_add(1, std::memory_order_acq_rel);
            }
            for (int spins = 0; ended_.value.load(std::memory_order_acquire) / parts_ == phase; spins++)
                if (spins < SPINS)
                    pause();
                else  // a thread within a part may be preempted, and need this core
                    std::this_thread::sleep_for(std::chrono::microseconds(1));
        }
    }

    void serve(int self) {
        uint32_t seen = 0;
        while (!stopping_) {
            for (int spins = 0; spins < SPINS && wake_counter_.load(std::memory_order_acquire) == seen; spins++) pause();
            wake_counter_.wait(seen, std::memory_order_acquire);
            seen = wake_counter_.load(std::memory_order_acquire);
            take_parts(self);
        }
    }

    void wake() {
        wake_counter_.fetch_add(1, std::memory_order_release);
        wake_counter_.notify_all();
    }

    // Whether the calling thread is bound to one core: a second thread would compete for it.
    static bool one_core() {
#ifdef __linux__
        cpu_set_t allowed;
        return sched_getaffinity(0, sizeof allowed, &allowed) == 0 && CPU_COUNT(&allowed) == 1;
#else
        return false;
#endif
    }

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

    static constexpr int SPINS = 2000;  // about 30 us: a barrier is much shorter, the time between passes much longer

    const int parts_;
    std::unique_ptr<Counter[]> claimed_;
    Counter ended_;  // parts, of all phases so far
    std::atomic<int64_t> last_{0};
    std::atomic<uint32_t> wake_counter_{0};
    std::atomic<bool> stopping_{false};
    const Part* job_ = nullptr;
    int64_t first_ = 0;
    std::vector<std::thread> threads_;
};

}  // namespace paceline
