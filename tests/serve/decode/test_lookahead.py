"""Mode "lookahead" with a predictor that learns: it names experts, and changes no tokens."""

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import overspill
from overspill import LLM, SamplingParams
from overspill.core.errors import ConfigError
from overspill.models import predictor as saved
from overspill.models.predictor import new_observer, predictor_file, save_predictor
from overspill.moe.predictor import Observer, Predictor
from overspill.plan.popularity import LearningPace
from overspill.serve.decode import cpu_experts, linked_experts
from overspill.serve.decode.modes import Ahead
from overspill.serve.decode.step import DecodeStep
from tests.models.huggingface.families import make_model
from tests.models.huggingface.oracle import offloaded
from tests.serve.decode.decoding import INTERPRETED, Decoding, gpt, small
from tests.serve.decode.test_disk import CONFIG
from tests.serve.models import PROMPTS, family, plain_model

pytestmark = INTERPRETED


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setattr(saved, "cache_folder", lambda: folder)
    return folder


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Learns from every pass: tests are too short for its share of the time."""
    monkeypatch.setattr(LearningPace, "allows", lambda *_: True)


class Named:
    """The experts that a mode names, with the weights of the predictor of that moment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead: list[tuple[int, Tensor]] = []
        for kind in (cpu_experts.CpuExperts, linked_experts.LinkedExperts):
            monkeypatch.setattr(kind, "begin", self._noting(kind.begin))

    def _noting(self, begin: Any) -> Any:
        def noted(missing: Any, ahead: Ahead, real_B: Tensor) -> None:
            assert ahead.ids_BK is not None
            self.ahead.append((ahead.layer, ahead.ids_BK[real_B != 0].clone()))
            begin(missing, ahead, real_B)

        return noted


@contextmanager
def served(
    plain: Any, folder: Path, prompts: list[list[int]], migrate: str = "cpu", **given: Any
) -> Iterator[Decoding]:
    with offloaded(plain, "host", folder) as model:
        given = {"predictor": "learned", **given}
        made = Decoding(plain, model, prompts, 0, "lookahead", migrate=migrate, **given)
        try:
            yield made
        finally:
            made.runner.close()


