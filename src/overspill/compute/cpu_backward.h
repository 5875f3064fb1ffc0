// Backward tasks, with the matrix products as a template parameter: vectors or AMX tiles.
#pragma once

#include "cpu_factors.h"

namespace {

// The arrays of one block: token rows (padded for AMX) of BLOCK hidden units.
template <class T>
struct BlockArrays {
    float *da, *h, *up, *c;
    T *dh, *dup;
    T* a;        // the activation times the routing weight, for weight gradients
    char* room;  // for the products

    BlockArrays(int64_t rows, int64_t c_size, int64_t room_bytes) {
        const int64_t size = rows * BLOCK;
        char* at = task_scratch.take(size * (12 + 3 * int64_t(sizeof(T))) + c_size * 4 +
                                     room_bytes + 8 * LINE);
        da = cut_array<float>(at, size);
        h = cut_array<float>(at, size);
        up = cut_array<float>(at, size);
        c = cut_array<float>(at, c_size);
        dh = cut_array<T>(at, size);
        dup = cut_array<T>(at, size);
        a = cut_array<T>(at, size);
        room = at;
    }
};

// The gradients of the weights and of b_in of one block of hidden units.
template <class Products, class T>
void gradient_block(const Group& group, const ExpertRows& own, int64_t index,
                    const BlockArrays<T>& arrays) {
    const int64_t unit = index * BLOCK, count = least(BLOCK, group.h - unit), d = group.d;
    T* const w_in = static_cast<T*>(own.gradient);
    T* const w_out = w_in + group.gates() * group.h * d;
    T* const b_in = w_out + group.h * d;
    const T* const x = rows_of<T>(group.x, group.x_stride, own);
    const T* const dy = rows_of<T>(group.dy, group.dy_stride, own);
    double squares = Products::tn(dy, group.dy_stride, d, static_cast<const T*>(arrays.a), BLOCK,
                                  own.rows, count, w_out + unit, group.h, own.adds());
    for (int64_t gate = 0; gate < group.gates(); ++gate) {
        const T* const dh = gate ? arrays.dup : arrays.dh;
        const int64_t first = gate * group.h + unit;
        squares += Products::tn(dh, BLOCK, count, x, group.x_stride, own.rows, d, w_in + first * d,
                                d, own.adds());
        if (!group.bias) continue;
        alignas(64) float sums[BLOCK] = {};
        for (int64_t row = 0; row < own.rows; ++row)
            Products::add_scaled(static_cast<float*>(sums), dh + row * BLOCK, 1.0f, count);
        squares += Products::store_gradient(static_cast<const float*>(sums), count, b_in + first,
                                            own.adds());
    }
    own.square_shares[index] = squares;
}

// The same as factors, which are left in the memory of the gradient.
template <class T>
void keep_factors(const Group& group, const ExpertRows& own, int64_t index,
                  const BlockArrays<T>& arrays) {
    const int64_t unit = index * BLOCK, bytes = least(BLOCK, group.h - unit) * sizeof(T);
    const FactorLayout layout = factor_layout(group);
    for (int64_t row = 0; row < own.rows; ++row) {
        T* const to = factor_row<T>(layout, own, row) + unit;
        std::memcpy(to + layout.dh(), arrays.dh + row * BLOCK, bytes);
        if (group.gated) std::memcpy(to + layout.dh() + group.h, arrays.dup + row * BLOCK, bytes);
        std::memcpy(to + layout.a(), arrays.a + row * BLOCK, bytes);
    }
}

// BLOCK columns of x and dy; the first task also keeps the routing weights.
template <class T>
void keep_columns(const Group& group, const ExpertRows& own, int64_t index) {
    const int64_t first = index * BLOCK, bytes = least(BLOCK, group.d - first) * sizeof(T);
    const FactorLayout layout = factor_layout(group);
    const T* const x = rows_of<T>(group.x, group.x_stride, own) + first;
    const T* const dy = rows_of<T>(group.dy, group.dy_stride, own) + first;
    for (int64_t row = 0; row < own.rows; ++row) {
        T* const to = factor_row<T>(layout, own, row);
        std::memcpy(to + first, x + row * group.x_stride, bytes);
        std::memcpy(to + layout.dy() + first, dy + row * group.dy_stride, bytes);
        if (index == 0)
            std::memcpy(reinterpret_cast<char*>(to) + layout.weight(),
                        group.row_weight + own.start + row, 4);
    }
}

// The gradient of b_out in BLOCK columns.
template <class Products>
void gradient_columns(const Group& group, const ExpertRows& own, int64_t index) {
    using T = typename Products::Weight;
    const int64_t first = index * BLOCK, width = least(BLOCK, group.d - first);
    double squares = 0.0;
    if (group.bias) {
        T* const b_out = static_cast<T*>(own.gradient) +
                         (group.gates() + 1) * group.h * group.d + group.gates() * group.h;
        const T* const dy = rows_of<T>(group.dy, group.dy_stride, own) + first;
        alignas(64) float sums[BLOCK] = {};
        for (int64_t row = 0; row < own.rows; ++row)
            Products::add_scaled(static_cast<float*>(sums), dy + row * group.dy_stride,
                                 group.row_weight[own.start + row], width);
        squares = Products::store_gradient(static_cast<const float*>(sums), width, b_out + first,
                                           own.adds());
    }
    own.square_shares[group.blocks() + index] = squares;
}

// One block of hidden units. With few token rows it also computes the block's share of dx, while
// the rows of w_in are in the cache; else it stores dh for `dx_task`.
template <class Products>
void backward_block(const Group& group, const ExpertRows& own, int64_t index, Prefetch& next) {
    using T = typename Products::Weight;
    const int64_t unit = index * BLOCK, count = least(BLOCK, group.h - unit), d = group.d;
    const int64_t rows = own.padded_rows(), share = own.rows * d;
    const BlockArrays<T> arrays(rows, rows * most(BLOCK, d), Products::room_bytes());
    Prefetch out = output_weights(group, own, unit, count);
    const T* dy = own.tiled ? reinterpret_cast<const T*>(own.dy)
                             : rows_of<T>(group.dy, group.dy_stride, own);
    Products::nn(dy, own.tiled ? d : group.dy_stride, rows, w_out<T>(group, own) + unit, group.h,
                 d, count, arrays.da, BLOCK, false, arrays.room, &out, STEP);
    for (int64_t gate = 0; gate < group.gates(); ++gate) {
        float* hidden = gate ? arrays.up : arrays.h;
        const int64_t first = gate * group.h + unit;
        Products::hidden(group, own, w_in<T>(own) + first * d, count, hidden, arrays, next);
        for (int64_t row = 0; group.bias && row < own.rows; ++row)
            Products::add(hidden + row * BLOCK, b_in<T>(group, own) + first, count);
    }
    for (int64_t row = 0, at = 0; row < own.rows; ++row, at += BLOCK)
        own.weight_shares[index * own.rows + row] = Products::activate_backward(
            arrays.h + at, group.gated ? arrays.up + at : nullptr, arrays.da + at,
            group.row_weight[own.start + row], count, arrays.dh + at, arrays.dup + at,
            own.gradient ? arrays.a + at : static_cast<T*>(nullptr), group.function);
    for (int64_t gate = 0; gate < group.gates(); ++gate) {
        const T* dh = gate ? arrays.dup : arrays.dh;
        if (group.shares_dx(own)) {
            Products::nn(dh, BLOCK, rows, w_in<T>(own) + (gate * group.h + unit) * d, d, count, d,
                         arrays.c, d, gate > 0, arrays.room, &next, TILE / 2);
            continue;
        }
        T* to = reinterpret_cast<T*>(own.dh) + gate * rows * group.h + unit;
        for (int64_t row = 0; row < own.rows; ++row)
            std::memcpy(to + row * group.h, dh + row * BLOCK, count * sizeof(T));
    }
    // A copy, without the rows that pad c: they could be most of the bytes.
    if (group.shares_dx(own)) std::memcpy(own.dx_shares + index * share, arrays.c, share * 4);
    if (own.forms_gradient()) gradient_block<Products>(group, own, index, arrays);
    if (own.leaves_factors()) keep_factors<T>(group, own, index, arrays);
}

// BLOCK columns of dx; the first task also adds up the gradients of the routing weights.
template <class Products>
void dx_task(const Group& group, const ExpertRows& own, int64_t index) {
    using T = typename Products::Weight;
    const int64_t rows = own.padded_rows(), d = group.d, h = group.h;
    const int64_t first = index * BLOCK, width = least(BLOCK, d - first);
    char* at = task_scratch.take(rows * BLOCK * 4 + Products::room_bytes());
    float* c = cut_array<float>(at, rows * BLOCK);
    if (group.shares_dx(own)) {
        std::memset(c, 0, rows * BLOCK * 4);
        for (int64_t row = 0; row < own.rows; ++row) {
            const float* share = own.dx_shares + row * d + first;
            for (int64_t block = 0; block < group.blocks(); ++block)
                Products::add(c + row * BLOCK, share + block * own.rows * d, width);
        }
    } else {
        for (int64_t gate = 0; gate < group.gates(); ++gate)
            Products::nn(reinterpret_cast<const T*>(own.dh) + gate * rows * h, h, rows,
                         w_in<T>(own) + gate * h * d + first, d, h, width, c, BLOCK, gate > 0, at,
                         nullptr, 0);
    }
    Products::store_rows(c, BLOCK, own.rows, width, out_rows<T>(group, own) + first,
                         group.out_stride);
    for (int64_t row = 0; index == 0 && row < own.rows; ++row) {
        float total = 0.0f;
        for (int64_t block = 0; block < group.blocks(); ++block)
            total += own.weight_shares[block * own.rows + row];
        if (group.bias)  // y = a w_out^T + b_out
            total += Products::dot(b_out<T>(group, own),
                                   rows_of<T>(group.dy, group.dy_stride, own) + row * group.dy_stride,
                                   d);
        group.drow_weight[own.start + row] = total;
    }
    if (own.forms_gradient()) gradient_columns<Products>(group, own, index);
    if (own.leaves_factors()) keep_columns<T>(group, own, index);
}

}  // namespace
