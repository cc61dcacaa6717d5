"""Run a replay bundle again and say whether the tokens are the same, and what differs if not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .bundle import Bundle, EngineFacts
from .errors import ValidationError
from .outputs import RequestOutput
from .params import RequestOutputKind, SamplingParams
from .progress import Progress

if TYPE_CHECKING:
    from .llm import LLM

OPEN_ENDINGS = (None, "abort")  # the recorded run was cut short from outside
NOTHING = "nothing"


class Difference(NamedTuple):
    """One fact that is not as it was."""

    what: str  # such as "versions.torch" or "plan.fingerprint"
    recorded: Any
    here: Any

    def __str__(self) -> str:
        return f"{self.what}: recorded {self.recorded}, here {self.here}"


class TokenDifference(NamedTuple):
    """Where the tokens of one output part."""

    output: int  # its index
    position: int
    recorded: int | None  # None: the output had ended
    here: int | None
    recorded_text: str = ""
    here_text: str = ""

    def __str__(self) -> str:
        then, now = _named(self.recorded, self.recorded_text), _named(self.here, self.here_text)
        where = f"output {self.output} parts at position {self.position}"
        return f"{where}: recorded {then}, here {now}"


def _named(token: int | None, text: str) -> str:
    if token is None:
        return "the end"
    return f"token {token}" + (f" ({text!r})" if text else "")


@dataclass(frozen=True)
class Replay:
    """What came of running a bundle again; `print(replay)` says it in words."""

    bundle: Bundle
    output: RequestOutput
    tokens: tuple[TokenDifference, ...]  # the first of each output that parts
    endings: tuple[Difference, ...]  # outputs with equal tokens that ended otherwise
    differences: tuple[Difference, ...]  # of versions, model, engine, plugins and plan

    @property
    def same(self) -> bool:
        """Whether every output has the same tokens and the same end."""
        return not self.tokens and not self.endings

    def __str__(self) -> str:
        outputs = self.bundle.data["outputs"]
        count = sum(len(each["token_ids"]) for each in outputs)
        told = f"{count} tokens of {len(outputs)} output{'' if len(outputs) == 1 else 's'}"
        lines = [f"same: {told}"] if self.same else [f"not the same ({told} were recorded)"]
        lines += [f"  {each}" for each in (*self.tokens, *self.endings)]
        if self.differences:
            lines.append("other than recorded:")
            lines += [f"  {each}" for each in self.differences]
        elif not self.same:
            lines.append("versions, model, settings and plan are as recorded")
        return "\n".join(lines)


def replay(
    llm: LLM,
    source: Bundle | Mapping[str, Any] | str | Path,
    *,
    prompt: Any = None,
    fields: Mapping[str, Any] | None = None,
) -> Replay:
    """Run a bundle on `llm` and compare.

    `fields` and `prompt` give what the bundle could not hold; ValidationError if any is missing.
    """
    bundle = Bundle.read(source)
    given = dict(fields or {})
    missing = [
        (name, what)
        for name, what in bundle.left_out.items()
        if name not in given and not (name == "prompt" and prompt is not None)
    ]
    if missing:
        name, what = missing[0]
        raise ValidationError(
            f"the bundle leaves out {name} ({what}), which a file cannot hold; "
            f"give it again: replay(bundle, {name}=...)",
            parameter=name,
            value=what,
        )
    asked = bundle.fields | given
    recorded = bundle.data["outputs"]
    if any(each["finish_reason"] in OPEN_ENDINGS for each in recorded):
        asked["max_tokens"] = max((len(each["token_ids"]) for each in recorded), default=0) or 1
    params = SamplingParams(**asked)
    params.output_kind = RequestOutputKind.FINAL_ONLY
    engine = llm.llm_engine
    request_id = engine.add_request(
        f"replay-{next(llm.request_counter)}",
        bundle.data["prompt_token_ids"] if prompt is None else prompt,
        params,
        key=bundle.key,
    )
    with Progress(False) as progress:
        (output,) = llm._run([request_id], progress)
    assert output.plan is not None
    facts = EngineFacts.of(engine.parts).described()
    plan = Bundle.of(output).data["plan"]
    return Replay(
        bundle=bundle,
        output=output,
        tokens=tuple(_token_differences(recorded, output, _texts(engine.parts.tokenizer))),
        endings=tuple(_ending_differences(recorded, output)),
        differences=tuple(_fact_differences(bundle.data, {**facts, "plan": plan})),
    )


def _pairs(
    recorded: Sequence[Mapping[str, Any]], output: RequestOutput
) -> Iterator[tuple[Any, Any]]:
    here = {part.index: part for part in output.outputs}
    for each in recorded:
        if each["index"] in here:
            yield each, here[each["index"]]


def _texts(tokenizer: Any) -> Callable[[int | None], str]:
    """Return what gives the text of a token, "" where nothing knows it."""

    def text(token: int | None) -> str:
        known = tokenizer is not None and token is not None and tokenizer.has_token(token)
        return str(tokenizer.text_of_token(token)) if known else ""

    return text


def _token_differences(
    recorded: Sequence[Mapping[str, Any]], output: RequestOutput, text: Callable[[int | None], str]
) -> Iterator[TokenDifference]:
    for then, now in _pairs(recorded, output):
        ids = now.token_ids
        if then["finish_reason"] in OPEN_ENDINGS:
            ids = ids[: len(then["token_ids"])]
        for position, (old, new) in enumerate(zip_longest(then["token_ids"], ids)):
            if old != new:
                yield TokenDifference(then["index"], position, old, new, text(old), text(new))
                break


def _ending_differences(
    recorded: Sequence[Mapping[str, Any]], output: RequestOutput
) -> Iterator[Difference]:
    for then, now in _pairs(recorded, output):
        if then["finish_reason"] in OPEN_ENDINGS or list(now.token_ids) != then["token_ids"]:
            continue
        for name in ("finish_reason", "stop_reason", "error"):
            if then[name] != getattr(now, name):
                yield Difference(f"outputs[{then['index']}].{name}", then[name], getattr(now, name))
    if len(recorded) != len(output.outputs):
        yield Difference("number of outputs", len(recorded), len(output.outputs))


def _fact_differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    same_files = then["model"]["digest"] == now["model"]["digest"] is not None
    for group in ("versions", "model", "engine", "plugins"):
        for name in dict.fromkeys((*then[group], *now[group])):
            old, new = then[group].get(name, NOTHING), now[group].get(name, NOTHING)
            is_place = group == "model" and name in ("name", "kind")  # of files that are the same
            if old != new and not (is_place and same_files):
                yield Difference(f"{group}.{name}", old, new)
    for name in ("fingerprint", "profile"):
        if then["plan"][name] != now["plan"][name]:
            yield Difference(f"plan.{name}", then["plan"][name], now["plan"][name])
    for old, new in zip_longest(then["plan"]["order"], now["plan"]["order"]):
        if _shown(old) != _shown(new):
            yield Difference("plan.order", _shown(old), _shown(new))


def _shown(step: Mapping[str, Any] | None) -> str:
    if step is None:
        return NOTHING
    values = ", ".join(f"{name}={value!r}" for name, value in step["params"].items())
    return f"{step['id']}({values})"
