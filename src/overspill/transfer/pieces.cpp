// Queues a copy from device to device through host memory, in pieces: while one arrives, the next
// one leaves. A call of the driver from Python takes several times as long as from here.

#include <algorithm>
#include <cstddef>
#include <cstdint>

// Functions of the CUDA driver. Each returns 0 or an error code.
struct Calls {
    int (*copy)(uint64_t to, uint64_t from, size_t bytes, void* stream);
    int (*record)(void* event, void* stream);
    int (*wait_event)(void* stream, void* event, unsigned flags);
};

extern "C" int overspill_copy_through(
    const Calls* calls, uint64_t to, uint64_t host, uint64_t from, size_t bytes, size_t piece,
    void* outwards, void* inwards, void* event) {
    for (size_t first = 0; first < bytes; first += piece) {
        size_t length = std::min(piece, bytes - first);
        int error = calls->copy(host + first, from + first, length, outwards);
        if (!error) error = calls->record(event, outwards);
        if (!error) error = calls->wait_event(inwards, event, 0);
        if (!error) error = calls->copy(to + first, host + first, length, inwards);
        if (error) return error;
    }
    return 0;
}
