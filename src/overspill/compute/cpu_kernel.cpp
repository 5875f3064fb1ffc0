// Forward and backward of a group of experts on the CPU: several experts, each with its own rows.
//
// Plain C ABI, called through ctypes (which drops the GIL for the call). Few rows are bound by the
// reading of the weights, so weights are read once, where they lie, in long runs.
//
// Names: D model, H hidden, R rows of a segment. A record holds w_in [H or 2H, D], then w_out
// [D, H]. T is a weight: float, or uint16_t standing for bf16. There are three products:
//     nt  C = W X^T   of rows of weights with rows of tokens; both run along the sum
//     nn  C = A B     of tokens with rows of weights, the sum running over these rows
//     tn  C = A^T B   of two sets of tokens: the gradient of weights
// written twice: with vectors of the compiler, compiled once for each instruction set, and with the
// tiles of AMX. The best that the CPU has is taken at run time, not at build time; a handful of
// tokens goes by vectors in any case.
//
// Sums are float32 and rounded where compute/experts.py rounds. What is summed in which order
// depends on the sizes of a segment alone, never on threads or on the group around it.

#include "cpu_orders.h"
#include "cpu_tile_tasks.h"
#include "cpu_vector_tasks.h"

namespace {

int find_best_isa() {
#if HAVE_X86
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
#if HAVE_AMX
        if (may_use_tiles()) return AMX;
#endif
        return AVX512;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return AVX2;
#endif
    return GENERIC;
}

int best_isa() {
    static const int best = find_best_isa();
    return best;
}

template <class T>
Kernel vector_kernel(int isa) {
    Task task = vector_task<T, Generic<T>>;
#if HAVE_X86
    if (isa == AVX2) task = vector_task<T, Avx2<T>>;
    if (isa >= AVX512) task = vector_task<T, Avx512<T>>;
#endif
    return {task, false, nothing, nothing};
}

Kernel kernel_for(int isa, bool bf16) {
#if HAVE_AMX
    if (isa == AMX && bf16) return {task_amx, true, enter_tiles, leave_tiles};
#endif
    return bf16 ? vector_kernel<uint16_t>(isa) : vector_kernel<float>(isa);
}

std::vector<Segment> make_segments(const void* const* records, const int64_t* starts,
                                   const int64_t* stops, int64_t count) {
    std::vector<Segment> segments(count);
    for (int64_t i = 0; i < count; ++i) {
        segments[i] = Segment{};
        segments[i].record = records[i];
        segments[i].start = starts[i];
        segments[i].rows = stops[i] - starts[i];
    }
    return segments;
}

// Where an order goes, and how the caller is told.
struct Later {
    void* runner;  // null: it is carried out here and now
    const uint32_t* there;
    uint32_t number;
    uint32_t* done;
    int64_t* times;
};

void give(const std::shared_ptr<Order>& order, const Later& later) {
    static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "a flag is a plain number");
    if (!later.runner) {
        carry_out(order);
        return;
    }
    order->rows.there = reinterpret_cast<const std::atomic<uint32_t>*>(later.there);
    order->rows.number = later.number;
    static_cast<Runner*>(later.runner)
        ->submit(order, reinterpret_cast<std::atomic<uint32_t>*>(later.done), later.times);
}

typedef uint64_t Words __attribute__((vector_size(64)));

// Reads every line; the result only keeps the compiler from leaving it out.
INLINE uint64_t read_body(const char* from, int64_t bytes) {
    Words total[4] = {};
    int64_t at = 0;
    for (; at + 4 * LINE <= bytes; at += 4 * LINE) {
        for (int i = 0; i < 4; ++i) {
            Words words;
            std::memcpy(&words, from + at + i * LINE, sizeof words);
            total[i] += words;
        }
    }
    const Words all = total[0] + total[1] + total[2] + total[3];
    uint64_t result = 0;
    for (int i = 0; i < 8; ++i) result += all[i];
    return result;
}

using Read = uint64_t (*)(const char*, int64_t);
uint64_t read_generic(const char* from, int64_t bytes) { return read_body(from, bytes); }
#if HAVE_X86
TARGET_AVX2 uint64_t read_avx2(const char* from, int64_t bytes) { return read_body(from, bytes); }
TARGET_AVX512 uint64_t read_avx512(const char* from, int64_t bytes) {
    return read_body(from, bytes);
}
#endif

