// A thread that computes the experts which a decoding step on the GPU does not find there.
//
// A step of a model is one CUDA graph. In a layer with missing experts, a kernel writes the token
// rows and the missing (row, expert, weight) to pinned memory and then sets the layer's `ready`.
// The graph continues with the experts that are on the GPU and then waits for the layer's `done`.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "cpu_reads.h"
#include "cpu_requests.h"

namespace {

constexpr int64_t NAP_NS = 40000;         // between two looks at the flags, after spinning
constexpr int64_t PAUSED_NS = 10000000;   // the same while paused
constexpr int64_t MIN_PARALLEL_ROWS = 8;  // copied or summed; one thread is as fast below
constexpr size_t SPANS = 4096;            // the latest ones are kept

// Memory that the GPU and the thread share, in the order of `MissBuffers` in misses.py. A layer
// uses the rows after the layer before is done, so all layers share them.
struct MissMemory {
    Flag *ready, *done;           // [layers]
    const int32_t* count;         // listed pairs of a row and an expert
    const int32_t* n_rows;        // token rows of the batch
    const int32_t *row, *expert;  // of each pair; -1: its expert is on the device
    const float* weight;
    const void* x;  // [rows, D]
    float* out;     // [rows, D]: the weighted sum over a row's missing experts
    // Hints: experts that a later layer will miss, as layer * experts + expert, or -1. They may be
    // incomplete or old.
    const int32_t* ahead;  // [pairs or experts]
    Flag* ahead_count;     // number of hints, 0 for none; the thread resets it
};

struct Pair {
    int32_t row, expert;
    float weight;
};

struct MissSizes {
    int64_t layers, experts, rows, top_k;
    int64_t spin_ns;  // time that threads spin after a request for the next one
    const int64_t* record_bytes;  // of the records of each layer
};

struct MissSpan {
    int64_t layer, begin, end;
    int64_t experts;  // computed experts; negative: experts that were loaded into the caches
};

struct MissCounts {
    int64_t experts, ns;  // experts computed so far, and the time it took
    int64_t loaded;       // experts loaded into the caches before they were needed
};

// Callback to the owner of records on disk (`RecordSource` in misses.py). For each request:
//     HOLD       hold the records of `second` experts of the layer `first`: get their addresses,
//                and the offsets in the file to read them from; or PRESENT in memory, or ARRIVING
//     LEARN      the records are being read: the callback may do work that takes time
//     END_READS  called unless all were present: the reads have ended, with 0 or an errno in
//                `second`, negative for the end of the file, and the index of the expert that
//                failed in `first`. Waits for records that were arriving. After an error, or if the
//                call fails, nothing is held
//     RELEASE    the held records are not used any more
// At any time between:
//     EXPECT     the layer `first` is likely to need these `second` experts: get their addresses,
//                and the offsets in the file of records that are not PRESENT
//     END_AHEAD  a read of EXPECT has ended, of one expert of the layer `first`, with an errno in
//                `second` as above. Called by the threads that read
// Returns the file, negative after a failure.
using Fetch = int (*)(int what, int64_t first, int64_t second, const int32_t* experts,
                      void** addresses, int64_t* offsets);
enum { HOLD, LEARN, END_READS, EXPECT, RELEASE, END_AHEAD };
constexpr int64_t PRESENT = -1, ARRIVING = -2;
constexpr int64_t LOOK_NS = 50000;  // between two looks at the hints, while records are read

class MissRunner {
  public:
    // `args` has the sizes of an expert, the type of its weights and the number of threads;
    // `formats` has the format of each layer's records, if they are packed. `inject` is as in
    // Request. If `fetch` is given, it provides the records instead of `set_records`.
    MissRunner(const GroupArgs& args, const MissMemory& memory, const MissSizes& sizes,
               const PackedExpert* const* formats, void (*inject)(), Fetch fetch)
        : args(args),
          memory(memory),
          sizes(sizes),
          formats(formats),
          fetch(fetch),
          record_bytes(sizes.record_bytes, sizes.record_bytes + sizes.layers),
          records(sizes.layers * sizes.experts) {
        const int64_t pairs = sizes.rows * sizes.top_k;
        request.inject = inject;
        row_bytes = args.d * (args.bf16 ? 2 : 4);
        x = x_memory.take(pairs * row_bytes);
        y = y_memory.take(pairs * row_bytes);
        std::memset(x, 0, pairs * row_bytes);  // now, and not in the first steps: page faults
        std::memset(y, 0, pairs * row_bytes);
        position.resize(pairs);
        missing.resize(sizes.rows * sizes.top_k);
        place.resize(sizes.experts, -1);
        group_records.resize(sizes.experts);
        group_experts.resize(sizes.experts);
        group_offsets.resize(sizes.experts);
        group_addresses.resize(sizes.experts);
        starts.resize(sizes.experts);
        stops.resize(sizes.experts);
        hinted.resize(sizes.experts);
        ahead_experts.resize(sizes.experts);
        ahead_addresses.resize(sizes.experts);
        ahead_offsets.resize(sizes.experts);
        spans.reserve(SPANS);
        this->args.records = group_records.data();
        this->args.starts = starts.data();
        this->args.stops = stops.data();
        thread = std::thread(&MissRunner::work, this);
    }

