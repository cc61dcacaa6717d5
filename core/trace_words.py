"""A trace in words: why a token won, lost or was removed, and the lines of its printed form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import ValidationError, did_you_mean

if TYPE_CHECKING:
    from .plan_report import PlanStep
    from .trace_report import StageEffect, TokenPath, Trace, TracePosition

ON_TAKEN = "although no stage left it alive (see the plan's notes)"


def explain(trace: Trace, token: str | int, position: int | None) -> str:
    """Answer `Trace.why`."""
    if trace.level != "tokens":
        raise ValidationError(
            f"the trace has level {trace.level!r}, which keeps nothing of single tokens; ask for "
            "trace='tokens'",
            parameter="trace",
            value=trace.level,
        )
    if not trace.positions:
        raise ValidationError(
            "the trace has no position" + (f": {trace.error}" if trace.error else ""),
            parameter="position",
        )
    if position is not None and not 0 <= position < len(trace):
        raise ValidationError(
            f"position must be in [0, {len(trace)}), got {position}",
            parameter="position",
            value=position,
        )
    number = _id_of(trace, token, position)
    if position is None:
        position = _closest(trace, number)
    asked = token if isinstance(token, str) else ""
    return sentence(trace, trace[position], number, asked)


def sentence(trace: Trace, at: TracePosition, token: int, asked: str = "") -> str:
    """Say what became of an id, of the text `asked` if it was not followed, at one position."""
    path = at.path(token)
    name = token_name(token, path.text if path is not None else asked or _text_of(trace, token))
    where = f"at position {at.position}"
    if path is None:
        return _unfollowed(trace, at, token, f"{name} {where}")
    if path.killer is not None:
        text = _removed(trace, at, path, name, where)
        return f"{text} It was chosen all the same, {ON_TAKEN}." if token == at.token else text
    picker = repr(trace.picker.id)
    left = at.effects[-1].alive_after if at.effects else at.alive
    start = f"{_standing(path, 0)} before every stage"
    end = f"rank {path.ranks[-1]:,} of {left:,} ({_share(path, -1)}) at the end"
    story = f"{start}, {end}{_moves(path, trace)}" if trace.steps else start
    if token == at.token:
        return f"{name} was chosen {where} by {picker}: {story}."
    if at.token is None:
        return f"{name} was alive {where}, {start}, but the step failed."
    winner = at.path(at.token)
    against = ""
    if winner is not None and winner.killer is None:
        against = f" (rank {winner.ranks[-1]:,}, {_share(winner, -1)})"
    won = token_name(at.token, at.text)
    return f"{name} stayed alive {where} and lost to {won}{against}, which {picker} chose: {story}."


def _removed(trace: Trace, at: TracePosition, path: TokenPath, name: str, where: str) -> str:
    if path.killer == trace.points[0]:
        return f"{name} had no chance {where}: the model itself gave it -inf."
    assert path.killer is not None
    place = trace.points.index(path.killer)
    step, effect = trace.step(path.killer), at.effects[place - 1]
    kept = f"{effect.alive_after:,} of {effect.alive_before:,} tokens"
    text = (
        f"{name} was removed by {stage_name(step)} {where}, which left {kept} alive; it was "
        f"{_standing(path, 0)} before every stage"
    )
    same = path.ranks[0] == path.ranks[place - 1] and path.probs[0] == path.probs[place - 1]
    if place > 1 and not same and path.ranks[place - 1] is not None:
        text += f" and {_standing(path, place - 1)} before {path.killer!r}"
    return f"{text}."


def _unfollowed(trace: Trace, at: TracePosition, token: int, what: str) -> str:
    """Speak of a token that was never among the best at any point."""
    top = f"it was among the best {trace.top} at no point"
    try:
        killer = at.killer(token, trace.points)
    except LookupError:
        raise ValidationError(
            f"token id must be in [0, {trace.vocab_size}), got {token}",
            parameter="token",
            value=token,
        ) from None
    if killer == trace.points[0]:
        return f"{what} had no chance: the model itself gave it -inf."
    if killer is not None:
        return f"{what} was removed by {stage_name(trace.step(killer))}; {top}."
    if at.token is None:
        return f"{what} stayed alive, but the step failed; {top}."
    won = token_name(at.token, at.text)
    return f"{what} stayed alive and lost to {won}, which {trace.picker.id!r} chose; {top}."


def _id_of(trace: Trace, token: str | int, position: int | None) -> int:
    """Return the id that is meant: one that was followed and reads so, or the text's own token."""
    if isinstance(token, int):
        return token
    places = trace.positions if position is None else (trace[position],)
    texts = {path.id: path.text for each in places for path in each.tokens}
    exact = [number for number, text in texts.items() if text == token]
    close = [number for number, text in texts.items() if text.strip() == token.strip() != ""]
    for found in (exact, close):
        if len(found) == 1:
            return found[0]
    if trace.encode is None:
        known = {path.text for each in places for path in each.tokens}
        raise ValidationError(
            f"no token {token!r} was followed, and the trace has no tokenizer to look it up; give "
            f"its id{did_you_mean(token, known)}",
            parameter="token",
            value=token,
        )
    ids = trace.encode(token)
    if len(ids) != 1:
        raise ValidationError(
            f"{token!r} is {len(ids)} tokens ({', '.join(map(str, ids)) or 'none'}); ask for one "
            "of these ids, or mind the space in front of a word",
            parameter="token",
            value=token,
        )
    return ids[0]


