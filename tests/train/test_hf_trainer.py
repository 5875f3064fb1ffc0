"""transformers.Trainer with offloaded experts against transformers.Trainer alone."""

import copy
import gc
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import overspill
from overspill.core.errors import CheckpointError, ConfigError, OrderError
from overspill.train.hf_trainer import EXPERT_STATES
from tests.models.huggingface.families import VOCAB, make_model
from tests.models.huggingface.oracle import budgets
from tests.models.huggingface.test_exactness import BY_NAME
from tests.pairs import all_pairs
from tests.slow import slow_rows

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

MODES = ("gpu", "host", "disk")
STEPS = 3


def data(number: int, seed: int = 0) -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (number, 8), generator=random)
    return [{"input_ids": row, "labels": row} for row in ids]


def arguments(folder: Path, **changes: Any) -> Any:
    given = {
        "output_dir": str(folder),
        "use_cpu": True,
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "learning_rate": 3e-3,
        "weight_decay": 0.1,
        "adam_epsilon": 1e-4,  # else gradients that are zero but for rounding take whole steps
        "adam_beta1": 0.8,
        "max_grad_norm": 0.5,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "optim": "adamw_torch",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_nan_inf_filter": False,
    }
    return transformers.TrainingArguments(**(given | changes))


class Recording(transformers.Trainer):  # type: ignore[misc]
    """Keeps the loss of every micro-batch."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        self.__dict__.setdefault("losses", []).append(float(loss))
        return loss


def trainer_of(model: Any, args: Any, **kwargs: Any) -> Recording:
    model.train()
    given = {"train_dataset": data(40)} | kwargs
    if hasattr(model, "overspill") or hasattr(model, "get_base_model"):
        given["optimizer_cls_and_kwargs"] = overspill.for_trainer(args)
    return Recording(model=model, args=args, **given)


@contextmanager
def offloaded(name: str, mode: str, folder: Path) -> Iterator[Any]:
    model = overspill.offload(make_model(BY_NAME[name]), **budgets(mode, folder / "spill"))
    try:
        yield model
    finally:
        model.overspill.close()


def weights(model: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_close_weights(model: Any, plain: Any) -> None:
    mine, theirs = model.state_dict(), plain.state_dict()
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-4, atol=2e-5, msg=name)


_PLAIN: dict[str, tuple[Any, Recording]] = {}


def plain_run(name: str, folder: Path, changes: dict[str, Any]) -> tuple[Any, Recording]:
    """The plain model and its Trainer after training; once for all modes."""
    key = f"{name} {changes}"
    if key not in _PLAIN:
        model = make_model(BY_NAME[name])
        trainer = trainer_of(model, arguments(folder / "theirs", **changes))
        trainer.train()
        _PLAIN[key] = model, trainer
    return _PLAIN[key]


def assert_follows(name: str, mode: str, folder: Path, **changes: Any) -> Recording:
    changes = {"max_steps": 3} | changes
    plain, theirs = plain_run(name, folder, changes)
    with offloaded(name, mode, folder) as model:
        mine = trainer_of(model, arguments(folder / "mine", **changes))
        mine.train()
        assert mine.losses == pytest.approx(theirs.losses, rel=1e-5)
        assert_close_weights(model, plain)
        if changes.get("max_grad_norm", 0.5):
            norms = [entry["grad_norm"] for entry in mine.state.log_history if "loss" in entry]
            expected = [entry["grad_norm"] for entry in theirs.state.log_history if "loss" in entry]
            assert norms == pytest.approx(expected, rel=1e-4)
            assert max(expected) > 0.5  # something was clipped
        model.overspill.check_conserved()
    return mine


@pytest.mark.parametrize(
    ("mode", "name", "accumulate", "clip"),
    slow_rows(all_pairs(["gpu", "disk"], ["mixtral", "deepseek_v3"], [1, 3], [0.5, 0.0]), 1, 2, 3),
)
def test_it_follows_the_plain_trainer(
    mode: str, name: str, accumulate: int, clip: float, tmp_path: Path
) -> None:
    """Without clipping experts are updated during backward."""
    changes = {"max_grad_norm": clip, "gradient_accumulation_steps": accumulate}
    mine = assert_follows(name, mode, tmp_path, **changes)
    assert mine.optimizer.optimizer.keep_gradients == (clip > 0)


def test_an_epoch_that_ends_inside_an_accumulation(tmp_path: Path) -> None:
    # five micro-batches, three a step
    changes = {"max_steps": -1, "num_train_epochs": 1, "per_device_train_batch_size": 8}
    changes |= {"gradient_accumulation_steps": 3, "max_grad_norm": 0.0}
    mine = assert_follows("mixtral", "host", tmp_path, **changes)
    assert mine.state.global_step == 2


@pytest.mark.parametrize("reentrant", slow_rows([False, True], 0))
def test_gradient_checkpointing(reentrant: bool, tmp_path: Path) -> None:
    assert_follows(
        "mixtral",
        "host",
        tmp_path,
        max_steps=2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": reentrant},
    )


def test_decay_is_that_of_the_trainer(tmp_path: Path) -> None:
    with offloaded("mixtral", "host", tmp_path) as model:
        trainer = trainer_of(model, arguments(tmp_path))
        decayed, rest = trainer.create_optimizer().param_groups
        names = {id(p): n for n, p in model.named_parameters()}
        assert (decayed["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
        assert any("experts" in names[id(p)] for p in decayed["params"])
        assert all("norm" in names[id(p)] for p in rest["params"])
        assert decayed["lr"] == 3e-3
        assert decayed["betas"] == (0.8, 0.999)


def test_clipping_moves_into_the_optimizer_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args = arguments(tmp_path, max_grad_norm=0.7)
    with caplog.at_level(logging.WARNING, "overspill"):
        assert overspill.for_trainer(args)[1]["max_grad_norm"] == 0.7
        assert args.max_grad_norm == 0.0
        # the same arguments for another Trainer: nothing is lost, nothing is said twice
        assert overspill.for_trainer(args)[1]["max_grad_norm"] == 0.7
    assert caplog.text.count("max_grad_norm=0.7") == 1
    assert overspill.for_trainer(arguments(tmp_path, max_grad_norm=0))[1]["max_grad_norm"] is None


# -- checkpoints ----------------------------------------------------------------------------------

SAVING = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2}


@pytest.mark.parametrize(
    ("name", "mode", "clip"),
    [
        pytest.param("deepseek_v3", "gpu", 0.5, marks=pytest.mark.slow),
        ("mixtral", "disk", 0.0),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(
    name: str, mode: str, clip: float, tmp_path: Path
) -> None:
    changes = {"gradient_accumulation_steps": 2, "max_grad_norm": clip}
    with offloaded(name, mode, tmp_path) as model:
        whole = trainer_of(model, arguments(tmp_path / "run", **SAVING | changes))
        whole.train()
        expected = weights(model)
    with offloaded(name, mode, tmp_path) as model:
        for parameter in model.parameters():  # whatever was there
            parameter.data.add_(0.1)
        again = trainer_of(model, arguments(tmp_path / "run", **changes))
        again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
        assert again.losses == whole.losses[-len(again.losses) :]
        assert len(again.losses) == 2 * (STEPS - 2)
        for key, value in weights(model).items():
            assert torch.equal(value, expected[key]), key


def trained(plain: Any, folder: Path, **kwargs: Any) -> dict[str, Tensor]:
    """The weights after a run in `folder`; `kwargs` are those of `train`."""
    model = overspill.offload(plain, **budgets("host", folder))
    trainer_of(model, arguments(folder / "run", **SAVING)).train(**kwargs)
    found = weights(model)
    model.overspill.close()
    return found


@pytest.mark.parametrize("made", ["pregate", "deepcopy", "assign"])
def test_pre_gates_are_resumed(made: str, tmp_path: Path) -> None:
    """The checkpoint has the conventional gates under their names. Copies of a model, and tensors
    that are assigned to it, are other parameters than those that `pregate` saw."""

    def train(**kwargs: Any) -> dict[str, Tensor]:
        plain = overspill.pregate(make_model(BY_NAME["mixtral"]))
        if made == "deepcopy":
            plain = copy.deepcopy(plain)
        elif made == "assign":
            state = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
            plain.load_state_dict(state, assign=True)
        return trained(plain, tmp_path, **kwargs)

    expected = train()
    again = train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-2"))
    for name, value in again.items():
        assert torch.equal(value, expected[name]), name


def test_bf16_weights_resume_with_their_low_bits(tmp_path: Path) -> None:
    def train(**kwargs: Any) -> dict[str, Tensor]:
        return trained(make_model(BY_NAME["mixtral"], dtype=torch.bfloat16), tmp_path, **kwargs)

    expected = train()
    for name, value in train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-2")).items():
        assert torch.equal(value, expected[name]), name


def test_states_of_experts_are_streamed_beside_the_model(tmp_path: Path) -> None:
    with offloaded("mixtral", "host", tmp_path) as model:
        trainer = trainer_of(model, arguments(tmp_path / "run", **SAVING))
        trainer.train()
        folder = tmp_path / "run" / f"checkpoint-{STEPS}"
        saved = torch.load(folder / "optimizer.pt", weights_only=True)
        experts = model.overspill.expert_parameters
        dense = [p for p in model.parameters() if not hasattr(p, "is_expert_placeholder")]
        assert sum(_elements(saved)) == 2 * sum(p.numel() for p in dense)
        assert (folder / EXPERT_STATES).stat().st_size > 2 * 4 * experts
        plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert_close_weights(model, plain)
        # asked for by somebody else, it is the plain one, and the checkpoint stays as it is
        written = (folder / EXPERT_STATES).read_bytes()
        mine = trainer.optimizer.state_dict()
        assert sum(_elements(mine)) == 2 * model.num_parameters()
        assert (folder / EXPERT_STATES).read_bytes() == written


def _elements(value: Any) -> Iterator[int]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _elements(inner)
    elif isinstance(value, Tensor):
        yield value.numel()


def test_a_model_saved_before_training_gets_no_states_beside_it(tmp_path: Path) -> None:
    with offloaded("mixtral", "host", tmp_path) as model:
        model.save_pretrained(tmp_path / "start")
        trainer_of(model, arguments(tmp_path / "run", max_steps=1)).train()
        assert not (tmp_path / "start" / EXPERT_STATES).exists()


def test_a_moved_run_resumes_and_a_lost_file_is_named(tmp_path: Path) -> None:
    with offloaded("mixtral", "host", tmp_path) as model:
        trainer_of(model, arguments(tmp_path / "run", **SAVING)).train()
        expected = weights(model)
    (tmp_path / "run").rename(tmp_path / "moved")
    checkpoint = tmp_path / "moved" / "checkpoint-2"
    with offloaded("mixtral", "host", tmp_path) as model:
        again = trainer_of(model, arguments(tmp_path / "moved", **SAVING))
        again.train(resume_from_checkpoint=str(checkpoint))
        assert all(torch.equal(value, expected[n]) for n, value in weights(model).items())
    # a file of another checkpoint is not taken for it
    other = tmp_path / "moved" / f"checkpoint-{STEPS}"
    shutil.copy(other / EXPERT_STATES, checkpoint / EXPERT_STATES)
    with offloaded("mixtral", "host", tmp_path) as model:
        again = trainer_of(model, arguments(tmp_path / "moved", **SAVING))
        with pytest.raises(CheckpointError, match=r"run/checkpoint-2/overspill_optimizer.* nor in"):
            again.train(resume_from_checkpoint=str(checkpoint))


def test_the_best_model_comes_back_and_old_checkpoints_go(tmp_path: Path) -> None:
    changes = {
        "save_strategy": "steps",
        "save_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "load_best_model_at_end": True,
        "save_total_limit": 1,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "max_steps": 4,
    }
    with offloaded("mixtral", "host", tmp_path) as model:
        args = arguments(tmp_path / "run", **changes)
        trainer = trainer_of(model, args, eval_dataset=data(4, seed=1))
        trainer.train()
        evaluated = [e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e]
        assert min(evaluated) < evaluated[-1]  # the last is not the best
        assert trainer.evaluate()["eval_loss"] == pytest.approx(min(evaluated), rel=1e-6)
        assert len(list((tmp_path / "run").glob("checkpoint-*"))) <= 2
    with offloaded("mixtral", "host", tmp_path) as model:
        changes |= {"save_only_model": True, "max_steps": 2}
        trainer = trainer_of(model, arguments(tmp_path / "other", **changes), eval_dataset=data(4))
        trainer.train()
        folder = Path(trainer.state.best_model_checkpoint)
        assert not list(folder.glob("*optimizer*"))


@pytest.mark.slow
def test_evaluation_between_steps_changes_nothing(tmp_path: Path) -> None:
    changes = {"gradient_accumulation_steps": 2, "max_steps": 2}
    losses = []
    for more in ({}, {"eval_strategy": "steps", "eval_steps": 1}):
        with offloaded("mixtral", "disk", tmp_path) as model:
            args = arguments(tmp_path / "run", **changes, **more)
            trainer = trainer_of(model, args, eval_dataset=data(4, seed=1))
            trainer.train()
            losses.append(trainer.losses)
    assert losses[0] == losses[1]


def test_one_model_in_several_trainers(tmp_path: Path) -> None:
    with offloaded("mixtral", "host", tmp_path) as model:
        args = arguments(tmp_path)
        trainer = trainer_of(model, args)
        trainer.train()
        before = trainer.losses
        del trainer  # an engine has one optimizer at a time
        again = trainer_of(model, args)
        again.train()
        assert again.losses[0] < before[0]  # it went on with what the first had learned


@pytest.mark.parametrize(
    ("mode", "clip", "accumulate"), slow_rows([("gpu", 0.5, 1), ("disk", 0.0, 2)], 0)
)
def test_a_new_trainer_after_an_interrupted_one_starts_a_new_step(
    mode: str, clip: float, accumulate: int, tmp_path: Path
) -> None:
    """Ctrl-C came between a backward and its step, or between two micro-batches."""
    changes = {
        "max_grad_norm": clip,
        "gradient_accumulation_steps": accumulate,
        "max_steps": 2,
    }

    class Interrupted(Recording):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            if len(self.losses) == accumulate + 1:
                raise KeyboardInterrupt
            return loss

    with offloaded("mixtral", mode, tmp_path) as model:
        args = arguments(tmp_path, **changes)
        model.train()
        given = overspill.for_trainer(args)
        first = Interrupted(
            model=model, args=args, train_dataset=data(40), optimizer_cls_and_kwargs=given
        )
        with pytest.raises(KeyboardInterrupt):
            first.train()
        del first
        again = trainer_of(model, arguments(tmp_path, **changes))
        again.create_optimizer()
        if not clip and accumulate == 1:  # the experts were updated during the last backward
            with pytest.raises(OrderError, match="load the last checkpoint"):
                again.train()
            model.overspill.training.keep_updates()
            again = trainer_of(model, arguments(tmp_path, **changes))
            again.create_optimizer()
        before = weights(model)
        again.train()
        trained = weights(model)
    with offloaded("mixtral", mode, tmp_path) as model:
        model.load_state_dict(before)
        expected = trainer_of(model, arguments(tmp_path, **changes))
        expected.train()
        assert again.losses == expected.losses
        for name, value in weights(model).items():
            assert torch.equal(value, trained[name]), name


# -- other ways to train --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", slow_rows([torch.float32, torch.bfloat16], 1))
def test_autocast_stays_near_the_plain_trainer(dtype: torch.dtype, tmp_path: Path) -> None:
    plain = make_model(BY_NAME["mixtral"], dtype=dtype)
    model = overspill.offload(copy.deepcopy(plain), **budgets("host", tmp_path))
    theirs = trainer_of(plain, arguments(tmp_path / "theirs", bf16=True, max_steps=2))
    theirs.train()
    mine = trainer_of(model, arguments(tmp_path / "mine", bf16=True, max_steps=2))
    mine.train()
    model.overspill.close()
    assert mine.losses == pytest.approx(theirs.losses, rel=2e-2)


def test_adapters_are_trained_saved_and_resumed(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapted(base: Any) -> Any:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        return peft.get_peft_model(base, config)

    def adapters(model: Any) -> dict[str, Tensor]:
        return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}

    changes = SAVING
    plain = adapted(make_model(BY_NAME["mixtral"]))
    theirs = Recording(
        model=plain, args=arguments(tmp_path / "theirs", **changes), train_dataset=data(40)
    )
    theirs.train()
    with offloaded("mixtral", "host", tmp_path) as base:
        model = adapted(base)
        before = weights(base)
        read = base.overspill.records.read_weights
        base.overspill.records.read_weights = None  # nobody needs an expert to save adapters
        mine = trainer_of(model, arguments(tmp_path / "mine", **changes))
        mine.train()
        base.overspill.records.read_weights = read
        assert mine.losses == pytest.approx(theirs.losses, rel=1e-5)
        trained = adapters(model)
        for name, value in adapters(plain).items():
            torch.testing.assert_close(trained[name], value, rtol=1e-4, atol=1e-5)
        after = weights(base)
        assert all(torch.equal(after[n], v) for n, v in before.items() if "experts" in n)
    with offloaded("mixtral", "host", tmp_path) as base:
        model = adapted(base)
        again = trainer_of(model, arguments(tmp_path / "mine", **changes))
        again.train(resume_from_checkpoint=str(tmp_path / "mine" / "checkpoint-2"))
        assert all(torch.equal(value, trained[n]) for n, value in adapters(model).items())


@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_plain_accelerate_loop_accumulates(clip: float | None, tmp_path: Path) -> None:
    from accelerate import Accelerator

    batches = [{k: v[None] for k, v in row.items()} for row in data(6)]
    plain = make_model(BY_NAME["mixtral"])
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-3, eps=1e-4)
    for number, batch in enumerate(batches):
        (plain(**batch).loss / 3).backward()
        if number % 3 == 2:
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(plain.parameters(), clip)
            theirs.step()
            theirs.zero_grad()
    with offloaded("mixtral", "host", tmp_path) as model:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
        mine = overspill.AdamW(model, lr=1e-3, eps=1e-4, max_grad_norm=clip)
        ready, optimizer = accelerator.prepare(model, mine)
        for batch in batches:
            with accelerator.accumulate(ready):
                accelerator.backward(ready(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
        assert mine.steps_taken == 2
        assert_close_weights(model, plain)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fp16": True}, r"fp16=True.*bf16=True"),
        ({"deepspeed": "zero3.json"}, r"deepspeed=.*leave it out"),
        ({"fsdp": "full_shard"}, r"fsdp=.*leave it out"),
        (
            {"world_size": 4, "save_strategy": "steps"},
            r"would save in one of 4",
        ),
        ({"n_gpu": 2}, r"2 GPUs.*CUDA_VISIBLE_DEVICES=0"),
    ],
)
def test_what_does_not_work_is_refused(changes: dict[str, Any], message: str) -> None:
    class Args:
        fp16 = False
        deepspeed = None
        fsdp: Any = None
        world_size = 1
        n_gpu = 1

    args = Args()
    for name, value in changes.items():
        setattr(args, name, value)
    with pytest.raises(ConfigError, match=message):
        overspill.for_trainer(args)


@pytest.fixture(autouse=True)
def _leave_accelerate_as_it_was() -> Iterator[None]:
    yield
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    gc.collect()
