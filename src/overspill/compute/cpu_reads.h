// Threads that read records of a file, while the caller does something else.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "cpu_group.h"

namespace {

constexpr int64_t READ_BYTES = 512 << 10;  // of one call
constexpr int READERS = 24;                // a record is read by several: disks need many requests

struct RecordRead {
    char* to;
    int64_t offset;  // in the file
};

struct ReadResult {
    int64_t failed = -1;  // index of a record that could not be read
    int error = 0;        // its errno, -1 at the end of the file
};

class RecordReads {
  public:
    ~RecordReads() {
        {
            const std::lock_guard<std::mutex> guard(lock);
            closed = true;
        }
        changed.notify_all();
        for (std::thread& thread : threads) thread.join();
    }

    // Begins to read; `wait` follows.
    void start(int from, std::vector<RecordRead> what, int64_t record_bytes) {
        while (threads.size() < READERS) threads.emplace_back(&RecordReads::work, this);
        {
            const std::lock_guard<std::mutex> guard(lock);
            file = from;
            records = std::move(what);
            bytes = record_bytes;
            next = 0;
            count = left = int64_t(records.size()) * parts();
            result = {};
        }
        changed.notify_all();
    }

    // Until everything was read, or tried.
    ReadResult wait() {
        std::unique_lock<std::mutex> guard(lock);
        ended.wait(guard, [&] { return left == 0; });
        return result;
    }

  private:
    int64_t parts() const { return pieces(bytes, READ_BYTES); }

    void work() {
        std::unique_lock<std::mutex> guard(lock);
        for (;;) {
            changed.wait(guard, [&] { return closed || next < count; });
            if (closed) return;
            const int64_t task = next++, index = task / parts(), at = task % parts() * READ_BYTES;
            const RecordRead record = records[index];
            const int64_t size = least(READ_BYTES, bytes - at);
            guard.unlock();
            const int error = read_bytes(file, record.to + at, size, record.offset + at);
            guard.lock();
            if (error && !result.error) result = {index, error};
            if (--left == 0) ended.notify_one();
        }
    }

    // Returns 0, an errno, or -1 at the end of the file.
    static int read_bytes(int file, char* to, int64_t count, int64_t offset) {
        for (int64_t done = 0; done < count;) {
            const ssize_t now = pread(file, to + done, count - done, offset + done);
            if (now < 0 && errno == EINTR) continue;
            if (now <= 0) return now < 0 ? errno : -1;
            done += now;
        }
        return 0;
    }

    std::mutex lock;  // guards what follows
    std::condition_variable changed, ended;
    bool closed = false;
    std::vector<RecordRead> records;
    int file = -1;
    int64_t bytes = 0, next = 0, count = 0, left = 0;  // of a record; pieces
    ReadResult result;
    std::vector<std::thread> threads;
};

}  // namespace
