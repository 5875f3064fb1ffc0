// A group of experts to compute: sizes, memory, prefetching, and the tasks of one expert.
#pragma once

#include <cstdlib>

#include "cpu_format.h"

namespace {

constexpr int64_t LINE = 64;       // bytes of a cache line
constexpr int64_t TILE = 16;       // rows of an AMX tile, and its columns of 4 bytes
constexpr int64_t STEP = 32;       // bf16 values in a row of an AMX tile
constexpr int64_t BLOCK = 128;     // hidden units of one backward task
constexpr int64_t CHUNK = 128;     // weight rows that the nn product keeps in the cache
constexpr int64_t MAX_COLUMNS = 512;  // of a transposed matrix in one task
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

// Up to this many token rows every block of hidden units writes its own share of dx, so w_in is
// read from memory once. With more rows the shares are more bytes than a second read of w_in.
constexpr int64_t MAX_SHARED_DX_ROWS = 48;
constexpr int64_t MAX_PREFETCH = 512 << 10;  // bytes of w_in: must fit the L2 cache
constexpr int64_t ROWS_AHEAD = 32;           // distance at which rows of w_out are prefetched

// Functions between the two matrices, of the gate and times up if there are gates; as `Function` in
// activation_form.py.
enum Function : int32_t { GELU = 0, SILU = 1, RELU = 2, CLAMPED = 3, RELU2 = 4, LIMITED = 5 };

// Low-rank matrices behind the weights in a record, B @ A: A [rank, inputs] and B [outputs, padded],
// of the type of token rows, by their first bytes. Mirrored by `LowRankArgs` in cpu_kernel.py.
struct LowRankArgs {
    int64_t a, b, rank, padded;  // rank 0: there are none
};

// Content of the memory of a gradient after a backward: the gradient, the gradient added to the old
// content, or its factors (cpu_factors.h).
enum GradientKind : int64_t { FORMED = 0, ADDED = 1, FACTORED = 2 };

// Arguments of a call, mirrored by `GroupArgs` in cpu_kernel.py. Strides count elements.
struct GroupArgs {
    const void *x, *dy;       // [R, D]; dy in backward only
    void* out;                // [R, D]: y in forward, dx in backward
    const float* row_weight;  // [R], backward only, as the next
    float* drow_weight;
    int64_t x_stride, dy_stride, out_stride;
    const void* const* records;     // of each expert
    const int64_t *starts, *stops;  // its token rows
    int64_t count;                  // experts
    int64_t d, h;
    int32_t gated, bias, transposed;  // as in ExpertShape
    Function function;
    int32_t backward, bf16, threads, isa;
    // Backward only; null without weight gradients. For each expert: the memory of its gradient, in
    // the order of its record; its content afterwards (GradientKind); and the address for the sum
    // of squares of the result, unless these are factors. Nothing is written for an expert without
    // token rows.
    void* const* gradients;
    const int64_t* gradient_kinds;
    float* const* squares;
    const PackedExpert* format;  // of packed records, forward only; null: records are plain
    LowRankArgs low_rank[2];     // W_IN, W_OUT; forward only
};

// One expert with its token rows, and its arrays in the scratch memory of the group.
struct ExpertRows {
    const void* record;
    int64_t start, rows;
    bool tiled;                      // computed with AMX tiles
    bool fused = false;              // its packed weights are read as they are, not unpacked
    void* gradient = nullptr;        // of its weights; null: none is made
    int64_t gradient_kind = FORMED;  // a GradientKind
    float* square = nullptr;         // where the sum of squares of the gradient goes
    double* square_shares = nullptr; // [HIDDEN tasks + OUTPUT tasks] of backward: parts of `square`
    char* x_tiles = nullptr;         // AMX: x, packed for nt; fused: ordered token rows
    char* a = nullptr;               // forward: the activation; AMX and fused: as x_tiles
    char* plain_a = nullptr;         // fused, with a low-rank part of w_out: the activation [R, H]
    uint16_t* dy = nullptr;          // AMX: dy, padded
    char* dh = nullptr;              // [R, H or 2H], unless the blocks write shares of dx
    float* dx_shares = nullptr;      // [blocks, R, D]
    float* weight_shares = nullptr;  // [blocks, R]: of the gradient of the routing weights

    bool adds() const { return gradient_kind == ADDED; }
    bool leaves_factors() const { return gradient && gradient_kind == FACTORED; }
    bool forms_gradient() const { return gradient && gradient_kind != FACTORED; }
    int64_t padded_rows() const { return tiled ? padded(rows, TILE) : rows; }
};

struct Group : GroupArgs {
    int64_t weight_bytes = 0;                          // of one weight
    int64_t hidden_per_task = 0, output_per_task = 0;  // weight rows of a forward task
    bool ordered[2] = {false, false};  // W_IN, W_OUT: fused kernels read their codes

