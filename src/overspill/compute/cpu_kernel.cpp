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
// tiles of AMX. The best that the CPU has is taken at run time, not at build time.
//
// Sums are float32 and rounded where compute/experts.py rounds. What is summed in which order
// depends on the sizes of a segment alone, never on threads or on the group around it.

#include <time.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#define INLINE static inline __attribute__((always_inline))

#if defined(__x86_64__)
#define HAVE_X86 1
#define TARGET_AVX2 __attribute__((target("avx2,fma")))
#define AVX512_TARGETS "avx512f,avx512bw,avx512vl,avx512dq,fma"
#if defined(__clang__)
#define WIDE ""
#else  // gcc's default tuning would stop at 256 bits
#define WIDE ",prefer-vector-width=512"
#endif
#define TARGET_AVX512 __attribute__((target(AVX512_TARGETS WIDE)))
#if defined(__linux__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define HAVE_AMX 1
#define TARGET_AMX __attribute__((target(AVX512_TARGETS ",amx-tile,amx-bf16" WIDE)))
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed to inlined functions only
#endif

namespace {

enum Isa { GENERIC = 0, AVX2 = 1, AVX512 = 2, AMX = 3 };

constexpr int64_t LINE = 64;                  // bytes of a cache line
constexpr int64_t TILE = 16;                  // rows of a tile, and its columns of 4 bytes
constexpr int64_t STEP = 32;                  // bf16 in a row of a tile
constexpr int64_t BLOCK = 128;                // hidden units of one task in backward
constexpr int64_t CHUNK = 256;                // rows of weights that nn holds in the cache
constexpr int64_t LOOK_OUT_NS = 50000;        // that a helper waits for work before he sleeps
constexpr int64_t CACHED_TOKENS = 512 << 10;  // bytes of tokens that nt holds in the cache
constexpr int64_t MAX_TALL = 4;               // tiles of weights in a task of forward
constexpr int64_t MAX_AHEAD = 512 << 10;      // bytes of weights in such a task
constexpr int64_t MAX_SCRATCH = 64 << 20;     // bytes: larger groups are cut
// Up to here every block writes its own share of dx and w_in is read from memory once. With more
// rows these shares are more bytes than a second reading of w_in.
constexpr int64_t SHARED_DX_ROWS = 48;

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t pieces(int64_t size, int64_t piece) { return (size + piece - 1) / piece; }
INLINE int64_t padded(int64_t size, int64_t piece) { return pieces(size, piece) * piece; }

// ---------------------------------------------------------------------------------------------
// Numbers

INLINE float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// The 16 bits of the nearest bf16, ties to even, NaN kept NaN: as torch rounds.
INLINE uint32_t bf16_bits(float value) {
    const uint32_t bits = to_bits(value);
    const uint32_t nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return value != value ? 0x7fc0u : nearest;
}

INLINE float load(const float* from) { return *from; }
INLINE float load(const uint16_t* from) { return from_bits(uint32_t(*from) << 16); }
INLINE void store(float* to, float value) { *to = value; }
INLINE void store(uint16_t* to, float value) { *to = uint16_t(bf16_bits(value)); }

template <class T>
INLINE float rounded(float value) {
    return sizeof(T) == 2 ? from_bits(bf16_bits(value) << 16) : value;
}

// e^x, within 2 ulp where the result is a normal float; below, the smallest of these.
INLINE float exponential(float x) {
    x = x < -87.33654f ? -87.33654f : x;
    x = x > 88.37626f ? 88.37626f : x;
    const float magic = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to an integer
    const float shifted = x * 1.44269504f + magic;
    const float n = shifted - magic;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return p * from_bits((to_bits(shifted) - to_bits(magic) + 127u) << 23);
}

INLINE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

// The normal distribution function, given e^(-x*x/2). Its lower tail is that times t P(t) with
// t = 1 / (1 + 0.3 |x|); P is a minimax fit of the relative error, which is below 4e-9.
INLINE float normal_cdf(float x, float gauss) {
    const float t = 1.0f / (1.0f + 0.3f * std::fabs(x));
    float p = -0.020612836f;
    p = p * t + 0.11237581f;
    p = p * t - 0.22806758f;
    p = p * t + 0.19158179f;
    p = p * t - 0.079247408f;
    p = p * t + 0.096057862f;
    p = p * t + 0.078425571f;
    p = p * t + 0.11022732f;
    p = p * t + 0.11957284f;
    p = p * t + 0.11968663f;
    const float tail = gauss * (p * t);
    return x < 0.0f ? tail : 1.0f - tail;
}

// The activation of `count` pre-activations, in place; `up` is only read, and null without a gate.
template <class T>
INLINE void activate_body(float* __restrict h, const float* __restrict up, int64_t count) {
    if (up) {
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) {
            const float gate = rounded<T>(h[i]);
            h[i] = rounded<T>(gate * sigmoid(gate) * rounded<T>(up[i]));
        }
        return;
    }
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
        const float x = rounded<T>(h[i]);
        h[i] = rounded<T>(x * normal_cdf(x, exponential(-0.5f * x * x)));
    }
}

// One row of `activate_backward`: dh, dup and the weighted activation; returns the row's part of
// the gradient of its routing weight.
template <class T>
INLINE float activate_backward_body(const float* __restrict h, const float* __restrict up,
                                    const float* __restrict da_, float weight, int64_t count,
                                    T* __restrict dh, T* __restrict dup, T* __restrict weighted) {
    float total = 0.0f;
    if (up) {
#pragma omp simd reduction(+ : total)
        for (int64_t i = 0; i < count; ++i) {
            const float gate = rounded<T>(h[i]), other = rounded<T>(up[i]);
            const float da = rounded<T>(da_[i]), s = sigmoid(gate), silu = gate * s;
            const float a = silu * other, scaled = da * weight;
            total += a * da;
            store(dh + i, scaled * other * (s + silu * (1.0f - s)));
            store(dup + i, scaled * silu);
            store(weighted + i, a * weight);
        }
        return total;
    }
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < count; ++i) {
        const float x = rounded<T>(h[i]), da = rounded<T>(da_[i]);
        const float gauss = exponential(-0.5f * x * x), cdf = normal_cdf(x, gauss);
        const float a = x * cdf;
        total += a * da;
        store(dh + i, da * weight * (cdf + x * (0.39894228f * gauss)));
        store(weighted + i, a * weight);
    }
    return total;
}

// Results, rounded; returns the sum of squares of what was written.
template <class T>
INLINE double put_body(const float* from, int64_t from_stride, int64_t rows, int64_t columns, T* to,
                       int64_t to_stride) {
    double squares = 0.0;
    for (int64_t row = 0; row < rows; ++row) {
        const float* __restrict source = from + row * from_stride;
        T* __restrict target = to + row * to_stride;
        float total = 0.0f;
#pragma omp simd reduction(+ : total)
        for (int64_t i = 0; i < columns; ++i) {
            store(target + i, source[i]);
            total += rounded<T>(source[i]) * rounded<T>(source[i]);
        }
        squares += double(total);
    }
    return squares;
}

INLINE void add_body(float* __restrict total, const float* __restrict more, int64_t count) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) total[i] += more[i];
}

// ---------------------------------------------------------------------------------------------
// Memory

// Grows and is kept: pages that a call has to take anew would cost as much as its weights.
class Scratch {
  public:
    ~Scratch() { std::free(memory_); }

    // Room for `bytes`, whose content is anything.
    char* take(int64_t bytes) {
        if (bytes > size_) {
            std::free(memory_);
            size_ = padded(bytes, 4096);
            memory_ = static_cast<char*>(std::aligned_alloc(4096, size_));
            if (!memory_) std::abort();
        }
        return memory_;
    }

  private:
    char* memory_ = nullptr;
    int64_t size_ = 0;
};

thread_local Scratch group_scratch;  // of the calling thread: what tasks hand to each other
thread_local Scratch task_scratch;   // of each worker: what one task needs

// The next `count` items of a scratch, beginning on a cache line.
template <class P>
INLINE P* cut_array(char*& at, int64_t count) {
    P* here = reinterpret_cast<P*>(at);
    at += padded(count * int64_t(sizeof(P)), LINE);
    return here;
}

// A part of the weights that will be needed soon: rows of whole cache lines.
struct Ahead {
    const char* row = nullptr;
    int64_t stride = 0, lines = 0, rows = 0, line = 0;

    Ahead() = default;
    Ahead(const void* begin, int64_t stride_, int64_t bytes, int64_t rows_)
        : row(static_cast<const char*>(begin)),
          stride(stride_),
          lines(bytes / LINE),
          rows(bytes / LINE > 0 ? rows_ : 0) {}

