// Tasks by vectors, for any instruction set.
#pragma once

#include "cpu_job.h"
#include "cpu_vectors.h"

namespace {

template <class T, class Isa>
void forward_task(const Job& job, const Segment& own, int phase, int64_t index, Turn& turn) {
    const int64_t rows = own.rows;
    T* a = reinterpret_cast<T*>(own.a);  // [R, H]
    const int64_t tall = phase == 1 ? job.tall_in : job.tall_out;
    const int64_t first = index * tall, count = least(tall, (phase == 1 ? job.h : job.d) - first);
    float* c = reinterpret_cast<float*>(task_scratch.take(job.gates() * tall * rows * 4));
    T* to = a + first;
    int64_t stride = job.h;
    if (phase == 1 && count > 0) {
        const T* x = rows_of<T>(job.x, job.x_stride, own);
        const T* weights = w_in<T>(own) + first * job.d;
        float* up = job.gated ? c + count * rows : nullptr;
        Isa::nt(weights, count, x, job.x_stride, rows, job.d, c, rows);
        if (up) Isa::nt(weights + job.h * job.d, count, x, job.x_stride, rows, job.d, up, rows);
        Isa::activate(c, up, count * rows);
    } else if (phase == 2) {
        Isa::nt(w_out<T>(job, own) + first * job.h, count, a, job.h, rows, job.h, c, rows);
        to = rows_of<T>(job.y, job.y_stride, own) + first;
        stride = job.y_stride;
    }
    if (!turn.may_publish()) return;
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t i = 0; i < count; ++i) store(to + row * stride + i, c[i * rows + row]);
}

// The arrays of one block in backward: R rows (padded) of BLOCK hidden units.
template <class T, class Isa>
struct BlockArrays {
    float *da, *h, *up, *c, *weight_shares;
    T *dh, *dup, *weighted;
    char* rest;

    static BlockArrays cut(int64_t rows, int64_t c_size, int64_t rest_bytes) {
        const int64_t size = rows * BLOCK;
        char* at = task_scratch.take(size * (12 + 3 * int64_t(sizeof(T))) + (c_size + rows) * 4 +
                                     rest_bytes + 16 * LINE);
        BlockArrays arrays;
        arrays.da = cut_array<float>(at, size);
        arrays.h = cut_array<float>(at, size);
        arrays.up = cut_array<float>(at, size);
        arrays.c = cut_array<float>(at, c_size);
        arrays.weight_shares = cut_array<float>(at, rows);
        arrays.dh = cut_array<T>(at, size);
        arrays.dup = cut_array<T>(at, size);
        arrays.weighted = cut_array<T>(at, size);
        arrays.rest = at;
        return arrays;
    }

    // From h, up and da to dh, dup, the weighted activation and the share of the routing weights.
    void activate_rows(const Job& job, const Segment& own, int64_t count) const {
        for (int64_t row = 0; row < own.rows; ++row) {
            const int64_t at = row * BLOCK;
            weight_shares[row] = Isa::activate_backward(
                h + at, job.gated ? up + at : nullptr, da + at, job.row_weight[own.start + row],
                count, dh + at, dup + at, weighted + at);
            for (int64_t i = count; i < BLOCK; ++i) dh[at + i] = weighted[at + i] = 0;  // for tiles
            if (job.gated)
                for (int64_t i = count; i < BLOCK; ++i) dup[at + i] = 0;
        }
    }

    // Gives others the shares of the routing weights and of dx, which is in c; or dh, if the
    // products with w_in come later, as they need all of it.
    void publish(const Job& job, const Segment& own, int64_t index, Turn& turn) const {
        if (!turn.may_publish()) return;
        std::memcpy(own.weight_shares + index * own.rows, weight_shares, own.rows * 4);
        if (job.shares_dx(own)) {
            const int64_t size = own.rows * padded(job.d, STEP);
            std::memcpy(own.dx_shares + index * size, c, size * 4);
            return;
        }
        const int64_t stride = padded(job.h, BLOCK), all = own.tall_rows() * stride;
        for (int64_t gate = 0; gate < job.gates(); ++gate)
            for (int64_t row = 0; row < own.rows; ++row)
                std::memcpy(reinterpret_cast<T*>(own.dh) + gate * all + row * stride + index * BLOCK,
                            (gate ? dup : dh) + row * BLOCK, BLOCK * sizeof(T));
    }
};

