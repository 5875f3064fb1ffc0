// Products of packed weights in forward tasks. For few token rows the codes are multiplied without
// unpacking; else the weights of a task are unpacked first.
#pragma once

#include "cpu_packed.h"
#include "cpu_vectors.h"

namespace {

constexpr int64_t FUSED_ROWS = 8;   // token rows of an expert up to which its codes are multiplied
constexpr int CODE_STREAMS = 4;     // rows of codes that are read in turn

// Whether products of codes and token rows exist for all matrices of a tensor.
bool can_order(const PackedExpert& format, int tensor, int isa) {
    if (isa < AVX2) return false;
    const PackedMatrix& like = format.piece_of(tensor, 0).matrix;
    for (int64_t i = 0; i < format.count; ++i) {
        if (format.pieces[i].tensor != tensor) continue;
        const PackedMatrix& matrix = format.pieces[i].matrix;
        if (matrix.code_type != like.code_type || matrix.unit != like.unit) return false;
        const int64_t words = matrix.group / 8;
        const bool one = matrix.groups() == 1, whole = matrix.group % 8 == 0;
        if (matrix.code_type != NIBBLES) {
            if (matrix.zeros >= 0 || !(one || matrix.group % 16 == 0)) return false;
        } else if (matrix.columns % 8 || !(one || (whole && !(words & (words - 1))))) {
            return false;
        }
    }
    return true;
}

// Writes some numbers of an ordered token row, from a multiple of eight on.
template <class T, class Codes>
INLINE void order_numbers(const PackedMatrix& matrix, const T* from, int64_t first, int64_t count,
                          char* token) {
    float* const floats = reinterpret_cast<float*>(token);
    if (matrix.code_type != NIBBLES) {
        const float unit = matrix.code_type == E4M3_CODES ? 256.0f : 1.0f;  // as `halves` says
        for (int64_t i = 0; i < count; ++i) floats[first + i] = load(from + i) * unit;
        return;
    }
    auto* const to = reinterpret_cast<typename Codes::Token*>(token);
    float* const sums = floats + padded(matrix.columns, ORDERED);
    const float unit = Codes::token_unit(matrix);
    for (int64_t i = 0; i < count; i += 8) {
        float sum = 0.0f;
        for (int64_t j = 0; j < 8; ++j) {
            const float number = load(from + i + j);
            store_rounded(to + Codes::place(first + i + j), number * unit);
            sum += number;
        }
        sums[(first + i) / 8] = sum;
    }
}

// The PACK task of an expert whose codes are multiplied: orders one token row.
template <class T, class Isa>
void order_task(const Group& group, const ExpertRows& own, int64_t index) {
    if constexpr (Isa::Codes::FUSED) {
        if (group.ordered[W_IN]) {
            char* const token = own.x_tiles + index * ordered_bytes(group.d);
            std::memset(token, 0, ordered_bytes(group.d));
            order_numbers<T, typename Isa::Codes>(
                group.format->piece_of(W_IN, 0).matrix,
                rows_of<T>(group.x, group.x_stride, own) + index * group.x_stride, 0, group.d,
                token);
        }
        if (group.ordered[W_OUT])
            std::memset(own.a + index * ordered_bytes(group.h), 0, ordered_bytes(group.h));
    }
}

// Products of `count` rows of a matrix with all token rows of an expert: c[row][token].
template <class T, class Isa>
void fused_rows(const PackedMatrix& matrix, const char* record, int64_t first, int64_t count,
                const char* tokens, int64_t n_tokens, float* c) {
    static thread_local Scratch scratch;
    const Columns columns(matrix, 0, matrix.columns);
    const int64_t room = padded(columns.groups + TILE, TILE);
    float* const scales = reinterpret_cast<float*>(scratch.take(room * 8));
    float* const zeros = matrix.zeros < 0 ? nullptr : scales + room;
    std::memset(scales, 0, room * 8);  // no NaN where numbers are not used
    int shift = 62;
    if (columns.groups > 1)
        for (shift = 0; matrix.group >> shift > 8;) ++shift;
    CodeRow row{nullptr, matrix.columns, scales, zeros, shift, matrix.group, &matrix, nullptr,
                ordered_bytes(matrix.columns), IN_FLIGHT * LINE};
    const float factor = matrix.factor < 0 ? 1.0f : factor_of(matrix, record);
    const auto one = [&](int64_t at) {
        row_scales<Isa>(matrix, record, first + at, columns, scales);
        if (zeros) {
            row_zeros<Isa>(matrix, record, first + at, columns, zeros);
            for (int64_t i = 0; i < columns.groups; ++i) zeros[i] *= scales[i];
        }
        row.codes = matrix.codes_of(record, first + at);
        float* const to = c + at * n_tokens;
        for (int64_t m = 0; m < n_tokens; m += 4) {
            row.tokens = tokens + m * row.token_bytes;
            dot_some<4, typename Isa::Codes>(row, n_tokens - m, to + m);
        }
        for (int64_t m = 0; matrix.factor >= 0 && m < n_tokens; ++m)
            to[m] = matrix.divides ? to[m] / factor : to[m] * factor;
    };
    const int64_t apart = count / CODE_STREAMS;
    for (int64_t i = 0; i < apart; ++i)
        for (int64_t stream = 0; stream < CODE_STREAMS; ++stream) one(stream * apart + i);
    for (int64_t at = apart * CODE_STREAMS; at < count; ++at) one(at);
}

// The weights of some outputs of a tensor, unpacked in memory of this thread: valid until the next
// call.
template <class T, class Isa>
const T* unpacked_rows(const Group& group, const ExpertRows& own, int tensor, int64_t first,
                       int64_t count) {
    static thread_local Scratch scratch;
    const char* const record = static_cast<const char*>(own.record);
    const int64_t k = tensor == W_IN ? group.d : group.h;
    int64_t bytes = 0;
    for (int64_t i = 0; i < group.format->count; ++i)
        if (group.format->pieces[i].tensor == tensor)
            bytes = most(bytes, RowRoom::bytes(group.format->pieces[i].matrix));
    char* const memory = scratch.take(bytes + (count * k + TILE) * int64_t(sizeof(T)));
    T* const to = reinterpret_cast<T*>(memory + bytes);
    for (int64_t at = 0; at < count;) {
        const PackedPiece& piece = group.format->piece_of(tensor, first + at);
        char* here = memory;
        const RowRoom room(piece.matrix, here);
        const Columns columns(piece.matrix, 0, k);
        const int64_t stop = least(count, piece.first + piece.count - first);
        for (; at < stop; ++at)
            unpack_row<T, Isa>(piece.matrix, record, first + at - piece.first, columns, room,
                               to + at * k);
    }
    return to;
}

// c[output][row] of `count` outputs of a tensor from `first` on. `x` are the token rows if they are
// not ordered.
template <class T, class Isa>
void packed_product(const Group& group, const ExpertRows& own, int tensor, int64_t first,
                    int64_t count, const T* x, int64_t x_stride, float* c) {
    const int64_t rows = own.rows, k = tensor == W_IN ? group.d : group.h;
    if constexpr (Isa::Codes::FUSED) {
        if (own.fused && group.ordered[tensor]) {
            const char* const record = static_cast<const char*>(own.record);
            for (int64_t at = 0; at < count;) {
                const PackedPiece& piece = group.format->piece_of(tensor, first + at);
                const int64_t stop = least(count, piece.first + piece.count - first);
                fused_rows<T, Isa>(piece.matrix, record, first + at - piece.first, stop - at,
                                   tensor == W_IN ? own.x_tiles : own.a, rows, c + at * rows);
                at = stop;
            }
            return;
        }
    }
    const T* const weights = unpacked_rows<T, Isa>(group, own, tensor, first, count);
    Isa::nt(weights, count, x, x_stride, rows, k, c, rows);
}

// A bias of a packed record.
INLINE float packed_bias(const Group& group, const ExpertRows& own, int tensor, int64_t output) {
    const PackedPiece& piece = group.format->piece_of(tensor, output);
    return number(piece.plain_type, static_cast<const char*>(own.record) + piece.matrix.codes,
                  output - piece.first);
}

}  // namespace
