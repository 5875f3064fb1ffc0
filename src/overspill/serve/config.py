"""The settings of `overspill generate` and `overspill chat`; `overspill serve` shares some."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from overspill.core.errors import ConfigError
from overspill.core.options import Count, NotNegative, NotNegativeInt, Rule, values_of
from overspill.models.huggingface.checks import (
    check_checkpoint,
    check_tokenizer,
    is_adapter,
    read_json_config,
)
from overspill.moe.settings import RoutingFix
from overspill.serve.options import LLMOptions
from overspill.train.run_folder import is_run
from overspill.train.settings import Config

if TYPE_CHECKING:
    from overspill.serve.llm import LLM
    from overspill.serve.params import SamplingParams


_TOP_P = Rule("above 0 and at most 1", lambda value: 0 < value <= 1)


@dataclass(frozen=True)
class ModelSection(RoutingFix, LLMOptions):
    """Model and memory"""

    dtype: Literal["bf16", "fp32"] | None = None

    def check(self, model: str, needs_text: bool) -> Path | None:
        """Raise if `model` cannot be loaded, or has no tokenizer although `needs_text`, before
        torch is imported. Returns the folder of a checkpoint; None for runs and adapters."""
        if is_run(Path(model).expanduser()):
            return None
        folder = check_checkpoint(model)
        if is_adapter(folder):
            return None
        if needs_text:
            check_tokenizer(folder, "MODEL")
        return folder

    def open(self, model: str) -> "LLM":
        # Importing torch takes seconds: only after the flags are checked.
        import torch

        from overspill.moe.settings import Settings
        from overspill.serve.llm import LLM

        dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32, None: None}
        given = values_of(self, LLMOptions) | {"dtype": dtypes[self.dtype]}
        settings = Settings(fix_nllb_routing=True) if self.fix_nllb_routing else None
        return LLM(model, **given, settings=settings)


@dataclass(frozen=True)
class SamplingSection:
    """Sampling"""

    max_tokens: Count = 256
    """Tokens of an answer at most."""
    temperature: NotNegative = 0.7
    """0 takes the likeliest token; higher values vary more."""
    top_p: Annotated[float, _TOP_P] = 1.0
    """Choose among the likeliest tokens that have this share of the probability."""
    top_k: NotNegativeInt = 0
    """Choose among so many of the likeliest tokens; 0: all."""
    seed: NotNegativeInt | None = None
    """Gives the same answer again."""
    stop: str | None = None
    """End the answer before this text."""


@dataclass(frozen=True)
class DecoderSection:
    """Models with an encoder and a decoder"""

    src_lang: str | None = None
    """Language of the source, as the tokenizer names it, such as eng_Latn."""
    tgt_lang: str | None = None
    """Language of the answer, such as fra_Latn."""
    decoder_prompt: str | None = None
    """Text that the answer continues."""

    @property
    def given(self) -> dict[str, Any]:
        """The arguments of `SamplingParams` that are given."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def check(self, model: str, folder: Path | None) -> None:
        """Raise, before weights are read, if the model in a folder cannot have these arguments;
        without a folder `LLM` checks them."""
        if not self.given or folder is None:
            return
        if not _is_encoder_decoder(folder):
            flag = "--" + next(iter(self.given)).replace("_", "-")
            raise ConfigError(
                f"{flag} is for models with an encoder and a decoder, {model} continues its "
                "prompt; leave it out"
            )
        from overspill.serve.seq2seq import find_language, read_languages
        from overspill.serve.source import find_codec

        languages = read_languages(getattr(find_codec(folder), "tokenizer", None))
        for name in ("src_lang", "tgt_lang"):
            if name in self.given:
                find_language(languages, name, self.given[name])


def _is_encoder_decoder(folder: Path) -> bool:
    return read_json_config(folder).get("is_encoder_decoder") is True


@dataclass(frozen=True)
class ServeConfig(Config):
    """All settings of `overspill chat`."""

    command: ClassVar[str] = "chat"
    model: ModelSection = field(default_factory=ModelSection)
    sampling: SamplingSection = field(default_factory=SamplingSection)

    def open(self, model: str) -> "LLM":
        folder = self.model.check(model, needs_text=True)
        if folder is not None:
            self._check_kind(model, folder)
        return self.model.open(model)

    def _check_kind(self, model: str, folder: Path) -> None:
        """Raise if the command is for other kinds of models."""
        if _is_encoder_decoder(folder):
            raise ConfigError(
                f"{model} has an encoder and a decoder: it answers single prompts; use overspill "
                "generate"
            )

    def params(self) -> "SamplingParams":
        from overspill.serve.params import SamplingParams

        return SamplingParams(**vars(self.sampling))


@dataclass(frozen=True)
class GenerateConfig(ServeConfig):
    """All settings of `overspill generate`."""

    command: ClassVar[str] = "generate"
    decoder: DecoderSection = field(default_factory=DecoderSection)

    def _check_kind(self, model: str, folder: Path) -> None:
        self.decoder.check(model, folder)

    def params(self) -> "SamplingParams":
        return replace(super().params(), **self.decoder.given)
