// Threads that help a caller, and how they wait.
#pragma once

#include <sys/types.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#include <climits>

#include "cpu_numbers.h"

namespace {

INLINE void rest() {
#if HAVE_X86
    __builtin_ia32_pause();
#else
    std::this_thread::yield();
#endif
}

int64_t now_ns() {
    timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return int64_t(at.tv_sec) * 1000000000 + at.tv_nsec;
}

constexpr int64_t SPIN_NS = 20000;  // waiting for longer, there may be more threads than cores

// Of somebody who has waited since then.
INLINE void rest_since(int64_t then) {
    if (now_ns() < then + SPIN_NS)
        rest();
    else
        std::this_thread::yield();
}

template <class Done>
INLINE void spin_until(const Done& done) {
    if (done()) return;
    const int64_t since = now_ns();
    while (!done()) rest_since(since);
}

// What threads sleep on until somebody rings it, which wakes them all with one call. If some had to
// wake the others, and lost their core before, the others would sleep on.
class Bell {
  public:
    // Sleeps, unless somebody has rung it since `before`; may wake without cause.
    void sleep(uint32_t before) {
#if defined(__linux__)
        syscall(SYS_futex, &rung, FUTEX_WAIT_PRIVATE, before, nullptr, nullptr, 0);
#else
        if (rung == before) std::this_thread::sleep_for(std::chrono::milliseconds(1));
#endif
    }

    uint32_t times() const { return rung; }

    void ring() {
        ++rung;
#if defined(__linux__)
        syscall(SYS_futex, &rung, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#endif
    }

  private:
    std::atomic<uint32_t> rung{0};
};

// A thread that helps, and what others look at to wait for him.
struct alignas(LINE) Helper {
    std::atomic<bool> entering{false};  // looks at what is the caller's
    std::atomic<bool> inside{false};    // at work, or about to find out that he is too late
    std::thread thread;
};

// The threads that help a caller, his own as long as he lives. After a call they look out for the
// next for a moment and then sleep: those of OpenMP would go on spinning for milliseconds, beside
// the thread that drives the GPU. Nobody takes a lock.
class Crew {
  public:
    using Body = std::shared_ptr<const std::function<void()>>;

    // Runs `body` in this thread and up to `threads - 1` others, and returns when it is out of it
    // here, or with `all` everywhere. Who wakes too late to help is not waited for.
    void run(int threads, const Body& body, bool all) {
        if (getpid() != process) leave_behind();
        const int wanted = int(most(0, least(threads - 1, MOST_HELPERS)));
        while (int(helpers.size()) < wanted) hire();
        work = body;
        announce(++calls << NUMBER_BITS | uint64_t(wanted));
        (*body)();
        // A helper says that he enters before he looks whether the call is open, and here it is
        // the other way round. Both in one order of all threads: he is seen, or he stays out.
        open = CLOSED;
        for (int number = 0; number < wanted; ++number) {
            const Helper& helper = *helpers[number];
            spin_until([&] { return !helper.entering && !(all && helper.inside); });
        }
        work.reset();
    }

    ~Crew() {
        if (getpid() != process) leave_behind();
        announce(OVER);
        for (const auto& helper : helpers) helper->thread.join();
    }

  private:
    static constexpr int NUMBER_BITS = 16;
    static constexpr int64_t MOST_HELPERS = (1 << NUMBER_BITS) - 2;
    static constexpr uint64_t CLOSED = 0, OVER = ~uint64_t(0);

    // A forked child has none of the threads, and must not touch what they may have held.
    void leave_behind() {
        for (auto& helper : helpers) (void)helper.release();
        helpers.clear();
        asleep = 0;
        process = getpid();
    }

    static int wanted_by(uint64_t call) { return int(call & ((1 << NUMBER_BITS) - 1)); }

    void hire() {
        const int number = int(helpers.size());
        helpers.push_back(std::make_unique<Helper>());
        Helper& own = *helpers.back();
        own.thread = std::thread([this, &own, number] { help(own, number); });
    }

    // A helper says that he sleeps before he looks once more, and a call is open before anybody
    // looks who sleeps. Both in one order of all threads: he sees the call, or is woken.
    void announce(uint64_t call) {
        open = call;
        if (wanted_by(call) > 0 && asleep > 0) bell.ring();
    }

    void help(Helper& own, int number) {
        for (uint64_t seen = CLOSED;;) {
            seen = next_call(number, seen);
            if (seen == OVER) return;
            own.inside = own.entering = true;
            Body body;
            if (open == seen) body = work;  // so the caller waits: `work` stays as it is
            own.entering = false;
            if (body) (*body)();
            body.reset();
            own.inside = false;
        }
    }

    uint64_t next_call(int number, uint64_t seen) {
        uint64_t call = CLOSED;
        const auto called = [&] {
            call = open;
            return call != seen && number < wanted_by(call);
        };
        for (;;) {
            const int64_t until = now_ns() + LOOK_OUT_NS;
            spin_until([&] { return called() || now_ns() >= until; });
            if (called()) return call;
            const uint32_t before = bell.times();
            ++asleep;
            if (!called()) bell.sleep(before);
            --asleep;
        }
    }

    // The number of the call that may be entered, and how many helpers it wants. All look at this
    // line, which changes only when a call begins or ends.
    alignas(LINE) std::atomic<uint64_t> open{CLOSED};
    alignas(LINE) Bell bell;
    std::atomic<int> asleep{0};
    alignas(LINE) Body work;
    std::vector<std::unique_ptr<Helper>> helpers;
    uint64_t calls = 0;
    pid_t process = getpid();
};

Crew& crew() {
    static thread_local Crew own;
    return own;
}

}  // namespace
