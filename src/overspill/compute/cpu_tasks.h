// Jobs: what one call computes, cut into tasks that threads take in turn.
#pragma once

#include "cpu_crew.h"
#include "cpu_numbers.h"

namespace {

// One expert of the group, its rows, and its arrays in the scratch of the group.
struct Segment {
    const void* record;
    void* gradient;
    int64_t start, rows;
    bool packed;           // for the tiles of AMX, which compute it
    double* squares;       // of the whole gradient, or null
    char* x_tiles;         // AMX: x, packed for nt
    char* a;               // forward: the activation; AMX: packed for nt
    uint16_t* dy;          // AMX: dy, padded
    uint16_t* dy_turned;   // AMX: dy^T, padded
    uint32_t* x_pairs;     // AMX: x with each two rows interleaved
    char* dh;              // all of dh, unless every block has its share of dx
    float* dx_shares;      // [blocks, R, D], D padded
    float* weight_shares;  // [blocks, R]: of the gradient of routing weights
    double* block_squares;
};

struct Job {
    const void *x, *dy;
    void *y, *dx;
    const float* row_weight;
    float* drow_weight;
    int64_t x_stride, dy_stride, y_stride, dx_stride;  // elements between rows
    int64_t d, h;
    bool gated, backward, gradients;
    int64_t item;               // bytes of a weight
    int64_t tall_in, tall_out;  // hidden units and rows of w_out to a task of forward

