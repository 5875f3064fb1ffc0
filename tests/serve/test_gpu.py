"""Serving on a GPU: the tokens of transformers, within a budget."""

import copy
import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import overspill
from overspill.core.errors import OverspillError
from overspill.models.config import GPTConfig
from overspill.models.gpt import GPTMoE
from overspill.models.huggingface import recurrent, relative, sparse
from overspill.serve.blocks import BlockPool
from overspill.serve.options import DecodingOptions
from overspill.serve.runners import PagedRunner
from overspill.serve.scheduler import BatchItem, Scheduler
from tests.models.huggingface.adapters import make_adapter
from tests.models.huggingface.families import FAMILIES, cases, make_model
from tests.moe.oracle import delays
from tests.serve.models import plain_gpt
from tests.serve.requests import make_request
from tests.serve.test_failures import FailingJob
from tests.serve.test_states import make_plain

pytestmark = pytest.mark.gpu
GREEDY = overspill.SamplingParams(max_tokens=12, ignore_eos=True)
PROMPTS = [[5, 9, 33, 7, 12, 80, 41, 3], [4], list(range(20, 50)), [5, 9, 33, 7, 12, 80, 41, 3]]
_READ = ("mixtral", "gpt_oss", "qwen2_moe", "qwen3_moe", "olmoe", "qwen3_next", "qwen3_5_moe")
_MODULES = ("zaya", "inkling_text", "deepseek_v32", "glm_moe_dsa")
SERVED = [family for family in FAMILIES if family.name in (*_READ, *_MODULES)]
READ = [family for family in SERVED if family.name in _READ]
CONNECTED = {*recurrent.TYPES, *relative.TYPES, *sparse.TYPES, "qwen3_5_moe", "phimoe"}
"""Families whose tokens are connected by more than keys and values, and those that have others as a
part or looked so."""
SMALL = GPTConfig(
    vocab=256, n_layers=4, d_model=128, d_hidden=192, n_heads=4, n_experts=4, top_k=4, gated=True,
    max_seq=128,
)  # fmt: skip
LARGE = GPTConfig(
    vocab=1000, n_layers=3, d_model=1024, d_hidden=512, n_heads=16, n_experts=32, top_k=4,
    gated=True, max_seq=256,
)  # fmt: skip
every_place = pytest.mark.parametrize("residents", ["all", "some", "none"])


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the batches for which kernels were launched, or captured."""
    from overspill.serve.decode.step import DecodeStep

    sizes: list[int] = []
    call = DecodeStep.__call__

    def counted(self: DecodeStep, batch: Any) -> Any:
        sizes.append(len(batch.tokens))
        return call(self, batch)

    monkeypatch.setattr(DecodeStep, "__call__", counted)
    return sizes


def test_an_adapter_is_decoded_in_the_graph_like_the_merged_checkpoint(
    fused: list[int], tmp_path: Path
) -> None:
    (mixtral,) = (each for each in FAMILIES if each.name == "mixtral")
    made = make_adapter(mixtral, tmp_path, torch.bfloat16)
    overspill.merge(made.folder, tmp_path / "merged")
    tokens = []
    for model in (made.folder, tmp_path / "merged", made.base):
        with overspill.LLM(model, device="cuda", context=64, max_batch=4) as llm:
            tokens.append([result.token_ids for result in llm.generate(PROMPTS, GREEDY)])
            assert fused
            fused.clear()
    assert tokens[0] == tokens[1] != tokens[2]


def set_residents(model: Any, residents: str) -> None:
    engine = model.overspill
    some = [1 + (2 * layer) % (engine.n_experts - 1) for layer in range(engine.n_layers)]
    counts = {"all": [engine.n_experts] * engine.n_layers, "some": some, "none": [0] * len(some)}
    engine.set_residents(counts[residents])


@contextmanager
def offloaded(model: Any, residents: str, **given: Any) -> Iterator[Any]:
    """A copy of `model` on the GPU, with resident experts there as `residents` says."""
    options = {"device": "cuda", "mode": "host", "slots": 8, "quiet": True, "progress": False}
    twin = overspill.offload(copy.deepcopy(model), **{**options, **given})
    try:
        set_residents(twin, residents)
        yield twin
    finally:
        twin.overspill.close()


def tokens_of(plain: Any, prompt: list[int], n: int) -> list[int]:
    """Its own greedy tokens, on the GPU."""
    ids = torch.tensor([prompt], device="cuda")
    if isinstance(plain, GPTMoE):
        made = plain.generate(ids, n, temperature=0)
    else:
        made = plain.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False,
            eos_token_id=-1, pad_token_id=0,
        )  # fmt: skip
    return [int(token) for token in made[0, len(prompt) :]]


@every_place
@pytest.mark.parametrize("family", READ, ids=lambda family: family.name)
def test_tokens_do_not_depend_on_where_experts_are(
    family: Any, residents: str, fused: list[int]
) -> None:
    plain = make_model(family).eval().to("cuda")
    expected = [tokens_of(plain, prompt, 12) for prompt in PROMPTS]
    with (
        offloaded(plain, residents) as model,
        overspill.LLM(model, context=64, max_batch=3) as llm,
    ):
        for _ in range(2):
            assert [r.token_ids for r in llm.generate(PROMPTS, GREEDY)] == expected, "together"
            assert [llm.generate(p, GREEDY)[0].token_ids for p in PROMPTS] == expected, "alone"
        assert {1, 4} <= set(fused)
        for other in ("all", "none", "some"):  # experts move between requests
            set_residents(model, other)
            assert [r.token_ids for r in llm.generate(PROMPTS, GREEDY)] == expected, other


def delay_uploads(kind: str) -> None:
    """Copies end after the pass that has begun them: decoding must not change their sources."""
    if kind == "upload":
        torch.cuda._sleep(400_000)  # a fifth of a millisecond, on the stream of the copy


@pytest.mark.parametrize("uploader", ["thread", "native"])
@pytest.mark.parametrize("late", ["", "upload", "cpu", "stream"])
def test_prompts_copy_cached_experts_and_tokens_are_the_same(
    late: str, uploader: str, fused: list[int]
) -> None:
    """Half of the experts are cached, and leave the cache between prompts."""
    plain = GPTMoE(LARGE, checkpoint=False, seed=1).eval().to("cuda")
    expected = [tokens_of(plain, prompt, 12) for prompt in PROMPTS]
    inject = delays(seed=5, longest=2e-3, only=late) if late else None
    if late == "stream":
        torch.cuda._sleep(1)  # loads its kernel before graphs are captured
        inject = delay_uploads
    settings = overspill.Settings(prompt_replicas=True, uploader=uploader, inject=inject)
    cached = LARGE.n_layers * LARGE.n_experts // 2
    with (
        offloaded(plain, "none", settings=settings) as model,
        overspill.LLM(model, context=64, max_batch=3, slots=cached) as llm,
    ):
        for _ in range(4):
            assert [r.token_ids for r in llm.generate(PROMPTS, GREEDY)] == expected, "together"
            assert [llm.generate(p, GREEDY)[0].token_ids for p in PROMPTS] == expected, "alone"
        counters = model.overspill.recorder.counters()
        assert counters["replicas"] > 0
    assert fused


@every_place
def test_gpt_moe_generates_its_own_tokens(residents: str, fused: list[int]) -> None:
    plain = copy.deepcopy(plain_gpt()).to("cuda")
    prompts = [[token % 48 for token in prompt] for prompt in PROMPTS]
    expected = [tokens_of(plain, prompt, 12) for prompt in prompts]
    with (
        offloaded(plain, residents) as model,
        overspill.LLM(model, context=64, max_batch=3) as llm,
    ):
        assert [r.token_ids for r in llm.generate(prompts, GREEDY)] == expected
        assert [llm.generate(p, GREEDY)[0].token_ids for p in prompts] == expected
        assert fused


def gpt(config: GPTConfig, dtype: torch.dtype, device: str = "cuda") -> GPTMoE:
    """Weights are large enough that tokens vary."""
    model = GPTMoE(config, checkpoint=False, seed=3).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0 if parameter.dim() > 1 else 1.0)
    return model.to(device, dtype)


class Steps:
    """Batches of three requests, with tokens that are given."""

    def __init__(self, vocabulary: int) -> None:
        self.scheduler = Scheduler(BlockPool(32, 16), 4, 512)
        self._random = torch.Generator().manual_seed(0)
        self._vocabulary = vocabulary
        self.requests = [make_request(self._tokens(length), 90) for length in (5, 1, 30)]
        for request in self.requests:
            self.scheduler.add(request)

    def _tokens(self, count: int) -> list[int]:
        return torch.randint(self._vocabulary, (count,), generator=self._random).tolist()

    def computed(self, batch: list[BatchItem]) -> None:
        for work in batch:
            self.scheduler.computed(work)
            work.request.tokens += self._tokens(1)


def rms(values: list[Tensor]) -> float:
    return float(torch.stack(values).square().mean().sqrt())


def check_bf16_logits(residents: str, device: str, n_steps: int) -> None:
    """Every token goes to all experts: near ties of the router do not matter."""
    plain = gpt(SMALL, torch.bfloat16, device)
    exact = copy.deepcopy(plain).float()
    steps = Steps(SMALL.vocab)
    mine: list[Tensor] = []
    theirs: list[Tensor] = []
    right: list[Tensor] = []
    options = {"device": device, "mode": "host", "slots": 8, "quiet": True, "progress": False}
    from overspill.serve.fused_runner import FusedRunner

    models = [overspill.offload(copy.deepcopy(plain), **options) for _ in range(2)]
    set_residents(models[0], residents)
    where = torch.device(device)
    sizes = where, 32, 16, 128, 4
    runners = [FusedRunner(models[0], *sizes), PagedRunner(models[1], *sizes)]
    with torch.inference_mode():
        for _ in range(n_steps):
            batch = steps.scheduler.next_batch()
            for logits, runner in zip((mine, theirs), runners, strict=True):
                logits.append(runner.run(batch).float().clone())
            whole = [
                exact(torch.tensor([r.tokens], device=device)).logits[0, -1] for r in steps.requests
            ]
            right.append(torch.stack(whole))
            steps.computed(batch)
    for runner, model in zip(runners, models, strict=True):
        runner.close()
        model.overspill.close()
    # without the first step, of the prompts
    of_mine, of_modules = (
        rms([a - b for a, b in zip(logits[1:], right[1:], strict=True)])
        for logits in (mine, theirs)
    )
    assert of_mine <= 0.03 * rms(right)
    assert of_mine <= 1.5 * of_modules


@every_place
def test_bf16_logits_are_as_near_to_float32_as_those_of_the_modules(
    residents: str, fused: list[int]
) -> None:
    check_bf16_logits(residents, "cuda", 12)
    assert fused


@every_place
def test_a_step_gives_the_same_bits_each_time(residents: str, fused: list[int]) -> None:
    from overspill.serve.fused_runner import FusedRunner

    with offloaded(gpt(LARGE, torch.bfloat16), residents) as model:
        # without copies: the bits depend on whether the CPU or the GPU computes an expert
        runner = FusedRunner(model, torch.device("cuda"), 32, 16, 128, 4, DecodingOptions(slots=0))
        steps = Steps(LARGE.vocab)
        with torch.inference_mode():
            batch = steps.scheduler.next_batch()
            runner.run(batch)
            steps.computed(batch)
            for chosen in (slice(0, 3), slice(2, 3)):
                batch = steps.scheduler.next_batch()[chosen]
                first = runner.run(batch).clone()
                assert first.isfinite().all()
                for number in range(200):
                    assert torch.equal(runner.run(batch), first), number
        runner.close()
        assert set(fused) == {1, 4}


@every_place
def test_seeds_give_the_same_tokens_beside_other_requests(residents: str) -> None:
    params = overspill.SamplingParams(max_tokens=40, temperature=1.0, seed=7)
    other = overspill.SamplingParams(max_tokens=25, temperature=1.0)
    with (
        offloaded(gpt(SMALL, torch.float32), residents) as model,
        overspill.LLM(model, context=128, max_batch=4) as llm,
    ):
        expected = llm.generate([1, 2, 3], params)[0].token_ids
        assert len(set(expected)) > 5
        for _ in range(3):
            prompts = [[4, 5], [1, 2, 3], [6], [7] * 20, [8]]
            got = llm.generate(prompts, [other, params, other, other, other])
            assert got[1].token_ids == expected


@every_place
def test_threads_with_streams_of_their_own_get_their_tokens(residents: str) -> None:
    """A batch may begin on behalf of one thread while another one's is computed."""
    plain = gpt(SMALL, torch.float32)
    prompts = [[number + 1, 5, 7] for number in range(6)]
    expected = [tokens_of(plain, prompt, 12) for prompt in prompts]
    got: dict[int, list[list[int]]] = {number: [] for number in range(6)}
    with (
        offloaded(plain, residents) as model,
        overspill.LLM(model, context=128, max_batch=4) as llm,
    ):

        def ask(number: int) -> None:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(5):
                    result = llm.generate(prompts[number], GREEDY)
                    got[number].append(result[0].token_ids)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert got == {number: [expected[number]] * 5 for number in range(6)}


