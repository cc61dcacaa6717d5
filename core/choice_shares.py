"""`choice_probs`: how likely each option was, found by requests of the engine's own.

They run beside the caller's request, share its prompt's cache and show themselves to nobody; the
caller's last output waits for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .choosing import ChoiceTree, row_of, row_params
from .errors import ValidationError
from .outputs import RequestOutput
from .request import Request

if TYPE_CHECKING:
    from .engine import LLMEngine


@dataclass(slots=True)
class _Inquiry:
    """What is being found out for one request."""

    request: Request
    tree: ChoiceTree
    asked: list[str] = field(default_factory=list)  # our requests of this round, in order
    rows: dict[str, Any] = field(default_factory=dict)  # their answers
    error: str | None = None
    last: RequestOutput | None = None  # the caller's last output, held back


class ChoiceShares:
    """The inquiries of one engine."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._inquiries: dict[str, _Inquiry] = {}
        self._askers: dict[str, str] = {}  # our request -> the caller's
        self._number = 0

    def __bool__(self) -> bool:
        return bool(self._inquiries or self._askers)

    def __contains__(self, request_id: str) -> bool:
        """Whether a request's last output is still to come."""
        return request_id in self._inquiries

    def check(self, request: Request) -> None:
        """Refuse what no shares can be found for; ValidationError says why."""
        wanted = request.params.structured_outputs
        if wanted is None or not wanted.choice_probs:
            return
        reason = None
        if request.prompt_embeds is not None:
            reason = "the prompt is embeddings"
        elif self._engine.config.reasoning_config is not None:
            reason = "the model reasons before it answers; ask LLM.choose after the reasoning"
        if reason is not None:
            raise ValidationError(
                f"choice_probs=True cannot be found, since {reason}", parameter="choice_probs"
            )
        ChoiceTree(wanted.choice or [], self._engine.parts.tokenizer)

    def begin(self, request: Request) -> None:
        """Ask for the first distributions, if the request wants shares."""
        wanted = request.params.structured_outputs
        if wanted is None or not wanted.choice_probs:
            return
        tree = ChoiceTree(wanted.choice or [], self._engine.parts.tokenizer)
        inquiry = self._inquiries[request.request_id] = _Inquiry(request, tree)
        self._ask(inquiry)

    def drop(self, request_id: str) -> list[str]:
        """Give an inquiry up; return our requests that nobody waits for any more."""
        inquiry = self._inquiries.pop(request_id, None)
        return [] if inquiry is None else list(inquiry.asked)

    def pass_on(self, output: RequestOutput) -> Iterator[RequestOutput]:
        """Yield what callers may see once `output` is made: itself, another one, or nothing."""
        name = self._askers.get(output.request_id)
        if name is None:
            inquiry = self._inquiries.get(output.request_id)
            if inquiry is None or not output.finished:
                yield output
                return
            inquiry.last = output
        else:
            del self._askers[output.request_id]
            inquiry = self._inquiries.get(name)
            if inquiry is None:  # given up
                return
            self._take(inquiry, output)
        yield from self._told(inquiry)

    def _take(self, inquiry: _Inquiry, output: RequestOutput) -> None:
        try:
            inquiry.rows[output.request_id] = row_of(output.outputs[0])
        except RuntimeError as error:
            inquiry.error = str(error)
            inquiry.asked = []
            return
        if len(inquiry.rows) == len(inquiry.asked):
            inquiry.tree.feed([inquiry.rows[name] for name in inquiry.asked])
            self._ask(inquiry)

    def _ask(self, inquiry: _Inquiry) -> None:
        """Queue a request for each distribution that the tree wants."""
        inquiry.asked, inquiry.rows = [], {}
        request = inquiry.request
        for path in inquiry.tree.paths:
            self._number += 1
            name = f"{request.request_id}/choice_probs/{self._number}"
            prompt = {"prompt_token_ids": [*request.prompt_ids, *path]}
            self._askers[name] = request.request_id
            inquiry.asked.append(name)
            try:
                self._engine.add_request(name, prompt, row_params(), priority=request.priority)
            except ValidationError as error:  # the path does not fit the context
                del self._askers[name]
                inquiry.error = str(error)
                inquiry.asked = []
                return

    def _told(self, inquiry: _Inquiry) -> Iterable[RequestOutput]:
        """Return the caller's last output with the shares, once both are there."""
        if inquiry.asked or inquiry.last is None:
            return ()
        del self._inquiries[inquiry.request.request_id]
        if inquiry.error is None:
            shares = inquiry.tree.result()
            for completion in inquiry.last.outputs:
                completion.choice_probs = dict(shares.probs)
        else:
            for completion in inquiry.last.outputs:
                completion.parse_error = f"choice_probs could not be found: {inquiry.error}"
        return (inquiry.last,)
