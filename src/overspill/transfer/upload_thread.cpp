// A thread that issues uploads of experts, most urgent first, without the Python interpreter.
//
// Records are copied in pieces, and the list of uploads is looked at again before each piece. All
// copies go through one stream, which writes an increasing sequence number to pinned memory after
// each piece. From that number this thread knows what is in flight, the host knows what has
// arrived, and other streams, which can wait for a value in memory, know when to continue.

#include <time.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

namespace {

// Functions of the CUDA driver, or of this file where the CPU is the compute device. Each returns 0
// or an error code.
struct Calls {
    int (*set_context)(void* context);
    int (*copy)(uint64_t to, uint64_t from, size_t bytes, void* stream);
    int (*wait_event)(void* stream, void* event, unsigned flags);
    int (*write)(void* stream, uint64_t address, uint64_t number, unsigned flags);
};

// Fault injection: called before each piece; a result other than 0 is a failure.
using Inject = int (*)();

// The record that belongs in a slot. A new number means another record or new weights.
struct UploadCommand {
    uint64_t to, from;
    void* after;  // an event that must have completed before the slot is written to, or null
    uint64_t number;
    int64_t tag;        // for the trace
    int64_t in_device;  // the source is memory of the device
    int64_t bytes;
};

struct QueuedUpload {
    int32_t slot;
    bool certain;  // certainly needed next: copied whole, and queued further ahead
};

struct Slot {
    UploadCommand command{};
    uint64_t number = 0;  // of the command whose pieces are in the slot
    int64_t filled = 0;   // bytes of it that were issued
};

struct Piece {
    uint64_t sequence;
    int64_t bytes, tag, begun_ns;
    bool traced;
};

struct TracedCopy {
    int64_t tag, bytes, begin_ns, end_ns;
};

constexpr size_t MAX_TRACED = 1 << 18;
constexpr size_t MAX_PIECES_IN_FLIGHT = 64;
constexpr std::chrono::milliseconds WAIT_SLICE(100);
// beside the driver's error codes, which are positive and below INJECTED
constexpr int TIMED_OUT = -1, CLOSED = -2, INJECTED = 1 << 20;
constexpr long PAUSE_NS = 20000;  // a piece takes several times as long

int64_t now_ns() {
    timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return int64_t(at.tv_sec) * 1000000000 + at.tv_nsec;
}

uint64_t load(const uint64_t* number) { return __atomic_load_n(number, __ATOMIC_ACQUIRE); }
void store(uint64_t* number, uint64_t value) { __atomic_store_n(number, value, __ATOMIC_RELEASE); }

class UploadThread {
  public:
    // `counters`: sequence numbers of the last piece that has ended and of the last that has begun,
    // in memory that the stream can write to. `issued` and `ends`: for each slot, the last command
    // of which all pieces were issued, and the sequence number of its last piece.
    UploadThread(const Calls& calls, void* context, void* stream, int64_t n_slots, int64_t piece,
                 uint64_t* counters, uint64_t* issued, uint64_t* ends, Inject inject)
        : calls(calls),
          context(context),
          stream(stream),
          piece(piece),
          counters(counters),
          issued(issued),
          ends(ends),
          inject(inject),
          slots(n_slots),
          thread(&UploadThread::work, this) {}

    // Ends the thread; waiting callers return CLOSED.
    void stop() {
        {
            const PriorityLock priority(*this);
            closed = true;
        }
        changed.notify_all();
        progress.notify_all();
        thread.join();
    }

    // Replaces the list of uploads: pairs of a slot and whether it is certain, most urgent first.
    // `commands` are those of all slots. The limits are the bytes that may be in flight when another
    // piece is issued.
    int set_uploads(const UploadCommand* commands, const int32_t* items, int64_t count,
                    int64_t expected_limit_, int64_t certain_limit_, bool trace) {
        int found = 0;
        {
            const PriorityLock priority(*this);
            queue.clear();
            for (int64_t i = 0; i < count; ++i) {
                const int32_t slot = items[2 * i];
                if (issued[slot] == commands[slot].number) continue;
                slots[slot].command = commands[slot];
                queue.push_back({slot, items[2 * i + 1] != 0});
            }
            ++queue_version;
            expected_limit = expected_limit_;
            certain_limit = certain_limit_;
            tracing = trace;
            found = error;
        }
        changed.notify_all();
        return found;
    }