LONG = overspill.SamplingParams(max_tokens=100, ignore_eos=True)


@pytest.mark.parametrize(
    ("kind", "mode", "host_slots"),
    [
        ("upload", "host", 0),
        *((kind, "disk", n) for kind in ("upload", "ssd read") for n in (5, 12)),
    ],
)
def test_failed_transfers_fail_their_requests_and_change_no_tokens(
    kind: str, mode: str, host_slots: int, tmp_path: Path
) -> None:
    """Every prompt uploads experts. With few host slots, experts on disk are uploaded for each new
    token; with more, steps read them."""
    plain = gpt(SMALL, torch.float32)
    prompts = [[number + 1, 5, 7] for number in range(4)]
    expected = [tokens_of(plain, prompt, 12) for prompt in prompts]
    fail = FailingJob(kind)
    where: dict[str, Any] = {"mode": mode, "settings": overspill.Settings(inject=fail)}
    if mode == "disk":
        where |= {"disk": tmp_path, "host_slots": host_slots}
    failed, got = [], []
    with (
        offloaded(plain, "none", **where) as model,
        overspill.LLM(model, context=128, max_batch=4) as llm,
    ):
        for _ in range(3):
            assert [r.token_ids for r in llm.generate(prompts, GREEDY)] == expected
            fail.on = True
            for _ in range(2):
                with pytest.raises(OverspillError, match="injected"):
                    llm.generate(prompts, GREEDY)
            fail.on = False

        def ask(number: int) -> None:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(10):
                    fail.next = 1
                    try:
                        result = llm.generate(prompts[number], GREEDY)
                        got.append(result[0].token_ids == expected[number])
                    except OverspillError as error:
                        failed.append(str(error))

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(got) + len(failed) == 40
        assert all(got)
        assert all("injected" in error for error in failed)
        fail.next = 0
        assert [r.token_ids for r in llm.generate(prompts, GREEDY)] == expected
        model.overspill.check_conserved()


