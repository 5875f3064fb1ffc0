// Orders: how a group is cut into tasks, and who carries them out.
#pragma once

#if defined(__linux__)
#include <sys/prctl.h>
#endif

#include "cpu_tasks.h"
#include "cpu_vectors.h"

namespace {

// Gives a segment its arrays from `at` on, and moves `at` behind them.
void lay_out(const Job& job, Segment& own, char*& at) {
    const int64_t rows = own.tall_rows(), wide = padded(job.d, STEP);
    const int64_t steps = padded(own.rows, STEP), blocks = job.blocks();
    if (own.packed) own.x_tiles = cut_array<char>(at, rows * wide * 2);
    if (!job.backward) {
        own.a = cut_array<char>(at, rows * padded(job.h, STEP) * job.item);
        return;
    }
    if (own.packed) {
        own.dy = cut_array<uint16_t>(at, rows * wide);
        own.dy_turned = cut_array<uint16_t>(at, job.gradients ? wide * steps : 0);
        own.x_pairs = cut_array<uint32_t>(at, job.gradients ? wide * steps / 2 : 0);
    }
    own.weight_shares = cut_array<float>(at, blocks * own.rows);
    own.block_squares = cut_array<double>(at, blocks);
    if (job.shares_dx(own))
        own.dx_shares = cut_array<float>(at, blocks * own.rows * wide);
    else
        own.dh = cut_array<char>(at, job.gates() * rows * padded(job.h, BLOCK) * job.item);
}

// How many rows of weights are one task in forward: with few tokens some long streams of them, with
// many as share the loads of tokens. But every thread should get several tasks, and what is fetched
// ahead must fit the second cache. Nothing here changes a result.
void choose_heights(Job& job, const std::vector<Segment>& segments, int threads) {
    int64_t rows = 0, streams = STREAMS;
    for (const Segment& own : segments) {
        rows = most(rows, own.rows);
        if (own.packed) streams = TILE;
    }
    auto tall = [&](int64_t height, int64_t row_bytes, int64_t gates) {
        const int64_t wanted = rows > MANY_ROWS  ? MAX_TALL * TILE
                               : rows > FEW_ROWS ? 2 * TILE
                                                 : streams * pieces(STREAM, row_bytes);
        const int64_t high = least(wanted, MAX_TALL * TILE);
        int64_t found = streams;
        while (2 * found <= high) {
            const int64_t tasks = int64_t(segments.size()) * height / (2 * found);
            if (tasks < 4 * threads || 2 * found * gates * row_bytes > MAX_AHEAD) break;
            found *= 2;
        }
        return found;
    };
    job.tall_in = tall(job.h, job.d * job.item, job.gates());
    job.tall_out = tall(job.d, job.h * job.item, 1);
}

// One that nobody has any more. It grows and is kept, as its pages would cost as much as weights.
std::shared_ptr<Scratch> free_scratch() {
    static thread_local std::vector<std::shared_ptr<Scratch>> kept;
    for (const auto& scratch : kept) {
        if (scratch.use_count() > 1) continue;
        std::atomic_thread_fence(std::memory_order_acquire);  // who had it is done with it
        return scratch;
    }
    kept.push_back(std::make_shared<Scratch>());
    return kept.back();
}

// False if nothing was done, because the rows did not come.
bool carry_out(const std::shared_ptr<Order>& order) {
    Job& job = order->job;
    std::vector<Segment>& segments = order->segments;
    for (Segment& own : segments)
        own.packed = order->kernel.packs && (job.backward || own.rows > HANDFUL);
    choose_heights(job, segments, order->threads);
    size_t done = 0;
    while (done < segments.size()) {
        int64_t bytes = 0;
        std::vector<Segment> part;
        for (; done < segments.size(); ++done) {
            char* size = nullptr;
            lay_out(job, segments[done], size);
            const int64_t more = reinterpret_cast<intptr_t>(size);
            if (!part.empty() && bytes + more > MAX_SCRATCH) break;
            bytes += more;
            part.push_back(segments[done]);
        }
        const auto scratch = free_scratch();
        char* at = scratch->take(bytes);
        for (Segment& own : part) lay_out(job, own, at);
        const bool last = done == segments.size();
        if (!run_tasks(std::make_shared<Tasks>(order, part, scratch, last), *order)) return false;
        for (const Segment& own : part) {
            if (!own.squares) continue;
            *own.squares = 0.0;
            for (int64_t block = 0; block < job.blocks(); ++block)
                *own.squares += own.block_squares[block];
        }
    }
    order->tell();  // if there was nothing to do
    return true;
}

// A thread that carries out orders one after another, each once its rows are there. Neither the one
// who gives them nor the one who waits for them needs anything but memory for it: both may be a GPU.
class Runner {
  public:
    Runner() : thread(&Runner::work, this) {}

    // `done` comes up to the number of the rows when they are computed; `times`, of begin and end,
    // if anybody wants to know.
    void submit(const std::shared_ptr<Order>& order, std::atomic<uint32_t>* done, int64_t* times) {
        order->rows.given_up = &closed;
        order->done = [this, rows = &order->rows, done, times] {
            if (times) {
                times[0] = rows->seen;
                times[1] = now_ns();
            }
            // First the flag: whoever has the lock may have lost its core, and a GPU needs none.
            done->store(rows->number, std::memory_order_release);
            { const std::lock_guard<std::mutex> guard(lock); }
            changed.notify_all();
        };
        {
            const std::lock_guard<std::mutex> guard(lock);
            orders.push_back(order);
            forget();
            given.push_back(order);
        }
        changed.notify_all();
    }

    // Blocks until the order is done and nobody reads its rows or weights any more; false if the
    // runner was closed before.
    bool wait(const std::atomic<uint32_t>& done, uint32_t number) {
        std::unique_lock<std::mutex> guard(lock);
        changed.wait(guard, [&] { return closed || is_up_to(done, number); });
        if (!is_up_to(done, number)) return false;
        while (!left(number)) {
            guard.unlock();
            std::this_thread::sleep_for(std::chrono::microseconds(20));
            guard.lock();
        }
        return true;
    }

    ~Runner() {
        {
            const std::lock_guard<std::mutex> guard(lock);
            closed = true;
        }
        changed.notify_all();
        thread.join();
    }

  private:
    void work() {
#if defined(__linux__)
        prctl(PR_SET_TIMERSLACK, 1000UL);  // ns: the usual 50000 would be most of a short sleep
#endif
        for (;;) {
            std::shared_ptr<Order> order;
            {
                std::unique_lock<std::mutex> guard(lock);
                changed.wait(guard, [&] { return closed || !orders.empty(); });
                if (closed) return;
                order = std::move(orders.front());
                orders.pop_front();
            }
            if (!carry_out(order)) return;
        }
    }

    void forget() {
        while (!given.empty() && given.front()->told && given.front()->inside == 0)
            given.pop_front();
    }

    // Whether everybody has left the orders up to this one. Who comes now finds nothing to do.
    bool left(uint32_t number) const {
        for (const auto& order : given)
            if (int32_t(number - order->rows.number) >= 0 && order->inside > 0) return false;
        return true;
    }

    std::mutex lock;
    std::condition_variable changed;
    std::deque<std::shared_ptr<Order>> orders;
    std::deque<std::shared_ptr<Order>> given;  // that somebody may still be at
    std::atomic<bool> closed{false};
    std::thread thread;  // last: it begins when all else is there
};

}  // namespace
