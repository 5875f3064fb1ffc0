// Fills a request from the arguments of a call; chooses the instruction set.
#pragma once

#include "cpu_amx_tasks.h"
#include "cpu_runner.h"

namespace {

int best_isa() {
#if HAVE_AMX
    static const int best = best_vector_isa() == AVX512 && has_tiles() ? AMX : best_vector_isa();
#else
    static const int best = best_vector_isa();
#endif
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

TaskFunction task_function(int isa, bool bf16) {
#if HAVE_AMX
    if (isa == AMX && bf16) return amx_task;
#endif
    return bf16 ? vector_function<uint16_t>(isa) : vector_function<float>(isa);
}

// Allocates only if the request has never held as many experts.
void fill_request(Request& request, const GroupArgs& args) {
    Group& group = request.group;
    static_cast<GroupArgs&>(group) = args;
    group.weight_bytes = args.bf16 ? 2 : 4;
    const int isa = args.isa < 0 ? best_isa() : args.isa;
    const bool tiles = isa == AMX && args.bf16 && args.d % STEP == 0 && args.h % STEP == 0 &&
                       !args.transposed && !group.clamped();
    request.function = task_function(isa, args.bf16);
    request.experts.clear();
    for (int64_t i = 0; i < args.count; ++i) {
        const int64_t rows = args.stops[i] - args.starts[i];
        const bool packed = tiles && (args.backward || rows > MAX_VECTOR_ROWS);
        if (rows <= 0) continue;
        request.experts.push_back({args.records[i], args.starts[i], rows, packed});
        if (!args.gradients) continue;
        ExpertRows& own = request.experts.back();
        own.gradient = args.gradients[i];
        own.added = args.added[i];
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
    group.hidden_per_task =
        task_height(request, group.h, group.d * group.weight_bytes, group.gates());
    group.output_per_task = task_height(request, group.d, group.h * group.weight_bytes, 1);
}

std::unique_ptr<Request> make_request(const GroupArgs& args) {
    auto request = std::make_unique<Request>();
    fill_request(*request, args);
    return request;
}

}  // namespace
