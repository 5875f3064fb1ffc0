"""The popularity predictor: what it starts as, what it learns, and what it is fed with."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from overspill.moe import predictor as module
from overspill.moe.predictor import LEARN_TOKENS, Gate, Observer, Predictor
from overspill.plan.popularity import LearningPace, expert_accuracy, rarest

CPU = torch.device("cpu")
D = 48


class Correlated:
    """Tokens that pass layers with a residual stream, and what gates choose for them.

    A token is one of 200 vectors plus noise. Each layer adds a fixed nonlinear function of its
    input, about half as large as the stream; a gate reads the stream, normalized and scaled by
    channel. So the input of a gate tells a lot about those of the next layers, and a copy of a
    later gate is not a good predictor. Real models differ in how much they tell.
    """

    def __init__(self, n_experts: int, n_layers: int = 4, top_k: int = 2) -> None:
        self._random = torch.Generator().manual_seed(1)
        self.n_experts, self.n_layers, self.top_k = n_experts, n_layers, top_k
        self._words = self._draw(200, D)
        self._common = 0.5 * self._draw(D)
        self.gates = [Gate(self._draw(n_experts, D) / D**0.5) for _ in range(n_layers)]
        self._scales = [1 + 0.3 * self._draw(D) for _ in range(n_layers)]
        self._mixes = [self._draw(D, D) / D**0.5 for _ in range(n_layers)]

    def _draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._random)

    def tokens(self, number: int) -> tuple[list[Tensor], list[Tensor]]:
        """The inputs and the experts of some tokens in each layer."""
        word = torch.randint(len(self._words), (number,), generator=self._random)
        stream = self._words[word] + 0.7 * self._draw(number, D) + self._common
        inputs, ids = [], []
        for gate, scale, mix in zip(self.gates, self._scales, self._mixes, strict=True):
            x = stream / stream.square().mean(-1, keepdim=True).sqrt() * scale
            inputs.append(x)
            ids.append((x @ gate.weight_ED.t()).topk(self.top_k).indices)
            stream = stream + 0.5 * stream.std() * torch.tanh(x @ mix)
        return inputs, ids


def found_share(predicted_NK: Tensor, real_NK: Tensor) -> float:
    rows = zip(predicted_NK.tolist(), real_NK.tolist(), strict=True)
    return sum(len({*a} & {*b}) for a, b in rows) / real_NK.numel()


def shares(
    predictor: Predictor, inputs: Sequence[Tensor], ids: Sequence[Tensor]
) -> dict[int, float]:
    """Of the experts of tokens that are predicted, by distance; the mean over layers."""
    found = {}
    for a in predictor.distances:
        each = [
            found_share(predictor.predict(layer, inputs[layer], a, ids[0].shape[1]), ids[layer + a])
            for layer in range(len(inputs) - a)
        ]
        found[a] = sum(each) / len(each)
    return found


def new(model: Correlated, copied: bool = True) -> Predictor:
    gates = model.gates if copied else [None] * model.n_layers
    return Predictor(gates, model.n_experts, D, CPU)


@pytest.mark.parametrize(("n_experts", "batches"), [(16, 60), (64, 110)])
def test_accuracy_one_and_two_layers_ahead(n_experts: int, batches: int) -> None:
    """On tokens that it has not learned from, of a model that was made to be predictable (see
    `Correlated`). Copies of gates are worse."""
    model = Correlated(n_experts)
    predictor = new(model)
    held_out = model.tokens(2000)
    copied = shares(predictor, *held_out)
    for _ in range(batches):
        predictor.learn(0, *model.tokens(LEARN_TOKENS))
    learned = shares(predictor, *held_out)
    assert learned[1] >= 0.80
    assert learned[2] >= 0.75
    assert all(learned[a] > copied[a] + 0.1 for a in (1, 2))
    told = predictor.accuracies()  # of what it had not learned from either
    assert all(told[a].tokens == pytest.approx(learned[a], abs=0.04) for a in (1, 2))
    assert all((told[a].experts or 0) > 0.75 for a in (1, 2))


@pytest.mark.parametrize("copied", [True, False])
def test_it_starts_as_the_gate_of_the_later_layer(copied: bool) -> None:
    model = Correlated(8, n_layers=3)
    bias = 3 * torch.randn(8)
    model.gates[2] = Gate(model.gates[2].weight_ED, bias)
    predictor = new(model, copied)
    x = torch.randn(50, D)
    if copied:
        logits = x @ model.gates[2].weight_ED.t() + bias
        for layer, distance in ((1, 1), (0, 2)):
            ids = predictor.predict(layer, x, distance, 2)
            assert torch.equal(ids, logits.topk(2).indices)
    else:
        assert not any(weight.any() for weight in predictor.weights.values())


def test_a_step_lowers_the_loss_and_is_that_of_a_gradient() -> None:
    """The naive gradient of the cross-entropy with inputs that are centred and scaled by channel;
    only the length of the step is not compared."""
    model = Correlated(8, n_layers=3)
    inputs, ids = model.tokens(100)
    predictor = new(model, copied=False)
    before = predictor.weights[1][0].normal_().clone()
    predictor.learn(0, inputs, ids)
    x = inputs[0]
    scaled = (x - x.mean(0)) / (x.var(0, correction=0) * D)
    target = torch.zeros(100, 8).scatter_(1, ids[1], 0.5)
    direction = (target - (x @ before.t()).softmax(-1)).t() @ scaled
    step = predictor.weights[1][0] - before
    ratio = step / direction
    torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio), rtol=1e-3, atol=1e-4)
    assert ratio.mean() > 0

    def loss(weight: Tensor, bias: Tensor | float) -> Tensor:
        return -((x @ weight.t() + bias).log_softmax(-1) * target).sum(-1).mean()

    assert loss(predictor.weights[1][0], predictor.biases[1][0]) < loss(before, 0.0)


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_it_does_not_become_worse_than_the_copies_while_it_knows_little(scale: float) -> None:
    """Whatever the scale of a gate's logits: the order of experts does not depend on it."""
    model = Correlated(16)
    predictor = new(model)
    for weight in predictor.weights.values():
        weight.mul_(scale)
    held_out = model.tokens(1000)
    copied = shares(predictor, *held_out)
    for _ in range(6):
        predictor.learn(0, *model.tokens(LEARN_TOKENS))
        learned = shares(predictor, *held_out)
        assert all(learned[a] > copied[a] - 0.01 for a in (1, 2))
    assert all(learned[a] > copied[a] + 0.1 for a in (1, 2))


