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

#if defined(__linux__)
#include <sys/prctl.h>
#endif

#include "cpu_numbers.h"
#include "cpu_tasks.h"
#include "cpu_vectors.h"
#include "cpu_packing.h"
#include "cpu_tiles.h"

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
    delays.turns = 0;
    delays.every = every;
}

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
