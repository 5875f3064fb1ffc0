"""Keys and values in blocks, and attention over them.

Shapes: T tokens of a batch, N sequences, L tokens of a sequence from its first one on, h heads, k
heads of keys and values, d width of a head.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import (
    SDPAParams,
    can_use_efficient_attention,
    can_use_flash_attention,
)
from torch.nn.attention.bias import causal_lower_right

from overspill.models.attention_cache import AttentionOptions, Indexer, Keys, TokenBias

_SCORES = 256 << 20
"""Bytes of attention scores that are in memory at a time."""


@dataclass(frozen=True)
class SourceSpan:
    """Source of a sequence, whose keys and values are in blocks of their own."""

    blocks: Sequence[int]
    count: int
    new: bool
    """Whether the batch computes the source."""


@dataclass(frozen=True)
class Span:
    """Tokens of one sequence that a batch computes."""

    blocks: Sequence[int]
    before: int
    """Number of tokens whose keys and values are in the blocks."""
    count: int
    source: SourceSpan | None = None
    """The source of the sequence in an encoder-decoder."""
    state: int = 0
    """The slot of the sequence's state, in models that have states."""


class Layout:
    """Positions and slots of the tokens of a batch, one sequence after another."""

    def __init__(self, spans: Sequence[Span], block_size: int, device: torch.device) -> None:
        self.spans = spans
        slots = [_slots(s.blocks, s.before + s.count, block_size) for s in spans]
        self.positions = torch.cat(
            [torch.arange(span.before, span.before + span.count) for span in spans]
        ).to(device)
        self.write = torch.cat([each[s.before :] for each, s in zip(slots, spans, strict=True)]).to(
            device
        )
        counts = [span.count for span in spans]
        self.last = (torch.tensor(counts).cumsum(0) - 1).to(device)
        """The row of the last token of each sequence."""
        self.own = _Reads(counts, slots, device)
        sources = [span.source for span in spans if span.source is not None]
        if not sources:
            return
        slots = [_slots(each.blocks, each.count, block_size) for each in sources]
        self.sources = _Reads(counts, slots, device)
        new = [number for number, each in enumerate(sources) if each.new]
        self.new_sources = _parts([sources[number].count for number in new])
        """Rows of the tokens of each source that the batch computes, one source after another."""
        self.write_sources = None
        """Slots of the tokens of these sources."""
        if new:
            self.write_sources = torch.cat([slots[number] for number in new]).to(device)


class _Reads:
    """Slots that the tokens of each sequence read."""

    def __init__(
        self, counts: Sequence[int], slots: Sequence[Tensor], device: torch.device
    ) -> None:
        rows = _parts(counts)
        single = [number for number, count in enumerate(counts) if count == 1]
        self.single = _Single(
            torch.tensor([rows[number].start for number in single], dtype=torch.long),
            [slots[number] for number in single],
            device,
        )
        """Sequences with one new token, which attend together."""
        self.several = [
            (rows[number], slots[number].to(device))
            for number, count in enumerate(counts)
            if count > 1
        ]


def _parts(counts: Sequence[int]) -> list[slice]:
    """Return consecutive parts with these numbers of rows."""
    ends = list(itertools.accumulate(counts))
    return [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]


class _Single:
    """Rows of sequences with one new token, and the slots of their keys, padded to the longest."""

    def __init__(self, rows: Tensor, slots: Sequence[Tensor], device: torch.device) -> None:
        self.rows = rows.to(device)
        lengths = torch.tensor([len(each) for each in slots])
        longest = int(lengths.max()) if len(slots) else 0
        read = torch.zeros(len(slots), longest, dtype=torch.long)
        for row, each in zip(read, slots, strict=True):
            row[: len(each)] = each
            row[len(each) :] = each[0]  # not another's: a NaN there would become a NaN here
        self.read = read.to(device)
        self.positions = (lengths - 1)[:, None].to(device)
        """Positions of the last key of each row."""


