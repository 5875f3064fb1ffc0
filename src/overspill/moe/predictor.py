"""Which experts a layer will need, told layers ahead by a copy of its gate that learns online.

The predictor of a layer reads what the gate `ahead` layers below reads. It starts as a copy of its
own layer's gate, sees the real routing a moment later and learns from it. It never touches the
model: a wrong prediction costs time, nothing else. Nothing here waits for the device.

Shapes: T tokens, D model, E experts, K top-k, N tokens learned from.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from overspill.core.errors import ConfigError

PREDICTOR_COPIES = 6
"""Tensors of the size of its gate that a predictor keeps, in float32."""
LEARN_TOKENS = 1024
"""Tokens a step learns from, at most; they are taken at equal distances."""
# Logits are computed in float32 for this many tokens at a time: the copy stays small.
_TOKENS_AT_ONCE = 4096
# Fewer tokens than this make a step that is mostly noise: they are gathered, as in decoding.
_STEP_TOKENS = 256
# The accuracy of the copied and the learned weights is that over about so many tokens.
_JUDGE_TOKENS = 8 * LEARN_TOKENS
# Both accuracies grow from 0 at the same pace: this much is harder to reach while few tokens have
# been judged.
_BETTER_BY = 0.005
# Adam moves every weight by about its learning rate, and a logit by the sum over D of them; divided
# by D, a step is the same for narrow models and wide ones. It shrinks with the root of the steps:
# quick at first, then steady, because what moves from step to step makes counts noisy.
_LEARNING_RATE, _EARLY_STEPS = 2.0, 10
# The spread of the logits at the start: what a step changes is in proportion whatever the gate's
# own scale. The order of the experts does not depend on it.
_LOGIT_SPREAD = 0.5
_BETA1, _BETA2, _EPS = 0.9, 0.99, 1e-12


class Predictor:
    """The gate of one layer, applied too early.

    What was learned is the difference to the gate, which may itself be in training. It is used
    where it has lately been better than the bare gate, on tokens it had not learned from yet: so
    learning can only help, however good the gate is. Counts are corrected by what they were off.
    """

    def __init__(
        self, gate: Tensor | None, n_experts: int, d_model: int, device: torch.device
    ) -> None:
        """`gate` is [E, D], the weight that the model uses: it is read again whenever there is
        something to learn. Without one, all is to be learned."""
        both = torch.zeros(2, n_experts, d_model, device=device)
        self._gate, self._scale = None, 1.0
        if gate is not None:
            self._gate, self._scale = gate.detach(), _rescale(gate.detach().float())
            both.copy_(self._gate).mul_(self._scale)
        self._both_2ED = both
        self.copied_ED, self.learned_ED = both.unbind()
        self.weight_ED = self.copied_ED.clone()  # what predicts
        # of the copied and the learned: token accuracy, and real minus predicted counts of a token
        self._score_2 = torch.zeros(2, device=device)
        self._off_2E = torch.zeros(2, n_experts, device=device)
        self._off_E = torch.zeros(n_experts, device=device)
        self._grad_ED = torch.zeros_like(self.learned_ED)  # of tokens that wait for a step
        self._waiting = 0
        self._mean_ED = torch.zeros_like(self.learned_ED)
        self._square_ED = torch.zeros_like(self.learned_ED)
        self._steps = 0

    @torch.no_grad()
    def predict_ids(self, x_TD: Tensor, top_k: int) -> Tensor:
        """The experts each token will likely go to, [T, K], the likeliest first."""
        parts = x_TD.split(_TOKENS_AT_ONCE)
        logits = (F.linear(part.float(), self.weight_ED) for part in parts)
        return torch.cat([part.topk(top_k).indices for part in logits])

    @torch.no_grad()
    def predict(self, x_TD: Tensor, top_k: int) -> Tensor:
        """How many tokens each expert will likely get, [E] int64."""
        ids_R = self.predict_ids(x_TD, top_k).flatten()
        counts_E = torch.zeros_like(self._off_E)
        # adds of 1.0 are exact in any order
        counts_E.scatter_add_(0, ids_R, counts_E.new_ones(ids_R.shape))
        return counts_E.add_(self._off_E, alpha=x_TD.shape[0]).round_().clamp_(min=0).long()

    @torch.no_grad()
    def learn(self, x_TD: Tensor, expert_ids_TK: Tensor) -> None:
        """One step of Adam on the cross-entropy against the real experts, 1/K each; few tokens wait
        for more.

        An id of `n_experts` stands for no expert, as in layers that drop assignments.
        """
        if x_TD.shape[0] == 0:
            return
        x_ND, ids_NK = subsample(x_TD).float(), subsample(expert_ids_TK)
        self._follow_gate()
        logits_N2E = F.linear(x_ND, self._both_2ED.flatten(0, 1)).unflatten(1, (2, -1))
        self._judge(logits_N2E, ids_NK)
        error_NE = _cross_entropy_grad(logits_N2E[:, 1], ids_NK)
        # an activation that is not finite must not stay: nothing is learned from its batch
        self._grad_ED.add_((error_NE.t() @ x_ND).nan_to_num_(0, 0, 0))
        self._waiting += x_ND.shape[0]
        if self._waiting >= _STEP_TOKENS:
            self._adam(self._grad_ED.div_(self._waiting))
            self._grad_ED.zero_()
            self._waiting = 0
        better = self._score_2[1] > self._score_2[0] + _BETTER_BY
        torch.where(better, self.learned_ED, self.copied_ED, out=self.weight_ED)
        torch.where(better, self._off_2E[1], self._off_2E[0], out=self._off_E)

    def _follow_gate(self) -> None:
        if self._gate is not None:
            now_ED = self._gate.float() * self._scale
            self.learned_ED.add_(now_ED - self.copied_ED)
            self.copied_ED.copy_(now_ED)

    def _judge(self, logits_N2E: Tensor, ids_NK: Tensor) -> None:
        n_tokens, top_k = ids_NK.shape
        predicted_N2K = logits_N2E.topk(top_k).indices
        found = (predicted_N2K.unsqueeze(-1) == ids_NK[:, None, None]).any(-1)
        off_2E = logits_N2E.new_zeros(2, logits_N2E.shape[-1] + 1)
        ones_2R = off_2E.new_ones(2, n_tokens * top_k)
        off_2E.scatter_add_(1, ids_NK.flatten().expand(2, -1), ones_2R)
        off_2E.scatter_add_(1, predicted_N2K.transpose(0, 1).flatten(1), ones_2R.neg_())
        pace = n_tokens / _JUDGE_TOKENS
        self._score_2.lerp_(found.float().mean((0, 2)), pace)
        self._off_2E.lerp_(off_2E[:, :-1] / n_tokens, pace)

    def _adam(self, grad_ED: Tensor) -> None:
        size = _LEARNING_RATE / math.sqrt(1 + self._steps / _EARLY_STEPS) / grad_ED.shape[1]
        self._steps += 1
        self._mean_ED.lerp_(grad_ED, 1 - _BETA1)
        self._square_ED.lerp_(grad_ED.square(), 1 - _BETA2)
        rate = size / (1 - _BETA1**self._steps)
        spread = self._square_ED.sqrt().div_(math.sqrt(1 - _BETA2**self._steps)).add_(_EPS)
        self.learned_ED.addcdiv_(self._mean_ED, spread, value=-rate)


def _cross_entropy_grad(logits_NE: Tensor, ids_NK: Tensor) -> Tensor:
    n_tokens, n_experts = logits_NE.shape
    target = logits_NE.new_zeros(n_tokens, n_experts + 1)
    target.scatter_add_(1, ids_NK, target.new_full(ids_NK.shape, 1 / ids_NK.shape[1]))
    target = target[:, :-1]  # without those that have no expert
    return logits_NE.softmax(-1) * target.sum(-1, keepdim=True) - target


def _rescale(gate: Tensor) -> float:
    """The power of two that gives logits of normed activations about `_LOGIT_SPREAD`; being one, it
    changes no bit of the order."""
    spread = float(gate.std()) * math.sqrt(gate.shape[-1])
    if not (math.isfinite(spread) and spread > 0):
        return 1.0
    return float(2.0 ** round(math.log2(_LOGIT_SPREAD / spread)))


class _Kept(NamedTuple):
    """What a gate read: some of the tokens, and how many they were."""

    n_tokens: int
    x_ND: Tensor


class Lookahead:
    """The predictors of all layers of a model, fed by its forwards."""

    def __init__(
        self,
        gates: Sequence[Tensor | None],
        n_experts: int,
        d_model: int,
        device: torch.device,
        ahead: int = 1,
        every: int = 1,
    ) -> None:
        """`gates` are the weights [E, D] of the gates, lowest layer first, or None where there is
        nothing to copy. `ahead`: by how many layers. `every`: learn from each n-th forward only."""
        if ahead < 1 or every < 1:
            raise ConfigError(f"ahead={ahead} and every={every} must be at least 1")
        self.ahead = ahead
        self.every = every
        # nothing comes early enough for the lowest layers
        self.predictors = {
            layer: Predictor(gate, n_experts, d_model, device)
            for layer, gate in enumerate(gates)
            if layer >= ahead
        }
        self._calls = [0] * len(gates)
        self._kept: dict[int, _Kept] = {}
        self._last = -1

    @torch.no_grad()
    def observe(self, layer: int, x_TD: Tensor, expert_ids_TK: Tensor) -> Tensor | None:
        """A forward has routed the tokens of a layer: its predictor learns, and the counts [E]
        that the layer `ahead` of it will likely have are returned, if there is one."""
        if layer != self._last + 1:
            self._kept.clear()  # another forward: what the last one kept belongs to other tokens
        self._last = layer
        self._learn(layer, expert_ids_TK)
        target = self.predictors.get(layer + self.ahead)
        if target is None:
            return None
        self._keep(layer, x_TD)
        return target.predict(x_TD, expert_ids_TK.shape[1])

    def _learn(self, layer: int, expert_ids_TK: Tensor) -> None:
        kept = self._kept.pop(layer - self.ahead, None)
        if kept is not None and kept.n_tokens == expert_ids_TK.shape[0]:
            self.predictors[layer].learn(kept.x_ND, subsample(expert_ids_TK))

    def _keep(self, layer: int, x_TD: Tensor) -> None:
        if self._calls[layer] % self.every == 0:
            # a copy: the activations may be changed in place or freed before they are learned from
            self._kept[layer] = _Kept(x_TD.shape[0], subsample(x_TD).clone())
        self._calls[layer] += 1


def subsample(rows: Tensor) -> Tensor:
    """At most `LEARN_TOKENS` rows at equal distances; a view."""
    return rows[:: max(1, math.ceil(rows.shape[0] / LEARN_TOKENS))]


# -- how good it is -----------------------------------------------------------------------


def token_accuracy(predicted_TK: Tensor, real_TK: Tensor) -> float:
    """The share of a token's real experts that were predicted for it, mean over tokens."""
    found_TK = (real_TK.unsqueeze(-1) == predicted_TK.unsqueeze(-2)).any(-1)
    return float(found_TK.double().mean())


def expert_accuracy(predicted_E: Tensor, real_E: Tensor, n: int, m: int) -> float:
    """Of the n experts with the lowest predicted counts, the share among the m with the lowest real
    ones. APTMoE's measure of a predictor: rare experts are to be known.

    Equal counts at the border are in no order. The result is the mean over all orders, on each side
    by itself: a prediction that cannot tell experts apart has m/E, not luck.
    """
    return float((_among_least(predicted_E, n) * _among_least(real_E, m)).sum() / n)


def history_accuracy(counts_SE: Tensor, n: int, m: int) -> float:
    """The expert accuracy of each step's counts as a prediction of the next, mean over steps."""
    pairs = list(itertools.pairwise(counts_SE))
    return sum(expert_accuracy(last, now, n, m) for last, now in pairs) / len(pairs)


def _among_least(counts_E: Tensor, n: int) -> Tensor:
    """The probability of each expert to be among the n with the lowest counts, [E]."""
    border = counts_E.sort().values[n - 1]
    below, tied = (counts_E < border).double(), (counts_E == border).double()
    return below + tied * (n - below.sum()) / tied.sum()