    // Asks for the next `count` lines, into the second cache.
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

// ---------------------------------------------------------------------------------------------
// Jobs: what one call computes, cut into tasks

// One expert of the group, its rows, and its arrays in the scratch of the group.
struct Segment {
    const void* record;
    void* gradient;
    int64_t start, rows;
    double* squares;       // of the whole gradient, or null
    char* x_tiles;         // AMX: x, packed for nt
    char* a;               // forward: the activation; AMX: packed for nt
    uint16_t* dy;          // AMX: dy, padded
    uint16_t* dy_turned;   // AMX: dy^T, padded
    uint32_t* x_pairs;     // AMX: x with each two rows interleaved
    char* dh;              // all of dh, unless every block has its share of dx
    float* dx_shares;      // [blocks, R, D], D padded
    float* weight_shares;  // [blocks, R]: of the gradient of routing weights
    double* block_squares;
};

struct Job {
    const void *x, *dy;
    void *y, *dx;
    const float* row_weight;
    float* drow_weight;
    int64_t x_stride, dy_stride, y_stride, dx_stride;  // elements between rows
    int64_t d, h;
    bool gated, backward, gradients;
    int64_t item;               // bytes of a weight
    int64_t tall_in, tall_out;  // hidden units and rows of w_out to a task of forward

    int64_t gates() const { return gated ? 2 : 1; }
    int64_t blocks() const { return pieces(h, BLOCK); }
    bool shares_dx(const Segment& own) const { return own.rows <= SHARED_DX_ROWS; }
};

template <class T>
INLINE const T* w_in(const Segment& own) {
    return static_cast<const T*>(own.record);
}
template <class T>
INLINE const T* w_out(const Job& job, const Segment& own) {
    return static_cast<const T*>(own.record) + job.gates() * job.h * job.d;
}
template <class T>
INLINE const T* rows_of(const void* base, int64_t stride, const Segment& own) {
    return static_cast<const T*>(base) + own.start * stride;
}
template <class T>
INLINE T* rows_of(void* base, int64_t stride, const Segment& own) {
    return static_cast<T*>(base) + own.start * stride;
}

// Tasks of one phase of one segment. Phase 0 packs tokens; then come the hidden units and the
// output in forward, the blocks and dx in backward.
struct Run {
    int phase = 0;
    Segment* own = nullptr;
    int64_t first = 0;
    std::atomic<int64_t> left{0};
    Run* before = nullptr;  // has to be done first
};

constexpr int PHASES = 3;

int64_t tasks_of(const Job& job, const Segment& own, int phase, bool packs) {
    if (phase == 0) return packs ? pieces(own.rows, TILE) : 0;
    if (own.rows == 0 && !job.gradients) return 0;
    if (!job.backward) {
        return phase == 1 ? pieces(padded(job.h, STEP), job.tall_in) : pieces(job.d, job.tall_out);
    }
    if (phase == 1) return job.blocks();
    return own.rows > 0 ? pieces(job.d, BLOCK) : 0;
}

// The weights that a task reads, in backward those that it begins with.
Ahead weights_of(const Job& job, const Segment& own, int phase, int64_t index) {
    const char* in = static_cast<const char*>(own.record);
    const char* out = in + job.gates() * job.h * job.d * job.item;
    const int64_t in_row = job.d * job.item, out_row = job.h * job.item;
    if (phase == 0 || (job.backward && phase == 2)) return Ahead();
    if (job.backward) {
        const int64_t unit = index * BLOCK, count = least(BLOCK, job.h - unit);
        return Ahead(out + unit * job.item, out_row, count * job.item, least(CHUNK, job.d));
    }
    if (phase == 1) {
        const int64_t unit = index * job.tall_in;
        const int64_t count = most(0, least(job.tall_in, job.h - unit));
        return Ahead(in + unit * in_row, job.h * in_row, count * in_row, job.gates());
    }
    const int64_t row = index * job.tall_out, count = least(job.tall_out, job.d - row);
    return Ahead(out + row * out_row, 0, count * out_row, 1);
}

// The last argument is what the next task reads.
using Task = void (*)(const Job&, const Segment&, int phase, int64_t index, Ahead&);

struct Kernel {
    Task task;
    bool packs;
    void (*enter)();  // once in every worker, before its first task
    void (*leave)();
};

void nothing() {}

INLINE void wait_for(const Run& run) {
    for (int spins = 0; run.left.load(std::memory_order_acquire) > 0; ++spins) {
#if HAVE_X86
        __builtin_ia32_pause();
#endif
        if (spins > 2000) std::this_thread::yield();  // more threads than cores
    }
}

INLINE void rest() {
#if HAVE_X86
    __builtin_ia32_pause();
#else
    std::this_thread::yield();
#endif
}

int64_t now_ns() {
    timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return int64_t(at.tv_sec) * 1000000000 + at.tv_nsec;
}

// The threads that help a caller, his own as long as he lives. After a call they look out for the
// next for a moment and then sleep: those of OpenMP would go on spinning for milliseconds, beside
// the thread that drives the GPU.
class Crew {
  public:
    // Runs `body` in this thread and up to `threads - 1` others, and returns when all are out of it.
    // Who wakes too late to help is not waited for.
    void run(int threads, const std::function<void()>& body) {
        while (int(workers.size()) < threads - 1) {
            workers.emplace_back(&Crew::work, this, int(workers.size()));
        }
        {
            const std::lock_guard<std::mutex> guard(lock);
            open = &body;
            wanted = threads - 1;
            round.fetch_add(1, std::memory_order_release);
        }
        if (wanted > 0) wake.notify_all();
        body();
        std::unique_lock<std::mutex> guard(lock);
        open = nullptr;
        finished.wait(guard, [&] { return inside == 0; });
    }

    ~Crew() {
        {
            const std::lock_guard<std::mutex> guard(lock);
            closed = true;
        }
        wake.notify_all();
        for (std::thread& worker : workers) worker.join();
    }

  private:
    void work(int number) {
        int64_t seen = 0;
        for (;;) {
            const std::function<void()>* body = nullptr;
            const int64_t until = now_ns() + LOOK_OUT_NS;
            while (round.load(std::memory_order_acquire) == seen && now_ns() < until) rest();
            {
                std::unique_lock<std::mutex> guard(lock);
                wake.wait(guard, [&] { return closed || round.load() != seen; });
                if (closed) return;
                seen = round.load();
                if (number >= wanted || open == nullptr) continue;
                body = open;
                ++inside;
            }
            (*body)();
            const std::lock_guard<std::mutex> guard(lock);
            if (--inside == 0) finished.notify_one();
        }
    }

    std::mutex lock;
    std::condition_variable wake, finished;
    std::vector<std::thread> workers;
    const std::function<void()>* open = nullptr;
    std::atomic<int64_t> round{0};
    int wanted = 0, inside = 0;
    bool closed = false;
};

Crew& crew() {
    static thread_local Crew own;
    return own;
}

void run_tasks(const Job& job, std::vector<Segment>& segments, const Kernel& kernel, int threads) {
    std::vector<Run> runs(PHASES * segments.size());
    int64_t total = 0;
    for (int phase = 0; phase < PHASES; ++phase) {
        for (size_t s = 0; s < segments.size(); ++s) {
            Run& run = runs[phase * segments.size() + s];
            run.phase = phase;
            run.own = &segments[s];
            run.first = total;
            run.left = tasks_of(job, segments[s], phase, kernel.packs);
            run.before = phase > 0 ? &runs[(phase - 1) * segments.size() + s] : nullptr;
            total += run.left;
        }
    }
    const Run* const end = runs.data() + runs.size();
    std::atomic<int64_t> next{0};
    // Tasks are taken in order and one ahead, so that the weights of the next can be on their way
    // while this one computes. Whoever waits, waits for tasks that come earlier in the order, so
    // somebody always goes on.
    const std::function<void()> body = [&] {
        kernel.enter();
        Run* run = runs.data();
        auto run_of = [&](Run* from, int64_t task) {
            while (from + 1 < end && from[1].first <= task) ++from;
            return from;
        };
        int64_t mine = next.fetch_add(1);
        while (mine < total) {
            const int64_t ahead = next.fetch_add(1);
            run = run_of(run, mine);
            if (run->before) wait_for(*run->before);
            Ahead weights;
            if (ahead < total) {
                const Run* other = run_of(run, ahead);
                weights = weights_of(job, *other->own, other->phase, ahead - other->first);
            }
            kernel.task(job, *run->own, run->phase, mine - run->first, weights);
            run->left.fetch_sub(1, std::memory_order_release);
            mine = ahead;
        }
        kernel.leave();
    };
    crew().run(int(least(threads, total)), body);
}

// ---------------------------------------------------------------------------------------------
// Products by vectors of the compiler

template <int LANES>
struct Vectors {
    typedef float Floats __attribute__((vector_size(4 * LANES)));
    typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
    typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
};

template <int LANES>
INLINE typename Vectors<LANES>::Floats load_vector(const float* from) {
    typename Vectors<LANES>::Floats vector;
    std::memcpy(&vector, from, sizeof vector);
    return vector;
}

template <int LANES>
INLINE typename Vectors<LANES>::Floats load_vector(const uint16_t* from) {
    typename Vectors<LANES>::Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    const auto bits = __builtin_convertvector(halves, typename Vectors<LANES>::Bits) << 16;
    return (typename Vectors<LANES>::Floats)bits;
}

template <int LANES>
INLINE float sum(typename Vectors<LANES>::Floats vector) {
    float values[LANES];
    std::memcpy(values, &vector, sizeof vector);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) values[i] += values[i + width];
    return values[0];
}

