"""Answers after a change of the weights, and between training steps."""

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import overspill
from overspill import LLM, SamplingParams
from overspill.core.errors import OrderError
from overspill.models.gpt import GPTMoE
from overspill.serve.runners import PagedRunner
from overspill.serve.weights_version import WeightsVersion
from tests.models.huggingface.families import make_model
from tests.models.huggingface.oracle import offloaded
from tests.serve.models import (
    GREEDY,
    PROMPTS,
    family,
    plain_generate,
    plain_gpt,
    plain_model,
    served,
    tokens_of,
)
from tests.slow import slow_rows

LONG = SamplingParams(max_tokens=12, ignore_eos=True)
CPU = torch.device("cpu")


def changed(model: Any, seed: int = 7) -> Any:
    """A model of the same shape with other weights."""
    random = torch.Generator().manual_seed(seed)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + 0.5 * torch.randn(parameter.shape, generator=random))
    return other


@pytest.mark.parametrize(
    ("name", "mode"), slow_rows([("mixtral", "host"), ("mixtral", "gpu"), ("jamba", "host")], 1)
)
def test_answers_after_load_state_dict_are_those_of_the_new_weights(
    name: str, mode: str, tmp_path: Path
) -> None:
    """Their prompts were computed with the old ones."""
    model, before = plain_model(name)
    other = changed(model)
    after = [plain_generate(other, prompt) for prompt in PROMPTS]
    assert after != before
    with served(name, mode, tmp_path) as llm:
        assert tokens_of(llm, PROMPTS) == before
        llm.model.load_state_dict(other.state_dict())
        assert tokens_of(llm, PROMPTS) == after
        llm.model.load_state_dict(model.state_dict())
        assert tokens_of(llm, PROMPTS) == before


