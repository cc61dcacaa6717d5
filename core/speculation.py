"""Speculation: guess tokens, compute them along with real ones, keep those that prove right.

Verification is by sample-and-match. The step computes a sequence's last token and the guessed ones
after it; then the chain chooses at the first place as ever, and where it chose what was guessed it
chooses at the next place too. Each choice is an ordinary one, with real history, real states and
the noise of its position, so that every stage works and the tokens are those of decoding one by
one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .errors import ValidationError, did_you_mean
from .proposer import Ask, ModelLoader, Proposer, ProposerContext
from .request import Status
from .stage import StageParams

if TYPE_CHECKING:
    from .plan import Plan
    from .registry import Registry
    from .request import Request
    from .request import Sequence as TokenSequence
    from .request_params import RequestParams
    from .runner import Drafted

log = logging.getLogger("decodekit")

FIRST_LENGTH = 4  # tokens of a sequence's first guess
LONGEST_WAIT = 32  # most steps without a guess, after guesses that were all wrong
ENGINE_FIELD, REQUEST_FIELD = "speculative_config", "speculation"


@dataclass(frozen=True, slots=True)
class BoundProposer:
    """What guesses for a request, and how many tokens at most."""

    kind: type[Proposer]
    bound: Any
    most: int


class Pace:
    """How many tokens to guess next, by how the last guesses went.

    All right: twice as many. Some right: one more than those. None right: half as many, and from
    the second time in a row pauses that double, so that text without copies costs little.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.length = min(most, FIRST_LENGTH)
        self._wait = 0
        self._misses = 0

    def next(self) -> int:
        """Return the number of tokens to guess now; 0 in a pause."""
        if self._wait:
            self._wait -= 1
            return 0
        return self.length

    def saw(self, guessed: int, right: int) -> None:
        """Take note of a guess."""
        if right == guessed:
            self.length = min(self.most, max(self.length, 2 * guessed))
        elif right:
            self.length = min(self.most, right + 1)
        else:
            self.length = max(1, self.length // 2)
        self._misses = 0 if right else self._misses + 1
        if self._misses > 1:
            self._wait = min(2 ** (self._misses - 1), LONGEST_WAIT)


class Guesser:
    """A running sequence's proposer and pace."""

    __slots__ = ("ends", "pace", "proposer")

    def __init__(
        self, bound: BoundProposer, sequence: TokenSequence, eos_ids: Iterable[int]
    ) -> None:
        self.proposer: Proposer | None = bound.kind(bound.bound, sequence)
        self.pace = Pace(bound.most)
        params = sequence.params
        self.ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}


