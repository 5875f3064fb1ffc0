"""GPU memory is the process's: several models share it."""

import itertools
from types import SimpleNamespace

import pytest
import torch

import overspill
from overspill.core.errors import EngineError
from overspill.moe.memory_limit import MEMORY_LIMITS, MemoryLimits, MemoryUser, ModelMemory
from overspill.moe.residency import BytesEach, Residency
from overspill.plan.residents import DeviceShare
from tests.moe.oracle import Task, adamw, train_step

GPU = torch.device("cuda:0")
EXPERT = 10
TOTAL = 60


class Device:
    """A GPU whose allocator counts the memory of all models."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.models: list[MemoryUser] = []
        self.activations = 0
        self.overflows = 0
        self.windows: list[Window] = []

    def allocated(self) -> int:
        return sum(model.device_bytes() for model in self.models) + self.activations

    def use(self, limit: int) -> None:
        """What is allocated now is in use."""
        self.overflows += self.allocated() > limit
        for window in self.windows:
            window.most = max(window.most, self.allocated())


class Window:
    """A measurement of its memory."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.most = 0
        device.windows.append(self)

    def allocated(self) -> int:
        return self._device.allocated()

    def peak(self) -> int:
        peak, self.most = self.most, self.allocated()
        return peak

    def available(self) -> int:
        return self._device.size

    def shortages(self) -> int:
        return 0

    def reset(self) -> None:
        self.most = self.allocated()


class Model:
    """Its experts move as the engine's do."""

    total = TOTAL

    def __init__(
        self, limits: MemoryLimits, device: Device, budget: int | None, dense: int = 20
    ) -> None:
        self.limits, self.device, self.dense, self.residents = limits, device, dense, 0
        self.most = 0  # that it has used, with its activations
        device.models.append(self)
        memory = limits.set(self, GPU, budget, Window(device))
        self.residency = Residency(memory, memory.budget, self)

    def device_bytes(self) -> int:
        return self.dense + self.residents * EXPERT

    def shrink(self) -> None:
        self.residency.shrink()

    @property
    def share(self) -> DeviceShare:
        return DeviceShare(self.residents)

    @property
    def most_sums(self) -> int:
        return self.total

    def bytes_each(self) -> BytesEach:
        return BytesEach(EXPERT)

    def set_share(self, share: DeviceShare) -> None:
        with self.limits.moving(self):
            self.residents = share.experts
            self.device.use(self.limits.limit(0))

    def run(self, activations: int, rows: int = 100) -> None:
        self.residency.before_pass(rows, training=True)
        self.device.activations += activations
        self.device.use(self.limits.limit(0))
        self.device.activations -= activations
        self.most = max(self.most, self.device_bytes() + activations)

    def close(self) -> None:
        self.device.models.remove(self)
        self.limits.lift(self)


@pytest.fixture
def fractions(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """The fraction that torch was told for each device; a device has 1000 bytes."""
    told: dict[int, float] = {}
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=1000)
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda fraction, device: told.update({device: fraction}),
    )
    return told


@pytest.fixture
def limits(fractions: dict[int, float], monkeypatch: pytest.MonkeyPatch) -> MemoryLimits:
    limits = MemoryLimits()
    monkeypatch.setattr("overspill.moe.memory_limit.CudaMemory", lambda _: Window(Device(1000)))
    return limits


class Engine:
    """Holds nothing."""

    def device_bytes(self) -> int:
        return 0

    def shrink(self) -> None: ...


def test_closing_one_engine_keeps_the_limit_of_another(fractions: dict[int, float]) -> None:
    limits, one, two, device = MemoryLimits(), Engine(), Engine(), Window(Device(1000))
    limits.set(one, GPU, 300, device)
    assert fractions == {0: 0.3}
    limits.set(two, torch.device("cuda"), 200, device)
    assert fractions == {0: 0.5}, "each can use its budget"
    limits.lift(one)
    assert fractions == {0: 0.2}
    limits.lift(one)  # again
    assert fractions == {0: 0.2}
    limits.lift(two)
    assert fractions == {0: 1.0}


