"""The kernels as the compiler sees them."""

import os
import sys
from pathlib import Path

from tests.compute.decode.near import needs_triton
from tests.fork_server import fork_server

pytestmark = needs_triton
_IMPORTED = ("triton", "overspill.compute", "tests.compute")


def _compile() -> None:
    """Without the interpreter, which Triton chooses when it is imported. A forked process has torch
    imported already, which takes seconds."""
    os.environ.pop("TRITON_INTERPRET", None)
    for name in [name for name in sys.modules if name.startswith(_IMPORTED)]:
        if not name.startswith("triton._C"):  # a library, which is loaded once
            del sys.modules[name]
    from tests.compute import (
        compile_activation,
        compile_decode,
        compile_dropout,
        compile_grouped,
        compile_unpack,
    )

    compile_activation.main(["86"])
    compile_decode.main(["80", "90", "120", "89"])
    compile_dropout.main(["86"])
    compile_unpack.main(["80", "89", "90", "120"])
    compile_grouped.main(["86", str(99 * 1024)])  # with its shared memory


def test_kernels_compile_and_fit_the_shared_memory_of_capability_8_6(tmp_path: Path) -> None:
    """The interpreter accepts code that the compiler rejects. One process for all kernels."""
    log = tmp_path / "log"
    assert fork_server().run(_compile, log=log) == 0, log.read_text()