    ~MissRunner() { close(); }

    // Sets the addresses of the records of a layer's experts; null: not in host memory.
    void set_records(int64_t layer, const void* const* addresses) {
        for (int64_t i = 0; i < sizes.experts; ++i)
            records[layer * sizes.experts + i].store(addresses[i], std::memory_order_release);
    }

    // Lets the threads sleep, because no step runs. A request is still computed, with a delay.
    void pause() { paused = true; }

    // Wakes the threads, because a step begins.
    void resume() {
        {
            const std::lock_guard<std::mutex> guard(lock);
            paused = false;
            ++resumes;
        }
        changed.notify_one();
    }

    // Returns the first failure since the last call, or an empty string.
    std::string take_failure() {
        const std::lock_guard<std::mutex> guard(lock);
        return std::exchange(failure, {});
    }

    MissCounts counts() {
        const std::lock_guard<std::mutex> guard(lock);
        return total;
    }

    // Moves the kept spans, at most SPANS, to `to` and returns their number.
    int64_t take_spans(MissSpan* to) {
        const std::lock_guard<std::mutex> guard(lock);
        const int64_t count = int64_t(spans.size());
        for (int64_t i = 0; i < count; ++i) to[i] = spans[(oldest + i) % count];
        spans.clear();
        oldest = 0;
        return count;
    }

    // Ends the thread when no flag is set.
    void close() {
        {
            const std::lock_guard<std::mutex> guard(lock);
            closed = true;
        }
        changed.notify_one();
        if (thread.joinable()) thread.join();
        reads.close();
    }

  private:
    void work() {
        shorten_sleeps();
        int64_t layer = 0, idle_since = now_ns();
        for (uint32_t seen = 0;;) {
            const bool last = closed;  // read first: close() comes after the last flag
            const int64_t found = next_ready(layer);
            if (found >= 0) {
                serve(found);
                layer = found + 1;
                idle_since = now_ns();
            } else if (last) {
                return;
            } else if (load_ahead(layer)) {
                idle_since = now_ns();
            } else if (resumes != seen) {
                // Workers that sleep would need longer to wake up than to compute: they spin now.
                seen = resumes;
                guarded([&] { executor.pool.run(int(args.threads), [] {}); });
                idle_since = now_ns();
            } else if (now_ns() < idle_since + sizes.spin_ns) {
                // Also while paused: a step may not have ended yet. No yield, which may cost
                // milliseconds while the GPU waits.
                pause_core();
            } else if (paused) {
                std::unique_lock<std::mutex> guard(lock);
                changed.wait_for(guard, std::chrono::nanoseconds(PAUSED_NS),
                                 [&] { return closed || resumes != seen; });
            } else {
                std::this_thread::sleep_for(std::chrono::nanoseconds(NAP_NS));
            }
        }
    }