// What a load along the sum gives: one vector of floats, or the even and the odd ones of twice as
// many bf16, which costs a shift and a mask where a conversion in order would need shuffles.
template <class T, int LANES>
struct Along;

template <int LANES>
struct Along<float, LANES> {
    static constexpr int64_t SIZE = LANES;
    typename Vectors<LANES>::Floats value;
    explicit __attribute__((always_inline)) Along(const float* from)
        : value(load_vector<LANES>(from)) {}
    __attribute__((always_inline)) void add(const Along& other,
                                            typename Vectors<LANES>::Floats& total) const {
        total += value * other.value;
    }
};

template <int LANES>
struct Along<uint16_t, LANES> {
    static constexpr int64_t SIZE = 2 * LANES;
    typename Vectors<LANES>::Floats even, odd;
    explicit __attribute__((always_inline)) Along(const uint16_t* from) {
        typename Vectors<LANES>::Bits bits;
        std::memcpy(&bits, from, sizeof bits);
        even = (typename Vectors<LANES>::Floats)(bits << 16);
        odd = (typename Vectors<LANES>::Floats)(bits & 0xffff0000u);
    }
    __attribute__((always_inline)) void add(const Along& other,
                                            typename Vectors<LANES>::Floats& total) const {
        total += even * other.even;
        total += odd * other.odd;
    }
};

// W rows of weights with M rows of tokens; c[w][m].
template <class T, int LANES, int W, int M>
INLINE void nt_block(const T* weights, const T* tokens, int64_t token_stride, int64_t k, float* c,
                     int64_t c_stride) {
    using Vector = Along<T, LANES>;
    typename Vectors<LANES>::Floats total[W][M] = {};
    int64_t at = 0;
    for (; at + Vector::SIZE <= k; at += Vector::SIZE) {
        for (int m = 0; m < M; ++m) {
            const Vector token(tokens + m * token_stride + at);
            for (int w = 0; w < W; ++w) Vector(weights + w * k + at).add(token, total[w][m]);
        }
    }
    for (int w = 0; w < W; ++w) {
        for (int m = 0; m < M; ++m) {
            float tail = 0.0f;
            for (int64_t i = at; i < k; ++i)
                tail += load(weights + w * k + i) * load(tokens + m * token_stride + i);
            c[w * c_stride + m] = sum<LANES>(total[w][m]) + tail;
        }
    }
}

// c[row][token] = weights [rows, k] times tokens [count, k]. No fetching ahead: the weights are a
// few long runs, which the CPU's own prefetchers follow better.
template <class T, int LANES>
INLINE void nt_body(const T* weights, int64_t rows, const T* tokens, int64_t token_stride,
                    int64_t count, int64_t k, float* c, int64_t c_stride) {
    constexpr int W = 4, M = LANES >= 16 ? 4 : 2;  // as many sums as there are registers for
    int64_t row = 0;
    for (; row + W <= rows; row += W) {
        const T* here = weights + row * k;
        int64_t m = 0;
        for (; m + M <= count; m += M)
            nt_block<T, LANES, W, M>(here, tokens + m * token_stride, token_stride, k,
                                     c + row * c_stride + m, c_stride);
        for (; m < count; ++m)
            nt_block<T, LANES, W, 1>(here, tokens + m * token_stride, token_stride, k,
                                     c + row * c_stride + m, c_stride);
    }
    for (; row < rows; ++row)
        for (int64_t m = 0; m < count; ++m)
            nt_block<T, LANES, 1, 1>(weights + row * k, tokens + m * token_stride, token_stride, k,
                                     c + row * c_stride + m, c_stride);
}

// P rows and two vectors of columns of nn, over one chunk of the sum.
template <class T, int LANES, int P>
INLINE void nn_block(const T* a, int64_t a_row, int64_t a_step, const T* b, int64_t b_stride,
                     int64_t depth, float* c, int64_t c_stride, bool add, Ahead* ahead) {
    using Floats = typename Vectors<LANES>::Floats;
    Floats total[P][2] = {};
    if (add)
        for (int p = 0; p < P; ++p)
            for (int v = 0; v < 2; ++v)
                total[p][v] = load_vector<LANES>(c + p * c_stride + v * LANES);
    for (int64_t q = 0; q < depth;) {
        const int64_t stop = least(depth, q + 16);
        // Calls are dear here, where all registers are in use: one for several rows.
        if (ahead) ahead->fetch(most(1, (stop - q) * int64_t(2 * LANES * sizeof(T)) / LINE));
        for (; q < stop; ++q) {
            const Floats left = load_vector<LANES>(b + q * b_stride);
            const Floats right = load_vector<LANES>(b + q * b_stride + LANES);
            for (int p = 0; p < P; ++p) {
                const float factor = load(a + p * a_row + q * a_step);
                total[p][0] += factor * left;
                total[p][1] += factor * right;
            }
        }
    }
    for (int p = 0; p < P; ++p)
        for (int v = 0; v < 2; ++v)
            std::memcpy(c + p * c_stride + v * LANES, &total[p][v], sizeof(Floats));
}

// c[p][n] (+)= sum over q of a(p, q) b[q][n], where a(p, q) lies at a[p * a_row + q * a_step].
// b is read across its rows, in short runs, so the next chunk is fetched while one is used, and
// `then` with the last.
template <class T, int LANES>
INLINE void nn_body(const T* a, int64_t a_row, int64_t a_step, int64_t rows, const T* b,
                    int64_t b_stride, int64_t depth, int64_t columns, float* c, int64_t c_stride,
                    bool add, Ahead* then) {
    constexpr int P = LANES >= 16 ? 8 : 4;
    for (int64_t q = 0; q == 0 || q < depth; q += CHUNK) {
        const int64_t deep = least(CHUNK, depth - q), after = least(CHUNK, depth - q - deep);
        const bool more = add || q > 0;
        Ahead rest;
        if (after > 0)
            rest = Ahead(b + (q + deep) * b_stride, b_stride * int64_t(sizeof(T)),
                         columns * int64_t(sizeof(T)), after);
        const T* a_here = a + q * a_step;
        const T* b_here = b + q * b_stride;
        int64_t n = 0;
        for (; n + 2 * LANES <= columns; n += 2 * LANES) {
            Ahead* first = after > 0 ? &rest : then;
            int64_t p = 0;
            for (; p + P <= rows; p += P, first = nullptr)
                nn_block<T, LANES, P>(a_here + p * a_row, a_row, a_step, b_here + n, b_stride, deep,
                                      c + p * c_stride + n, c_stride, more, first);
            for (; p < rows; ++p, first = nullptr)
                nn_block<T, LANES, 1>(a_here + p * a_row, a_row, a_step, b_here + n, b_stride, deep,
                                      c + p * c_stride + n, c_stride, more, first);
        }
        for (int64_t p = 0; p < rows; ++p) {
            for (int64_t i = n; i < columns; ++i) {
                float total = more ? c[p * c_stride + i] : 0.0f;
                for (int64_t j = 0; j < deep; ++j)
                    total +=
                        load(a_here + p * a_row + j * a_step) * load(b_here + j * b_stride + i);
                c[p * c_stride + i] = total;
            }
        }
    }
}

// What is compiled for each instruction set; all the rest calls these.
#define DEFINE_ISA(NAME, TARGET, LANES)                                                            \
    template <class T>                                                                             \
    struct NAME {                                                                                  \
        TARGET static void nt(const T* weights, int64_t rows, const T* tokens,                     \
                              int64_t token_stride, int64_t count, int64_t k, float* c,            \
                              int64_t c_stride) {                                                  \
            nt_body<T, LANES>(weights, rows, tokens, token_stride, count, k, c, c_stride);         \
        }                                                                                          \
        TARGET static void nn(const T* a, int64_t a_row, int64_t a_step, int64_t rows, const T* b, \
                              int64_t b_stride, int64_t depth, int64_t columns, float* c,          \
                              int64_t c_stride, bool add, Ahead* then = nullptr) {                 \
            nn_body<T, LANES>(a, a_row, a_step, rows, b, b_stride, depth, columns, c, c_stride,    \
                              add, then);                                                          \
        }                                                                                          \
        TARGET static void activate(float* h, const float* up, int64_t count) {                    \
            activate_body<T>(h, up, count);                                                        \
        }                                                                                          \
        TARGET static float activate_backward(const float* h, const float* up, const float* da,    \
                                              float weight, int64_t count, T* dh, T* dup,          \
                                              T* weighted) {                                       \
            return activate_backward_body<T>(h, up, da, weight, count, dh, dup, weighted);         \
        }                                                                                          \
        TARGET static double put(const float* from, int64_t from_stride, int64_t rows,             \
                                 int64_t columns, T* to, int64_t to_stride) {                      \
            return put_body<T>(from, from_stride, rows, columns, to, to_stride);                   \
        }                                                                                          \
        TARGET static void add(float* total, const float* more, int64_t count) {                   \
            add_body(total, more, count);                                                          \
        }                                                                                          \
    };

