"""Numbers that kernels and their callers share, and how much programs read at once.

Kernels contain `ABSENT` as a literal. Tiles and limits are read as attributes of
this module, so that a changed one takes effect everywhere.
"""

from typing import NamedTuple

ABSENT = -(1 << 62)
"""In a table of experts: not on the device."""


class Tile(NamedTuple):
    """The weights that a program reads at once, and its warps."""

    rows: int
    block: int
    warps: int


LARGE = 1 << 15
"""Rows of a matrix from which programs read in larger pieces."""
LARGE_TILE, SMALL_TILE = Tile(8, 512, 4), Tile(2, 2048, 4)
EXPERT_IN_TILE, EXPERT_OUT_TILE = Tile(2, 2048, 4), Tile(1, 256, 4)
PACKED_IN_TILE, PACKED_OUT_TILE = Tile(2, 128, 1), Tile(2, 256, 2)
"""Rows and int32 of packed experts. With 4 int32 for each thread, inputs are loaded as the products
need them, without shared memory."""
PACKED_REGISTERS = 80
"""Most of a thread: all programs of a token then run at once on a GPU with 132 multiprocessors."""
GROUP_TILE = Tile(64, 64, 4)
"""Fastest on an H200."""
PACKED_GROUP_TILE, PACKED_WIDE_TILE = Tile(64, 16, 4), Tile(32, 8, 4)
"""Rows and int32 of packed experts, in bf16 and in float32."""
WIDE = 2048
"""Hidden width from which a program reads so much of an expert at once."""
ALONE = 512
"""Keys of a sequence up to which one program computes a head: others are combined by a kernel."""
SEVERAL = 8
"""Tokens from which on an expert is read once for all that use it."""