def _closest(trace: Trace, token: int) -> int:
    """Return the position at which a token was most probable before every stage."""
    best, found = -1.0, 0
    for place, each in enumerate(trace.positions):
        path = each.path(token)
        if path is not None and path.probs[0] > best:
            best, found = path.probs[0], place
    return found


def _text_of(trace: Trace, token: int) -> str:
    return next(
        (path.text for each in trace.positions for path in each.tokens if path.id == token), ""
    )


def _moves(path: TokenPath, trace: Trace) -> str:
    """Name the stage that took the first rank away from a token, or gave it."""
    for place, step in enumerate(trace.steps, start=1):
        before, after = path.ranks[place - 1], path.ranks[place]
        if before == 1 and after is not None and after > 1:
            return f"; {stage_name(step)} took the first rank from it"
        if after == 1 and before is not None and before > 1:
            return f"; {stage_name(step)} put it in front"
    return ""


def _standing(path: TokenPath, place: int) -> str:
    return f"rank {path.ranks[place]:,} ({_share(path, place)})"


def _share(path: TokenPath, place: int) -> str:
    return share(path.probs[place])


# --- small words ----------------------------------------------------------------------------------


def share(value: float) -> str:
    """Write a probability: "31.2 %", "<0.01 %"."""
    percent = 100 * value
    if percent and percent < 0.01:
        return "<0.01 %"
    digits = 0 if percent >= 99.95 else 1 if percent >= 1 else 2
    return f"{percent:.{digits}f} %"


def duration(seconds: float) -> str:
    """Write a time: "12 µs", "3.4 ms"."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def token_name(token: int, text: str) -> str:
    """Name a token by its text, or by its id where it has none."""
    return repr(text) if text else f"token {token}"


def stage_name(step: PlanStep) -> str:
    """Name a stage with what it was given: "'top_k' (k=1)"."""
    given = {k: v for k, v in step.params.items() if step.provenance.get(k) != "default"}
    values = ", ".join(f"{name}={value!r}" for name, value in given.items())
    return f"{step.id!r} ({values})" if values else repr(step.id)


def position_line(trace: Trace, at: TracePosition) -> str:
    """Write the head of a position."""
    if at.token is None:
        return f"  {at.position}. failed ({at.alive:,} alive before every stage)"
    line = f"  {at.position}. {token_name(at.token, at.text)}"
    path = at.path(at.token)
    if path is not None and path.ranks[0] is not None:
        line += f", rank {path.ranks[0]} ({share(path.probs[0])}) before every stage"
    return line


def effect_line(step: PlanStep, effect: StageEffect) -> str:
    """Write the effect of a stage in one line."""
    parts = [f"{effect.alive_before:,} -> {effect.alive_after:,} alive"]
    if effect.removed:
        parts.append(f"{share(effect.removed)} removed")
    parts.append(f"entropy {effect.entropy_before:.2f} -> {effect.entropy_after:.2f}")
    if effect.argmax_changed:
        parts.append("another token in front")
    parts.append(duration(effect.seconds))
    return f"{stage_name(step)}: {', '.join(parts)}"
