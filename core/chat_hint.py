"""A note for a raw prompt that looks as if it was meant for `chat`; nothing is changed by it."""

from __future__ import annotations

import re

from .chat import render_chat
from .errors import ValidationError
from .tokenizer import Tokenizer

_BRACKETED = re.compile(r"<[^<>\s]{1,60}>|\[/?[A-Za-z_]{2,}\]")
_CONTENTS = ("first-content", "second-content", "third-content")
_QUESTION_MARKS = ("?", "\uff1f", "\u061f")  # also the full-width and the Arabic one


class ChatHint:
    """What the chat template of one model writes around messages, found by rendering some."""

    def __init__(self, tokenizer: Tokenizer | None, chat_template: str | None = None) -> None:
        rendered = None if tokenizer is None else _rendered(tokenizer, chat_template)
        self.is_chat_model = rendered is not None
        self.markers: tuple[str, ...] = ()
        if tokenizer is not None and rendered is not None:
            special = tokenizer.special_tokens
            ends = {special.get("bos_token"), special.get("eos_token")}
            self.markers = tuple(marker for marker in _markers(rendered) if marker not in ends)

    def note(self, prompt: str) -> str | None:
        """Return one sentence about a raw `prompt`, or None."""
        for marker in self.markers:
            if marker in prompt:
                return (
                    f"the prompt holds the role marker {marker!r} of the model's chat template; "
                    "`chat` writes the markers itself, from messages"
                )
        if self.is_chat_model and prompt.rstrip().endswith(_QUESTION_MARKS):
            return (
                "the prompt is a plain question to a chat model, and `generate` goes on with it as "
                "with any text; `chat` puts it in the model's own template"
            )
        return None


def _rendered(tokenizer: Tokenizer, chat_template: str | None) -> str | None:
    """Return a rendered exchange of three messages; None if the model has no usable template."""
    roles = ("user", "assistant", "user")
    messages = [
        {"role": role, "content": content} for role, content in zip(roles, _CONTENTS, strict=True)
    ]
    try:
        text = render_chat(messages, tokenizer, chat_template=chat_template)
    except ValidationError:
        return None
    return text if all(content in text for content in _CONTENTS) else None


def _markers(rendered: str) -> list[str]:
    """Return what stands between the contents: bracketed words, else the word before a message."""
    first, second, third = (rendered.index(content) for content in _CONTENTS)
    between = (
        rendered[first + len(_CONTENTS[0]) : second],
        rendered[second + len(_CONTENTS[1]) : third],
    )
    found = [marker for part in between for marker in _BRACKETED.findall(part)]
    if not found:
        found = [part.split()[-1] for part in between if part.split()]
    return list(dict.fromkeys(found))
