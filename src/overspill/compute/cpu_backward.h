// Backward tasks, with the matrix products as a template parameter: vectors or AMX tiles.
#pragma once

#include "cpu_factors.h"

namespace {

// The arrays of one block: token rows (padded for AMX) of BLOCK hidden units.
template <class T>
struct BlockArrays {
    float *da, *h, *up, *c;
    float* mixed;  // gates and up values that alternate
    T *dh, *dup;
    T* mixed_dh;  // their gradients
    T* a;        // the activation times the routing weight, for weight gradients
    char* room;  // for the products

    BlockArrays(const Group& group, int64_t rows, int64_t room_bytes) {
        const int64_t size = rows * BLOCK, mixed_size = group.clamped() ? 2 * size : 0;
        const int64_t c_size = most(2 * size, rows * group.d);
        char* at = task_scratch.take(size * (12 + 3 * int64_t(sizeof(T))) +
                                     c_size * 4 + mixed_size * (4 + int64_t(sizeof(T))) +
                                     room_bytes + 10 * LINE);
        da = cut_array<float>(at, size);
        h = cut_array<float>(at, size);
        up = cut_array<float>(at, size);
        c = cut_array<float>(at, c_size);
        mixed = cut_array<float>(at, mixed_size);
        dh = cut_array<T>(at, size);
        dup = cut_array<T>(at, size);
        mixed_dh = cut_array<T>(at, mixed_size);
        a = cut_array<T>(at, size);
        room = at;
    }
};

// The gradients of some neighbouring pre-activations of a record, [R, stride].
template <class T>
struct HiddenPart {
    const T* dh;
    int64_t stride, first, count;
};

// The gradients of the pre-activations of a block: gates and up values apart, or alternating.
template <class T>
struct HiddenParts {
    int64_t size;
    HiddenPart<T> part[2];

