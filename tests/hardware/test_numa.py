import os
import threading
from pathlib import Path

import pytest

from overspill.core.errors import ConfigError
from overspill.hardware.numa import NumaBinding, bind, bind_rank, near_cores

GPUS = [f"0000:{bus:02x}:00.0" for bus in range(4)]
"""The first two are on NUMA node 0, the others on node 1."""


def _write(file: Path, text: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """/sys of two sockets. Each has a NUMA node of 8 cores with two threads each, numbered as Linux
    does: 0-7,16-23 and 8-15,24-31. Three cores share a cache, four the next one."""
    _write(tmp_path / "devices/system/node/online", "0-1")
    for gpu, bus in enumerate(GPUS):
        _write(tmp_path / "bus/pci/devices" / bus / "numa_node", gpu // 2)
    for node, cores in enumerate(("0-7,16-23", "8-15,24-31")):
        _write(tmp_path / f"devices/system/node/node{node}/cpulist", cores)
    for number in range(32):
        core, cpu = number % 16, tmp_path / f"devices/system/cpu/cpu{number}"
        _write(cpu / "topology/physical_package_id", core // 8)
        _write(cpu / "topology/thread_siblings_list", f"{core},{core + 16}")
        first, last = (core // 8 * 8, core // 8 * 8 + 2) if core % 8 < 3 else (core // 8 * 8 + 3, 0)
        last = last or first + 4
        _write(cpu / "cache/index0/level", 1)
        _write(cpu / "cache/index0/shared_cpu_list", f"{core},{core + 16}")
        _write(cpu / "cache/index3/level", 3)
        _write(cpu / "cache/index3/shared_cpu_list", f"{first}-{last},{first + 16}-{last + 16}")
    return tmp_path


def _both(*cores: int) -> set[int]:
    return {thread for core in cores for thread in (core, core + 16)}


@pytest.mark.parametrize(
    ("binding", "expected"),
    [
        ("node", [_both(*range(8))] * 2 + [_both(*range(8, 16))] * 2),
        ("socket", [_both(*range(8))] * 2 + [_both(*range(8, 16))] * 2),
        ("exclusive", [_both(*range(at, at + 4)) for at in (0, 4, 8, 12)]),
        (
            "core-complex",
            [_both(*range(3, 8)), _both(0, 1, 2), _both(*range(11, 16)), _both(8, 9, 10)],
        ),
    ],
)
def test_each_rank_gets_cores_near_its_gpu(
    machine: Path, binding: NumaBinding, expected: list[set[int]]
) -> None:
    assert near_cores(binding, GPUS, range(32), machine) == expected


def test_a_socket_may_have_several_nodes(machine: Path) -> None:
    for number in range(32):
        _write(machine / f"devices/system/cpu/cpu{number}/topology/physical_package_id", 0)
    assert near_cores("node", GPUS[:1], range(32), machine) == [_both(*range(8))]
    assert near_cores("socket", GPUS[:1], range(32), machine) == [{*range(32)}]


def test_only_allowed_cores_are_used(machine: Path) -> None:
    assert near_cores("exclusive", GPUS[:2], range(4), machine) == [{0, 1}, {2, 3}]
    with pytest.raises(ConfigError, match="no core of NUMA node 1, which has GPU 2"):
        near_cores("node", GPUS, range(4), machine)
    with pytest.raises(ConfigError, match="NUMA node 0 has 1 cores for 2 ranks; give node"):
        near_cores("exclusive", GPUS, [0, 16, 8], machine)


def test_gpus_whose_node_the_system_does_not_tell_are_refused(machine: Path) -> None:
    for text in ("-1", None):
        file = machine / "bus/pci/devices" / GPUS[1] / "numa_node"
        file.unlink() if text is None else file.write_text(text)
        with pytest.raises(ConfigError, match="does not tell the NUMA node of the GPU at 0000:01:"):
            near_cores("node", GPUS, range(32), machine)


def test_a_rank_knows_how_many_share_its_cores(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(32)})
    monkeypatch.setattr("overspill.hardware.numa.bind", bound.append)
    assert bind_rank("node", GPUS, 2, machine) == 2
    assert bind_rank("exclusive", GPUS, 2, machine) == 1
    assert bound == [_both(*range(8, 16)), _both(*range(8, 12))]


def test_a_machine_with_one_node_says_that_nothing_is_bound(
    machine: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _write(machine / "devices/system/node/online", "0")
    for sys in (machine, machine / "none"):
        assert bind_rank("node", GPUS, 2, sys) is None
    message = "--numa-binding node: this machine has one NUMA node; ranks are not bound"
    assert [record.message for record in caplog.records] == [message] * 2


def test_all_threads_of_a_process_are_bound() -> None:
    before, go_on = os.sched_getaffinity(0), threading.Event()
    found: list[set[int]] = []

    def run() -> None:
        go_on.wait(10)
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        bind({min(before)})
        go_on.set()
        thread.join()
        assert [os.sched_getaffinity(0), *found] == [{min(before)}] * 2
    finally:
        bind(before)
