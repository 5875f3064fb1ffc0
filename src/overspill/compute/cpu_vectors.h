// Matrix products with compiler vectors, compiled once per instruction set.
//
//     nt  C = W X^T  weight rows with token rows; both are contiguous along the sum
//     nn  C = A B    token rows with weight rows; the sum runs over the weight rows
//     tn  C = A^T B  a weight gradient: the sum runs over the token rows of A and B
#pragma once

#include <type_traits>

#include "cpu_dots.h"

namespace {

template <int LANES>
struct Vectors {
    typedef float Floats __attribute__((vector_size(4 * LANES)));
    typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
};

// Adds halves until one value is left.
template <int LANES>
INLINE float sum(typename Vectors<LANES>::Floats vector) {
    if constexpr (LANES == 2) {
        return vector[0] + vector[1];
    } else {
        typename Vectors<LANES / 2>::Floats halves[2];
        std::memcpy(halves, &vector, sizeof vector);
        return sum<LANES / 2>(halves[0] + halves[1]);
    }
}

// Consecutive numbers in registers: one vector of floats, or the even and the odd elements of twice
// as many bf16. That takes a shift and a mask, where a conversion in order would need shuffles.
template <class T, int LANES>
struct Elements {
    using Floats = typename Vectors<LANES>::Floats;
    static constexpr int PARTS = sizeof(T) == 2 ? 2 : 1;
    static constexpr int64_t SIZE = PARTS * LANES;
    Floats part[PARTS];

    Elements() = default;
    explicit __attribute__((always_inline)) Elements(const T* from) {
        typename Vectors<LANES>::Bits bits;
        std::memcpy(&bits, from, sizeof bits);
        part[0] = (Floats)(PARTS == 2 ? bits << 16 : bits);
        if constexpr (PARTS == 2) part[1] = (Floats)(bits & 0xffff0000u);
    }

    __attribute__((always_inline)) void add_product(const Elements& other, Floats& total) const {
        for (int i = 0; i < PARTS; ++i) total += part[i] * other.part[i];
    }

    // to += sum over Q rows of factor * row; sums of even and of odd columns are stored separately.
    template <int Q>
    static __attribute__((always_inline)) void add_scaled(const Elements* row, const float* factors,
                                                          float* to) {
        for (int i = 0; i < PARTS; ++i) {
            Floats total;
            std::memcpy(&total, to + i * LANES, sizeof total);
            for (int q = 0; q < Q; ++q) total += factors[q] * row[q].part[i];
            std::memcpy(to + i * LANES, &total, sizeof total);
        }
    }

