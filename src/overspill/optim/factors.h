// The gradient of an expert's weights from its factors, the token rows x, dy, dh and a: pieces of it
// as floats, rounded as a whole, and the sum of its squares.
#pragma once

#include "../compute/cpu_factors.h"
#include "../compute/cpu_vectors.h"

// Arguments of a call, mirrored by factors.py.
struct FactorArgs {
    const void* rows;
    int64_t count, d, h;
    int32_t gated, bias, transposed, bf16;
};

namespace {

constexpr int64_t PIECE = 1 << 15;   // numbers of a piece: its floats fit the L2 cache
constexpr int64_t PIECE_WIDTH = 2048;
constexpr int64_t PIECE_HEIGHT = 32;

// Some rows of a tensor of the gradient, or some columns of them.
struct Piece {
    int64_t rows, width;
    int64_t start;  // of the first number in the record
    int64_t apart;  // from the start of a row to that of the next one
};

// A tensor of the gradient: a^T b [rows, columns], or the sum of the rows of b.
struct GradientTensor {
    int64_t start, rows, columns, a, b;
    bool is_bias, is_weighted;

    int64_t width() const { return least(columns, is_bias ? PIECE : PIECE_WIDTH); }
    int64_t height() const { return least(PIECE_HEIGHT, PIECE / width()); }
    int64_t across() const { return pieces(columns, width()); }
    int64_t count() const { return across() * pieces(rows, height()); }

    Piece piece(int64_t index) const {
        const int64_t row = index / across() * height(), column = index % across() * width();
        return {least(height(), rows - row), least(width(), columns - column),
                start + row * columns + column, columns};
    }
};

template <class T>
struct Factors : FactorLayout {
    const char* rows;
    int64_t count;
    GradientTensor tensors[4];
    int tensor_count;

    explicit Factors(const FactorArgs& args)
        : FactorLayout{args.d, args.h, args.gated ? 2 : 1, sizeof(T)},
          rows(static_cast<const char*>(args.rows)),
          count(args.count),
          tensor_count(args.bias ? 4 : 2) {
        const int64_t in = gates * h, b_in = (gates + 1) * h * d;
        tensors[0] = {0, in, d, dh(), 0, false, false};
        tensors[1] = {in * d, d, h, dy(), a(), false, false};
        if (args.transposed) {
            tensors[0] = {0, d, in, 0, dh(), false, false};
            tensors[1] = {in * d, h, d, a(), dy(), false, false};
        }
        tensors[2] = {b_in, 1, in, 0, dh(), true, false};
        tensors[3] = {b_in + in, 1, d, 0, dy(), true, true};
    }

