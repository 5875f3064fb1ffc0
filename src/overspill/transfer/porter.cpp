// Carries experts to the compute device in the order of need, without the interpreter: a thread
// that issues copies piece by piece and looks at the order again before each.
//
// All copies go through one stream, which writes a growing number to memory after each piece. That
// number tells this thread how much is on its way, the host what has arrived, and other streams,
// which can wait for it, when to go on.

#include <time.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

namespace {

// Of the CUDA driver; each returns 0 or an error.
struct Calls {
    int (*set_context)(void* context);
    int (*copy)(uint64_t to, uint64_t from, size_t bytes, void* stream);
    int (*wait_event)(void* stream, void* event, unsigned flags);
    int (*write)(void* stream, uint64_t address, uint64_t number, unsigned flags);
};

// The record that belongs in a slot. Its number says which one it is: if it is listed again, it goes
// on where it was.
struct Order {
    uint64_t to, from;
    void* after;  // an event that must have passed before the slot is written to, or null
    uint64_t number;
    int64_t tag;  // for the log
};

// What is to be carried: the order of a slot.
struct Item {
    int32_t slot;
    bool sure;  // nothing more urgent can come: it goes in one piece, queued further ahead
};

struct Slot {
    Order order{};        // what belongs in it
    uint64_t number = 0;  // of the order whose pieces are in it
    int64_t filled = 0;   // bytes of it that were issued
};

struct Piece {
    uint64_t sequence;
    int64_t bytes, tag, begun_ns;
    bool traced;
};

struct Line {
    int64_t tag, bytes, begin_ns, end_ns;
};

constexpr size_t MOST_LINES = 1 << 18;
constexpr size_t MOST_PIECES = 64;  // on their way
constexpr std::chrono::milliseconds MOMENT(100);
constexpr int LATER = -1, CLOSED = -2;  // beside the driver's errors, which are positive
constexpr long PAUSE_NS = 20000;  // a piece takes several times as long

int64_t now_ns() {
    timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return int64_t(at.tv_sec) * 1000000000 + at.tv_nsec;
}

uint64_t seen(const uint64_t* number) { return __atomic_load_n(number, __ATOMIC_ACQUIRE); }
void show(uint64_t* number, uint64_t value) { __atomic_store_n(number, value, __ATOMIC_RELEASE); }

class Porter {
  public:
    // `counters`: pieces that have ended and that have begun, in memory which the stream can write
    // to. `issued` and `ends`: for each slot the last order of which all pieces were issued, and
    // the sequence of its last piece.
    Porter(const Calls& calls, void* context, void* stream, int64_t n_slots, int64_t record,
           int64_t piece, uint64_t* counters, uint64_t* issued, uint64_t* ends)
        : calls(calls),
          context(context),
          stream(stream),
          record(record),
          piece(piece),
          counters(counters),
          issued(issued),
          ends(ends),
          slots(n_slots),
          thread(&Porter::work, this) {}

    // Ends the thread; whoever waits is told.
    void stop() {
        {
            const Visit visit(*this);
            closed = true;
        }
        changed.notify_all();
        progress.notify_all();
        thread.join();
    }

    // What to carry from now on: the orders of some slots, the most urgent first, as pairs of a
    // slot and whether it is sure. `orders` are those of all slots. The limits are how many bytes
    // may be on their way when another piece is issued.
    int carry(const Order* orders, const int32_t* items, int64_t count, int64_t guesses,
              int64_t sures, bool trace) {
        int found = 0;
        {
            const Visit visit(*this);
            list.clear();
            for (int64_t i = 0; i < count; ++i) {
                const int32_t slot = items[2 * i];
                if (issued[slot] == orders[slot].number) continue;
                slots[slot].order = orders[slot];
                list.push_back({slot, items[2 * i + 1] != 0});
            }
            guess_limit = guesses;
            sure_limit = sures;
            tracing = trace;
            found = error;
        }
        changed.notify_all();
        return found;
    }

    // Waits until one of these orders (or `all`), or a later one for the same slot, has been
    // issued, but no longer than a moment: the caller may have other reasons to give up.
    int wait(const int32_t* at, const uint64_t* numbers, int64_t count, bool all) {
        return await([&] {
            int64_t found = 0;
            for (int64_t i = 0; i < count; ++i) found += issued[at[i]] >= numbers[i];
            return all ? found == count : found > 0;
        });
    }

    // The same until nothing is left to issue.
    int settle() {
        return await([&] { return list.empty(); });
    }

    // What was traced and has ended since it was asked for last.
    int64_t take_lines(Line* out, int64_t most, int64_t* bytes) {
        const Visit visit(*this);
        *bytes = carried;
        carried = 0;
        const int64_t count = std::min<int64_t>(most, lines.size());
        std::copy(lines.begin(), lines.begin() + count, out);
        lines.erase(lines.begin(), lines.begin() + count);
        return count;
    }

  private:
    // The lock, for others than the porter's thread: it lets them in before its next piece.
    struct Visit {
        explicit Visit(Porter& porter) : guard(porter.lock, std::defer_lock) {
            ++porter.visitors;
            guard.lock();
            --porter.visitors;
        }
        std::unique_lock<std::mutex> guard;
    };

