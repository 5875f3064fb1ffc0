"""The popularity predictor: predicts the experts that later layers will choose for the tokens of
this one.

A linear map for each MoE layer and distance, with the structure of a gate. It reads what the gate
of its layer reads, starts as a copy of the gate of a later layer, and learns from the routing of
that layer when this is known. It changes nothing of the model: a wrong prediction costs time.

Learning is one step on the cross-entropy of the chosen experts, for all layers at once. Inputs are
centred and scaled by channel, so that few tokens suffice, and the step is bounded by the curvature
along it: no state is kept beside the weights but the mean and variance of each channel.

Shapes: L layers, N tokens, D model, E experts, K top-k, A distances.
"""

import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from overspill.plan.popularity import LearningPace, rarest

LEARN_TOKENS = 128
"""Tokens that are learned from at once, at most; they are taken at equal distances."""
PREDICT_TOKENS = 2048
"""Tokens whose experts are predicted for the rows of a later layer, at most; those of the others
follow in proportion."""
_ONCE = 16 << 20
"""Bytes of inputs in float32 at a time, beside those of one layer."""
_FADING = 4096
"""Tokens after which steps have become shorter, and over which channels are averaged."""
_SHORTEST = 0.1
_OF_CURVATURE = 0.5
"""The largest step, as a share of the step to the minimum along its direction."""
_JUDGED = 8192
"""Accuracies are those over about so many tokens."""
_SCALES = range(-6, 10)
"""Exponents of the powers of two that a copied gate may be multiplied by."""
_SMALL = 1e-12
_LARGE = 1e4
"""The largest absolute value of an activation; larger ones are cut off."""


class Gate(NamedTuple):
    """The parameters from which a layer's gate computes its logits."""

    weight_ED: Tensor
    bias_E: Tensor | None = None


class Accuracy(NamedTuple):
    """Accuracy of recent predictions for layers some layers ahead, on tokens that had not been
    learned from yet."""

    tokens: float
    """Share of the experts of a token that were predicted for it."""
    experts: float | None
    """Share of the quarter of experts with the fewest predicted rows that is in the three eighths
    with the fewest real ones; None: all batches were too small."""


