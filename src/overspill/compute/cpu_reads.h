// Threads that read records of a file, while the caller does something else.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
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

// Records that are read together.
struct ReadJob {
    ReadJob(int file, std::vector<RecordRead> what, int64_t bytes,
            std::function<void(int error)> ended = nullptr)
        : file(file),
          records(std::move(what)),
          bytes(bytes),
          ended(std::move(ended)),
          left(int64_t(records.size()) * parts()) {}

    int64_t parts() const { return pieces(bytes, READ_BYTES); }
    int64_t count() const { return int64_t(records.size()) * parts(); }

    const int file;
    const std::vector<RecordRead> records;
    const int64_t bytes;                         // of each record
    const std::function<void(int error)> ended;  // called by the thread that reads last
    int64_t next = 0, left;  // the next piece to read, and the number of pieces not read yet
    ReadResult result;
};

// Threads that read jobs, and their queues.
class RecordReads {
  public:
    ~RecordReads() { close(); }

    // Begins to read a job of at least one record. Urgent jobs are read before all others.
    void start(const std::shared_ptr<ReadJob>& job, bool urgent) {
        while (threads.size() < READERS) threads.emplace_back(&RecordReads::work, this);
        {
            const std::lock_guard<std::mutex> guard(lock);
            (urgent ? urgent_jobs : other_jobs).push_back(job);
        }
        changed.notify_all();
    }

    // Waits until all records of a job were read, or have failed, for at most `ns`; returns whether
    // they have.
    bool wait(const ReadJob& job, int64_t ns) {
        std::unique_lock<std::mutex> guard(lock);
        return job_ended.wait_for(guard, std::chrono::nanoseconds(ns),
                                  [&] { return job.left == 0; });
    }

    // Ends the threads when all jobs were read: their memory may be freed after this.
    void close() {
        {
            const std::lock_guard<std::mutex> guard(lock);
            closed = true;
        }
        changed.notify_all();
        for (std::thread& thread : threads) thread.join();
        threads.clear();
    }

  private:
    void work() {
        std::unique_lock<std::mutex> guard(lock);
        for (;;) {
            changed.wait(guard, [&] {
                return closed || !urgent_jobs.empty() || !other_jobs.empty();
            });
            auto& jobs = urgent_jobs.empty() ? other_jobs : urgent_jobs;
            if (jobs.empty()) return;
            const std::shared_ptr<ReadJob> job = jobs.front();
            const int64_t piece = job->next++;
            if (job->next == job->count()) jobs.pop_front();
            guard.unlock();
            const int64_t index = piece / job->parts(), at = piece % job->parts() * READ_BYTES;
            const RecordRead& record = job->records[index];
            const int error = read_bytes(job->file, record.to + at,
                                         least(READ_BYTES, job->bytes - at), record.offset + at);
            guard.lock();
            if (error && !job->result.error) job->result = {index, error};
            if (job->left > 1) {
                --job->left;
                continue;
            }
            guard.unlock();
            if (job->ended) job->ended(job->result.error);
            guard.lock();
            job->left = 0;
            job_ended.notify_all();
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

    std::mutex lock;  // guards what follows, and the numbers and results of jobs
    std::condition_variable changed, job_ended;
    bool closed = false;
    std::deque<std::shared_ptr<ReadJob>> urgent_jobs, other_jobs;  // jobs with pieces to begin
    std::vector<std::thread> threads;
};

}  // namespace
