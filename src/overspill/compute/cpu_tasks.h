// A request to compute a group of experts, and its tasks, which the threads of a pool share.
#pragma once

#include "cpu_math.h"
#include "cpu_thread_pool.h"

namespace {

using Flag = std::atomic<uint32_t>;
static_assert(sizeof(Flag) == sizeof(uint32_t), "a flag is a 32-bit number in memory");

// Flags count up and wrap around.
bool reached(const Flag& flag, uint32_t number) {
    return int32_t(flag.load(std::memory_order_acquire) - number) >= 0;
}

struct Request {
    Group group{};
    TaskFunction function = nullptr;
    std::vector<ExpertRows> experts;  // those with token rows
    std::vector<double> square_shares;  // of the weight gradients of all experts
    const Flag* ready = nullptr;      // reaches `number` when the token rows are ready; may be null
    uint32_t number = 0;
    void (*inject)() = nullptr;      // fault-injection tests: called before every task
    std::function<void()> complete;  // called once, when all results are written; may be empty
    std::atomic<int64_t> began{0};   // when a thread first saw that the rows are ready
    std::atomic<int64_t>* finished_tasks = nullptr;  // counted there; may be null

    bool is_ready() const { return !ready || reached(*ready, number); }

    // After the last task: the sums of squares of the weight gradients.
    void store_squares() const {
        for (const ExpertRows& own : experts) {
            if (!own.forms_gradient()) continue;
            double total = 0.0;
            for (int64_t i = 0; i < group.square_shares(); ++i) total += own.square_shares[i];
            *own.square = float(total);
        }
    }

    void note_begin() {
        int64_t never = 0;
        if (!began.load(std::memory_order_relaxed)) began.compare_exchange_strong(never, now_ns());
    }
};

// The tasks of some experts of a request, ordered by phase. A thread waits only for tasks that come
// earlier in this order, so one thread can always proceed.
class Tasks {
  public:
    // Tasks of one phase of one expert.
    struct Range {
        int phase = 0;
        const ExpertRows* expert = nullptr;
        int64_t first = 0;
        const Range* before = nullptr;               // must be finished first
        alignas(LINE) std::atomic<int64_t> left{0};  // apart from the fields that are only read
    };

    // Number of tasks of each phase and thread that were taken. Few cache lines: threads that
    // take over tasks look at all of them.
    using Counters = std::vector<std::atomic<int32_t>>;

    // `memory` and `counters` are replaced if they are too small.
    Tasks(Request& request, const std::vector<ExpertRows>& experts, std::vector<Range>& memory,
          Counters& counters, bool last)
        : request(request),
          group(request.group),
          last(last),
          range_count(PHASES * experts.size()),
          state(request.ready ? WAITING : READY) {
        if (memory.size() < range_count) memory = std::vector<Range>(range_count);
        ranges = memory.data();
        for (size_t i = 0; i < range_count; ++i) {
            Range& range = ranges[i];
            range.phase = int(i / experts.size());
            range.expert = &experts[i % experts.size()];
            range.first = total;
            range.left = task_count(group, *range.expert, range.phase);
            range.before = range.phase > 0 ? &ranges[i - experts.size()] : nullptr;
            total += range.left;
            unfinished += range.left > 0;
            ends[range.phase] = total;
        }
        threads = int(least(group.threads, total));
        if (counters.size() < size_t(PHASES * threads)) counters = Counters(PHASES * threads);
        taken = counters.data();
        restart();
    }

    // Called by every thread. A thread takes its first task before the token rows are ready and
    // prefetches its weights. If the rows are not ready in time, all threads return without having
    // computed anything, and timed_out() is true.
    void work() {
        Cursor cursor;
        int64_t task = take(cursor);
        Range* range = range_of(ranges, task);
        if (!await_rows(task < total ? weights_of(*range, task) : Prefetch())) return;
        const FlushDenormals flush;
        while (task < total) {
            range = range_of(range, task);
            // One task ahead, if its weights can be fetched while this one computes. With few token
            // rows they cannot, and a task taken ahead is lost for idle threads.
            const bool ahead = group.backward || range->expert->rows > 2 * TILE;
            const int64_t following = ahead ? take(cursor) : total;
            Prefetch weights;
            // Products of codes prefetch the beginning of a task that this thread probably gets.
            const int64_t probable = range->expert->fused ? find(cursor) : following;
            if (probable < total) weights = weights_of(*range_of(range, probable), probable);
            if (request.inject) request.inject();
            if (range->before) await_range(*range->before, weights_of(*range, task));
            request.function(group, *range->expert, range->phase, task - range->first, weights);
            finish(*range);
            task = ahead ? following : take(cursor);
        }
    }

