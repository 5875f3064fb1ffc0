"""The recorder: on, off, from many threads, and against a GPU that is late."""

import threading
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from overspill.trace.recorder import ClockBase, GpuClock, Recorder, Span


@dataclass
class FakeEvent:
    """An event that the GPU passes at `ms` after the base, once `done`."""

    ms: float
    done: bool = True

    def query(self) -> bool:
        return self.done

    def elapsed_time(self, other: "FakeEvent") -> float:
        assert self.done, "asked before the GPU passed the start"
        assert other.done, "asked before the GPU passed the end"
        return other.ms - self.ms


def started(capacity: int = 1000, base_ns: int = 5_000_000) -> Recorder:
    """A recorder that is on and whose GPU clock stood at 0 at `base_ns`."""
    event: Any = FakeEvent(0.0)
    recorder = Recorder(capacity, read_clocks=lambda: ClockBase(event, base_ns))
    recorder.start()
    return recorder


def device_span(recorder: Recorder, name: str, start: FakeEvent, end: FakeEvent) -> None:
    fakes: list[Any] = [start, end]
    recorder.device_span("upload", name, fakes[0], fakes[1], bytes=8)


def test_a_span_times_its_body() -> None:
    recorder = Recorder()
    recorder.start()
    before = time.perf_counter_ns()
    with recorder.span("main", "sleep", bytes=7):
        time.sleep(0.01)
    after = time.perf_counter_ns()
    (span,) = recorder.spans()
    assert span[:2] == ("main", "sleep")
    assert span.bytes == 7
    assert before <= span.start_ns < span.end_ns <= after
    assert span.end_ns - span.start_ns >= 9_000_000


def test_a_span_whose_body_fails_is_kept_and_the_error_goes_on() -> None:
    recorder = Recorder()
    recorder.start()
    with pytest.raises(KeyError), recorder.span("main", "fails"):
        raise KeyError
    assert [span.name for span in recorder.spans()] == ["fails"]


def test_off_it_stores_nothing_but_counts() -> None:
    recorder = Recorder()
    with recorder.span("main", "unseen"):
        recorder.add_bytes("upload", 3)
    device_span(recorder, "unseen", FakeEvent(0), FakeEvent(1))
    recorder.add_bytes("upload", 4)
    assert recorder.spans() == []
    assert recorder.collect() == 0
    assert recorder.counters() == {"upload": 7}


def test_off_a_span_makes_no_object() -> None:
    recorder = Recorder()
    assert recorder.span("main", "a") is recorder.span("upload", "b", bytes=1)


def test_stop_ends_recording_and_clear_forgets() -> None:
    recorder = Recorder()
    recorder.start()
    with recorder.span("main", "kept"):
        recorder.stop()
    with recorder.span("main", "unseen"):
        pass
    assert [span.name for span in recorder.spans()] == ["kept"]
    recorder.clear()
    assert recorder.spans() == []


def test_only_the_newest_spans_are_kept() -> None:
    recorder = Recorder(capacity=3)
    recorder.start()
    for number in range(10):
        with recorder.span("main", str(number)):
            pass
    assert [span.name for span in recorder.spans()] == ["7", "8", "9"]
    with pytest.raises(ValueError, match="capacity=0"):
        Recorder(capacity=0)


def test_threads_lose_no_span_and_no_byte() -> None:
    recorder = Recorder()
    recorder.start()
    began = time.perf_counter_ns()
    done = threading.Event()
    failures: list[BaseException] = []

    def work(row: str) -> None:
        for number in range(500):
            with recorder.span(row, str(number)):
                recorder.add_bytes("all", 2)

    def read() -> None:
        try:
            while not done.is_set():
                recorder.spans()
                busy = recorder.busy(began, time.perf_counter_ns())
                assert all(0 <= share <= 1 for share in busy.values())
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(f"row {n}",)) for n in range(8)]
    reader = threading.Thread(target=read)
    for thread in (*workers, reader):
        thread.start()
    for thread in workers:
        thread.join()
    done.set()
    reader.join()
    assert failures == []
    spans = recorder.spans()
    assert len(spans) == 8 * 500
    assert recorder.counters() == {"all": 8 * 500 * 2}
    for n in range(8):
        assert sorted(int(s.name) for s in spans if s.row == f"row {n}") == list(range(500))