template <class T, class Isa>
void backward_block(const Job& job, const Segment& own, int64_t index, Turn& turn) {
    const int64_t unit = index * BLOCK, count = least(BLOCK, job.h - unit), rows = own.rows;
    constexpr int64_t TALL = 32;  // rows of a gradient at once
    const int64_t wide = padded(job.d, STEP), share = job.shares_dx(own) ? rows * wide : 0;
    const auto arrays =
        BlockArrays<T, Isa>::cut(rows, most(share, most(rows, TALL) * BLOCK), 0);
    const T* x = rows_of<T>(job.x, job.x_stride, own);
    const T* dy = rows_of<T>(job.dy, job.dy_stride, own);
    const int64_t d = job.d;
    if (rows > 0) {
        Ahead out = output_weights(job, own, unit, count);
        Isa::nn(dy, job.dy_stride, 1, rows, w_out<T>(job, own) + unit, job.h, d, count, arrays.da,
                BLOCK, false, &out);
        for (int64_t gate = 0; gate < job.gates(); ++gate) {
            Isa::nt(w_in<T>(own) + (gate * job.h + unit) * d, count, x, job.x_stride, rows, d,
                    arrays.c, rows);
            transpose(arrays.c, rows, count, rows, gate ? arrays.up : arrays.h, BLOCK);
        }
        arrays.activate_rows(job, own, count);
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
                    Isa::nn(dh + row, 1, BLOCK, tall, x + column, job.x_stride, rows,
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
    for (int64_t gate = 0; share > 0 && gate < job.gates(); ++gate)
        Isa::nn(gate ? arrays.dup : arrays.dh, BLOCK, 1, rows,
                w_in<T>(own) + (gate * job.h + unit) * d, d, count, d, arrays.c, wide, gate > 0,
                &turn.ahead);
    arrays.publish(job, own, index, turn);
}

void add_weight_shares(const Job& job, const Segment& own) {
    for (int64_t row = 0; row < own.rows; ++row) {
        float total = 0.0f;
        for (int64_t block = 0; block < job.blocks(); ++block)
            total += own.weight_shares[block * own.rows + row];
        job.drow_weight[own.start + row] = total;
    }
}

// dx [R, BLOCK] of some columns, and with the first of them the routing weights.
template <class T, class Isa>
void publish_dx(const Job& job, const Segment& own, int64_t index, const float* c, Turn& turn) {
    if (!turn.may_publish()) return;
    const int64_t first = index * BLOCK, width = least(BLOCK, job.d - first);
    T* dx = rows_of<T>(job.dx, job.dx_stride, own) + first;
    Isa::put(c, BLOCK, own.rows, width, dx, job.dx_stride);
    if (index == 0) add_weight_shares(job, own);
}

template <class T, class Isa>
void dx_task(const Job& job, const Segment& own, int64_t index, Turn& turn) {
    const int64_t first = index * BLOCK, width = least(BLOCK, job.d - first);
    const int64_t stride = padded(job.h, BLOCK);
    const T* dh = reinterpret_cast<const T*>(own.dh);
    float* c = reinterpret_cast<float*>(task_scratch.take(own.rows * BLOCK * 4));
    for (int64_t gate = 0; gate < job.gates(); ++gate)
        Isa::nn(dh + gate * own.rows * stride, stride, 1, own.rows,
                w_in<T>(own) + gate * job.h * job.d + first, job.d, job.h, width, c, BLOCK,
                gate > 0);
    publish_dx<T, Isa>(job, own, index, c, turn);
}

// dx of some columns: shares added in their order.
template <class T, class Isa>
void add_shares(const Job& job, const Segment& own, int64_t index, Turn& turn) {
    const int64_t first = index * BLOCK, width = least(BLOCK, job.d - first);
    const int64_t stride = padded(job.d, STEP);
    float* c = reinterpret_cast<float*>(task_scratch.take(own.rows * BLOCK * 4));
    std::memset(c, 0, own.rows * BLOCK * 4);
    for (int64_t row = 0; row < own.rows; ++row) {
        const float* share = own.dx_shares + row * stride + first;
        for (int64_t block = 0; block < job.blocks(); ++block, share += own.rows * stride)
            Isa::add(c + row * BLOCK, share, width);
    }
    publish_dx<T, Isa>(job, own, index, c, turn);
}

template <class T, class Isa>
void vector_task(const Job& job, const Segment& own, int phase, int64_t index, Turn& turn) {
    if (!job.backward) return forward_task<T, Isa>(job, own, phase, index, turn);
    if (phase == 1) return backward_block<T, Isa>(job, own, index, turn);
    if (job.shares_dx(own)) return add_shares<T, Isa>(job, own, index, turn);
    dx_task<T, Isa>(job, own, index, turn);
}

}  // namespace
