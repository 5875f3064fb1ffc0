"""Families of transformers models in stages: exact, or refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import overspill
from overspill.core.errors import ConfigError
from overspill.models.stages.blocks import find_blocks
from tests.models.huggingface.families import Family, cases, make_batch, make_model
from tests.models.huggingface.oracle import (
    ADAM,
    assert_same_weights,
    offloaded,
)
from tests.models.huggingface.test_exactness import BY_NAME, SUPPORTED
from tests.models.stages.staged import assert_follows, train_plain, train_staged
from tests.slow import slow_rows

TUPLES = ("glm_moe_dsa", "zaya", "hy_v4")
ENCODER_DECODERS = ("switch_transformers", "nllb-moe")
STAGED = tuple(f for f in SUPPORTED if f.name not in (*TUPLES, *ENCODER_DECODERS))


def check(family: Family, folder: Path) -> None:
    """A stage for each block; micro-batches of one sequence and of two."""
    plain = make_model(family)
    batch: dict[str, Any] = make_batch(family, plain)
    batches = [batch, {name: value[1:] for name, value in batch.items()}]
    with offloaded(plain, "host", folder) as twin:
        n_blocks = twin.config.get_text_config().num_hidden_layers
        stages = overspill.Stages(twin, n_blocks, offload_activations=True, small_activation=0)
        optimizer = overspill.AdamW(twin, max_grad_norm=1e9, **ADAM)
        run = train_staged(stages, twin, optimizer, [batches])
        assert_follows(run, train_plain(plain, [batches], 1e9))
        assert_same_weights(plain, twin, atol=1e-5)
        twin.overspill.check_conserved()


@pytest.mark.parametrize(
    "name", slow_rows(["deepseek_v3", "qwen3_moe", "gpt_oss", "gemma4_text"], 1)
)
def test_some_families(name: str, tmp_path: Path) -> None:
    """Dense blocks first or between, shared experts, sliding windows, inputs of each block."""
    check(BY_NAME[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", cases(STAGED))
def test_every_family(family: Family, tmp_path: Path) -> None:
    check(family, tmp_path)


@pytest.mark.parametrize("name", TUPLES)
def test_blocks_that_pass_more_than_hidden_states_are_refused(name: str, tmp_path: Path) -> None:
    family = BY_NAME[name]
    plain = make_model(family)
    batch = make_batch(family, plain)
    with offloaded(plain, "host", tmp_path) as twin:
        stages = overspill.Stages(twin, 2)
        optimizer = overspill.AdamW(twin, **ADAM)
        with pytest.raises(ConfigError, match=r"layers\.0 returns tuple.*without stages"):
            stages.backward([batch, batch], optimizer)
        # the model can be trained without them
        stages.close()
        twin(**batch).loss.backward()
        optimizer.step()
        twin.overspill.check_conserved()


def test_keys_and_values_of_earlier_blocks_are_refused() -> None:
    config = BY_NAME["gemma4_text"].build()
    config.num_kv_shared_layers = 1
    config.layer_types = [
        "full_attention",
        "full_attention",
    ]  # the second one uses those of the first
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match="gemma4_text: num_kv_shared_layers=1 blocks use keys"):
        find_blocks(model)


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_encoder_decoders_are_refused(name: str, tmp_path: Path) -> None:
    with (
        offloaded(make_model(BY_NAME[name]), "host", tmp_path) as twin,
        pytest.raises(ConfigError, match=f"{name}: stages need.*an encoder and a decoder"),
    ):
        overspill.Stages(twin, 2)
