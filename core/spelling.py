"""How a vocabulary spells bytes: GPT-2's byte alphabet, sentencepiece's marks, or neither.

Read off the decoder of a `tokenizers` tokenizer, since that is what defines the text of its tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

SPACE_MARK = "\N{LOWER ONE EIGHTH BLOCK}"  # sentencepiece writes a space so
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class Spelling:
    """What the decoder does to the tokens of a text, as far as it can be said token by token.

    byte_level: each character of a token stands for one byte (GPT-2's alphabet).
    marked: a mark stands for a space, and a token like <0x0A> may stand for one byte.
    opaque: anything else; what a token adds depends on its neighbours, so the library decodes.
    """

    kind: Literal["byte_level", "marked", "opaque"]
    has_byte_tokens: bool = False
    strips_first_space: bool = False  # one space at the very start of a text is dropped
    drops_first_marks: bool = False  # all marks of the first token are dropped

    @property
    def changes_start(self) -> bool:
        """Whether the first token of a text reads otherwise than the same token later on."""
        return self.strips_first_space or self.drops_first_marks

    def bytes_of(self, token: str) -> bytes:
        """Bytes of one vocabulary entry that is not an added token."""
        if self.kind == "byte_level":
            try:
                return bytes([BYTE_OF_CHAR[char] for char in token])
            except KeyError:
                return token.encode()
        if self.has_byte_tokens and (byte := _byte_token(token)) is not None:
            return bytes([byte])
        return token.replace(SPACE_MARK, " ").encode()


def spelling_of(decoder: Any) -> Spelling:
    """Classify a decoder of the `tokenizers` library; None is opaque (tokens joined by spaces)."""
    if decoder is None:
        return Spelling("opaque")
    state = json.loads(decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    names = [step["type"] for step in steps if step["type"] != "Fuse"]
    if names == ["ByteLevel"]:
        return Spelling("byte_level")
    return _marked(steps, names)


def _marked(steps: list[dict[str, Any]], names: list[str]) -> Spelling:
    by_name = {step["type"]: step for step in steps}
    order = [name for name in names if name != "ByteFallback"]
    has_bytes = "ByteFallback" in names
    if order == ["Metaspace"] and by_name["Metaspace"]["replacement"] == SPACE_MARK:
        drops = by_name["Metaspace"].get("prepend_scheme", "always") != "never"
        return Spelling("marked", has_bytes, drops_first_marks=drops)
    replace = by_name.get("Replace", {})
    if replace.get("pattern") != {"String": SPACE_MARK} or replace.get("content") != " ":
        return Spelling("opaque")
    if order == ["Replace"]:
        return Spelling("marked", has_bytes)
    strip = by_name.get("Strip", {})
    one_space = (strip.get("content"), strip.get("start"), strip.get("stop")) == (" ", 1, 0)
    fused_first = [step["type"] for step in steps][-2:] == ["Fuse", "Strip"]
    if order == ["Replace", "Strip"] and one_space and fused_first:
        return Spelling("marked", has_bytes, strips_first_space=True)
    return Spelling("opaque")


def _byte_token(token: str) -> int | None:
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the rest is counted up from U+0100."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    alphabet = {chr(byte): byte for byte in plain}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(rest)})
    return alphabet


BYTE_OF_CHAR = _byte_alphabet()
