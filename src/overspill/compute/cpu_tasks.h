// Jobs: what one call computes, cut into tasks, and the threads that carry them out.
#pragma once

#include "cpu_numbers.h"

namespace {

// One expert of the group, its rows, and its arrays in the scratch of the group.
struct Segment {
    const void* record;
    void* gradient;
    int64_t start, rows;
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
    std::atomic<int64_t> left{0};
    Run* before = nullptr;  // has to be done first
};

constexpr int PHASES = 3;

int64_t tasks_of(const Job& job, const Segment& own, int phase, bool packs) {
    if (phase == 0) return packs ? pieces(own.rows, TILE) : 0;
    if (own.rows == 0 && !job.gradients) return 0;
    if (!job.backward) {
        return phase == 1 ? pieces(padded(job.h, STEP), job.tall_in) : pieces(job.d, job.tall_out);
    }
    if (phase == 1) return job.blocks();
    return own.rows > 0 ? pieces(job.d, BLOCK) : 0;
}

// The weights that a task reads, in backward those that it begins with.
Ahead weights_of(const Job& job, const Segment& own, int phase, int64_t index) {
    const char* in = static_cast<const char*>(own.record);
    const char* out = in + job.gates() * job.h * job.d * job.item;
    const int64_t in_row = job.d * job.item, out_row = job.h * job.item;
    if (phase == 0 || (job.backward && phase == 2)) return Ahead();
    if (job.backward) {
        const int64_t unit = index * BLOCK, count = least(BLOCK, job.h - unit);
        return Ahead(out + unit * job.item, out_row, count * job.item, least(CHUNK, job.d));
    }
    if (phase == 1) {
        const int64_t unit = index * job.tall_in;
        const int64_t count = most(0, least(job.tall_in, job.h - unit));
        return Ahead(in + unit * in_row, job.h * in_row, count * in_row, job.gates());
    }
    const int64_t row = index * job.tall_out, count = least(job.tall_out, job.d - row);
    return Ahead(out + row * out_row, 0, count * out_row, 1);
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

INLINE void wait_for(const Run& run) {
    for (int spins = 0; run.left.load(std::memory_order_acquire) > 0; ++spins) {
#if HAVE_X86
        __builtin_ia32_pause();
#endif
        if (spins > 2000) std::this_thread::yield();  // more threads than cores
    }
}

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

// The threads that help a caller, his own as long as he lives. After a call they look out for the
// next for a moment and then sleep: those of OpenMP would go on spinning for milliseconds, beside
// the thread that drives the GPU.
class Crew {
  public:
    // Runs `body` in this thread and up to `threads - 1` others, and returns when all are out of it.
    // Who wakes too late to help is not waited for.
    void run(int threads, const std::function<void()>& body) {
        while (int(workers.size()) < threads - 1) {
            workers.emplace_back(&Crew::work, this, int(workers.size()));
        }
        {
            const std::lock_guard<std::mutex> guard(lock);
            open = &body;
            wanted = threads - 1;
            round.fetch_add(1, std::memory_order_release);
        }
        if (wanted > 0) wake.notify_all();
        body();
        std::unique_lock<std::mutex> guard(lock);
        open = nullptr;
        finished.wait(guard, [&] { return inside == 0; });
    }

    ~Crew() {
        {
            const std::lock_guard<std::mutex> guard(lock);
            closed = true;
        }
        wake.notify_all();
        for (std::thread& worker : workers) worker.join();
    }

  private:
    void work(int number) {
        int64_t seen = 0;
        for (;;) {
            const std::function<void()>* body = nullptr;
            const int64_t until = now_ns() + LOOK_OUT_NS;
            while (round.load(std::memory_order_acquire) == seen && now_ns() < until) rest();
            {
                std::unique_lock<std::mutex> guard(lock);
                wake.wait(guard, [&] { return closed || round.load() != seen; });
                if (closed) return;
                seen = round.load();
                if (number >= wanted || open == nullptr) continue;
                body = open;
                ++inside;
            }
            (*body)();
            const std::lock_guard<std::mutex> guard(lock);
            if (--inside == 0) finished.notify_one();
        }
    }

    std::mutex lock;
    std::condition_variable wake, finished;
    std::vector<std::thread> workers;
    const std::function<void()>* open = nullptr;
    std::atomic<int64_t> round{0};
    int wanted = 0, inside = 0;
    bool closed = false;
};

Crew& crew() {
    static thread_local Crew own;
    return own;
}

void run_tasks(const Job& job, std::vector<Segment>& segments, const Kernel& kernel, int threads) {
    std::vector<Run> runs(PHASES * segments.size());
    int64_t total = 0;
    for (int phase = 0; phase < PHASES; ++phase) {
        for (size_t s = 0; s < segments.size(); ++s) {
            Run& run = runs[phase * segments.size() + s];
            run.phase = phase;
            run.own = &segments[s];
            run.first = total;
            run.left = tasks_of(job, segments[s], phase, kernel.packs);
            run.before = phase > 0 ? &runs[(phase - 1) * segments.size() + s] : nullptr;
            total += run.left;
        }
    }
    const Run* const end = runs.data() + runs.size();
    std::atomic<int64_t> next{0};
    // Tasks are taken in order and one ahead, so that the weights of the next can be on their way
    // while this one computes. Whoever waits, waits for tasks that come earlier in the order, so
    // somebody always goes on.
    const std::function<void()> body = [&] {
        kernel.enter();
        Run* run = runs.data();
        auto run_of = [&](Run* from, int64_t task) {
            while (from + 1 < end && from[1].first <= task) ++from;
            return from;
        };
        int64_t mine = next.fetch_add(1);
        while (mine < total) {
            const int64_t ahead = next.fetch_add(1);
            run = run_of(run, mine);
            if (run->before) wait_for(*run->before);
            Ahead weights;
            if (ahead < total) {
                const Run* other = run_of(run, ahead);
                weights = weights_of(job, *other->own, other->phase, ahead - other->first);
            }
            kernel.task(job, *run->own, run->phase, mine - run->first, weights);
            run->left.fetch_sub(1, std::memory_order_release);
            mine = ahead;
        }
        kernel.leave();
    };
    crew().run(int(least(threads, total)), body);
}

}  // namespace
