// A thread that computes requests, which flags in memory start and end.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>

#include "cpu_executor.h"

namespace {

constexpr int DONE = 0, TIMED_OUT = -1, CLOSED = -2;

// Thread that computes requests one after another, each as soon as its token rows are ready. It
// communicates through flags in memory, so a GPU can signal and await them.
class Runner {
  public:
    Runner() : thread(&Runner::work, this) {}

    // `done` reaches the request's number when the results are complete. `times` receives begin and
    // end (CLOCK_MONOTONIC, ns), the end last.
    void submit(std::unique_ptr<Request> request, Flag* done, int64_t* times) {
        request->finished_tasks = &finished_tasks;
        request->complete = [this, from = request.get(), done, times] {
            from->store_squares();
            times[0] = from->began;
            __atomic_store_n(&times[1], now_ns(), __ATOMIC_RELEASE);
            // Before the lock is taken: its holder may be preempted, and a GPU needs the flag only.
            done->store(from->number, std::memory_order_release);
            { const std::lock_guard<std::mutex> guard(lock); }
            changed.notify_all();
        };
        {
            const std::lock_guard<std::mutex> guard(lock);
            requests.push_back(std::move(request));
        }
        changed.notify_all();
    }

    // Blocks until the request is done, the runner is closed, or for some seconds: the caller may
    // have other reasons to give up. `progress` receives the number of tasks finished so far.
    int wait(const Flag& done, uint32_t number, double seconds, int64_t* progress) {
        std::unique_lock<std::mutex> guard(lock);
        changed.wait_for(guard, std::chrono::duration<double>(seconds),
                         [&] { return closed || reached(done, number); });
        *progress = finished_tasks;
        return reached(done, number) ? DONE : closed ? CLOSED : TIMED_OUT;
    }

    // Finishes the request that is being computed and discards the others. Threads in wait() return.
    void close() {
        {
            const std::lock_guard<std::mutex> guard(lock);
            closed = true;
        }
        changed.notify_all();
        if (thread.joinable()) thread.join();
    }

    ~Runner() { close(); }

  private:
    void work() {
        shorten_sleeps();
        Executor executor;
        for (;;) {
            std::unique_ptr<Request> request;
            {
                std::unique_lock<std::mutex> guard(lock);
                changed.wait(guard, [&] { return closed || !requests.empty(); });
                if (closed) return;
                request = std::move(requests.front());
                requests.pop_front();
            }
            if (request->inject) request->inject();
            if (!executor.execute(*request, closed)) return;
        }
    }

    std::mutex lock;
    std::condition_variable changed;
    std::deque<std::unique_ptr<Request>> requests;
    std::atomic<bool> closed{false};
    std::atomic<int64_t> finished_tasks{0};
    std::thread thread;  // last: it starts when all other members exist
};

}  // namespace
