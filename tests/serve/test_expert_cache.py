"""Copies of experts on the device during decoding: what steps find is right, whatever moves."""

import copy
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import overspill
from overspill.moe.engine import Engine
from overspill.plan.eviction import LFU, LRU, Policy
from overspill.serve.decode.cache import ExpertCache
from overspill.serve.decode.table import ExpertTable
from tests.models.huggingface.families import FAMILIES, make_model
from tests.models.huggingface.gguf import cases as gguf
from tests.models.huggingface.oracle import offloaded

LAYERS, EXPERTS = 2, 4


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    (family,) = (each for each in FAMILIES if each.name == "mixtral")
    with offloaded(make_model(family).eval(), "host", tmp_path) as model:
        assert (model.overspill.n_layers, model.overspill.n_experts) == (LAYERS, EXPERTS)
        yield model.overspill


@pytest.fixture
def mixed(tmp_path: Path) -> Iterator[Engine]:
    """Records of the second layer are larger."""
    gguf.make_case(gguf.CASES["mixtral"], tmp_path / "model.gguf", gguf.mixed)
    engine: Engine = gguf.load(tmp_path / "model.gguf", packed=True).overspill
    assert (engine.n_layers, engine.n_experts) == (LAYERS, EXPERTS)
    assert engine.layout.weight_bytes_in(0) < engine.layout.weight_bytes_in(1)
    yield engine
    engine.close()


class Done:
    """A copy that has ended."""

    def done(self) -> bool:
        return True


def weights_of(engine: Engine, layer: int, expert: int) -> Tensor:
    weights = engine.addresses.host_weights(layer, expert, Done())
    assert weights is not None
    return weights


class Steps:
    """A table and a cache as a decoding step uses them."""

    def __init__(
        self, engine: Engine, n_slots: int, chunk: int = 8, policy: type[Policy] = LRU
    ) -> None:
        """Memory is allocated for `chunk` slots at once."""
        self.engine = engine
        self.table = ExpertTable(engine)
        size = chunk * engine.layout.weight_bytes
        self.cache = ExpertCache(engine, self.table, n_slots, policy(LAYERS, EXPERTS), size)
        self.weights = {
            (layer, expert): weights_of(engine, layer, expert).clone()
            for layer in range(LAYERS)
            for expert in range(EXPERTS)
        }
        self.follow()

    def follow(self) -> None:
        self.cache.follow_moves(self.engine.addresses.device_addresses())

    def run(self, *used: tuple[int, ...]) -> set[tuple[int, int]]:
        """A step that uses these experts of each layer; what it finds on the device."""
        self.cache.before_step()
        offsets = self.table.offsets.clone()
        found = {
            (layer, expert)
            for layer in range(LAYERS)
            for expert in range(EXPERTS)
            if self.is_present(offsets, layer, expert)
        }
        for key in found:
            weights = self.weights[key]
            assert torch.equal(self.read(int(offsets[key]), weights.numel()), weights)
        self.cache.after_step(torch.tensor([used] * 1, dtype=torch.int32).transpose(0, 1))
        return found

    @staticmethod
    def is_present(offsets: Tensor, layer: int, expert: int) -> bool:
        return int(offsets[layer, expert]) > -(1 << 61)

    def read(self, offset: int, numel: int) -> Tensor:
        """The memory of a record, as a kernel would find it."""
        base = self.table.base
        address = base.data_ptr() + offset * base.element_size()
        size = numel * base.element_size()
        buffer = (np.ctypeslib.ctypes.c_char * size).from_address(address)  # type: ignore[attr-defined]
        return torch.frombuffer(bytearray(buffer), dtype=base.dtype)


def test_a_used_expert_is_on_the_device_when_its_upload_has_ended(engine: Engine) -> None:
    steps = Steps(engine, 4)
    assert steps.run((0, 1), (2, 3)) == set()
    assert list(steps.cache.hits_L) == [0, 0]
    assert steps.run((0, 1), (2, 3)) == {(0, 0), (0, 1), (1, 2), (1, 3)}
    assert list(steps.cache.hits_L) == [2, 2]
    steps.run((0, 1), (2, 0))
    assert list(steps.cache.hits_L) == [4, 3]
    assert list(steps.cache.uses_L) == [6, 6]


def test_the_expert_with_the_lowest_score_makes_room(engine: Engine) -> None:
    steps = Steps(engine, 2)
    for _ in range(2):
        steps.run((0,), (0,))
    for _ in range(2):  # a score that is a little higher does not suffice
        assert steps.run((1,), (0,)) == {(0, 0), (1, 0)}
    assert steps.run((1,), (0,)) == {(0, 1), (1, 0)}


@pytest.mark.parametrize(("policy", "stays"), [(LRU, 1), (LFU, 0)])
def test_the_least_recently_or_the_least_frequently_used_expert_leaves(
    engine: Engine, policy: type[Policy], stays: int
) -> None:
    """Expert 0 is used often, then expert 1 a few times, and then only expert 2."""
    steps = Steps(engine, 3, policy=policy)  # one is always that of the other layer
    for expert in [0] * 8 + [1] * 3:
        steps.run((expert,), (0,))
    assert steps.run((2,), (0,)) == {(0, 0), (0, 1), (1, 0)}
    for _ in range(5):
        found = steps.run((2,), (0,))
    assert found == {(0, stays), (0, 2), (1, 0)}


