"""The kernels as the compiler sees them."""

import os
import subprocess
import sys

from tests.compute.decode.near import needs_triton

pytestmark = needs_triton
CODE = """
from tests.compute import compile_decode, compile_grouped

compile_decode.main(["86", "90"])
compile_grouped.main(["86", str(99 * 1024)])  # with its shared memory
"""


def test_kernels_compile_and_fit_the_shared_memory_of_capability_8_6() -> None:
    """Without the interpreter, which accepts code that the compiler rejects. One process for all
    kernels: it needs seconds to import torch."""
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", CODE]
    subprocess.run(command, env=environment, check=True, timeout=250, stdout=subprocess.DEVNULL)