    template <class Done>
    int await(const Done& done) {
        Visit visit(*this);
        bool is_done = false;
        progress.wait_for(visit.guard, MOMENT, [&] {
            is_done = done();
            return is_done || closed || error;
        });
        return error ? int(error) : is_done ? 0 : closed ? CLOSED : LATER;
    }

    void work() {
        // sleeps are short here: by default the kernel may make them 50 us longer
#ifdef __linux__
        prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);
#endif
        std::unique_lock<std::mutex> guard(lock);
        check(calls.set_context(context));
        while (!closed) {
            watch();
            const bool left = !list.empty() && !error;
            if (left && !crowded(list.front())) {
                issue(list.front());
            } else if (left || (traced > 0 && !error)) {
                guard.unlock();
                pause();
                guard.lock();
            } else {
                changed.wait(guard);
            }
            while (visitors > 0) {
                guard.unlock();
                std::this_thread::yield();
                guard.lock();
            }
        }
    }

    // Without the lock. Traced, it looks out for pieces that begin or end.
    void pause() {
        if (traced == 0) {
            const timespec time{0, PAUSE_NS};
            nanosleep(&time, nullptr);
            return;
        }
        const uint64_t ended = seen(&counters[0]), begun = seen(&counters[1]);
        const int64_t until = now_ns() + PAUSE_NS;
        while (seen(&counters[0]) == ended && seen(&counters[1]) == begun && now_ns() < until) {
        }
    }

    // Under the lock: notes which pieces have ended.
    void watch() {
        const uint64_t begun = seen(&counters[1]);
        for (Piece& one : on_their_way) {
            if (!one.traced || one.sequence > begun) break;
            if (!one.begun_ns) one.begun_ns = now_ns();
        }
        const uint64_t ended = seen(&counters[0]);
        while (!on_their_way.empty() && on_their_way.front().sequence <= ended) {
            const Piece& one = on_their_way.front();
            if (one.traced && lines.size() < MOST_LINES) {
                const int64_t end = now_ns();
                lines.push_back({one.tag, one.bytes, one.begun_ns ? one.begun_ns : end, end});
            }
            bytes_on_their_way -= one.bytes;
            traced -= one.traced;
            on_their_way.pop_front();
        }
    }

    bool crowded(const Item& item) const {
        return bytes_on_their_way > (item.sure ? sure_limit : guess_limit) ||
               on_their_way.size() >= MOST_PIECES;
    }

    // Under the lock: the next piece of the most urgent order.
    void issue(const Item& item) {
        Slot& slot = slots[item.slot];
        const Order& order = slot.order;
        if (slot.number != order.number) {
            slot.number = order.number;
            slot.filled = 0;
            if (order.after) check(calls.wait_event(stream, order.after, 0));
        }
        const int64_t left = record - slot.filled;
        const int64_t bytes = item.sure || left < piece ? left : piece;
        ++sequence;
        if (tracing) check(calls.write(stream, address(&counters[1]), sequence, 0));
        check(calls.copy(order.to + slot.filled, order.from + slot.filled, bytes, stream));
        check(calls.write(stream, address(&counters[0]), sequence, 0));
        on_their_way.push_back({sequence, bytes, order.tag, 0, tracing});
        bytes_on_their_way += bytes;
        traced += tracing;
        carried += bytes;
        slot.filled += bytes;
        if (slot.filled == record || error) {
            if (!error) {
                show(&ends[item.slot], sequence);
                show(&issued[item.slot], order.number);
            }
            list.pop_front();
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
    const int64_t record, piece;
    uint64_t *const counters, *const issued, *const ends;
    std::vector<Slot> slots;
    std::mutex lock;
    std::condition_variable changed, progress;
    std::deque<Item> list;
    std::deque<Piece> on_their_way;
    std::vector<Line> lines;
    int64_t bytes_on_their_way = 0, carried = 0, guess_limit = 0, sure_limit = 0;
    uint64_t sequence = 0;
    bool tracing = false;
    std::atomic<int> traced{0};  // pieces on their way
    std::atomic<int> error{0};
    std::atomic<int> visitors{0};
    bool closed = false;
    std::thread thread;  // last: it begins when all else is there
};

}  // namespace

extern "C" {

void* overspill_porter_new(const Calls* calls, void* context, void* stream, int64_t n_slots,
                           int64_t record, int64_t piece, uint64_t* counters, uint64_t* issued,
                           uint64_t* ends) {
    return new Porter(*calls, context, stream, n_slots, record, piece, counters, issued, ends);
}

void overspill_porter_stop(void* porter) { static_cast<Porter*>(porter)->stop(); }

// After `stop`, when nobody is inside any more.
void overspill_porter_free(void* porter) { delete static_cast<Porter*>(porter); }

int overspill_porter_carry(void* porter, const Order* orders, const int32_t* items, int64_t count,
                           int64_t guesses, int64_t sures, int trace) {
    return static_cast<Porter*>(porter)->carry(orders, items, count, guesses, sures, trace);
}

int overspill_porter_wait(void* porter, const int32_t* slots, const uint64_t* numbers,
                          int64_t count, int all) {
    return static_cast<Porter*>(porter)->wait(slots, numbers, count, all);
}

int overspill_porter_settle(void* porter) { return static_cast<Porter*>(porter)->settle(); }

int64_t overspill_porter_lines(void* porter, Line* out, int64_t most, int64_t* bytes) {
    return static_cast<Porter*>(porter)->take_lines(out, most, bytes);
}
}
