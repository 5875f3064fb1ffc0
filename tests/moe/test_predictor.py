"""The predictor: a copied gate, what it learns, what it never touches, and how it is judged."""

import copy
import itertools
import math
from collections import Counter
from fractions import Fraction

import pytest
import torch
from torch import Tensor

import overspill.moe.predictor as predictor_module
from overspill.core.errors import ConfigError
from overspill.models.config import GPTConfig
from overspill.models.gpt import GPTMoE
from overspill.moe.predictor import (
    LEARN_TOKENS,
    PREDICTOR_COPIES,
    Lookahead,
    Predictor,
    expert_accuracy,
    history_accuracy,
    subsample,
    token_accuracy,
)
from overspill.moe.router import Router
from overspill.simulate import DrawnRouting

CPU = torch.device("cpu")
D, E, K = 24, 8, 2


def routed(x_TD: Tensor, gate_ED: Tensor, top_k: int = K) -> Tensor:
    return (x_TD @ gate_ED.t()).topk(top_k).indices


def counts_of(ids_TK: Tensor, n_experts: int = E) -> Tensor:
    return torch.bincount(ids_TK.flatten(), minlength=n_experts)


# -- one predictor ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_the_gates_own_input_it_is_the_gate(dtype: torch.dtype) -> None:
    router = Router(D, E, K, dtype=dtype)
    x = torch.randn(5000, D, dtype=dtype)  # more than are computed at once
    real = router(x).expert_ids_TK
    predictor = Predictor(router.weight, E, D, CPU)
    assert token_accuracy(predictor.predict_ids(x, K), real) == 1.0
    counts = predictor.predict(x, K)
    assert counts.dtype == torch.int64
    assert torch.equal(counts, counts_of(real))


