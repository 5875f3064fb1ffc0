// Queues a copy from device to device through host memory, which takes a given time. A call of the
// driver from Python takes several times as long as from here.

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace {

// The first functions are those of the CUDA driver. Each returns 0 or an error code.
struct Link {
    int (*copy)(uint64_t to, uint64_t from, size_t bytes, void* stream);
    int (*record)(void* event, void* stream);
    int (*wait_event)(void* stream, void* event, unsigned flags);
    int (*launch)(
        void* kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
        unsigned block_y, unsigned block_z, unsigned shared, void* stream, void** arguments,
        void** extra);
    void* begin;  // kernels of clock.ptx, or null if the link has no rate
    void* hold;
    uint64_t clock;  // device memory for them
    void* outwards;  // streams
    void* inwards;
    void* handover;  // an event
    size_t largest;  // bytes of a piece, which arrives while the next one leaves
    size_t smallest;
};

int launch(const Link& link, void* kernel, uint64_t nanoseconds) {
    if (kernel == nullptr) return 0;
    uint64_t clock = link.clock;
    void* arguments[] = {&clock, &nanoseconds};  // the first kernel has one
    return link.launch(kernel, 1, 1, 1, 1, 1, 1, 0, link.inwards, arguments, nullptr);
}

// Half of what remains, so that little is on its way when the last byte has left.
size_t piece_of(const Link& link, size_t remaining) {
    return std::min({std::max(remaining / 2, link.smallest), link.largest, remaining});
}

int copy_pieces(const Link& link, uint64_t to, uint64_t host, uint64_t from, size_t bytes) {
    size_t length = 0;
    for (size_t first = 0; first < bytes; first += length) {
        length = piece_of(link, bytes - first);
        int error = link.copy(host + first, from + first, length, link.outwards);
        if (!error) error = link.record(link.handover, link.outwards);
        if (!error) error = link.wait_event(link.inwards, link.handover, 0);
        if (!error) error = link.copy(to + first, host + first, length, link.inwards);
        if (error) return error;
    }
    return 0;
}

}  // namespace

// After the event `ready`, for which the inward stream waits already, and after `free`, which is
// recorded again when the host memory is free.
extern "C" int overspill_link_copy(
    const Link* link, uint64_t to, uint64_t host, uint64_t from, size_t bytes,
    uint64_t nanoseconds, void* ready, void* free) {
    int error = launch(*link, link->begin, 0);
    if (!error) error = link->wait_event(link->outwards, ready, 0);
    if (!error) error = link->wait_event(link->outwards, free, 0);
    if (!error) error = copy_pieces(*link, to, host, from, bytes);
    if (!error) error = link->record(free, link->inwards);
    if (!error) error = launch(*link, link->hold, nanoseconds);
    return error;
}
