// Tasks with compiler vectors, for any instruction set.
#pragma once

#include "cpu_backward.h"
#include "cpu_packed_tasks.h"

namespace {

template <class T, class Isa>
struct VectorProducts : Isa {
    using Weight = T;

    static int64_t room_bytes() { return 0; }

    static void nn(const T* a, int64_t a_stride, int64_t rows, const T* b, int64_t b_stride,
                   int64_t depth, int64_t columns, float* c, int64_t c_stride, bool add, char*,
                   Prefetch* next, int64_t) {
        Isa::nn(a, a_stride, rows, b, b_stride, depth, columns, c, c_stride, add, next);
    }

    // to[row][output] = weights [outputs, k] times tokens.
    static void turned_nt(const T* weights, int64_t outputs, const T* x, int64_t x_stride,
                          int64_t rows, int64_t k, float* c, float* to, int64_t to_stride) {
        Isa::nt(weights, outputs, x, x_stride, rows, k, c, rows);
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t i = 0; i < outputs; ++i) to[row * to_stride + i] = c[i * rows + row];
    }

    // dy times w_out of `count` hidden units.
    static void activation_grads(const Group& group, const ExpertRows& own, int64_t unit,
                                 int64_t count, const BlockArrays<T>& arrays) {
        const T* const dy = rows_of<T>(group.dy, group.dy_stride, own);
        const T* const weights = w_out<T>(group, own);
        if (group.transposed)
            return turned_nt(weights + unit * group.d, count, dy, group.dy_stride, own.rows,
                             group.d, arrays.c, arrays.da, BLOCK);
        Prefetch out = output_weights(group, own, unit, count);
        Isa::nn(dy, group.dy_stride, own.rows, weights + unit, group.h, group.d, count, arrays.da,
                BLOCK, false, &out);
    }

    // The pre-activations [R, stride] of `count` outputs of w_in.
    static void hidden(const Group& group, const ExpertRows& own, int64_t first, int64_t count,
                       float* to, int64_t stride, const BlockArrays<T>& arrays, Prefetch&) {
        const T* const x = rows_of<T>(group.x, group.x_stride, own);
        if (!group.transposed)
            return turned_nt(w_in<T>(own) + first * group.d, count, x, group.x_stride, own.rows,
                             group.d, arrays.c, to, stride);
        Prefetch* const none = nullptr;
        Isa::nn(x, group.x_stride, own.rows, w_in<T>(own) + first, group.gates() * group.h,
                group.d, count, to, stride, false, none, true);
    }

    // `width` columns of dx [R, BLOCK] from `first` on, from dh.
    static void input_grads(const Group& group, const ExpertRows& own, int64_t first,
                            int64_t width, float* to, char* room) {
        const int64_t in = group.gates() * group.h;
        const T* const dh = reinterpret_cast<const T*>(own.dh);
        if (group.transposed)
            return turned_nt(w_in<T>(own) + first * in, width, dh, in, own.rows, in,
                             reinterpret_cast<float*>(room), to, BLOCK);
        Prefetch* const none = nullptr;
        Isa::nn(dh, in, own.rows, w_in<T>(own) + first, group.d, in, width, to, BLOCK, false, none);
    }
};

// c[output][row] of `count` outputs of a matrix [outputs, k] from `first` on; c[row][output] if the
// matrix is transposed.
template <class T, class Isa>
void product(bool transposed, const T* weights, int64_t outputs, int64_t k, int64_t first,
             int64_t count, const T* x, int64_t x_stride, int64_t rows, float* c) {
    if (!transposed) return Isa::nt(weights + first * k, count, x, x_stride, rows, k, c, rows);
    Prefetch* const none = nullptr;
    Isa::nn(x, x_stride, rows, weights + first, outputs, k, count, c, count, false, none, true);
}

// Stores the activation of some hidden units, c[unit][row], for `packed_product`.
template <class T, class Isa>
void store_ordered(const Group& group, const ExpertRows& own, int64_t first, int64_t count,
                   const float* c, int64_t next_unit) {
    if constexpr (Isa::Codes::FUSED) {
        const PackedMatrix& matrix = group.format->piece_of(W_OUT, 0).matrix;
        alignas(64) float numbers[MAX_COLUMNS];
        for (int64_t row = 0; row < own.rows; ++row) {
            for (int64_t i = 0; i < count; ++i) numbers[i] = c[i * next_unit + row];
            order_numbers<float, typename Isa::Codes>(
                matrix, numbers, first, count, own.a + row * ordered_bytes(group.h));
        }
    }
}