    HiddenParts(const Group& group, int64_t unit, int64_t count, const BlockArrays<T>& arrays) {
        size = group.clamped() ? 1 : group.gates();
        part[0] = {arrays.dh, BLOCK, unit, count};
        part[1] = {arrays.dup, BLOCK, group.h + unit, count};
        if (group.clamped())
            part[0] = {arrays.mixed_dh, 2 * BLOCK, 2 * unit, 2 * count};
    }
    const HiddenPart<T>* begin() const { return part; }
    const HiddenPart<T>* end() const { return part + size; }
};

// The gradients of the weights and of b_in of one block of hidden units.
template <class Products, class T>
void gradient_block(const Group& group, const ExpertRows& own, int64_t index,
                    const BlockArrays<T>& arrays, const HiddenParts<T>& parts) {
    const int64_t unit = index * BLOCK, count = least(BLOCK, group.h - unit), d = group.d;
    const int64_t in = group.gates() * group.h, rows = own.rows;
    T* const w_in = static_cast<T*>(own.gradient);
    T* const w_out = w_in + in * d;
    T* const b_in = w_out + group.h * d;
    const T* const x = rows_of<T>(group.x, group.x_stride, own);
    const T* const dy = rows_of<T>(group.dy, group.dy_stride, own);
    const T* const a = arrays.a;
    double squares =
        group.transposed ? Products::tn(a, BLOCK, count, dy, group.dy_stride, rows, d,
                                        w_out + unit * d, d, own.adds())
                         : Products::tn(dy, group.dy_stride, d, a, BLOCK, rows, count,
                                        w_out + unit, group.h, own.adds());
    for (const HiddenPart<T>& part : parts) {
        squares += group.transposed
                       ? Products::tn(x, group.x_stride, d, part.dh, part.stride, rows, part.count,
                                      w_in + part.first, in, own.adds())
                       : Products::tn(part.dh, part.stride, part.count, x, group.x_stride, rows, d,
                                      w_in + part.first * d, d, own.adds());
        for (int64_t at = 0; group.bias && at < part.count; at += BLOCK) {
            const int64_t width = least(BLOCK, part.count - at);
            alignas(64) float sums[BLOCK] = {};
            for (int64_t row = 0; row < rows; ++row)
                Products::add_scaled(static_cast<float*>(sums), part.dh + row * part.stride + at,
                                     1.0f, width);
            squares += Products::store_gradient(static_cast<const float*>(sums), width,
                                                b_in + part.first + at, own.adds());
        }
    }
    own.square_shares[index] = squares;
}

// The same as factors, which are left in the memory of the gradient.
template <class T>
void keep_factors(const Group& group, const ExpertRows& own, int64_t index,
                  const BlockArrays<T>& arrays, const HiddenParts<T>& parts) {
    const int64_t unit = index * BLOCK, count = least(BLOCK, group.h - unit);
    const FactorLayout layout = factor_layout(group);
    for (int64_t row = 0; row < own.rows; ++row) {
        T* const to = factor_row<T>(layout, own, row);
        for (const HiddenPart<T>& part : parts)
            std::memcpy(to + layout.dh() + part.first, part.dh + row * part.stride,
                        part.count * sizeof(T));
        std::memcpy(to + layout.a() + unit, arrays.a + row * BLOCK, count * sizeof(T));
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

// The pre-activations of `count` hidden units.
template <class Products, class T>
void hidden_block(const Group& group, const ExpertRows& own, int64_t unit, int64_t count,
                  const BlockArrays<T>& arrays, Prefetch& next) {
    const int64_t parts = group.clamped() ? 1 : group.gates(), each = group.clamped() ? 2 : 1;
    for (int64_t part = 0; part < parts; ++part) {
        float* const to = group.clamped() ? arrays.mixed : part ? arrays.up : arrays.h;
        const int64_t first = part * group.h + each * unit;
        Products::hidden(group, own, first, each * count, to, each * BLOCK, arrays, next);
        for (int64_t row = 0; group.bias && row < own.rows; ++row)
            Products::add(to + row * each * BLOCK, b_in<T>(group, own) + first, each * count);
    }
    for (int64_t row = 0; group.clamped() && row < own.rows; ++row)
        for (int64_t i = 0; i < count; ++i) {
            arrays.h[row * BLOCK + i] = arrays.mixed[2 * (row * BLOCK + i)];
            arrays.up[row * BLOCK + i] = arrays.mixed[2 * (row * BLOCK + i) + 1];
        }
}

// One block of hidden units. With few token rows it also computes the block's share of dx, while
// the rows of w_in are in the cache; else it stores dh for `dx_task`.
template <class Products>
void backward_block(const Group& group, const ExpertRows& own, int64_t index, Prefetch& next) {
    using T = typename Products::Weight;
    const int64_t unit = index * BLOCK, count = least(BLOCK, group.h - unit), d = group.d;
    const int64_t rows = own.padded_rows(), share = own.rows * d;
    const BlockArrays<T> arrays(group, rows, Products::room_bytes());
    Products::activation_grads(group, own, unit, count, arrays);
    hidden_block<Products>(group, own, unit, count, arrays, next);
    for (int64_t row = 0, at = 0; row < own.rows; ++row, at += BLOCK)
        own.weight_shares[index * own.rows + row] = Products::activate_backward(
            arrays.h + at, group.gated ? arrays.up + at : nullptr, arrays.da + at,
            group.row_weight[own.start + row], count, arrays.dh + at, arrays.dup + at,
            own.gradient ? arrays.a + at : static_cast<T*>(nullptr), group.function);
    for (int64_t at = 0; group.clamped() && at < own.rows * BLOCK; ++at) {
        arrays.mixed_dh[2 * at] = arrays.dh[at];
        arrays.mixed_dh[2 * at + 1] = arrays.dup[at];
    }
    const HiddenParts<T> parts(group, unit, count, arrays);
    for (const HiddenPart<T>& part : parts) {
        if (group.shares_dx(own)) {
            Products::nn(part.dh, part.stride, rows, w_in<T>(own) + part.first * d, d, part.count,
                         d, arrays.c, d, &part != parts.begin(), arrays.room,
                         &next, TILE / 2);
            continue;
        }
        const int64_t in = group.gates() * group.h;
        T* const to = reinterpret_cast<T*>(own.dh) + part.first;
        for (int64_t row = 0; row < own.rows; ++row)
            std::memcpy(to + row * in, part.dh + row * part.stride, part.count * sizeof(T));
    }
    // A copy, without the rows that pad c: they could be most of the bytes.
    if (group.shares_dx(own)) std::memcpy(own.dx_shares + index * share, arrays.c, share * 4);
    if (own.forms_gradient()) gradient_block<Products>(group, own, index, arrays, parts);
    if (own.leaves_factors()) keep_factors<T>(group, own, index, arrays, parts);
}

// BLOCK columns of dx; the first task also adds up the gradients of the routing weights.
template <class Products>
void dx_task(const Group& group, const ExpertRows& own, int64_t index) {
    using T = typename Products::Weight;
    const int64_t rows = own.padded_rows(), d = group.d;
    const int64_t first = index * BLOCK, width = least(BLOCK, d - first);
    char* at = task_scratch.take(2 * rows * BLOCK * 4 + Products::room_bytes() + 2 * LINE);
    float* c = cut_array<float>(at, rows * BLOCK);
    if (group.shares_dx(own)) {
        std::memset(c, 0, rows * BLOCK * 4);
        for (int64_t row = 0; row < own.rows; ++row) {
            const float* share = own.dx_shares + row * d + first;
            for (int64_t block = 0; block < group.blocks(); ++block)
                Products::add(c + row * BLOCK, share + block * own.rows * d, width);
        }
    } else {
        Products::input_grads(group, own, first, width, c, at);
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