    // Returns the next layer that is ready, from `first` on and then from 0; -1 if none is.
    int64_t next_ready(int64_t first) const {
        const auto ready = [&](int64_t layer) {
            return memory.ready[layer].load(std::memory_order_acquire) != 0;
        };
        for (int64_t layer = first; layer < sizes.layers; ++layer)
            if (ready(layer)) return layer;
        for (int64_t layer = 0; layer < first; ++layer)
            if (ready(layer)) return layer;
        return -1;
    }

    // Loads weights that a later layer will read into the caches, until a request comes; returns
    // false if there is nothing to load. The next request is probably that of `layer`.
    bool load_ahead(int64_t layer) {
        if (fetch) return false;
        if (memory.ahead_count->load(std::memory_order_relaxed) && !guarded([&] { plan_loads(); }))
            loaded_layer = -1;
        if (loaded_layer < 0) return false;
        const auto stop = [&] {
            return memory.ahead_count->load(std::memory_order_relaxed) || next_ready(layer) >= 0;
        };
        const int64_t experts = int64_t(load_request.experts.size());
        MissSpan span{loaded_layer, now_ns(), 0, -experts};
        bool complete = true;  // also after a failure, which is stored
        guarded([&] { complete = executor.load(load_request, stop); });
        span.end = now_ns();
        if (complete) loaded_layer = -1;
        const std::lock_guard<std::mutex> guard(lock);
        if (complete) total.loaded += experts;
        keep(span);
        return true;
    }

    // Appends a span. The caller holds the lock.
    void keep(const MissSpan& span) {
        if (spans.size() < SPANS)
            spans.push_back(span);
        else
            spans[std::exchange(oldest, (oldest + 1) % SPANS)] = span;
    }

    // Makes `load_request` like the request that will come: each thread then loads the weights that
    // it will need.
    void plan_loads() {
        int64_t pairs = 0;
        loaded_layer = -1;
        take_ahead([&](int64_t layer, int32_t expert) {
            if ((loaded_layer >= 0 && layer != loaded_layer) || !record(layer, expert)) return;
            if (pairs == int64_t(missing.size())) return;
            loaded_layer = layer;
            missing[pairs++] = {0, expert, 0};
        });
        if (loaded_layer < 0) return;
        group_pairs(loaded_layer, pairs);
        fill_request(load_request, args);
    }

    // Calls `use` with the layer and the id of each expert of the latest hint.
    template <class Use>
    void take_ahead(const Use& use) {
        const int64_t count = memory.ahead_count->load(std::memory_order_acquire);
        if (count == 0) return;
        memory.ahead_count->store(0, std::memory_order_relaxed);
        const int64_t listed = most(sizes.rows * sizes.top_k, sizes.experts);
        for (int64_t i = 0; i < least(count, listed); ++i) {
            const int32_t found = memory.ahead[i];
            if (found >= 0 && found < sizes.layers * sizes.experts)
                use(found / sizes.experts, int32_t(found % sizes.experts));
        }
    }

    // Computes the request of a layer. Always sets `done`, because the GPU waits for it.
    void serve(int64_t layer) {
        MissSpan span{layer, now_ns(), 0, 0};
        memory.ready[layer].store(0, std::memory_order_relaxed);
        if (loaded_layer == layer) loaded_layer = -1;
        const bool computed = guarded([&] {
            if (request.inject) request.inject();
            span.experts = compute(layer);
        });
        if (!computed) std::memset(memory.out, 0, sizes.rows * args.d * 4);
        span.end = now_ns();
        // Before the lock is taken: its holder may be preempted.
        memory.done[layer].store(1, std::memory_order_release);
        if (std::exchange(held, false)) fetch(RELEASE, 0, 0, nullptr, nullptr, nullptr);
        const std::lock_guard<std::mutex> guard(lock);
        total.experts += span.experts;
        total.ns += span.end - span.begin;
        keep(span);
    }

