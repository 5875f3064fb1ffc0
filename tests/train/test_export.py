"""An exported run against the model that was trained."""

import errno
import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralForCausalLM

from overspill.core.errors import CheckpointError, ConfigError, DiskError
from overspill.models.gpt import GPTMoE
from overspill.train import checkpoint
from overspill.train.config import TrainConfig
from overspill.train.export import export
from overspill.train.tokenizer import ByteTokenizer
from overspill.train.train_spec import shape_of
from overspill.train.trainer import train
from tests.train.fakes import Watcher, tiny_settings
from tests.train.test_export_tokenizer import word_tokenizer


def trained(folder: Path, **changes: Any) -> Path:
    settings = {"gated": True, "top_k": 2, "steps": 4, "eval_every": 0, "trace_steps": 0}
    config = TrainConfig.make(tiny_settings(folder, **{**settings, **changes}))
    train(config, Watcher())
    return folder / "run"


def plain(run: Path) -> GPTMoE:
    """The trained model, in memory."""
    path = checkpoint.newest(run / "checkpoints")
    assert path is not None
    model = GPTMoE(shape_of(checkpoint.read_state(path).facts, max_seq=64))
    model.load_state_dict(load_file(path / "model.safetensors"))
    return model.eval()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("trained"))


def assert_same_logits(out: Path, run: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(out)
    assert isinstance(theirs, MixtralForCausalLM)
    assert theirs.dtype is torch.float32
    mine = plain(run)
    tokens = torch.randint(mine.config.vocab, (2, 64))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, mine(tokens).logits, rtol=1e-5, atol=1e-5)


