// The AdamW step over a record whose gradient is given by its factors, piece by piece: the gradient
// is not written to memory. Also the gradient itself, and the sum of its squares.
//
// Plain C ABI, called through ctypes (which releases the GIL during a call). Any number of threads
// gives the same bits.

#include <vector>

#include "adamw.h"
#include "factors.h"

namespace {

// Calls `use(piece, floats, index)` for all pieces of a gradient.
template <class T, class Use>
void for_each_piece(const Factors<T>& factors, const FactorFunctions<T>& functions, int threads,
                    const Use& use) {
    const int64_t count = factors.piece_count();
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1 && count > 1)
    for (int64_t index = 0; index < count; ++index) {
        alignas(64) static thread_local float floats[PIECE];
        use(functions.form(factors, index, floats), static_cast<const float*>(floats), index);
    }
}

template <class T>
void update_by_factors(const FactorArgs& factor_args, const AdamArgs& args, AdamRange range,
                       int threads, int isa) {
    const auto use = [&](const Piece& piece, const float* floats, int64_t) {
        const bool whole = piece.apart == piece.width;  // its rows follow each other
        const int64_t rows = whole ? 1 : piece.rows, size = piece.rows / rows * piece.width;
        for (int64_t row = 0; row < rows; ++row) {
            AdamArgs own = args;
            own.grad = floats + row * size;
            own.grad_start = piece.start + row * piece.apart;
            range(own, own.grad_start, own.grad_start + size);
        }
    };
    for_each_piece(Factors<T>(factor_args), factor_functions<T>(isa), threads, use);
}

template <class T>
double form_gradient(const FactorArgs& args, T* into, int threads, int isa) {
    const Factors<T> factors(args);
    const auto functions = factor_functions<T>(isa);
    std::vector<double> squares(factors.piece_count());  // added in order, for the same bits
    for_each_piece(factors, functions, threads,
                   [&](const Piece& piece, const float* floats, int64_t index) {
                       squares[index] = functions.store(piece, floats, into);
                   });
    double total = 0.0;
    for (const double part : squares) total += part;
    return total;
}

template <class T>
double gradient_square(const FactorArgs& args, int threads, int isa) {
    const Factors<T> factors(args);
    const auto functions = factor_functions<T>(isa);
    std::vector<double> squares(pieces(factors.count, GRAM));
    const int64_t count = int64_t(squares.size());
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1 && count > 1)
    for (int64_t i = 0; i < count; ++i)
        squares[i] = functions.square_share(factors, (count - 1 - i) * GRAM);  // the longest first
    double total = 0.0;
    for (const double part : squares) total += part;
    return total;
}

}  // namespace

extern "C" {

// As overspill_adamw, with the gradient of a whole record that its factors give.
void overspill_adamw_factored(const FactorArgs* factors, void* weight, int16_t* low, void* exp_avg,
                              void* exp_avg_sq, int moments_are_bf16, const AdamScalars* scalars,
                              int threads, int isa) {
    const AdamArgs args{weight,  low,        nullptr, nullptr, 0,
                        exp_avg, exp_avg_sq, 0,       *scalars};
    const int chosen = isa < 0 ? best_vector_isa() : isa;
    const AdamRange range = adam_for<FLOATS>(factors->bf16, moments_are_bf16, chosen);
    const auto update = factors->bf16 ? update_by_factors<uint16_t> : update_by_factors<float>;
    update(*factors, args, range, threads, chosen);
}

// Writes the rounded gradient; returns the sum of its squares.
double overspill_form_gradient(const FactorArgs* factors, void* into, int threads, int isa) {
    const int chosen = isa < 0 ? best_vector_isa() : isa;
    if (factors->bf16)
        return form_gradient(*factors, static_cast<uint16_t*>(into), threads, chosen);
    return form_gradient(*factors, static_cast<float*>(into), threads, chosen);
}

// The sum of squares of the gradient, which is not formed.
double overspill_gradient_square(const FactorArgs* factors, int threads, int isa) {
    const int chosen = isa < 0 ? best_vector_isa() : isa;
    return factors->bf16 ? gradient_square<uint16_t>(*factors, threads, chosen)
                         : gradient_square<float>(*factors, threads, chosen);
}
}
