"""Decoding steps of encoder-decoders in Triton's interpreter: logits are those of transformers, in
every mode and place of experts."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from overspill import Settings
from overspill.moe.predictor import Predictor
from overspill.serve.blocks import BlockPool
from overspill.serve.decode.cpu_experts import CpuExperts
from overspill.serve.decode.modes import Ahead, PreGated
from overspill.serve.options import DecodingOptions
from overspill.serve.request import Request
from overspill.serve.runners import PagedRunner
from overspill.serve.scheduler import Scheduler
from overspill.serve.seq2seq import start_token
from overspill.simulate import routed_by
from tests.models.huggingface.oracle import offloaded
from tests.serve.decode.decoding import BLOCKS, CPU, INTERPRETED, SIZE, fused_runner
from tests.serve.requests import make_request
from tests.serve.seq2seq import DEEP, FAMILIES, SOURCES, plain_model, pregated
from tests.slow import slow_rows

pytestmark = INTERPRETED
FIXED = Settings(fix_nllb_routing=True)
MODES = ["auto", "on-demand", "prefetch-all", "lookahead"]
FEW_HEADS: dict[str, dict[str, Any]] = {  # Triton's interpreter takes time for each
    "switch_transformers": {"num_heads": 2},
    "nllb-moe": {
        "encoder_attention_heads": 2, "decoder_attention_heads": 2
    },
}  # fmt: skip


class Decoding:
    """Requests with the first sources, whose logits are compared with those of the plain model."""

    def __init__(
        self, plain: Any, model: Any, n: int = 2, slots: int = 0, mode: str = "auto",
        fused: bool = True, predictor: str | None = None,
    ) -> None:  # fmt: skip
        self.plain, self.model = plain, model
        limits = BLOCKS, SIZE, 64, 4
        decoding = DecodingOptions(slots=slots, mode=mode, predictor=predictor)
        self.runner: PagedRunner
        if fused:
            self.runner = fused_runner(model, CPU, *limits, decoding)
        else:
            self.runner = PagedRunner(model, CPU, *limits)
        self.scheduler = Scheduler(BlockPool(BLOCKS, SIZE, share=False), 4, 64)
        self.requests = [self._request(model, source) for source in SOURCES[:n]]
        for request in self.requests:
            self.scheduler.add(request)

    def _request(self, model: Any, source: list[int]) -> Request:
        made = make_request([start_token(model)], 30)
        made.source = list(source)
        return made

    def step(self) -> None:
        batch = self.scheduler.next_batch()
        with torch.inference_mode():
            logits = self.runner.run(batch)
        self.check([work.request for work in batch], logits)
        for work, row in zip(batch, logits, strict=True):
            self.scheduler.computed(work)
            work.request.tokens.append(int(row.argmax()))

    def check(self, requests: Sequence[Request], logits: Tensor) -> None:
        for request, row in zip(requests, logits, strict=True):
            source, tokens = (torch.tensor([each]) for each in (request.source, request.tokens))
            with torch.no_grad():
                plain = self.plain(input_ids=source, decoder_input_ids=tokens)
            # large weights: float32 differs from float64 by 2e-4 in transformers too
            torch.testing.assert_close(row, plain.logits[0, -1], rtol=1e-4, atol=5e-4)


@contextmanager
def decoding(
    plain: Any, folder: Path, place: str, residents: Sequence[int] | None = None,
    settings: Settings | None = None, **options: Any,
) -> Iterator[Decoding]:  # fmt: skip
    with offloaded(plain, place, folder, settings) as model:
        if residents is not None:
            model.overspill.set_residents(residents)
        made = Decoding(plain, model, **options)
        try:
            yield made
        finally:
            made.runner.close()


@pytest.mark.parametrize(
    ("name", "mode"), slow_rows([(name, mode) for mode in MODES for name in FAMILIES], 3, 4, 7)
)
def test_logits_are_those_of_transformers(
    name: str, mode: str, tmp_path: Path, steps: list[int]
) -> None:
    with decoding(
        plain_model(name, **FEW_HEADS[name]), tmp_path, "host", slots=2, mode=mode
    ) as made:
        while any(request.pending > 1 for request in made.requests):
            made.step()
        for _ in range(2):
            made.step()
    assert steps == [2, 2]


@pytest.mark.parametrize("name", [FAMILIES[0], pytest.param(FAMILIES[1], marks=pytest.mark.slow)])
def test_a_learned_predictor_names_experts_of_the_decoder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: list[int]
) -> None:
    """It learns from both stacks, and predicts none by the other."""
    monkeypatch.setattr("overspill.models.predictor.cache_folder", lambda: tmp_path)
    monkeypatch.setattr("overspill.plan.popularity.LearningPace.allows", lambda *_: True)
    learned: list[range] = []
    compared: list[int] = []
    named: list[tuple[int, Tensor]] = []
    begin, learn = CpuExperts.begin, Predictor.learn

    def noted(missing: CpuExperts, ahead: Ahead, real_B: Tensor) -> None:
        assert ahead.ids_BK is not None
        named.append((ahead.layer, ahead.ids_BK.clone()))
        begin(missing, ahead, real_B)

    def watched(own: Predictor, first: int, x_LND: Any, ids_LNK: Any) -> None:
        learned.append(range(first, first + len(x_LND)))
        for layer, ids_BK in named:  # of this step: nothing was learned since
            x_BD = x_LND[layer - 1 - first]
            expected = own.predict(layer - 1, x_BD, 1, ids_BK.shape[1])
            assert torch.equal(ids_BK.sort(-1).values.long(), expected.sort(-1).values)
            compared.append(layer)
        named.clear()
        learn(own, first, x_LND, ids_LNK)

    monkeypatch.setattr(CpuExperts, "begin", noted)
    monkeypatch.setattr(Predictor, "learn", watched)
    plain = plain_model(name, **DEEP[name], **FEW_HEADS[name])
    with decoding(plain, tmp_path, "host", mode="lookahead", predictor="learned", n=1) as made:
        while any(request.pending > 1 for request in made.requests):
            made.step()
        made.step()
        engine, seq2seq = made.model.overspill, made.runner._seq2seq
        assert seq2seq is not None
        border = seq2seq.encoder_layers
    encoder, decoder = range(border), range(border, engine.n_layers)
    assert {*learned} == {encoder, decoder}
    assert compared == list(decoder)[1:]
    assert steps == [1]


@pytest.mark.parametrize(
    ("name", "level"), slow_rows([(name, level) for level in (1, 2) for name in FAMILIES], 1, 2)
)
def test_pregates_announce_what_the_decoder_uses(
    name: str, level: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The experts of a block are copied while an earlier one computes, and no others. As it is
    called, NLLB uses two experts only: it has the routing here that it was trained with."""
    plain = pregated(name, level, **FEW_HEADS[name])
    settings = FIXED if name == "nllb-moe" else None
    announced: list[Ahead] = []

    def ahead(mode: Any, layer: int, routings: Any) -> Ahead | None:
        found: Ahead | None = real(mode, layer, routings)
        if found is not None:
            assert found.ids_BK is not None
            announced.append(Ahead(found.layer, found.ids_BK.clone()))
        return found

    real = PreGated.ahead
    monkeypatch.setattr(PreGated, "ahead", ahead)
    with decoding(plain, tmp_path, "host", settings=settings, mode="pre-gated") as made:
        made.plain = plain if settings is None else made.model
        made.step()
        used: list[Tensor] = []
        run = made.runner._decode.run  # type: ignore[attr-defined]

        def note(*args: Any) -> Any:
            computed = run(*args)
            used.append(computed.ids_LBK.clone())
            return computed

        made.runner._decode.run = note  # type: ignore[attr-defined]
        made.step()
    (ids_LBK,) = used
    first, blocks = made.model.overspill.n_layers - 3, 3
    assert [each.layer for each in announced] == list(range(first + level, first + blocks))
    for layer, ids in announced:
        assert ids is not None
        assert torch.equal(ids[:2], ids_LBK[layer - first])
    assert len(ids_LBK.unique()) > 1


