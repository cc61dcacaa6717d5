"""The built-in parsers of tool calls: hermes (Qwen), llama3_json, mistral and json."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ....core.hookspecs import hookimpl
from ....core.parsers import ToolParser
from .json_calls import JsonCallParser
from .scan import ArgumentsScanner, CallScanner


class HermesParser(JsonCallParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, Qwen3."""

    name = "hermes"
    aliases = ("qwen", "qwen3", "qwen2_5")
    starts = ("<tool_call>",)
    ends = ("</tool_call>",)
    markers = (*starts, *ends)

    @classmethod
    def structural_tag(cls, functions: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        return {
            "type": "structural_tag",
            "structures": [
                {
                    "begin": f'<tool_call>\n{{"name": {json.dumps(each["name"])}, "arguments": ',
                    "schema": each["parameters"],
                    "end": "}\n</tool_call>",
                }
                for each in functions
            ],
            "triggers": ["<tool_call>"],
        }


class LlamaParser(JsonCallParser):
    """`{"name": ..., "parameters": {...}}`, several divided by `;`: Llama 3.1 and later."""

    name = "llama3_json"
    aliases = ("llama", "llama4_json")
    starts = ("<|python_tag|>",)
    markers = starts
    is_bare = True


class JsonParser(JsonCallParser):
    """An answer that is one call, or a list of calls, in JSON, perhaps in a ```json fence."""

    name = "json"
    starts = ("```json", "```")
    ends = ()
    is_bare = True

    def _look_for_start(self) -> bool:
        # Behind the first calls there are no more, and a fence in plain text opens none.
        self._say(self._text)
        self._text = ""
        return False

    def _look_for_bare(self) -> bool:
        text = self._text.lstrip()
        if not text or any(mark.startswith(text) for mark in self.starts):
            return False
        self._may_be_bare = False
        self._between = text[0] in "{[" or text.startswith("```")
        return True


_NAME = re.compile(r"[\w.-]+")
_ARGS = "[ARGS]"
_ID_LETTERS = string.ascii_letters + string.digits
_ID_SIZE = 9


class MistralParser(JsonCallParser):
    """`[TOOL_CALLS]` before a list of calls, or before `name[ARGS]{...}` and `name{...}`."""

    name = "mistral"
    starts = ("[TOOL_CALLS]",)
    markers = (*starts, _ARGS)

    def _begin(self) -> CallScanner | None:
        found = _NAME.match(self._text)
        if found is None:
            return super()._begin()
        rest = self._text[found.end() :]
        if not rest or (_ARGS.startswith(rest) and rest != _ARGS):
            return None  # more of the name, or of the mark, may come
        skipped = found.end() + len(_ARGS) * rest.startswith(_ARGS)
        if self._text[skipped : skipped + 1] == "":
            return None
        if self._text[skipped] != "{":
            self._leave()
            return None
        self._skip(skipped)
        return ArgumentsScanner(found.group())

    def call_id(self, index: int) -> str:
        """Nine letters and digits, which the model's template insists on."""
        return "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_SIZE))


@hookimpl
def decodekit_tool_parsers() -> Iterable[type[ToolParser]]:
    return [HermesParser, LlamaParser, MistralParser, JsonParser]
