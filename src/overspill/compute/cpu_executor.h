// Computes a request with a thread pool: divides its group into parts that fit scratch memory, and
// these into tasks. Used by the calling thread (cpu_kernel.cpp), by Runner and by MissRunner.
#pragma once

#include "cpu_tasks.h"
#include "cpu_vectors.h"

namespace {

constexpr int64_t MAX_VECTOR_ROWS = 4;     // forward: up to here vectors are faster than AMX tiles
constexpr int64_t FEW_ROWS = 32;           // up to here reading the weights takes longest
constexpr int64_t MANY_ROWS = 128;         // above it loading the tokens takes longest
constexpr int64_t MIN_STREAM = 8 << 10;    // bytes of contiguous weights that prefetchers follow
constexpr int64_t MAX_TASK_TILES = 4;      // height of a forward task
constexpr int64_t MAX_TASK_ROWS = 256;     // the same, with few tokens and without AMX tiles
constexpr int64_t MAX_SCRATCH = 64 << 20;  // bytes: larger groups are divided

// Assigns an expert its arrays, beginning at `at`, and advances `at`.
void assign_scratch(const Group& group, ExpertRows& own, char*& at) {
    const int64_t rows = own.padded_rows(), hidden_bytes = rows * group.h * group.weight_bytes;
    if (own.tiled) own.x_tiles = cut_array<char>(at, rows * group.d * 2);
    if (own.fused) own.x_tiles = cut_array<char>(at, rows * ordered_bytes(group.d));
    if (!group.backward) {
        own.a = cut_array<char>(at, own.fused ? rows * ordered_bytes(group.h) : hidden_bytes);
        if (own.fused && group.low_rank[W_OUT].rank > 0)
            own.plain_a = cut_array<char>(at, hidden_bytes);
        return;
    }
    if (own.tiled) own.dy = cut_array<uint16_t>(at, rows * group.d);
    own.weight_shares = cut_array<float>(at, group.blocks() * own.rows);
    if (group.shares_dx(own))
        own.dx_shares = cut_array<float>(at, group.blocks() * own.rows * group.d);
    else
        own.dh = cut_array<char>(at, group.gates() * hidden_bytes);
}

// Weight rows of one forward task: with few tokens some long streams, with many tokens as many as
// share the loads of the tokens. Every thread should get several tasks, and prefetched weights must
// fit the L2 cache. Results do not depend on it.
int64_t task_height(const Request& request, int64_t height, int64_t row_bytes, int64_t gates) {
    int64_t rows = 0, streams = STREAMS, limit = MAX_TASK_ROWS;
    for (const ExpertRows& own : request.experts) {
        rows = most(rows, own.rows);
        if (own.tiled) streams = TILE;
    }
    if (streams == TILE || rows > FEW_ROWS) limit = MAX_TASK_TILES * TILE;
    const int64_t wanted = rows > MANY_ROWS  ? MAX_TASK_TILES * TILE
                           : rows > FEW_ROWS ? 2 * TILE
                                             : streams * pieces(MIN_STREAM, row_bytes);
    int64_t found = streams;
    while (2 * found <= least(wanted, limit)) {
        const int64_t tasks = int64_t(request.experts.size()) * height / (2 * found);
        const int64_t bytes = 2 * found * gates * row_bytes;
        if (tasks < 4 * request.group.threads || bytes > MAX_PREFETCH) break;
        found *= 2;
    }
    return found;
}

// Columns of a task with a transposed matrix: many, so that pieces of its rows are long, but every
// thread should get several tasks. Results do not depend on it.
int64_t task_width(const Request& request, int64_t columns) {
    int64_t width = MAX_COLUMNS;
    const int64_t all = int64_t(request.experts.size()) * columns;
    while (width > BLOCK && all < 3 * request.group.threads * width) width /= 2;
    return width;
}

// Computes requests with a thread pool and scratch memory of its own, one at a time.
class Executor {
  public:
    explicit Executor(int64_t idle_spin_ns = IDLE_SPIN_NS) : pool(idle_spin_ns) {}

    // Returns false, without results, if `closed` became true before the token rows were ready.
    bool execute(Request& request, const std::atomic<bool>& closed) {
        for (size_t next = 0; next < request.experts.size();) {
            take_part(request, next);
            Tasks tasks(request, part, ranges, counters, next == request.experts.size());
            const std::function<void()> work = [&] { tasks.work(); };
            // Before the rows are ready: waking up the workers takes as long as the transfer.
            pool.run(tasks.threads, work);
            if (!tasks.timed_out()) continue;
            if (!await_rows(request, closed)) return false;
            tasks.rows_are_ready();
            pool.run(tasks.threads, work);
        }
        if (!request.experts.empty()) return true;
        if (!await_rows(request, closed)) return false;
        if (request.complete) request.complete();
        return true;
    }

    // Loads weights of a request into the caches of the threads that will read them, until `stop`
    // returns true; returns whether all was loaded.
    template <class Stop>
    bool load(Request& request, const Stop& stop) {
        const Tasks tasks(request, request.experts, ranges, counters, true);
        std::atomic<bool> complete{true};
        const auto share = [&] {
            if (!tasks.load(cache_bytes(), stop)) complete = false;
        };
        pool.run(tasks.threads, std::ref(share));
        return complete;
    }

    ThreadPool pool;

  private:
    // Bytes of the cache of a core that weights may use; 0 if unknown.
    static int64_t cache_bytes() {
#if defined(_SC_LEVEL2_CACHE_SIZE)
        static const int64_t bytes = most(0, sysconf(_SC_LEVEL2_CACHE_SIZE)) * 3 / 4;
        return bytes;
#else
        return 0;
#endif
    }

    // Makes `part` the experts from `next` on that fit the scratch memory, at least one; advances
    // `next`.
    void take_part(const Request& request, size_t& next) {
        int64_t bytes = 0;
        part.clear();
        for (; next < request.experts.size(); ++next) {
            ExpertRows own = request.experts[next];
            char* size = nullptr;
            assign_scratch(request.group, own, size);
            const int64_t more = reinterpret_cast<intptr_t>(size);
            if (!part.empty() && bytes + more > MAX_SCRATCH) break;
            bytes += more;
            part.push_back(own);
        }
        char* at = scratch.take(bytes);
        for (ExpertRows& own : part) assign_scratch(request.group, own, at);
    }

    static bool await_rows(Request& request, const std::atomic<bool>& closed) {
        while (!request.is_ready()) {
            if (closed) return false;
            std::this_thread::sleep_for(std::chrono::microseconds(20));
        }
        request.note_begin();
        return true;
    }

    Scratch scratch;
    std::vector<ExpertRows> part;  // kept, like `ranges` and `counters`, to avoid allocations
    std::vector<Tasks::Range> ranges;
    Tasks::Counters counters;
};

}  // namespace