@pytest.mark.parametrize("slots", [0, 20])
def test_steps_read_experts_from_disk(slots: int, tmp_path: Path, fused: list[int]) -> None:
    plain = gpt(LARGE, torch.float32)
    prompts = [[number + 1, 5, 7] for number in range(6)]
    expected = [tokens_of(plain, prompt, 12) for prompt in prompts]
    late = overspill.Settings(inject=delays(seed=1, longest=1e-3, only="ssd read"))
    where: dict[str, Any] = {"mode": "disk", "disk": tmp_path, "host_slots": 40, "settings": late}
    with (
        offloaded(plain, "none", **where) as model,
        overspill.LLM(model, context=128, max_batch=4, slots=slots) as llm,
    ):
        for _ in range(3):
            assert [r.token_ids for r in llm.generate(prompts, GREEDY)] == expected
            assert [llm.generate(p, GREEDY)[0].token_ids for p in prompts] == expected
        assert {1, 4} <= set(fused)
        assert model.overspill.recorder.counters()["ssd read"] > 0
        assert llm.stats()["experts_on_cpu"] > 0


@every_place
def test_an_llm_can_be_given_up_in_the_middle_of_a_stream(residents: str) -> None:
    """A batch has begun early, and waits for the CPU; the model works afterwards."""
    with offloaded(gpt(LARGE, torch.float32), residents) as model:
        tokens = []
        for _ in range(3):
            llm = overspill.LLM(model, context=128)
            stream = llm.stream([1, 2, 3], LONG)
            tokens.append([next(stream).token_ids[0] for _ in range(4)])
            del stream, llm
            gc.collect()
            torch.cuda.synchronize()
        assert tokens == [tokens[0]] * 3
        with overspill.LLM(model, context=128) as llm:
            stream = llm.stream([1, 2, 3], LONG)
            assert [next(stream).token_ids[0] for _ in range(4)] == tokens[0]
            llm.close()
            with pytest.raises(OverspillError, match="this LLM was closed"):
                next(stream)


