// Values of packed matrices as float32 or bf16, exact for finite scales if the thread does not flush
// denormals.
#pragma once

#include "cpu_codes.h"
#include "cpu_thread_pool.h"

namespace {

// Columns of a row: whole groups, an even number of codes before them.
struct Columns {
    int64_t first, count;
    int64_t group, groups;  // the first one, and how many

    Columns(const PackedMatrix& matrix, int64_t first, int64_t count)
        : first(first),
          count(count),
          group(first / matrix.group),
          groups(pieces(count, matrix.group)) {}
};

template <class Isa>
void read_row(int32_t type, const char* from, int64_t first, int64_t count, float* to) {
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(from);
    if (type == E4M3) return Isa::Codes::decode_e4m3(bytes + first, count, to);
    if (type == F16) return Isa::Codes::decode_halves(bytes + 2 * first, count, to);
    Isa::read_numbers(type, from, first, count, to);
}

// The scales of some groups of a row, without the factor.
template <class Isa>
void row_scales(const PackedMatrix& matrix, const char* record, int64_t row, const Columns& columns,
                float* to) {
    const int64_t first = row / matrix.row_block * matrix.groups() + columns.group;
    read_row<Isa>(matrix.scale_type, record + matrix.scales, first, columns.groups, to);
}

// The zero points of some groups of a row.
template <class Isa>
void row_zeros(const PackedMatrix& matrix, const char* record, int64_t row, const Columns& columns,
               float* to) {
    const int64_t first = row / matrix.row_block * matrix.groups() + columns.group;
    read_row<Isa>(matrix.zero_type, record + matrix.zeros, first, columns.groups, to);
}

INLINE float factor_of(const PackedMatrix& matrix, const char* record) {
    return number(matrix.factor_type, record + matrix.factor, 0);
}

// Memory for the numbers of a row.
struct RowRoom {
    float *scales, *zeros;  // by group
    float* values;          // tables of 16 by group, or all codes

    RowRoom(const PackedMatrix& matrix, char*& at)
        : scales(cut_array<float>(at, matrix.groups() + TILE)),
          zeros(cut_array<float>(at, matrix.groups() + TILE)),
          values(cut_array<float>(at, most(16 * matrix.groups(), matrix.columns + TILE))) {
        std::memset(zeros, 0, (matrix.groups() + TILE) * 4);
    }

    static int64_t bytes(const PackedMatrix& matrix) {
        return padded(matrix.groups() + TILE, TILE) * 8 +
               padded(most(16 * matrix.groups(), matrix.columns + TILE), TILE) * 4;
    }
};

// Some values of one row.
template <class T, class Isa>
void unpack_row(const PackedMatrix& matrix, const char* record, int64_t row, const Columns& columns,
                const RowRoom& room, T* to) {
    const int64_t count = columns.count;
    const uint8_t* codes = matrix.codes_of(record, row);
    row_scales<Isa>(matrix, record, row, columns, room.scales);
    if (matrix.factor >= 0) {
        const float factor = factor_of(matrix, record);
        for (int64_t i = 0; i < columns.groups; ++i)
            room.scales[i] = matrix.divides ? room.scales[i] / factor : room.scales[i] * factor;
    }
    if (matrix.zeros >= 0) row_zeros<Isa>(matrix, record, row, columns, room.zeros);
    if (matrix.code_type == NIBBLES) {
        codes += columns.first / 2;
        if (matrix.group % 16 == 0) {
            Isa::scale_tables(matrix.values, room.zeros, room.scales, columns.groups, room.values, to);
            return Isa::Codes::look_up(codes, room.values, matrix.group, count, to);
        }
        Isa::Codes::look_up(codes, matrix.values, count, count, room.values);
    } else if (matrix.code_type == E4M3_CODES) {
        Isa::Codes::decode_e4m3(codes + columns.first, count, room.values);
    } else {
        Isa::read_integers(codes + columns.first, count, matrix.code_type == UINT8_CODES,
                           room.values);
    }
    Isa::scale_groups(room.values, room.zeros, room.scales, matrix.group, count, to);
}

// to[column][row] = from[row][column].
template <class T>
void transpose(const T* from, int64_t rows, int64_t columns, T* to, int64_t to_stride) {
    constexpr int64_t SIDE = 16 / sizeof(T);  // of a block in vectors of 16 bytes
    for (int64_t left = 0; left < columns; left += SIDE)
        for (int64_t top = 0; top < rows; top += SIDE) {
            const T* const here = from + top * columns + left;
            T* const there = to + left * to_stride + top;
#if HAVE_X86
            if (left + SIDE <= columns && top + SIDE <= rows) {
                transpose_block(here, columns, there, to_stride);
                continue;
            }
#endif
            for (int64_t i = 0; i < least(SIDE, rows - top); ++i)
                for (int64_t j = 0; j < least(SIDE, columns - left); ++j)
                    there[j * to_stride + i] = here[i * columns + j];
        }
}

constexpr int64_t BAND = 32, WIDTH = 256;  // rows and columns that a thread unpacks at once

// All values, in this thread and others. An element of `out` is at row * row_stride + column *
// column_stride; one of the strides is 1.
template <class T, class Isa>
void unpack_matrix(const PackedMatrix& matrix, const char* record, T* out, int64_t row_stride,
                   int64_t column_stride, int threads, ThreadPool& pool) {
    const bool turned = column_stride != 1;
    // Columns become rows of `out`, and a thread fills neighboring ones.
    const int64_t width = turned ? padded(WIDTH, 2 * matrix.group) : matrix.columns;
    const int64_t bands = pieces(matrix.rows, BAND), parts = pieces(matrix.columns, width);
    std::atomic<int64_t> next{0};
    const auto share = [&] {
        static thread_local Scratch scratch;
        char* at = scratch.take(RowRoom::bytes(matrix) + BAND * width * 4);
        const RowRoom room(matrix, at);
        T* const band = reinterpret_cast<T*>(at);
        for (int64_t i; (i = next.fetch_add(1)) < bands * parts;) {
            const int64_t left = i / bands * width, top = i % bands * BAND;
            const Columns columns(matrix, left, least(width, matrix.columns - left));
            const int64_t count = least(BAND, matrix.rows - top);
            for (int64_t row = 0; row < count; ++row)
                unpack_row<T, Isa>(matrix, record, top + row, columns, room,
                                   turned ? band + row * columns.count
                                          : out + (top + row) * row_stride);
            if (turned)
                transpose(band, count, columns.count, out + left * column_stride + top,
                          column_stride);
        }
    };
    pool.run(int(least(threads, bands * parts)), std::ref(share));
}

// The words [K, N / 8] of AWQ, whose nibbles are rows 0, 2, 4, 6, 1, 3, 5, 7 of eight, as [N, K / 8],
// whose nibbles are columns in their order.
void repack_awq(const uint32_t* words, int64_t k, int64_t n, uint32_t* out) {
    for (int64_t left = 0; left < n / 8; left += TILE)
        for (int64_t top = 0; top < k; top += 8)
            for (int64_t word = left; word < least(left + TILE, n / 8); ++word)
                for (int64_t row = 0; row < 8; ++row) {
                    const int64_t place = row / 2 + row % 2 * 4;
                    uint32_t columns = 0;
                    for (int64_t i = 0; i < 8; ++i)
                        columns |= (words[(top + i) * (n / 8) + word] >> 4 * place & 15) << 4 * i;
                    out[(8 * word + row) * (k / 8) + top / 8] = columns;
                }
}

}  // namespace