DEFINE_ISA(Generic, , 4)
#if HAVE_X86
DEFINE_ISA(Avx2, TARGET_AVX2, 8)
DEFINE_ISA(Avx512, TARGET_AVX512, 16)
#endif

// ---------------------------------------------------------------------------------------------
// Tasks by vectors

// to[column][row] = from[row][column]
template <class P>
INLINE void turn(const P* from, int64_t from_stride, int64_t rows, int64_t columns, P* to,
                 int64_t to_stride) {
    for (int64_t column = 0; column < columns; ++column)
        for (int64_t row = 0; row < rows; ++row)
            to[column * to_stride + row] = from[row * from_stride + column];
}

template <class T, class Isa>
void forward_task(const Job& job, const Segment& own, int phase, int64_t index) {
    const int64_t rows = own.rows;
    T* a = reinterpret_cast<T*>(own.a);  // [R, H]
    const int64_t tall = phase == 1 ? job.gates() * job.tall_in : job.tall_out;
    float* c = reinterpret_cast<float*>(task_scratch.take(tall * rows * 4));
    if (phase == 1) {
        const int64_t unit = index * job.tall_in, count = least(job.tall_in, job.h - unit);
        if (count <= 0) return;
        const T* x = rows_of<T>(job.x, job.x_stride, own);
        const T* weights = w_in<T>(own) + unit * job.d;
        float* up = job.gated ? c + count * rows : nullptr;
        Isa::nt(weights, count, x, job.x_stride, rows, job.d, c, rows);
        if (up) Isa::nt(weights + job.h * job.d, count, x, job.x_stride, rows, job.d, up, rows);
        Isa::activate(c, up, count * rows);
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t i = 0; i < count; ++i)
                store(a + row * job.h + unit + i, c[i * rows + row]);
    } else {
        const int64_t first = index * job.tall_out, count = least(job.tall_out, job.d - first);
        Isa::nt(w_out<T>(job, own) + first * job.h, count, a, job.h, rows, job.h, c, rows);
        T* y = rows_of<T>(job.y, job.y_stride, own) + first;
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t i = 0; i < count; ++i)
                store(y + row * job.y_stride + i, c[i * rows + row]);
    }
}

// The arrays of one block in backward: R rows (padded) of BLOCK hidden units.
template <class T, class Isa>
struct BlockArrays {
    float *da, *h, *up, *c;
    T *dh, *dup, *weighted;
    int64_t dh_stride;
    char* rest;

    static BlockArrays cut(const Job& job, const Segment& own, int64_t unit, int64_t rows,
                           int64_t c_size, int64_t rest_bytes) {
        const int64_t size = rows * BLOCK;
        char* at = task_scratch.take(size * (12 + 3 * int64_t(sizeof(T))) + c_size * 4 +
                                     rest_bytes + 16 * LINE);
        BlockArrays arrays;
        arrays.da = cut_array<float>(at, size);
        arrays.h = cut_array<float>(at, size);
        arrays.up = cut_array<float>(at, size);
        arrays.c = cut_array<float>(at, c_size);
        arrays.dh = cut_array<T>(at, size);
        arrays.dup = cut_array<T>(at, size);
        arrays.weighted = cut_array<T>(at, size);
        arrays.dh_stride = BLOCK;
        if (!job.shares_dx(own)) {  // the products with w_in come later, and need all of it
            arrays.dh_stride = padded(job.h, BLOCK);
            arrays.dh = reinterpret_cast<T*>(own.dh) + unit;
            arrays.dup = arrays.dh + rows * arrays.dh_stride;
        }
        arrays.rest = at;
        return arrays;
    }

    // From h, up and da to dh, dup, the weighted activation and the share of the routing weights.
    static void activate_rows(const BlockArrays& arrays, const Job& job, const Segment& own,
                              int64_t unit, int64_t count) {
        float* shares = own.weight_shares + unit / BLOCK * own.rows;
        for (int64_t row = 0; row < own.rows; ++row) {
            const int64_t at = row * BLOCK;
            T* dh = arrays.dh + row * arrays.dh_stride;
            T* dup = arrays.dup + row * arrays.dh_stride;
            T* weighted = arrays.weighted + at;
            shares[row] = Isa::activate_backward(
                arrays.h + at, job.gated ? arrays.up + at : nullptr, arrays.da + at,
                job.row_weight[own.start + row], count, dh, dup, weighted);
            for (int64_t i = count; i < BLOCK; ++i) dh[i] = weighted[i] = 0;  // tiles read these
            if (job.gated)
                for (int64_t i = count; i < BLOCK; ++i) dup[i] = 0;
        }
    }
};

template <class T, class Isa>
void backward_block(const Job& job, const Segment& own, int64_t index, Ahead& ahead) {
    const int64_t unit = index * BLOCK, count = least(BLOCK, job.h - unit), rows = own.rows;
    constexpr int64_t TALL = 32;  // rows of a gradient at once
    const auto arrays = BlockArrays<T, Isa>::cut(job, own, unit, rows, most(rows, TALL) * BLOCK, 0);
    const T* x = rows_of<T>(job.x, job.x_stride, own);
    const T* dy = rows_of<T>(job.dy, job.dy_stride, own);
    const int64_t d = job.d;
    if (rows > 0) {
        Ahead in(w_in<T>(own) + unit * d, job.h * d * int64_t(sizeof(T)),
                 count * d * int64_t(sizeof(T)), job.gates());
        Isa::nn(dy, job.dy_stride, 1, rows, w_out<T>(job, own) + unit, job.h, d, count, arrays.da,
                BLOCK, false, &in);
        for (int64_t gate = 0; gate < job.gates(); ++gate) {
            Isa::nt(w_in<T>(own) + (gate * job.h + unit) * d, count, x, job.x_stride, rows, d,
                    arrays.c, rows);
            turn(arrays.c, rows, count, rows, gate ? arrays.up : arrays.h, BLOCK);
        }
        BlockArrays<T, Isa>::activate_rows(arrays, job, own, unit, count);
    }
    if (job.gradients) {
        T* gradient = static_cast<T*>(own.gradient);
        double squares = 0.0;
        for (int64_t gate = 0; gate < job.gates(); ++gate) {
            const T* dh = gate ? arrays.dup : arrays.dh;
            for (int64_t row = 0; row < count; row += TALL) {
                const int64_t tall = least(TALL, count - row);
                T* to = gradient + (gate * job.h + unit + row) * d;
                for (int64_t column = 0; column < d; column += BLOCK) {
                    const int64_t wide = least(BLOCK, d - column);
                    Isa::nn(dh + row, 1, arrays.dh_stride, tall, x + column, job.x_stride, rows,
                            wide, arrays.c, BLOCK, false);
                    squares += Isa::put(arrays.c, BLOCK, tall, wide, to + column, d);
                }
            }
        }
        T* to = gradient + job.gates() * job.h * d + unit;
        for (int64_t row = 0; row < d; row += TALL) {
            const int64_t tall = least(TALL, d - row);
            Isa::nn(dy + row, 1, job.dy_stride, tall, arrays.weighted, BLOCK, rows, count, arrays.c,
                    BLOCK, false);
            squares += Isa::put(arrays.c, BLOCK, tall, count, to + row * job.h, job.h);
        }
        own.block_squares[index] = squares;
    }
    if (rows > 0 && job.shares_dx(own)) {
        const int64_t stride = padded(d, STEP);
        float* share = own.dx_shares + index * rows * stride;
        for (int64_t gate = 0; gate < job.gates(); ++gate)
            Isa::nn(gate ? arrays.dup : arrays.dh, BLOCK, 1, rows,
                    w_in<T>(own) + (gate * job.h + unit) * d, d, count, d, share, stride, gate > 0,
                    &ahead);
    }
}

template <class T, class Isa>
void dx_task(const Job& job, const Segment& own, int64_t index) {
    const int64_t first = index * BLOCK, width = least(BLOCK, job.d - first);
    const int64_t stride = padded(job.h, BLOCK);
    const T* dh = reinterpret_cast<const T*>(own.dh);
    float* c = reinterpret_cast<float*>(task_scratch.take(own.rows * BLOCK * 4));
    for (int64_t gate = 0; gate < job.gates(); ++gate)
        Isa::nn(dh + gate * own.rows * stride, stride, 1, own.rows,
                w_in<T>(own) + gate * job.h * job.d + first, job.d, job.h, width, c, BLOCK,
                gate > 0);
    Isa::put(c, BLOCK, own.rows, width, rows_of<T>(job.dx, job.dx_stride, own) + first,
             job.dx_stride);
}

// dx of some columns, and with the first of them the routing weights: shares added in their order.
template <class T, class Isa>
void add_shares(const Job& job, const Segment& own, int64_t index) {
    const int64_t first = index * BLOCK, width = least(BLOCK, job.d - first);
    const int64_t stride = padded(job.d, STEP);
    for (int64_t row = 0; row < own.rows; ++row) {
        alignas(64) float total[BLOCK] = {};
        const float* share = own.dx_shares + row * stride + first;
        for (int64_t block = 0; block < job.blocks(); ++block, share += own.rows * stride)
            Isa::add(total, share, width);
        T* dx = rows_of<T>(job.dx, job.dx_stride, own) + row * job.dx_stride + first;
        Isa::put(total, BLOCK, 1, width, dx, job.dx_stride);
    }
}

