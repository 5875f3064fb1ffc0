"""Decoding steps read no value on the host, so that a CUDA graph can capture them."""

import traceback
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from tests.serve.decode.decoding import INTERPRETED, decoding
from tests.serve.test_every_family import NAMES, plain_model
from tests.slow import slow_names

pytestmark = INTERPRETED
_READS = "is_nonzero", "_local_scalar_dense", "aten.nonzero", "masked_select"


class Reads(TorchDispatchMode):
    """Records where the host reads a value, but for Triton's interpreter."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(func) for name in _READS):
            stack = traceback.extract_stack()[:-1]
            if not any("triton" in frame.filename for frame in stack):
                self.found.append(f"{func} in {stack[-1].filename}:{stack[-1].lineno}")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", slow_names(NAMES, *{*NAMES} - {"nemotron_h", "hy_v4", "phimoe"}))
def test_no_value_is_read(
    name: str,
    tmp_path: Path,
    steps: list[int],
    module_steps: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from overspill.serve.decode.module_step import ModuleStep
    from overspill.serve.decode.step import DecodeStep

    reads = Reads()
    for kind in (ModuleStep, DecodeStep):
        call: Any = kind.__call__

        def recorded(self: Any, batch: Any, call: Any = call) -> Any:
            with reads:
                return call(self, batch)

        monkeypatch.setattr(kind, "__call__", recorded)
    with decoding(plain_model(name), tmp_path, "gpu") as made:
        made.step()
        decode: Any = made.runner._decode
        assert not decode._refused
    assert steps + module_steps == [4]
    assert not reads.found
