"""The checks a person would make by hand on a model that answers nonsense, or nothing.

Each returns `Check`s: what was seen, and what to do about it. All requests run in one batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...core.errors import DecodekitError, ValidationError
from ...core.outputs import RequestOutput
from ...core.params import RequestOutputKind, SamplingParams
from .options import Sampling
from .session import chat_request, steps_of

if TYPE_CHECKING:
    from ...core.engine import LLMEngine
    from ...core.tokenizer import Tokenizer

QUESTION = "What is the capital of France?"
STORY = "Write a short story about a lighthouse keeper."
MARKER = "decodekitmarker"  # an answer that can be found again in a rendered template
NUM_GREEDY, NUM_SAMPLED, NUM_LONG = 32, 32, 256
LIKELY_END = 0.1  # a first token that ends the answer so often deserves a warning
MIN_LOOP = 24  # tokens of a repeating tail, and
MIN_TURNS = 4  # how often it repeats


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. `level`: "ok", "info", "warn" or "error"."""

    name: str
    level: str
    seen: str
    remedy: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


def check_setup(engine: LLMEngine) -> Iterator[Check]:
    """Yield what can be seen without running the model: its facts, its template, its defaults."""
    yield from _facts(engine)
    yield from _template(engine)
    found = engine.sampling_defaults
    listed = ", ".join(f"{name}={value!r}" for name, value in found.items())
    seen = listed or "sets nothing; the defaults are temperature 1 and no truncation"
    yield Check("generation_config", "info", seen, data=dict(found))


def check_answers(engine: LLMEngine, sampling: Sampling) -> Iterator[Check]:
    """Run the model and yield what its answers tell; `sampling` is tried for repetition."""
    params = sampling.build(engine)
    yield Check("chain in force", "info", " > ".join(steps_of(engine.explain(params))))
    yield from _generations(engine, params)


def _facts(engine: LLMEngine) -> Iterator[Check]:
    parts, spec = engine.parts, engine.parts.spec
    yield Check(
        "model",
        "ok",
        f"{engine.model_name}: {spec.architecture}, {spec.num_parameters / 1e6:,.0f}M parameters, "
        f"{str(spec.dtype).removeprefix('torch.')} on {spec.device}, up to {engine.max_model_len} "
        f"tokens, forward by {parts.loaded.source.implementation}",
    )
    backend = type(parts.runner.backend)
    room = parts.pool.num_blocks * parts.pool.block_size
    yield Check("attention", "ok", f"{backend.name}, cache of {room:,} tokens")


# --- the template ---------------------------------------------------------------------------------


def _template(engine: LLMEngine) -> Iterator[Check]:
    tokenizer = engine.parts.tokenizer
    if tokenizer is None or not _has_template(engine):
        yield Check(
            "chat template",
            "warn",
            "the tokenizer has none, so chat is refused; the checks complete plain text",
            "give one with --chat-template, or use an instruct model",
        )
        return
    asked = [{"role": "user", "content": QUESTION}]
    answered = [*asked, {"role": "assistant", "content": MARKER}]
    try:
        opened = _render(engine, tokenizer, asked, True)
        closed = _render(engine, tokenizer, asked, False)
        whole = _render(engine, tokenizer, answered, False)
    except ValidationError as error:
        yield Check("chat template", "error", str(error), "give another one with --chat-template")
        return
    yield _generation_prompt(opened, closed)
    yield _bos(tokenizer, opened)
    yield _turn_end(engine, tokenizer, whole)


def _has_template(engine: LLMEngine) -> bool:
    tokenizer = engine.parts.tokenizer
    own = tokenizer is not None and bool(tokenizer.chat_template)
    return own or engine.config.chat_template is not None


def _render(
    engine: LLMEngine, tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]], is_open: bool
) -> str:
    from ...core.chat import render_chat  # jinja2, which collecting commands must not load

    return render_chat(
        messages,
        tokenizer,
        chat_template=engine.config.chat_template,
        add_generation_prompt=is_open,
    )


