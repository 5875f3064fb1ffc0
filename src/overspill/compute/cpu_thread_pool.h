// A thread pool for short parallel calls, and how its threads wait.
#pragma once

#include <sys/types.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#endif

#include <atomic>
#include <chrono>
#include <climits>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "cpu_group.h"

namespace {

int64_t now_ns() {
    timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return int64_t(at.tv_sec) * 1000000000 + at.tv_nsec;
}

constexpr int64_t YIELD_NS = 20000;      // time between yields of a waiting thread
constexpr int PAUSES = 8;                // between two checks of a wait condition
constexpr int64_t IDLE_SPIN_NS = 50000;  // of a pool's workers, unless calls are known to follow

// Lets this thread sleep for short times: the default slack of 50 us would prolong them.
void shorten_sleeps() {
#if defined(__linux__)
    prctl(PR_SET_TIMERSLACK, 1000UL);  // ns
#endif
}

// Tells the core that this thread waits.
INLINE void pause_core() {
#if HAVE_X86
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// A wait loop. Two threads may share a core: pauses leave it to the other one, which system calls do
// not.
class Waiting {
  public:
    void relax(int pauses = PAUSES) {
        for (int i = 0; i < pauses; ++i) pause_core();
        const int64_t now = now_ns();
        if (now < yielded + YIELD_NS) return;
        yielded = now;
        std::this_thread::yield();
    }

  private:
    int64_t yielded = now_ns();
};

template <class Done>
INLINE void spin_until(const Done& done) {
    if (done()) return;
    Waiting waiting;
    while (!done()) waiting.relax();
}

// Wakes all sleeping threads with one system call. Chained wake-ups would stall if a thread in the
// chain was preempted.
class WakeSignal {
  public:
    uint32_t count() const { return raised; }

    // Sleeps unless the signal was raised after `count` was read; may wake up spuriously.
    void sleep(uint32_t count) {
#if defined(__linux__)
        syscall(SYS_futex, &raised, FUTEX_WAIT_PRIVATE, count, nullptr, nullptr, 0);
#else
        if (raised == count) std::this_thread::sleep_for(std::chrono::milliseconds(1));
#endif
    }

    void raise() {
        ++raised;
#if defined(__linux__)
        syscall(SYS_futex, &raised, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#endif
    }

  private:
    std::atomic<uint32_t> raised{0};
};

thread_local int pool_index = 0;  // of this thread in its pool; 0 is that of every caller

// Workers that run a function together with the caller; one caller at a time. After a call they
// spin for `idle_spin_ns` and then sleep: OpenMP's threads would spin for milliseconds and slow
// down the thread that drives the GPU. No locks.
class ThreadPool {
  public:
    explicit ThreadPool(int64_t idle_spin_ns) : idle_spin_ns(idle_spin_ns) {}

    // Runs `body` in the calling thread and in up to `threads - 1` workers, and returns when all of
    // them have left it. A worker that wakes up after the caller has left it does not run it.
    void run(int threads, const std::function<void()>& body) {
        if (getpid() != process) abandon_workers();
        const int wanted = int(most(0, least(threads - 1, MAX_WORKERS)));
        while (int(workers.size()) < wanted) add_worker();
        function = &body;
        notify(++calls << COUNT_BITS | uint64_t(wanted));
        body();
        // A worker sets `inside` before it reads `current`; here the order is the opposite. Both
        // are sequentially consistent, so the caller sees the worker or the worker stays outside.
        current = NONE;
        for (int i = 0; i < wanted; ++i) spin_until([&] { return !workers[i]->inside; });
    }

    ~ThreadPool() {
        if (getpid() != process) abandon_workers();
        notify(SHUTDOWN);
        for (const auto& worker : workers) worker->thread.join();
    }

  private:
    static constexpr int COUNT_BITS = 16;
    static constexpr int64_t MAX_WORKERS = (1 << COUNT_BITS) - 2;
    static constexpr uint64_t NONE = 0, SHUTDOWN = ~uint64_t(0);

    struct alignas(LINE) Worker {
        std::atomic<bool> inside{false};  // may run the function of the current call
        std::thread thread;
    };

    // A forked child does not have the threads and cannot join them.
    void abandon_workers() {
        for (auto& worker : workers) (void)worker.release();
        workers.clear();
        process = getpid();
    }

    static int wanted_by(uint64_t call) { return int(call & ((1 << COUNT_BITS) - 1)); }

    void add_worker() {
        const int index = int(workers.size());
        workers.push_back(std::make_unique<Worker>());
        Worker& worker = *workers.back();
        worker.thread = std::thread([this, &worker, index] { work(worker, index); });
    }

    // A worker reads the signal's count before it checks for a call a last time; here the order is
    // the opposite. So the worker sees the call or does not sleep.
    void notify(uint64_t call) {
        current = call;
        if (wanted_by(call) > 0) wake.raise();
    }

    void work(Worker& worker, int index) {
        pool_index = index + 1;
        for (uint64_t seen = NONE;;) {
            seen = next_call(index, seen);
            if (seen == SHUTDOWN) return;
            worker.inside = true;
            if (current == seen) (*function)();
            worker.inside = false;
        }
    }

    uint64_t next_call(int index, uint64_t seen) {
        uint64_t call = NONE;
        const auto called = [&] {
            call = current;
            return call != seen && index < wanted_by(call);
        };
        for (;;) {
            const int64_t until = now_ns() + idle_spin_ns;
            spin_until([&] { return called() || now_ns() >= until; });
            if (called()) return call;
            const uint32_t count = wake.count();
            if (!called()) wake.sleep(count);
        }
    }

    // Number of the running call and how many workers it wants. All workers read this line; it
    // changes only when a call begins or ends.
    alignas(LINE) std::atomic<uint64_t> current{NONE};
    alignas(LINE) WakeSignal wake;
    alignas(LINE) const std::function<void()>* function = nullptr;
    const int64_t idle_spin_ns;  // time that a worker waits for a call before it sleeps
    std::vector<std::unique_ptr<Worker>> workers;
    uint64_t calls = 0;
    pid_t process = getpid();
};

}  // namespace