class Predictor:
    """The maps of all MoE layers of a model."""

    def __init__(
        self,
        gates: Sequence[Gate | None],
        n_experts: int,
        d_model: int,
        device: torch.device,
        distances: Sequence[int] = (1, 2),
    ) -> None:
        """`gates` has the gates of the layers, lowest first, or None where all is to be learned."""
        self.n_layers, self.n_experts = len(gates), n_experts
        self.distances = [distance for distance in distances if distance < len(gates)]
        self.device = device
        with torch.inference_mode(False), torch.no_grad():  # they outlive it
            zeros = torch.zeros(len(gates), n_experts, d_model, device=device)
            # by distance; of the layers that have a layer so far ahead
            self.weights = {a: zeros[a:].clone() for a in self.distances}
            self.biases = {a: zeros[a:, :, 0].clone() for a in self.distances}
            del zeros
            for a in self.distances:
                for source, gate in enumerate(gates[a:]):
                    if gate is not None:
                        self.weights[a][source].copy_(gate.weight_ED.detach())
                    if gate is not None and gate.bias_E is not None:
                        self.biases[a][source].copy_(gate.bias_E.detach())
            self._mean_LD = torch.zeros(len(gates), d_model, device=device)
            self._variance_LD = torch.zeros(len(gates), d_model, device=device)
            # by distance: experts of tokens that were found, all of them, and both of rare experts
            self._scores_A4 = torch.zeros(len(self.distances), 4, device=device)
            on_gpu = device.type == "cuda"
            self._known_A4 = torch.zeros(len(self.distances), 4, pin_memory=on_gpu)
        self.learned_tokens = 0
        """Tokens of a layer, with those of earlier runs that were loaded."""
        self._n_seen = [0] * len(gates)  # tokens of each layer, for the mean and the variance
        self._copied = {  # maps that have learned nothing yet
            (a, source)
            for a in self.distances
            for source, gate in enumerate(gates[a:])
            if gate is not None
        }

    @torch.no_grad()
    def predict(self, layer: int, x_ND: Tensor, distance: int, top_k: int) -> Tensor:
        """The experts that tokens will likely have so many layers later, [N, K]."""
        weight_ED, bias_E = self.weights[distance][layer], self.biases[distance][layer]
        return torch.addmm(bias_E, x_ND.float(), weight_ED.t()).topk(top_k).indices

    @torch.no_grad()
    def learn(self, first: int, x_LND: Sequence[Tensor], ids_LNK: Sequence[Tensor]) -> None:
        """Judge the predictions for these tokens, then learns from them. The inputs and the experts
        of the same tokens in consecutive layers from `first` on; an id of `n_experts` stands for no
        expert. Nothing waits for the device."""
        n_tokens, d_model = x_LND[0].shape
        # several layers at once, as far as copies of their inputs take little memory
        size = max(1, _ONCE // (4 * n_tokens * d_model))
        last = first + len(x_LND)
        kept = max(0.0, 1 - n_tokens / _JUDGED)
        self._scores_A4.mul_(kept)
        for start in range(first, last, size):
            stop = min(start + size, last)
            x_LND_here = torch.stack([x.float() for x in x_LND[start - first : stop - first]])
            # what is not finite must not stay
            lost_LN1 = ~torch.isfinite(x_LND_here).all(-1, keepdim=True)
            x_LND_here.masked_fill_(lost_LN1, 0).clamp_(-_LARGE, _LARGE)
            self._follow_channels(start, x_LND_here)
            for number, a in enumerate(self.distances):
                there = min(stop, last - a)
                if there > start:
                    ids = torch.stack(list(ids_LNK[start - first + a : there - first + a]))
                    self._learn(number, start, x_LND_here[: there - start], ids.long())
        self.learned_tokens += n_tokens
        self._known_A4.copy_(self._scores_A4, non_blocking=True)

    def _follow_channels(self, first: int, x_LND: Tensor) -> None:
        """The running mean and variance of the channels of some layers."""
        n_layers, n_tokens, _ = x_LND.shape
        layers = slice(first, first + n_layers)
        for layer in range(first, first + n_layers):
            self._n_seen[layer] += n_tokens
        pace = n_tokens / min(_FADING + n_tokens, self._n_seen[first])
        self._mean_LD[layers].lerp_(x_LND.mean(1), pace)
        spread_LND = (x_LND - self._mean_LD[layers, None]).square_()
        self._variance_LD[layers].lerp_(spread_LND.mean(1), pace)

    def _learn(self, number: int, first: int, x_LND: Tensor, ids_LNK: Tensor) -> None:
        n_layers, _, d_model = x_LND.shape
        a, layers = self.distances[number], slice(first, first + n_layers)
        weight_LED, bias_LE = self.weights[a][layers], self.biases[a][layers]
        logits_LNE = torch.baddbmm(bias_LE[:, None], x_LND, weight_LED.transpose(1, 2))
        chosen_LNE = _chosen(ids_LNK, self.n_experts)
        self._judge(number, logits_LNE, chosen_LNE, ids_LNK.shape[2])
        fresh = [(a, layer) in self._copied for layer in range(first, first + n_layers)]
        if any(fresh):
            self._copied -= {(a, layer) for layer in range(first, first + n_layers)}
            scale_L = _best_scale(logits_LNE, chosen_LNE)
            scale_L[~torch.tensor(fresh)] = 1
            weight_LED.mul_(scale_L[:, None, None])
            bias_LE.mul_(scale_L[:, None])
            logits_LNE.mul_(scale_L[:, None, None])
        # as many as have an expert: a token of a layer that drops assignments may have none
        per_token_LN1 = chosen_LNE.sum(-1, keepdim=True)
        share_LNE = logits_LNE.softmax(-1) * (per_token_LN1 > 0)
        error_LNE = chosen_LNE / per_token_LN1.clamp(min=1) - share_LNE
        mean_LD, variance_LD = self._mean_LD[layers], self._variance_LD[layers]
        centred_LND = x_LND - mean_LD[:, None]
        scaled_LND = centred_LND / (variance_LD[:, None] * d_model + _SMALL)
        # how this direction changes the logits of these tokens, and the step to the minimum there
        change_LNE = (centred_LND @ scaled_LND.transpose(1, 2)) @ error_LNE
        descent_L = (error_LNE * change_LNE).sum((1, 2))
        weighted_LNE = share_LNE * change_LNE
        curvature_L = (weighted_LNE * change_LNE).sum((1, 2))
        curvature_L -= weighted_LNE.sum(2).square_().sum(1)
        longest_L = _OF_CURVATURE * descent_L / curvature_L.clamp(min=_SMALL)
        step = max(_SHORTEST, 1 / math.sqrt(1 + self.learned_tokens / _FADING))
        step_L = longest_L.clamp(max=step)
        part_LEN = (step_L[:, None, None] * error_LNE).transpose(1, 2)
        change_LED = part_LEN @ scaled_LND
        weight_LED.add_(change_LED)
        # the map is of inputs as they are, not of centred ones
        bias_LE.add_(part_LEN.sum(2), alpha=1 / d_model)
        bias_LE.sub_((change_LED @ mean_LD[:, :, None]).squeeze(2))

    def _judge(self, number: int, logits_LNE: Tensor, chosen_LNE: Tensor, top_k: int) -> None:
        predicted_LNE = _chosen(logits_LNE.topk(top_k).indices, self.n_experts)
        scores_4 = self._scores_A4[number]
        scores_4[0] += (predicted_LNE * chosen_LNE).sum()
        scores_4[1] += chosen_LNE.sum()
        n_layers, n_tokens, _ = logits_LNE.shape
        if n_tokens * top_k < 2 * self.n_experts:  # hardly any expert has a row
            return
        n, m = rarest(self.n_experts)
        among_n_LE = _among_fewest(predicted_LNE.sum(1), n)
        scores_4[2] += (among_n_LE * _among_fewest(chosen_LNE.sum(1), m)).sum()
        scores_4[3] += n * n_layers

    def accuracies(self) -> dict[int, Accuracy]:
        """The accuracy by distance; empty if nothing was learned from. Does not wait for the
        device: the last batches may not be in it."""
        found = {}
        for a, (hits, uses, rare, all_rare) in zip(
            self.distances, self._known_A4.tolist(), strict=True
        ):
            if uses > 0:
                found[a] = Accuracy(hits / uses, rare / all_rare if all_rare > 0 else None)
        return found

    # -- to save it ---------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """All that was learned, by name."""
        found = {"mean": self._mean_LD, "variance": self._variance_LD}
        for a in self.distances:
            found |= {f"weight.{a}": self.weights[a], f"bias.{a}": self.biases[a]}
        return found

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], learned_tokens: int) -> None:
        """Goes on from what another run has learned. Raises ValueError, before anything changes,
        if that is of other shapes; distances that it does not have stay as they are."""
        own = self.tensors()
        for name, tensor in tensors.items():
            if name in own and tensor.shape != own[name].shape:
                raise ValueError(f"{name} has shape {list(tensor.shape)}")
            if not torch.isfinite(tensor).all():
                raise ValueError(f"{name} is not finite")
        for name in own.keys() & tensors.keys():
            own[name].copy_(tensors[name])
        self._copied = {(a, layer) for a, layer in self._copied if f"weight.{a}" not in tensors}
        self.learned_tokens = learned_tokens
        self._n_seen = [learned_tokens] * self.n_layers


