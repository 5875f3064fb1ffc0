"""Which uploader is chosen, and the native one on a GPU."""

import random
import threading
from pathlib import Path

import pytest
import torch

from overspill.core.errors import ConfigError
from overspill.core.expert_map import ExpertMap
from overspill.core.experts import ExpertShape
from overspill.tiers.layout import ALIGN, RecordLayout
from overspill.tiers.slab import device_slab
from overspill.tiers.store import ExpertStore, Part
from overspill.trace.recorder import Recorder
from overspill.transfer.new_uploader import new_uploader
from overspill.transfer.streams import CopyStream, record_event, wait_event
from overspill.transfer.upload_thread import upload_library
from overspill.transfer.uploader import Target
from tests.tiers.mixed import mixed_layout
from tests.transfer.fakes import CPU, LAYOUT, disk_store, host_store, rewrite, value_of


def made(kind: str, store: ExpertStore) -> str:
    slab = device_slab(1, LAYOUT.weight_bytes, CPU)
    stream = CopyStream("upload", CPU, Recorder(), None)
    uploader = new_uploader(store, slab, stream, 1, kind)
    uploader.close()
    return type(uploader).__name__


def test_without_a_gpu_the_native_uploader_is_used_only_if_asked_for() -> None:
    store = host_store(1)
    assert made("auto", store) == made("thread", store) == "ThreadUploader"
    if upload_library() is not None:
        assert made("native", store) == "NativeUploader"
    store.close()


def test_the_native_uploader_refuses_experts_on_disk(tmp_path: Path) -> None:
    store = disk_store(3, permanent=1, cache=1, folder=tmp_path)
    assert made("auto", store) == "ThreadUploader"
    with pytest.raises(ConfigError, match=r"uploader='native' .* disk .* uploader='auto'"):
        made("native", store)
    store.close()


@pytest.mark.parametrize("kind", ["thread", "native"])
@pytest.mark.parametrize("certain", [False, True])
def test_uploads_move_the_bytes_of_a_layer(kind: str, certain: bool) -> None:
    if kind == "native" and upload_library() is None:
        pytest.skip("no C++ compiler")
    pages = [1, 3, 2000]  # the largest records are uploaded in pieces
    layout = mixed_layout(pages)
    store = ExpertStore(len(pages), ExpertMap.whole(2), layout, 6, 0, pinned=False)
    for entry in store.places.entries:
        store.host(entry, Part.WEIGHTS).fill_(value_of(entry))
    slab, recorder = device_slab(3, layout.weight_bytes, CPU), Recorder()
    uploader = new_uploader(store, slab, CopyStream("upload", CPU, recorder, None), 3, kind)
    for first in range(2):
        slab.zero_()
        pairs = [(store.places.at(layer, first), (layer + first) % 3) for layer in range(3)]
        with store.sync.lock:
            uploader.set_targets([Target(*pair, "", certain) for pair in pairs])
        uploader.wait_issued(pairs, every=True)
        uploader.wait_idle()
        for entry, slot in pairs:
            size = pages[entry.id.layer] * ALIGN
            assert (slab[slot][:size] == value_of(entry)).all()
            assert not slab[slot][size:].any()
        assert recorder.counters()["upload"] == (first + 1) * sum(pages) * ALIGN
    uploader.close()
    store.close()


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(2))
def test_on_a_gpu_a_stream_that_waits_for_the_arrival_reads_the_current_weights(seed: int) -> None:
    """Under updates, dropped uploads and slow readers."""
    device, numbers = torch.device("cuda"), random.Random(seed)
    layout = RecordLayout(ExpertShape(512, 4096, gated=False), torch.bfloat16)
    store = ExpertStore(1, ExpertMap.whole(12), layout, 12, 0, pinned=True)
    store.memory.wait_allocated()
    for entry in store.places.entries:
        store.host(entry, Part.WEIGHTS).fill_(value_of(entry))
    slab = device_slab(6, layout.weight_bytes, device)
    stream = CopyStream("upload", device, Recorder(device=device), None)
    uploader = new_uploader(store, slab, stream, 6, "native")
    found, expected = [], []
    for _ in range(100):
        pairs = list(zip(numbers.sample(range(12), 6), range(6), strict=True))
        updated = [store.places.entries[expert] for expert in numbers.sample(range(12), 3)]
        torch.cuda.synchronize()  # no copy reads the records that are updated now
        for entry in updated:
            store.begin_update(entry)
        with store.sync.lock:
            certain = numbers.random() < 0.5
            uploader.set_targets(
                [Target(store.places.entries[e], s, "", certain) for e, s in pairs]
            )
        updates = threading.Thread(target=rewrite, args=(store, updated))
        updates.start()
        for expert, slot in pairs[: numbers.randrange(7)]:
            uploader.wait_issued([(store.places.entries[expert], slot)], every=True)
            with store.sync.lock:
                for event in uploader.end_events([slot]):
                    wait_event(device, event)
                torch.cuda._sleep(20_000)
                found.append(slab[slot][:: 1 << 16].clone())
                uploader.release([slot], record_event(device))
            expected.append(value_of(store.places.entries[expert]))
        updates.join()
    uploader.wait_idle()
    uploader.close()
    torch.cuda.synchronize()
    for sample, value in zip(found, expected, strict=True):
        assert (sample == value).all()
    store.close()