def test_budgets_of_all_memory_are_no_more_than_it(fractions: dict[int, float]) -> None:
    limits, device = MemoryLimits(), Window(Device(1000))
    limits.set(Engine(), GPU, 900, device)
    limits.set(Engine(), GPU, 900, device)
    assert fractions == {0: 1.0}


def test_devices_have_limits_of_their_own(fractions: dict[int, float]) -> None:
    limits, two, device = MemoryLimits(), Engine(), Window(Device(1000))
    limits.set(Engine(), GPU, 300, device)
    limits.set(two, torch.device("cuda:1"), 200, device)
    assert fractions == {0: 0.3, 1: 0.2}
    limits.lift(two)
    assert fractions == {0: 0.3, 1: 1.0}


def test_no_limit_holds_while_a_model_is_offloaded(
    limits: MemoryLimits, fractions: dict[int, float]
) -> None:
    limits.set(Engine(), GPU, 300, Window(Device(1000)))
    with limits.claimed(GPU, 200):
        assert fractions == {0: 1.0}
        with limits.claimed(GPU, 200):
            pass
        assert fractions == {0: 1.0}
    assert fractions == {0: 0.3}


def test_two_models_fill_their_own_budgets(limits: MemoryLimits) -> None:
    device = Device(1000)
    one, two = Model(limits, device, 400), Model(limits, device, 250)
    for _ in range(12):
        one.run(100)
        two.run(100)
    assert device.overflows == 0
    assert 0.8 * 400 <= one.most <= 400
    assert 0.8 * 250 <= two.most <= 250


def test_a_larger_batch_of_one_model_does_not_take_memory_of_another(limits: MemoryLimits) -> None:
    device = Device(1000)
    one, two = Model(limits, device, 400), Model(limits, device, 400)
    for _ in range(8):
        one.run(100)
        two.run(100)
    for _ in range(8):
        one.run(250, rows=250)
        two.run(100)
    assert device.overflows == 0
    assert one.most <= 400
    assert two.most <= 400
    assert one.residents < two.residents


def test_models_without_a_budget_share_what_is_free(limits: MemoryLimits) -> None:
    device = Device(1000)
    one = Model(limits, device, None)
    for _ in range(8):
        one.run(100)
    alone = one.residents
    assert alone * EXPERT >= 0.9 * min(TOTAL * EXPERT, 1000 - 20 - 100)
    with limits.claimed(GPU, None):
        assert one.residents < alone, "at once: the other needs memory to be loaded"
        assert limits.share(GPU) == pytest.approx(500, abs=1)
        two = Model(limits, device, None)
    for _ in range(12):
        one.run(100)
        two.run(100)
    assert device.overflows == 0
    assert one.residents == pytest.approx(two.residents, abs=2)
    assert one.device_bytes() + 100 >= 0.8 * 500
    two.close()
    for _ in range(8):
        one.run(100)
    assert one.residents == alone, "memory of a closed model is filled again"
    assert device.overflows == 0


def test_memory_of_no_model_is_taken_from_all(limits: MemoryLimits) -> None:
    device = Device(1000)
    device.activations = 600  # tensors of the user
    one, two = Model(limits, device, None, dense=0), Model(limits, device, None, dense=0)
    for _ in range(12):
        one.run(20)
        two.run(20)
    assert device.overflows == 0
    assert one.residents * EXPERT == pytest.approx(200 - 20 - 40, abs=2 * EXPERT)
    assert one.residents == pytest.approx(two.residents, abs=2)


