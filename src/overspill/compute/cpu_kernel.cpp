// Forward and backward of a group of experts on the CPU: several experts, each with its token rows.
//
// Plain C ABI, called through ctypes (which releases the GIL during a call): a group now, in a
// thread that waits for its token rows (cpu_runner.h), or when a GPU asks for it (cpu_misses.h).
// With few token rows, reading the weights takes longest, so they are read once and in long
// contiguous runs.
//
// Names: D model, H hidden, R token rows. A record holds w_in [H or 2H, D], then w_out [D, H]. Both
// may be transposed, and biases may follow: b_in, b_out. T is the type of a
// weight: float, or uint16_t for bf16. The matrix products exist twice: with compiler
// vectors, compiled for each instruction set, and with AMX tiles. The best instruction set is
// chosen at run time.
//
// Sums are float32 and rounded where compute/experts.py rounds. The order of a sum depends only on
// the sizes of an expert, never on the threads or on the other experts of the group.

#include "cpu_misses.h"
#include "cpu_packed.h"
#include "cpu_requests.h"
#include "cpu_runner.h"

namespace {

uint64_t read_words(const uint64_t* from, int64_t count) {
#if HAVE_X86
    if (best_isa() >= AVX512) return Avx512<float>::read(from, count);
    if (best_isa() == AVX2) return Avx2<float>::read(from, count);
#endif
    return Generic<float>::read(from, count);
}

template <class T>
void unpack(const PackedMatrix& matrix, const char* record, void* out, int64_t row_stride,
            int64_t column_stride, int threads, int isa, ThreadPool& pool) {
    T* const to = static_cast<T*>(out);
#if HAVE_X86
    if (isa >= AVX512)
        return unpack_matrix<T, Avx512<T>>(matrix, record, to, row_stride, column_stride, threads,
                                           pool);
    if (isa == AVX2)
        return unpack_matrix<T, Avx2<T>>(matrix, record, to, row_stride, column_stride, threads,
                                         pool);
#endif
    unpack_matrix<T, Generic<T>>(matrix, record, to, row_stride, column_stride, threads, pool);
}

// Returns the executor of the calling thread, for calls without a runner.
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
    const auto request = make_request(*args);
    own_executor().execute(*request, closed);
    request->store_squares();
}

// Writes the values of a packed matrix as bf16 or float32; strides count elements, and one is 1.
void overspill_unpack(const PackedMatrix* matrix, const char* record, void* out, int64_t row_stride,
                      int64_t column_stride, int32_t bf16, int32_t threads, int32_t isa) {
    const auto function = bf16 ? unpack<uint16_t> : unpack<float>;
    function(*matrix, record, out, row_stride, column_stride, threads, isa < 0 ? best_isa() : isa,
             own_executor().pool);
}

void overspill_repack_awq(const uint32_t* words, int64_t k, int64_t n, uint32_t* out) {
    repack_awq(words, k, n, out);
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

// `inject` is as above, other arguments as in MissRunner.
MissRunner* overspill_misses_new(const GroupArgs* args, const MissMemory* memory,
                                 const MissSizes* sizes, const PackedExpert* const* formats,
                                 void (*inject)(), Fetch fetch) {
    return new MissRunner(*args, *memory, *sizes, formats, inject, fetch);
}

void overspill_misses_close(MissRunner* runner) { runner->close(); }

// After close(), when no thread is in a call with this runner.
void overspill_misses_free(MissRunner* runner) { delete runner; }

void overspill_misses_set_records(MissRunner* runner, int64_t layer, const void* const* addresses) {
    runner->set_records(layer, addresses);
}

void overspill_misses_pause(MissRunner* runner) { runner->pause(); }

void overspill_misses_resume(MissRunner* runner) { runner->resume(); }

// Copies the first failure since the last call to `message` as a string of at most `size` bytes.
void overspill_misses_failure(MissRunner* runner, char* message, int64_t size) {
    const std::string failure = runner->take_failure();
    message[failure.copy(message, size - 1)] = 0;
}

void overspill_misses_counts(MissRunner* runner, MissCounts* counts) { *counts = runner->counts(); }

int64_t overspill_misses_spans(MissRunner* runner, MissSpan* spans) {
    return runner->take_spans(spans);
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