    int64_t gates() const { return gated ? 2 : 1; }
    // Bytes of the weights of an output.
    int64_t row_bytes(int tensor) const {
        if (format) return format->piece_of(tensor, 0).matrix.row_bytes();
        return (tensor == W_IN ? d : h) * weight_bytes;
    }
    bool clamped() const { return function == CLAMPED; }
    bool has_low_rank() const { return low_rank[W_IN].rank > 0 || low_rank[W_OUT].rank > 0; }
    int64_t blocks() const { return pieces(h, BLOCK); }
    int64_t square_shares() const { return blocks() + pieces(d, BLOCK); }
    bool shares_dx(const ExpertRows& own) const {
        return own.rows <= MAX_SHARED_DX_ROWS && !transposed;
    }
    const char* w_out_bytes(const ExpertRows& own) const {
        return static_cast<const char*>(own.record) + gates() * h * d * weight_bytes;
    }
};

template <class T>
INLINE const T* w_in(const ExpertRows& own) {
    return static_cast<const T*>(own.record);
}
template <class T>
INLINE const T* w_out(const Group& group, const ExpertRows& own) {
    return reinterpret_cast<const T*>(group.w_out_bytes(own));
}
template <class T>
INLINE const T* b_in(const Group& group, const ExpertRows& own) {
    return w_out<T>(group, own) + group.h * group.d;
}
template <class T>
INLINE const T* b_out(const Group& group, const ExpertRows& own) {
    return b_in<T>(group, own) + group.gates() * group.h;
}
template <class T>
INLINE const T* rows_of(const void* base, int64_t stride, const ExpertRows& own) {
    return static_cast<const T*>(base) + own.start * stride;
}
template <class T>
INLINE T* out_rows(const Group& group, const ExpertRows& own) {
    return static_cast<T*>(group.out) + own.start * group.out_stride;
}

// The phases of an expert. Each one needs all tasks of the one before.
enum Phase {
    PACK,    // AMX: packs 16 token rows; fused: orders one
    HIDDEN,  // forward: some hidden units; backward: a block of hidden units
    OUTPUT,  // forward: some columns of y; backward: some columns of dx
};
constexpr int PHASES = 3;

int64_t task_count(const Group& group, const ExpertRows& own, int phase) {
    if (phase == PACK) return own.fused ? own.rows : own.tiled ? pieces(own.rows, TILE) : 0;
    if (group.backward) return phase == HIDDEN ? group.blocks() : pieces(group.d, BLOCK);
    return phase == HIDDEN ? pieces(group.h, group.hidden_per_task)
                           : pieces(group.d, group.output_per_task);
}

// The columns of a transposed matrix that a task reads first; without those of up, if these are
// elsewhere.
Prefetch column_weights(const Group& group, const ExpertRows& own, int phase, int64_t index) {
    const bool hidden = phase == HIDDEN;
    const int64_t columns = hidden ? group.gates() * group.h : group.d;
    const int64_t step = hidden && group.clamped() ? 2 * group.weight_bytes : group.weight_bytes;
    const int64_t size = hidden ? group.hidden_per_task : group.output_per_task;
    const int64_t first = index * size, count = least(size, (hidden ? group.h : group.d) - first);
    const char* weights = hidden ? static_cast<const char*>(own.record) : group.w_out_bytes(own);
    return Prefetch(weights + first * step, columns * group.weight_bytes, count * step,
                    least(hidden ? group.d : group.h, MAX_PREFETCH / (count * step)));
}

// The codes that a task reads first.
Prefetch packed_weights(const Group& group, const ExpertRows& own, int phase, int64_t index) {
    const bool hidden = phase == HIDDEN;
    const int tensor = hidden ? W_IN : W_OUT;
    const int64_t each = hidden && group.clamped() ? 2 : 1;
    const int64_t size = hidden ? group.hidden_per_task : group.output_per_task;
    const int64_t first = index * size, count = least(size, (hidden ? group.h : group.d) - first);
    const char* begin = group.format->row(own.record, tensor, each * first);
    const bool apart = hidden && group.gated && each == 1;  // up is elsewhere
    const char* other = apart ? group.format->row(own.record, tensor, group.h + first) : begin;
    return Prefetch(begin, other - begin, least(each * count * group.row_bytes(tensor),
                                                MAX_PREFETCH / (apart ? 2 : 1)), apart ? 2 : 1);
}

// The contiguous weights that a task reads first.
Prefetch first_weights(const Group& group, const ExpertRows& own, int phase, int64_t index) {
    if (phase == PACK || (group.backward && phase == OUTPUT)) return Prefetch();
    if (group.format) return packed_weights(group, own, phase, index);
    if (group.transposed)
        return group.backward ? Prefetch() : column_weights(group, own, phase, index);
    if (phase == HIDDEN) {
        const int64_t size = group.backward ? BLOCK : group.hidden_per_task, unit = index * size;
        const int64_t row = group.d * group.weight_bytes, units = least(size, group.h - unit);
        return Prefetch(static_cast<const char*>(own.record) + unit * row, group.h * row,
                        least(units * row, MAX_PREFETCH / group.gates()), group.gates());
    }
    const int64_t first = index * group.output_per_task, row = group.h * group.weight_bytes;
    const int64_t count = least(group.output_per_task, group.d - first);
    return Prefetch(group.w_out_bytes(own) + first * row, 0, count * row, 1);
}

// The columns of w_out of some hidden units, without the first rows. They are prefetched shortly
// before their use: where the stride is a power of two, only few rows fit a cache.
Prefetch output_weights(const Group& group, const ExpertRows& own, int64_t unit, int64_t count) {
    const int64_t row = group.h * group.weight_bytes;
    return Prefetch(group.w_out_bytes(own) + ROWS_AHEAD * row + unit * group.weight_bytes, row,
                    count * group.weight_bytes, most(0, group.d - ROWS_AHEAD));
}

// Computes one task. `next` are the weights that the next task of this thread reads.
using TaskFunction = void (*)(const Group&, const ExpertRows&, int phase, int64_t index,
                              Prefetch& next);

}  // namespace