def test_a_budget_comes_before_what_others_share(limits: MemoryLimits) -> None:
    device = Device(1000)
    one = Model(limits, device, None)
    for _ in range(8):
        one.run(100)
    with limits.claimed(GPU, 600):
        two = Model(limits, device, 600)
    for _ in range(12):
        two.run(100)
        one.run(100)
    assert device.overflows == 0
    assert one.device_bytes() + 100 <= 400
    assert 0.8 * 600 <= two.most <= 600


def test_a_model_that_cannot_leave_leaves_the_rest(limits: MemoryLimits) -> None:
    """All of its experts stay on the GPU."""
    device = Window(Device(1000))
    fixed = Engine()
    fixed.device_bytes = lambda: 700  # type: ignore[method-assign]
    limits.set(fixed, GPU, None, device)
    memory: ModelMemory = limits.set(Engine(), GPU, None, device)
    assert memory.available() == 300


def test_experts_that_another_model_moves_are_no_activations(limits: MemoryLimits) -> None:
    device = Device(1000)
    one, two = Model(limits, device, 500), Model(limits, device, 500)
    for _ in range(8):
        one.run(50)
    before = one.residents
    for residents in (30, 0, 20, 0):
        two.set_share(DeviceShare(residents))
        one.run(50)
    one.run(60, rows=120)  # for which experts leave
    assert before - 3 <= one.residents < before


def test_two_trained_models_fill_their_budgets_and_give_way_to_a_third(
    limits: MemoryLimits,
) -> None:
    """Real engines; the memory is simulated."""
    task, device = Task(), Device(1 << 40)
    models = [task.model(), task.model()]
    options = {"device": "cpu", "mode": "host", "slots": 2, "host_memory": "2GiB", "quiet": True}
    for model in models:
        overspill.offload(model, settings=overspill.Settings(threads=1), **options)
    first, second = (model.overspill for model in models)
    try:
        device.models += [first.memory, second.memory]
        record = first.layout.weight_bytes + first.layout.state_bytes
        device.size = device.allocated() + 20 * record
        optimizers = [adamw(model, task) for model in models]
        for engine, budget in ((first, None), (second, first.memory.device_bytes() + 9 * record)):
            memory = MEMORY_LIMITS.set(engine.memory, GPU, budget, Window(device))
            engine.memory.fill(memory, memory.budget)
        for batches in itertools.islice(itertools.cycle(task.batches()), 10):
            pairs = zip(models, optimizers, strict=True)
            one, two = [train_step(model, optimizer, batches) for model, optimizer in pairs]
            assert one == two, "wherever experts are"
            assert device.allocated() <= device.size
        residents = [sum(engine.residents) for engine in (first, second)]
        assert residents[0] > 3
        assert 3 < residents[1] <= 9
        with MEMORY_LIMITS.claimed(GPU, residents[0] * record):
            assert sum(first.residents) < residents[0]
            assert sum(second.residents) == residents[1], "it has a budget"
    finally:
        first.close()
        second.close()
    assert not MEMORY_LIMITS.on(0)


def test_an_interrupt_while_a_model_is_claimed_leaves_no_claim(
    limits: MemoryLimits, fractions: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(fraction: float, device: int) -> None:
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions_of)
        raise KeyboardInterrupt

    fractions_of = torch.cuda.set_per_process_memory_fraction
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", interrupted)
    with pytest.raises(KeyboardInterrupt), limits.claimed(GPU, 200):
        pass
    assert limits.on(0) == []
    Model(limits, Device(1000), 300)
    assert fractions[0] == 0.3


def test_a_model_that_has_failed_does_not_keep_another_from_loading(
    limits: MemoryLimits, caplog: pytest.LogCaptureFixture
) -> None:
    class Failed:
        def device_bytes(self) -> int:
            return 100

        def shrink(self) -> None:
            raise EngineError("a worker thread failed")

    limits.set(Failed(), GPU, 500, Window(Device(1000)))
    with limits.claimed(GPU, 200):
        assert len(limits.on(0)) == 2
    assert "a worker thread failed" in caplog.text