void add_weight_shares(const Job& job, const Segment& own) {
    for (int64_t row = 0; row < own.rows; ++row) {
        float total = 0.0f;
        for (int64_t block = 0; block < job.blocks(); ++block)
            total += own.weight_shares[block * own.rows + row];
        job.drow_weight[own.start + row] = total;
    }
}

template <class T, class Isa>
void vector_task(const Job& job, const Segment& own, int phase, int64_t index, Ahead& ahead) {
    if (!job.backward) return forward_task<T, Isa>(job, own, phase, index);
    if (phase == 1) return backward_block<T, Isa>(job, own, index, ahead);
    if (index == 0) add_weight_shares(job, own);
    if (job.shares_dx(own)) return add_shares<T, Isa>(job, own, index);
    dx_task<T, Isa>(job, own, index);
}

// ---------------------------------------------------------------------------------------------
// Products by tiles
//
// A tile instruction multiplies A, 16 rows of 32 bf16, with B, 16 rows of 16 pairs of bf16: B holds
// two neighbours along the sum side by side. In nt rows of weights are an A just as they lie, and
// tokens are packed to B; so C is [weights, tokens], from which the next B is made without
// shuffles. In nn tokens are A, and rows of weights become B by interleaving two of them.

#if HAVE_AMX

using Wide = Avx512<uint16_t>;
using AmxArrays = BlockArrays<uint16_t, Wide>;

// All eight tiles in full size. A constant: some compilers think that its loading reads the first
// eight bytes only, and would leave the rest of a local variable unwritten.
alignas(64) constexpr struct {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
} TILE_CONFIG;

TARGET_AMX void enter_tiles() { _tile_loadconfig(&TILE_CONFIG); }

TARGET_AMX void leave_tiles() { _tile_release(); }

// One side of a product: two neighbouring tiles (or one), and how to get to the next along the sum.
struct Tiles {
    const void *first, *second;
    int64_t stride, second_stride, step;
};