    // Runs `body` and stores its failure; returns whether it succeeded.
    template <class Body>
    bool guarded(const Body& body) {
        try {
            body();
            return true;
        } catch (const std::exception& error) {
            const std::lock_guard<std::mutex> guard(lock);
            if (failure.empty()) failure = error.what();
            return false;
        }
    }

    // Computes the missing experts of a layer; returns their number.
    int64_t compute(int64_t layer) {
        const int64_t rows = *memory.n_rows, pairs = take_pairs(layer, *memory.count, rows);
        group_pairs(layer, pairs);
        // One token row needs no copies: every expert reads it.
        args.x = rows == 1 ? memory.x : x;
        args.x_stride = rows == 1 ? 0 : args.d;
        args.out = y;
        args.out_stride = args.d;
        const char* from = static_cast<const char*>(memory.x);
        if (rows > 1)
            for_each(pairs, [&](int64_t i) {
                std::memcpy(x + position[i] * row_bytes, from + missing[i].row * row_bytes,
                            row_bytes);
            });
        if (pairs > 0 && fetch)
            compute_fetched(layer);
        else if (pairs > 0)
            execute();
        for_each(rows, [&](int64_t row) {
            args.bf16 ? sum_row<uint16_t>(row, pairs) : sum_row<float>(row, pairs);
        });
        return args.count;
    }

    void execute() {
        fill_request(request, args);
        executor.execute(request, never);
    }

    // Computes the experts in memory while the other records are read, and then the others. Reads
    // ahead for later layers meanwhile.
    void compute_fetched(int64_t layer) {
        const int file = fetch(HOLD, layer, args.count, group_experts.data(),
                               group_addresses.data(), group_offsets.data());
        if (file < 0) throw std::runtime_error("records of experts are missing");
        held = true;
        std::vector<RecordRead> absent;
        std::vector<int64_t> index;  // in the group, of each absent expert
        std::vector<std::shared_ptr<ReadJob>> jobs;
        bool complete = true;
        for (int64_t i = 0; i < args.count; ++i) {
            group_records[i] = group_addresses[i];
            complete = complete && group_offsets[i] == PRESENT;
            if (group_offsets[i] == ARRIVING)
                if (const auto job = read_ahead_job(layer, group_experts[i])) jobs.push_back(job);
            if (group_offsets[i] < 0) continue;
            absent.push_back({static_cast<char*>(group_addresses[i]), group_offsets[i]});
            index.push_back(i);
        }
        std::shared_ptr<ReadJob> own;
        const bool reading = !absent.empty(), started = guarded([&] {
            if (!reading) return;
            own = std::make_shared<ReadJob>(file, std::move(absent), record_bytes[layer]);
            reads.start(own, true);
            jobs.push_back(own);
        });
        if (!complete) fetch(LEARN, 0, 0, nullptr, nullptr, nullptr);  // stores its failures
        expect_records(layer, file);
        if (complete) {
            execute();
            return;
        }
        const bool first = started && execute_some(true);
        // A hint may come after the request.
        for (const auto& job : jobs)
            while (!reads.wait(*job, LOOK_NS)) expect_records(layer, file);
        const ReadResult result = started ? (own ? own->result : ReadResult{}) : ReadResult{0, EAGAIN};
        const int64_t failed = result.error ? index[result.failed] : -1;
        if (fetch(END_READS, failed, result.error, nullptr, nullptr, nullptr) < 0) {
            held = false;
            throw std::runtime_error("records of experts could not be read");
        }
        expect_records(layer, file);
        if (!first || !execute_some(false)) throw std::runtime_error("experts are not computed");
    }