    // Waits until one of these commands (or `all`), or a later one for the same slot, was issued, at
    // most for WAIT_SLICE: the caller may have other reasons to give up.
    int wait(const int32_t* at, const uint64_t* numbers, int64_t count, bool all) {
        return wait_for([&] {
            int64_t found = 0;
            for (int64_t i = 0; i < count; ++i) found += issued[at[i]] >= numbers[i];
            return all ? found == count : found > 0;
        });
    }

    int wait_idle() {
        return wait_for([&] { return queue.empty(); });
    }

    // The traced copies that have ended since the last call, and the bytes that were issued: from
    // host memory, and within the device.
    int64_t take_traced(TracedCopy* out, int64_t limit, int64_t* bytes) {
        const PriorityLock priority(*this);
        for (int i = 0; i < 2; ++i) bytes[i] = issued_bytes[i], issued_bytes[i] = 0;
        const int64_t count = std::min<int64_t>(limit, traced_copies.size());
        std::copy(traced_copies.begin(), traced_copies.begin() + count, out);
        traced_copies.erase(traced_copies.begin(), traced_copies.begin() + count);
        return count;
    }

  private:
    // The lock as callers take it: the thread lets them in before its next piece.
    struct PriorityLock {
        explicit PriorityLock(UploadThread& owner) : guard(owner.lock, std::defer_lock) {
            ++owner.callers;
            guard.lock();
            --owner.callers;
        }
        std::unique_lock<std::mutex> guard;
    };

    template <class Done>
    int wait_for(const Done& done) {
        PriorityLock priority(*this);
        bool is_done = false;
        progress.wait_for(priority.guard, WAIT_SLICE, [&] {
            is_done = done();
            return is_done || closed || error;
        });
        return error ? int(error) : is_done ? 0 : closed ? CLOSED : TIMED_OUT;
    }

    void work() {
#ifdef __linux__
        prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);  // by default short sleeps take 50 us longer
#endif
        std::unique_lock<std::mutex> guard(lock);
        check(calls.set_context(context));
        while (!closed) {
            retire_pieces();
            const bool pending = !queue.empty() && !error;
            if (pending && !is_full(queue.front())) {
                if (run_inject(guard)) issue(queue.front());
            } else if (pending || (traced_in_flight > 0 && !error)) {
                guard.unlock();
                pause();
                guard.lock();
            } else {
                changed.wait(guard);
            }
            while (callers > 0) {
                guard.unlock();
                std::this_thread::yield();
                guard.lock();
            }
        }
    }

    // Whether to issue the first upload now. The lock is released during the injected call, so the
    // list may be another one afterwards.
    bool run_inject(std::unique_lock<std::mutex>& guard) {
        if (!inject) return true;
        const uint64_t before = queue_version;
        guard.unlock();
        const bool failed = inject() != 0;
        guard.lock();
        if (failed) check(INJECTED);
        return !failed && !closed && before == queue_version;
    }

    // Without the lock. While copies are traced, it polls for pieces that begin or end.
    void pause() {
        if (traced_in_flight == 0) {
            const timespec time{0, PAUSE_NS};
            nanosleep(&time, nullptr);
            return;
        }
        const uint64_t ended = load(&counters[0]), begun = load(&counters[1]);
        const int64_t until = now_ns() + PAUSE_NS;
        while (load(&counters[0]) == ended && load(&counters[1]) == begun && now_ns() < until) {
        }
    }

    // Under the lock: notes which pieces have begun and ended.
    void retire_pieces() {
        const uint64_t begun = load(&counters[1]);
        for (Piece& one : in_flight) {
            if (!one.traced || one.sequence > begun) break;
            if (!one.begun_ns) one.begun_ns = now_ns();
        }
        const uint64_t ended = load(&counters[0]);
        while (!in_flight.empty() && in_flight.front().sequence <= ended) {
            const Piece& one = in_flight.front();
            if (one.traced && traced_copies.size() < MAX_TRACED) {
                const int64_t end = now_ns();
                traced_copies.push_back(
                    {one.tag, one.bytes, one.begun_ns ? one.begun_ns : end, end});
            }
            bytes_in_flight -= one.bytes;
            traced_in_flight -= one.traced;
            in_flight.pop_front();
        }
    }

    bool is_full(const QueuedUpload& upload) const {
        return bytes_in_flight > (upload.certain ? certain_limit : expected_limit) ||
               in_flight.size() >= MAX_PIECES_IN_FLIGHT;
    }

