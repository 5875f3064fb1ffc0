"""The stacks of experts in a checkpoint, changed by an adapter and in the checkpoint's layout."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from overspill.core.errors import ConfigError
from overspill.models.huggingface.conversion import model_conversions, reverted
from overspill.models.huggingface.experts import HuggingFaceExperts
from overspill.models.huggingface.lora import LoraTensors
from overspill.models.huggingface.recipes import Recipes, Tensors
from overspill.moe.placeholder import Place


class MergeRecipes(Recipes):
    """Recipes of experts to which an adapter is added for a new checkpoint."""

    def __init__(self, folder: Tensors, lora: LoraTensors) -> None:
        super().__init__(lora.model, lora.layers, folder, lora)
        self._adapter = lora

    def check_mergeable(self) -> None:
        """Raise if changed experts cannot be written in the layout of the checkpoint."""
        for layer in self.layers:
            for place in layer.places(0):
                name = f"{layer.path}.{place.name}"
                if name in self._adapter.stacks and not self._can_revert(layer, place, name):
                    raise ConfigError(
                        f"{self.folder.folder} stores {name} in another layout than the model, "
                        "which overspill.merge does not support; load it with the adapter, and "
                        "save that: "
                        "overspill.save(overspill.load(base, adapter=adapter, train=False), out)"
                    )

    def _can_revert(self, layer: HuggingFaceExperts, place: Place, name: str) -> bool:
        """Return whether changed experts of a stack can be written to the checkpoint: if the
        family's own code makes them of another stack, it must be reversible."""
        sources = self._sources[name]
        if not sources.is_converted:
            return True
        keys = sources.all_keys
        spec = self.folder.specs[keys[0]]
        if len(keys) != 1 or place.expert is None or spec.shape[0] != layer.n_experts:
            return False
        number = [each.name for each in layer.places(0)].index(place.name)
        part = torch.empty(layer.shape.sizes[number], dtype=spec.dtype)
        self._read(name, place, part)
        stored = self._read_new(spec.dtype, (1, *spec.shape[1:]), keys[0], 0)
        back = reverted(self.model, self._conversions, {name: part[None]})
        return back.keys() == {*keys} and torch.equal(back[keys[0]], stored)

    @functools.cached_property
    def _conversions(self) -> Sequence[Any]:
        return model_conversions(self.model)

    def changed(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the checkpoint with stacked experts that the adapter changes and
        that are `wanted`, one at a time."""
        for layer in self.layers:
            for number, place in enumerate(layer.places(0)):
                name = f"{layer.path}.{place.name}"
                if name not in self._adapter.stacks:
                    continue
                sources = self._sources[name]
                if sources.converter is None:
                    yield from self._changed_stack(name, wanted)
                elif sources.is_converted:
                    yield from self._changed_converted(layer, number, name, wanted)
                else:
                    size = layer.shape.sizes[number]
                    for expert in range(layer.n_experts):
                        yield from self._changed_parts(name, expert, size, wanted)

    def _changed_stack(
        self, name: str, wanted: Callable[[str], bool]
    ) -> Iterator[tuple[str, Tensor]]:
        (key,) = self._sources[name].keys[""]
        if wanted(key):
            stack = torch.empty(self.folder.specs[key].shape, dtype=self.folder.specs[key].dtype)
            self.folder.read(key, 0, stack)
            for expert, part in enumerate(stack):
                self._adapter.change_expert(name, expert, part, functools.partial(_copy, part))
            yield key, stack

    def _changed_converted(
        self, layer: HuggingFaceExperts, number: int, name: str, wanted: Callable[[str], bool]
    ) -> Iterator[tuple[str, Tensor]]:
        ((key,),) = self._sources[name].keys.values()
        spec = self.folder.specs[key]
        if not wanted(key):
            return
        stack = torch.empty(spec.shape, dtype=spec.dtype)
        part = torch.empty(layer.shape.sizes[number], dtype=torch.float32)
        for expert in range(layer.n_experts):
            read = functools.partial(self._read, name, layer.places(expert)[number])
            self._adapter.change_expert(name, expert, part, read)
            back = reverted(self.model, self._conversions, {name: part[None]})
            stack[expert] = back[key][0]
        yield key, stack

    def _changed_parts(
        self, name: str, expert: int, size: tuple[int, ...], wanted: Callable[[str], bool]
    ) -> Iterator[tuple[str, Tensor]]:
        sources, specs = self._sources[name], self.folder.specs
        keys = sources.parts(expert)
        if not any(map(wanted, keys)):
            return
        dtype = functools.reduce(torch.promote_types, (specs[key].dtype for key in keys))
        part = torch.empty(size, dtype=dtype)
        read = functools.partial(self._read_parts, sources, Place(name, expert))
        self._adapter.change_expert(name, expert, part, read)
        flat, at = part.view(-1), 0
        for key in keys:
            piece = flat[at : at + specs[key].numel]
            at += specs[key].numel
            if wanted(key):
                yield key, piece.view(specs[key].shape).to(specs[key].dtype)


def _copy(source: Tensor, out: Tensor) -> None:
    out.copy_(source)