@pytest.mark.parametrize("what", ["dense", "experts"])
def test_a_change_of_one_weight_is_seen(what: str, tmp_path: Path) -> None:
    model, before = plain_model("mixtral")
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if ("experts" in name) == (what == "experts"):
                parameter.mul_(-2.0)
    with served("mixtral", "host", tmp_path) as llm:
        assert tokens_of(llm, PROMPTS) == before
        if what == "experts":
            state = {k: v for k, v in other.state_dict().items() if "experts" in k}
            llm.model.load_state_dict(state, strict=False)
        else:
            with torch.no_grad():
                for name, parameter in llm.model.named_parameters():
                    if "experts" not in name:
                        parameter.mul_(-2.0)
        assert tokens_of(llm, PROMPTS) == [plain_generate(other, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("name", ["mixtral", "jamba"])
def test_answers_that_run_continue_with_the_new_weights(name: str, tmp_path: Path) -> None:
    """The tokens so far stay; their keys and values are computed again."""
    model, _ = plain_model(name)
    other = changed(model)
    with served(name, "host", tmp_path) as llm:
        stream = llm.stream(PROMPTS[0], LONG)
        first = [next(stream).token_ids[0] for _ in range(5)]
        llm.model.load_state_dict(other.state_dict())
        rest = [piece.token_ids[0] for piece in stream]
    assert first == plain_generate(model, PROMPTS[0], 5)
    assert rest == plain_generate(other, [*PROMPTS[0], *first], 7)


def test_replaced_tensors_are_refused_where_decoding_reads_the_old_ones(tmp_path: Path) -> None:
    from overspill.serve.fused_runner import FusedRunner

    with offloaded(plain_model("mixtral")[0], "gpu", tmp_path) as twin:
        runner = FusedRunner(twin, CPU, 8, 16, 64, 2)
        assert not runner.weights_changed(thorough=True)
        weight = twin.model.norm.weight
        twin.model.norm.weight = torch.nn.Parameter(weight.detach().clone())
        for _ in range(2):
            with pytest.raises(OrderError, match="make a new one"):
                runner.weights_changed(thorough=True)
        runner.close()


@pytest.mark.parametrize("name", ["mixtral", "gpt"])
def test_the_model_computes_as_before_beside_an_open_llm(name: str, tmp_path: Path) -> None:
    plain: Any = plain_gpt() if name == "gpt" else plain_model(name)[0]
    tokens = torch.tensor([PROMPTS[0]]) % 48
    with offloaded(plain, "host", tmp_path) as model, LLM(model, context=64) as llm:
        for _ in range(2):
            tokens_of(llm, [PROMPTS[1]])
            with torch.no_grad():
                torch.testing.assert_close(model(tokens).logits, plain(tokens).logits)


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    if isinstance(model, GPTMoE):
        loss: Tensor = model(tokens[:, :-1], tokens[:, 1:]).loss
    else:
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.detach()


def generate(model: Any, prompt: list[int]) -> list[int]:
    if isinstance(model, GPTMoE):
        tokens = torch.tensor([prompt], device=model.embedding.weight.device)
        ids: list[int] = model.generate(tokens, 4, temperature=0)[0].tolist()
        return ids[len(prompt) :]
    return plain_generate(model, prompt)


MODES = [("mixtral", "host", 1e9), ("mixtral", "gpu", 0.1), ("gpt", "disk", 0.1)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("name", "mode", "norm"), slow_rows(MODES, 1))
def test_a_model_is_sampled_between_training_steps(
    name: str, mode: str, norm: float, device: str, tmp_path: Path
) -> None:
    """As reinforcement learning does: tokens and losses are those of plain PyTorch."""
    plain: Any = copy.deepcopy(plain_gpt()) if name == "gpt" else make_model(family(name))
    model = copy.deepcopy(plain).train()
    plain.to(device)
    disk = tmp_path if mode == "disk" else None
    overspill.offload(model, device=device, mode=mode, slots=4, disk=disk, quiet=True)
    clipped = None if norm == 1e9 else norm
    ours = overspill.AdamW(model, lr=0.02, weight_decay=0.0, max_grad_norm=clipped)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.02, weight_decay=0.0)
    prompts = [[token % 48 for token in prompt] for prompt in PROMPTS[1:]]
    seen = set()
    with LLM(model, context=64, max_batch=2) as llm:
        for _ in range(3):
            sampled = tokens_of(llm, prompts)
            plain.eval()
            assert sampled == [generate(plain, prompt) for prompt in prompts]
            seen.add(str(sampled))
            tokens = torch.tensor([prompts[1] + sampled[1]], device=device)
            plain.train()
            assert model.training
            torch.testing.assert_close(loss_of(model, tokens), loss_of(plain, tokens))
            torch.nn.utils.clip_grad_norm_(plain.parameters(), norm)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
    assert len(seen) > 1, "training has changed the answers"
    model.overspill.close()


def test_weights_that_change_while_requests_run_lose_none(tmp_path: Path) -> None:
    """Weights are loaded again and again in another thread: each answer ends."""
    model, _ = plain_model("mixtral")
    other = changed(model)
    with served("mixtral", "host", tmp_path) as llm:
        stop = threading.Event()

        def load() -> None:
            while not stop.wait(0.01):
                llm.model.load_state_dict(other.state_dict())

        thread = threading.Thread(target=load)
        thread.start()
        try:
            answers = [llm.submit(prompt, GREEDY) for prompt in PROMPTS * 3]
            assert all(len(answer.result().token_ids) == 4 for answer in answers)
        finally:
            stop.set()
            thread.join()
        llm.model.load_state_dict(model.state_dict())
        assert tokens_of(llm, PROMPTS) == plain_model("mixtral")[1]
        llm._loop.scheduler.pool.check_conserved()


def test_a_model_loads_its_own_state_dict_while_answers_are_computed(tmp_path: Path) -> None:
    """Its tensors are read from the engine, which computes meanwhile."""
    with served("mixtral", "host", tmp_path) as llm:
        own = llm.model.state_dict()
        answers = [llm.submit(prompt, LONG) for prompt in PROMPTS]
        for _ in range(3):
            llm.model.load_state_dict(own)
        plain = plain_model("mixtral")[0]
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            assert answer.result(60).token_ids == plain_generate(plain, prompt, 12)


@pytest.mark.parametrize("fused", [False, True])
def test_steps_of_optimizers_for_dense_weights_are_seen(fused: bool, tmp_path: Path) -> None:
    """A fused one does not count in the versions of tensors."""
    plain = copy.deepcopy(plain_model("mixtral")[0])
    with served("mixtral", "gpu", tmp_path) as llm:
        before = tokens_of(llm, PROMPTS)
        for model in (plain, llm.model):
            dense = [p for name, p in model.named_parameters() if "experts" not in name]
            for parameter in dense:
                parameter.grad = torch.full_like(parameter, 0.5)
            torch.optim.AdamW(dense, lr=0.3, fused=fused).step()
        after = [plain_generate(plain, prompt) for prompt in PROMPTS]
        assert after != before
        assert tokens_of(llm, PROMPTS) == after


def test_a_change_of_a_buffer_that_chooses_experts_is_seen(tmp_path: Path) -> None:
    plain = copy.deepcopy(plain_model("deepseek_v3")[0])
    name = "e_score_correction_bias"
    random = torch.Generator().manual_seed(0)
    with served("deepseek_v3", "gpu", tmp_path) as llm:
        before = tokens_of(llm, PROMPTS)
        values = {
            path: 3 * torch.randn(buffer.shape, generator=random)
            for path, buffer in plain.named_buffers()
            if path.endswith(name)
        }
        assert values
        for model in (plain, llm.model):
            for path, buffer in model.named_buffers():
                if path in values:
                    buffer.copy_(values[path])
        after = [plain_generate(plain, prompt) for prompt in PROMPTS]
        assert after != before
        assert tokens_of(llm, PROMPTS) == after


def test_the_prefix_cache_is_reset_for_changes_that_are_not_seen(tmp_path: Path) -> None:
    plain = copy.deepcopy(plain_model("mixtral")[0])
    with served("mixtral", "gpu", tmp_path) as llm:
        tokens_of(llm, PROMPTS)
        for model in (plain, llm.model):
            model.model.embed_tokens.weight.data.mul_(-1.5)
        llm.reset_prefix_cache()
        assert tokens_of(llm, PROMPTS) == [plain_generate(plain, prompt) for prompt in PROMPTS]


def test_weights_are_not_compared_in_steps_of_answers_while_requests_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bool] = []
    seen = PagedRunner.weights_changed

    def count(self: PagedRunner, thorough: bool) -> bool:
        calls.append(thorough)
        return seen(self, thorough)

    monkeypatch.setattr(PagedRunner, "weights_changed", count)
    with served("mixtral", "gpu", tmp_path, max_batch=1) as llm:
        tokens_of(llm, PROMPTS[:2], LONG)
    assert sum(calls) <= 6
    assert len(calls) > 20


def test_an_llm_that_was_deleted_serves_its_model_no_longer(tmp_path: Path) -> None:
    with offloaded(plain_model("mixtral")[0], "gpu", tmp_path) as model:
        llm = LLM(model, context=64)
        tokens_of(llm, [PROMPTS[1]])
        del llm
        with LLM(model, context=64) as other:
            assert tokens_of(other, [PROMPTS[1]]) == [plain_model("mixtral")[1][1]]


def test_a_buffer_that_each_forward_changes_keeps_no_request_from_its_end(tmp_path: Path) -> None:
    expected = plain_model("mixtral")[1]
    with served("mixtral", "gpu", tmp_path, prefill_chunk=4) as llm:
        inner = llm.model.model
        inner.register_buffer("forwards", torch.zeros(1))
        hook = inner.register_forward_hook(lambda *_: inner.forwards.add_(1) and None)
        llm._loop.runner._version = WeightsVersion(llm.model)
        answers = [llm.submit(prompt, GREEDY) for prompt in PROMPTS]
        assert [answer.result(30).token_ids for answer in answers] == expected
        hook.remove()