def observer_of(made: Decoding) -> Observer:
    found: Observer | None = made.model.overspill.popularity.observer
    assert found is not None
    return found


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    ("name", "n_prompts", "migrate"),
    [
        ("gpt", 1, "cpu"),
        ("gpt", 2, "copy"),
        *(
            pytest.param(name, 1, migrate, marks=pytest.mark.slow)
            for name in ("mixtral", "gpt_oss", "qwen3_moe", "olmoe", "granitemoe")
            for migrate in ("cpu", "copy")
        ),
    ],
)
def test_named_experts_are_those_of_the_prediction(
    name: str, n_prompts: int, migrate: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Granite computes with its own modules. Naively: the largest logits of the learned map, for
    the inputs of the experts."""
    n_steps = 2 if name == "gpt" else 1
    plain = gpt(CONFIG) if name == "gpt" else copy.deepcopy(plain_model(name)[0])
    prompts = small(PROMPTS[:n_prompts]) if name == "gpt" else PROMPTS[:n_prompts]
    named, inputs, weights = Named(monkeypatch), [], []
    learn = Observer.observe_step

    def noted(observer: Observer, first: int, x_LBD: Any, ids_LBK: Tensor) -> None:
        inputs.append([x.clone() for x in x_LBD])
        learn(observer, first, x_LBD, ids_LBK)
        weights.append(_copied(observer.predictor))

    monkeypatch.setattr(Observer, "observe_step", noted)
    with served(plain, tmp_path, prompts, migrate) as made:
        weights.append(_copied(observer_of(made).predictor))  # after the prompts
        assert observer_of(made).predictor.learned_tokens > 0
        for _ in range(n_steps):
            made.step()
        top_k = made.runner._placeholders[0].top_k
    assert len(inputs) == n_steps
    assert any(not torch.equal(weights[0][0], each[0]) for each in weights[1:]), "steps teach"
    naive = [
        (layer + 1, (x @ weights[step][0][layer].t() + weights[step][1][layer]).topk(top_k).indices)
        for step, found in enumerate(inputs)
        for layer, x in enumerate(found[:-1])
    ]
    assert [layer for layer, _ in named.ahead] == [layer for layer, _ in naive]
    for (_, told), (_, expected) in zip(named.ahead, naive, strict=True):
        assert torch.equal(told.sort(-1).values.long(), expected.sort(-1).values)


def _copied(predictor: Predictor) -> tuple[Tensor, Tensor]:
    return predictor.weights[1].clone(), predictor.biases[1].clone()


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", ["gpt", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_steps_teach_with_the_inputs_of_the_gates(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the plain model for the last token."""
    plain = gpt(CONFIG) if name == "gpt" else copy.deepcopy(plain_model(name)[0])
    learned: list[Any] = []
    monkeypatch.setattr(Observer, "observe_step", lambda _, *args: learned.append(args))
    with served(plain, tmp_path, small(PROMPTS[:1])) as made:
        monkeypatch.setattr(made, "check", lambda _: None)
        tokens = list(made.requests[0].tokens)
        made.step()
    seen: list[Tensor] = []
    for path, module in plain.named_modules():
        if path.endswith(("router", "mlp.gate")):
            module.register_forward_hook(lambda _, args, __: seen.append(args[0]))
    with torch.no_grad():
        plain(torch.tensor([tokens]))
    ((first, x_LBD, ids_LBK),) = learned
    assert first == 0
    assert len(x_LBD) == len(ids_LBK) == len(seen) > 1
    for x_BD, expected in zip(x_LBD, seen, strict=True):
        torch.testing.assert_close(x_BD[0], expected.view(-1, x_BD.shape[1])[-1])


@pytest.mark.parametrize("kind", ["learned", "gates"])
def test_nothing_is_named_where_it_would_not_be_used(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU does not load experts for several tokens: a step does not compute their names."""
    calls: list[int] = []
    route = DecodeStep.route

    def counted(own: DecodeStep, gate: Any, *args: Any, **named: Any) -> Any:
        calls.append(gate.placeholder.layer)
        return route(own, gate, *args, **named)

    monkeypatch.setattr(DecodeStep, "route", counted)
    with served(gpt(CONFIG), tmp_path, small(PROMPTS[:2]), predictor=kind) as made:
        made.step()
        assert made.runner.stats()["experts_on_cpu"] > 0
    assert calls == [0, 1, 2]


def test_copied_gates_name_what_the_next_gate_would_choose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing learns."""
    monkeypatch.setattr(Predictor, "__init__", _never)
    named = Named(monkeypatch)
    plain = gpt(CONFIG)
    with served(plain, tmp_path, small(PROMPTS[:1]), predictor="gates") as made:
        made.step()
        assert made.model.overspill.popularity.observer is None
        assert not any("predictor" in name for name in made.runner.stats())
    assert [layer for layer, _ in named.ahead] == [1, 2]


def _never(*_: Any, **__: Any) -> None:
    raise AssertionError("there is nothing to learn")


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("migrate", ["cpu", pytest.param("copy", marks=pytest.mark.slow)])
def test_logits_are_the_same_bits_with_either_predictor(migrate: str, tmp_path: Path) -> None:
    logits: dict[str, list[Tensor]] = {}
    for kind in ("gates", "learned"):
        found = logits.setdefault(kind, [])
        with served(
            gpt(CONFIG), tmp_path / kind, small(PROMPTS[:1]), migrate, predictor=kind
        ) as made:
            check = made.check
            made.check = lambda rows, f=found, c=check: (f.append(rows.clone()), c(rows))[1]  # type: ignore[method-assign,misc]
            made.two_steps()
    assert len(logits["gates"]) == 2
    for first, second in zip(*logits.values(), strict=True):
        assert torch.equal(first, second)


@pytest.mark.usefixtures("always")
def test_experts_on_disk_are_read_ahead_as_it_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = Named(monkeypatch)
    given: dict[str, Any] = {"mode": "disk", "slots": 3, "host_slots": 24, "disk": tmp_path}
    plain = gpt(CONFIG)
    model: Any = overspill.offload(
        copy.deepcopy(plain).eval(), device="cpu", quiet=True, progress=False, **given
    )
    made = Decoding(plain, model, small(PROMPTS[:1]), 0, "lookahead", predictor="learned")
    made.step()
    assert [layer for layer, _ in named.ahead] == [1, 2]
    made.runner.close()
    model.overspill.check_conserved()
    model.overspill.close()


# -- what it is of use for, and what is kept ----------------------------------------------


@pytest.mark.usefixtures("always")
def test_it_learns_from_prompts_and_tells_both_accuracies(tmp_path: Path) -> None:
    with served(gpt(CONFIG), tmp_path, small(PROMPTS[2:3])) as made:
        first = made.runner.stats()
        assert 0 <= first["predictor_token_accuracy_1"] <= 1
        assert 0 <= first["predictor_expert_accuracy_1"] <= 1
        made.step()
        second = made.runner.stats()
        assert second["predictor_learned_tokens"] == first["predictor_learned_tokens"] + 1
        assert second["predictor_learning_seconds"] > 0
        assert {"expert_slots", "experts_missed"} <= second.keys()


@pytest.mark.usefixtures("always")
def test_what_was_learned_is_saved_for_the_checkpoint_and_loaded_again(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = gpt(CONFIG)
    with served(plain, tmp_path / "1", small(PROMPTS[:1])) as made:
        learned = observer_of(made).predictor
        path = predictor_file(made.model)
        assert not path.exists()
    assert list(cache.iterdir()) == [path]
    with offloaded(plain, "host", tmp_path / "2") as model:
        again = new_observer(model, distances=(1, 2)).predictor
        assert again.learned_tokens == learned.learned_tokens > 0
        for name, tensor in learned.tensors().items():
            assert torch.equal(again.tensors()[name], tensor)
        assert torch.equal(again.weights[2][0], plain.moe_layers()[2].router.weight)  # a gate
        save_file({name: tensor[:1] for name, tensor in load_file(path).items()}, path)
        for damage in (b"", b"cut"):
            if damage:
                path.write_bytes(damage)
            with caplog.at_level(logging.WARNING):
                assert new_observer(model, distances=(1,)).predictor.learned_tokens == 0
            assert "is ignored" in caplog.text
            caplog.clear()
        with torch.no_grad():
            model.norm.weight.mul_(2)
        assert predictor_file(model) != path


def test_a_full_disk_costs_only_what_was_learned(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.rmdir()
    with offloaded(gpt(CONFIG), "host", tmp_path) as model:
        predictor = new_observer(model, distances=(1,)).predictor
        with caplog.at_level(logging.WARNING):
            save_predictor(model, predictor)
        assert "could not be saved" in caplog.text


def test_a_predictor_is_refused_where_it_is_not_used(tmp_path: Path) -> None:
    with offloaded(gpt(CONFIG), "host", tmp_path) as model:
        with pytest.raises(ConfigError, match="is for mode='lookahead', and the mode is 'auto'"):
            LLM(model, predictor="learned")
        with pytest.raises(ConfigError, match="must be one of 'gates', 'learned'"):
            LLM(model, mode="lookahead", predictor="gate")
        with LLM(model, mode="lookahead", predictor="learned", context=32) as llm:
            assert llm.generate([[3, 4]], SamplingParams(max_tokens=2))


def test_modules_need_one_that_learns(tmp_path: Path) -> None:
    plain = make_model(family("granitemoe")).eval()
    with (
        pytest.raises(ConfigError, match="or predictor='learned'"),
        served(plain, tmp_path, PROMPTS[:1], predictor="gates"),
    ):
        pass
