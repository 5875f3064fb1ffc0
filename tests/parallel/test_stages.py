"""Ranks that divide pipeline stages train as one process with plain transformers."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import MixtralConfig, MixtralForCausalLM

import overspill
from overspill.compute.cpu_kernel import cpu_isa
from overspill.core.errors import ConfigError, OrderError, RankError
from overspill.core.experts import ExpertId
from overspill.models.huggingface.pregate_file import FILE
from tests.moe.oracle import delays
from tests.moe.streaming.policies import every_other
from tests.parallel.processes import run_ranks
from tests.slow import chosen, slow_names

ADAM = {"lr": 3e-3, "weight_decay": 0.01, "eps": 1e-4}


@dataclass(frozen=True)
class Case:
    mesh: dict[str, int]
    stages: int
    micro_batches: int = 3
    clip: float | None = None
    where: dict[str, Any] = field(default_factory=dict)
    parked: bool = False
    balance: bool = False
    frozen: str = ""
    delayed: bool = False
    fails: bool = False  # at first, on the rank with the losses
    pregates: int = 0  # their level
    on_cpu: bool = False  # some experts

    @property
    def steps(self) -> int:
        """More where updates are late, or experts leave the host."""
        return 3 if self.delayed or self.where["mode"] == "disk" else 2

    @property
    def parts(self) -> int:
        """Parts of each micro-batch: ranks along "data" and "expert" have one each."""
        return self.mesh.get("data", 1) * self.mesh.get("expert", 1)


HOST = {"mode": "host", "slots": 4}
DISK = {"mode": "disk", "slots": 3, "host_slots": 4}
TWO = {
    "4 stages, clipped, activations in host memory, CPU experts": Case(
        {"stage": 2}, 4, 2, clip=0.3, where=HOST, parked=True, delayed=True, fails=True, on_cpu=True
    ),
    "5 stages, balance loss, on the device": Case(
        {"stage": 2}, 5, 4, clip=0.3, where={"mode": "gpu"}, balance=True
    ),
    "4 stages, pre-gates of a block two stages later": Case(
        {"stage": 2}, 4, 2, clip=0.3, where=HOST, parked=True, pregates=2
    ),
    "2 stages, disk, frozen dense": Case({"stage": 2}, 2, 2, where=DISK, frozen="dense"),
    "3 stages, frozen embeddings and first block, one micro-batch": Case(
        {"stage": 2}, 3, 1, where=HOST, frozen="first"
    ),
}
FOUR = {
    "4 ranks, 5 stages, clipped, balance loss": Case(
        {"stage": 4}, 5, 2, clip=0.3, where=HOST, parked=True, balance=True, fails=True
    ),
    "stage and expert, 4 stages": Case(
        {"stage": 2, "expert": 2}, 4, 2, clip=0.3, where={"mode": "host", "slots": 2}
    ),
    "data, stage and expert, 3 stages, clipped, CPU experts": Case(
        {"data": 2, "stage": 2, "expert": 1}, 3, 2, clip=0.3, where=HOST, delayed=True, on_cpu=True
    ),
}

SLOW = ("5 stages, balance loss, on the device", "stage and expert, 4 stages")


def make_model(case: Case) -> Any:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64, hidden_size=16, intermediate_size=12, num_hidden_layers=5,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        max_position_embeddings=64, initializer_range=0.2, router_aux_loss_coef=0.1,
    )  # fmt: skip
    model = MixtralForCausalLM(config).train()
    for name, parameter in model.named_parameters():
        first = "embed" in name or "layers.0." in name
        if (case.frozen == "dense" and ".experts." not in name) or (
            case.frozen == "first" and first
        ):
            parameter.requires_grad_(False)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if case.pregates:
        overspill.pregate(model, case.pregates)
    return model


def make_batches(case: Case, step: int) -> list[Tensor]:
    """Tokens of each micro-batch; the last one is smaller."""
    generator = torch.Generator().manual_seed(step)
    sizes = [2 * case.parts] * (case.micro_batches - 1) + [case.parts]
    return [torch.randint(64, (size, 10), generator=generator) for size in sizes]


def inputs(case: Case, tokens: Tensor) -> dict[str, Any]:
    extra = {"output_router_logits": True} if case.balance else {}
    return {"input_ids": tokens, "labels": tokens, "use_cache": False, **extra}


def plain(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and the weights of plain transformers: means over the parts of micro-batches."""
    model = make_model(case)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAM)
    losses = []
    for step in range(case.steps):
        total = 0.0
        for tokens in make_batches(case, step):
            for part in tokens.chunk(case.parts):
                loss = model(**inputs(case, part)).loss / case.micro_batches / case.parts
                loss.backward()
                total += loss.item()
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if case.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, copy.deepcopy(model.state_dict())