def _generation_prompt(opened: str, closed: str) -> Check:
    name = "generation prompt"
    if opened == closed:
        return Check(
            name,
            "error",
            "the template ignores add_generation_prompt, so the model is not told to answer",
            "give a template with `{% if add_generation_prompt %}` by --chat-template",
        )
    return Check(name, "ok", f"{opened.removeprefix(closed)!r}")


def _bos(tokenizer: Tokenizer, opened: str) -> Check:
    """Compare the BOS tokens in front of a rendered chat with those in front of plain text."""
    bos = tokenizer.bos_token_id
    adds = bos is not None and tokenizer.encode("a")[:1] == [bos]
    ids = tokenizer.encode(opened, add_special_tokens=False)
    count = 0
    while bos is not None and count < len(ids) and ids[count] == bos:
        count += 1
    if count > 1:
        return Check(
            "BOS",
            "error",
            f"the template writes it {count} times",
            "take all but one out of the template",
        )
    if count == 0 and adds:
        return Check(
            "BOS",
            "warn",
            "plain text gets one from the tokenizer, the template writes none",
            "begin the template with {{ bos_token }}, if the model was trained so",
        )
    return Check("BOS", "ok", "written once" if count else "none, as for plain text")


def _turn_end(engine: LLMEngine, tokenizer: Tokenizer, answered: str) -> Check:
    """Check that what the template puts behind an answer is what stops an answer."""
    name = "end token"
    _, found, after = answered.rpartition(MARKER)
    if not found:
        return Check(name, "warn", "the template rewrites or drops an assistant's message")
    ends = [token for token in tokenizer.encode(after, False) if token in tokenizer.special_ids]
    known = ", ".join(f"{tokenizer.text_of_token(i)!r} ({i})" for i in engine.parts.eos_ids)
    if not ends:
        return Check(
            name,
            "warn",
            f"the template ends an answer with {after!r}, which has no special token",
            "add a stop string with --stop",
        )
    seen = f"{tokenizer.text_of_token(ends[0])!r} ({ends[0]})"
    if ends[0] in engine.parts.eos_ids:
        return Check(name, "ok", f"{seen} stops an answer; all stop ids: {known}")
    return Check(
        name,
        "error",
        f"the template ends an answer with {seen}, which is not among the stop ids: "
        f"{known or 'none'}",
        f"add it with --stop-token-id {ends[0]}, or to eos_token_id of generation_config.json",
    )


# --- generations ----------------------------------------------------------------------------------


def _generations(engine: LLMEngine, params: SamplingParams) -> Iterator[Check]:
    limit = engine.config.max_logprobs
    best = SamplingParams(temperature=0, max_tokens=NUM_GREEDY, logprobs=20 if limit < 0 else limit)
    drawn = SamplingParams(temperature=1, max_tokens=NUM_SAMPLED, ignore_eos=True)
    seeded = drawn.clone()
    seeded.seed = 1234
    long = params.clone()
    long.n, long.max_tokens = 1, NUM_LONG
    try:
        question, story = _prompt(engine, QUESTION), _prompt(engine, STORY)
        jobs = {
            "greedy": (question, best),
            "unseeded 1": (story, drawn),
            "unseeded 2": (story, drawn),
            "seeded 1": (story, seeded),
            "seeded 2": (story, seeded),
            "long": (story, long),
        }
        outputs = _run(engine, jobs)
    except DecodekitError as error:
        yield Check("generation", "error", str(error))
        return
    broken = [f"{name}: {o.outputs[0].error}" for name, o in outputs.items() if o.outputs[0].error]
    if broken:
        yield Check("generation", "error", "; ".join(broken), "see the log with --log-level debug")
        return
    yield _not_empty(outputs["greedy"])
    yield _first_token(engine, outputs["greedy"])
    yield _samples(outputs)
    yield _loop(outputs["long"])


def _prompt(engine: LLMEngine, text: str) -> Any:
    if not _has_template(engine):
        return text
    return chat_request(engine, [{"role": "user", "content": text}])