    bool timed_out() const { return state == LATE; }

    // Between two calls of work(), after timed_out(): the rows are ready now.
    void rows_are_ready() {
        restart();
        state = READY;
    }

    // Loads the weights that this thread will need into its cache, up to `bytes`, until `stop`
    // returns true; returns whether all was loaded.
    template <class Stop>
    bool load(int64_t bytes, const Stop& stop) const {
        for (int phase = 0; phase < PHASES; ++phase)
            for (int64_t task = first(phase) + pool_index; task < ends[phase]; task += threads)
                for (Prefetch weights = weights_of(*range_of(ranges, task), task);
                     weights.rows > 0 && bytes > 0; bytes -= LINES_PER_CHECK * LINE) {
                    if (stop()) return false;
                    weights.fetch(LINES_PER_CHECK);
                }
        return true;
    }

    int64_t total = 0;
    int threads = 0;  // that work() is for

  private:
    enum { WAITING, READY, LATE };
    static constexpr int64_t READY_TIMEOUT_NS = 4 * IDLE_SPIN_NS;
    static constexpr int64_t LINES_PER_CHECK = 32;

    struct Cursor {
        int phase = 0;
        int offset = 0;  // from this thread to the one whose tasks it takes
    };

    // The next task of a thread, or of one that is behind; `total` after the last one. Every thread
    // gets the same ones for the same group if none is behind, so that their weights may be in its
    // cache. All tasks of a phase are taken before those of the next one.
    int64_t take(Cursor& at) {
        while (find(at) < total) {
            const int64_t own = task_at(at, taken_at(at).fetch_add(1, std::memory_order_relaxed));
            if (own < ends[at.phase]) return own;
        }
        return total;
    }

    // The task that take() will return, unless another thread takes it first.
    int64_t find(Cursor& at) const {
        for (; at.phase < PHASES; ++at.phase, at.offset = 0)
            for (; at.offset < threads; ++at.offset) {
                const int64_t task = task_at(at, taken_at(at).load(std::memory_order_relaxed));
                if (task < ends[at.phase]) return task;
            }
        return total;
    }

    int owner(const Cursor& at) const { return (pool_index + at.offset) % threads; }
    std::atomic<int32_t>& taken_at(const Cursor& at) const {
        return taken[at.phase * threads + owner(at)];
    }
    int64_t task_at(const Cursor& at, int64_t number) const {
        return first(at.phase) + owner(at) + number * threads;
    }

    void restart() {
        for (int i = 0; i < PHASES * threads; ++i) taken[i].store(0, std::memory_order_relaxed);
    }

    int64_t first(int phase) const { return phase > 0 ? ends[phase - 1] : 0; }

    // All threads must get the same answer, or few threads would do all the work.
    bool await_rows(Prefetch weights) {
        for (Waiting waiting;;) {
            const int known = state.load(std::memory_order_acquire);
            if (known != WAITING) return known == READY;
            int expected = WAITING;
            if (request.is_ready()) {
                request.note_begin();
                state.compare_exchange_strong(expected, READY);
            } else if (now_ns() >= deadline) {
                state.compare_exchange_strong(expected, LATE);
            }
            weights.fetch(LINES_PER_CHECK);
            waiting.relax(1);
        }
    }

    // Meanwhile the thread prefetches its own weights, so that the memory is not idle.
    void await_range(const Range& range, Prefetch weights) {
        for (Waiting waiting; range.left.load(std::memory_order_acquire) > 0; waiting.relax(1))
            weights.fetch(LINES_PER_CHECK);
    }

    void finish(Range& range) {
        if (request.finished_tasks) request.finished_tasks->fetch_add(1, std::memory_order_relaxed);
        if (range.left.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
        if (unfinished.fetch_sub(1) == 1 && last && request.complete) request.complete();
    }

    // Searches from `from` on: most tasks come later than the previous one.
    Range* range_of(Range* from, int64_t task) const {
        const Range* const end = ranges + range_count;
        if (task < from->first) from = ranges;
        while (from + 1 < end && from[1].first <= task) ++from;
        return from;
    }

    Prefetch weights_of(const Range& range, int64_t task) const {
        return first_weights(group, *range.expert, range.phase, task - range.first);
    }

    Request& request;
    const Group& group;
    const bool last;  // of the request
    const size_t range_count;
    Range* ranges;
    const int64_t deadline = now_ns() + READY_TIMEOUT_NS;
    int64_t ends[PHASES] = {};  // of the tasks of each phase
    std::atomic<int32_t>* taken;
    alignas(LINE) std::atomic<int64_t> unfinished{0};  // ranges
    std::atomic<int> state;
};

}  // namespace
