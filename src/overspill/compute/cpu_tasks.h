// The tasks of a job, which threads take in turn.
#pragma once

#include "cpu_crew.h"
#include "cpu_job.h"

namespace {

// Tasks of one phase of one segment. Phase 0 packs tokens; then come the hidden units and the
// output in forward, the blocks and dx in backward.
struct Run {
    int phase = 0;
    Segment* own = nullptr;
    int64_t first = 0, count = 0;
    Run* before = nullptr;                       // has to be done first
    alignas(LINE) std::atomic<int64_t> left{0};  // apart from what everybody only reads

    bool over() const { return left.load(std::memory_order_acquire) <= 0; }
};

constexpr int PHASES = 3;

int64_t tasks_of(const Job& job, const Segment& own, int phase) {
    if (phase == 0) return own.packed ? pieces(own.rows, TILE) : 0;
    if (own.rows == 0 && !job.gradients) return 0;
    if (!job.backward) {
        return phase == 1 ? pieces(padded(job.h, STEP), job.tall_in) : pieces(job.d, job.tall_out);
    }
    if (phase == 1) return job.blocks();
    return own.rows > 0 ? pieces(job.d, BLOCK) : 0;
}

// Numbers go round.
bool is_up_to(const std::atomic<uint32_t>& flag, uint32_t number) {
    return int32_t(flag.load(std::memory_order_acquire) - number) >= 0;
}

// Rows that somebody else writes, who then puts `number` into `there`.
struct Rows {
    const std::atomic<uint32_t>* there = nullptr;  // null: they are there
    uint32_t number = 0;
    const std::atomic<bool>* given_up = nullptr;
    std::atomic<int64_t> seen{0};  // when they were

    bool come() const { return !there || is_up_to(*there, number); }

    // The first one who sees them notes the time.
    void note() {
        int64_t never = 0;
        if (!seen.load(std::memory_order_relaxed)) seen.compare_exchange_strong(never, now_ns());
    }
};

// Whether a task has time to fetch what the next one reads. With few rows it has none, and then a
// task that was taken ahead would only be one that no idle thread can take.
bool fetches_ahead(const Job& job, const Segment& own) {
    return job.backward || own.rows > 2 * TILE;
}

// What to compute, and how. Whoever works on it keeps it.
struct Order {
    Job job{};
    std::vector<Segment> segments;
    Kernel kernel{};
    int threads = 1;
    Rows rows;
    // Called once, by the first one who sees that all is done, while others may still be at tasks
    // that were done again. Null: whoever ordered it waits until nobody is.
    std::function<void()> done;
    std::atomic<bool> told{false};
    std::atomic<int> inside{0};  // threads that may read rows and weights

    bool may_repeat() const { return done && !job.gradients && delays.may_repeat; }

    void tell() {
        if (done && !told.exchange(true)) done();
    }
};

constexpr int64_t SOME_LINES = 32;  // to fetch between two looks
// How long one waits for others' tasks before one does them again: this and what some tasks of one's
// own took, or if there were none, as long as would be too long for any.
constexpr int64_t PATIENCE_NS = 50000, LONG_PATIENCE_NS = 1000000;

// The tasks of some segments, in order: whoever waits, waits for tasks that come earlier, so somebody
// always goes on. The first ones wait for nothing but the rows, and every thread has its own of
// these: so it can fetch the weights before the rows are there. Who comes too late finds it taken.
//
// A thread may lose its core in the middle of a task, for longer than all of them take: to another
// program, or another machine of the same host. Who waits for it does its task again.
class Tasks {
  public:
    Tasks(std::shared_ptr<Order> order, std::vector<Segment> segments,
          std::shared_ptr<Scratch> scratch, bool last)
        : order(std::move(order)),
          job(this->order->job),
          segments(std::move(segments)),
          scratch(std::move(scratch)),
          last(last),
          runs(PHASES * this->segments.size()),
          state(this->order->rows.there ? AWAITED : THERE) {
        const size_t count = this->segments.size();
        int64_t free = 0;
        for (int phase = 0; phase < PHASES; ++phase) {
            for (size_t s = 0; s < count; ++s) {
                Run& run = runs[phase * count + s];
                run.phase = phase;
                run.own = &this->segments[s];
                run.first = total;
                run.count = tasks_of(job, *run.own, phase);
                run.left = run.count;
                run.before = phase > 0 ? &runs[(phase - 1) * count + s] : nullptr;
                total += run.count;
            }
            if (free == 0) free = total;
        }
        firsts = least(this->order->threads, free);
        begun = std::vector<std::atomic<bool>>(firsts);
        published = std::vector<std::atomic<bool>>(SPREAD * padded(pieces(total, SPREAD), LINE));
        next.value = firsts;
    }

    // In every thread. All return, and nothing is done, if the rows do not come for long.
    void work() {
        const Inside inside(*order);
        const int64_t number = arrivals.value.fetch_add(1);
        const bool has_own = number < firsts;
        Run* run = run_of(runs.data(), has_own ? number : 0);
        if (!await_rows(has_own ? weights_at(*run, number) : Ahead())) return;
        const FlushDenormals flush;
        order->kernel.enter();
        Worker worker{number, now_ns()};
        int64_t mine = has_own && begin(number) ? number : take();
        while (mine < total) {
            run = run_of(run, mine);
            // One task ahead, if its weights can be on their way while this one computes.
            const bool early = fetches_ahead(job, *run->own);
            const int64_t then = early ? take() : total;
            Ahead weights;
            if (then < total) weights = weights_at(*run_of(run, then), then);
            if (const Run* before = run->before)
                wait_until([&] { return before->over(); }, weights_at(*run, mine), worker);
            if (!is_published(mine)) compute(*run, mine, weights, worker);
            mine = early ? then : take();
        }
        if (order->done) {
            wait_until([&] { return first_unfinished() == nullptr; }, Ahead(), worker);
            if (last) order->tell();
        }
        order->kernel.leave();
    }