Read read_for(int isa) {
#if HAVE_X86
    if (isa >= AVX512) return read_avx512;
    if (isa == AVX2) return read_avx2;
#endif
    return read_generic;
}

}  // namespace

extern "C" {

const char* overspill_cpu_isa() {
    static const char* const names[] = {"generic", "avx2", "avx512", "amx"};
    return names[best_isa()];
}

// Strides count elements. `isa`: -1 for the best, else an Isa that this CPU has (the caller
// checks). With a runner the group is computed by it once its rows are there, and the call returns
// at once; without, here and now.
void overspill_experts_forward(const void* x, int64_t x_stride, void* y, int64_t y_stride,
                               const void* const* records, const int64_t* starts,
                               const int64_t* stops, int64_t count, int64_t d_model,
                               int64_t d_hidden, int gated, int is_bf16, int threads, int isa,
                               void* runner, const uint32_t* there, uint32_t number,
                               uint32_t* done, int64_t* times) {
    const auto order = std::make_shared<Order>();
    order->threads = threads;
    Job& job = order->job;
    job.x = x;
    job.x_stride = x_stride;
    job.y = y;
    job.y_stride = y_stride;
    job.d = d_model;
    job.h = d_hidden;
    job.gated = gated;
    job.item = is_bf16 ? 2 : 4;
    order->segments = make_segments(records, starts, stops, count);
    order->kernel = kernel_for(isa < 0 ? best_isa() : isa, is_bf16);
    give(order, {runner, there, number, done, times});
}

// `gradients` (a record for each segment) and `squares` are null for frozen weights.
void overspill_experts_backward(const void* x, int64_t x_stride, const void* dy, int64_t dy_stride,
                                const float* row_weight, void* dx, int64_t dx_stride,
                                float* drow_weight, const void* const* records,
                                const int64_t* starts, const int64_t* stops, int64_t count,
                                int64_t d_model, int64_t d_hidden, int gated, int is_bf16,
                                void* const* gradients, double* squares, int threads, int isa,
                                void* runner, const uint32_t* there, uint32_t number,
                                uint32_t* done, int64_t* times) {
    const auto order = std::make_shared<Order>();
    order->threads = threads;
    Job& job = order->job;
    job.x = x;
    job.x_stride = x_stride;
    job.dy = dy;
    job.dy_stride = dy_stride;
    job.row_weight = row_weight;
    job.dx = dx;
    job.dx_stride = dx_stride;
    job.drow_weight = drow_weight;
    job.d = d_model;
    job.h = d_hidden;
    job.gated = gated;
    job.backward = true;
    job.gradients = gradients != nullptr;
    job.item = is_bf16 ? 2 : 4;
    order->segments = make_segments(records, starts, stops, count);
    for (int64_t i = 0; gradients && i < count; ++i) {
        order->segments[i].gradient = gradients[i];
        order->segments[i].squares = squares + i;
    }
    order->kernel = kernel_for(isa < 0 ? best_isa() : isa, is_bf16);
    give(order, {runner, there, number, done, times});
}

void* overspill_runner_new() { return new Runner; }

void overspill_runner_free(void* runner) { delete static_cast<Runner*>(runner); }

int overspill_runner_wait(void* runner, const uint32_t* done, uint32_t number) {
    return static_cast<Runner*>(runner)->wait(
        *reinterpret_cast<const std::atomic<uint32_t>*>(done), number);
}

// For tests: of all threads' goes at tasks every `every`th takes `ns` longer. 0: none.
void overspill_delay_tasks(int64_t every, int64_t ns) {
    delays.ns = ns;
    delays.turns = delays.repeats = 0;
    delays.every = every;
}

// For tests: how many tasks were done again since then.
int64_t overspill_repeated_tasks() { return delays.repeats; }

// To measure what doing tasks again is worth.
void overspill_allow_repeats(int allowed) { delays.may_repeat = allowed != 0; }

// Reads `bytes` once with all threads.
uint64_t overspill_read(const void* from, int64_t bytes, int threads) {
    constexpr int64_t PIECE = 1 << 18;
    const Read read = read_for(best_isa());
    uint64_t total = 0;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) reduction(+ : total)
    for (int64_t at = 0; at < bytes; at += PIECE)
        total += read(static_cast<const char*>(from) + at, least(PIECE, bytes - at));
    return total;
}
}