def test_an_llm_can_be_given_up_while_a_step_reads_from_disk(tmp_path: Path) -> None:
    """Another one continues meanwhile; all host slots are given back."""
    late = overspill.Settings(inject=delays(seed=1, longest=2e-3, only="ssd read"))
    where: dict[str, Any] = {"mode": "disk", "disk": tmp_path, "host_slots": 40, "settings": late}
    with (
        offloaded(gpt(LARGE, torch.float32), "none", **where) as model,
        overspill.LLM(model, context=128, max_batch=4) as other,
    ):
        beside = other.stream([4, 5], LONG)
        expected = [next(beside).token_ids[0] for _ in range(12)]
        beside = other.stream([4, 5], LONG)
        tokens, got = [], []
        for _ in range(3):
            llm = overspill.LLM(model, context=128, max_batch=4, slots=4)
            stream = llm.stream([1, 2, 3], LONG)
            tokens.append([next(stream).token_ids[0] for _ in range(4)])
            got += [next(beside).token_ids[0] for _ in range(2)]
            del stream, llm
            gc.collect()
            got += [next(beside).token_ids[0] for _ in range(2)]
        assert tokens == [tokens[0]] * 3
        assert got == expected
        del beside
        other.close()
        model.overspill.check_conserved()


@every_place
def test_the_engine_may_be_closed_before_the_llm(residents: str) -> None:
    with offloaded(gpt(SMALL, torch.bfloat16), residents) as model:
        llm = overspill.LLM(model, context=128)
        stream = llm.stream([1, 2, 3], LONG)
        for _ in range(4):
            next(stream)
        model.overspill.close()
        with pytest.raises(OverspillError, match="closed"):
            next(stream)
        llm.close()
        torch.cuda.synchronize()


