"""How likely a model is to write each of some texts: the sum over every spelling in tokens.

From the answer position on, tokens that go on with an option are followed, the likeliest first; the
rest of a path that is not worth another forward pass is reported, not guessed. An option and the
same with one space in front are one. Where an option goes on into a longer one, what goes on
counts for the longer one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from .errors import ValidationError
from .param_rules import as_list, refuse_type
from .params import RequestOutputKind, SamplingParams

TOLERANCE = 1e-4  # share of the options' whole mass below which a path is not followed
MOST_PATHS = 512  # forward passes a prompt
TIE = 1e-6  # relative difference of two probabilities that counts as none


@dataclass
class ChoiceOutput:
    """What a model would choose after one prompt.

    `probs` add up to 1. `choice` is the likeliest option, of several in `tied` the one that was
    listed first. `mass` is the probability that the model, unconstrained, writes any of them at
    all: near 0, the prompt does not lead to such an answer and the shares say little. Up to
    `unresolved` of the mass, as a share, lies on rare spellings that were not followed.
    """

    choice: str
    probs: dict[str, float]
    logprobs: dict[str, float]  # of writing the option, unconstrained, before the division by mass
    mass: float
    tied: list[str]
    unresolved: float
    num_forwards: int  # positions that were computed

    @property
    def is_tie(self) -> bool:
        """Whether another option is as likely as `choice`."""
        return len(self.tied) > 1


class _Node(NamedTuple):
    """A path of tokens and what is left to write of each option that it may become."""

    path: tuple[int, ...]
    mass: float
    left: tuple[tuple[int, bytes], ...]  # option, the bytes that are missing


class ChoiceTree:
    """The token paths of the options after one prompt; give it distributions until it is done."""

    def __init__(self, options: Sequence[str], tokenizer: Any) -> None:
        self.options = check_options(options)
        self._ids = _ids_by_bytes(tokenizer)
        self._masses = [0.0] * len(self.options)
        self._dropped = 0.0
        self._num_paths = 0
        self._open = [_Node((), 1.0, tuple(_spellings(self.options)))]

    @property
    def paths(self) -> list[tuple[int, ...]]:
        """Tokens after the prompt at which the next distribution is wanted; empty when done."""
        return [node.path for node in self._open]

    def feed(self, rows: Sequence[Any]) -> None:
        """Take the log-probabilities [tokenizer size] after each of `paths`, in order."""
        grown: list[_Node] = []
        for node, row in zip(self._open, rows, strict=True):
            grown += self._grow(node, row)
        self._num_paths += len(self._open)
        known = sum(self._masses) + sum(node.mass for node in grown)
        grown.sort(key=lambda node: -node.mass)
        room = max(MOST_PATHS - self._num_paths, 0)
        self._open = [node for node in grown[:room] if node.mass > TOLERANCE * known]
        self._dropped += sum(node.mass for node in grown[len(self._open) :])

    def result(self) -> ChoiceOutput:
        """Return the shares; the tree must be done."""
        total = sum(self._masses)
        count = len(self.options)
        shares = [mass / total if total else 1.0 / count for mass in self._masses]
        best = max(shares)
        tied = [i for i in range(count) if shares[i] >= best * (1.0 - TIE)]
        return ChoiceOutput(
            choice=self.options[tied[0]],
            probs=dict(zip(self.options, shares, strict=True)),
            logprobs={
                option: math.log(mass) if mass else -math.inf
                for option, mass in zip(self.options, self._masses, strict=True)
            },
            mass=total,
            tied=[self.options[i] for i in tied],
            unresolved=self._dropped / (total + self._dropped) if self._dropped else 0.0,
            num_forwards=self._num_paths,
        )

    def _grow(self, node: _Node, row: Any) -> list[_Node]:
        """Move a node's mass on to the tokens that go on; whole options take theirs."""
        nexts: dict[int, list[tuple[int, bytes]]] = {}
        for option, left in node.left:
            for size in range(1, len(left) + 1):
                for token in self._ids.get(left[:size], ()):
                    nexts.setdefault(token, []).append((option, left[size:]))
        grown: list[_Node] = []
        going_on = 0.0
        for token, lefts in nexts.items():
            mass = node.mass * math.exp(float(row[token]))
            going_on += mass
            if any(left for _, left in lefts):
                grown.append(_Node((*node.path, token), mass, tuple(lefts)))
            else:
                self._masses[lefts[0][0]] += mass
        ended = [option for option, left in node.left if not left]
        if ended:
            self._masses[ended[0]] += node.mass - going_on
        return grown


def check_options(options: Any) -> list[str]:
    """Return options without repeats; ValidationError for none, or two that are one answer."""
    allowed = "a list of at least two different texts"
    listed = list(dict.fromkeys(as_list("choices", options, allowed)))
    seen: dict[str, str] = {}
    for option in listed:
        if not isinstance(option, str) or not option.strip():
            refuse_type("choices", option, "made of texts that are not blank")
        twin = seen.setdefault(option.removeprefix(" "), option)
        if twin is not option:
            raise ValidationError(
                f"choices {twin!r} and {option!r} differ by a leading space alone, which makes "
                "them one answer",
                parameter="choices",
                value=option,
            )
    if len(listed) < 2:
        raise ValidationError(
            f"choices must be {allowed}, got {listed!r}", parameter="choices", value=listed
        )
    return listed


def row_params() -> SamplingParams:
    """Return parameters of a request that gives one distribution of the model, untouched."""
    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        output_tensors=True,
        logprobs_mode="raw",
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def row_of(completion: Any) -> Any:
    """Return the log-probabilities [tokenizer size] of such a request's one position."""
    tensors: Mapping[str, Any] | None = completion.tensors
    if not tensors:
        raise RuntimeError(completion.error or "the model's distribution is not available")
    return tensors["raw"][0].numpy().copy()  # the tensor is part of a larger buffer


def _spellings(options: Sequence[str]) -> list[tuple[int, bytes]]:
    bare = [(place, option.removeprefix(" ")) for place, option in enumerate(options)]
    return [(place, text.encode()) for place, word in bare for text in (word, f" {word}")]


_known: WeakKeyDictionary[Any, Mapping[bytes, tuple[int, ...]]] = WeakKeyDictionary()


def _ids_by_bytes(tokenizer: Any) -> Mapping[bytes, tuple[int, ...]]:
    """Return which text tokens spell given bytes; made once a tokenizer."""
    found = _known.get(tokenizer)
    if found is None:
        if tokenizer.spelling.kind == "opaque":
            raise ValidationError(
                "choices need a tokenizer whose tokens have bytes of their own, and this one's "
                "have none",
                parameter="choices",
            )
        made: dict[bytes, list[int]] = {}
        for token in range(tokenizer.max_token_id + 1):
            if token not in tokenizer.special_ids and tokenizer.has_token(token):
                made.setdefault(tokenizer.token_bytes(token), []).append(token)
        found = _known[tokenizer] = {word: tuple(ids) for word, ids in made.items() if word}
    return found