def _chosen(ids_LNK: Tensor, n_experts: int) -> Tensor:
    """1 for each expert of a token, [L, N, E]."""
    chosen = torch.zeros(*ids_LNK.shape[:2], n_experts + 1, device=ids_LNK.device)
    return chosen.scatter_(2, ids_LNK, 1.0)[..., :-1]


def _best_scale(logits_LNE: Tensor, chosen_LNE: Tensor) -> Tensor:
    """The power of two for each layer with which these logits predict the chosen experts best. A
    gate whose logits are small is right about the order of experts, and would learn to be certain
    at the expense of it."""
    target_LNE = chosen_LNE / chosen_LNE.sum(-1, keepdim=True).clamp(min=1)
    losses = [
        -((2.0**exponent * logits_LNE).log_softmax(-1) * target_LNE).sum((1, 2))
        for exponent in _SCALES
    ]
    return torch.pow(2.0, torch.stack(losses).argmin(0) + _SCALES.start)


def _among_fewest(rows_LE: Tensor, n: int) -> Tensor:
    """The probability of each expert to be among the n with the fewest rows, as
    `plan.popularity.expert_accuracy` has it."""
    border_L1 = rows_LE.sort(1).values[:, n - 1 : n]
    below_LE, tied_LE = (rows_LE < border_L1).float(), (rows_LE == border_L1).float()
    left_L1 = n - below_LE.sum(1, keepdim=True)
    return below_LE + tied_LE * left_L1 / tied_LE.sum(1, keepdim=True)