class InTurn:
    """Each token has the next experts in turn, from another one on in each layer."""

    def __init__(self, model: Any, top_k: int) -> None:
        self.n_layers, self.n_experts = model.overspill.n_layers, model.overspill.n_experts
        self.top_k = top_k

    def __call__(self, layer: int, n_tokens: int, device: torch.device) -> Tensor:
        ids = torch.arange(self.top_k * n_tokens, device=device) + layer + 1
        return ids.view(n_tokens, self.top_k) % self.n_experts


class InTurnAtOnce(InTurn):
    def all_layers(self, n_tokens: int, device: torch.device) -> Tensor:
        return torch.stack([self(layer, n_tokens, device) for layer in range(self.n_layers)])


@pytest.mark.parametrize(("name", "kind"), list(zip(FAMILIES, (InTurn, InTurnAtOnce), strict=True)))
def test_routing_that_is_replaced_is_followed(
    name: str,
    kind: type[InTurn],
    tmp_path: Path,
    steps: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Logits are those of the modules with the same routing, and what is copied ahead is what
    later layers use."""
    plain = pregated(name, 1, **FEW_HEADS[name])
    announced: list[Ahead] = []
    real = PreGated.ahead

    def ahead(mode: Any, layer: int, routings: Any) -> Ahead | None:
        found: Ahead | None = real(mode, layer, routings)
        if found is not None and found.ids_BK is not None:
            announced.append(Ahead(found.layer, found.ids_BK.clone()))
        return found

    monkeypatch.setattr(PreGated, "ahead", ahead)
    logits: list[list[Tensor]] = []
    with offloaded(plain, "host", tmp_path) as model:
        source = kind(model, 1 if name == "switch_transformers" else 2)
        with routed_by(model, source):
            for fused in (True, False):
                made = Decoding(plain, model, mode="pre-gated", fused=fused)
                computed: list[Tensor] = []
                made.check = lambda _, rows, to=computed: to.append(rows.clone())  # type: ignore[method-assign]
                for _ in range(3):
                    made.step()
                made.runner.close()
                logits.append(computed)
    torch.testing.assert_close(*logits, rtol=1e-4, atol=5e-4)
    assert steps == [2, 2]
    last = model.overspill.n_layers - 1
    assert [each.layer for each in announced] == [last - 1, last] * 2
    for layer, ids in announced:
        assert ids is not None
        assert torch.equal(ids.long(), source(layer, 2, CPU))


@pytest.mark.parametrize("name", [FAMILIES[0], pytest.param(FAMILIES[1], marks=pytest.mark.slow)])
def test_a_changed_model_is_computed_by_its_modules(
    name: str, tmp_path: Path, steps: list[int], module_steps: list[int]
) -> None:
    class Own(torch.nn.Linear):
        pass

    plain = plain_model(name, **FEW_HEADS[name])
    with offloaded(plain, "host", tmp_path) as model:
        model.lm_head.__class__ = Own
        made = Decoding(plain, model, n=1, slots=2)
        while any(request.pending > 1 for request in made.requests):
            made.step()
        made.step()
        made.runner.close()
    assert (steps, module_steps) == ([], [1])


@pytest.mark.parametrize("name", [FAMILIES[0], pytest.param(FAMILIES[1], marks=pytest.mark.slow)])
def test_errors_in_bf16_are_at_most_twice_those_of_transformers(
    name: str, tmp_path: Path, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts of the next layer are named by its own gate."""
    from tests.triton_interpreter import with_nearest_bf16

    with_nearest_bf16(monkeypatch)
    two = {field: min(2, value) for field, value in DEEP[name].items()}
    options = two | FEW_HEADS[name]
    plain = copy.deepcopy(plain_model(name, **options)).bfloat16()
    exact = copy.deepcopy(plain).double()
    for module in exact.modules():
        if hasattr(module, "router_ignore_padding_tokens"):
            module.dtype = torch.float64
    errors: list[tuple[float, float]] = []
    with decoding(plain, tmp_path, "host", n=1, mode="lookahead") as made:

        def compare(requests: Sequence[Request], logits: Tensor) -> None:
            for request, row in zip(requests, logits, strict=True):
                given = {
                    "input_ids": torch.tensor([request.source]),
                    "decoder_input_ids": torch.tensor([request.tokens]),
                }
                with torch.no_grad():
                    right, eager = (m(**given).logits[0, -1] for m in (exact, plain))
                errors.append(
                    tuple(float((each - right).abs().mean()) for each in (row, eager))  # type: ignore[arg-type]
                )

        made.check = compare  # type: ignore[method-assign]
        for _ in range(3):
            made.step()
    mine, eager = (sum(each) for each in zip(*errors[1:], strict=True))
    assert mine <= 2 * eager
    assert steps == [1, 1]


def test_a_decoder_without_experts(tmp_path: Path, steps: list[int]) -> None:
    """All experts are in the encoder."""
    options = {**FEW_HEADS["nllb-moe"], **DEEP["nllb-moe"], "decoder_sparse_step": 0}
    with decoding(plain_model("nllb-moe", **options), tmp_path, "host") as made:
        for _ in range(3):
            made.step()
    assert steps == [2, 2]
