"""Transformers models without their experts, which transformers itself loads or initializes."""

import re
from typing import Any

import torch

from overspill.core.errors import CheckpointError, ConfigError
from overspill.models.huggingface.experts import DictionaryExperts, HuggingFaceExperts
from overspill.models.huggingface.find_experts import find_experts


class Skeleton:
    """Subclass of `plain` whose models lose their experts' parameters in the constructor.
    transformers constructs models on the meta device, so these never take memory."""

    def __init__(self, plain: Any, train: bool) -> None:
        self.layers: list[HuggingFaceExperts] = []
        """Experts modules of the constructed model, without parameters."""
        self.plain = plain
        """Class of transformers."""
        skeleton = self

        class Made(plain):  # type: ignore[misc]
            def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
                super().__init__(config, *args, **kwargs)
                self.train(train)
                skeleton.layers = find_experts(self)
                for layer in skeleton.layers:
                    layer.strip()
                    # transformers would initialize them through their parent
                    parent = self.get_submodule(layer.path.rpartition(".")[0])
                    parent._is_hf_initialized = isinstance(layer, DictionaryExperts)
                self._keys_to_ignore_on_load_unexpected = {
                    *(plain._keys_to_ignore_on_load_unexpected or ()),
                    *(rf"{re.escape(layer.path)}\." for layer in skeleton.layers),
                }

        # transformers looks up a model's weight conversions by these names
        Made.__module__ = plain.__module__
        Made.__name__, Made.__qualname__ = plain.__name__, plain.__qualname__
        self.model_class: Any = Made

    def restore(self, model: Any) -> None:
        """Give the model its original class."""
        del model._keys_to_ignore_on_load_unexpected
        model.__class__ = self.plain


def meta_model(config: Any) -> Any:
    """Return the model of a config, with parameters that take no memory."""
    kind = model_class(config)
    try:
        with torch.device("meta"):
            return kind(config)
    except Exception as error:  # constructors of models raise many types
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise CheckpointError(
            f"{config.name_or_path or config.model_type} cannot be built by transformers "
            f"({reason}); check its config.json"
        ) from error


def model_class(config: Any) -> Any:
    """Return the model class, with its head, that a config names."""
    import transformers

    for name in getattr(config, "architectures", None) or ():
        found = getattr(transformers, name, None)
        if found is not None:
            return found
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForSeq2SeqLM):
        if type(config) in auto._model_mapping:
            return auto._model_mapping[type(config)]
    raise ConfigError(
        f"{config.model_type} ({', '.join(config.architectures or ['no architecture'])}) is not a "
        "language model of this version of transformers; update transformers, or see "
        "docs/families.md"
    )
