"""Records: what is written to an expert is read from it alone, in every kind of memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from overspill.core.errors import OrderError
from overspill.core.expert_map import ExpertMap
from overspill.core.experts import ExpertId, ExpertShape
from overspill.moe.records import ExpertRecords
from overspill.moe.residents.memory import Residents
from overspill.tiers.entry import Part
from overspill.tiers.layout import RecordLayout
from overspill.tiers.store import ExpertStore

LAYOUT = RecordLayout(ExpertShape(8, 4, gated=True), torch.bfloat16)
NUMEL = LAYOUT.shape.numel
EXPERTS = ExpertMap.of(6, [1, 3, 4])  # this process holds three of six experts
N_LAYERS = 2


@dataclass
class Bench:
    records: ExpertRecords
    store: ExpertStore

    def weights(self, expert: ExpertId) -> Tensor:
        out = torch.empty(NUMEL, dtype=torch.bfloat16)
        self.records.read_weights(expert, out)
        return out

    def state(self, expert: ExpertId, name: str) -> Tensor:
        dtype = torch.int16 if name == "low" else torch.float32
        out = torch.empty(NUMEL, dtype=dtype)
        self.records.read_state(expert, name, out)
        return out


# experts of each layer resident, and those that always stay in host memory
PLACES = {"gpu": ([3, 3], 0), "host": ([0, 0], 6), "disk": ([0, 0], 2), "all": ([1, 2], 1)}


@pytest.fixture(params=PLACES)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    counts, in_host = PLACES[request.param]
    residents = Residents(counts, LAYOUT, torch.device("cpu"))
    residents.allocate_states(torch.float32)
    store = ExpertStore(N_LAYERS, EXPERTS, LAYOUT, in_host, 2, False, tmp_path, residents=counts)
    store.allocate(Part.STATES)
    yield Bench(ExpertRecords(store, residents), store)
    store.close()


def value_of(expert: ExpertId) -> float:
    return expert.layer * 10.0 + expert.index


def test_experts_are_listed_by_their_global_ids(bench: Bench) -> None:
    assert list(bench.records.ids()) == [ExpertId(layer, i) for layer in (0, 1) for i in (1, 3, 4)]
    assert bench.records.weights_bytes == 6 * bench.records.layout.weight_bytes


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("on_host", [False, True])
def test_filled_weights_are_read_back(bench: Bench, workers: int, on_host: bool) -> None:
    def fill(expert: ExpertId, weights: Tensor) -> None:
        assert weights.shape == (NUMEL,)
        weights.fill_(value_of(expert))

    bench.records.fill(fill, workers, on_host)
    for expert in bench.records.ids():
        assert (bench.weights(expert) == value_of(expert)).all()


def test_a_record_is_written_alone(bench: Bench) -> None:
    bench.records.fill(lambda expert, weights: weights.fill_(value_of(expert)))
    changed = ExpertId(1, 3)
    bench.records.write_weights(changed, lambda weights: weights.fill_(-1.0))
    for expert in bench.records.ids():
        expected = -1.0 if expert == changed else value_of(expert)
        assert (bench.weights(expert) == expected).all()


def test_states_are_written_alone_by_name(bench: Bench) -> None:
    changed = ExpertId(0, 4)
    bench.records.write_state(changed, "exp_avg", torch.full((NUMEL,), 2.0))
    for expert in bench.records.ids():
        assert (bench.state(expert, "exp_avg") == (2.0 if expert == changed else 0.0)).all()
        assert not bench.state(expert, "exp_avg_sq").any()


def test_new_weights_are_the_fp32_master_too(bench: Bench) -> None:
    one, other = ExpertId(0, 1), ExpertId(0, 3)
    for expert in (one, other):
        bench.records.write_state(expert, "low", torch.full((NUMEL,), 5, dtype=torch.int16))
    bench.records.write_weights(one, lambda weights: weights.fill_(1.0))
    assert not bench.state(one, "low").any()
    assert bench.state(other, "low").eq(5).all()


def test_an_expert_of_another_process_is_refused(bench: Bench) -> None:
    with pytest.raises(KeyError, match="expert 2 "):
        bench.weights(ExpertId(0, 2))


def test_written_weights_are_those_of_no_folder(bench: Bench, tmp_path: Path) -> None:
    assert bench.records.saved_to is None
    bench.records.mark_saved(tmp_path)
    assert bench.records.saved_to == tmp_path
    bench.records.write_weights(ExpertId(0, 1), lambda weights: weights.fill_(1.0))
    assert bench.records.saved_to is None


def test_closed_records_say_so(bench: Bench) -> None:
    bench.store.close()
    with pytest.raises(OrderError, match="closed"):
        bench.weights(ExpertId(0, 1))