    // Computes the experts that were present in memory, or the others: experts without rows are not
    // computed.
    bool execute_some(bool present) {
        const std::vector<int64_t> saved(stops);
        for (int64_t i = 0; i < args.count; ++i)
            if ((group_offsets[i] == PRESENT) != present) stops[i] = starts[i];
        const bool computed = guarded([&] { execute(); });
        std::copy(saved.begin(), saved.end(), stops.begin());
        return computed;
    }

    // Begins to read the experts that hints name for a later layer, after those of this one.
    void expect_records(int64_t current, int file) {
        int64_t layer = -1, count = 0;
        take_ahead([&](int64_t later, int32_t expert) {
            // An old hint may be for a layer that has already run without misses.
            if (later <= current || (layer >= 0 && later != layer) || hinted[expert]) return;
            layer = later;
            hinted[expert] = true;
            ahead_experts[count++] = expert;
        });
        for (int64_t i = 0; i < count; ++i) hinted[ahead_experts[i]] = false;
        if (count == 0) return;
        if (fetch(EXPECT, layer, count, ahead_experts.data(), ahead_addresses.data(),
                  ahead_offsets.data()) < 0)
            return;
        arriving.erase(std::remove_if(arriving.begin(), arriving.end(),
                                      [&](const auto& each) { return reads.wait(*each.job, 0); }),
                       arriving.end());
        for (int64_t i = 0; i < count; ++i)
            if (ahead_offsets[i] >= 0) read_ahead(layer, i, file);
    }

    void read_ahead(int64_t layer, int64_t i, int file) {
        const int32_t expert = ahead_experts[i];
        const auto ended = [this, layer, expert](int error) {
            fetch(END_AHEAD, layer, error, &expert, nullptr, nullptr);
        };
        const bool started = guarded([&] {
            const RecordRead read{static_cast<char*>(ahead_addresses[i]), ahead_offsets[i]};
            const auto job = std::make_shared<ReadJob>(file, std::vector<RecordRead>{read},
                                                       record_bytes[layer], ended);
            arriving.push_back({layer, expert, job});
            reads.start(job, false);
        });
        if (started) return;
        ended(EAGAIN);
        arriving.clear();  // the last job may never end; END_READS waits for the others too
    }

    // Returns the job that reads the record of an expert ahead, or null.
    std::shared_ptr<ReadJob> read_ahead_job(int64_t layer, int32_t expert) const {
        for (const Arriving& each : arriving)
            if (each.layer == layer && each.expert == expert) return each.job;
        return nullptr;
    }

    // Copies the pairs whose expert is missing; returns their number.
    int64_t take_pairs(int64_t layer, int64_t listed, int64_t rows) {
        const std::string where = "layer " + std::to_string(layer) + ": ";
        if (rows < 0 || rows > sizes.rows)
            throw std::runtime_error(where + std::to_string(rows) + " token rows, at most " +
                                     std::to_string(sizes.rows) + " are possible");
        if (listed < 0 || listed > rows * sizes.top_k)
            throw std::runtime_error(where + std::to_string(listed) + " experts of " +
                                     std::to_string(rows) + " token rows");
        int64_t pairs = 0;
        for (int64_t i = 0; i < listed; ++i) {
            const Pair pair = {memory.row[i], memory.expert[i], memory.weight[i]};
            if (pair.expert < 0) continue;  // it is on the device
            if (pair.row < 0 || pair.row >= rows || pair.expert >= sizes.experts)
                throw std::runtime_error(where + "no token row " + std::to_string(pair.row) +
                                         " or no expert " + std::to_string(pair.expert));
            if (!fetch && !record(layer, pair.expert))
                throw std::runtime_error(where + "expert " + std::to_string(pair.expert) +
                                         " is not in host memory");
            missing[pairs++] = pair;
        }
        return pairs;
    }

