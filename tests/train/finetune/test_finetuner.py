import json
import math
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from overspill.core.errors import CheckpointError, ConfigError, NonFiniteError
from overspill.train.batch_order import BatchOrder
from overspill.train.finetune import finetuner
from overspill.train.finetune.config import FinetuneConfig
from overspill.train.finetune.finetuner import FinetuneSummary, finetune
from overspill.train.finetune.rows import collate
from overspill.train.finetune.spec import plan_finetuning
from overspill.train.metrics import read_lines
from overspill.train.run_spec import RunSpec
from overspill.train.schedule import lr_share
from overspill.train.session import Session, build_session
from tests.slow import slow_rows
from tests.train.fakes import Watcher
from tests.train.finetune.tiny import (
    make_tokenizer,
    save_mixtral,
    save_nllb,
    tiny_settings,
    write_jsonl,
    write_labels,
    write_pairs,
)


def _finetune(settings: dict[str, Any], display: Watcher | None = None) -> FinetuneSummary:
    return finetune(FinetuneConfig.make(settings), display or Watcher())


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def _plain_losses(settings: dict[str, Any]) -> list[float]:
    """The oracle: transformers' model, torch's optimizer, all rows of a step in one batch."""
    whole = {"batch": settings["batch"] * settings.get("accumulate", 1), "accumulate": 1}
    config = FinetuneConfig.make({**settings, **whole})
    plan = plan_finetuning(config, lambda line: None)
    loader = AutoModelForSeq2SeqLM if plan.seq2seq else AutoModelForCausalLM
    model = loader.from_pretrained(settings["checkpoint"], dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.lr, weight_decay=0.01)
    order, position, losses = BatchOrder(len(plan.data.train), config.run.seed), 0, []
    for step in range(plan.steps):
        rows = [plan.data.train[n] for n in order.take(position, config.sequences_per_step)]
        position += len(rows)
        for group in optimizer.param_groups:
            group["lr"] = plan.lr * lr_share(step, plan.warmup, plan.steps, 0.0)
        loss = model(**collate(rows, plan.pad, plan.device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _data(kind: str, folder: Path) -> Path:
    if kind == "pairs":
        # of different lengths: the mean over a step is over its tokens, not over its micro-batches
        lines = [{"prompt": f"{n}:", "completion": "ab" * (1 + n % 5)} for n in range(30)]
        return write_jsonl(folder / "pairs.jsonl", lines)
    if kind == "text":
        return write_jsonl(folder / "text.jsonl", [{"text": "spill " * n} for n in range(1, 20)])
    return write_labels(folder / "labels.tsv", 30)


@pytest.mark.parametrize(
    ("kind", "accumulate"), slow_rows([("pairs", 1), ("text", 3), ("labels", 1)], 0)
)
def test_training_follows_the_plain_model(
    mixtral: Path, tmp_path: Path, kind: str, accumulate: int
) -> None:
    # So low a rate that no close call of a router falls the other way.
    settings = tiny_settings(
        mixtral, _data(kind, tmp_path), tmp_path / "run", steps=3, batch=2, accumulate=accumulate,
        seq_len=64, lr=3e-4,
    )  # fmt: skip
    display = Watcher()
    _finetune(settings, display)
    assert display.losses == pytest.approx(_plain_losses(settings), rel=2e-6)


def test_an_encoder_decoder_follows_the_plain_model(switch: Path, tmp_path: Path) -> None:
    settings = tiny_settings(
        switch, _data("pairs", tmp_path), tmp_path / "run", steps=3, batch=2, accumulate=2
    )
    display = Watcher()
    _finetune(settings, display)
    assert display.losses == pytest.approx(_plain_losses(settings), rel=1e-4)
    AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run" / "final")


def test_experts_are_trained_with_the_dropout_of_the_checkpoint(
    switch: Path, tmp_path: Path
) -> None:
    checkpoint = shutil.copytree(switch, tmp_path / "switch")
    config = json.loads((checkpoint / "config.json").read_text()) | {"dropout_rate": 0.3}
    (checkpoint / "config.json").write_text(json.dumps(config))
    displays, data = [Watcher(), Watcher(), Watcher()], _data("pairs", tmp_path)
    for number, display in enumerate(displays):
        source, recompute = (checkpoint, switch)[number == 2], number == 1
        settings = tiny_settings(
            source, data, tmp_path / f"{number}", steps=2, gradient_checkpointing=recompute
        )
        plan = plan_finetuning(FinetuneConfig.make(settings), lambda _: None)
        assert plan.overrides == {}
        _finetune(settings, display)
    first, recomputed, without = (display.losses for display in displays)
    assert recomputed == pytest.approx(first, rel=1e-4)
    assert without != pytest.approx(first, rel=1e-2)
    stopped, resumed = Watcher(_stop_at(1)), Watcher()
    settings = tiny_settings(checkpoint, data, tmp_path / "stopped", steps=2)
    _finetune(settings, stopped)
    _finetune({**settings, "resume": True}, resumed)
    assert stopped.losses + resumed.losses == first


@pytest.mark.usefixtures("pictures")
def test_a_run_leaves_everything_in_its_folder(mixtral: Path, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    display, run = Watcher(), tmp_path / "run"
    data = write_pairs(tmp_path / "a.jsonl", 17)
    settings = tiny_settings(mixtral, data, run, epochs=2.0, trace_steps=1, lr=1e-2)
    summary = _finetune(settings, display)
    assert summary.steps == 8
    assert summary.eval_loss_before is not None
    assert summary.eval_loss is not None
    assert summary.eval_loss < summary.eval_loss_before - 1
    for name in ("config.json", "metrics.jsonl", "loss.png", "timeline.json.gz", "timeline.png"):
        assert (run / name).exists(), name
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000008"]
    lines = list(read_lines(run / "metrics.jsonl"))
    evals = [(line["step"], line["eval_loss"]) for line in lines if "eval_loss" in line]
    assert [step for step, _ in evals] == [0, 4, 8]
    assert [loss for _, loss in evals] == display.evals
    assert json.loads((run / "config.json").read_text())["model"]["checkpoint"] == str(mixtral)
    assert set(threading.enumerate()) <= before


def test_the_models_it_leaves_are_plain_checkpoints(mixtral: Path, tmp_path: Path) -> None:
    display, run = Watcher(), tmp_path / "run"
    data = write_pairs(tmp_path / "a.jsonl")
    settings = tiny_settings(mixtral, data, run, steps=4, eval_every=2)
    summary = _finetune(settings, display)
    plan = plan_finetuning(FinetuneConfig.make(settings), lambda line: None)
    for folder, step in ((summary.final, 4), (summary.best, summary.best_step)):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        batch = collate(plan.data.eval_rows, plan.pad, plan.device)
        with torch.no_grad():
            loss = model(**batch).loss.item()
        assert loss == pytest.approx(display.evals[int(step or 0) // 2], rel=1e-5)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer("abc")["input_ids"] == make_tokenizer()("abc")["input_ids"]


def test_the_best_model_is_kept_when_it_gets_worse(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses are given: those of a run that diverges depend on the number of threads."""
    losses = iter([5.0, 3.0, 2.0, 4.0, 6.0])
    monkeypatch.setattr(finetuner, "mean_loss", lambda *_: next(losses))
    run = tmp_path / "run"
    pairs = write_pairs(tmp_path / "a.jsonl")
    settings = tiny_settings(mixtral, pairs, run, steps=4, eval_every=1, lr=0.1, clip=0.0)
    summary, best = _finetune(settings), 2
    assert summary.best_step == best
    assert not (run / "best").is_symlink()
    assert f"best model (step {best}): {run / 'best'}" in summary.lines()
    assert _weights(run / "best").keys() == _weights(run / "final").keys()
    assert any(
        not torch.equal(a, b)
        for a, b in zip(
            _weights(run / "best").values(), _weights(run / "final").values(), strict=True
        )
    )


def _stop_at(step: int) -> Callable[[int], None]:
    return lambda done: os.kill(os.getpid(), signal.SIGINT) if done == step else None


# tests/cli/test_finetune.py kills a run that clips
EXPERTS = {"lora_experts": True, "lora_experts_rank": 3}
ADAPTERS = {"lora": 2, "lr": 0.05, "accumulate": 2, "clip": 0.5, **EXPERTS}
RESUMED: list[dict[str, Any]] = [ADAPTERS, {**ADAPTERS, "quantize": "fp8"}]
SLOW = [
    pytest.param(extra, marks=pytest.mark.slow)
    for extra in (
        {"accumulate": 2, "clip": 0.0},
        {},
        {"freeze_experts": True},
        {"freeze_dense": True},
        {"dtype": "bf16"},
    )
]


@pytest.mark.parametrize("extra", [*RESUMED, *SLOW], ids=lambda extra: "-".join(extra) or "full")
def test_a_stopped_run_resumes_to_the_same_bits(
    mixtral: Path, tmp_path: Path, extra: dict[str, Any]
) -> None:
    data = write_pairs(tmp_path / "a.jsonl")
    straight, first, second = Watcher(), Watcher(_stop_at(2)), Watcher()
    _finetune(tiny_settings(mixtral, data, tmp_path / "a", steps=4, **extra), straight)
    settings = tiny_settings(mixtral, data, tmp_path / "b", steps=4, **extra)
    summary = _finetune(settings, first)
    assert (summary.interrupted, summary.steps, summary.final) == (True, 2, None)
    again = f"to continue: overspill finetune --resume --out {tmp_path / 'b'}"
    assert again in summary.lines()
    (checkpoint,) = (tmp_path / "b" / "checkpoints").glob("step-*")
    holds_experts = any(name.endswith(".w_in") for name in _weights(checkpoint))
    frozen = "lora" in extra or "freeze_experts" in extra
    assert holds_experts != frozen, "a run that continues reads frozen experts from the model"
    resumed = _finetune({**settings, "resume": True}, second)
    assert first.losses + second.losses == straight.losses
    assert first.evals + second.evals == straight.evals
    assert resumed.eval_loss_before == straight.evals[0]
    for folder in ("best", "final"):
        one, two = _weights(tmp_path / "a" / folder), _weights(tmp_path / "b" / folder)
        assert one
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_routers_in_float32_of_a_bf16_run_are_resumed(switch: Path, tmp_path: Path) -> None:
    data = write_pairs(tmp_path / "a.jsonl")
    given = {"dtype": "bf16", "eval_split": 0.0, "steps": 2}
    straight = Watcher()
    _finetune(tiny_settings(switch, data, tmp_path / "a", **given), straight)
    first, second = Watcher(_stop_at(1)), Watcher()
    settings = tiny_settings(switch, data, tmp_path / "b", **given)
    _finetune(settings, first)
    _finetune({**settings, "resume": True}, second)
    assert first.losses + second.losses == straight.losses
    one, two = _weights(tmp_path / "a" / "final"), _weights(tmp_path / "b" / "final")
    assert not _changed(one, two)
    routers = {name for name in one if name.endswith("router.classifier.weight")}
    assert {str(one[name].dtype) for name in routers} == {"torch.float32"}


def test_an_evaluation_leaves_the_capacity_of_nllb_as_it_was(tmp_path: Path) -> None:
    """Its routers keep that of the last batch, also of training: a run that resumes begins with
    none."""
    nllb, data = save_nllb(tmp_path / "nllb"), write_pairs(tmp_path / "a.jsonl")
    given = {"steps": 3, "eval_every": 1}
    straight, first, second = Watcher(), Watcher(_stop_at(1)), Watcher()
    settings = tiny_settings(nllb, data, tmp_path / "b", **given)
    _finetune(tiny_settings(nllb, data, tmp_path / "a", **given), straight)
    _finetune(settings, first)
    _finetune({**settings, "resume": True}, second)
    assert first.losses + second.losses == straight.losses


@pytest.mark.slow
def test_a_finished_run_can_be_made_longer(mixtral: Path, tmp_path: Path) -> None:
    settings = tiny_settings(mixtral, write_pairs(tmp_path / "a.jsonl"), tmp_path / "run", steps=4)
    first = _finetune(settings)
    assert (tmp_path / "run" / "best").is_symlink()
    kept = _weights(tmp_path / "run" / "best")
    # so high a rate that the last model is worse
    longer = _finetune({**settings, "steps": 8, "lr": 10.0, "resume": True})
    assert (first.best_step, longer.best_step, longer.steps) == (4, 4, 8)
    best = _weights(tmp_path / "run" / "best")
    assert all(torch.equal(kept[name], best[name]) for name in kept)
    display = Watcher()
    assert _finetune({**settings, "steps": 8, "resume": True}, display).steps == 8
    assert any("give a higher --steps" in line for line in display.lines)


def test_a_run_killed_before_its_last_model_writes_it_when_resumed(
    mixtral: Path, tmp_path: Path
) -> None:
    settings = tiny_settings(mixtral, write_pairs(tmp_path / "a.jsonl"), tmp_path / "run", steps=2)
    _finetune(settings)
    final = _weights(tmp_path / "run" / "final")
    shutil.rmtree(tmp_path / "run" / "final")
    (tmp_path / "run" / "best").unlink()
    _finetune({**settings, "resume": True})
    again = _weights(tmp_path / "run" / "best")
    assert all(torch.equal(final[name], again[name]) for name in final)


def test_accuracy_rises_and_is_told(mixtral: Path, tmp_path: Path) -> None:
    train, dev = write_labels(tmp_path / "a.tsv", 40), write_labels(tmp_path / "dev.tsv", 12)
    settings = tiny_settings(
        mixtral, train, tmp_path / "run", eval_data=str(dev), labels="no,yes", epochs=2.0,
        lr=1e-2, eval_every=0,
    )  # fmt: skip
    summary = _finetune(settings)
    assert summary.accuracy_before is not None
    assert summary.accuracy_before < 0.8
    assert summary.accuracy == 1.0
    assert f"accuracy {summary.accuracy_before:.1%} → 100.0%" in summary.lines()
    lines = list(read_lines(tmp_path / "run" / "metrics.jsonl"))
    found = [line["accuracy"] for line in lines if "accuracy" in line]
    assert (found[0], found[-1]) == (summary.accuracy_before, 1.0)


def test_metrics_are_scores_of_what_the_saved_model_generates(
    mixtral: Path, tmp_path: Path
) -> None:
    """And training is the same to the bit as without them."""
    lines = [{"prompt": f"{n} is ", "answers": ["xy"[n % 3 == 0], f"{n}"]} for n in range(40)]
    data = write_jsonl(tmp_path / "a.jsonl", lines)
    given = {"eval_split": 0.2, "eval_every": 3, "lr": 3e-2, "steps": 6}
    settings = tiny_settings(mixtral, data, tmp_path / "run", metric=["f1", "em"], **given)
    display = Watcher()
    summary = _finetune({**settings, "metric_tokens": 3}, display)
    evals = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "scores" in line]
    assert [line["step"] for line in evals] == [0, 3, 6]
    assert (summary.scores_before, summary.scores) == (evals[0]["scores"], evals[2]["scores"])
    assert list(summary.scores or {}) == ["f1", "em"]
    best = max(evals[1:], key=lambda line: (line["scores"]["f1"], -line["eval_loss"]))
    assert summary.best_step == best["step"]
    assert any(line.startswith("f1 0.0% → ") and ", em 0.0% → " in line for line in summary.lines())

    model = AutoModelForCausalLM.from_pretrained(summary.final, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(summary.final)
    plan = plan_finetuning(FinetuneConfig.make(settings), lambda line: None)
    right = []
    for question in plan.data.questions.items if plan.data.questions else ():
        prompt = torch.tensor(question.prompt[None]).long()
        out = model.generate(prompt, max_new_tokens=3, do_sample=False)
        text = tokenizer.decode(out[0, prompt.shape[1] :], skip_special_tokens=True)
        right.append(text.strip() in question.references)
    assert len(right) == 8
    assert any(right)
    assert evals[2]["scores"]["em"] == sum(right) / 8

    plain = Watcher()
    _finetune(tiny_settings(mixtral, data, tmp_path / "plain", **given), plain)
    assert plain.losses == display.losses
    assert not _changed(_weights(tmp_path / "plain/final"), _weights(tmp_path / "run/final"))


def test_an_encoder_decoder_is_scored_and_told_what_it_cannot(
    switch: Path, mixtral: Path, tmp_path: Path
) -> None:
    pairs = write_pairs(tmp_path / "a.jsonl")
    summary = _finetune(
        tiny_settings(switch, pairs, tmp_path / "run", steps=1, metric=["rougeL,em"], lora=2)
    )
    assert list(summary.scores or {}) == ["rougeL", "em"]
    labels = write_labels(tmp_path / "labels.tsv")
    for data, change, message in (
        (labels, {}, r"--metric em needs prompts with answers, and .*labels.tsv:2 is a sentence"),
        (pairs, {"metric": ["em,bleu"]}, "--metric 'bleu' is unknown; give .* em, f1, rouge1"),
        (pairs, {"eval_split": 0.0}, "--metric needs examples for evaluation, and --eval-split 0"),
        (pairs, {"stages": 2}, "--metric .* which --stages divides; drop one"),
    ):
        settings = tiny_settings(mixtral, data, tmp_path / "no", **{"metric": ["em"], **change})
        with pytest.raises(ConfigError, match=message):
            _finetune(settings)
    assert not (tmp_path / "no").exists()


def _changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize("frozen", slow_rows(["freeze_experts", "freeze_dense"], 1))
def test_what_is_frozen_stays(mixtral: Path, tmp_path: Path, frozen: str) -> None:
    data = write_pairs(tmp_path / "a.jsonl")
    display = Watcher()
    _finetune(tiny_settings(mixtral, data, tmp_path / "run", steps=2, **{frozen: True}), display)
    before, after = _weights(mixtral), _weights(tmp_path / "run" / "final")
    experts = {name for name in before if ".experts." in name}
    assert experts
    expected = before.keys() - experts if frozen == "freeze_experts" else experts
    assert _changed(before, after) == expected
    assert display.losses[-1] != display.losses[0]


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")
@pytest.mark.parametrize("extra", [{}, EXPERTS], ids=["attention", "experts"])
def test_lora_trains_adapters_alone(mixtral: Path, tmp_path: Path, extra: dict[str, Any]) -> None:
    from peft import PeftModel

    display, run = Watcher(), tmp_path / "run"
    data = write_pairs(tmp_path / "a.jsonl")
    settings = tiny_settings(mixtral, data, run, steps=4, lora=4, lr=0.05, clip=0.0, **extra)
    summary = _finetune(settings, display)
    assert summary.final is not None
    names = set(_weights(run / "final"))
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    experts = {"experts", "base_layer"} if extra else set()
    assert {name.split(".")[-3] for name in names} == attention | experts
    assert all("lora_" in name for name in names)
    base = AutoModelForCausalLM.from_pretrained(mixtral, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, summary.final).eval()
    plan = plan_finetuning(FinetuneConfig.make(settings), lambda line: None)
    batch = collate(plan.data.eval_rows, plan.pad, plan.device)
    with torch.no_grad():
        assert model(**batch).loss.item() == pytest.approx(display.evals[-1], rel=1e-5)


def test_lora_targets_are_checked(mixtral: Path, tmp_path: Path) -> None:
    data = write_pairs(tmp_path / "a.jsonl")
    settings = tiny_settings(mixtral, data, tmp_path / "run", steps=1, lora=2)
    _finetune({**settings, "lora_targets": "q_proj, lm_head"})
    names = _weights(tmp_path / "run" / "final")
    assert {name.split(".")[-3] for name in names} == {"q_proj", "lm_head"}
    other = {**settings, "out": str(tmp_path / "other"), "lora_targets": "qproj"}
    with pytest.raises(ConfigError, match=r"--lora-targets qproj is not a linear layer .*k_proj"):
        _finetune(other)
    assert not (tmp_path / "other").exists()


def test_lora_without_peft_says_what_to_install(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    settings = tiny_settings(mixtral, write_pairs(tmp_path / "a.jsonl"), tmp_path / "run", lora=2)
    with pytest.raises(ConfigError, match=r"--lora needs peft.*pip install '\.\[lora\]'"):
        _finetune(settings)


def test_the_balance_loss_is_the_models_own(mixtral: Path, tmp_path: Path) -> None:
    data = write_pairs(tmp_path / "a.jsonl")
    settings = tiny_settings(mixtral, data, tmp_path / "run", steps=1, balance=True)
    _finetune(settings)
    line = next(line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "loss" in line)
    plan = plan_finetuning(FinetuneConfig.make(settings), lambda line: None)
    rows = [plan.data.train[n] for n in BatchOrder(len(plan.data.train), 0).take(0, 4)]
    model = AutoModelForCausalLM.from_pretrained(mixtral, dtype=torch.float32).train()
    out = model(**collate(rows, plan.pad, plan.device), output_router_logits=True)
    balance = model.config.router_aux_loss_coef * out.aux_loss.item()
    assert balance > 0
    assert line["loss"] == pytest.approx(out.loss.item(), rel=1e-6)
    assert line["balance"] == pytest.approx(balance, rel=1e-3)
    assert line["ce"] == pytest.approx(out.loss.item() - balance, rel=1e-6)


@pytest.mark.slow
def test_chats_are_trained_on_with_the_template(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}<end>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    checkpoint = save_mixtral(tmp_path / "checkpoint")
    (tmp_path / "chat.jinja").write_text(template)
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    data = write_jsonl(tmp_path / "a.jsonl", [{"messages": turns}] * 30)
    settings = tiny_settings(checkpoint, data, tmp_path / "run", steps=12, seq_len=64, lr=1e-2)
    with pytest.raises(ConfigError, match="has no chat template"):
        _finetune(settings)
    display = Watcher()
    summary = _finetune({**settings, "chat_template": str(tmp_path / "chat.jinja")}, display)
    assert display.losses[-1] < display.losses[0] / 2
    assert AutoTokenizer.from_pretrained(summary.final).chat_template == template


def test_a_nan_is_told_with_the_way_back(mixtral: Path, tmp_path: Path) -> None:
    built: list[Session] = []

    def build(spec: RunSpec) -> Session:
        built.append(build_session(spec))
        return built[0]

    def poison(step: int) -> None:
        if step == 4:
            with torch.no_grad():
                built[0].model.lm_head.weight.fill_(math.nan)

    data = write_pairs(tmp_path / "a.jsonl")
    config = FinetuneConfig.make(tiny_settings(mixtral, data, tmp_path / "run", eval_every=0))
    with pytest.raises(
        NonFiniteError, match=r"step 5: the loss is nan.*overspill finetune --resume"
    ):
        finetune(config, Watcher(poison), build)


def test_another_model_is_not_resumed(mixtral: Path, tmp_path: Path) -> None:
    data = write_pairs(tmp_path / "a.jsonl")
    settings = tiny_settings(mixtral, data, tmp_path / "run", steps=1)
    _finetune(settings)
    with pytest.raises(ConfigError, match="already holds a run; add --resume"):
        _finetune(settings)
    for change, message in (
        ({"lora": 2}, "was written with lora=None; this run has lora=2"),
        ({"seq_len": 100}, "was written with seq_len=256; this run has seq_len=100"),
        ({"freeze_dense": True}, "was written with freeze_dense=False"),
    ):
        with pytest.raises(CheckpointError, match=message):
            _finetune({**settings, **change, "resume": True})
