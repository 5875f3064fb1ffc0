"""Draws docs/tiers-light.svg and docs/tiers-dark.svg: where experts are kept, and what moves.

python3 bench/tiers_picture.py
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
_WIDTH, _HEIGHT = 880, 262
_BOX_TOP, _BOX_HEIGHT, _BOX_WIDTH, _GAP = 16, 230, 220, 94
_SQUARE, _STEP = 13, 17


@dataclass(frozen=True)
class Theme:
    """Colours of one picture."""

    ink: str
    faint: str
    box: str
    experts: tuple[str, str, str]
    """Squares of each tier."""


LIGHT = Theme("#22272e", "#57606a", "#f3f5f8", ("#2f7d4f", "#2f6db3", "#8a6d1d"))
DARK = Theme("#e6edf3", "#9da7b3", "#1b222b", ("#5fae7f", "#6fa3dc", "#c2a75a"))


@dataclass(frozen=True)
class Tier:
    """A box: its heading, squares for experts in rows of ten, and its activity."""

    heading: str
    squares: int
    lines: tuple[str, ...]


TIERS = (
    Tier(
        "GPU memory", 14, ("experts in use, as many", "others as fit, dense layers,", "activations")
    ),
    Tier(
        "Host memory",
        40,
        ("experts with optimizer", "states; the CPU updates", "each when it has a gradient"),
    ),
    Tier("SSD", 60, ("what host memory does", "not hold, read before", "it is needed")),
)
LINKS = (("weights", "gradients"), ("read ahead", "written back"))


def picture(theme: Theme) -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'font-family="-apple-system, Segoe UI, Helvetica, Arial, sans-serif">',
        "<title>Experts are kept in GPU memory, host memory and on an SSD</title>",
    ]
    for number, (tier, colour) in enumerate(zip(TIERS, theme.experts, strict=True)):
        parts += _box(_left(number), tier, colour, theme)
    for number, words in enumerate(LINKS):
        parts += _arrows(_left(number) + _BOX_WIDTH, words, theme)
    return "\n".join([*parts, "</svg>", ""])


def _left(number: int) -> int:
    return 16 + number * (_BOX_WIDTH + _GAP)


def _box(left: int, tier: Tier, colour: str, theme: Theme) -> Iterator[str]:
    yield (
        f'<rect x="{left}" y="{_BOX_TOP}" width="{_BOX_WIDTH}" height="{_BOX_HEIGHT}" rx="10" '
        f'fill="{theme.box}" stroke="{colour}" stroke-width="1.5"/>'
    )
    yield _text(left + 18, _BOX_TOP + 30, tier.heading, theme.ink, 17, "600")
    for number in range(tier.squares):
        row, column = divmod(number, 10)
        x, y = left + 18 + column * _STEP, _BOX_TOP + 44 + row * _STEP
        yield f'<rect x="{x}" y="{y}" width="{_SQUARE}" height="{_SQUARE}" rx="2" fill="{colour}"/>'
    for number, line in enumerate(tier.lines):
        yield _text(left + 18, _BOX_TOP + 172 + number * 19, line, theme.faint, 13.5)


def _arrows(left: int, words: tuple[str, str], theme: Theme) -> Iterator[str]:
    """The first to the left, towards the GPU, the second to the right."""
    middle = left + _GAP / 2
    for y, word, to_left in ((100, words[0], True), (150, words[1], False)):
        start, end = (left + _GAP - 8, left + 8) if to_left else (left + 8, left + _GAP - 8)
        back = 8 if to_left else -8
        yield (
            f'<path d="M{start} {y} H{end} M{end + back} {y - 5} L{end} {y} L{end + back} {y + 5}" '
            f'fill="none" stroke="{theme.ink}" stroke-width="1.6"/>'
        )
        yield _text(middle, y - 9, word, theme.ink, 12.5, anchor="middle")


def _text(
    x: float, y: float, words: str, colour: str, size: float, weight: str = "400",
    anchor: str = "start",
) -> str:  # fmt: skip
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{colour}" font-size="{size:g}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{words}</text>'
    )


def main() -> None:
    for name, theme in (("light", LIGHT), ("dark", DARK)):
        (DOCS / f"tiers-{name}.svg").write_text(picture(theme), encoding="utf-8")


if __name__ == "__main__":
    main()