class Speculation:
    """The proposers of one engine, and how they do."""

    def __init__(
        self,
        registry: Registry,
        config: Mapping[str, Any] | None,
        facts: ProposerContext,
        load: ModelLoader,
    ) -> None:
        """Bind the engine's own proposer, if `config` names one; it may `load` a model.

        Raises ValidationError.
        """
        self._registry = registry
        self._facts = facts
        self.max_model_len = facts.max_model_len  # less, if the cache holds less
        self._bound: dict[tuple[type[Proposer], StageParams], BoundProposer] = {}
        self.own: BoundProposer | None = None
        self._config: Mapping[str, Any] = {}  # the engine's own settings
        self.num_users = 0  # live requests that speculate
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.accepted_at: list[int] = []  # accepted tokens by their place in the guess
        if config:
            self._config = {key: value for key, value in config.items() if key != "method"}
            kind, params = self._checked(config, ENGINE_FIELD)
            bound = kind.bind(params, replace(facts, load=load))
            self.own = BoundProposer(kind, bound, params.num_speculative_tokens)

    # --- at admission -----------------------------------------------------------------------------

    def admit(self, request: Request, *, joint: bool) -> None:
        """Settle what guesses for a request, and say in its notes why nothing can.

        `joint`: its chain has a processor of vLLM's interface, which keeps count of tokens itself.
        """
        bound = self._wanted(request.params)
        if bound is None:
            return
        embeds = request.prompt_embeds is not None
        reason = _obstacle(bound, request.plan, joint=joint, embeds=embeds)
        if reason is not None:
            request.notes[REQUEST_FIELD] = f"no speculation: {reason}"
            return
        request.speculation = bound

    def enter(self, request: Request) -> None:
        """Count a request that runs."""
        self.num_users += request.speculation is not None

    def leave(self, request: Request) -> None:
        """Count a request that has ended."""
        self.num_users -= request.speculation is not None

    def _wanted(self, params: RequestParams) -> BoundProposer | None:
        asked = params.speculation
        if asked is None:
            return self.own
        if asked is False:
            return None
        given = {"method": asked} if isinstance(asked, str) else dict(asked)
        if self.own is not None:
            given.setdefault("method", self.own.kind.name)
        kind, checked = self._checked(given, REQUEST_FIELD, of_engine=False)
        key = kind, checked
        found = self._bound.get(key)
        if found is None:
            if kind.of_engine:
                assert self.own is not None
                bound = kind.rebind(self.own.bound, checked)
            else:
                bound = kind.bind(checked, self._facts)
            found = BoundProposer(kind, bound, checked.num_speculative_tokens)
            if len(self._bound) >= 256:
                self._bound.clear()
            self._bound[key] = found
        return found

    def _checked(
        self, given: Mapping[str, Any], field: str, *, of_engine: bool = True
    ) -> tuple[type[Proposer], Any]:
        values = dict(given)
        method = values.pop("method", None)
        if method is None:
            method = "draft_model" if values.get("model") else None
        kinds = self._registry.proposers
        names = {name: kind for kind in kinds.values() for name in (kind.name, *kind.aliases)}
        if method not in names:
            known = ", ".join(kinds) or "none"
            raise ValidationError(
                f"{field}.method must be one of {known}, got {method!r}"
                f"{did_you_mean(str(method), names)}",
                parameter=f"{field}.method",
                value=method,
            )
        kind: type[Proposer] = names[method]
        if kind.of_engine and not of_engine:
            if self.own is None or self.own.kind is not kind:
                raise ValidationError(
                    f"{field}.method {kind.name!r} needs an engine that was made with "
                    f"speculative_config={{'method': {kind.name!r}, ...}}",
                    parameter=f"{field}.method",
                    value=method,
                )
        if not of_engine and self.own is not None and self.own.kind is kind:
            values = {**self._config, **values}
        return kind, kind.validate(values, field)

    # --- at the step ------------------------------------------------------------------------------

    def matching(
        self, sequences: Iterable[TokenSequence], drafted: Mapping[Any, Drafted], depth: int
    ) -> list[TokenSequence]:
        """Return those whose newest token is their guess number `depth`, and which go on."""
        going = []
        for sequence in sequences:
            draft = drafted.get(sequence)
            if draft is None or len(draft.tokens) < depth:
                continue
            output = sequence.output_ids
            is_next = len(output) == draft.position + depth
            if is_next and output[-1] == draft.tokens[depth - 1] and not sequence.is_finished:
                going.append(sequence)
        return going

    def learn(self, drafted: Mapping[TokenSequence, Drafted]) -> None:
        """Count how the guesses of a step did."""
        for sequence, draft in drafted.items():
            if sequence.guesser is None:  # a driver wrote these tokens
                continue
            said = sequence.output_ids[draft.position :]
            right = 0
            for token, guess in zip(said, draft.tokens, strict=False):
                if token != guess:
                    break
                right += 1
            sequence.guesser.pace.saw(len(draft.tokens), right)
            self.num_drafts += 1
            self.num_draft_tokens += len(draft.tokens)
            self.num_accepted_tokens += right
            if len(self.accepted_at) < len(draft.tokens):
                self.accepted_at += [0] * (len(draft.tokens) - len(self.accepted_at))
            for place in range(right):
                self.accepted_at[place] += 1
            metrics = sequence.request.metrics
            if metrics is not None:
                metrics.num_draft_tokens += len(draft.tokens)
                metrics.num_accepted_draft_tokens += right

    def propose(self, sequences: Iterable[TokenSequence]) -> None:
        """Guess for the sequences that have a new token; their `draft` is for the next step."""
        groups: dict[int, list[tuple[TokenSequence, Ask]]] = {}
        for sequence in sequences:
            bound: BoundProposer | None = sequence.request.speculation
            if bound is None or sequence.draft:  # a driver knows better
                continue
            if sequence.status is not Status.RUNNING or sequence.is_pending:
                continue
            guesser = sequence.guesser or self._start(bound, sequence)
            if guesser is None or guesser.proposer is None:
                continue
            num = min(guesser.pace.next(), self._room(sequence))
            if num > 0:
                ask = Ask(guesser.proposer, sequence.prompt_ids, sequence.output_ids, num)
                groups.setdefault(id(bound), []).append((sequence, ask))
        for group in groups.values():
            self._ask(group)

    def close(self, sequence: TokenSequence) -> None:
        """Let the proposer of an ended sequence go."""
        guesser: Guesser | None = sequence.guesser
        if guesser is None or guesser.proposer is None:
            return
        proposer, guesser.proposer = guesser.proposer, None
        try:
            proposer.close()
        except Exception:
            log.exception("proposer %s failed to close", proposer.name)

    def _start(self, bound: BoundProposer, sequence: TokenSequence) -> Guesser | None:
        try:
            sequence.guesser = Guesser(bound, sequence, self._facts.eos_ids)
        except Exception as error:
            sequence.request.speculation = None
            self.num_users -= 1
            _tell(sequence, bound.kind.name, error)
        guesser: Guesser | None = sequence.guesser
        return guesser

    def _room(self, sequence: TokenSequence) -> int:
        """Return how many guessed tokens could be kept before the sequence must end."""
        limit = self.max_model_len - sequence.num_tokens
        asked = sequence.params.max_tokens
        if asked is not None:
            limit = min(limit, asked - len(sequence.output_ids))
        return limit - 1

    def _ask(self, group: Sequence[tuple[TokenSequence, Ask]]) -> None:
        kind = type(group[0][1].proposer)
        try:
            answers = list(kind.propose_all([ask for _, ask in group]))
            drafts = [
                self._usable(sequence, ask.k, answer)
                for (sequence, ask), answer in zip(group, answers, strict=True)
            ]
        except Exception as error:
            if len(group) > 1:  # so that only the culprits stop
                for item in group:
                    self._ask([item])
                return
            self._stop(group[0][0], error)
            return
        for (sequence, _), draft in zip(group, drafts, strict=True):
            sequence.draft = draft

    def _usable(self, sequence: TokenSequence, k: int, answer: Sequence[int]) -> Sequence[int]:
        """Cut a guess at `k` tokens and where the text would end: what follows is never said."""
        ends = sequence.guesser.ends
        size = self._facts.tokenizer_size
        kept: list[int] = []
        for token in answer:
            if len(kept) == k or token in ends:
                break
            if type(token) is not int or not 0 <= token < size:
                raise ValueError(f"it guessed {token!r}, which is no token id below {size}")
            kept.append(token)
        return kept

    def _stop(self, sequence: TokenSequence, error: Exception) -> None:
        name = sequence.guesser.proposer.name
        self.close(sequence)
        _tell(sequence, name, error)


def _tell(sequence: TokenSequence, name: str, error: Exception) -> None:
    said = f"speculation stopped: proposer {name!r} failed: {type(error).__name__}: {error}"
    sequence.request.notes.setdefault(REQUEST_FIELD, said)
    log.warning("request %s: %s", sequence.request.request_id, said)


def _obstacle(bound: BoundProposer, plan: Plan, *, joint: bool, embeds: bool) -> str | None:
    """Return why a request cannot speculate, or None."""
    if plan.driver is not None and plan.driver.kind.chooses:
        return f"driver {plan.driver.kind.name!r} chooses the tokens of several sequences together"
    if joint:
        return "a processor of vLLM's interface sees one token a step"
    if embeds and bound.kind.needs_prompt_ids:
        return f"proposer {bound.kind.name!r} reads token ids, and the prompt is embeddings"
    return None