def _slots(used: Sequence[int], count: int, block_size: int) -> Tensor:
    """Return the slots of the first `count` tokens in these blocks."""
    positions = torch.arange(count)
    blocks = torch.tensor(list(used), dtype=torch.long)
    return blocks[positions // block_size] * block_size + positions % block_size


@dataclass(frozen=True)
class ChosenKeys:
    """Positions of the keys that an indexer has chosen for each token of a batch; None for
    sequences whose tokens see all tokens before them."""

    single_NK: Tensor | None
    """Positions for sequences with one new token, the best keys first."""
    several_TK: Sequence[Tensor | None]
    """Positions for each of the other sequences. Some may come after their token, which does not
    see them."""


class PagedCache:
    """Keys and values of all layers, and keys of indexers, in `n_blocks` blocks of `block_size`
    slots. The keys of rows that only fill a batch up go to one block more. The memory of a layer is
    allocated when its first keys arrive: layers may differ."""

    def __init__(self, n_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.spare_block = n_blocks
        self._n_slots = (n_blocks + 1) * block_size
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._indexed: dict[int, Tensor] = {}
        self._layout: Layout  # of the batch that is computed

    @property
    def nbytes(self) -> int:
        pairs = itertools.chain.from_iterable(self._layers.values())
        return sum(each.nbytes for each in (*pairs, *self._indexed.values()))

    def begin(self, layout: Layout) -> None:
        """Prepare for a forward pass that computes this batch."""
        self._layout = layout

    @property
    def positions(self) -> Tensor:
        return self._layout.positions

    def attend(
        self, layer: int, q_Thd: Tensor, k_Tkd: Tensor, v_Tkd: Tensor, options: AttentionOptions
    ) -> Tensor:
        layout = self._layout
        if options.keys is Keys.TOGETHER:
            return _attend_together(q_Thd, k_Tkd, v_Tkd, layout.new_sources, options)
        keys, values = self.memory(layer, k_Tkd, v_Tkd)
        across = options.keys is Keys.SOURCE
        written = layout.write_sources if across else layout.write
        if written is not None:
            keys[written] = k_Tkd
            values[written] = v_Tkd
        reads = layout.sources if across else layout.own
        out = q_Thd.new_empty(*q_Thd.shape[:2], v_Tkd.shape[-1])
        single, chosen = (
            reads.single,
            options.chosen or ChosenKeys(None, [None] * len(reads.several)),
        )
        if len(single.rows):
            read, last = single.read, single.positions
            if chosen.single_NK is not None:
                read = read.gather(1, chosen.single_NK)
                last = last.clamp(max=read.shape[1] - 1)  # keys that it does not see are the worst
            q_Nh1d = q_Thd[single.rows].unsqueeze(2)
            k_NkLd, v_NkLd = (each[read].transpose(1, 2) for each in (keys, values))
            own = _of_rows(options, single.rows[:, None])
            y = _attention(q_Nh1d, k_NkLd, v_NkLd, last, own)
            out[single.rows] = y.squeeze(2)
        for (rows, slots), chosen_TK in zip(reads.several, chosen.several_TK, strict=True):
            q_1hTd = q_Thd[rows].transpose(0, 1)[None]
            k_1kLd, v_1kLd = (each[slots].transpose(0, 1)[None] for each in (keys, values))
            if across:
                y = _attend_to_all(q_1hTd, k_1kLd, v_1kLd, options)
            else:
                own = _of_rows(
                    options, torch.arange(rows.start, rows.stop, device=slots.device)[None]
                )
                y = _attend_causally(q_1hTd, k_1kLd, v_1kLd, own, chosen_TK)
            out[rows] = y[0].transpose(0, 1)
        return out

    def choose(self, indexer: Indexer) -> ChosenKeys:
        layout, most = self._layout, indexer.most
        single_NK, single = None, layout.own.single
        if len(single.rows):
            rows_N1, length = single.rows[:, None], single.read.shape[1]
            count = length if length > most else 0  # else each token sees all before it
            sees_N1L = torch.arange(count, device=rows_N1.device) <= single.positions[..., None]
            read = single.read[:, :count]
            found = [
                indexer.choose(
                    rows_N1[part], sees_N1L[part], self._index(indexer, rows_N1[part], read[part])
                )
                for part in score_parts(len(rows_N1), indexer.heads * count)
            ]
            single_NK = torch.cat(found)[:, 0].long() if count else None
        several_TK = []
        for rows, slots in layout.own.several:
            several_TK.append(self._choose_for_several(indexer, rows, slots))
        return ChosenKeys(single_NK, several_TK)

    def _choose_for_several(self, indexer: Indexer, rows: slice, slots: Tensor) -> Tensor | None:
        """Return the chosen positions for tokens of one sequence, in parts whose scores take at
        most `_SCORES` bytes; None if the tokens see all tokens before them."""
        n_keys, most, device = len(slots), indexer.most, slots.device
        before = n_keys - (rows.stop - rows.start)
        found = []
        for part in score_parts(n_keys - before, indexer.heads * n_keys):
            start, stop = before + part.start, before + part.stop
            count = stop if stop > most else 0
            positions = torch.arange(start, stop, device=device)
            rows_1T = (rows.start - before + positions)[None]
            sees_1TL = (torch.arange(count, device=device) <= positions[:, None])[None]
            read = slots[None, :count]
            chosen = indexer.choose(rows_1T, sees_1TL, self._index(indexer, rows_1T, read))[0]
            every = torch.arange(most, device=device).expand(stop - start, most)
            found.append(chosen.long() if count else every)
        return torch.cat(found) if n_keys > most else None

    def _index(
        self, indexer: Indexer, rows_NT: Tensor, read_NL: Tensor
    ) -> Callable[[Tensor], Tensor]:
        """Return a function that stores an indexer's keys of these tokens, and returns the keys in
        the slots to read."""

        def store(k_NTd: Tensor) -> Tensor:
            memory = self.index_memory(indexer.layer, k_NTd)
            memory[self._layout.write[rows_NT]] = k_NTd
            return memory[read_NL]

        return store

    def index_memory(self, layer: int, k_NTd: Tensor) -> Tensor:
        """Return the memory of the keys of a layer's indexer, [slots, d]. At first it is allocated
        with the type and the width of these keys."""
        if layer not in self._indexed:
            with torch.inference_mode(False):  # it outlives the pass
                self._indexed[layer] = k_NTd.new_zeros(self._n_slots, k_NTd.shape[-1])
        return self._indexed[layer]

    def close(self) -> None:
        """Free the memory."""
        self._layers, self._indexed = {}, {}

    def allocate(
        self, layers: Sequence[int], like_kd: Tensor
    ) -> Mapping[int, tuple[Tensor, Tensor]]:
        """Allocate the memory of these layers as one tensor, for keys and values of one shape."""
        with torch.inference_mode(False):
            whole = like_kd.new_zeros(len(layers), 2, self._n_slots, *like_kd.shape)
        pairs = ((keys, values) for keys, values in whole)
        self._layers = dict(zip(layers, pairs, strict=True))
        return self._layers

    def memory(self, layer: int, k_Tkd: Tensor, v_Tkd: Tensor) -> tuple[Tensor, Tensor]:
        """Return the memory of the keys and values of a layer, [slots, k, d]. At first it is
        allocated with the types and shapes of these keys and values."""
        if layer not in self._layers:
            with torch.inference_mode(False):  # it outlives the pass
                keys, values = (t.new_zeros(self._n_slots, *t.shape[1:]) for t in (k_Tkd, v_Tkd))
            self._layers[layer] = keys, values
        return self._layers[layer]


def _of_rows(options: AttentionOptions, rows_NT: Tensor) -> AttentionOptions:
    """Return options with the bias of these rows only, if each token has a bias of its own."""
    if isinstance(options.bias, TokenBias):
        return options._replace(bias=options.bias.of_rows(rows_NT))
    return options


def score_parts(n_queries: int, n_scores: int) -> list[slice]:
    """Return parts of queries with `n_scores` each whose scores take at most `_SCORES` bytes."""
    size = max(1, _SCORES // max(4 * n_scores, 1))
    return [slice(at, min(at + size, n_queries)) for at in range(0, n_queries, size)]


def _attend_causally(
    q_1hTd: Tensor,
    k_1kLd: Tensor,
    v_1kLd: Tensor,
    options: AttentionOptions,
    chosen_TK: Tensor | None = None,
) -> Tensor:
    """Return the attention of the last T of L tokens of a sequence, to the keys at `chosen_TK` only
    if it is given. Where no kernel for causal attention can be used, queries are divided so that
    their scores take at most `_SCORES` bytes."""
    plain = options.window is None and options.softcap is None and options.bias is None
    if plain and chosen_TK is None and q_1hTd.device.type == "cuda":
        y_1hTd = _attend_in_kernel(q_1hTd, k_1kLd, v_1kLd, options)
        if y_1hTd is not None:
            return y_1hTd
    heads, n_queries, n_keys = q_1hTd.shape[1], q_1hTd.shape[2], k_1kLd.shape[2]
    before = n_keys - n_queries
    window = n_keys if options.window is None else options.window
    seen = min(n_keys, 2 * window)
    size = min(max(1, _SCORES // (4 * heads * seen)), window)
    found = []
    for start in range(0, n_queries, size):
        stop = min(start + size, n_queries)
        first = max(0, before + start + 1 - window)
        keys = slice(first, before + stop)
        positions = torch.arange(before + start, before + stop, device=q_1hTd.device) - first
        q, k, v = q_1hTd[:, :, start:stop], k_1kLd[:, :, keys], v_1kLd[:, :, keys]
        sees = None
        if chosen_TK is not None:
            sees = torch.zeros(stop - start, n_keys, dtype=torch.bool, device=q.device)
            sees = sees.scatter_(1, chosen_TK[start:stop], True)[None, :, keys]
        own = _of_rows(options, torch.arange(start, stop, device=q.device)[None])
        found.append(_attention(q, k, v, positions[None], own, sees_NTL=sees))
    return torch.cat(found, dim=2)


def _attend_together(
    q_Thd: Tensor, k_Tkd: Tensor, v_Tkd: Tensor, parts: Sequence[slice], options: AttentionOptions
) -> Tensor:
    """Return the attention of the tokens of each part to all tokens of the part."""
    found = []
    for rows in parts:
        q, k, v = (each[rows].transpose(0, 1)[None] for each in (q_Thd, k_Tkd, v_Tkd))
        found.append(_attend_to_all(q, k, v, options)[0].transpose(0, 1))
    return torch.cat(found)


def _attend_to_all(
    q_1hTd: Tensor, k_1kLd: Tensor, v_1kLd: Tensor, options: AttentionOptions
) -> Tensor:
    """Return the attention of T tokens, the first ones of a sequence, to L keys, with at most
    `_SCORES` bytes of scores at a time."""
    heads, n_queries, n_keys = q_1hTd.shape[1], q_1hTd.shape[2], k_1kLd.shape[2]
    last = torch.tensor([[n_keys - 1]], device=q_1hTd.device)
    positions = torch.arange(n_queries, device=q_1hTd.device)[None]
    size = max(1, _SCORES // (4 * heads * n_keys))
    found = [
        _attention(q, k_1kLd, v_1kLd, last, options, at)
        for q, at in zip(q_1hTd.split(size, 2), positions.split(size, 1), strict=True)
    ]
    return torch.cat(found, dim=2)


def _attend_in_kernel(
    q_1hTd: Tensor, k_1kLd: Tensor, v_1kLd: Tensor, options: AttentionOptions
) -> Tensor | None:
    """Return causal attention by a kernel of torch whose mask is aligned to the last key; None if
    none can be used."""
    heads, kv_heads = q_1hTd.shape[1], k_1kLd.shape[1]
    args = q_1hTd, k_1kLd, v_1kLd, None, 0.0, False, heads > kv_heads
    if can_use_flash_attention(SDPAParams(*args)) and q_1hTd.shape[3] % 8 == 0:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        y_1hTd: Tensor
        y_1hTd, lse_1hT, *_ = flash(q_1hTd, k_1kLd, v_1kLd, is_causal=True, scale=options.scale)
        if options.sinks is None:
            return y_1hTd
        # a sink adds exp(sink) to the sum of the softmax
        shares_1hT = torch.sigmoid(lse_1hT - options.sinks.float()[:, None])
        shared: Tensor = y_1hTd * shares_1hT[..., None].to(y_1hTd.dtype)
        return shared
    if options.sinks is not None:
        return None
    k_1hLd, v_1hLd = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k_1kLd, v_1kLd))
    if not can_use_efficient_attention(SDPAParams(q_1hTd, k_1hLd, v_1hLd, None, 0.0, False, False)):
        return None
    causal = causal_lower_right(q_1hTd.shape[2], k_1hLd.shape[2])
    return F.scaled_dot_product_attention(
        q_1hTd, k_1hLd, v_1hLd, attn_mask=causal, scale=options.scale
    )


def _attention(
    q_NhTd: Tensor,
    k_NkLd: Tensor,
    v_NkLd: Tensor,
    last_NT: Tensor,
    options: AttentionOptions,
    positions_NT: Tensor | None = None,
    sees_NTL: Tensor | None = None,
) -> Tensor:
    """Return the attention of tokens to the keys at 0, 1, ... `last_NT`. The bias takes the tokens
    to be at `positions_NT`, by default at `last_NT`. With `sees_NTL`, tokens see only some of these
    keys."""
    key_positions = torch.arange(k_NkLd.shape[2], device=q_NhTd.device)
    sees = key_positions <= last_NT[..., None]
    if sees_NTL is not None:
        sees &= sees_NTL
    if options.window is not None:
        sees &= key_positions > last_NT[..., None] - options.window
    sees = sees[:, None]
    mask = sees
    if options.bias is not None:
        own = last_NT if positions_NT is None else positions_NT
        bias = options.bias.scores(own, k_NkLd.shape[2]).to(q_NhTd.dtype)
        mask = bias.masked_fill(~sees, float("-inf"))
    groups = q_NhTd.shape[1] // k_NkLd.shape[1]
    if options.sinks is None and options.softcap is None:
        return F.scaled_dot_product_attention(
            q_NhTd, k_NkLd, v_NkLd, attn_mask=mask, scale=options.scale, enable_gqa=groups > 1
        )
    k_NhLd, v_NhLd = (t.repeat_interleave(groups, dim=1) for t in (k_NkLd, v_NkLd))
    scale = q_NhTd.shape[-1] ** -0.5 if options.scale is None else options.scale
    scores = q_NhTd @ k_NhLd.transpose(2, 3) * scale
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    scores = scores.masked_fill(~sees, torch.finfo(scores.dtype).min)
    if options.sinks is None:
        return scores.softmax(-1, dtype=torch.float32).to(q_NhTd.dtype) @ v_NhLd
    sinks = options.sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1).to(scores.dtype)
    scores = torch.cat((scores, sinks), dim=-1)
    scores = scores - scores.amax(-1, keepdim=True)
    shares = scores.softmax(-1)[..., :-1]
    return shares.to(v_NhLd.dtype) @ v_NhLd
