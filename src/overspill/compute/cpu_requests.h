// Fills a request from the arguments of a call; chooses the instruction set.
#pragma once

#include "cpu_amx_tasks.h"
#include "cpu_executor.h"

namespace {

int best_isa() {
    static const int best = [] {
        const int vectors = best_vector_isa();
#if HAVE_BF16
        if (vectors < AVX512 || !__builtin_cpu_supports("avx512bf16")) return vectors;
#if HAVE_AMX
        if (has_tiles()) return int(AMX);
#endif
        return int(AVX512_BF16);
#else
        return vectors;
#endif
    }();
    return best;
}

template <class T>
TaskFunction vector_function(int isa) {
#if HAVE_X86
    if (isa >= AVX512) return vector_task<T, Avx512<T>>;
    if (isa == AVX2) return vector_task<T, Avx2<T>>;
#endif
    return vector_task<T, Generic<T>>;
}

template <class T>
TaskFunction packed_function(int isa) {
#if HAVE_BF16
    if (isa >= AVX512_BF16 && sizeof(T) == 2) return packed_task<T, Avx512WithBf16<T>>;
#endif
#if HAVE_X86
    if (isa >= AVX512) return packed_task<T, Avx512<T>>;
    if (isa == AVX2) return packed_task<T, Avx2<T>>;
#endif
    return packed_task<T, Generic<T>>;
}

TaskFunction task_function(int isa, bool bf16, bool packed) {
#if HAVE_AMX
    if (isa == AMX && bf16) return amx_task;
#endif
    if (packed) return bf16 ? packed_function<uint16_t>(isa) : packed_function<float>(isa);
    return bf16 ? vector_function<uint16_t>(isa) : vector_function<float>(isa);
}

// Allocates only if the request has never held as many experts.
void fill_request(Request& request, const GroupArgs& args) {
    Group& group = request.group;
    static_cast<GroupArgs&>(group) = args;
    group.weight_bytes = args.bf16 ? 2 : 4;
    const int isa = args.isa < 0 ? best_isa() : args.isa;
    const bool tiles = isa == AMX && args.bf16 && args.d % STEP == 0 && args.h % STEP == 0 &&
                       !args.transposed && !group.clamped() && !group.has_low_rank();
    request.function = task_function(isa, args.bf16, args.format);
    for (const int tensor : {W_IN, W_OUT})
        group.ordered[tensor] = args.format && can_order(*args.format, tensor, isa);
    const bool fuses = group.ordered[W_IN] || group.ordered[W_OUT];
    request.experts.clear();
    for (int64_t i = 0; i < args.count; ++i) {
        const int64_t rows = args.stops[i] - args.starts[i];
        const bool tiled = tiles && (args.backward || rows > MAX_VECTOR_ROWS);
        if (rows <= 0) continue;
        const bool fused = fuses && !tiled && rows <= FUSED_ROWS;
        request.experts.push_back({args.records[i], args.starts[i], rows, tiled, fused});
        if (!args.gradients) continue;
        ExpertRows& own = request.experts.back();
        own.gradient = args.gradients[i];
        own.gradient_kind = args.gradient_kinds[i];
        own.square = args.squares[i];
    }
    if (args.gradients) {
        request.square_shares.resize(request.experts.size() * group.square_shares());
        double* shares = request.square_shares.data();
        for (ExpertRows& own : request.experts) {
            own.square_shares = shares;
            shares += group.square_shares();
        }
    }
    if (group.transposed) {
        const int64_t alternate = group.clamped() ? 2 : 1;  // gate and up
        group.hidden_per_task = task_width(request, alternate * group.h) / alternate;
        group.output_per_task = task_width(request, group.d);
        return;
    }
    group.hidden_per_task = task_height(request, group.h, group.row_bytes(W_IN), group.gates());
    group.output_per_task = task_height(request, group.d, group.row_bytes(W_OUT), 1);
}

std::unique_ptr<Request> make_request(const GroupArgs& args) {
    auto request = std::make_unique<Request>();
    fill_request(*request, args);
    return request;
}

}  // namespace
