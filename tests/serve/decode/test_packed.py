"""Fused steps with packed experts, wherever they are, give the logits of the plain model."""

from collections.abc import Sequence

import pytest

from overspill.compute.decode import constants
from overspill.core.errors import ConfigError
from tests.models.huggingface.packed.cases import Pairs, load
from tests.models.huggingface.test_load import again
from tests.serve.decode.decoding import INTERPRETED, Decoding
from tests.serve.models import PROMPTS

pytestmark = INTERPRETED


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    return Pairs(tmp_path_factory.mktemp("packed"))


def decode(
    pairs: Pairs, name: str, homes: Sequence[int], slots: int, prompts: Sequence[list[int]],
    mode: str = "auto",
) -> Decoding:  # fmt: skip
    pair = pairs[name]
    plain = again(pair.family, pair.plain).eval()
    model = load(pair.packed, mode="host", train=False, packed=True)
    model.overspill.set_homes(homes)
    made = Decoding(plain, model, prompts, slots, mode)
    try:
        for _ in range(2):
            made.step()
        stats = made.runner.stats()
    finally:
        made.runner.close()
    model.overspill.check_conserved()
    model.overspill.close()
    assert not slots or sum(stats["expert_hit_rate"]) > 0
    return made


@pytest.mark.parametrize(
    ("name", "homes", "slots"),
    [
        ("mxfp4", [1, 0], 3),
        ("fp8-block", [0, 0], 0),
        ("awq", [4, 4], 0),
        pytest.param("nvfp4-compressed", [1, 2], 2, marks=pytest.mark.slow),
        pytest.param("gptq", [1, 2], 2, marks=pytest.mark.slow),
        pytest.param("fp8-tensor", [1, 2], 2, marks=pytest.mark.slow),
    ],
)
def test_packed_experts_are_decoded(
    name: str, homes: list[int], slots: int, pairs: Pairs, steps: list[int]
) -> None:
    decode(pairs, name, homes, slots, PROMPTS[:1])
    assert steps == [1, 1]


def test_several_requests_read_packed_experts_once(
    pairs: Pairs, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "SEVERAL", 1)
    decode(pairs, "fp8-block", [1, 0], 0, PROMPTS[:3])
    assert steps == [4, 4]


def test_packed_experts_are_copied_ahead(pairs: Pairs, steps: list[int]) -> None:
    decode(pairs, "mxfp4", [1, 0], 0, PROMPTS[:1], mode="prefetch-all")
    assert steps == [1, 1]


def test_the_cpu_does_not_compute_packed_experts(pairs: Pairs) -> None:
    pair = pairs["mxfp4"]
    model = load(pair.packed, mode="host", train=False, packed=True)
    with pytest.raises(ConfigError, match=r"migrate='cpu' .* its kernel does not read packed"):
        Decoding(model, model, PROMPTS[:1], migrate="cpu")
    model.overspill.close()


def test_experts_on_disk_are_computed_by_the_modules(pairs: Pairs, steps: list[int]) -> None:
    pair = pairs["mxfp4"]
    plain = again(pair.family, pair.plain).eval()
    model = load(pair.packed, mode="disk", train=False, packed=True)
    made = Decoding(plain, model, PROMPTS[:1])
    made.step()
    made.runner.close()
    model.overspill.close()
    assert not steps
