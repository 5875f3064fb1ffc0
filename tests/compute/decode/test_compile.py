"""The decoding kernels as the compiler sees them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compute.decode.near import needs_triton

pytestmark = needs_triton


@pytest.mark.parametrize("capability", ["86", "90"])
def test_kernels_compile(capability: str) -> None:
    """Without the interpreter, which accepts code that the compiler rejects."""
    script = Path(__file__).parents[1] / "compile_decode.py"
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, str(script), capability]
    subprocess.run(command, env=environment, check=True, timeout=100, stdout=subprocess.DEVNULL)