    const void* record(int64_t layer, int64_t expert) const {
        return records[layer * sizes.experts + expert].load(std::memory_order_acquire);
    }

    // Orders the pairs by expert: sets the experts of `args` and the position of each pair.
    void group_pairs(int64_t layer, int64_t pairs) {
        args.format = formats ? formats[layer] : nullptr;
        args.count = 0;
        for (int64_t i = 0; i < pairs; ++i) {
            int32_t& own = place[missing[i].expert];
            if (own < 0) {
                own = int32_t(args.count++);
                group_experts[own] = missing[i].expert;
                group_records[own] = record(layer, missing[i].expert);
                stops[own] = 0;
            }
            ++stops[own];
        }
        for (int64_t i = 0, at = 0; i < args.count; ++i) {
            starts[i] = at;
            at += std::exchange(stops[i], at);
        }
        for (int64_t i = 0; i < pairs; ++i) position[i] = stops[place[missing[i].expert]]++;
        for (int64_t i = 0; i < pairs; ++i) place[missing[i].expert] = -1;
    }

    template <class T>
    void sum_row(int64_t row, int64_t pairs) const {
        float* __restrict to = memory.out + row * args.d;
        std::memset(to, 0, args.d * 4);
        for (int64_t i = 0; i < pairs; ++i) {
            if (missing[i].row != row) continue;
            const T* __restrict from = reinterpret_cast<const T*>(y + position[i] * row_bytes);
            const float weight = missing[i].weight;
#pragma omp simd
            for (int64_t at = 0; at < args.d; ++at) to[at] += weight * load(from + at);
        }
    }

    template <class Body>
    void for_each(int64_t count, const Body& body, int64_t min_parallel = MIN_PARALLEL_ROWS) {
        std::atomic<int64_t> next{0};
        const auto share = [&] {
            for (int64_t i; (i = next.fetch_add(1)) < count;) body(i);
        };
        // std::ref: a copy of the lambda would be allocated
        executor.pool.run(count < min_parallel ? 1 : args.threads, std::ref(share));
    }

    GroupArgs args;
    const MissMemory memory;
    const MissSizes sizes;
    const PackedExpert* const* const formats;  // by layer; null: records are plain
    const Fetch fetch;
    const std::vector<int64_t> record_bytes;        // of each layer
    std::vector<std::atomic<const void*>> records;  // [layers, experts]
    int64_t row_bytes;
    Request request;
    Executor executor{sizes.spin_ns};
    RecordReads reads;
    Request load_request;
    int64_t loaded_layer = -1;  // layer of load_request, -1 for none
    bool held = false;          // whether records of the current request are held
    Scratch x_memory, y_memory;
    char *x, *y;                    // ordered by expert
    std::vector<Pair> missing;      // of this request
    std::vector<int64_t> position;  // of each pair among them
    std::vector<int32_t> place;     // of each expert in the group, -1 without pairs
    std::vector<const void*> group_records;
    std::vector<int32_t> group_experts;
    std::vector<void*> group_addresses;
    std::vector<int64_t> group_offsets;
    std::vector<int64_t> starts, stops;
    const std::atomic<bool> never{false};

    struct Arriving {
        int64_t layer;
        int32_t expert;
        std::shared_ptr<ReadJob> job;
    };
    std::vector<Arriving> arriving;  // jobs that read ahead; some may have ended
    std::vector<char> hinted;        // whether an expert was named, during expect_records
    std::vector<int32_t> ahead_experts;
    std::vector<void*> ahead_addresses;
    std::vector<int64_t> ahead_offsets;

    std::mutex lock;  // guards what follows
    std::condition_variable changed;
    std::atomic<bool> closed{false}, paused{true};  // also read without the lock, as the next
    std::atomic<uint32_t> resumes{0};
    std::string failure;
    MissCounts total{};
    std::vector<MissSpan> spans;  // a ring
    size_t oldest = 0;
    std::thread thread;
};

}  // namespace
