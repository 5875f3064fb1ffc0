"""The choice of the uploader for a store and a device."""

import logging

from torch import Tensor

from overspill.core.errors import ConfigError
from overspill.tiers.store import ExpertStore
from overspill.transfer.driver import cuda_upload_calls
from overspill.transfer.native_uploader import NativeUploader
from overspill.transfer.streams import CopyStream
from overspill.transfer.thread_uploader import ThreadUploader
from overspill.transfer.upload_thread import HostCalls, UploadCalls, upload_library
from overspill.transfer.uploader import Uploader

_log = logging.getLogger("overspill")


def new_uploader(
    store: ExpertStore, slab: Tensor, stream: CopyStream, n_slots: int, kind: str = "auto"
) -> Uploader:
    """Return the native uploader where it works and, on a GPU, pays; else the thread uploader."""
    reason = "the uploader is set to 'thread'" if kind == "thread" else _why_not_native(store)
    if reason is None and kind == "auto" and stream.stream is None:
        return ThreadUploader(store, slab, stream, n_slots)  # nothing to gain on a CPU
    calls: UploadCalls | None = None
    if reason is None:
        calls = HostCalls() if stream.stream is None else cuda_upload_calls(stream.stream)
        if calls is None:
            reason = "the CUDA driver lacks 64-bit stream memory operations"
    if calls is not None:
        return NativeUploader(store, slab, stream, n_slots, calls)
    if kind == "native":
        raise ConfigError(f"uploader='native' is not possible: {reason}; use uploader='auto'")
    if stream.stream is not None:
        _log.info("uploads are issued by a Python thread, which is slower: %s", reason)
    return ThreadUploader(store, slab, stream, n_slots)


def _why_not_native(store: ExpertStore) -> str | None:
    if store.places.disk_slots:
        return "experts on disk change their host slots"
    if upload_library() is None:
        return "there is no C++ compiler"
    return None
