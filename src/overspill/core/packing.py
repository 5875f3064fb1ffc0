"""The ways in which checkpoints pack weights."""

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """Layout of packed weights in a checkpoint."""

    MXFP4_STACK = "stacks of MXFP4 (_blocks, _scales)"
    E2M1 = "codes of 4 bits (e2m1)"
    E4M3 = "FP8 (e4m3)"
    INT8 = "int8"
    INTEGERS = "integers packed in int32 (weight_packed)"
    GPTQ = "GPTQ (qweight, g_idx)"
    AWQ = "AWQ (qweight)"
    IQ4_NL = "IQ4_NL of GGUF"
    K_QUANT = "Q4_K, Q5_K or Q6_K of GGUF"
    BLOCKS = "blocks of GGUF"


@dataclass(frozen=True)
class Scheme:
    """Description of packed weights: layout, scales and bits."""

    kind: Kind
    block: tuple[int | None, int | None]
    """Rows and columns that share a scale; None for all rows or columns."""
    bits: int = 4
    zero_offset: int = 0
    """Added to stored zero points."""


QUANTIZATIONS = {
    "mxfp4": Scheme(Kind.E2M1, (1, 32)),
    "int4": Scheme(Kind.INTEGERS, (1, 32)),
    "fp8": Scheme(Kind.E4M3, (128, 128), 8),
}
"""Schemes by which Overspill packs plain weights, by the values of `quantize`."""
