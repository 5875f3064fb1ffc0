"""transformers' Trainer in two processes trains as in one with the same global batch."""

import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

import overspill
from overspill.core.errors import ConfigError
from overspill.moe.settings import Settings
from tests.models.huggingface.families import FAMILIES, make_model
from tests.parallel.processes import run_ranks
from tests.train.test_hf_trainer import arguments, data

MIXTRAL = next(family for family in FAMILIES if family.name == "mixtral")
COMMON = {
    "max_steps": 3,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "gradient_accumulation_steps": 2,
    "per_device_eval_batch_size": 2,
}


def train(model: Any, args: Any, **more: Any) -> list[float]:
    """The logged losses."""
    from transformers import Trainer

    trainer = Trainer(
        model=model, args=args, train_dataset=data(40), eval_dataset=data(8, seed=1), **more
    )
    trainer.train()
    names = ("loss", "eval_loss")
    return [line[name] for line in trainer.state.log_history for name in names if name in line]


def train_rank(mesh: DeviceMesh, folder: Path) -> tuple[list[float], list[str]]:
    rank = str(mesh.get_local_rank())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # accelerate wants them
    model = make_model(MIXTRAL).train()
    where: dict[str, Any] = {"mode": "host", "slots": 2, "settings": Settings(threads=1)}
    overspill.offload(model, mesh=mesh, quiet=True, **where)
    args = arguments(folder / "ours", per_device_train_batch_size=1, **COMMON)
    found = train(model, args, optimizer_cls_and_kwargs=overspill.for_trainer(args))
    overspill.save(model, folder / "saved")
    refused = []
    for changes in ({"save_strategy": "steps"}, {"bf16": True}, {}):
        try:
            given = overspill.for_trainer(arguments(folder / "ours", **changes))
            train(make_model(MIXTRAL), args, optimizer_cls_and_kwargs=given)
        except ConfigError as error:
            refused.append(str(error))
    return found, refused


def test_two_processes_follow_one_and_average_once(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    plain = make_model(MIXTRAL).train()
    args = arguments(tmp_path / "theirs", per_device_train_batch_size=2, **COMMON)
    losses = train(plain, args)
    for result in run_ranks(2, train_rank, tmp_path):
        found, refused = result
        torch.testing.assert_close(found, losses, rtol=1e-4, atol=1e-5)
        assert ["save_strategy" in refused[0], "bf16" in refused[1]] == [True, True]
        assert "offloaded for 1; give overspill.load or overspill.offload a mesh" in refused[2]
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(saved[name], value, rtol=1e-4, atol=2e-5, msg=name)
