"""Decoding with fused kernels, in Triton's interpreter, compared with the plain model."""

from itertools import pairwise
from pathlib import Path

import pytest

from overspill import Settings
from overspill.compute.decode import constants
from overspill.models.config import GPTConfig
from overspill.plan.usage import Swap
from overspill.serve.decode import decode
from overspill.serve.decode.rates import ReadRates
from tests.moe.oracle import delays
from tests.serve.decode.decoding import GATED, INTERPRETED, decoding, gpt, small
from tests.serve.models import PROMPTS, plain_gpt, plain_model

pytestmark = INTERPRETED

QUICK = ["mixtral", "qwen3_moe", "gpt_oss"]

SLOW = ["qwen2_moe", "olmoe"]  # they differ from those in little

READ = ["mixtral", "gpt_oss"]
READ_BY_HAND = ["qwen3_moe", *SLOW]  # the first two are read with experts in host memory


@pytest.mark.parametrize(
    "name", [*READ, *(pytest.param(name, marks=pytest.mark.slow) for name in READ_BY_HAND)]
)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path, steps: list[int]) -> None:
    with decoding(plain_model(name)[0], tmp_path, prompts=PROMPTS[2:3]) as made:
        made.step()
    assert steps == [1]


@pytest.mark.parametrize(
    "name", ["mixtral", *(pytest.param(name, marks=pytest.mark.slow) for name in QUICK[1:] + SLOW)]
)
def test_several_requests_are_computed_together(
    name: str, tmp_path: Path, steps: list[int]
) -> None:
    with decoding(plain_model(name)[0], tmp_path) as made:
        made.step()
    assert steps == [4], "a batch of three is filled up"


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(None, id="gelu", marks=pytest.mark.slow),
        pytest.param(GATED, id="gated, with dense blocks"),
    ],
)
def test_logits_are_those_of_gpt_moe(
    config: GPTConfig | None, tmp_path: Path, steps: list[int]
) -> None:
    plain = plain_gpt() if config is None else gpt(config)
    with decoding(plain, tmp_path, prompts=small(PROMPTS[:3])) as made:
        made.step()
    with decoding(plain, tmp_path, prompts=small(PROMPTS[:1])) as made:
        made.step()
    assert steps == [4, 1]


@pytest.mark.parametrize(
    ("name", "residents"),
    [
        pytest.param("mixtral", 0, marks=pytest.mark.slow),
        ("qwen2_moe", 1),
        pytest.param("qwen3_moe", 3, marks=pytest.mark.slow),
        pytest.param("gpt_oss", 1, marks=pytest.mark.slow),
    ],
)
def test_experts_may_be_in_host_memory(
    name: str, residents: int, tmp_path: Path, steps: list[int]
) -> None:
    plain, _ = plain_model(name)
    late = Settings(inject=delays(seed=3, longest=5e-4, only="cpu"))
    with decoding(plain, tmp_path, "host", [residents] * 2, PROMPTS[:1], late) as made:
        made.two_steps()
    assert steps == [1, 1]


@pytest.mark.parametrize("name", ["mixtral", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_several_requests_may_miss_experts(name: str, tmp_path: Path, steps: list[int]) -> None:
    plain, _ = plain_model(name)
    with decoding(plain, tmp_path, "host", [1, 2]) as made:
        made.step()
    assert steps == [4]


@pytest.mark.parametrize(
    ("name", "shares"),
    [pytest.param("mixtral", (0, 16), marks=pytest.mark.slow), ("gpt_oss", (8,))],
)
def test_several_requests_may_read_experts_over_the_link(
    name: str,
    shares: tuple[int, ...],
    tmp_path: Path,
    steps: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(constants, "SEVERAL", 2)
    plain, _ = plain_model(name)
    found = []
    for share in shares:
        rates = ReadRates(cpu=16.0 - share, link=float(share))
        monkeypatch.setattr(decode, "read_rates", lambda _, rates=rates: rates)
        with decoding(plain, tmp_path, "host", [1, 0]) as made:
            made.step()
            made.model.overspill.swap_experts([Swap(0, 0, 3)])
            made.step()
            found.append(made.runner.stats()["experts_on_cpu"])
    assert all(before > after for before, after in pairwise(found))
    assert [on_cpu > 0 for on_cpu in found] == [share < 16 for share in shares]
    assert steps == [4] * 2 * len(shares)


@pytest.mark.parametrize("name", ["gpt", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_the_first_prompt_may_have_one_token(name: str, tmp_path: Path, steps: list[int]) -> None:
    plain = plain_gpt() if name == "gpt" else plain_model(name)[0]
    with decoding(plain, tmp_path, "host", prompts=[[4]]) as made:
        assert not steps
        made.step()
    assert steps == [1]


def test_gpt_moe_may_miss_experts(tmp_path: Path, steps: list[int]) -> None:
    with decoding(plain_gpt(), tmp_path, "host", [0, 2, 5], small(PROMPTS[:1])) as made:
        made.two_steps()
    assert steps == [1, 1]


def test_experts_may_move_between_steps(tmp_path: Path, steps: list[int]) -> None:
    plain, _ = plain_model("mixtral")
    with decoding(plain, tmp_path, "host", [2, 2], PROMPTS[:1]) as made:
        engine = made.model.overspill
        for residents in ([4, 4], [0, 3], [4, 4]):
            made.step()
            engine.set_residents(residents)
        made.step()
        engine.set_residents([2, 2])
        engine.swap_experts([Swap(0, 0, 3), Swap(1, 1, 2)])
        made.step()
    assert steps == [1] * 5


def test_modules_compute_experts_on_disk(tmp_path: Path, steps: list[int]) -> None:
    with decoding(plain_model("mixtral")[0], tmp_path, "disk", None, PROMPTS[:1]) as made:
        made.step()
        made.step()
    assert not steps


def test_modules_compute_if_the_device_cannot_access_pinned_memory(
    tmp_path: Path, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the second GPU of a machine."""
    from overspill.serve.decode import decode

    monkeypatch.setattr(decode, "can_map", lambda device: False)
    with decoding(plain_gpt(), tmp_path, "host", prompts=small(PROMPTS[:1])) as made:
        made.step()
        assert not steps
        made.model.overspill.set_residents([5, 5, 5])
        made.step()
        assert steps == [1]
