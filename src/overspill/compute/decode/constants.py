"""Numbers that kernels and their callers share, and sizes of tiles.

Kernels contain `ABSENT` as a literal. Tiles and limits are read as attributes of
this module, so that a changed one takes effect everywhere.
"""

from typing import NamedTuple

ABSENT = -(1 << 62)
"""Entry of a table of experts for an expert that is not on the device."""


class Tile(NamedTuple):
    """Rows and columns of weights that a program reads at once, and its warps."""

    rows: int
    block: int
    warps: int


LARGE = 1 << 15
"""Number of rows of a matrix from which on programs read in larger pieces."""
LARGE_TILE, SMALL_TILE = Tile(8, 512, 4), Tile(2, 2048, 4)
EXPERT_IN_TILE, EXPERT_OUT_TILE = Tile(2, 2048, 4), Tile(1, 256, 4)
PACKED_IN_TILE, PACKED_OUT_TILE = Tile(2, 128, 1), Tile(2, 256, 2)
"""Tiles of packed experts in rows and int32. With 4 int32 for each thread, inputs are loaded as the
products need them, without shared memory."""
PACKED_REGISTERS = 80
"""Most registers of a thread: all programs of a token then run at once on a GPU with 132
multiprocessors."""
GROUP_TILE = Tile(64, 64, 4)
"""The fastest tile on an H200."""
PACKED_GROUP_TILE, PACKED_WIDE_TILE = Tile(64, 16, 4), Tile(32, 8, 4)
"""Tiles of packed experts in rows and int32, for bf16 and for float32."""
WIDE = 2048
"""Hidden width from which on a program reads this many columns of an expert at once."""
ALONE = 512
"""Number of keys of a sequence up to which one program computes a head. For more, a kernel combines
the results of several programs."""
SEVERAL = 8
"""Number of tokens from which on an expert is read once for all tokens that use it."""
