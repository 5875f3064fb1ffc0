"""The subject: the same model with offloaded experts and overspill.AdamW."""

import copy
import dataclasses
import gc
import random
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import overspill
from overspill.core.errors import OrderError
from overspill.moe.engine import Engine
from overspill.moe.placeholder import Places, stacked
from overspill.moe.state_dict import placeholders, split_record
from overspill.optim.kernel import join_master
from overspill.plan.usage import Swap
from overspill.train import checkpoint
from tests.fuzz.faults import Faults
from tests.fuzz.oracle import Choices, routers
from tests.fuzz.program import Case, Op
from tests.fuzz.side import ADAM, Side, Values, new_model, tokens_of
from tests.moe.fake_memory import FakeMemory
from tests.moe.streaming.policies import random_policy

Snapshot = tuple[dict[str, Tensor], dict[str, Any]]


class RestlessMemory(FakeMemory):
    """Other processes take some of the memory and give it back: experts move before most passes."""

    def __init__(self, engine: Engine, room: int) -> None:
        super().__init__(engine, other=room // 8)
        self._most = self.allocated() + room
        self._rng = random.Random(room)

    def available(self) -> int:
        return int(self._most * self._rng.choice((0.5, 0.8, 1.0, 1.0)))


class Subject(Side):
    """`choices` gets the routing of every forward, for the oracle."""

    def __init__(
        self, case: Case, device: torch.device, folder: Path, faults: Faults, choices: Choices
    ) -> None:
        model = new_model(case)
        if case.frozen:
            for name, parameter in model.named_parameters():
                if name.endswith(("w_in", "w_out", "gate_up_proj", "down_proj")):
                    parameter.requires_grad_(False)
        options: dict[str, Any] = {"mode": case.mode, "slots": case.slots}
        if case.mode != "gpu":
            options["gpu_experts"] = int(case.resident * case.n_layers * case.n_experts)
        if case.mode == "disk":
            options.update(host_slots=case.host_slots, disk=folder / "spill")
        settings = dict(case.settings, inject=faults.inject)
        if case.n_experts % 2:
            settings["popularity"] = "learned"
        if case.on_cpu:
            policy = random_policy(case.n_experts)
            settings.update(cpu_experts=True, cpu_training=True, cpu_policy=policy)
        self.settings = overspill.Settings(**settings)
        overspill.offload(
            model, device=device, quiet=True, progress=False, settings=self.settings, **options
        )
        super().__init__(case, model, device)
        self.engine: Engine = model.overspill
        self._checkpoints = folder / "checkpoints"
        for layer, router in enumerate(routers(model)):
            router.register_forward_hook(_recorder(choices[layer]))
        if case.room is not None:
            records = self.engine.layout.weight_bytes + self.engine.layout.state_bytes
            room = int(case.room * case.n_layers * case.n_experts * records)
            memory = RestlessMemory(self.engine, room)
            self.engine.memory.fill(memory, memory.allocated() + room)
        self._places = _expert_places(model, case)
        self.swap(Op("swap"))  # before experts have states
        self.optimizer = self._new_optimizer()

    def experts(self, layer: int) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if getattr(p, "layer", None) == layer]

    # -- passes -----------------------------------------------------------------------------

    def infer(self, op: Op) -> Values:
        self.model.eval()
        try:
            with torch.inference_mode():
                logits = self.logits(tokens_of(op.batch, self.device))
            return {"logits": logits.clone()}
        finally:
            self.model.train()

    def generate(self, op: Op) -> Tensor:
        tokens: Tensor = self.model.generate(tokens_of(op.batch, self.device)[:, :3], 2, 0.0)
        return tokens

    # -- the optimizer ----------------------------------------------------------------------

    optimizer: overspill.AdamW

    def accumulate(self) -> AbstractContextManager[None]:
        return self.optimizer.accumulate()

    def _new_optimizer(self) -> overspill.AdamW:
        of: Any = self.dense().values() if self.case.stateless else self.model
        return overspill.AdamW(of, max_grad_norm=self.case.clip, **ADAM)

    def new_optimizer(self) -> None:
        self.__dict__.pop("optimizer", None)  # absent after an interrupt here
        try:
            self.optimizer = self._new_optimizer()
        except OrderError:
            gc.collect()  # the traceback of an error may hold the old one
            self.optimizer = self._new_optimizer()

    def step(self, op: Op) -> Values:
        self.optimizer.step()
        norm = self.optimizer.total_norm
        self.optimizer.zero_grad()
        return {} if norm is None else {"norm": torch.tensor(norm)}

    def switch(self, op: Op) -> None:
        """Turns one technique on or off."""
        name = ("waves", "overlap_uploads", "overlap_updates")[op.batch % 3]
        flipped = not getattr(self.settings, name)
        self.settings = dataclasses.replace(self.settings, **{name: flipped})
        self.engine.switch(self.settings)

    def move(self, op: Op) -> None:
        """Gives some experts of each layer another place."""
        rng = random.Random(7 * op.batch + op.layer)
        most = self.case.n_experts
        fixed = {0: 0, 1: most}.get(op.batch)
        layers = range(self.case.n_layers)
        self.engine.set_residents(
            [rng.randint(0, most) if fixed is None else fixed for _ in layers]
        )

    def swap(self, op: Op) -> None:
        """In each layer swaps up to two resident experts and streamed ones."""
        rng = random.Random(7 * op.batch + op.layer)
        last = self.case.n_experts - 1
        self.engine.swap_experts(
            [
                Swap(layer, rng.randrange(at), rng.randint(at, last))
                for layer, at in enumerate(self.engine.residents)
                for _ in range(rng.randint(1, 2))
                if 0 < at <= last
            ]
        )

    # -- states -----------------------------------------------------------------------------

    def state(self) -> Values:
        values: Values = {
            f"weight {name}": value.detach().cpu().clone()
            for name, value in self.model.state_dict().items()
        }
        values["lr"] = torch.tensor(self.optimizer.param_groups[0]["lr"])
        entries = self.optimizer.state_dict()["state"]
        names = {id(p): name for name, p in self.dense().items()}
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        for number, entry in entries.items():
            parameter = parameters[number]
            for key, value in entry.items():
                if id(parameter) in names:
                    values[f"{key} {names[id(parameter)]}"] = torch.as_tensor(value).cpu().clone()
                else:
                    values.update(self._expert_values(parameter.layer, key, value))
        for name in [name for name in values if name.startswith("low ")]:
            weight = "weight " + name.removeprefix("low ")
            values[weight] = join_master(values[weight], values.pop(name))
        for name in [name for name in values if name.startswith("weight ")]:
            values[name] = values[name].float()
        return values

    def _expert_values(self, layer: int, key: str, stack: Any) -> Values:
        """A state of all experts of a layer, [E, numel], as the plain model has it."""
        path, places = self._places[layer]
        values: Values = {}
        for index in range(self.case.n_experts):
            for position, place in enumerate(places(index)):
                name = f"{key} {path}.{place.name}"
                if not isinstance(stack, Tensor):  # the number of steps
                    values[name] = torch.as_tensor(stack)
                    continue
                part = split_record(stack[index], self.engine.shape)[position]
                whole = values.setdefault(name, part.new_empty(self.case.n_experts, *part.shape))
                place.of(whole).copy_(part)
        return values

    def snapshot(self) -> Snapshot:
        weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        return weights, copy.deepcopy(self.optimizer.state_dict())

    def restore(self, snapshot: Snapshot) -> None:
        self.graphs.clear()
        weights, states = snapshot
        if "optimizer" not in self.__dict__:  # an interrupt came when it was made
            self.new_optimizer()
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(states)
        self.optimizer.zero_grad()

    def save(self, number: int) -> None:
        state = checkpoint.TrainState(number, 0, "", {})
        checkpoint.save(self._checkpoints, state, self.model, self.engine, self.optimizer, keep=1)

    @property
    def saved(self) -> int | None:
        """The number of the newest checkpoint."""
        path = checkpoint.newest(self._checkpoints)
        return None if path is None else checkpoint.read_state(path).step

    def load(self) -> None:
        self.graphs.clear()
        path = checkpoint.newest(self._checkpoints)
        assert path is not None
        checkpoint.load(path, self.model, self.engine, self.optimizer)
        self.optimizer.zero_grad()

    def close(self) -> None:
        self.graphs.clear()
        self.engine.close()


def _recorder(choices: Any) -> Any:
    def record(module: nn.Module, args: object, output: Any) -> None:
        if torch._C._current_graph_task_id() == -1:  # not a recomputation
            ids = next(value for value in output if value.dtype == torch.int64)
            choices.append(ids.detach().clone())

    return record


def _expert_places(model: Any, case: Case) -> list[tuple[str, Places]]:
    """Path and places of the experts of each layer."""
    if case.model == "gpt":
        return [(f"blocks.{n}.moe", stacked(("w_in", "w_out"))) for n in range(case.n_layers)]
    found = {placeholder.layer: (path, places) for path, placeholder, places in placeholders(model)}
    return [found[layer] for layer in range(case.n_layers)]