def test_a_step_is_adam_on_the_cross_entropy() -> None:
    """Against autograd and torch.optim.Adam."""
    gate, x = torch.randn(E, D) * 0.5 / D**0.5, torch.randn(300, D)
    ids = routed(x, torch.randn(E, D))
    ids[:5, 1] = E  # dropped assignments
    predictor = Predictor(gate, E, D, CPU)
    weight = gate.clone().requires_grad_()
    optimizer = torch.optim.Adam(
        [weight],
        lr=predictor_module._LEARNING_RATE / D,  # at the first step
        betas=(predictor_module._BETA1, predictor_module._BETA2),
        eps=predictor_module._EPS,
    )
    fading = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + step / 10) ** -0.5)
    for _ in range(4):
        predictor.learn(x, ids)
        logs = torch.log_softmax(x @ weight.t(), -1)
        picked = [logs[t, e] / K for t, row in enumerate(ids.tolist()) for e in row if e < E]
        optimizer.zero_grad()
        (-torch.stack(picked).sum() / x.shape[0]).backward()
        optimizer.step()
        fading.step()
    torch.testing.assert_close(predictor.learned_ED, weight.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", [16, 512])
def test_it_learns_a_map_that_it_was_not_given(width: int) -> None:
    gate = torch.randn(E, width) * 0.02
    predictor = Predictor(None, E, width, CPU)
    held_out = torch.randn(1000, width)
    real = routed(held_out, gate)
    assert token_accuracy(predictor.predict_ids(held_out, K), real) < 0.5
    for _ in range(200):
        x = torch.randn(512, width)
        predictor.learn(x, routed(x, gate))
    assert token_accuracy(predictor.predict_ids(held_out, K), real) > 0.9


@pytest.mark.parametrize("scale", [0.002, 0.02, 0.5])
@pytest.mark.parametrize("width", [16, 512])
def test_what_is_right_stays_right(width: int, scale: float) -> None:
    """The gate of the very input, whatever its scale: only to lose."""
    gate = torch.randn(E, width) * scale
    predictor = Predictor(gate, E, width, CPU)
    held_out = torch.randn(2000, width)
    for _ in range(100):
        x = torch.randn(256, width)
        predictor.learn(x, routed(x, gate))
    assert not torch.equal(predictor.learned_ED, predictor.copied_ED)
    assert token_accuracy(predictor.predict_ids(held_out, K), routed(held_out, gate)) == 1.0


def test_the_better_of_copied_and_learned_predicts() -> None:
    """The routing turns round: first the copy is right, then only what is learned can be."""
    gate, held_out = torch.randn(E, D), torch.randn(1000, D)
    predictor = Predictor(gate, E, D, CPU)
    for sign, used in ((1, predictor.copied_ED), (-1, predictor.learned_ED)):
        for _ in range(60):
            x = torch.randn(512, D)
            predictor.learn(x, routed(x, sign * gate))
        assert torch.equal(predictor.weight_ED, used)
        real = routed(held_out, sign * gate)
        assert token_accuracy(predictor.predict_ids(held_out, K), real) > 0.8


def test_it_follows_a_gate_in_training() -> None:
    gate, held_out = torch.randn(E, D), torch.randn(1000, D)
    predictor = Predictor(gate, E, D, CPU)
    before, x = gate.clone(), torch.randn(512, D)
    for _ in range(20):
        predictor.learn(x, routed(x, before))
    scale = float(predictor.copied_ED[0, 0] / gate[0, 0])
    gate.copy_(torch.randn(E, D))  # in place, as an optimizer does
    difference = predictor.learned_ED - predictor.copied_ED
    steps = predictor._steps
    predictor.learn(x[:1], routed(x[:1], gate))  # too few to step
    assert predictor._steps == steps
    assert torch.equal(predictor.copied_ED, gate * scale)
    torch.testing.assert_close(predictor.learned_ED - predictor.copied_ED, difference)
    ids = predictor.predict_ids(held_out, K)
    assert token_accuracy(ids, routed(held_out, gate)) > 0.8


def test_counts_are_corrected_by_what_they_were_off() -> None:
    """Nothing in these tokens tells their experts, but some experts are popular."""
    source = DrawnRouting.with_imbalance(1, E, K, 0.3)
    predictor = Predictor(torch.randn(E, D), E, D, CPU)
    shares = K * torch.tensor(source.shares(0))

    def furthest() -> float:
        counts = predictor.predict(torch.randn(4000, D), K)
        assert counts.dtype == torch.int64
        assert counts.min() >= 0
        return float((counts / 4000 - shares).abs().max())

    assert furthest() > 0.3
    for _ in range(60):
        predictor.learn(torch.randn(1024, D), source(0, 1024, CPU))
    assert furthest() < 0.06


def test_few_tokens_wait_for_more() -> None:
    """A token at a time, as in decoding, is the same as all of them at once."""
    gate, x = torch.randn(E, D), torch.randn(3 * 256, D)
    ids = routed(x, torch.randn(E, D))
    at_once, singly = (Predictor(gate, E, D, CPU) for _ in range(2))
    before = singly.learned_ED.clone()
    for start in range(0, 3 * 256, 256):
        at_once.learn(x[start : start + 256], ids[start : start + 256])
    for token in range(255):
        singly.learn(x[token : token + 1], ids[token : token + 1])
    assert torch.equal(singly.learned_ED, before)
    for token in range(255, 3 * 256):
        singly.learn(x[token : token + 1], ids[token : token + 1])
    torch.testing.assert_close(singly.learned_ED, at_once.learned_ED, rtol=1e-3, atol=1e-4)


def test_no_tokens_teach_nothing_and_predict_nothing() -> None:
    predictor = Predictor(torch.randn(E, D), E, D, CPU)
    before = predictor.learned_ED.clone()
    predictor.learn(torch.empty(0, D), torch.empty(0, K, dtype=torch.int64))
    assert torch.equal(predictor.learned_ED, before)
    assert predictor.predict(torch.empty(0, D), K).tolist() == [0] * E


def test_a_broken_activation_does_not_stay() -> None:
    gate = torch.randn(E, D)
    predictor = Predictor(gate, E, D, CPU)
    x = torch.randn(300, D)
    ids = routed(x, gate)
    predictor.learn(x, ids)
    for bad in (float("nan"), float("inf")):
        broken = x.clone()
        broken[3, 4] = bad
        predictor.learn(broken, ids)
    predictor.learn(x, ids)
    assert predictor.learned_ED.isfinite().all()
    assert predictor._score_2.isfinite().all()


def test_a_subsample_is_even_and_bounded() -> None:
    for n in (0, 1, LEARN_TOKENS, LEARN_TOKENS + 1, 5 * LEARN_TOKENS, 5 * LEARN_TOKENS + 7):
        rows = subsample(torch.arange(n))
        assert rows.numel() <= LEARN_TOKENS
        assert rows.numel() >= min(n, LEARN_TOKENS // 2)
        assert len(set(rows.diff().tolist())) <= 1


# -- all layers of a model ----------------------------------------------------------------


class Spy(Predictor):
    """Remembers what it learned from."""

    def __init__(self) -> None:
        super().__init__(torch.randn(E, D), E, D, CPU)
        self.learned: list[tuple[Tensor, Tensor]] = []

    def learn(self, x_TD: Tensor, expert_ids_TK: Tensor) -> None:
        self.learned.append((x_TD.clone(), expert_ids_TK.clone()))
        super().learn(x_TD, expert_ids_TK)


def spied(n_layers: int, ahead: int = 1, every: int = 1) -> Lookahead:
    lookahead = Lookahead([None] * n_layers, E, D, CPU, ahead, every)
    assert set(lookahead.predictors) == set(range(ahead, n_layers))
    lookahead.predictors = {layer: Spy() for layer in lookahead.predictors}
    return lookahead


def learned(lookahead: Lookahead, layer: int) -> list[tuple[Tensor, Tensor]]:
    spy = lookahead.predictors[layer]
    assert isinstance(spy, Spy)
    return spy.learned


def forward(
    lookahead: Lookahead, n_tokens: int, layers: range
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Runs some layers; the activations are overwritten behind each, as a model may do."""
    inputs, routings = {}, {}
    for layer in layers:
        x = torch.randn(n_tokens, D, requires_grad=True)
        ids = torch.randint(E, (n_tokens, K))
        inputs[layer], routings[layer] = x.detach().clone(), ids.clone()
        target = lookahead.predictors.get(layer + lookahead.ahead)
        expected = None if target is None else target.predict(x, K)
        counts = lookahead.observe(layer, x, ids)
        if expected is None:
            assert counts is None
        else:
            assert counts is not None
            assert torch.equal(counts, expected)
            assert not counts.requires_grad
        x.data.zero_()
        ids.zero_()
    return inputs, routings


@pytest.mark.parametrize("ahead", [1, 2, 4])
@pytest.mark.parametrize("n_tokens", [10, 3000])
def test_a_layer_learns_from_what_the_layer_below_read(ahead: int, n_tokens: int) -> None:
    lookahead = spied(4, ahead)
    passes = [forward(lookahead, n_tokens, range(4)) for _ in range(3)]
    for layer in range(ahead, 4):
        for got, (inputs, routings) in zip(learned(lookahead, layer), passes, strict=True):
            assert torch.equal(got[0], subsample(inputs[layer - ahead]))
            assert torch.equal(got[1], subsample(routings[layer]))
    assert not lookahead._kept, "nothing is held between forwards"


@pytest.mark.parametrize("ahead", [1, 2])
def test_only_inputs_of_the_same_forward_are_learned_from(ahead: int) -> None:
    lookahead = spied(5, ahead)
    forward(lookahead, 10, range(3))  # ends early
    for layer in lookahead.predictors:
        learned(lookahead, layer).clear()
    passes = [forward(lookahead, 10, range(5))]  # as many tokens, but others
    forward(lookahead, 10, range(4, 5))  # recomputation: one layer at a time, downwards
    forward(lookahead, 10, range(3, 4))
    passes.append(forward(lookahead, 10, range(5)))
    for layer in range(ahead, 5):
        for got, (inputs, routings) in zip(learned(lookahead, layer), passes, strict=True):
            assert torch.equal(got[0], inputs[layer - ahead])
            assert torch.equal(got[1], routings[layer])


def test_a_changed_number_of_tokens_is_not_learned_from() -> None:
    lookahead = spied(3)
    lookahead.observe(0, torch.randn(10, D), torch.zeros(10, K, dtype=torch.int64))
    lookahead.observe(1, torch.randn(12, D), torch.zeros(12, K, dtype=torch.int64))
    lookahead.observe(2, torch.randn(12, D), torch.zeros(12, K, dtype=torch.int64))
    assert [len(learned(lookahead, layer)) for layer in (1, 2)] == [0, 1]


def test_it_learns_from_every_nth_forward_and_predicts_in_all() -> None:
    lookahead = spied(3, every=3)
    for _ in range(7):
        forward(lookahead, 10, range(3))
    assert [len(learned(lookahead, layer)) for layer in (1, 2)] == [3, 3]


def test_gates_are_copied_to_the_layer_that_they_belong_to() -> None:
    gates = [torch.randn(E, D), torch.randn(E, D), None]
    lookahead = Lookahead(gates, E, D, CPU)
    weight = lookahead.predictors[1].weight_ED
    scale = weight[0, 0] / gates[1][0, 0]
    assert math.log2(scale).is_integer()
    assert torch.equal(weight, gates[1] * scale)
    assert weight.data_ptr() != gates[1].data_ptr()
    assert not lookahead.predictors[2].weight_ED.any()
    for ahead, every in ((0, 1), (1, 0)):
        with pytest.raises(ConfigError, match=f"ahead={ahead} and every={every}"):
            Lookahead(gates, E, D, CPU, ahead, every)


# -- beside a model -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained() -> GPTMoE:
    """A tiny model that has learned that each token is a small step from the last."""
    config = GPTConfig(
        vocab=32, n_layers=4, d_model=D, d_hidden=D, n_heads=2, n_experts=E, top_k=K, max_seq=32
    )
    model = GPTMoE(config, checkpoint=False, seed=1)
    losses = train(model, 60)
    assert losses[-1] < 2.0, "even odds over 32 tokens would be 3.5"
    return model


def train(model: GPTMoE, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        tokens = walks(step)
        loss = model(tokens[:, :-1], tokens[:, 1:]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def walks(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    jumps = torch.randint(0, 3, (8, 25), generator=generator)
    starts = torch.randint(0, 32, (8, 1), generator=generator)
    return (starts + jumps.cumsum(-1)) % 32


def watched(model: GPTMoE, lookahead: Lookahead) -> list[torch.utils.hooks.RemovableHandle]:
    """Every router tells the lookahead what it read and where it sent it."""

    def hook(layer: int) -> object:
        def tell(module: object, args: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
            lookahead.observe(layer, args[0], output[1])

        return tell

    routers = [moe.router for moe in model.moe_layers()]
    return [router.register_forward_hook(hook(layer)) for layer, router in enumerate(routers)]


@torch.no_grad()
def accuracy(model: GPTMoE, predictors: dict[int, Predictor], ahead: int) -> float:
    seen: list[tuple[Tensor, Tensor]] = []
    handles = [
        moe.router.register_forward_hook(lambda _, args, out: seen.append((args[0], out[1])))
        for moe in model.moe_layers()
    ]
    model(torch.cat([walks(step) for step in range(1000, 1004)]))
    for handle in handles:
        handle.remove()
    scores = [
        token_accuracy(predictor.predict_ids(seen[layer - ahead][0], K), seen[layer][1])
        for layer, predictor in predictors.items()
    ]
    return sum(scores) / len(scores)


@pytest.mark.parametrize("ahead", [1, 2])
def test_learning_beside_a_model_helps_and_never_changes_it(trained: GPTMoE, ahead: int) -> None:
    model = copy.deepcopy(trained)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    gates = [moe.router.weight for moe in model.moe_layers()]
    lookahead = Lookahead(gates, E, D, CPU, ahead)
    untaught = Lookahead(gates, E, D, CPU, ahead)
    plain = model(walks(500)).logits
    before = accuracy(model, untaught.predictors, ahead)
    handles = watched(model, lookahead)
    assert torch.equal(model(walks(500)).logits, plain)
    for step in range(100, 200):
        model(walks(step))
    for handle in handles:
        handle.remove()
    after = accuracy(model, lookahead.predictors, ahead)
    assert before > K / E, "a copied gate knows more than nothing"
    assert after > before
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name


def test_training_is_the_same_bits_with_predictors_that_watch(trained: GPTMoE) -> None:
    alone, beside = copy.deepcopy(trained), copy.deepcopy(trained)
    lookahead = Lookahead([moe.router.weight for moe in beside.moe_layers()], E, D, CPU)
    watched(beside, lookahead)
    assert train(beside, 5) == train(alone, 5)
    for one, other in zip(beside.parameters(), alone.parameters(), strict=True):
        assert torch.equal(one, other)


# -- how good it is -----------------------------------------------------------------------


def test_token_accuracy_is_that_of_a_naive_loop() -> None:
    predicted = torch.rand(50, E).topk(3).indices
    real = torch.rand(50, E).topk(3).indices
    pairs = zip(predicted.tolist(), real.tolist(), strict=True)
    naive = sum(len(set(a) & set(b)) / 3 for a, b in pairs) / 50
    assert token_accuracy(predicted, real) == pytest.approx(naive)
    assert token_accuracy(real.flip(-1), real) == 1.0, "the order does not count"


def naive_expert_accuracy(predicted: list[int], real: list[int], n: int, m: int) -> Fraction:
    """Over all orders of the experts, each the order of ties, for both sides by themselves."""
    orders = list(itertools.permutations(range(len(real))))

    def least(counts: list[int], size: int) -> Counter[tuple[int, ...]]:
        ranked = (sorted(order, key=lambda e: counts[e])[:size] for order in orders)
        return Counter(tuple(sorted(one)) for one in ranked)

    total = Fraction(0)
    for a, weight_a in least(predicted, n).items():
        for b, weight_b in least(real, m).items():
            total += Fraction(len(set(a) & set(b)), n) * weight_a * weight_b
    return total / len(orders) ** 2


def test_expert_accuracy_is_the_mean_over_orders_of_ties() -> None:
    hypothesis = pytest.importorskip("hypothesis")
    st = hypothesis.strategies
    counts = st.lists(st.integers(0, 4), min_size=5, max_size=5)

    @hypothesis.settings(max_examples=50)
    @hypothesis.given(counts, counts, st.integers(1, 5), st.integers(1, 5))
    def check(predicted: list[int], real: list[int], n: int, m: int) -> None:
        got = expert_accuracy(torch.tensor(predicted), torch.tensor(real), n, max(n, m))
        naive = naive_expert_accuracy(predicted, real, n, max(n, m))
        assert got == pytest.approx(float(naive))

    check()


def test_expert_accuracy_of_a_right_a_wrong_and_an_empty_prediction() -> None:
    real = torch.tensor([7, 1, 5, 3, 9, 2, 8, 4])
    assert expert_accuracy(real * 10, real, 2, 2) == 1.0
    assert expert_accuracy(-real, real, 2, 2) == 0.0
    assert expert_accuracy(torch.zeros(8), real, 2, 3) == pytest.approx(3 / 8)


def test_history_accuracy_compares_each_step_with_the_next() -> None:
    steps = torch.tensor([[1, 2, 3, 4], [1, 3, 2, 4], [4, 3, 2, 1]])
    assert history_accuracy(steps, 2, 2) == pytest.approx((1 / 2 + 1 / 2) / 2)
    assert history_accuracy(steps[:2], 2, 3) == 1.0


@pytest.mark.gpu
def test_on_a_gpu_it_waits_for_nothing() -> None:
    device = torch.device("cuda", 0)
    gates = [torch.randn(E, D, device=device) for _ in range(3)]
    lookahead = Lookahead(gates, E, D, device)
    x = torch.randn(6000, D, device=device, dtype=torch.bfloat16)
    ids = torch.randint(E, (6000, K), device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        counts = [lookahead.observe(layer, x, ids) for _ in range(2) for layer in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert counts[0] is not None
    assert int(counts[0].sum()) == 6000 * K


def test_the_memory_plan_counts_every_copy_of_a_gate() -> None:
    predictor = Predictor(None, 8, 64, torch.device("cpu"))  # a gate would be the model's own
    tensors = [value for value in vars(predictor).values() if isinstance(value, Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    planned = PREDICTOR_COPIES * 8 * 64 * 4
    assert planned <= sum(storages.values()) <= planned + 1024