    int64_t gates() const { return gated ? 2 : 1; }
    int64_t blocks() const { return pieces(h, BLOCK); }
    bool shares_dx(const Segment& own) const { return own.rows <= SHARED_DX_ROWS; }
};

template <class T>
INLINE const T* w_in(const Segment& own) {
    return static_cast<const T*>(own.record);
}
template <class T>
INLINE const T* w_out(const Job& job, const Segment& own) {
    return static_cast<const T*>(own.record) + job.gates() * job.h * job.d;
}
template <class T>
INLINE const T* rows_of(const void* base, int64_t stride, const Segment& own) {
    return static_cast<const T*>(base) + own.start * stride;
}
template <class T>
INLINE T* rows_of(void* base, int64_t stride, const Segment& own) {
    return static_cast<T*>(base) + own.start * stride;
}

// Tasks of one phase of one segment. Phase 0 packs tokens; then come the hidden units and the
// output in forward, the blocks and dx in backward.
struct Run {
    int phase = 0;
    Segment* own = nullptr;
    int64_t first = 0;
    Run* before = nullptr;                       // has to be done first
    alignas(LINE) std::atomic<int64_t> left{0};  // apart from what everybody only reads
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

// The rows of w_in of some hidden units, as far as they fit the second cache.
Ahead hidden_weights(const Job& job, const Segment& own, int64_t unit, int64_t count) {
    const int64_t row = job.d * job.item;
    return Ahead(static_cast<const char*>(own.record) + unit * row, job.h * row,
                 least(count * row, MAX_AHEAD / job.gates()), job.gates());
}

// The columns of w_out of some hidden units, without the first rows. They are fetched just before
// they are used: where rows are a power of two apart, few of them fit a cache.
Ahead output_weights(const Job& job, const Segment& own, int64_t unit, int64_t count) {
    const int64_t row = job.h * job.item;
    const char* out = static_cast<const char*>(own.record) + job.gates() * job.h * job.d * job.item;
    return Ahead(out + ROWS_AHEAD * row + unit * job.item, row, count * job.item,
                 most(0, job.d - ROWS_AHEAD));
}

// The weights that a task reads in one run, all or some.
Ahead weights_of(const Job& job, const Segment& own, int phase, int64_t index) {
    if (phase == 0 || (job.backward && phase == 2)) return Ahead();
    if (phase == 1) {
        const int64_t tall = job.backward ? BLOCK : job.tall_in, unit = index * tall;
        return hidden_weights(job, own, unit, most(0, least(tall, job.h - unit)));
    }
    const char* out = static_cast<const char*>(own.record) + job.gates() * job.h * job.d * job.item;
    const int64_t first = index * job.tall_out, count = least(job.tall_out, job.d - first);
    const int64_t row = job.h * job.item;
    return Ahead(out + first * row, 0, count * row, 1);
}

// The last argument is what the next task reads.
using Task = void (*)(const Job&, const Segment&, int phase, int64_t index, Ahead&);

struct Kernel {
    Task task;
    bool packs;
    void (*enter)();  // once in every worker, before its first task
    void (*leave)();
};

void nothing() {}

constexpr int64_t SOME_LINES = 32;

// Meanwhile the waiting thread fetches its own weights, so that the memory does not wait as well.
INLINE void wait_for(const Run& run, Ahead weights) {
    spin_until([&] {
        if (run.left.load(std::memory_order_acquire) <= 0) return true;
        weights.fetch(SOME_LINES);
        return false;
    });
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

// The tasks of a job, in order: whoever waits, waits for tasks that come earlier, so somebody always
// goes on. The first ones wait for nothing but the rows, and every thread has its own of these: so
// it can fetch the weights before the rows are there. Who comes too late finds it taken.
class Tasks {
  public:
    Tasks(const Job& job, std::vector<Segment>& segments, int threads, Rows& rows)
        : job(job), rows(rows), runs(PHASES * segments.size()) {
        int64_t free = 0;
        for (int phase = 0; phase < PHASES; ++phase) {
            for (size_t s = 0; s < segments.size(); ++s) {
                Run& run = runs[phase * segments.size() + s];
                run.phase = phase;
                run.own = &segments[s];
                run.first = total;
                run.left = tasks_of(job, segments[s], phase);
                run.before = phase > 0 ? &runs[(phase - 1) * segments.size() + s] : nullptr;
                total += run.left;
            }
            if (free == 0) free = total;
        }
        firsts = least(threads, free);
        begun = std::vector<std::atomic<bool>>(firsts);
        next.value = firsts;
    }

    // In every thread. All return, and nothing is done, if the rows do not come for long.
    void work(const Kernel& kernel) {
        const int64_t number = arrivals.value.fetch_add(1);
        const bool has_own = number < firsts;
        Run* run = run_of(runs.data(), has_own ? number : 0);
        if (!await_rows(has_own ? weights_at(*run, number) : Ahead())) return;
        const FlushDenormals flush;
        kernel.enter();
        int64_t mine = has_own && begin(number) ? number : take();
        while (mine < total) {
            run = run_of(run, mine);
            // One task ahead, if its weights can be on their way while this one computes.
            const bool early = fetches_ahead(job, *run->own);
            const int64_t then = early ? take() : total;
            Ahead weights;
            if (then < total) weights = weights_at(*run_of(run, then), then);
            if (run->before) wait_for(*run->before, weights_at(*run, mine));
            kernel.task(job, *run->own, run->phase, mine - run->first, weights);
            run->left.fetch_sub(1, std::memory_order_release);
            mine = early ? then : take();
        }
        kernel.leave();
    }

    bool late() const { return state == LATE; }
    void rows_are_there() { state = THERE; }

    int64_t total = 0;

  private:
    enum { AWAITED, THERE, LATE };

    struct alignas(LINE) Counter {  // apart from what everybody only reads
        std::atomic<int64_t> value{0};
    };

    // Everybody gets the same answer, or few would do the work of all.
    bool await_rows(Ahead weights) {
        for (;;) {
            const int known = state.load(std::memory_order_acquire);
            if (known != AWAITED) return known == THERE;
            int before = AWAITED;
            if (rows.come()) {
                rows.note();
                state.compare_exchange_strong(before, THERE);
            } else if (now_ns() >= until) {
                state.compare_exchange_strong(before, LATE);
            }
            weights.fetch(SOME_LINES);
            rest();
        }
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

    const Job& job;
    Rows& rows;
    std::vector<Run> runs;
    int64_t firsts = 0;
    const int64_t until = now_ns() + 4 * LOOK_OUT_NS;
    std::vector<std::atomic<bool>> begun;
    Counter arrivals, looked, next;
    alignas(LINE) std::atomic<int> state{rows.there ? AWAITED : THERE};
};

// False if the rows did not come before whoever waits for them gave up.
bool run_tasks(const Job& job, std::vector<Segment>& segments, const Kernel& kernel, int threads,
               Rows& rows) {
    Tasks tasks(job, segments, threads, rows);
    const std::function<void()> body = [&] { tasks.work(kernel); };
    const int wanted = int(least(threads, tasks.total));
    crew().run(wanted, body);  // early enough: to wake the helpers takes as long as rows to come
    if (!tasks.late()) return true;
    while (!rows.come()) {
        if (*rows.given_up) return false;
        std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    rows.note();
    tasks.rows_are_there();
    crew().run(wanted, body);
    return true;
}

}  // namespace
