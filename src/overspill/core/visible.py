"""Text of a model for a terminal."""

# Pictures of the control characters; those of the second set have none.
_CONTROLS = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_CONTROLS |= {0x7F: 0x2421, **dict.fromkeys(range(0x80, 0xA0), 0xFFFD)}


def visible(text: str) -> str:
    """`text` with a symbol for each control character, which could move the cursor, change the
    title of the window or write to its clipboard. Line ends and tabs stay."""
    return text.translate(_CONTROLS)