def train_rank(mesh: DeviceMesh, case: Case, folder: Path, device: str) -> dict[str, Any]:
    """The losses on one rank; the model is saved."""
    inject = delays(3) if case.delayed else None
    cpu = {"cpu_experts": True, "cpu_training": True, "cpu_policy": every_other}
    settings = overspill.Settings(threads=1, inject=inject, **cpu if case.on_cpu else {})
    disk = {"disk": folder / "spill"} if case.where["mode"] == "disk" else {}
    if disk and mesh.get_rank() == 0:
        disk["disk"].mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    model = overspill.offload(
        make_model(case), device=device, gpu_memory="2GiB", quiet=True, progress=False, mesh=mesh,
        stages=case.stages, settings=settings, keep_gradients=True, **case.where, **disk,
    )  # fmt: skip
    engine = model.overspill
    engine.recorder.start()
    optimizer = overspill.AdamW(
        [p for p in model.parameters() if p.requires_grad], max_grad_norm=case.clip, **ADAM
    )
    stages = overspill.Stages(model, offload_activations=case.parked)
    part = mesh.get_local_rank("data") if "data" in case.mesh else 0
    if "expert" in case.mesh:
        part = part * case.mesh["expert"] + mesh.get_local_rank("expert")
    failure = fail(stages, optimizer, case, device) if case.fails else None
    losses = []
    for step in range(case.steps):
        total = 0.0

        def loss(number: int, output: Any) -> Tensor:
            nonlocal total
            total += output.loss.item() / case.micro_batches
            found: Tensor = output.loss
            return found * case.mesh["stage"] / case.micro_batches

        batches = [tokens.chunk(case.parts)[part].to(device) for tokens in make_batches(case, step)]
        stages.backward([inputs(case, tokens) for tokens in batches], optimizer, loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(engine.ranks.sums([total])[0] / case.parts)
    engine.check_conserved()
    overspill.save(model, folder / "saved")
    uploads = engine.recorder.counters().get("upload", 0)
    cpu_jobs = sum(span.row == "cpu compute" for span in engine.recorder.spans())
    engine.close()
    return {"losses": losses, "uploads": uploads, "failure": failure, "cpu_jobs": cpu_jobs}


def fail(stages: Any, optimizer: Any, case: Case, device: str) -> tuple[str, str]:
    """What a rank raises in a step whose second loss cannot be computed; the step is dropped."""

    def loss(number: int, output: Any) -> Tensor:
        found: Tensor = output.loss
        return found / (1 // (1 - number))

    batches = [inputs(case, tokens.to(device)) for tokens in make_batches(case, 0)]
    with pytest.raises((ZeroDivisionError, RankError)) as error:
        stages.backward(batches, optimizer, loss)
    optimizer.zero_grad()
    return error.type.__name__, str(error.value)


def refused() -> list[str]:
    """What a rank raises that has a part of the layers; it loads weights of the whole model."""
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("stage",))
    case, messages = Case({"stage": world}, 4), []
    where = {"device": "cpu", "quiet": True, "progress": False, "mesh": mesh}

    def attempt(call: Callable[[], object]) -> None:
        with pytest.raises((ConfigError, OrderError, RankError)) as error:
            call()
        messages.append(str(error.value))

    attempt(lambda: overspill.offload(make_model(case), stages=world - 1, **where))
    attempt(lambda: overspill.offload(make_model(case), stages=6, **where))
    attempt(lambda: overspill.offload(make_model(case), stages=4, shard_dense=True, **where))
    different = 4 + mesh.get_rank() % 2
    attempt(lambda: overspill.offload(make_model(case), stages=different, **where))
    dynamic = overspill.Settings(placement="dynamic")
    attempt(lambda: overspill.offload(make_model(case), stages=4, settings=dynamic, **where))
    model = overspill.offload(make_model(case), stages=4, **where)
    attempt(lambda: overspill.Stages(model, 3))
    attempt(lambda: model(**inputs(case, torch.zeros(1, 4, dtype=torch.int64))))
    stages, optimizer = overspill.Stages(model), overspill.AdamW(model)
    batches = [inputs(case, tokens) for tokens in make_batches(case, 0)]
    attempt(lambda: stages.backward(batches[: 1 + mesh.get_rank() % 2], optimizer))
    own = make_batches(case, mesh.get_rank())
    attempt(lambda: stages.backward([inputs(case, tokens) for tokens in own], optimizer))
    attempt(model.state_dict)
    other = make_model(case)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 1
    model.load_state_dict(other.state_dict())
    engine = model.overspill
    record = torch.empty(engine.shape.numel)
    for layer, number in enumerate(engine.layer_map.own):
        engine.records.read_weights(ExpertId(layer, 3), record)
        expected = other.model.layers[number].mlp.experts.gate_up_proj[3].flatten()
        torch.testing.assert_close(record[: expected.numel()], expected)
    engine.close()
    return messages


def work(
    line: DeviceMesh, cases: dict[str, Case], folder: Path, device: str = "cpu"
) -> dict[str, Any]:
    found: dict[str, Any] = {"refused": refused() if line.size() == 2 else []}
    for name, case in cases.items():
        mesh = init_device_mesh("cpu", tuple(case.mesh.values()), mesh_dim_names=tuple(case.mesh))
        found[name] = train_rank(mesh, case, folder / name, device)
    return found


@pytest.fixture(scope="module")
def two(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("two")
    return folder, run_ranks(2, work, chosen(request, TWO, *SLOW), folder)


@pytest.fixture(scope="module")
def four(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("four")
    return folder, run_ranks(4, work, chosen(request, FOUR, *SLOW), folder)


def check(name: str, cases: dict[str, Case], ran: tuple[Path, list[Any]]) -> None:
    folder, ranks = ran
    losses, weights = plain(cases[name])
    for found in ranks:
        if isinstance(found, BaseException):
            raise found
        torch.testing.assert_close(found[name]["losses"], losses, rtol=1e-5, atol=1e-5)
        assert bool(found[name]["cpu_jobs"]) == (cases[name].on_cpu and cpu_isa() is not None)
    saved = folder / name / "saved"
    loaded = MixtralForCausalLM.from_pretrained(saved, dtype=torch.float32).state_dict()
    if cases[name].pregates:  # the rest of the folder is the conventional model
        for key, value in load_file(saved / FILE).items():
            if key.startswith("pregate."):
                loaded[key.removeprefix("pregate.")] = value
    assert loaded.keys() == weights.keys()
    for key, value in weights.items():
        torch.testing.assert_close(loaded[key], value, rtol=1e-4, atol=1e-5, msg=key)


def test_what_ranks_along_stages_cannot_do_is_said(two: tuple[Path, list[Any]]) -> None:
    expected = [
        "2 ranks cannot divide 1 stages",
        "6 stages need as many blocks, and the model has 5",
        "shard_dense is not supported with ranks along stages",
        "stages must be the same on all ranks: rank 0 has 4, rank 1 5",
        'dynamic" is not supported with ranks that divide the layers',
        "3 stages, but the model was offloaded with stages=4",
        "other ranks have the experts of this layer",
        "ranks along stages must get the same micro-batches: one has 2, another 1",
        "a digest of the micro-batches along stages must be the same on all ranks: rank 0 has ",
        "state_dict() is not supported for a model that was offloaded with a mesh",
    ]
    for found in two[1]:
        for message, part in zip(found["refused"], expected, strict=True):
            assert part in message


@pytest.mark.parametrize("name", slow_names(TWO, SLOW[0]))
def test_two_ranks_train_as_one_process(name: str, two: tuple[Path, list[Any]]) -> None:
    check(name, TWO, two)


@pytest.mark.parametrize("name", slow_names(FOUR, SLOW[1]))
def test_four_ranks_train_as_one_process(name: str, four: tuple[Path, list[Any]]) -> None:
    check(name, FOUR, four)


def test_a_step_that_fails_on_one_rank_fails_on_all(
    two: tuple[Path, list[Any]], four: tuple[Path, list[Any]]
) -> None:
    """The tests above show that they go on with the next step."""
    for cases, (_, ranks), last in ((TWO, two, 1), (FOUR, four, 0)):
        (name,) = [name for name, case in cases.items() if case.fails]
        for rank, found in enumerate(ranks):
            kind, message = found[name]["failure"]
            assert kind == ("ZeroDivisionError" if rank == last else "RankError")
            assert rank == last or f"failed on rank {last}: ZeroDivisionError: " in message
