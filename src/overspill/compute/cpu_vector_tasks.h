// Tasks with compiler vectors, for any instruction set.
#pragma once

#include "cpu_backward.h"
#include "cpu_vectors.h"

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

    // The pre-activations [R, BLOCK] of `count` hidden units.
    static void hidden(const Group& group, const ExpertRows& own, const T* weights, int64_t count,
                       float* to, const BlockArrays<T>& arrays, Prefetch&) {
        Isa::nt(weights, count, rows_of<T>(group.x, group.x_stride, own), group.x_stride, own.rows,
                group.d, arrays.c, own.rows);
        for (int64_t row = 0; row < own.rows; ++row)
            for (int64_t i = 0; i < count; ++i) to[row * BLOCK + i] = arrays.c[i * own.rows + row];
    }
};

// Some hidden units (into the activation, [R, H]), or some columns of y.
template <class T, class Isa>
void forward_task(const Group& group, const ExpertRows& own, int phase, int64_t index) {
    const int64_t size = phase == HIDDEN ? group.hidden_per_task : group.output_per_task;
    const int64_t rows = own.rows, first = index * size;
    const int64_t count = least(size, (phase == HIDDEN ? group.h : group.d) - first);
    float* c = reinterpret_cast<float*>(task_scratch.take(group.gates() * size * rows * 4));
    T* a = reinterpret_cast<T*>(own.a);
    T* to = a + first;
    int64_t stride = group.h;
    if (phase == HIDDEN) {
        const T* x = rows_of<T>(group.x, group.x_stride, own);
        const T* weights = w_in<T>(own) + first * group.d;
        float* up = group.gated ? c + count * rows : nullptr;
        Isa::nt(weights, count, x, group.x_stride, rows, group.d, c, rows);
        if (up)
            Isa::nt(weights + group.h * group.d, count, x, group.x_stride, rows, group.d, up, rows);
        Isa::activate(c, up, count * rows);
    } else {
        Isa::nt(w_out<T>(group, own) + first * group.h, count, a, group.h, rows, group.h, c, rows);
        to = out_rows<T>(group, own) + first;
        stride = group.out_stride;
    }
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t i = 0; i < count; ++i) store(to + row * stride + i, c[i * rows + row]);
}

template <class T, class Isa>
void vector_task(const Group& group, const ExpertRows& own, int phase, int64_t index,
                 Prefetch& next) {
    using Products = VectorProducts<T, Isa>;
    if (!group.backward) return forward_task<T, Isa>(group, own, phase, index);
    phase == HIDDEN ? backward_block<Products>(group, own, index, next)
                    : dx_task<Products>(group, own, index);
}

}  // namespace
