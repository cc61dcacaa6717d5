"""Control tokens in structural tags: what is written as their text is meant as the token.

A begin tag such as "<tool_call>" is one id in many vocabularies. Spelled as text the model would
have to write it with ordinary pieces, since control ids are no text; so such texts become token
formats, and formats of any tokens leave the other control ids out.
"""

from __future__ import annotations

import json
from typing import Any

from ..core.constraint import Vocabulary
from ..core.errors import ValidationError

Format = dict[str, Any]
_SINGLE = ("content",)
_MANY = ("elements", "tags")


def with_token_ids(text: str, vocabulary: Vocabulary) -> tuple[str, frozenset[int]]:
    """Return the structural tag `text` (JSON) with control tokens by id, and those it names."""
    tag = json.loads(text)
    writer = _Writer(vocabulary)
    tag["format"] = writer.format(tag["format"])
    return json.dumps(tag, ensure_ascii=False), frozenset(writer.named)


class _Writer:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._ids = dict(vocabulary.control_texts)
        self._controls = vocabulary.control_ids
        self._vocabulary = vocabulary
        self.named: set[int] = set()  # ids that the tag asks for

    def format(self, value: Format) -> Format:
        """Return a format with everything inside it rewritten."""
        value = dict(value)
        kind = value.get("type", "tag" if "begin" in value else "")
        for key in _SINGLE:
            if isinstance(value.get(key), dict):
                value[key] = self.format(value[key])
        for key in _MANY:
            if isinstance(value.get(key), list):
                value[key] = [self.format(item) for item in value[key]]
        if kind in ("dispatch", "token_dispatch"):
            value["rules"] = [[start, self.format(inner)] for start, inner in value["rules"]]
        if kind == "const_string":
            return self._text(value["value"]) or value
        if kind == "tag":
            return self._tag(value)
        if kind == "triggered_tags":
            return self._triggered(value)
        return self._by_token(kind, value)

    def _tag(self, value: Format) -> Format:
        """Split `begin` and `end` where a control token is their first or their last part."""
        begin, end, content = value["begin"], value["end"], value["content"]
        if isinstance(begin, str):
            before, control, after = self._split(begin)
            if control is not None and not before:
                value["begin"] = self._token(control)
                content = _sequence(self._text(after, plain=True), content)
        if isinstance(end, str):
            before, control, after = self._split(end)
            if control is not None and not after:
                value["end"] = self._token(control)
                content = _sequence(content, self._text(before, plain=True))
        for key in ("begin", "end"):
            if isinstance(value[key], dict):
                value[key] = self._by_token("token", value[key])
        value["content"] = content
        return value

    def _triggered(self, value: Format) -> Format:
        """Tags that all begin with a control token are triggered by the tokens."""
        triggers = [self._ids.get(trigger) for trigger in value["triggers"]]
        if None in triggers or not all(isinstance(tag["begin"], dict) for tag in value["tags"]):
            if any(isinstance(tag["begin"], dict) for tag in value["tags"]):
                raise ValidationError(
                    "structural_tag mixes triggers that are control tokens with others: "
                    f"{value['triggers']!r}; give each trigger as the whole control token, or none",
                    parameter="structural_tag",
                    value=value["triggers"],
                )
            return value
        kept: Format = {
            key: value[key] for key in ("at_least_one", "stop_after_first") if key in value
        }
        return {
            "type": "token_triggered_tags",
            "trigger_tokens": triggers,
            "tags": value["tags"],
            "exclude_tokens": sorted(self._controls.difference(triggers)),
            **kept,
        }

    def _by_token(self, kind: str, value: Format) -> Format:
        """Names become ids; formats of any tokens leave out control ids that are not named."""
        if kind == "token":
            value["token"] = self._id(value["token"])
            self.named.add(value["token"])
        if kind == "token_dispatch":
            value["rules"] = [[self._id(start), inner] for start, inner in value["rules"]]
        named: set[int] = set()
        if kind == "token_triggered_tags":
            value["trigger_tokens"] = [self._id(token) for token in value["trigger_tokens"]]
            named = set(value["trigger_tokens"])
        if kind == "token_dispatch":
            named = {start for start, _ in value["rules"]}
        self.named |= named
        if kind in ("any_tokens", "exclude_token", "token_triggered_tags", "token_dispatch"):
            given = {self._id(token) for token in value.get("exclude_tokens", ())}
            value["exclude_tokens"] = sorted(given | self._controls.difference(named))
        return value

    def _id(self, token: int | str) -> int:
        if isinstance(token, int):
            if 0 <= token < self._vocabulary.size:
                return token
        elif token in self._ids:
            return self._ids[token]
        elif token.encode() in self._vocabulary.tokens:
            return self._vocabulary.tokens.index(token.encode())
        raise ValidationError(
            f"structural_tag names the token {token!r}, which the vocabulary does not have",
            parameter="structural_tag",
            value=token,
        )

    def _token(self, token_id: int) -> Format:
        self.named.add(token_id)
        return {"type": "token", "token": token_id}

    def _text(self, text: str, plain: bool = False) -> Format | None:
        """A text as a format, its control tokens by id; None if it has none, unless `plain`."""
        parts: list[Format] = []
        rest = text
        while rest:
            before, control, rest = self._split(rest)
            if before:
                parts.append({"type": "const_string", "value": before})
            if control is not None:
                parts.append(self._token(control))
        if not plain and all(part["type"] == "const_string" for part in parts):
            return None
        if not parts:
            return None
        return parts[0] if len(parts) == 1 else {"type": "sequence", "elements": parts}

    def _split(self, text: str) -> tuple[str, int | None, str]:
        """Return what is before the first control token of a text, its id, and what is after."""
        found = [(text.find(name), -len(name), name) for name in self._ids if name in text]
        if not found:
            return text, None, ""
        place, _, name = min(found)
        return text[:place], self._ids[name], text[place + len(name) :]


def _sequence(*parts: Format | None) -> Format:
    kept = [part for part in parts if part is not None]
    return kept[0] if len(kept) == 1 else {"type": "sequence", "elements": kept}
