"""TRL trains adapters of offloaded experts as those of the plain model. Run where trl is installed:
`pytest -m slow tests/models/huggingface/test_lora_trl.py`."""

import copy
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MixtralForCausalLM

from tests.models.huggingface.oracle import offloaded
from tests.train.finetune.tiny import make_tokenizer, mixtral_config

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_losses_norms_and_adapters_are_those_of_the_plain_model(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trl: Any = pytest.importorskip("trl")
    # the identity of a dataset in a cache; pickling all that it depends on fails in some versions
    hasher: Any = pytest.importorskip("datasets.fingerprint").Hasher
    monkeypatch.setattr(hasher, "hash", lambda *values: uuid.uuid4().hex)
    torch.manual_seed(0)
    plain = MixtralForCausalLM(mixtral_config())
    expected = _train(trl, kind, copy.deepcopy(plain), tmp_path / "plain")
    with offloaded(plain, "host", tmp_path) as twin:
        found = _train(trl, kind, twin, tmp_path / "offloaded")
    assert found[0] == [pytest.approx(line, rel=1e-5) for line in expected[0]]
    assert len(found[1]) == 12
    for name, adapter in expected[1].items():
        torch.testing.assert_close(found[1][name], adapter, rtol=1e-5, atol=1e-6)


def _train(
    trl: Any, kind: str, model: Any, out: Path
) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Losses and norms, and the trained adapters."""
    import peft
    from datasets import Dataset

    lines = [
        {"text": f"{n} plus {n} is {2 * n}"}
        if kind == "SFT"
        else {"prompt": f"{n} plus {n} is", "chosen": f" {2 * n}", "rejected": f" {n} or more"}
        for n in range(16)
    ]
    args = getattr(trl, f"{kind}Config")(
        output_dir=str(out), max_steps=3, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, learning_rate=1e-3, max_grad_norm=0.5, logging_steps=1,
        report_to="none", use_cpu=True, bf16=False, save_strategy="no", seed=0,
    )  # fmt: skip
    torch.manual_seed(1)
    trainer = getattr(trl, f"{kind}Trainer")(
        model=model,
        args=args,
        train_dataset=Dataset.from_list(lines),
        processing_class=make_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}"),
        peft_config=peft.LoraConfig(
            r=4,
            target_modules=["q_proj"],
            target_parameters=["experts.gate_up_proj", "experts.down_proj"],
            init_lora_weights=False,
        ),
    )
    trainer.train()
    history = [
        (line["loss"], line["grad_norm"]) for line in trainer.state.log_history if "loss" in line
    ]
    trained = {n: p.detach() for n, p in trainer.model.named_parameters() if p.requires_grad}
    return history, {name: each for name, each in trained.items() if "lora_" in name}