@pytest.mark.parametrize("seed", range(6))
def test_any_routing_finds_the_right_weights_and_uses_no_more_slots(
    engine: Engine, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    n_slots = int(generator.integers(1, 8))
    steps = Steps(engine, n_slots, chunk=int(generator.integers(1, 4)))
    assert steps.cache.n_slots == n_slots
    for number in range(40):
        used = [tuple(generator.integers(0, EXPERTS, 2).tolist()) for _ in range(LAYERS)]
        assert len(steps.run(*used)) <= n_slots
        if number == 20 and n_slots > 1:
            assert steps.cache.shrink()
            assert steps.cache.n_slots < n_slots
            n_slots = steps.cache.n_slots
    assert steps.cache.hits_L.sum() > 0 or n_slots == 0


@pytest.mark.parametrize("seed", range(4))
def test_slots_have_the_sizes_of_the_experts(mixed: Engine, seed: int) -> None:
    generator, sizes = (
        np.random.default_rng(seed),
        [mixed.layout.weight_bytes_in(n) for n in (0, 1)],
    )
    n_slots = int(generator.integers(1, 9))
    steps = Steps(mixed, n_slots, chunk=int(generator.integers(1, 4)), policy=LFU)
    cache = steps.cache
    large = (n_slots + 1) // 2
    assert (cache.n_slots, cache.nbytes) == (
        n_slots,
        (n_slots - large) * sizes[0] + large * sizes[1],
    )
    for number in range(40):
        used = [tuple(generator.integers(0, EXPERTS, 2).tolist()) for _ in range(LAYERS)]
        found = steps.run(*used)
        assert sum(layer == 1 for layer, _ in found) <= large
        if number == 20 and n_slots > 3:
            assert cache.shrink()
            large = (cache.n_slots + 1) // 2
    assert cache.hits_L[0] > 0
    assert cache.hits_L[1] > 0 or large == 0


def test_slots_go_to_the_most_used_records_that_they_can_hold(mixed: Engine) -> None:
    steps = Steps(mixed, 3, policy=LFU)  # two slots are large, one is small
    for _ in range(8):
        found = steps.run((0, 1), (0, 0))
    assert found == {(0, 0), (0, 1), (1, 0)}
    for _ in range(30):
        found = steps.run((0, 0), (0, 1))
    assert found == {(0, 0), (1, 0), (1, 1)}
    for _ in range(30):
        found = steps.run((0, 1), (0, 0))
    assert found == {(0, 0), (0, 1), (1, 0)}


def test_memory_is_given_back_chunk_by_chunk(engine: Engine) -> None:
    steps = Steps(engine, 5, chunk=2)
    for _ in range(3):
        steps.run((0, 1), (2, 3))
    for left in (4, 2, 0):
        assert steps.cache.shrink()
        assert steps.cache.n_slots == left
        assert steps.cache.nbytes == left * engine.layout.weight_bytes
        assert len(steps.run((0, 1), (2, 3))) <= left
    assert not steps.cache.shrink()


def test_a_closed_cache_has_no_memory(engine: Engine) -> None:
    steps = Steps(engine, 5, chunk=2)
    for _ in range(3):
        steps.run((0, 1), (2, 3))
    memory = weakref.ref(steps.cache._slabs[0])
    for _ in range(2):
        steps.cache.close()
        assert steps.cache.nbytes == 0
        assert memory() is None


def test_without_slots_nothing_is_uploaded(engine: Engine) -> None:
    steps = Steps(engine, 0)
    assert not steps.cache.shrink()
    for _ in range(4):
        assert steps.run((0, 1), (2, 3)) == set()


def test_experts_that_move_to_the_device_free_their_slots(engine: Engine) -> None:
    steps = Steps(engine, 4)
    for _ in range(3):
        steps.run((0, 1), (2, 3))
    engine.set_residents([2, 1])
    resident = {(layer, e) for layer, ids in enumerate(engine.addresses.resident) for e in ids}
    steps.follow()
    found = steps.run((2, 3), (0, 1))
    assert found == resident | {(0, 0), (0, 1), (1, 2), (1, 3)}
    engine.set_residents([0, 0])
    steps.follow()
    uploaded = {(0, 2), (0, 3), (1, 1)}  # the step before has missed them
    assert steps.run((2, 3), (0, 1)) <= found - resident | uploaded
    for _ in range(2):
        found = steps.run((2, 3), (0, 1))
    assert len(found) == 4


def test_a_table_has_the_numbers_of_the_last_change(engine: Engine) -> None:
    table = ExpertTable(engine)
    for round_ in range(10):  # more often than there are copies
        table.set(1, 2, table.base.data_ptr() + round_ * table.base.element_size())
        table.apply()
        before: Any = copy.deepcopy(table.offsets)
        table.apply()
        assert torch.equal(before, table.offsets)
        assert int(table.offsets[1, 2]) == round_
    table.set(1, 2, None)
    assert int(table.offsets[1, 2]) == 9  # not before it is applied
    table.apply()
    assert not table.present.any()


def test_a_failed_upload_loses_no_slot(tmp_path: Path) -> None:
    (family,) = (each for each in FAMILIES if each.name == "mixtral")
    uploads, fails = [], {2}

    def inject(kind: str) -> None:
        uploads.append(kind)
        if len(uploads) in fails:
            raise OSError("injected")

    settings = overspill.Settings(inject=inject)
    with offloaded(make_model(family).eval(), "host", tmp_path, settings) as model:
        steps = Steps(model.overspill, 4)
        with pytest.raises(OSError, match="injected"):
            steps.run((0, 1), (2, 3))
        assert uploads == ["upload"] * 2
        assert steps.run((0, 1), (2, 3)) == set()
        assert steps.run((0, 1), (2, 3)) == {(0, 0), (0, 1), (1, 2), (1, 3)}