    // Brings such sums into the order of the columns.
    static __attribute__((always_inline)) void order(const float* __restrict sums,
                                                     float* __restrict to) {
#pragma omp simd
        for (int i = 0; i < LANES; ++i)
            for (int j = 0; j < PARTS; ++j) to[PARTS * i + j] = sums[j * LANES + i];
    }
};

// to (+)= sums, brought into the order of the columns.
template <class T, int LANES>
INLINE void store_in_order(const float* __restrict sums, int64_t columns, float* __restrict to,
                         bool add) {
    using Vector = Elements<T, LANES>;
    const int64_t whole = columns / Vector::SIZE * Vector::SIZE;
    alignas(64) float ordered[MAX_COLUMNS];
    for (int64_t n = 0; n < whole; n += Vector::SIZE) Vector::order(sums + n, ordered + n);
    for (int64_t n = whole; n < columns; ++n) ordered[n] = sums[n];
    if (add)
        add_body(to, ordered, columns);
    else
        std::memcpy(to, ordered, columns * 4);
}

// W weight rows, `apart` rows from each other, with M token rows: c[w * apart][m]. Prefetches the
// weights at `upcoming` and in `streams - 1` streams `apart` rows from it.
template <class T, int LANES, int W, int M>
INLINE void nt_block(const T* weights, int64_t apart, const T* tokens, int64_t token_stride,
                     int64_t k, float* c, int64_t c_stride, const T* upcoming, int64_t streams) {
    using Vector = Elements<T, LANES>;
    typename Vectors<LANES>::Floats total[W][M] = {};
    int64_t at = 0;
    for (; at + Vector::SIZE <= k; at += Vector::SIZE) {
        for (int64_t i = 0; i < streams; ++i)
            __builtin_prefetch(upcoming + i * apart * k + at, 0, 2);
        Vector token[M];
        for (int m = 0; m < M; ++m) token[m] = Vector(tokens + m * token_stride + at);
        for (int w = 0; w < W; ++w) {
            const Vector weight(weights + w * apart * k + at);
            for (int m = 0; m < M; ++m) weight.add_product(token[m], total[w][m]);
        }
    }
    for (int w = 0; w < W; ++w) {
        for (int m = 0; m < M; ++m) {
            float tail = 0.0f;
            for (int64_t i = at; i < k; ++i)
                tail += load(weights + w * apart * k + i) * load(tokens + m * token_stride + i);
            c[w * apart * c_stride + m] = sum<LANES>(total[w][m]) + tail;
        }
    }
}

// As `nt_block`, for `count` tokens, at most M.
template <class T, int LANES, int W, int M>
INLINE void nt_some(const T* weights, int64_t apart, const T* tokens, int64_t token_stride,
                    int64_t count, int64_t k, float* c, int64_t c_stride, const T* upcoming,
                    int64_t streams) {
    if constexpr (M > 1) {
        if (count < M)
            return nt_some<T, LANES, W, M - 1>(weights, apart, tokens, token_stride, count, k, c,
                                               c_stride, upcoming, streams);
    }
    nt_block<T, LANES, W, M>(weights, apart, tokens, token_stride, k, c, c_stride, upcoming,
                             streams);
}

// c[row][token] = weights [rows, k] times tokens [count, k], W rows and M tokens at a time. The W
// rows are `apart` rows from each other, so that each continues in the next one: few long streams,
// which the hardware prefetchers follow across rows and pages. If all tokens are done in one pass,
// software prefetches help; if they take several passes, these fetch the next rows.
template <class T, int LANES, int W, int M>
INLINE void nt_streams(const T* weights, int64_t rows, const T* tokens, int64_t token_stride,
                       int64_t count, int64_t k, float* c, int64_t c_stride) {
    const int64_t apart = rows / W, passes = pieces(count, M), share = pieces(W, most(passes, 1));
    for (int64_t row = 0; row < apart; ++row) {
        const T* here = weights + row * k;
        for (int64_t pass = 0; pass < passes; ++pass) {
            const int64_t m = pass * M, first = least(W, share * pass);
            const T* upcoming = here + IN_FLIGHT / W * LINE / int64_t(sizeof(T));
            int64_t streams = W;
            if (passes > 1) {
                upcoming = here + (first * apart + 1) * k;
                streams = row + 1 < apart ? least(share, W - first) : 0;
            }
            nt_some<T, LANES, W, M>(here, apart, tokens + m * token_stride, token_stride,
                                    least(M, count - m), k, c + row * c_stride + m, c_stride,
                                    upcoming, streams);
        }
    }
    for (int64_t row = apart * W; row < rows; ++row)
        for (int64_t m = 0; m < count; ++m)
            nt_block<T, LANES, 1, 1>(weights + row * k, 0, tokens + m * token_stride, token_stride,
                                     k, c + row * c_stride + m, c_stride, nullptr, 0);
}

constexpr int STREAMS = 8;  // with one or two tokens

// As many sums as there are registers. A sum does not depend on what is summed beside it.
template <class T, int LANES>
INLINE void nt_body(const T* weights, int64_t rows, const T* tokens, int64_t token_stride,
                    int64_t count, int64_t k, float* c, int64_t c_stride) {
    constexpr int M = LANES >= 16 ? 4 : 2;
    if (2 * count <= M)
        nt_streams<T, LANES, STREAMS, M / 2>(weights, rows, tokens, token_stride, count, k, c,
                                             c_stride);
    else
        nt_streams<T, LANES, 4, M>(weights, rows, tokens, token_stride, count, k, c, c_stride);
}

// sums[p] += sum over Q rows of factors[p][q] b[q], in the order in which Elements loads. With
// `ahead` the next Q rows are prefetched, into the L1 cache: they are used soon.
template <class T, int LANES, int Q>
INLINE void nn_rows(const float* factors, int64_t rows, const T* b, int64_t b_stride,
                    int64_t columns, float* sums, int64_t sums_stride, bool ahead) {
    using Vector = Elements<T, LANES>;
    for (int64_t n = 0; n + Vector::SIZE <= columns; n += Vector::SIZE) {
        if (ahead && n % (LINE / int64_t(sizeof(T))) == 0)
            for (int q = 0; q < Q; ++q) __builtin_prefetch(b + (Q + q) * b_stride + n, 0, 3);
        Vector row[Q];
        for (int q = 0; q < Q; ++q) row[q] = Vector(b + q * b_stride + n);
        for (int64_t p = 0; p < rows; ++p)
            Vector::template add_scaled<Q>(row, factors + p * Q, sums + p * sums_stride + n);
    }
    for (int64_t n = columns / Vector::SIZE * Vector::SIZE; n < columns; ++n)
        for (int64_t p = 0; p < rows; ++p)
            for (int q = 0; q < Q; ++q)
                sums[p * sums_stride + n] += factors[p * Q + q] * load(b + q * b_stride + n);
}

// c[p][n] (+)= sum over q of a[p][q] b[q][n]. b is read along its rows, Q at a time, and converted
// once for up to P rows of c, whose sums stay in the L1 cache. Meanwhile `next` is prefetched if it
// is not null, as many lines as b has. With `whole`, all columns (at most MAX_COLUMNS) are summed
// together, and b is prefetched: from memory, long pieces of its rows are read faster.
template <class T, int LANES>
INLINE void nn_body(const T* a, int64_t a_stride, int64_t rows, const T* b, int64_t b_stride,
                    int64_t depth, int64_t columns, float* c, int64_t c_stride, bool add,
                    Prefetch* next, bool whole = false) {
    constexpr int64_t MAX_P = 32, Q = 8;
    alignas(64) float factors[MAX_P * Q], sums[MAX_P * BLOCK];
    const int64_t block = whole ? columns : BLOCK;
    const int64_t P = whole ? least(MAX_P, MAX_P * BLOCK / block) : MAX_P;
    for (int64_t chunk = 0; chunk < depth; chunk += CHUNK) {
        const int64_t stop = least(depth, chunk + CHUNK);
        for (int64_t left = 0; left < columns; left += block) {
            const int64_t width = least(block, columns - left);
            for (int64_t top = 0; top < rows; top += P) {
                const int64_t count = least(P, rows - top);
                std::memset(sums, 0, count * block * 4);
                auto step = [&](auto size, int64_t q) {
                    constexpr int N = decltype(size)::value;
                    for (int64_t p = 0; p < count; ++p)
                        for (int64_t i = 0; i < N; ++i)
                            factors[p * N + i] = load(a + (top + p) * a_stride + q + i);
                    nn_rows<T, LANES, N>(factors, count, b + q * b_stride + left, b_stride, width,
                                         sums, block, whole && top == 0 && q + 2 * N <= depth);
                };
                int64_t q = chunk;
                for (; q + Q <= stop; q += Q) {
                    if (top == 0 && next) next->fetch(Q * width * int64_t(sizeof(T)) / LINE);
                    step(std::integral_constant<int, Q>(), q);
                }
                for (; q < stop; ++q) step(std::integral_constant<int, 1>(), q);
                for (int64_t p = 0; p < count; ++p)
                    store_in_order<T, LANES>(sums + p * block, width,
                                             c + (top + p) * c_stride + left, add || chunk > 0);
            }
        }
    }
}

// to[p][n] = sum over token rows q of a[q][p] b[q][n], rounded once, or with `add` rounded and added
// to the memory. P rows of the result are summed together in the L1 cache, for BLOCK columns of b,
// which stay in the L2 cache. Returns the sum of squares of the result, whose type is To.
template <class T, int LANES, class To>
INLINE double tn_body(const T* a, int64_t a_stride, int64_t rows, const T* b, int64_t b_stride,
                      int64_t depth, int64_t columns, To* to, int64_t to_stride, bool add) {
    constexpr int64_t P = 32, Q = 8;
    alignas(64) float factors[P * Q], sums[P * BLOCK], ordered[BLOCK];
    double squares = 0.0;
    for (int64_t left = 0; left < columns; left += BLOCK) {
        const int64_t width = least(BLOCK, columns - left);
        for (int64_t top = 0; top < rows; top += P) {
            const int64_t count = least(P, rows - top);
            std::memset(sums, 0, count * BLOCK * 4);
            auto step = [&](auto size, int64_t q) __attribute__((always_inline)) {
                constexpr int N = decltype(size)::value;
                for (int64_t p = 0; p < count; ++p)
                    for (int64_t i = 0; i < N; ++i)
                        factors[p * N + i] = load(a + (q + i) * a_stride + top + p);
                nn_rows<T, LANES, N>(factors, count, b + q * b_stride + left, b_stride, width, sums,
                                     BLOCK, false);
            };
            int64_t q = 0;
            for (; q + Q <= depth; q += Q) step(std::integral_constant<int, Q>(), q);
            if (q + 4 <= depth) step(std::integral_constant<int, 4>(), q), q += 4;
            for (; q < depth; ++q) step(std::integral_constant<int, 1>(), q);
            for (int64_t p = 0; p < count; ++p) {
                const float* row = sums + p * BLOCK;
                if constexpr (Elements<T, LANES>::PARTS > 1) {
                    store_in_order<T, LANES>(row, width, ordered, false);
                    row = ordered;
                }
                squares += store_gradient_body(row, width, to + (top + p) * to_stride + left, add);
            }
        }
    }
    return squares;
}

// The functions that are compiled for each instruction set; all other code calls these.
#define FOR_ISA(NAME, TARGET, BODY)                 \
    template <class... Args>                        \
    TARGET static auto NAME(Args... args) {         \
        return BODY(args...);                       \
    }
#define DEFINE_ISA(NAME, TARGET, LANES)                                         \
    template <class T>                                                          \
    struct NAME {                                                               \
        using Codes = NAME##Dots;                                               \
        FOR_ISA(nt, TARGET, (nt_body<T, LANES>))                                \
        FOR_ISA(nn, TARGET, (nn_body<T, LANES>))                                \
        FOR_ISA(tn, TARGET, (tn_body<T, LANES>))                                \
        FOR_ISA(activate, TARGET, activate_body<T>)                             \
        FOR_ISA(activate_clamped, TARGET, activate_clamped_body<T>)             \
        FOR_ISA(activate_backward, TARGET, activate_backward_body<T>)           \
        FOR_ISA(store_rows, TARGET, store_rows_body<T>)                         \
        FOR_ISA(store_gradient, TARGET, store_gradient_body<T>)                 \
        FOR_ISA(add, TARGET, add_body)                                          \
        FOR_ISA(add_scaled, TARGET, add_scaled_body<T>)                         \
        FOR_ISA(dot, TARGET, dot_body<T>)                                       \
        FOR_ISA(read, TARGET, read_body)                                        \
        FOR_ISA(scale_tables, TARGET, scale_tables_body<T>)                     \
        FOR_ISA(scale_groups, TARGET, scale_groups_body<T>)                     \
        FOR_ISA(read_integers, TARGET, read_integers_body)                      \
        FOR_ISA(read_numbers, TARGET, read_numbers_body)                        \
    };

DEFINE_ISA(Generic, , 4)
#if HAVE_X86
DEFINE_ISA(Avx2, TARGET_AVX2, 8)
DEFINE_ISA(Avx512, TARGET_AVX512, 16)
#endif
#if HAVE_BF16
// Packed weights of four bits with token rows in bf16; everything else is as without.
template <class T>
struct Avx512WithBf16 : Avx512<T> {
    using Codes = Bf16Dots;
};
#endif

}  // namespace