    bool late() const { return state == LATE; }
    void rows_are_there() { state = THERE; }

    int64_t total = 0;

  private:
    enum { AWAITED, THERE, LATE };
    static constexpr int64_t SPREAD = 16;

    struct alignas(LINE) Counter {  // apart from what everybody only reads
        std::atomic<int64_t> value{0};
    };

    struct Inside {
        explicit Inside(Order& order) : order(order) { ++order.inside; }
        ~Inside() { --order.inside; }
        Order& order;
    };

    struct Worker {
        int64_t number, since, tasks = 0;

        // By the mean: to look at the clock at each task would make the CPU wait for the weights.
        int64_t patience() const {
            return tasks ? PATIENCE_NS + 4 * (now_ns() - since) / tasks : LONG_PATIENCE_NS;
        }
    };

    // Everybody gets the same answer, or few would do the work of all. Who waits for long lets others
    // have the core: perhaps the one who sends the rows.
    bool await_rows(Ahead weights) {
        const int64_t came = now_ns();
        for (;;) {
            const int known = state.load(std::memory_order_acquire);
            if (known != AWAITED) return known == THERE;
            int before = AWAITED;
            if (order->rows.come()) {
                order->rows.note();
                state.compare_exchange_strong(before, THERE);
            } else if (now_ns() >= until) {
                state.compare_exchange_strong(before, LATE);
            }
            weights.fetch(SOME_LINES);
            rest_since(came);
        }
    }

    void compute(Run& run, int64_t task, const Ahead& weights, Worker& worker) {
        Turn turn(weights, is_published(task));
        order->kernel.task(job, *run.own, run.phase, task - run.first, turn);
        if (turn.won) run.left.fetch_sub(1, std::memory_order_release);
        if (run.phase > 0) ++worker.tasks;  // to pack is nothing beside the others
    }

    // Meanwhile the waiting thread fetches its own weights, so that the memory does not wait as
    // well; and after a while it does again what others have not finished.
    template <class Done>
    void wait_until(const Done& done, Ahead weights, Worker& worker) {
        if (done()) return;
        int64_t patience = worker.patience(), since = now_ns();
        while (!done()) {
            weights.fetch(SOME_LINES);
            const int64_t waited = now_ns() - since;
            if (order->may_repeat() && waited > patience) {
                compute_again(worker);
                patience = worker.patience();
                since = now_ns();
            } else {
                rest_since(since);
            }
        }
    }

    Run* first_unfinished() {
        for (Run& run : runs)
            if (!run.over()) return &run;
        return nullptr;
    }

    // One of the tasks that are not published in the first unfinished run; all runs before it are
    // over. Most often all its tasks are taken, and who takes one later only finds it done.
    void compute_again(Worker& worker) {
        Run* run = first_unfinished();
        if (!run) return;
        std::vector<int64_t> missing;
        for (int64_t task = run->first; task < run->first + run->count; ++task)
            if (!is_published(task)) missing.push_back(task);
        if (missing.empty()) return;
        ++delays.repeats;
        compute(*run, missing[worker.number % missing.size()], Ahead(), worker);
    }

    // Neighbours are published at about the same time, and so lie on different lines.
    std::atomic<bool>& is_published(int64_t task) {
        return published[task % SPREAD * (published.size() / SPREAD) + task / SPREAD];
    }

    bool begin(int64_t first) { return !begun[first].exchange(true); }

    // First what a thread that has not come yet should have begun with, then the others.
    int64_t take() {
        while (looked.value.load(std::memory_order_relaxed) < firsts) {
            const int64_t first = looked.value.fetch_add(1);
            if (first < firsts && begin(first)) return first;
        }
        return next.value.fetch_add(1);
    }

    // Looks from `from` on: most tasks come later than the last one.
    Run* run_of(Run* from, int64_t task) {
        const Run* const end = runs.data() + runs.size();
        if (task < from->first) from = runs.data();
        while (from + 1 < end && from[1].first <= task) ++from;
        return from;
    }

    Ahead weights_at(const Run& at, int64_t task) {
        return weights_of(job, *at.own, at.phase, task - at.first);
    }

    const std::shared_ptr<Order> order;
    const Job& job;
    std::vector<Segment> segments;
    const std::shared_ptr<Scratch> scratch;  // whose arrays the segments have
    const bool last;                         // of the order
    std::vector<Run> runs;
    int64_t firsts = 0;
    const int64_t until = now_ns() + 4 * LOOK_OUT_NS;
    std::vector<std::atomic<bool>> begun, published;
    Counter arrivals, looked, next;
    alignas(LINE) std::atomic<int> state;
};

// False if the rows did not come before whoever waits for them gave up.
bool run_tasks(const std::shared_ptr<Tasks>& tasks, Order& order) {
    const auto body = std::make_shared<const std::function<void()>>([tasks] { tasks->work(); });
    const int wanted = int(least(order.threads, tasks->total));
    const bool all = !order.done;
    crew().run(wanted, body, all);  // early: to wake the helpers takes as long as rows to come
    if (!tasks->late()) return true;
    while (!order.rows.come()) {
        if (*order.rows.given_up) return false;
        std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    order.rows.note();
    tasks->rows_are_there();
    crew().run(wanted, body, all);
    return true;
}

}  // namespace