def test_experts_may_move_in_the_middle_of_a_stream() -> None:
    """While the next batch is computed."""
    plain = gpt(SMALL, torch.float32)
    expected = tokens_of(plain, [1, 2, 3], 24)
    with offloaded(plain, "some") as model, overspill.LLM(model, context=128) as llm:
        got = []
        for number, piece in enumerate(
            llm.stream([1, 2, 3], overspill.SamplingParams(max_tokens=24, ignore_eos=True))
        ):
            got += piece.token_ids
            set_residents(model, ("all", "none", "some")[number % 3])
            if number % 5 == 0:
                model(torch.tensor([[4, 5, 6]], device="cuda"))  # used beside it
        assert got == expected


@pytest.mark.parametrize("family", SERVED, ids=lambda family: family.name)
def test_greedy_tokens_are_those_of_transformers(
    family: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    plain = make_model(family).eval()  # type: ignore[arg-type]
    plain.save_pretrained(tmp_path)
    plain.to("cuda")
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device="cuda")
        made = plain.generate(
            input_ids=ids, max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        expected.append(made[0, len(prompt) :].tolist())
    for slots in (3, None):
        with overspill.LLM(str(tmp_path), slots=slots, context=64, device="cuda") as llm:
            for _ in range(6):  # experts move to the GPU meanwhile
                assert [r.token_ids for r in llm.generate(PROMPTS, GREEDY)] == expected
            assert [llm.generate(p, GREEDY)[0].token_ids for p in PROMPTS] == expected


@pytest.mark.parametrize("family", cases(f for f in FAMILIES if f.name in CONNECTED))
def test_hybrid_models_give_the_tokens_of_transformers(
    family: Any, fused: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recurrent states, indexers and relative biases; some experts are on the host."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    plain = make_plain(family.name).to("cuda")
    expected = [tokens_of(plain, prompt, 12) for prompt in PROMPTS]
    with (
        offloaded(plain, "some") as model,
        overspill.LLM(model, context=64, max_batch=4) as llm,
    ):
        assert [r.token_ids for r in llm.generate(PROMPTS, GREEDY)] == expected, "together"
        alone = [llm.generate(prompt, GREEDY)[0].token_ids for prompt in PROMPTS[:2]]
        assert alone == expected[:2], "alone"
    assert ({1, 4} <= set(fused)) is family.name.startswith("qwen3")


BUDGET = """
import sys
import torch
from transformers import MixtralConfig, MixtralForCausalLM
import overspill

config = MixtralConfig(
    vocab_size=1024, hidden_size=512, intermediate_size=1024, num_hidden_layers=4,
    num_attention_heads=8, num_key_value_heads=8, num_local_experts=16, num_experts_per_tok=2,
    max_position_embeddings=2048,
)
MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(sys.argv[1])
budget = 256 << 20
params = overspill.SamplingParams(max_tokens=16, temperature=1.0, seed=0, ignore_eos=True)
with overspill.LLM(sys.argv[1], gpu_memory=budget, context=2048, max_batch=8) as llm:
    for _ in range(4):
        llm.generate([[1, 2, 3], list(range(1000))], params)
    use = llm.model.overspill.memory.gpu_use()
    assert use is not None
    assert use["budget"] == budget
    assert use["reserved"] <= budget
    stats = llm.stats()
    assert stats["cache_bytes"] > 0
    assert 0 < stats["gpu_reserved"] <= stats["budgets"]["gpu"] == budget
"""


def test_keys_and_values_are_in_the_budget(tmp_path: Path) -> None:
    """In a process of its own: what other tests have left on the GPU would count."""
    subprocess.run([sys.executable, "-c", BUDGET, str(tmp_path)], check=True)


def test_a_closed_llm_leaves_no_gpu_memory(tmp_path: Path) -> None:
    make_model(READ[0]).save_pretrained(tmp_path)
    left = []
    for slots in (0, 3, 3, 3):
        with overspill.LLM(str(tmp_path), slots=slots, context=64, device="cuda") as llm:
            llm.generate(PROMPTS, GREEDY)
        del llm
        gc.collect()
        left.append(torch.cuda.memory_allocated())
    assert left[3] == left[1]


def test_a_closed_llm_that_is_referenced_has_no_gpu_memory() -> None:
    """The model that it was given can use it."""
    with offloaded(gpt(LARGE, torch.bfloat16), "none") as model:
        llms, left = [], []
        for _ in range(3):
            llms.append(overspill.LLM(model, slots=40, context=128))
            llms[-1].generate([1, 2, 3], GREEDY)
            assert llms[-1].stats()["expert_slots"] == 40  # 3 MiB each
            llms[-1].close()
            gc.collect()
            left.append(torch.cuda.memory_allocated())
        assert left[2] - left[1] < 1 << 20
