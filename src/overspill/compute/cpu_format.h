// Positions of the parts of packed weights in a record, and access to them.
//
// A value is (code - zero) * scale, where the product is rounded once; for bf16 the nearest of it.
// The scale may be multiplied or divided by a factor before.
#pragma once

#include "cpu_isa.h"

namespace {

// Types of codes: two codes in a byte, the low four bits first, or one.
enum CodeType : int32_t { NIBBLES = 0, E4M3_CODES = 1, INT8_CODES = 2, UINT8_CODES = 3 };

// Types of scales and factors, and of zero points.
enum NumberType : int32_t {
    E8M0 = 0,
    E4M3 = 1,
    BF16 = 2,
    F16 = 3,
    F32 = 4,
    I8 = 5,
    I16 = 6,
};

// Mirrored by `PackedArgs` in packed_kernel.py. Parts are given by their first byte in a record, -1
// where there is none.
struct PackedMatrix {
    int64_t rows, columns;       // the sum runs over columns
    int64_t row_block, group;    // rows and columns that share a scale
    int64_t codes, scales, zeros, factor;
    int32_t code_type, scale_type, zero_type, factor_type;
    int32_t divides;             // scales by the factor
    float unit;                  // of `values`: they are -128 to 127 times it
    float values[16];            // of codes of four bits

    int64_t groups() const { return (columns + group - 1) / group; }
    int64_t row_bytes() const { return code_type == NIBBLES ? columns / 2 : columns; }
    const uint8_t* codes_of(const char* record, int64_t row) const {
        return reinterpret_cast<const uint8_t*>(record) + codes + row * row_bytes();
    }
};

// Some outputs of a tensor: rows of a packed matrix, or for biases numbers of `plain_type`, which
// begin at `matrix.codes`. Mirrored by `PieceArgs` in packed_kernel.py.
struct PackedPiece {
    int32_t tensor;  // W_IN to B_OUT
    int32_t plain_type;
    int64_t first, count;
    PackedMatrix matrix;
};
enum Tensor : int32_t { W_IN, W_OUT, B_IN, B_OUT };

// The record of an expert with packed weights; its pieces are ordered. Mirrored by `ExpertArgs`.
struct PackedExpert {
    const PackedPiece* pieces;
    int64_t count;

    // The piece with an output.
    const PackedPiece& piece_of(int tensor, int64_t output) const {
        const PackedPiece* piece = pieces;
        while (piece->tensor != tensor || piece->first + piece->count <= output) ++piece;
        return *piece;
    }

    // The codes of the weights of an output.
    const char* row(const void* record, int tensor, int64_t output) const {
        const PackedPiece& piece = piece_of(tensor, output);
        const char* bytes = static_cast<const char*>(record);
        return reinterpret_cast<const char*>(piece.matrix.codes_of(bytes, output - piece.first));
    }
};


}  // namespace
