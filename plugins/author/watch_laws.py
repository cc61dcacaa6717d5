"""The laws of what only looks: stops and observers."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from ...core.batch import TapView
from ...core.errors import DecodekitError
from ...core.outputs import CompletionOutput
from ...core.params import SamplingParams
from ...core.stage import After, BindContext, Ending, Observer, Point, Stop, Tap, Verdict
from .report import BROKEN, KEPT, SKIPPED, Breach, NotTried, Outcome, Report
from .rows import make_context
from .toys import ByteTokens

VOCAB = 40
NUM_TOKENS = 24
LETTERS = 3  # so that tokens repeat


@dataclass(slots=True)
class Text:
    """What a stop sees of a sequence."""

    prompt_ids: tuple[int, ...]
    output_ids: list[int] = field(default_factory=list)


def check_stop(stop: Stop, request: Mapping[str, Any], context: Mapping[str, Any]) -> Report:
    """See `check.check_stop`."""
    laws: list[tuple[str, Callable[[], None]]] = []

    def binds() -> None:
        """`bind` returns a function for a request that asks for it."""
        if _check_of(stop, request, context) is None:
            raise Breach(f"bind returned None for a request with {dict(request)}: give parameters "
                         "under which it is active")  # fmt: skip

    def gives_verdicts() -> None:
        """The check returns a Verdict or None."""
        for tokens in _texts():
            _walk(_check_of(stop, request, context), tokens)

    def asks_alike_twice() -> None:
        """Asking twice about the same tokens gives the same answers."""
        for tokens in _texts():
            once = _walk(_check_of(stop, request, context), tokens)
            check = _check_of(stop, request, context)
            text = Text((1, 2))
            for place, token in enumerate(tokens):
                text.output_ids.append(token)
                for found in (_ask(check, text), _ask(check, text)):
                    if found != once[place]:
                        raise Breach(
                            f"asked twice after each token it says {found} after {place + 1} "
                            f"tokens, asked once {once[place]}: it counts its calls",
                            str(tokens[: place + 1]),
                        )

    def keeps_branches_apart() -> None:
        """One check serves every branch of a request, so it remembers none of them."""
        texts = _texts()
        for tokens, other in zip(texts, texts[1:], strict=False):
            alone = _walk(_check_of(stop, request, context), tokens)
            check = _check_of(stop, request, context)
            one, two = Text((1, 2)), Text((1, 2))
            found: list[Verdict | None] = []
            for a, b in zip(tokens, other, strict=True):
                one.output_ids.append(a)
                two.output_ids.append(b)
                found.append(_ask(check, one))
                _ask(check, two)
            if found != alone:
                place = next(i for i, pair in enumerate(zip(found, alone, strict=True))
                             if pair[0] != pair[1])  # fmt: skip
                raise Breach(
                    f"with another branch beside it, it said {found[place]} after {place + 1} "
                    f"tokens, alone {alone[place]}: it remembers what it was asked before",
                    str(tokens[: place + 1]),
                )

    def is_a_function_of_tokens() -> None:
        """A check that is asked for the first time says what one says that saw every token."""
        for tokens in _texts():
            verdicts = _walk(_check_of(stop, request, context), tokens)
            for place, known in enumerate(verdicts):
                fresh = _check_of(stop, request, context)
                found = _ask(fresh, Text((1, 2), tokens[: place + 1]))
                if found != known:
                    raise Breach(
                        f"after a preemption at {place + 1} tokens it says {found}, else {known}: "
                        "read sequence.output_ids, remember nothing",
                        str(tokens[: place + 1]),
                    )

    def changes_nothing() -> None:
        """The check leaves the tokens alone."""
        for tokens in _texts():
            check = _check_of(stop, request, context)
            text = Text((1, 2), list(tokens))
            _ask(check, text)
            if text.output_ids != tokens or text.prompt_ids != (1, 2):
                raise Breach("it changed the tokens that it was shown", str(tokens))

    laws = [
        ("binds", binds),
        ("verdicts", gives_verdicts),
        ("asks_twice", asks_alike_twice),
        ("branches", keeps_branches_apart),
        ("tokens_only", is_a_function_of_tokens),
        ("reads_only", changes_nothing),
    ]
    return _report(stop.name or type(stop).__name__, laws)


def check_observer(
    observer: Observer,
    request: Mapping[str, Any],
    wish: Mapping[str, Any] | None,
    context: Mapping[str, Any],
) -> Report:
    """See `check.check_observer`."""

    def order_of() -> Any:
        own = dict(context)
        if wish is not None:
            own["wish"] = observer.Params(**wish)
        order = observer.bind(_context(request, own))
        if order is None:
            raise Breach("bind returned None: give a request or a wish under which it is active")
        return order

    def measured(values: torch.Tensor, tokens: torch.Tensor) -> dict[str, Any]:
        order = order_of()
        taps = {tap: TapView(values.clone()) for tap in _points(observer.taps(order))}
        found = dict(observer.measure(order, taps, tokens))
        for tap, view in taps.items():
            if not torch.equal(view.logits, values):
                raise Breach(f"measure wrote into the logits of the tap {tap}")
        return found

    def binds() -> None:
        """`bind` returns a hashable order for a request that asks for it."""
        order = order_of()
        try:
            hash(order)
        except TypeError:
            raise Breach(f"bind returned {order!r}, which is not hashable") from None
        if not all(isinstance(tap, Tap | After) for tap in observer.taps(order)):
            raise Breach(f"taps returned {observer.taps(order)!r}, no set of Tap and After")

    def measures_rows_apart() -> None:
        """What is measured of a row does not depend on the others."""
        values, tokens = _logits()
        together = measured(values, tokens)
        for name, tensor in together.items():
            if not isinstance(tensor, torch.Tensor) or tensor.shape[0] != len(tokens):
                raise Breach(f"measure gave {name!r} no tensor with a place for each row")
        for row in range(len(tokens)):
            alone = measured(values[row : row + 1], tokens[row : row + 1])
            for name, tensor in alone.items():
                first, second = tensor[0], together[name][row]
                width = min(first.shape[0], second.shape[0]) if first.dim() else None
                if width is not None:  # lists may be padded to the longest
                    first, second = first[:width], second[:width]
                if not torch.allclose(first, second, equal_nan=True):
                    raise Breach(
                        f"{name!r} of a row is {second.tolist()} in a batch and {first.tolist()} "
                        "alone"
                    )

    def records_what_it_may() -> None:
        """`result` names fields of CompletionOutput, and can be asked at any time."""
        order = order_of()
        values, tokens = _logits()
        record = observer.open(order, ByteTokens(VOCAB))
        known = {item.name for item in fields(CompletionOutput)}
        for row in range(len(tokens)):
            found = measured(values[row : row + 1], tokens[row : row + 1])
            host = {name: tensor.cpu().numpy()[0] for name, tensor in found.items()}
            observer.record(record, int(tokens[row]), host)
            unknown = sorted(set(observer.result(record)) - known)
            if unknown:
                raise Breach(f"result gives {unknown[0]!r}, and CompletionOutput has no such field")
        observer.finish(record, Ending("toy", 0, "stop", len(tokens), -1.0))
        observer.result(record)

    def keeps_sequences_apart() -> None:
        """Records of two sequences share nothing."""
        order = order_of()
        values, tokens = _logits()
        one, two = observer.open(order, None), observer.open(order, None)
        before = copy.deepcopy(observer.result(two))
        found = measured(values[:1], tokens[:1])
        host = {name: tensor.cpu().numpy()[0] for name, tensor in found.items()}
        observer.record(one, int(tokens[0]), host)
        if repr(before) != repr(observer.result(two)):
            raise Breach("a token of one sequence changed the record of another")

    laws = [
        ("binds", binds),
        ("rows_apart", measures_rows_apart),
        ("records", records_what_it_may),
        ("sequences_apart", keeps_sequences_apart),
    ]
    return _report(observer.name or type(observer).__name__, laws)


# --- small parts ----------------------------------------------------------------------------------


def _report(subject: str, laws: Sequence[tuple[str, Callable[[], None]]]) -> Report:
    outcomes: list[Outcome] = []
    for name, test in laws:
        title = " ".join((test.__doc__ or "").split())
        try:
            test()
        except NotTried as reason:
            outcomes.append(Outcome(name, title, SKIPPED, str(reason)))
        except Breach as breach:
            outcomes.append(Outcome(name, title, BROKEN, breach.sentence, breach.example))
        except Exception as error:
            text = " ".join(str(error).split())
            sentence = f"it raised {type(error).__name__}: {text}"
            outcomes.append(Outcome(name, title, BROKEN, sentence))
        else:
            outcomes.append(Outcome(name, title, KEPT))
            continue
        if outcomes[-1].state == BROKEN and name == "binds":
            break  # nothing else can be tried
    return Report(subject, tuple(outcomes))


def _context(request: Mapping[str, Any], changes: Mapping[str, Any]) -> BindContext:
    params = SamplingParams(**{"max_tokens": NUM_TOKENS, **request}).snapshot()
    base = {"request": params, "tokenizer": ByteTokens(VOCAB), "prompt_ids": (1, 2)}
    return make_context(VOCAB, **{**base, "prompt_len": 2, **changes})


def _check_of(stop: Stop, request: Mapping[str, Any], changes: Mapping[str, Any]) -> Any:
    try:
        return stop.bind(_context(request, changes))
    except DecodekitError as error:
        raise Breach(f"bind refused a request with {dict(request)}: {error}") from None


def _texts() -> list[list[int]]:
    rng = random.Random(3)
    plain = [[rng.randrange(LETTERS) for _ in range(NUM_TOKENS)] for _ in range(4)]
    return [*plain, [1, 2, 3] * (NUM_TOKENS // 3), [4] * NUM_TOKENS, list(range(NUM_TOKENS))]


def _walk(check: Any, tokens: Sequence[int]) -> list[Verdict | None]:
    text = Text((1, 2))
    found = []
    for token in tokens:
        text.output_ids.append(token)
        found.append(_ask(check, text))
    return found


def _ask(check: Any, text: Text) -> Verdict | None:
    verdict = check(text)
    if verdict is not None and not isinstance(verdict, Verdict):
        raise Breach(f"the check returned {verdict!r}, which is neither a Verdict nor None")
    return verdict


def _points(points: frozenset[Point]) -> list[Point]:
    """Return what `measure` finds: for `Tap.EACH` the places after two stages."""
    stages = [After("temperature"), After("top_k")] if Tap.EACH in points else []
    return [*(point for point in points if point is not Tap.EACH), *stages]


def _logits() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    values = torch.randn(5, VOCAB, generator=generator) * 2
    values[1, ::3] = -torch.inf
    values[2, 1:] = -torch.inf
    tokens = torch.tensor([3, 1, 0, 7, 39])
    return values, tokens