// c[2 tiles][2 tiles] (+)= a b over `steps` tiles along the sum; each step fetches `lines` lines.
template <bool TWO_A, bool TWO_B>
TARGET_AMX void multiply_tiles(const Tiles& a, const Tiles& b, int64_t steps, float* c,
                               int64_t c_stride, bool add, Ahead* ahead, int64_t lines) {
    float* below = c + TILE * c_stride;
    const int64_t c_bytes = c_stride * 4;
    if (add) {
        _tile_loadd(0, c, c_bytes);
        if (TWO_B) _tile_loadd(1, c + TILE, c_bytes);
        if (TWO_A) _tile_loadd(2, below, c_bytes);
        if (TWO_A && TWO_B) _tile_loadd(3, below + TILE, c_bytes);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    const char *a0 = static_cast<const char*>(a.first), *a1 = static_cast<const char*>(a.second);
    const char *b0 = static_cast<const char*>(b.first), *b1 = static_cast<const char*>(b.second);
    for (int64_t step = 0; step < steps; ++step) {
        _tile_loadd(6, b0 + step * b.step, b.stride);
        _tile_loadd(4, a0 + step * a.step, a.stride);
        if (lines > 0) ahead->fetch(lines);
        _tile_dpbf16ps(0, 4, 6);
        if (TWO_B) {
            _tile_loadd(7, b1 + step * b.step, b.second_stride);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (TWO_A) {
            _tile_loadd(5, a1 + step * a.step, a.second_stride);
            _tile_dpbf16ps(2, 5, 6);
            if (TWO_B) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c, c_bytes);
    if (TWO_B) _tile_stored(1, c + TILE, c_bytes);
    if (TWO_A) _tile_stored(2, below, c_bytes);
    if (TWO_A && TWO_B) _tile_stored(3, below + TILE, c_bytes);
}

void multiply(const Tiles& a, const Tiles& b, int64_t steps, float* c, int64_t c_stride, bool add,
              Ahead* ahead = nullptr, int64_t lines = 0) {
    if (a.second && b.second)
        multiply_tiles<true, true>(a, b, steps, c, c_stride, add, ahead, lines);
    else if (a.second)
        multiply_tiles<true, false>(a, b, steps, c, c_stride, add, ahead, lines);
    else if (b.second)
        multiply_tiles<false, true>(a, b, steps, c, c_stride, add, ahead, lines);
    else
        multiply_tiles<false, false>(a, b, steps, c, c_stride, add, ahead, lines);
}

// 16 rows of 16 words of 4 bytes become columns.
TARGET_AMX INLINE void turn_words(__m512i (&row)[16]) {
    __m512i other[16];
    for (int i = 0; i < 16; i += 2) {
        other[i] = _mm512_unpacklo_epi32(row[i], row[i + 1]);
        other[i + 1] = _mm512_unpackhi_epi32(row[i], row[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        for (int j = 0; j < 2; ++j) {
            row[i + 2 * j] = _mm512_unpacklo_epi64(other[i + j], other[i + j + 2]);
            row[i + 2 * j + 1] = _mm512_unpackhi_epi64(other[i + j], other[i + j + 2]);
        }
    }
    for (int i = 0; i < 16; i += 8) {
        for (int j = 0; j < 4; ++j) {
            other[i + j] = _mm512_shuffle_i32x4(row[i + j], row[i + j + 4], 0x88);
            other[i + j + 4] = _mm512_shuffle_i32x4(row[i + j], row[i + j + 4], 0xdd);
        }
    }
    for (int j = 0; j < 8; ++j) {
        row[j] = _mm512_shuffle_i32x4(other[j], other[j + 8], 0x88);
        row[j + 8] = _mm512_shuffle_i32x4(other[j], other[j + 8], 0xdd);
    }
}

// to[column][row] = from[row][column] for 16 times 16 floats.
TARGET_AMX void turn_tile(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
    __m512i row[16];
    for (int i = 0; i < 16; ++i) row[i] = _mm512_loadu_si512(from + i * from_stride);
    turn_words(row);
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + i * to_stride, row[i]);
}

// The first `count` of 32 bf16, then zeros.
TARGET_AMX INLINE __m512i load_bf16(const uint16_t* from, int64_t count) {
    if (count >= STEP) return _mm512_loadu_si512(from);
    const __mmask32 mask = count > 0 ? (__mmask32(1) << count) - 1 : 0;
    return _mm512_maskz_loadu_epi16(mask, from);
}

// Up to 16 rows of k bf16 as the tiles of a B, [k / 32][16 pairs][16 rows], zeros where none are.
TARGET_AMX void pack_tiles(const uint16_t* from, int64_t stride, int64_t rows, int64_t k,
                           char* to) {
    for (int64_t at = 0; at < k; at += STEP, to += TILE * LINE) {
        __m512i row[16];
        for (int64_t i = 0; i < 16; ++i)
            row[i] = i < rows ? load_bf16(from + i * stride + at, k - at) : _mm512_setzero_si512();
        turn_words(row);
        for (int64_t i = 0; i < 16; ++i) _mm512_storeu_si512(to + i * LINE, row[i]);
    }
}

// Two rows of 32 bf16, side by side: 2 times 16 pairs.
TARGET_AMX INLINE void interleave(__m512i even, __m512i odd, void* left, void* right) {
    const __m512i order = _mm512_set_epi16(                            //
        47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,  //
        39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i upper = _mm512_add_epi16(order, _mm512_set1_epi16(16));
    _mm512_storeu_si512(left, _mm512_permutex2var_epi16(even, order, odd));
    _mm512_storeu_si512(right, _mm512_permutex2var_epi16(even, upper, odd));
}

// 32 rows of 32 bf16 as two tiles of a B, zeros where none are.
TARGET_AMX void interleave_step(const uint16_t* from, int64_t stride, int64_t rows, int64_t width,
                                char* to) {
    char* right = to + TILE * LINE;
    if (rows >= STEP && width >= STEP) {
        for (int64_t i = 0; i < STEP; i += 2)
            interleave(_mm512_loadu_si512(from + i * stride),
                       _mm512_loadu_si512(from + (i + 1) * stride), to + i / 2 * LINE,
                       right + i / 2 * LINE);
        return;
    }
    for (int64_t i = 0; i < STEP; i += 2)
        interleave(load_bf16(from + i * stride, i < rows ? width : 0),
                   load_bf16(from + (i + 1) * stride, i + 1 < rows ? width : 0), to + i / 2 * LINE,
                   right + i / 2 * LINE);
}

// Rows of k bf16 with each two side by side, [rows / 2][k] pairs, from row `first` up to `stop`;
// zeros where no rows are. `to_stride` counts pairs, and has room for k padded to 32.
TARGET_AMX void pack_pairs(const uint16_t* from, int64_t stride, int64_t rows, int64_t first,
                           int64_t stop, int64_t k, uint32_t* to, int64_t to_stride) {
    for (int64_t row = first; row < stop; row += 2) {
        uint32_t* pairs = to + row / 2 * to_stride;
        for (int64_t at = 0; at < k; at += STEP) {
            const __m512i even = load_bf16(from + row * stride + at, row < rows ? k - at : 0);
            const __m512i odd =
                load_bf16(from + (row + 1) * stride + at, row + 1 < rows ? k - at : 0);
            interleave(even, odd, pairs + at, pairs + at + TILE);
        }
    }
}

// A tile's 16 rows of weights, of which `rows` are there, as an A. Where a tile would reach beyond
// the matrix it is copied to `room` and filled up with zeros.
struct Panel {
    const char *base, *tail;
    int64_t stride, tail_stride;

    static int64_t room_bytes(int64_t k) { return TILE * padded(k, STEP) * 2; }

    static Panel of(const uint16_t* weights, int64_t rows, int64_t k, char* room) {
        const char* base = reinterpret_cast<const char*>(weights);
        const int64_t whole = k / STEP * STEP;
        if (rows >= TILE && whole == k) return {base, nullptr, k * 2, 0};
        if (rows >= TILE) {
            std::memset(room, 0, TILE * LINE);
            for (int64_t row = 0; row < TILE; ++row)
                std::memcpy(room + row * LINE, weights + row * k + whole, (k - whole) * 2);
            return {base, room, k * 2, LINE};
        }
        const int64_t stride = padded(k, STEP) * 2;
        std::memset(room, 0, TILE * stride);
        for (int64_t row = 0; row < rows; ++row)
            std::memcpy(room + row * stride, weights + row * k, k * 2);
        return {room, room + whole * 2, stride, stride};
    }

    // Neighbouring panels, as many as `rows` rows fill.
    static int64_t cut(const uint16_t* weights, int64_t rows, int64_t k, char* room, Panel* to) {
        const int64_t count = pieces(rows, TILE);
        for (int64_t i = 0; i < count; ++i)
            to[i] = of(weights + i * TILE * k, rows - i * TILE, k, room + i * room_bytes(k));
        return count;
    }
};

constexpr int64_t MAX_PANELS = BLOCK / TILE;

// c[rows of all panels][tokens, padded] = panels times packed tokens. With few tokens the CPU's own
// prefetchers do best; with more the memory would idle while they compute, so `ahead` is fetched,
// by all groups together as much as one reading of the panels takes.
void nt_tiles(const Panel* panels, int64_t count, int64_t k, const char* tokens, int64_t groups,
              float* c, int64_t c_stride, Ahead& ahead) {
    const int64_t steps = k / STEP, group_bytes = pieces(k, STEP) * TILE * LINE;
    // Two groups keep their sums in the tiles. With more, the sum is cut so that the tokens of a
    // chunk stay in the second cache while the panels pass.
    const int64_t fitting = most(16, CACHED_TOKENS / (groups * TILE * LINE));
    const bool many = groups > 2;
    const int64_t chunk = many ? fitting : most(steps, 1);
    auto pass = [&](int64_t step, int64_t deep, bool tail, bool add) {
        for (int64_t panel = 0; panel < count; panel += 2) {
            const Panel& one = panels[panel];
            const Panel* other = panel + 1 < count ? &panels[panel + 1] : nullptr;
            const int64_t at = step * LINE;
            const Tiles a = tail ? Tiles{one.tail, other ? other->tail : nullptr, one.tail_stride,
                                         other ? other->tail_stride : 0, 0}
                                 : Tiles{one.base + at, other ? other->base + at : nullptr,
                                         one.stride, other ? other->stride : 0, LINE};
            const int64_t lines = many ? pieces((other ? 2 : 1) * TILE, pieces(groups, 2)) : 0;
            for (int64_t group = 0; group < groups; group += 2) {
                const char* left = tokens + group * group_bytes + step * TILE * LINE;
                const char* right = group + 1 < groups ? left + group_bytes : nullptr;
                multiply(a, {left, right, LINE, LINE, TILE * LINE}, deep,
                         c + panel * TILE * c_stride + group * TILE, c_stride, add, &ahead, lines);
            }
        }
    };
    for (int64_t step = 0; step < steps; step += chunk)
        pass(step, least(chunk, steps - step), false, step > 0);
    if (k % STEP) pass(steps, 1, true, steps > 0);
}

// c[tokens][columns] (+)= a [tokens, depth], padded, times rows of weights; fetches as the other
// nn. `room` holds one strip of 32 columns of a chunk.
TARGET_AMX void nn_tiles(const uint16_t* a, int64_t a_stride, int64_t tiles, const uint16_t* b,
                         int64_t b_stride, int64_t depth, int64_t columns, float* c,
                         int64_t c_stride, bool add, char* room, Ahead* then = nullptr) {
    for (int64_t q = 0; q < depth; q += CHUNK) {
        const int64_t deep = least(CHUNK, depth - q), after = least(CHUNK, depth - q - deep);
        const int64_t steps = pieces(deep, STEP);
        Ahead rest;
        if (after > 0) rest = Ahead(b + (q + deep) * b_stride, b_stride * 2, columns * 2, after);
        Ahead* soon = after > 0 ? &rest : then;
        for (int64_t n = 0; n < columns; n += STEP) {
            const uint16_t* strip = b + q * b_stride + n;
            const int64_t width = columns - n;
            for (int64_t step = 0; step < steps; ++step) {
                if (soon) soon->fetch(STEP);
                interleave_step(strip + step * STEP * b_stride, b_stride, deep - step * STEP, width,
                                room + step * 2 * TILE * LINE);
            }
            const Tiles strip_tiles{room, room + TILE * LINE, LINE, LINE, 2 * TILE * LINE};
            for (int64_t tile = 0; tile < tiles; tile += 2) {
                const uint16_t* here = a + tile * TILE * a_stride + q;
                const uint16_t* below = tile + 1 < tiles ? here + TILE * a_stride : nullptr;
                multiply({here, below, a_stride * 2, a_stride * 2, LINE}, strip_tiles, steps,
                         c + tile * TILE * c_stride + n, c_stride, add || q > 0);
            }
        }
    }
}

constexpr int64_t ROOM_NN = CHUNK * 2 * LINE;

// As `put`, for gradients: nobody reads them soon, so whole lines go past the caches, which saves
// the reading of what they overwrite.
TARGET_AMX double put_gradient(const float* from, int64_t from_stride, int64_t rows,
                               int64_t columns, uint16_t* to, int64_t to_stride) {
    if (columns % STEP) return Wide::put(from, from_stride, rows, columns, to, to_stride);
    const bool whole_lines = to_stride % STEP == 0 && reinterpret_cast<uintptr_t>(to) % LINE == 0;
    const __m512i upper_halves = _mm512_set_epi16(                       //
        63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33,  //
        31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    __m512 squares[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t i = 0; i < columns; i += STEP) {
            __m512i bits[2];
            for (int half = 0; half < 2; ++half) {
                const __m512 value = _mm512_loadu_ps(from + row * from_stride + i + half * TILE);
                const __m512i raw = _mm512_castps_si512(value);
                const __m512i odd =
                    _mm512_and_si512(_mm512_srli_epi32(raw, 16), _mm512_set1_epi32(1));
                const __m512i nearest = _mm512_and_si512(
                    _mm512_add_epi32(_mm512_add_epi32(raw, _mm512_set1_epi32(0x7fff)), odd),
                    _mm512_set1_epi32(int(0xffff0000u)));
                bits[half] =
                    _mm512_mask_mov_epi32(nearest, _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q),
                                          _mm512_set1_epi32(0x7fc00000));
                const __m512 stored = _mm512_castsi512_ps(bits[half]);
                squares[half] = _mm512_fmadd_ps(stored, stored, squares[half]);
            }
            const __m512i line = _mm512_permutex2var_epi16(bits[0], upper_halves, bits[1]);
            __m512i* there = reinterpret_cast<__m512i*>(to + row * to_stride + i);
            if (whole_lines)
                _mm512_stream_si512(there, line);
            else
                _mm512_storeu_si512(there, line);
        }
    }
    return double(_mm512_reduce_add_ps(squares[0])) + double(_mm512_reduce_add_ps(squares[1]));
}

// The gradient [rows, columns] of weights, from a^T [rows, tokens] and pairs of tokens; `tokens` is
// padded to 32. Returns its sum of squares.
TARGET_AMX double tn_tiles(const uint16_t* a, const uint32_t* pairs, int64_t pairs_stride,
                           int64_t tokens, int64_t rows, int64_t columns, uint16_t* to,
                           int64_t to_stride) {
    alignas(64) float c[2 * TILE * BLOCK];
    double squares = 0.0;
    for (int64_t row = 0; row < rows; row += 2 * TILE) {
        const uint16_t* here = a + row * tokens;
        for (int64_t column = 0; column < columns; column += BLOCK) {
            const int64_t width = least(BLOCK, columns - column);
            for (int64_t i = 0; i < width; i += 2 * TILE) {
                const uint32_t* left = pairs + column + i;
                multiply({here, here + TILE * tokens, tokens * 2, tokens * 2, LINE},
                         {left, left + TILE, pairs_stride * 4, pairs_stride * 4,
                          TILE * pairs_stride * 4},
                         tokens / STEP, c + i, BLOCK, false);
            }
            squares += put_gradient(c, BLOCK, least(2 * TILE, rows - row), width,
                                    to + row * to_stride + column, to_stride);
        }
    }
    _mm_sfence();  // whoever learns that this task is done sees its lines
    return squares;
}

// One group of 16 rows: x for nt; in backward dy for nn, and both for tn.
TARGET_AMX void pack_amx(const Job& job, const Segment& own, int64_t group) {
    const int64_t first = group * TILE, rows = least(TILE, own.rows - first);
    const int64_t wide = padded(job.d, STEP);
    const uint16_t* x = rows_of<uint16_t>(job.x, job.x_stride, own);
    pack_tiles(x + first * job.x_stride, job.x_stride, rows, job.d,
               own.x_tiles + group * wide * LINE / 2);
    if (!job.backward) return;
    const uint16_t* dy = rows_of<uint16_t>(job.dy, job.dy_stride, own) + first * job.dy_stride;
    for (int64_t row = 0; row < TILE; ++row) {
        uint16_t* to = own.dy + (first + row) * wide;
        const int64_t count = row < rows ? job.d : 0;
        std::memcpy(to, dy + row * job.dy_stride, count * 2);
        std::memset(to + count, 0, (wide - count) * 2);
    }
    if (!job.gradients) return;
    const int64_t tokens = padded(own.rows, STEP);
    // The last group also writes the zeros up to a whole number of steps.
    const int64_t stop = first + TILE >= own.rows ? tokens : first + TILE;
    pack_pairs(x, job.x_stride, own.rows, first, stop, job.d, own.x_pairs, wide);
    for (int64_t i = 0; i < job.d; ++i)
        for (int64_t row = first; row < stop; ++row)
            own.dy_turned[i * tokens + row] =
                row < own.rows ? dy[(row - first) * job.dy_stride + i] : 0;
}

// The activation of some hidden units, packed for the second nt.
TARGET_AMX void hidden_task_amx(const Job& job, const Segment& own, int64_t index, Ahead& ahead) {
    const int64_t groups = pieces(own.rows, TILE), tokens = groups * TILE, k = job.d;
    const int64_t tall = job.tall_in, unit = index * tall;
    const int64_t room_bytes = MAX_PANELS * Panel::room_bytes(k);
    char* at = task_scratch.take(job.gates() * tall * tokens * 4 + room_bytes + 2 * LINE);
    float* c = cut_array<float>(at, job.gates() * tall * tokens);
    Panel panels[MAX_PANELS];
    // Units beyond the last are zeros that fill up the packed activation.
    const int64_t there = most(0, least(tall, job.h - unit));
    for (int64_t gate = 0; gate < job.gates(); ++gate) {
        Panel* own_panels = panels + gate * tall / TILE;
        char* room = at + gate * tall / TILE * Panel::room_bytes(k);
        const uint16_t* weights = w_in<uint16_t>(own) + (gate * job.h + unit) * k;
        for (int64_t i = Panel::cut(weights, there, k, room, own_panels); i < tall / TILE; ++i)
            own_panels[i] = Panel::of(nullptr, 0, k, room + i * Panel::room_bytes(k));
    }
    nt_tiles(panels, job.gates() * tall / TILE, k, own.x_tiles, groups, c, tokens, ahead);
    Wide::activate(c, job.gated ? c + tall * tokens : nullptr, tall * tokens);
    const int64_t group_bytes = padded(job.h, STEP) * LINE / 2;
    const int64_t stop = least(tall, padded(job.h, STEP) - unit);
    for (int64_t group = 0; group < groups; ++group) {
        for (int64_t i = 0; i < stop; i += 2) {
            const float* even = c + i * tokens + group * TILE;
            const __m512i low = _mm512_srli_epi32(_mm512_loadu_si512(even), 16);
            const __m512i high = _mm512_loadu_si512(even + tokens);
            char* pairs = own.a + group * group_bytes + (unit + i) / 2 * LINE;
            _mm512_storeu_si512(pairs, _mm512_mask_blend_epi16(0xaaaaaaaau, low, high));
        }
    }
}

TARGET_AMX void output_task_amx(const Job& job, const Segment& own, int64_t index, Ahead& ahead) {
    const int64_t groups = pieces(own.rows, TILE), tokens = groups * TILE, k = job.h;
    const int64_t row = index * job.tall_out, count = least(job.tall_out, job.d - row);
    const int64_t room_bytes = MAX_PANELS * Panel::room_bytes(k);
    char* at = task_scratch.take(padded(count, TILE) * tokens * 4 + room_bytes + 2 * LINE);
    float* c = cut_array<float>(at, padded(count, TILE) * tokens);
    Panel panels[MAX_PANELS];
    const int64_t n = Panel::cut(w_out<uint16_t>(job, own) + row * k, count, k, at, panels);
    nt_tiles(panels, n, k, own.a, groups, c, tokens, ahead);
    uint16_t* y = rows_of<uint16_t>(job.y, job.y_stride, own) + row;
    for (int64_t group = 0; group < groups; ++group) {
        for (int64_t part = 0; part < count; part += TILE) {
            alignas(64) float turned[TILE * TILE];
            turn_tile(c + part * tokens + group * TILE, tokens, turned, TILE);
            Wide::put(turned, TILE, least(TILE, own.rows - group * TILE), least(TILE, count - part),
                      y + group * TILE * job.y_stride + part, job.y_stride);
        }
    }
}

// h of one block, [tokens, BLOCK] for the gate and for the other rows.
TARGET_AMX void hidden_amx(const Job& job, const Segment& own, int64_t unit, int64_t groups,
                           const AmxArrays& arrays, Ahead& ahead) {
    const int64_t d = job.d, tokens = groups * TILE, count = least(BLOCK, job.h - unit);
    Panel panels[MAX_PANELS];
    for (int64_t gate = 0; gate < job.gates(); ++gate) {
        float* h = gate ? arrays.up : arrays.h;
        const uint16_t* weights = w_in<uint16_t>(own) + (gate * job.h + unit) * d;
        const int64_t n = Panel::cut(weights, count, d, arrays.rest, panels);
        nt_tiles(panels, n, d, own.x_tiles, groups, arrays.c, tokens, ahead);
        for (int64_t group = 0; group < groups; ++group)
            for (int64_t i = 0; i < n; ++i)
                turn_tile(arrays.c + i * TILE * tokens + group * TILE, tokens,
                          h + group * TILE * BLOCK + i * TILE, BLOCK);
    }
}

TARGET_AMX double gradients_amx(const Job& job, const Segment& own, int64_t unit, int64_t count,
                                const AmxArrays& arrays, char* room) {
    const int64_t tokens = padded(own.rows, STEP), wide = padded(job.d, STEP);
    uint16_t* turned = cut_array<uint16_t>(room, BLOCK * tokens);
    uint32_t* pairs = cut_array<uint32_t>(room, BLOCK * tokens / 2);
    uint16_t* gradient = static_cast<uint16_t*>(own.gradient);
    double squares = 0.0;
    for (int64_t gate = 0; gate < job.gates(); ++gate) {
        std::memset(turned, 0, BLOCK * tokens * 2);
        turn(gate ? arrays.dup : arrays.dh, arrays.dh_stride, own.rows, count, turned, tokens);
        squares += tn_tiles(turned, own.x_pairs, wide, tokens, count, job.d,
                            gradient + (gate * job.h + unit) * job.d, job.d);
    }
    pack_pairs(arrays.weighted, BLOCK, own.rows, 0, tokens, BLOCK, pairs, BLOCK);
    return squares + tn_tiles(own.dy_turned, pairs, BLOCK, tokens, job.d, count,
                              gradient + job.gates() * job.h * job.d + unit, job.h);
}

TARGET_AMX void backward_block_amx(const Job& job, const Segment& own, int64_t index,
                                   Ahead& ahead) {
    const int64_t unit = index * BLOCK, count = least(BLOCK, job.h - unit), d = job.d;
    const int64_t groups = pieces(own.rows, TILE), rows = groups * TILE, wide = padded(d, STEP);
    const int64_t room_bytes = most(most(ROOM_NN, MAX_PANELS * Panel::room_bytes(d)),
                                    BLOCK * padded(own.rows, STEP) * 4 + 2 * LINE);
    const auto arrays = AmxArrays::cut(job, own, unit, rows, rows * most(BLOCK, wide), room_bytes);
    if (rows > 0) {
        Ahead in(w_in<uint16_t>(own) + unit * d, job.h * d * 2, count * d * 2, job.gates());
        nn_tiles(own.dy, wide, groups, w_out<uint16_t>(job, own) + unit, job.h, d, count, arrays.da,
                 BLOCK, false, arrays.rest, &in);
        hidden_amx(job, own, unit, groups, arrays, in);
        AmxArrays::activate_rows(arrays, job, own, unit, count);
    }
    if (job.gradients)
        own.block_squares[index] = gradients_amx(job, own, unit, count, arrays, arrays.rest);
    if (rows > 0 && job.shares_dx(own)) {
        // Whole tiles in the cache first, then those rows of them that are there.
        float* share = own.dx_shares + index * own.rows * wide;
        for (int64_t gate = 0; gate < job.gates(); ++gate)
            nn_tiles(gate ? arrays.dup : arrays.dh, BLOCK, groups,
                     w_in<uint16_t>(own) + (gate * job.h + unit) * d, d, count, d, arrays.c, wide,
                     gate > 0, arrays.rest, &ahead);
        std::memcpy(share, arrays.c, own.rows * wide * 4);
    }
}

TARGET_AMX void dx_amx(const Job& job, const Segment& own, int64_t index) {
    const int64_t groups = pieces(own.rows, TILE), rows = groups * TILE;
    const int64_t first = index * BLOCK, width = least(BLOCK, job.d - first);
    const int64_t stride = padded(job.h, BLOCK);
    char* at = task_scratch.take(rows * BLOCK * 4 + ROOM_NN);
    float* c = cut_array<float>(at, rows * BLOCK);
    for (int64_t gate = 0; gate < job.gates(); ++gate)
        nn_tiles(reinterpret_cast<uint16_t*>(own.dh) + gate * rows * stride, stride, groups,
                 w_in<uint16_t>(own) + gate * job.h * job.d + first, job.d, job.h, width, c, BLOCK,
                 gate > 0, at);
    Wide::put(c, BLOCK, own.rows, width, rows_of<uint16_t>(job.dx, job.dx_stride, own) + first,
              job.dx_stride);
}

TARGET_AMX void task_amx(const Job& job, const Segment& own, int phase, int64_t index,
                         Ahead& ahead) {
    if (phase == 0) return pack_amx(job, own, index);
    if (!job.backward && phase == 1) return hidden_task_amx(job, own, index, ahead);
    if (!job.backward) return output_task_amx(job, own, index, ahead);
    if (phase == 1) return backward_block_amx(job, own, index, ahead);
    if (index == 0) add_weight_shares(job, own);
    if (!job.shares_dx(own)) return dx_amx(job, own, index);
    add_shares<uint16_t, Wide>(job, own, index);
}

// Whether the CPU has the tiles, and Linux lets this process use them.
bool may_use_tiles() {
    constexpr unsigned BF16_BIT = 1u << 22, TILE_BIT = 1u << 24;
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    if ((d & BF16_BIT) == 0 || (d & TILE_BIT) == 0) return false;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

#endif  // HAVE_AMX

// ---------------------------------------------------------------------------------------------
// Calls

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
void lay_out(const Job& job, Segment& own, bool packs, char*& at) {
    const int64_t rows = packs ? padded(own.rows, TILE) : own.rows, wide = padded(job.d, STEP);
    const int64_t steps = padded(own.rows, STEP), blocks = job.blocks();
    if (packs) own.x_tiles = cut_array<char>(at, rows * wide * 2);
    if (!job.backward) {
        own.a = cut_array<char>(at, rows * padded(job.h, STEP) * job.item);
        return;
    }
    if (packs) {
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

// How many rows of weights are one task in forward. More of them share the loads of tokens, which
// counts when there are many; but every thread should get several tasks, and what is fetched ahead
// must fit the second cache. Nothing here changes a result.
void choose_heights(Job& job, const std::vector<Segment>& segments, int threads) {
    int64_t rows = 0;
    for (const Segment& own : segments) rows = most(rows, own.rows);
    auto tall = [&](int64_t height, int64_t row_bytes) {
        int64_t tiles = 1;
        while (tiles < (rows > 128 ? MAX_TALL : 2)) {
            const int64_t tasks = int64_t(segments.size()) * height / (2 * tiles * TILE);
            if (tasks < 8 * threads || 2 * tiles * TILE * row_bytes > MAX_AHEAD) break;
            tiles *= 2;
        }
        return tiles * TILE;
    };
    job.tall_in = tall(job.h, job.gates() * job.d * job.item);
    job.tall_out = tall(job.d, job.h * job.item);
}

void run_job(Job& job, std::vector<Segment>& segments, const Kernel& kernel, int threads) {
    choose_heights(job, segments, threads);
    size_t done = 0;
    while (done < segments.size()) {
        int64_t bytes = 0;
        std::vector<Segment> part;
        for (; done < segments.size(); ++done) {
            char* size = nullptr;
            lay_out(job, segments[done], kernel.packs, size);
            const int64_t more = reinterpret_cast<intptr_t>(size);
            if (!part.empty() && bytes + more > MAX_SCRATCH) break;
            bytes += more;
            part.push_back(segments[done]);
        }
        char* at = group_scratch.take(bytes);
        for (Segment& own : part) lay_out(job, own, kernel.packs, at);
        run_tasks(job, part, kernel, threads);
        for (const Segment& own : part) {
            if (!own.squares) continue;
            *own.squares = 0.0;
            for (int64_t block = 0; block < job.blocks(); ++block)
                *own.squares += own.block_squares[block];
        }
    }
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

// A group to compute once its rows are there: when `there` has come up to `number`, which whoever
// writes the rows puts there after them. `done` comes up to it in turn. Numbers go round.
struct Order {
    Job job{};
    std::vector<Segment> segments;
    Kernel kernel{};
    int threads = 1;
    const std::atomic<uint32_t>* there = nullptr;
    std::atomic<uint32_t>* done = nullptr;
    uint32_t number = 0;
    int64_t* times = nullptr;  // of begin and end, if anybody wants to know
};

bool has_come(const std::atomic<uint32_t>& flag, uint32_t number) {
    return int32_t(flag.load(std::memory_order_acquire) - number) >= 0;
}

// A thread that carries out orders one after another. Neither the one who gives them nor the one
// who waits for them needs anything but memory for it: both may be a GPU.
class Runner {
  public:
    Runner() : thread(&Runner::work, this) {}

    void submit(std::unique_ptr<Order> order) {
        {
            const std::lock_guard<std::mutex> guard(lock);
            orders.push_back(std::move(order));
        }
        changed.notify_all();
    }

    // Blocks until the order is done; false if the runner was closed before.
    bool wait(const std::atomic<uint32_t>& done, uint32_t number) {
        std::unique_lock<std::mutex> guard(lock);
        changed.wait(guard, [&] { return closed || has_come(done, number); });
        return has_come(done, number);
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
        for (;;) {
            std::unique_ptr<Order> order;
            {
                std::unique_lock<std::mutex> guard(lock);
                changed.wait(guard, [&] { return closed || !orders.empty(); });
                if (closed) return;
                order = std::move(orders.front());
                orders.pop_front();
            }
            if (!await_rows(*order)) return;
            const int64_t begin = now_ns();
            run_job(order->job, order->segments, order->kernel, order->threads);
            if (order->times) {
                order->times[0] = begin;
                order->times[1] = now_ns();
            }
            {
                const std::lock_guard<std::mutex> guard(lock);
                order->done->store(order->number, std::memory_order_release);
            }
            changed.notify_all();
        }
    }

    // The helpers are woken meanwhile: they take as long to wake as the rows take to come.
    bool await_rows(const Order& order) {
        const int64_t until = now_ns() + 4 * LOOK_OUT_NS;
        crew().run(order.threads, [&] {
            while (!has_come(*order.there, order.number) && now_ns() < until) rest();
        });
        while (!has_come(*order.there, order.number)) {
            if (closed) return false;
            std::this_thread::sleep_for(std::chrono::microseconds(20));
        }
        return true;
    }

    std::mutex lock;
    std::condition_variable changed;
    std::deque<std::unique_ptr<Order>> orders;
    std::atomic<bool> closed{false};
    std::thread thread;  // last: it begins when all else is there
};

std::unique_ptr<Order> new_order(int threads, const uint32_t* there, uint32_t number,
                                 uint32_t* done, int64_t* times) {
    static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "a flag is a plain number");
    auto order = std::make_unique<Order>();
    order->threads = threads;
    order->there = reinterpret_cast<const std::atomic<uint32_t>*>(there);
    order->done = reinterpret_cast<std::atomic<uint32_t>*>(done);
    order->number = number;
    order->times = times;
    return order;
}

void carry_out(std::unique_ptr<Order> order, void* runner) {
    if (runner) {
        static_cast<Runner*>(runner)->submit(std::move(order));
    } else {
        run_job(order->job, order->segments, order->kernel, order->threads);
    }
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
    auto order = new_order(threads, there, number, done, times);
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
    carry_out(std::move(order), runner);
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
    auto order = new_order(threads, there, number, done, times);
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
    carry_out(std::move(order), runner);
}

void* overspill_runner_new() { return new Runner; }

void overspill_runner_free(void* runner) { delete static_cast<Runner*>(runner); }

int overspill_runner_wait(void* runner, const uint32_t* done, uint32_t number) {
    return static_cast<Runner*>(runner)->wait(
        *reinterpret_cast<const std::atomic<uint32_t>*>(done), number);
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