def _run(
    engine: LLMEngine, jobs: Mapping[str, tuple[Any, SamplingParams]]
) -> dict[str, RequestOutput]:
    """Run the jobs together; return their outputs by name."""
    for name, (prompt, params) in jobs.items():
        own = params.clone()
        own.output_kind = RequestOutputKind.FINAL_ONLY
        engine.add_request(f"doctor: {name}", prompt, own)
    outputs = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request_id.removeprefix("doctor: ")] = output
    return outputs


def _not_empty(output: RequestOutput) -> Check:
    part = output.outputs[0]
    seen = f"{part.text!r} ({len(part.token_ids)} tokens, {part.finish_reason})"
    if part.text.strip():
        return Check("greedy answer", "ok", seen)
    return Check(
        "greedy answer",
        "error",
        f"empty: {seen}",
        "check that the model, its tokenizer and its chat template belong together",
    )


def _first_token(engine: LLMEngine, output: RequestOutput) -> Check:
    """Say how likely the first token ends the answer; exact where end ids are among the best."""
    part = output.outputs[0]
    after = f"after {_tail(output.prompt)}"
    if not part.logprobs:
        return Check("first token", "error", "there is none", "see the line above")
    entries = part.logprobs[0]
    ends = [entries[i].logprob for i in engine.parts.eos_ids if i in entries]
    chance = sum(map(math.exp, ends))
    shown = f"p = {chance:.2g}" if ends else f"p < {min(map(_chance, entries.values())):.1g}"
    data = {"probability": chance, "rendered": output.prompt}
    if part.token_ids[0] in engine.parts.eos_ids:
        return Check(
            "first token",
            "error",
            f"is an end token ({shown}) {after}",
            "compare the rendered template with the model card's; try --chat-template",
            data,
        )
    level = "warn" if chance > LIKELY_END else "ok"
    remedy = "set --min-tokens 1, or compare the template with the model card's"
    return Check(
        "first token", level, f"no end token ({shown}) {after}", remedy * (level == "warn"), data
    )


def _chance(entry: Any) -> float:
    return math.exp(entry.logprob)


def _tail(text: str | None, most: int = 400) -> str:
    text = text or ""
    return repr(text) if len(text) <= most else f"...{text[-most:]!r}"


def _samples(outputs: Mapping[str, RequestOutput]) -> Check:
    """Two draws without a seed must differ, two with one seed must agree."""
    ids = {name: list(output.outputs[0].token_ids) for name, output in outputs.items()}
    if ids["seeded 1"] != ids["seeded 2"]:
        return Check(
            "samples",
            "error",
            "two answers with one seed differ",
            "report it with the output of `decodekit doctor --json`",
        )
    if ids["unseeded 1"] == ids["unseeded 2"]:
        return Check(
            "samples",
            "error",
            f"two answers without a seed are the same {NUM_SAMPLED} tokens at temperature 1",
            "check the weights: the model leaves nothing to chance",
        )
    return Check("samples", "ok", "two without a seed differ, two with one seed agree")


def _loop(output: RequestOutput) -> Check:
    part = output.outputs[0]
    tokens = list(part.token_ids)
    loop = repeating_tail(tokens)
    if loop is None:
        return Check("repetition", "ok", f"no loop in {len(tokens)} tokens ({part.finish_reason})")
    return Check(
        "repetition",
        "warn",
        f"the last {loop.length} of {len(tokens)} tokens repeat {loop.period} "
        f"{'token' if loop.period == 1 else 'tokens'}: {_tail(part.text, 60)}",
        "raise --temperature or --repetition-penalty (1.1 is common)",
    )


@dataclass(frozen=True, slots=True)
class Loop:
    """A tail of `length` tokens that repeats every `period` tokens."""

    period: int
    length: int


def repeating_tail(tokens: Sequence[int]) -> Loop | None:
    """Return the repetition at the end with the shortest period that is long enough, or None."""
    for period in range(1, len(tokens) // MIN_TURNS + 1):
        length = period
        while length < len(tokens) and tokens[-length - 1] == tokens[-length - 1 + period]:
            length += 1
        if length >= max(MIN_LOOP, MIN_TURNS * period):
            return Loop(period, length)
    return None
