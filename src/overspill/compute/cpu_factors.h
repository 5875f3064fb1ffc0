// The factors of the gradient of an expert's weights: one row of memory for each token row. The
// gradient itself is formed where it is used, in optim/kernel.cpp.
#pragma once

#include "cpu_group.h"

namespace {

// A row holds x [D], dy [D], dh [H or 2H] and the activation times the routing weight [H], all of
// the weights' type, then the routing weight as a float. Offsets count numbers, but `weight` bytes.
struct FactorLayout {
    int64_t d, h, gates, number_bytes;

    int64_t dy() const { return d; }
    int64_t dh() const { return 2 * d; }
    int64_t a() const { return 2 * d + gates * h; }
    int64_t weight() const { return padded((2 * d + (gates + 1) * h) * number_bytes, 4); }
    int64_t row_bytes() const { return padded(weight() + 4, LINE); }
};

FactorLayout factor_layout(const Group& group) {
    return {group.d, group.h, group.gates(), group.weight_bytes};
}

template <class T>
INLINE T* factor_row(const FactorLayout& layout, const ExpertRows& own, int64_t row) {
    return reinterpret_cast<T*>(static_cast<char*>(own.gradient) + row * layout.row_bytes());
}

}  // namespace
