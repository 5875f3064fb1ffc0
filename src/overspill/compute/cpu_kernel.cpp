// Forward and backward of a group of experts on the CPU: several experts, each with its token rows.
//
// Plain C ABI, called through ctypes (which releases the GIL during a call). With few token rows,
// reading the weights takes longest, so they are read once and in long contiguous runs.
//
// Names: D model, H hidden, R token rows. A record holds w_in [H or 2H, D], then w_out [D, H]. T is
// the type of a weight: float, or uint16_t for bf16. The matrix products exist twice: with compiler
// vectors, compiled for each instruction set, and with AMX tiles. The best instruction set is
// chosen at run time.
//
// Sums are float32 and rounded where compute/experts.py rounds. The order of a sum depends only on
// the sizes of an expert, never on the threads or on the other experts of the group.

#include "cpu_amx_tasks.h"
#include "cpu_runner.h"

namespace {

int best_isa() {
#if HAVE_AMX
    static const int best = best_vector_isa() == AVX512 && has_tiles() ? AMX : best_vector_isa();
#else
    static const int best = best_vector_isa();
#endif
    return best;
}

template <class T>
TaskFunction vector_function(int isa) {
#if HAVE_X86
    if (isa >= AVX512) return vector_task<T, Avx512<T>>;
    if (isa == AVX2) return vector_task<T, Avx2<T>>;
#endif
    return vector_task<T, Generic<T>>;
}

TaskFunction task_function(int isa, bool bf16) {
#if HAVE_AMX
    if (isa == AMX && bf16) return amx_task;
#endif
    return bf16 ? vector_function<uint16_t>(isa) : vector_function<float>(isa);
}

uint64_t read_words(const uint64_t* from, int64_t count) {
#if HAVE_X86
    if (best_isa() >= AVX512) return Avx512<float>::read(from, count);
    if (best_isa() == AVX2) return Avx2<float>::read(from, count);
#endif
    return Generic<float>::read(from, count);
}

std::unique_ptr<Request> make_request(const GroupArgs& args) {
    auto request = std::make_unique<Request>();
    Group& group = request->group;
    static_cast<GroupArgs&>(group) = args;
    group.weight_bytes = args.bf16 ? 2 : 4;
    const int isa = args.isa < 0 ? best_isa() : args.isa;
    const bool tiles = isa == AMX && args.bf16 && args.d % STEP == 0 && args.h % STEP == 0;
    request->function = task_function(isa, args.bf16);
    for (int64_t i = 0; i < args.count; ++i) {
        const int64_t rows = args.stops[i] - args.starts[i];
        const bool packed = tiles && (args.backward || rows > MAX_VECTOR_ROWS);
        if (rows > 0) request->experts.push_back({args.records[i], args.starts[i], rows, packed});
    }
    group.hidden_per_task =
        task_height(*request, group.h, group.d * group.weight_bytes, group.gates());
    group.output_per_task = task_height(*request, group.d, group.h * group.weight_bytes, 1);
    return request;
}

// Of the calling thread, for calls without a runner.
Executor& own_executor() {
    static thread_local Executor executor;
    return executor;
}

}  // namespace

extern "C" {

const char* overspill_cpu_isa() { return ISA_NAMES[best_isa()]; }

// Computes a group in this thread and its pool. `isa`: -1 for the best, else an Isa of this CPU.
void overspill_compute(const GroupArgs* args) {
    const std::atomic<bool> closed{false};
    own_executor().execute(*make_request(*args), closed);
}

void* overspill_runner_new() { return new Runner; }

void overspill_runner_close(Runner* runner) { runner->close(); }

// After close(), when no thread is in a call with this runner.
void overspill_runner_free(Runner* runner) { delete runner; }

// Has the runner compute a group once `ready` reaches `number`; returns at once. `inject` (may be
// null) is called at the start of the request and before every task.
void overspill_runner_submit(Runner* runner, const GroupArgs* args, const uint32_t* ready,
                             uint32_t* done, uint32_t number, int64_t* times, void (*inject)()) {
    auto request = make_request(*args);
    request->ready = reinterpret_cast<const Flag*>(ready);
    request->number = number;
    request->inject = inject;
    runner->submit(std::move(request), reinterpret_cast<Flag*>(done), times);
}

int overspill_runner_wait(Runner* runner, const uint32_t* done, uint32_t number, double seconds,
                          int64_t* progress) {
    return runner->wait(*reinterpret_cast<const Flag*>(done), number, seconds, progress);
}

// Reads `count` words once with all threads, to measure the bandwidth.
uint64_t overspill_read(const uint64_t* from, int64_t count, int threads) {
    constexpr int64_t PIECE = 1 << 15;
    std::atomic<int64_t> next{0};
    std::atomic<uint64_t> total{0};
    own_executor().pool.run(threads, [&] {
        for (int64_t at; (at = next.fetch_add(PIECE)) < count;)
            total += read_words(from + at, least(PIECE, count - at));
    });
    return total;
}
}