    // Under the lock: issues the next piece of the most urgent upload.
    void issue(const QueuedUpload& upload) {
        Slot& slot = slots[upload.slot];
        const UploadCommand& command = slot.command;
        if (slot.number != command.number) {
            slot.number = command.number;
            slot.filled = 0;
            if (command.after) check(calls.wait_event(stream, command.after, 0));
        }
        const int64_t left = command.bytes - slot.filled;
        const int64_t bytes = upload.certain || left < piece ? left : piece;
        ++sequence;
        if (tracing) check(calls.write(stream, address(&counters[1]), sequence, 0));
        check(calls.copy(command.to + slot.filled, command.from + slot.filled, bytes, stream));
        check(calls.write(stream, address(&counters[0]), sequence, 0));
        in_flight.push_back({sequence, bytes, command.tag, 0, tracing});
        bytes_in_flight += bytes;
        traced_in_flight += tracing;
        issued_bytes[command.in_device != 0] += bytes;
        slot.filled += bytes;
        if (slot.filled == command.bytes || error) {
            if (!error) {
                store(&ends[upload.slot], sequence);
                store(&issued[upload.slot], command.number);
            }
            queue.pop_front();
            progress.notify_all();
        }
    }

    static uint64_t address(const uint64_t* number) { return reinterpret_cast<uint64_t>(number); }

    void check(int code) {
        if (!code || error) return;
        error = code;
        progress.notify_all();
    }

    const Calls calls;
    void* const context;
    void* const stream;
    const int64_t piece;
    uint64_t *const counters, *const issued, *const ends;
    const Inject inject;
    std::vector<Slot> slots;
    std::mutex lock;
    std::condition_variable changed, progress;
    std::deque<QueuedUpload> queue;
    uint64_t queue_version = 0;
    std::deque<Piece> in_flight;
    std::vector<TracedCopy> traced_copies;
    int64_t bytes_in_flight = 0, expected_limit = 0, certain_limit = 0;
    int64_t issued_bytes[2] = {0, 0};
    uint64_t sequence = 0;
    bool tracing = false;
    std::atomic<int> traced_in_flight{0};
    std::atomic<int> error{0};
    std::atomic<int> callers{0};
    bool closed = false;
    std::thread thread;  // last: it starts when everything else is constructed
};

// The CPU as the compute device: a copy has ended when the call returns.
int host_set_context(void*) { return 0; }
int host_copy(uint64_t to, uint64_t from, size_t bytes, void*) {
    std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
    return 0;
}
int host_wait_event(void*, void*, unsigned) { return 0; }
int host_write(void*, uint64_t address, uint64_t number, unsigned) {
    store(reinterpret_cast<uint64_t*>(address), number);
    return 0;
}

const Calls host_calls{host_set_context, host_copy, host_wait_event, host_write};

}  // namespace

extern "C" {

const void* overspill_upload_host_calls() { return &host_calls; }

void* overspill_upload_new(const Calls* calls, void* context, void* stream, int64_t n_slots,
                           int64_t piece, uint64_t* counters, uint64_t* issued, uint64_t* ends,
                           Inject inject) {
    return new UploadThread(*calls, context, stream, n_slots, piece, counters, issued, ends, inject);
}

void overspill_upload_stop(void* thread) { static_cast<UploadThread*>(thread)->stop(); }

// After `stop`, when no call is running any more.
void overspill_upload_free(void* thread) { delete static_cast<UploadThread*>(thread); }

int overspill_upload_set(void* thread, const UploadCommand* commands, const int32_t* items,
                         int64_t count, int64_t expected_limit, int64_t certain_limit, int trace) {
    return static_cast<UploadThread*>(thread)->set_uploads(commands, items, count, expected_limit,
                                                           certain_limit, trace);
}

int overspill_upload_wait(void* thread, const int32_t* slots, const uint64_t* numbers,
                          int64_t count, int all) {
    return static_cast<UploadThread*>(thread)->wait(slots, numbers, count, all);
}

int overspill_upload_wait_idle(void* thread) {
    return static_cast<UploadThread*>(thread)->wait_idle();
}

int64_t overspill_upload_traced(void* thread, TracedCopy* out, int64_t limit, int64_t* bytes) {
    return static_cast<UploadThread*>(thread)->take_traced(out, limit, bytes);
}
}
