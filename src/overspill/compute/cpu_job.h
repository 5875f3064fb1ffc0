// A job: what one call computes, and the tasks that it is made of.
#pragma once

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

    int64_t tall_rows() const { return packed ? padded(rows, TILE) : rows; }
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

// For tests: every so many turns of all threads sleep for a while, as if the host had taken their
// core; and how many tasks were done again since that was said.
struct Delays {
    std::atomic<int64_t> every{0}, ns{0}, turns{0}, repeats{0};
    std::atomic<bool> may_repeat{true};  // off: to measure what doing tasks again is worth

    void maybe() {
        const int64_t each = every.load(std::memory_order_relaxed);
        if (each > 0 && ++turns % each == 0)
            std::this_thread::sleep_for(std::chrono::nanoseconds(ns.load()));
    }
};

Delays delays;

// One thread's go at a task. Two may be at the same one, if the first seems to have lost its core.
// So all that it makes is its own, until it asks whether it may write it where others read; only
// the first one may. What another one reads after that is of no use, and may be anything. (Gradients
// of weights are too large for that, and tasks that make them are never done twice.)
class Turn {
  public:
    Turn(const Ahead& ahead, std::atomic<bool>& published) : ahead(ahead), published(published) {}

    bool may_publish() {
        delays.maybe();
        return won = !published.exchange(true);
    }

    Ahead ahead;  // what the next task reads
    bool won = false;

  private:
    std::atomic<bool>& published;
};

// Has to ask its turn before it writes, once.
using Task = void (*)(const Job&, const Segment&, int phase, int64_t index, Turn&);

struct Kernel {
    Task task;
    bool packs;
    void (*enter)();  // once in every worker, before its first task
    void (*leave)();
};

void nothing() {}

}  // namespace
