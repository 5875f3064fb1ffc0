"""The decoding kernels as the compiler sees them."""

import os
import subprocess
import sys
from pathlib import Path

from tests.compute.decode.near import needs_triton

pytestmark = needs_triton


def test_kernels_compile() -> None:
    """Without the interpreter, which accepts code that the compiler rejects."""
    script = Path(__file__).parents[1] / "compile_decode.py"
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, str(script), "86", "90"]
    subprocess.run(command, env=environment, check=True, timeout=100, stdout=subprocess.DEVNULL)