    bool has_bias() const { return tensor_count > 2; }
    int64_t stride() const { return row_bytes() / int64_t(sizeof(T)); }
    const T* at(int64_t offset, int64_t row = 0) const {
        return reinterpret_cast<const T*>(rows + row * row_bytes()) + offset;
    }
    float weight_of(int64_t row) const {
        return load(reinterpret_cast<const float*>(rows + row * row_bytes() + weight()));
    }
    int64_t piece_count() const {
        int64_t total = 0;
        for (int i = 0; i < tensor_count; ++i) total += tensors[i].count();
        return total;
    }
    // The tensor of a piece; `index` becomes that of the piece in it.
    const GradientTensor& tensor_of(int64_t& index) const {
        int i = 0;
        while (index >= tensors[i].count()) index -= tensors[i++].count();
        return tensors[i];
    }
};

// Writes a piece of the gradient to `to`, row by row.
template <class T, class Isa>
Piece form_piece(const Factors<T>& factors, int64_t index, float* to) {
    const GradientTensor& tensor = factors.tensor_of(index);
    const Piece piece = tensor.piece(index);
    const int64_t first = piece.start - tensor.start;
    const int64_t row = first / tensor.columns, column = first % tensor.columns;
    const FlushDenormals flush;
    if (!tensor.is_bias) {
        Isa::tn(factors.at(tensor.a + row), factors.stride(), piece.rows,
                factors.at(tensor.b + column), factors.stride(), factors.count, piece.width, to,
                piece.width, false);
        return piece;
    }
    std::memset(to, 0, piece.width * 4);
    for (int64_t r = 0; r < factors.count; ++r)
        Isa::add_scaled(to, factors.at(tensor.b + column, r),
                        tensor.is_weighted ? factors.weight_of(r) : 1.0f, piece.width);
    return piece;
}

// Rounds a piece into its place in the record; returns the sum of squares.
template <class T, class Isa>
double store_piece(const Piece& piece, const float* from, T* record) {
    double squares = 0.0;
    for (int64_t row = 0; row < piece.rows; ++row)
        for (int64_t at = 0; at < piece.width; at += BLOCK)
            squares += Isa::store_gradient(from + row * piece.width + at,
                                           least(BLOCK, piece.width - at),
                                           record + piece.start + row * piece.apart + at, false);
    return squares;
}

constexpr int64_t GRAM = 4;  // rows and columns of a block of products

// c[i][j] = the products of GRAM rows at `a` with as many at `b`, over k numbers.
template <class T, int LANES>
INLINE void gram_body(const T* const* a, const T* const* b, int64_t k, double* c) {
    using Vector = Elements<T, LANES>;
    typename Vectors<LANES>::Floats total[GRAM][GRAM] = {};
    int64_t at = 0;
    for (; at + Vector::SIZE <= k; at += Vector::SIZE) {
        Vector left[GRAM];
        for (int i = 0; i < GRAM; ++i) left[i] = Vector(a[i] + at);
        for (int j = 0; j < GRAM; ++j) {
            const Vector right(b[j] + at);
            for (int i = 0; i < GRAM; ++i) left[i].add_product(right, total[i][j]);
        }
    }
    for (int i = 0; i < GRAM; ++i)
        for (int j = 0; j < GRAM; ++j) {
            double tail = sum<LANES>(total[i][j]);
            for (int64_t n = at; n < k; ++n) tail += double(load(a[i] + n)) * load(b[j] + n);
            c[i * GRAM + j] = tail;
        }
}

template <class T, class Isa>
struct Gram;
#define DEFINE_GRAM(NAME, TARGET, LANES)                                                  \
    template <class T>                                                                  \
    struct Gram<T, NAME<T>> {                                                           \
        TARGET static void products(const T* const* a, const T* const* b, int64_t k,      \
                                    double* c) {                                          \
            gram_body<T, LANES>(a, b, k, c);                                              \
        }                                                                                 \
    };
DEFINE_GRAM(Generic, , 4)
#if HAVE_X86
DEFINE_GRAM(Avx2, TARGET_AVX2, 8)
DEFINE_GRAM(Avx512, TARGET_AVX512, 16)
#endif

// The share of GRAM token rows, from `first` on, in the sum of squares: with the earlier ones and
// with each other. |dh^T x|^2 = sum((dh dh^T) (x x^T)), and a bias is a column of ones beside x.
template <class T, class Isa>
double square_share(const Factors<T>& factors, int64_t first) {
    const int64_t offsets[] = {0, factors.dy(), factors.dh(), factors.a()};
    const int64_t sizes[] = {factors.d, factors.d, factors.gates * factors.h, factors.h};
    const int64_t last = factors.count - 1;
    double total = 0.0, c[4][GRAM * GRAM];
    for (int64_t other = 0; other <= first; other += GRAM) {
        for (int part = 0; part < 4; ++part) {
            const T *left[GRAM], *right[GRAM];
            for (int64_t i = 0; i < GRAM; ++i) {
                left[i] = factors.at(offsets[part], least(first + i, last));
                right[i] = factors.at(offsets[part], least(other + i, last));
            }
            Gram<T, Isa>::products(left, right, sizes[part], c[part]);
        }
        for (int64_t i = 0; i < GRAM && first + i <= last; ++i)
            for (int64_t j = 0; j < GRAM && other + j <= last; ++j) {
                const double x = c[0][i * GRAM + j], dy = c[1][i * GRAM + j];
                const double dh = c[2][i * GRAM + j], a = c[3][i * GRAM + j];
                double one = 0.0, weights = 0.0;
                if (factors.has_bias()) {
                    one = 1.0;
                    weights = double(factors.weight_of(first + i)) * factors.weight_of(other + j);
                }
                const double products = (x + one) * dh + dy * (a + weights);
                total += other < first ? 2.0 * products : products;
            }
    }
    return total;
}

// The functions for an instruction set.
template <class T>
struct FactorFunctions {
    Piece (*form)(const Factors<T>&, int64_t, float*);
    double (*store)(const Piece&, const float*, T*);
    double (*square_share)(const Factors<T>&, int64_t);
};

template <class T, class Isa>
FactorFunctions<T> factor_functions_of() {
    return {form_piece<T, Isa>, store_piece<T, Isa>, square_share<T, Isa>};
}

template <class T>
FactorFunctions<T> factor_functions(int isa) {
#if HAVE_X86
    if (isa >= AVX512) return factor_functions_of<T, Avx512<T>>();
    if (isa == AVX2) return factor_functions_of<T, Avx2<T>>();
#endif
    return factor_functions_of<T, Generic<T>>();
}

}  // namespace
