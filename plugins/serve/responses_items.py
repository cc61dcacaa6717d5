"""The output items of a response: built from message deltas, with the events that tell of it."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from .reading import Delta

Event = dict[str, Any]


class Items:
    """Reasoning, message and function call items, in the order in which they come."""

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        self.count = 0  # events so far
        self._kind: str | None = None  # of the item that is open
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text is held back

    def numbered(self, kind: str, **more: Any) -> Event:
        """Return the next event."""
        event = {"type": kind, "sequence_number": self.count, **more}
        self.count += 1
        return event

    def take(self, deltas: Sequence[Delta], logprobs: Sequence[dict[str, Any]]) -> list[Event]:
        """Return the events of what one output brought."""
        self._logprobs += logprobs
        sent: list[Event] = []
        for delta in deltas:
            if delta.get("reasoning"):
                sent += self._text("reasoning", delta["reasoning"])
            if delta.get("content"):
                sent += self._text("message", delta["content"])
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    sent += self.close()
                    sent += self._open("function_call", call)
                if text := call["function"]["arguments"]:
                    self.output[-1]["arguments"] += text
                    sent.append(self._told("function_call_arguments.delta", delta=text))
        return sent

    def close(self) -> list[Event]:
        """Return the events that end the open item."""
        kind, self._kind = self._kind, None
        if kind is None:
            return []
        item = self.output[-1]
        item["status"] = "completed"
        sent = []
        if kind == "function_call":
            sent.append(
                self._told(
                    "function_call_arguments.done", arguments=item["arguments"], name=item["name"]
                )
            )
        elif kind == "reasoning":
            [part] = item["content"]
            sent.append(self._told("reasoning_text.done", content_index=0, text=part["text"]))
            sent.append(self._told("reasoning_part.done", content_index=0, part=dict(part)))
        else:
            [part] = item["content"]
            sent.append(
                self._told(
                    "output_text.done", content_index=0, text=part["text"],
                    logprobs=part["logprobs"],
                )
            )  # fmt: skip
            sent.append(self._told("content_part.done", content_index=0, part=dict(part)))
        sent.append(
            self.numbered("response.output_item.done", output_index=self._index, item=dict(item))
        )
        return sent

    @property
    def _index(self) -> int:
        return len(self.output) - 1

    def _told(self, kind: str, **more: Any) -> Event:
        return self.numbered(
            f"response.{kind}", item_id=self.output[-1]["id"], output_index=self._index, **more
        )

    def _text(self, kind: str, text: str) -> list[Event]:
        sent: list[Event] = []
        if self._kind != kind:
            sent += self.close()
            sent += self._open(kind)
        part = self.output[-1]["content"][0]
        part["text"] += text
        if kind == "reasoning":
            return [*sent, self._told("reasoning_text.delta", content_index=0, delta=text)]
        logprobs, self._logprobs = self._logprobs, []
        part["logprobs"] += logprobs
        event = self._told("output_text.delta", content_index=0, delta=text, logprobs=logprobs)
        return [*sent, event]

    def _open(self, kind: str, call: Delta | None = None) -> list[Event]:
        """Begin an item; the events show it empty, and so does what they hold."""
        self._kind = kind
        item: dict[str, Any] = {"type": kind, "status": "in_progress"}
        if kind == "function_call":
            assert call is not None
            item |= {"id": f"fc_{uuid.uuid4().hex}", "call_id": call["id"],
                     "name": call["function"]["name"], "arguments": ""}  # fmt: skip
        elif kind == "reasoning":
            item |= {"id": f"rs_{uuid.uuid4().hex}", "summary": [], "content": []}
        else:
            item |= {"id": f"msg_{uuid.uuid4().hex}", "role": "assistant", "content": []}
        self.output.append(item)
        shown = {**item, "content": []} if "content" in item else dict(item)
        added = self.numbered("response.output_item.added", output_index=self._index, item=shown)
        if kind == "function_call":
            return [added]
        if kind == "reasoning":
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            name = "reasoning_part.added"
            self._logprobs = []
        else:
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            name = "content_part.added"
        event = self._told(name, content_index=0, part={**part})
        item["content"].append(part)
        return [added, event]
