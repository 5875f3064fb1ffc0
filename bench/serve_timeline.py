"""A timeline of some tokens: kernels and copies of the GPU, and experts that the CPU computes."""

import time
from pathlib import Path
from typing import Any

import torch

import overspill
from overspill.trace.perfetto import write_perfetto
from overspill.trace.picture import draw_timeline
from overspill.trace.spans import Span

_KINDS = {
    "expert": "experts", "linear": "linear", "attend": "attention", "combine": "attention",
    "rotate": "attention", "route": "router", "norm": "norm", "highest": "choose",
    "_migrate": "expert",
}  # fmt: skip


def record_tokens(llm: overspill.LLM, requests: int, tokens: int) -> list[Span]:
    """Record the work during some tokens of some requests; times are those of perf_counter_ns."""
    params = overspill.SamplingParams(max_tokens=tokens, temperature=1.0, ignore_eos=True)
    prompts = [[1, 2, 3 + number] for number in range(requests)]
    llm.generate(prompts, params)
    llm.take_spans()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        llm.generate(prompts, params)
        torch.cuda.synchronize()
    # the profiler has the times of the wall clock
    ahead = time.time_ns() - time.perf_counter_ns()
    spans = llm.take_spans()
    results: Any = profiler.profiler
    for event in results.kineto_results.events():
        if event.device_type() != torch.autograd.DeviceType.CUDA:
            continue
        name = event.name()
        row = "upload" if "HtoD" in name or "_migrate" in name else "compute"
        label = next((label for key, label in _KINDS.items() if key in name), name[:20])
        start = event.start_ns() - ahead
        spans.append(Span(row, label, start, start + event.duration_ns()))
    return spans


def draw_tokens(spans: list[Span], path: Path, title: str, tokens: int = 2) -> None:
    """Some tokens from the middle: a token ends with the choice of the next one."""
    ends = sorted(s.end_ns for s in spans if s.name == "choose")[1::2]  # two kernels
    first = len(ends) // 2
    since, until = ends[first], ends[first + tokens]
    shown = [s for s in spans if s.end_ns > since and s.start_ns < until]
    draw_timeline(shown, path.with_suffix(".png"), title)
    write_perfetto(shown, path.with_suffix(".json.gz"))