class _Stopwatch:
    """Time that the device, or the host if that is longer, was busy with a task."""

    def __init__(self, device: torch.device) -> None:
        self._began = time.perf_counter()
        self._host = 0.0
        self._events: list[torch.cuda.Event] = []
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self._events[0].record()

    def stop(self) -> None:
        self._host = time.perf_counter() - self._began
        if self._events:
            self._events[1].record()

    def seconds(self) -> float | None:
        """The time; None until the device has reached the end."""
        if not self._events:
            return self._host
        if not self._events[1].query():
            return None
        milliseconds: float = self._events[0].elapsed_time(self._events[1])
        return max(self._host, 1e-3 * milliseconds)


class Observer:
    """Feeds a predictor with the passes that a model makes anyway, at its pace. Used under the
    engine's lock."""

    def __init__(
        self,
        predictor: Predictor,
        starts: Collection[int] = (),
        pace: LearningPace | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`starts` are layers whose tokens are others than those of the layer before: of the
        decoder after an encoder."""
        self.predictor = predictor
        self.pace = pace or LearningPace()
        self._starts = frozenset(starts)
        self._clock = clock
        self._learns = False  # from the current pass of the model
        self._collected: list[tuple[Tensor, Tensor]] = []  # of consecutive layers
        # the layer that follows if it is of the same tokens, their number, and the pass
        self._next: tuple[int, int, object] = -1, -1, None
        self._copying = 0.0  # seconds
        self._running: list[tuple[_Stopwatch, float]] = []  # with the seconds before it

    @torch.no_grad()
    def observe(self, layer: int, x_TD: Tensor, ids_TK: Tensor, visit: object = None) -> None:
        """A forward pass has routed the tokens of a layer. `visit` says which part of the model
        and of a batch it computes, if not all."""
        key = layer, len(x_TD), (threading.get_ident(), visit)
        if key != self._next or layer in self._starts:
            self._flush()
            self._learns = self._may_learn()
        self._next = layer + 1, len(x_TD), key[2]
        if not self._learns or len(x_TD) == 0:
            return
        began = time.perf_counter()
        every = -(-len(x_TD) // LEARN_TOKENS)
        # copies: activations may be changed in place or freed before they are learned from
        self._collected.append((x_TD[::every].clone(), ids_TK[::every].clone()))
        self._copying += time.perf_counter() - began
        if layer + 1 == self.predictor.n_layers:
            self._flush()

    @torch.no_grad()
    def observe_step(self, first: int, x_LBD: Sequence[Tensor], ids_LBK: Tensor) -> None:
        """A decoding step has computed these tokens. They may change when the next one begins."""
        self._flush()
        self._next = -1, -1, None
        if x_LBD and self._may_learn():
            self._collected = list(zip(x_LBD, ids_LBK, strict=True))
            self._learn(first)
            self._collected = []

    def later_layers(self, layer: int) -> Iterator[tuple[int, int]]:
        """The layers whose experts can be predicted in this one, with their distances."""
        for distance in self.predictor.distances:
            later = layer + distance
            between = range(layer + 1, later + 1)
            if later < self.predictor.n_layers and self._starts.isdisjoint(between):
                yield later, distance

    def _may_learn(self) -> bool:
        while self._running:
            watch, before = self._running[0]
            seconds = watch.seconds()
            if seconds is None:
                return False
            self.pace.spent(before + seconds)
            del self._running[0]
        return self.pace.allows(self._clock())

    def _flush(self) -> None:
        if len(self._collected) > 1:
            self._learn(self._next[0] - len(self._collected))
        self._collected = []

    def _learn(self, first: int) -> None:
        watch = _Stopwatch(self.predictor.device)
        x_LND, ids_LNK = zip(*self._collected, strict=True)
        self.predictor.learn(first, x_LND, ids_LNK)
        watch.stop()
        self._running.append((watch, self._copying))
        self._copying = 0.0

    def idle(self) -> None:
        """No pass follows for a while. Any thread may call it, without the engine's lock."""
        self.pace.idle()

    def stats(self) -> dict[str, float]:
        """The accuracies by distance, and what learning takes."""
        found: dict[str, float] = {}
        for a, (tokens, experts) in self.predictor.accuracies().items():
            found[f"token_accuracy_{a}"] = round(tokens, 4)
            if experts is not None:
                found[f"expert_accuracy_{a}"] = round(experts, 4)
        found["learned_tokens"] = self.predictor.learned_tokens
        found["learning_seconds"] = round(self.pace.seconds, 4)
        return found