def test_busy_looks_only_at_its_window() -> None:
    recorder = Recorder()
    recorder.start()
    with recorder.span("optimizer", "before"):
        time.sleep(0.001)
    since = time.perf_counter_ns()
    time.sleep(0.001)
    with recorder.span("upload", "outer"), recorder.span("upload", "inner"):
        time.sleep(0.001)
    until = time.perf_counter_ns()
    busy = recorder.busy(since, until)
    assert busy["optimizer"] == 0.0
    outer = next(span for span in recorder.spans() if span.name == "outer")
    assert busy["upload"] == pytest.approx((outer.end_ns - outer.start_ns) / (until - since))
    assert recorder.busy(since - 10_000_000_000, until)["optimizer"] > 0.0


def test_device_spans_are_resolved_when_the_gpu_has_passed_them() -> None:
    recorder = started(base_ns=5_000_000)
    late = FakeEvent(4.0, done=False)
    device_span(recorder, "late", FakeEvent(2.0), late)
    device_span(recorder, "ended", FakeEvent(1.0), FakeEvent(1.5))
    assert recorder.collect() == 1
    assert recorder.spans() == [Span("upload", "ended", 6_000_000, 6_500_000, 8)]
    late.done = True
    assert recorder.collect() == 0
    assert [span.name for span in recorder.spans()] == ["ended", "late"]
    assert recorder.spans()[1].end_ns == 9_000_000


def test_open_device_spans_are_bounded_too() -> None:
    recorder = started(capacity=4)
    events = [FakeEvent(float(n), done=False) for n in range(10)]
    for n, event in enumerate(events):
        device_span(recorder, str(n), event, event)
        assert recorder.collect() <= 4
    for event in events:
        event.done = True
    assert [span.name for span in recorder.spans()] == ["6", "7", "8", "9"]


def test_two_threads_resolve_each_device_span_once() -> None:
    recorder = started(capacity=10_000)
    for n in range(2000):
        device_span(recorder, str(n), FakeEvent(float(n)), FakeEvent(n + 0.5))
    threads = [threading.Thread(target=recorder.collect) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(recorder.spans()) == 2000


@pytest.mark.gpu
def test_device_spans_lie_on_the_hosts_clock() -> None:
    recorder = Recorder()
    recorder.start()
    stream = torch.cuda.Stream()
    a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    x = torch.randn(8192, 8192, device="cuda")
    for _ in range(3):
        x @ x
    torch.cuda.synchronize()
    before = time.perf_counter_ns()
    with torch.cuda.stream(stream):
        a.record()
        for _ in range(10):
            x @ x
        b.record()
    recorder.device_span("compute", "matmul", a, b)
    assert recorder.collect() == 1, "the host is far ahead of the GPU here"
    stream.synchronize()
    after = time.perf_counter_ns()
    (span,) = recorder.spans()
    assert before - 100_000 <= span.start_ns < span.end_ns <= after + 100_000
    assert span.end_ns - span.start_ns == pytest.approx(a.elapsed_time(b) * 1e6, abs=2_000)
    assert recorder.busy(before, after)["compute"] > 0.8


@pytest.mark.gpu
def test_the_clocks_are_read_without_waiting_for_work() -> None:
    clock = GpuClock(None)
    clock.read()
    a, b, c = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    x = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    a.record()
    for _ in range(20):
        x @ x
    b.record()
    base = clock.read()
    assert not b.query(), "reading the clocks must not wait for running work"
    recorder = Recorder(read_clocks=lambda: base)
    recorder.start()
    # a span that began before its base was read
    recorder.device_span("compute", "early", a, b)
    torch.cuda.synchronize()
    (early,) = recorder.spans()
    assert early.start_ns < base.host_ns
    c.record()
    recorder.device_span("compute", "late", b, c)
    torch.cuda.synchronize()
    assert recorder.spans()[1].start_ns == pytest.approx(early.end_ns, abs=2_000)


@pytest.mark.gpu
def test_a_mark_is_set_when_the_gpu_has_done_what_came_before() -> None:
    recorder = Recorder()
    x = torch.randn(8192, 8192, device="cuda")
    x @ x
    torch.cuda.synchronize()
    recorder.start()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(10):
        x @ x
    end.record()
    recorder.device_span("compute", "matmul", start, end)
    recorder.mark("step")
    torch.cuda.synchronize()
    work, mark = recorder.spans()
    assert (mark.row, mark.name) == ("compute", "step")
    assert mark.start_ns == mark.end_ns == pytest.approx(work.end_ns, abs=50_000)