def test_a_map_that_has_learned_is_not_scaled_with_a_new_one() -> None:
    model = Correlated(8)
    predictor = new(model)
    inputs, ids = model.tokens(50)
    predictor.learn(0, inputs[:2], ids[:2])  # as a forward that fails
    assert (1, 0) not in predictor._copied
    assert (1, 1) in predictor._copied
    before = predictor.weights[1].clone()
    predictor.learn(0, inputs, ids)
    norms = [
        float((now / old).median()) for now, old in zip(predictor.weights[1], before, strict=True)
    ]
    assert norms[0] == pytest.approx(1, abs=0.2)
    assert norms[1] > 1.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_at_once_or_one_by_one(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Correlated(8, n_layers=5)
    batches = [model.tokens(20) for _ in range(4)]
    found = []
    for nbytes in (1 << 30, 2 * 20 * D * 4, 1):  # all, two, one
        monkeypatch.setattr(module, "_ONCE", nbytes)
        predictor = new(model)
        for inputs, ids in batches:
            predictor.learn(0, [x.to(dtype) for x in inputs], ids)
        found.append(predictor)
    for other in found[1:]:
        for name, tensor in other.tensors().items():
            torch.testing.assert_close(tensor, found[0].tensors()[name], rtol=1e-4, atol=1e-5)
        for a, accuracy in other.accuracies().items():
            assert accuracy == pytest.approx(found[0].accuracies()[a])


def test_the_same_tokens_teach_the_same() -> None:
    model = Correlated(8)
    batches = [model.tokens(40) for _ in range(3)]
    predictors = [new(model), new(model)]
    for predictor in predictors:
        for batch in batches:
            predictor.learn(0, *batch)
    first, second = (each.tensors() for each in predictors)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_accuracies_are_those_of_the_paper() -> None:
    """Before it learns from a batch, the naive shares of it."""
    model = Correlated(8, n_layers=3)
    inputs, ids = model.tokens(100)
    predictor = new(model)
    tokens = shares(predictor, inputs, ids)
    experts = []
    for layer in range(2):
        predicted = predictor.predict(layer, inputs[layer], 1, 2)
        expected, real = (
            torch.bincount(each.flatten(), minlength=8).tolist()
            for each in (predicted, ids[layer + 1])
        )
        experts.append(expert_accuracy(expected, real, *rarest(8)))
    predictor.learn(0, inputs, ids)
    told = predictor.accuracies()
    assert told[1].tokens == pytest.approx(tokens[1])
    assert told[2].tokens == pytest.approx(tokens[2])
    assert told[1].experts == pytest.approx(sum(experts) / 2)


def test_dropped_assignments_and_activations_that_are_not_finite() -> None:
    model = Correlated(8, n_layers=3)
    inputs, ids = model.tokens(30)
    for each in ids:
        each[:5, 1] = 8
        each[5:8] = 8
    inputs[0][3] = float("nan")
    inputs[1][4] = float("inf")
    predictor = new(model)
    predictor.learn(0, inputs, ids)
    assert all(torch.isfinite(tensor).all() for tensor in predictor.tensors().values())
    held_out = model.tokens(500)
    before = shares(predictor, *held_out)
    for _ in range(50):
        predictor.learn(0, *model.tokens(LEARN_TOKENS))
    assert shares(predictor, *held_out)[1] > before[1] + 0.05


def test_it_goes_on_from_what_was_saved() -> None:
    model = Correlated(8)
    learned = new(model)
    for _ in range(5):
        learned.learn(0, *model.tokens(100))
    saved = {name: tensor.clone() for name, tensor in learned.tensors().items()}
    loaded = new(model, copied=False)
    loaded.load(saved, learned.learned_tokens)
    batch = model.tokens(50)
    for each in (learned, loaded):
        each.learn(0, *batch)
    own = loaded.tensors()
    for name, tensor in learned.tensors().items():
        torch.testing.assert_close(own[name], tensor, rtol=1e-3, atol=1e-5)
    for wrong in (torch.zeros(2, 2), torch.full_like(saved["mean"], float("nan"))):
        with pytest.raises(ValueError, match="mean"):
            loaded.load({**saved, "mean": wrong}, 1)


# -- what it is fed with ------------------------------------------------------------------


class Always(LearningPace):
    def allows(self, now: float) -> bool:
        return True


class Noted(Predictor):
    """Notes the tokens that it learns from."""

    def __init__(self, n_layers: int) -> None:
        super().__init__([None] * n_layers, 4, 2, CPU)
        self.batches: list[tuple[int, list[float]]] = []

    def learn(self, first: int, x_LND: Sequence[Tensor], ids_LNK: Sequence[Tensor]) -> None:
        self.batches.append((first, [float(x[0, 0]) for x in x_LND]))
        for x, ids in zip(x_LND, ids_LNK, strict=True):
            assert torch.equal(x[:, 0].long() % 4, ids[:, 0]), "rows of one token in both"
        super().learn(first, x_LND, ids_LNK)


def passes(observer: Observer, *layers: int, token: float, number: int = 3, visit: int = 0) -> None:
    for layer in layers:
        x = torch.full((number, 2), token)
        observer.observe(layer, x, x[:, :1].long() % 4, visit)
        x.zero_()  # freed, or overwritten


def test_it_learns_from_consecutive_layers_of_the_same_tokens() -> None:
    predictor = Noted(4)
    observer = Observer(predictor, pace=Always())
    passes(observer, 0, 1, 2, 3, token=1)
    assert predictor.batches == [(0, [1, 1, 1, 1])]
    predictor.batches.clear()
    passes(observer, 0, 1, token=2)  # a forward that fails
    passes(observer, 0, 1, 2, 3, token=3)
    assert predictor.batches == [(0, [2, 2]), (0, [3, 3, 3, 3])]
    predictor.batches.clear()
    passes(observer, 0, 1, token=4)
    passes(observer, 2, 3, token=5, number=7)  # as the decoder after an encoder
    assert predictor.batches == [(0, [4, 4]), (2, [5, 5])]


def test_micro_batches_in_stages_are_not_mixed() -> None:
    predictor = Noted(4)
    observer = Observer(predictor, pace=Always())
    passes(observer, 0, 1, token=1, visit=1)
    passes(observer, 0, 1, token=2, visit=2)
    passes(observer, 2, 3, token=1, visit=3)
    passes(observer, 2, 3, token=2, visit=4)
    assert predictor.batches == [(0, [1, 1]), (0, [2, 2]), (2, [1, 1]), (2, [2, 2])]


def test_a_decoder_is_not_predicted_by_its_encoder() -> None:
    predictor = Noted(4)
    observer = Observer(predictor, starts=[2], pace=Always())
    passes(observer, 0, 1, 2, 3, token=1)
    assert [(first, len(found)) for first, found in predictor.batches] == [(0, 2), (2, 2)]


def test_few_tokens_of_a_batch_are_learned_from() -> None:
    predictor = Noted(2)
    observer = Observer(predictor, pace=Always())
    passes(observer, 0, 1, token=1, number=5 * LEARN_TOKENS)
    assert predictor.learned_tokens == LEARN_TOKENS
    passes(observer, 0, 1, token=1, number=LEARN_TOKENS + 1)
    assert predictor.learned_tokens <= 2 * LEARN_TOKENS
    observer.observe_step(0, [torch.ones(2, 2)] * 2, torch.ones(2, 2, 1).long())
    assert predictor.learned_tokens <= 2 * LEARN_TOKENS + 2


def test_learning_stays_within_its_share_of_the_time() -> None:
    """With the time that it really takes here, while passes follow each other. Only the last
    learning may take longer than those before it, if another process has the core."""
    model = Correlated(16)
    taken: list[float] = []

    class NotedPace(LearningPace):
        def spent(self, seconds: float) -> None:
            taken.append(seconds)
            super().spent(seconds)

    observer = Observer(new(model), pace=NotedPace(0.05))
    now = [0.0]
    observer._clock = lambda: now[0]
    inputs, ids = model.tokens(LEARN_TOKENS)
    for _ in range(400):
        for layer in range(model.n_layers):
            observer.observe(layer, inputs[layer], ids[layer])
        now[0] += 0.02
    stats = observer.stats()
    assert stats["learning_seconds"] > 0
    assert sum(taken[:-1]) <= 0.05 * now[0]
    assert 2 * LEARN_TOKENS < stats["learned_tokens"] < 400 * LEARN_TOKENS