def test_transformers_computes_what_was_trained(run: Path, tmp_path: Path) -> None:
    reports: list[tuple[str, int, int]] = []
    done = export(run, tmp_path / "out", progress=lambda *report: reports.append(report))
    assert_same_logits(tmp_path / "out", run)
    assert (done.step, Path(done.checkpoint).name) == (4, "step-00000004")
    assert done.parameters == plain(run).num_parameters()
    assert done.bytes == 4 * done.parameters == reports[-1][1] == reports[-1][2]
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_untied_embeddings_in_shards(tmp_path: Path) -> None:
    run = trained(tmp_path, preset="w1")
    out = tmp_path / "out"
    export(run, out, shard_bytes=20_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == files
    assert len(files) > 3
    for file in files:
        tensors = load_file(out / file)
        assert {index["weight_map"][name] for name in tensors} == {file}
        assert len(tensors) == 1 or sum(value.nbytes for value in tensors.values()) <= 20_000
    assert "lm_head.weight" in index["weight_map"]
    assert_same_logits(out, run)


def test_the_tokenizer_of_the_export_is_that_of_the_run(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "  Überlauf,\tn'est-ce pas? 溢れ 🙂\r\n [INST] <s> "
    assert tokenizer(text).input_ids == ByteTokenizer().encode(text).tolist()
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer("a<|endoftext|>b").input_ids == [97, 256, 98]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 256)
    assert tokenizer.model_max_length == 256  # the context of the preset
    batch = tokenizer(["a", "abc"], padding=True, return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (model.generation_config.eos_token_id, model.config.pad_token_id) == (256, 256)
    assert model.generate(**batch, max_new_tokens=2).shape[1] <= 5


def test_a_tokenizer_json_goes_with_the_model(tmp_path: Path) -> None:
    path = word_tokenizer(tmp_path, "?", "expert", "of", "layer", "spills", "<|endoftext|>")
    run = trained(tmp_path, tokenizer=str(path))
    export(run, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("expert of layer").input_ids == [1, 2, 3]
    assert tokenizer.eos_token_id == 5
    moved = path.rename(tmp_path / "moved.json")
    with pytest.raises(ConfigError, match=r"--tokenizer .* cannot be read"):
        export(run, tmp_path / "again")
    export(run, tmp_path / "again", tokenizer=str(moved))
    assert (tmp_path / "again" / "tokenizer.json").read_text() == moved.read_text()


def test_bf16_weights_stay_bf16(tmp_path: Path) -> None:
    run = trained(tmp_path, dtype="bf16")
    export(run, tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert theirs.dtype is torch.bfloat16
    path = checkpoint.newest(run / "checkpoints")
    assert path is not None
    mine = load_file(path / "model.safetensors")
    experts = theirs.model.layers[1].mlp.experts
    assert torch.equal(experts.gate_up_proj, mine["blocks.1.moe.w_in"])
    assert torch.equal(experts.down_proj, mine["blocks.1.moe.w_out"])


@pytest.mark.parametrize(
    "changes",
    [{"gated": False, "top_k": 1, "dtype": "bf16"}, {"gated": False, "moe_every": 2}],
)
def test_what_is_no_mixtral_is_a_gpt(tmp_path: Path, changes: dict[str, Any]) -> None:
    """In shards and in pieces: each tensor of the run is one of the exported model, bit by bit."""
    run = trained(tmp_path, **changes, steps=1)
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("overspill.train.export._PIECE_BYTES", 1000)
        done = export(run, out, shard_bytes=20_000)
    assert done.model_type == "overspill_gpt"
    theirs = AutoModelForCausalLM.from_pretrained(out)
    path = checkpoint.newest(run / "checkpoints")
    assert path is not None
    mine = load_file(path / "model.safetensors")
    assert theirs.num_parameters() == sum(tensor.numel() for tensor in mine.values())
    experts = theirs.model.layers[1].mlp.experts
    assert torch.equal(experts.up_proj, mine["blocks.1.moe.w_in"])
    assert torch.equal(experts.down_proj, mine["blocks.1.moe.w_out"])
    if "moe_every" in changes:
        assert torch.equal(
            theirs.model.layers[0].mlp.up_proj.weight, mine["blocks.0.dense.w_in.weight"]
        )
        tokens = torch.randint(theirs.config.vocab_size, (2, 64))
        with torch.no_grad():
            expected = plain(run)(tokens).logits
            torch.testing.assert_close(theirs(tokens).logits, expected, rtol=1e-5, atol=1e-5)


def test_a_folder_that_is_no_run_or_is_taken_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        export(tmp_path / "nowhere", tmp_path / "out")
    young = tmp_path / "young"
    young.mkdir()
    (young / "config.json").write_text((run / "config.json").read_text())
    with pytest.raises(ConfigError, match="has no checkpoint yet"):
        export(young, tmp_path / "out")
    with pytest.raises(ConfigError, match="already exists"):
        export(run, young)
    tuned = tmp_path / "tuned"
    tuned.mkdir()
    (tuned / "config.json").write_text('{"model": {"checkpoint": "base", "tokenizer": null}}')
    with pytest.raises(ConfigError, match="writes checkpoints of Hugging Face: it has none yet"):
        export(tuned, tmp_path / "out")
    (tuned / "final").mkdir()
    (tuned / "config.json").write_text('{"model": {"checkpoint": "base", "lora": 16}}')
    with pytest.raises(
        ConfigError, match=r"LoRA adapters: they are in .*tuned/final; overspill merge"
    ):
        export(tuned, tmp_path / "out")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="already exists"):
        export(run, tmp_path / "file")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "tuned", "young"]


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    run = trained(tmp_path, steps=1)
    state = run / "checkpoints" / "step-00000001" / "state.json"
    content = json.loads(state.read_text())
    content["facts"]["experts"] = 3
    state.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"router\.weight has 64 elements, .* 48"):
        export(run, tmp_path / "out")
    del content["facts"]["experts"]
    state.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="does not describe its model"):
        export(run, tmp_path / "out")


def test_the_root_of_a_disk_is_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be replaced by the folder that was written beside it, on another disk."""
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path)
    with pytest.raises(ConfigError, match="is the root of a disk; give the name of a new folder"):
        export(run, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskError, match=r"OUT .*out cannot be written \(No space left"):
        export(run, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_an_interrupted_export_leaves_nothing(run: Path, tmp_path: Path) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(run, tmp_path / "out", progress=interrupt)
    assert not list(tmp_path.iterdir())


def test_a_killed_export_is_not_there_and_the_next_one_clears_up(run: Path, tmp_path: Path) -> None:
    def die(what: str, done: int, total: int) -> None:
        if done > total // 2:
            os.kill(os.getpid(), signal.SIGKILL)

    # a fork, which need not import torch and transformers again
    process = multiprocessing.get_context("fork").Process(
        target=export, args=(run, tmp_path / "out"), kwargs={"progress": die}
    )
    process.start()
    process.join(60)
    code = process.exitcode
    process.kill()
    assert code == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    assert len(list(tmp_path.iterdir())) == 1
    export(run, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert_same_logits(tmp_path / "out", run)
