// Products of packed weights in forward tasks. For few token rows the codes are multiplied without
// unpacking; else the weights of a task are unpacked first.
#pragma once

#include "cpu_packed.h"
#include "cpu_vectors.h"

namespace {

constexpr int64_t FUSED_ROWS = 8;   // token rows of an expert up to which its codes are multiplied
constexpr int64_t MOST_TOKENS = 4;  // that codes are multiplied with at once
constexpr int64_t SCALED_ROWS = 16; // rows whose scales are read at once

// Whether products of codes and token rows exist for all matrices of a tensor.
bool can_order(const PackedExpert& format, int tensor, int isa) {
    if (isa < AVX2) return false;
    const PackedMatrix& like = format.piece_of(tensor, 0).matrix;
    for (int64_t i = 0; i < format.count; ++i) {
        if (format.pieces[i].tensor != tensor) continue;
        const PackedMatrix& matrix = format.pieces[i].matrix;
        if (matrix.code_type != like.code_type || matrix.unit != like.unit) return false;
        const bool nibbles = matrix.code_type == NIBBLES;
        const int64_t group = matrix.group, smallest = nibbles ? 8 : 16;
        const bool fits = group >= smallest && !(group & (group - 1));  // a power of two
        if (matrix.groups() > 1 && !fits) return false;
        if (nibbles ? matrix.columns % 8 != 0 : matrix.zeros >= 0) return false;
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
        for (int64_t i = 0; i < count; ++i)
            Codes::put_number(matrix.code_type, first + i, load(from + i) * unit, token);
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

// Scales or zero points of some rows of a packed matrix: of each row those of its groups.
template <class Isa>
void rows_of_numbers(const PackedMatrix& matrix, int32_t type, const char* from, int64_t first,
                     int64_t count, float* to) {
    const int64_t groups = matrix.groups(), block = matrix.row_block;
    if (block == 1) return read_row<Isa>(type, from, first * groups, count * groups, to);
    for (int64_t at = 0; at < count;) {
        const int64_t row = first + at, stop = least(count, at + block - row % block);
        float* const here = to + at * groups;
        read_row<Isa>(type, from, row / block * groups, groups, here);
        while (++at < stop) std::memcpy(to + at * groups, here, groups * 4);
    }
}

// Products of `count` rows of a matrix with all token rows of an expert: c[row][token]. `after` are
// codes that are read next; may be null.
template <class T, class Isa>
void fused_rows(const PackedMatrix& matrix, const char* record, int64_t first, int64_t count,
                const char* tokens, int64_t n_tokens, float* c, const char* after) {
    static thread_local Scratch scratch;
    constexpr int64_t ROWS = Isa::Codes::ROWS;
    const int64_t groups = matrix.groups(), room = padded(SCALED_ROWS * groups + TILE, TILE);
    float* const scales = reinterpret_cast<float*>(scratch.take(room * 8));
    float* const zeros = matrix.zeros < 0 ? nullptr : scales + room;
    std::memset(scales, 0, room * 8);  // no NaN where numbers are not used
    int shift = 62;
    if (groups > 1) {
        const int64_t size = matrix.code_type == NIBBLES ? matrix.group / 8 : matrix.group;
        for (shift = 0; size >> shift > 1;) ++shift;
    }
    CodeRows rows{};
    rows.matrix = &matrix;
    rows.columns = matrix.columns;
    rows.row_bytes = matrix.row_bytes();
    rows.shift = shift;
    rows.token_stride = ordered_bytes(matrix.columns);
    for (int64_t top = 0; top < count; top += SCALED_ROWS) {
        const int64_t some = least(SCALED_ROWS, count - top);
        rows_of_numbers<Isa>(matrix, matrix.scale_type, record + matrix.scales, first + top, some,
                             scales);
        const bool few = some < ROWS;
        rows.code_stride = few ? 0 : rows.row_bytes;
        rows.scale_stride = few ? 0 : groups;
        rows.sum_stride = few ? 0 : n_tokens;
        if (zeros) {
            rows_of_numbers<Isa>(matrix, matrix.zero_type, record + matrix.zeros, first + top,
                                 some, zeros);
            for (int64_t i = 0; i < some * groups; ++i) zeros[i] *= scales[i];
        }
        for (int64_t m = 0; m < n_tokens; m += MOST_TOKENS) {
            const int64_t now = least(MOST_TOKENS, n_tokens - m);
            rows.tokens = tokens + m * rows.token_stride;
            for (int64_t next = 0; next < some; next += few ? 1 : ROWS) {
                // If rows are left over at the end, earlier ones are multiplied again.
                const int64_t row = few ? next : least(next, some - ROWS);
                const int64_t stop = top + row + ROWS;
                rows.codes = matrix.codes_of(record, first + top + row);
                rows.next = stop < count ? matrix.codes_of(record, first + stop)
                            : after      ? reinterpret_cast<const uint8_t*>(after)
                                         : rows.codes;
                rows.scales = scales + row * groups;
                rows.zeros = zeros ? zeros + row * groups : nullptr;
                rows.sums = c + (top + row) * n_tokens + m;
                dot_some<MOST_TOKENS, typename Isa::Codes>(rows, now);
            }
        }
    }
    if (matrix.factor < 0) return;
    const float factor = factor_of(matrix, record);
    for (int64_t i = 0; i < count * n_tokens; ++i)
        c[i] = matrix.divides ? c[i] / factor : c[i] * factor;
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
// not ordered, `after` is as above.
template <class T, class Isa>
void packed_product(const Group& group, const ExpertRows& own, int tensor, int64_t first,
                    int64_t count, const T* x, int64_t x_stride, float* c, const char* after) {
    const int64_t rows = own.rows, k = tensor == W_IN ? group.d : group.h;
    if constexpr (Isa::Codes::FUSED) {
        if (own.fused && group.ordered[tensor]) {
            const char* const record = static_cast<const char*>(own.record);
            for (int64_t at = 0; at < count;) {
                const PackedPiece& piece = group.format->piece_of(tensor, first + at);
                const int64_t stop = least(count, piece.first + piece.count - first);
                fused_rows<T, Isa>(piece.matrix, record, first + at - piece.first, stop - at,
                                   tensor == W_IN ? own.x_tiles : own.a, rows, c + at * rows,
                                   stop < count ? group.format->row(record, tensor, first + stop)
                                                : after);
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