// Adds the low-rank part of `count` outputs of a tensor from `first` on to their sums: x @ A^T is
// short, and each task computes it anew.
template <class T, class Isa>
void add_low_rank(const Group& group, const ExpertRows& own, int tensor, int64_t first,
                  int64_t count, const T* x, int64_t x_stride, float* c, int64_t next_output,
                  int64_t next_row) {
    static thread_local Scratch scratch;
    const LowRankArgs& low = group.low_rank[tensor];
    if (low.rank == 0) return;
    const char* const record = static_cast<const char*>(own.record);
    const int64_t rows = own.rows, k = tensor == W_IN ? group.d : group.h;
    float* const u = reinterpret_cast<float*>(scratch.take(low.rank * rows * 4));  // [rank][row]
    Isa::nt(reinterpret_cast<const T*>(record + low.a), low.rank, x, x_stride, rows, k, u, rows);
    const T* b = reinterpret_cast<const T*>(record + low.b) + first * low.padded;
    for (int64_t i = 0; i < count; ++i, b += low.padded)
        for (int64_t row = 0; row < rows; ++row) {
            float sum = 0.0f;
            for (int64_t j = 0; j < low.rank; ++j) sum += load(b + j) * u[j * rows + row];
            c[i * next_output + row * next_row] += sum;
        }
}

// Some hidden units (into the activation, [R, H]), or some columns of y. Packed weights of the next
// task are prefetched.
template <class T, class Isa>
void forward_task(const Group& group, const ExpertRows& own, int phase, int64_t index,
                  const Prefetch& next) {
    const bool hidden = phase == HIDDEN;
    const int64_t size = hidden ? group.hidden_per_task : group.output_per_task;
    const int64_t rows = own.rows, first = index * size;
    const int64_t count = least(size, (hidden ? group.h : group.d) - first);
    T* const a = reinterpret_cast<T*>(own.a);
    T* const to = (hidden ? a : out_rows<T>(group, own)) + first;
    const T* const x = hidden ? rows_of<T>(group.x, group.x_stride, own) : a;
    const bool ordered_a = own.fused && group.ordered[W_OUT];
    const T* const plain_x = hidden || !ordered_a ? x : reinterpret_cast<const T*>(own.plain_a);
    const T* const weights = hidden ? w_in<T>(own) : w_out<T>(group, own);
    const int64_t stride = hidden ? group.h : group.out_stride;
    const int64_t x_stride = hidden ? group.x_stride : group.h;
    const int64_t outputs = hidden ? group.gates() * group.h : group.d;
    const int64_t k = hidden ? group.d : group.h;
    // Clamped: gate and up alternate. Otherwise up comes after all gates, as a second part.
    const int64_t step = hidden && group.clamped() ? 2 : 1;
    const int64_t parts = hidden && group.gated && !group.clamped() ? 2 : 1;
    const int64_t width = step * count, part_size = width * rows;
    const int64_t next_output = group.transposed ? 1 : rows;  // in c
    const int64_t next_row = group.transposed ? width : 1;
    float* const c = reinterpret_cast<float*>(task_scratch.take(parts * part_size * 4));
    for (int64_t part = 0; part < parts; ++part) {
        const int64_t output = part * group.h + step * first;
        float* const sums = c + part * part_size;
        if (group.format)
            packed_product<T, Isa>(group, own, hidden ? W_IN : W_OUT, output, width, x, x_stride,
                                   sums,
                                   part + 1 < parts
                                       ? group.format->row(own.record, W_IN, group.h + first)
                                       : next.row);
        else
            product<T, Isa>(group.transposed, weights, outputs, k, output, width, x, x_stride,
                            rows, sums);
        add_low_rank<T, Isa>(group, own, hidden ? W_IN : W_OUT, output, width, plain_x, x_stride,
                             sums, next_output, next_row);
        if (!group.bias) continue;
        if (group.format) {
            for (int64_t i = 0; i < width; ++i) {
                const float bias = packed_bias(group, own, hidden ? B_IN : B_OUT, output + i);
                for (int64_t row = 0; row < rows; ++row) sums[i * rows + row] += bias;
            }
            continue;
        }
        const T* const bias = (hidden ? b_in<T>(group, own) : b_out<T>(group, own)) + output;
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t i = 0; i < width; ++i)
                sums[i * next_output + row * next_row] += load(bias + i);
    }
    if (step == 2)
        Isa::activate_clamped(c, next_output, count * rows);
    else if (hidden)
        Isa::activate(c, parts == 2 ? c + part_size : nullptr, part_size, group.function);
    if (hidden && ordered_a) store_ordered<T, Isa>(group, own, first, count, c, step * next_output);
    if (hidden && ordered_a && !own.plain_a) return;
    T* const plain_to = hidden && ordered_a ? reinterpret_cast<T*>(own.plain_a) + first : to;
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t i = 0; i < count; ++i)
            store(plain_to + row * stride + i, c[i * step * next_output + row * next_row]);
}

// Tasks of experts with packed weights.
template <class T, class Isa>
void packed_task(const Group& group, const ExpertRows& own, int phase, int64_t index,
                 Prefetch& next) {
    phase == PACK ? order_task<T, Isa>(group, own, index)
                  : forward_task<T, Isa>(group, own, phase, index, next);
}

template <class T, class Isa>
void vector_task(const Group& group, const ExpertRows& own, int phase, int64_t index,
                 Prefetch& next) {
    using Products = VectorProducts<T, Isa>;
    if (!group.backward) return forward_task<T, Isa>(group, own, phase, index, next);
    phase == HIDDEN ? backward_block<Products>(group, own, index, next)
                    : dx_task<Products>(group, own, index);
}

}  // namespace
