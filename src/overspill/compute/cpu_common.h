// Sizes, scratch memory and prefetching for the expert kernels.
#pragma once

#include <cstdlib>

#include "cpu_isa.h"

namespace {

constexpr int64_t LINE = 64;       // bytes of a cache line
constexpr int64_t TILE = 16;       // rows of an AMX tile, and its columns of 4 bytes
constexpr int64_t STEP = 32;       // bf16 values in a row of an AMX tile
constexpr int64_t BLOCK = 128;     // hidden units of one backward task
constexpr int64_t CHUNK = 128;     // weight rows that the nn product keeps in the cache
constexpr int64_t IN_FLIGHT = 64;  // cache lines that nt prefetches, all streams together

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t pieces(int64_t size, int64_t piece) { return (size + piece - 1) / piece; }
INLINE int64_t padded(int64_t size, int64_t piece) { return pieces(size, piece) * piece; }

// Memory that is kept between calls: page faults on new memory would cost as much as the weights.
class Scratch {
  public:
    ~Scratch() { std::free(memory); }

    // At least `bytes` bytes, uninitialized. Invalidates what earlier calls returned.
    char* take(int64_t bytes) {
        if (bytes > size) {
            std::free(memory);
            size = padded(bytes, 4096);
            memory = static_cast<char*>(std::aligned_alloc(4096, size));
            if (!memory) std::abort();
        }
        return memory;
    }

  private:
    char* memory = nullptr;
    int64_t size = 0;
};

thread_local Scratch task_scratch;  // for the temporaries of one task

// The next `count` items of a scratch buffer, aligned to a cache line.
template <class P>
INLINE P* cut_array(char*& at, int64_t count) {
    P* here = reinterpret_cast<P*>(at);
    at += padded(count * int64_t(sizeof(P)), LINE);
    return here;
}

// Weights to prefetch into the L2 cache: rows of whole cache lines.
struct Prefetch {
    const char* row = nullptr;
    int64_t stride = 0, lines = 0, rows = 0, line = 0;

    Prefetch() = default;
    Prefetch(const void* begin, int64_t stride, int64_t bytes, int64_t rows)
        : row(static_cast<const char*>(begin)),
          stride(stride),
          lines(bytes / LINE),
          rows(bytes / LINE > 0 ? rows : 0) {}

    // Requests the next `count` lines.
    __attribute__((noinline)) void fetch(int64_t count) {
        while (count > 0 && rows > 0) {
            const int64_t now = least(count, lines - line);
            for (int64_t i = 0; i < now; ++i) __builtin_prefetch(row + (line + i) * LINE, 0, 2);
            count -= now;
            line += now;
            if (line == lines) {
                line = 0;
                row += stride;
                --rows;
            }
        }
    }
};

}  // namespace
