"""`overspill pregate`: fine-tuning with pre-gates."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

import overspill
from overspill import LLM, SamplingParams
from overspill.core.errors import CheckpointError, ConfigError
from overspill.models.huggingface.pregate_file import FILE, gate_tensors
from overspill.models.pregate import pregate_level
from overspill.train.batch_order import BatchOrder
from overspill.train.finetune.config import FinetuneConfig, PregateConfig
from overspill.train.finetune.finetuner import FinetuneSummary, finetune
from overspill.train.finetune.lora import add_lora
from overspill.train.finetune.rows import collate
from overspill.train.finetune.spec import plan_finetuning
from overspill.train.schedule import lr_share
from tests.models.huggingface.pregated import call_by_hand
from tests.train.fakes import Watcher
from tests.train.finetune.tiny import save_nllb, save_switch, tiny_settings, write_pairs
from tests.train.test_export import trained


def run(settings: dict[str, Any], display: Watcher | None = None) -> FinetuneSummary:
    return finetune(PregateConfig.make(settings), display or Watcher())


PREGATES = ["model.layers.1.mlp.gate.weight"]
"""Of a Mixtral with two layers."""
LORA = {"lora": 2, "lora_experts": True, "lora_experts_rank": 3}


def naive_losses(settings: dict[str, Any]) -> list[float]:
    """The oracle: a plain model whose gates are called by hand, and torch's optimizer."""
    config = PregateConfig.make(settings)
    plan = plan_finetuning(config, lambda line: None)
    loader = AutoModelForSeq2SeqLM if plan.seq2seq else AutoModelForCausalLM
    model = loader.from_pretrained(settings["checkpoint"]).train()
    call_by_hand(model, config.pregate_level)
    if config.model.lora is not None:
        torch.manual_seed(config.run.seed)
        model = add_lora(model, config.model, plan.seq2seq)
        for name in PREGATES:
            model.get_base_model().get_parameter(name).requires_grad_(True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=plan.lr, weight_decay=0.01)
    order, losses = BatchOrder(len(plan.data.train), config.run.seed), []
    for step in range(plan.steps):
        rows = [plan.data.train[n] for n in order.take(4 * step, 4)]
        optimizer.param_groups[0]["lr"] = plan.lr * lr_share(step, plan.warmup, plan.steps, 0.0)
        loss = model(**collate(rows, plan.pad, plan.device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_an_encoder_decoder_follows_gates_that_are_called_by_hand(tmp_path: Path) -> None:
    """Prompts are sources, completions are targets; each stack has pre-gates of its own."""
    switch = save_switch(tmp_path / "switch", layers=3, sparse=3)
    data = write_pairs(tmp_path / "a.jsonl")
    settings = tiny_settings(switch, data, tmp_path / "run", steps=3, lr=3e-4, level=2)
    display = Watcher()
    summary = run(settings, display)
    assert summary.lines()[-1] == f"to try it: overspill generate {settings['out']} 'a text'"
    # torch's optimizer skips experts without tokens, which decay
    assert display.losses == pytest.approx(naive_losses(settings), rel=1e-4)
    gates = load_file(Path(str(summary.final), FILE))
    names = {f"{s}.block.2.layer.{n}.mlp.router.classifier" for s, n in STACKS}
    assert {n.removeprefix("pregate.") for n in gates if n.startswith("pregate.")} == {
        f"{name}.weight" for name in names
    }
    own: dict[str, Any] = {"device": "cpu", "quiet": True, "progress": False}
    model = overspill.load(str(summary.final), **own)
    for name, value in gate_tensors(model).items():
        assert torch.equal(value, gates[f"pregate.{name}"])
        assert not torch.equal(value, gates[f"gate.{name}"])
    model.overspill.close()
    with pytest.raises(ConfigError, match=r"--level 3 needs at least 4 .* has 3: give"):
        run({**settings, "level": 3, "out": str(tmp_path / "other")})


STACKS = (("encoder", 1), ("decoder", 2))
"""Of Switch: name, and the number of the MLP in a layer."""


def test_nllb_is_trained_without_layer_drop_and_with_either_routing(tmp_path: Path) -> None:
    nllb, data = save_nllb(tmp_path / "nllb"), write_pairs(tmp_path / "a.jsonl")
    losses = []
    for fixed in (False, True):
        settings = tiny_settings(
            nllb, data, tmp_path / f"run{fixed}", steps=2, fix_nllb_routing=fixed
        )
        said: list[str] = []
        plan = plan_finetuning(PregateConfig.make(settings), said.append)
        assert plan.overrides == {"encoder_layerdrop": 0.0}
        assert any(line.startswith("encoder_layerdrop=0.05 is set to 0: lay") for line in said)
        display = Watcher()
        summary = run(settings, display)
        losses.append(display.losses)
        model = overspill.load(str(summary.final), device="cpu", quiet=True, progress=False)
        assert pregate_level(model) == 1
        model.overspill.close()
    assert losses[0] != losses[1]


def test_the_routing_of_nllb_is_refused_for_another_model(mixtral: Path, tmp_path: Path) -> None:
    data = write_pairs(tmp_path / "a.jsonl")
    settings = tiny_settings(mixtral, data, tmp_path / "run", fix_nllb_routing=True)
    with pytest.raises(ConfigError, match=r"this model is mixtral.*--fix-nllb-routing"):
        run(settings)


def test_training_follows_gates_that_are_called_by_hand(mixtral: Path, tmp_path: Path) -> None:
    data = write_pairs(tmp_path / "a.jsonl")
    settings = tiny_settings(mixtral, data, tmp_path / "run", steps=3, lr=3e-4)
    display = Watcher()
    summary = run(settings, display)
    assert display.losses == pytest.approx(naive_losses(settings), rel=1e-5)
    final = Path(str(summary.final))
    name = "model.layers.1.mlp.gate.weight"
    gates = load_file(final / FILE)
    plain = AutoModelForCausalLM.from_pretrained(mixtral).state_dict()
    assert torch.equal(gates[f"gate.{name}"], plain[name])
    assert not torch.equal(gates[f"pregate.{name}"], plain[name])
    conventional = AutoModelForCausalLM.from_pretrained(final).state_dict()
    assert torch.equal(conventional[name], plain[name])


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")
def test_adapters_are_trained_beside_pre_gates(mixtral: Path, tmp_path: Path) -> None:
    """They are served together, merged, and continued; peft loads the adapters alone."""
    peft = pytest.importorskip("peft")
    data = write_pairs(tmp_path / "a.jsonl")
    settings = tiny_settings(mixtral, data, tmp_path / "run", steps=3, lr=1e-3, **LORA)
    display = Watcher()
    final = Path(str(run(settings, display).final))
    assert display.losses == pytest.approx(naive_losses(settings), rel=1e-5)
    gates, plain = load_file(final / FILE), AutoModelForCausalLM.from_pretrained(mixtral)
    for name in PREGATES:
        assert torch.equal(gates[f"gate.{name}"], plain.get_parameter(name))
        assert not torch.equal(gates[f"pregate.{name}"], gates[f"gate.{name}"])
    assert all("lora_" in name for name in load_file(final / "adapter_model.safetensors"))
    peft.PeftModel.from_pretrained(plain, final)

    overspill.merge(final, tmp_path / "merged")
    asked, prompts = SamplingParams(max_tokens=8, ignore_eos=True), ["a text", "5 + 1 = "]
    answers = []
    for model in (final, tmp_path / "merged"):
        with LLM(model, device="cpu", context=64, mode="pre-gated") as llm:
            assert pregate_level(llm.model) == 1
            for name, value in gate_tensors(llm.model).items():
                assert torch.equal(value, gates[f"pregate.{name}"])
            answers.append([each.token_ids for each in llm.generate(prompts, asked)])
    assert answers[0] == answers[1]
    again = run(tiny_settings(tmp_path / "merged", data, tmp_path / "again", steps=1, **LORA))
    overspill.merge(str(again.final), tmp_path / "twice")
    twice = load_file(tmp_path / "twice" / FILE)
    assert not any(torch.equal(twice[name], gates[name]) for name in gates if "pregate" in name)


@pytest.mark.parametrize("change", [{"dtype": "bf16"}, {"quantize": "fp8"}])
def test_pre_gates_beside_adapters_belong_to_their_base(
    mixtral: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    """Whatever its data type, or the packing of its experts, when they are trained."""
    data = write_pairs(tmp_path / "a.jsonl")
    settings = tiny_settings(mixtral, data, tmp_path / "run", steps=1, **LORA, **change)
    final = Path(str(run(settings).final))
    own: dict[str, Any] = {"device": "cpu", "quiet": True, "progress": False, "train": False}
    model = overspill.load(mixtral, adapter=final, **own)
    assert pregate_level(model) == 1
    model.overspill.close()
    other = AutoModelForCausalLM.from_pretrained(mixtral)
    with torch.no_grad():
        other.model.norm.weight.mul_(2)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"saved with another model\.norm\.weight than"):
        overspill.load(tmp_path / "other", adapter=final, **own)


@pytest.mark.parametrize("extra", [{}, LORA])
def test_a_stopped_run_resumes_to_the_same_bits(
    mixtral: Path, tmp_path: Path, extra: dict[str, Any]
) -> None:
    data = write_pairs(tmp_path / "a.jsonl")

    def stop(done: int) -> None:
        if done == 2:
            os.kill(os.getpid(), signal.SIGINT)

    straight = run(tiny_settings(mixtral, data, tmp_path / "a", steps=3, **extra))
    settings = tiny_settings(mixtral, data, tmp_path / "b", steps=3, **extra)
    first = run(settings, Watcher(stop))
    assert f"to continue: overspill pregate --resume --out {tmp_path / 'b'}" in first.lines()
    second = run({**settings, "resume": True})
    for file in sorted(Path(str(straight.final)).glob("*.safetensors")):
        other = load_file(Path(str(second.final)) / file.name)
        for name, value in load_file(file).items():
            assert torch.equal(other[name], value), name
    with pytest.raises(CheckpointError, match="pregate_level=1; this run has pregate_level=None"):
        finetune(FinetuneConfig.make({**settings, "resume": True, "steps": 9}), Watcher())


def test_a_stopped_encoder_decoder_in_bf16_resumes_to_the_same_losses(tmp_path: Path) -> None:
    """Its routers convert themselves to float32."""
    folder = save_switch(tmp_path / "plain", sparse=2, dropout=0.2)
    data, own = write_pairs(tmp_path / "a.jsonl"), {"steps": 3, "dtype": "bf16", "lr": 1e-2}

    def stop(done: int) -> None:
        if done == 2:
            os.kill(os.getpid(), signal.SIGINT)

    straight, first, second = Watcher(), Watcher(stop), Watcher()
    run(tiny_settings(folder, data, tmp_path / "a", **own), straight)
    settings = tiny_settings(folder, data, tmp_path / "b", **own)
    run(settings, first)
    run({**settings, "resume": True}, second)
    assert first.losses + second.losses == straight.losses


def test_the_pre_gates_alone_and_then_continued(mixtral: Path, tmp_path: Path) -> None:
    data = write_pairs(tmp_path / "a.jsonl")
    frozen = {"freeze_experts": True, "freeze_dense": True}
    alone = run(tiny_settings(mixtral, data, tmp_path / "a", steps=2, **frozen))
    before = AutoModelForCausalLM.from_pretrained(mixtral).state_dict()
    after = AutoModelForCausalLM.from_pretrained(str(alone.final)).state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    first = load_file(Path(str(alone.final), FILE))
    again = run(tiny_settings(Path(str(alone.final)), data, tmp_path / "b", steps=2))
    second = load_file(Path(str(again.final), FILE))
    for name, value in first.items():
        assert torch.equal(second[name], value) == name.startswith("gate."), name
    with pytest.raises(ConfigError, match=r"--level 2: .* has pre-gates of level 1"):
        run(tiny_settings(Path(str(alone.final)), data, tmp_path / "c", level=2))


def test_a_run_of_overspill_train_is_exported_first(tmp_path: Path) -> None:
    source = trained(tmp_path, layers=3)
    data = write_pairs(tmp_path / "a.jsonl")
    settings = tiny_settings(source, data, tmp_path / "pregated", steps=2, level=2, seq_len=32)
    display = Watcher()
    summary = run(settings, display)
    assert (source / "exported-step-00000004" / "config.json").is_file()
    model = overspill.load(str(summary.final), train=False, device="cpu", quiet=True)
    assert pregate_level(model) == 2
    model.overspill.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"level": 0}, "--level 0 must be at least 1"),
        ({"level": 2}, r"--level 2 needs at least 3 MoE blocks .* has 2: give at most 1"),
        ({"lora": 2, "freeze_experts": True}, "--lora already freezes the whole model"),
    ],
)
def test_what_is_not_possible_is_named_before_anything_is_loaded(
    mixtral: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    data = write_pairs(tmp_path / "a.jsonl")
    with pytest.raises(ConfigError, match=message):
        run(tiny_settings(mixtral, data, tmp_path / "run", **change))
    assert not (tmp_path / "run").exists()
