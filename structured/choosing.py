"""Which backend takes a grammar: the first installed one that is exact, or a refusal that says why.

The choice depends on the grammar and on what is installed, never on what ran before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from threading import Lock
from typing import Any, NamedTuple

from ..core.constraint import ConstraintBackend, GrammarSpec, Refusal, Suited, Vocabulary
from ..core.errors import ValidationError, did_you_mean
from .suit import order_of

AUTO = "auto"
_FIELD = "structured_outputs.backend"
_MOST_NAMED = 8  # refusals that an error spells out


class Candidate(NamedTuple):
    """A backend, ready for the vocabulary, and what it makes of a spec."""

    backend: ConstraintBackend
    suited: Suited

    @property
    def name(self) -> str:
        """The backend's name."""
        return self.backend.name


class Backends:
    """The grammar compilers of one engine, each made at its first use."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        classes: Mapping[str, type[ConstraintBackend]],
        settings: Mapping[str, Any],
    ) -> None:
        self._vocabulary = vocabulary
        self._classes = dict(classes)
        self._settings = dict(settings)
        self._made: dict[str, ConstraintBackend] = {}
        self._lock = Lock()

    def candidates(
        self, spec: GrammarSpec, wanted: str = AUTO, *, strict: bool = True, insist: bool = True
    ) -> Iterator[Candidate]:
        """Yield the backends that may compile `spec`, best first; at least one.

        wanted: a name, an alias or "auto". A named backend never gives way to another, but for a
        choice: without `insist` (the name is only the engine's default) that is the trie's.
        strict: False takes what allows all that is asked for and more, where nothing is exact; its
            refusals are in `suited`.

        Raises ValidationError with every keyword that stands in the way, by its JSON pointer.
        """
        if wanted != AUTO and spec.kind == "choice" and not insist:
            wanted = AUTO
        names = self._ordered(spec) if wanted == AUTO else [self._installed(wanted)]
        refused: list[Candidate] = []
        found = False
        for name in names:
            backend = self._get(name)
            candidate = Candidate(backend, backend.suit(spec))
            if candidate.suited.refusals:
                refused.append(candidate)
            else:
                found = True
                yield candidate
        if found:
            return
        able = [candidate for candidate in refused if candidate.suited.spec != spec]
        able.sort(key=lambda candidate: candidate.name != "guidance")
        if strict or not able:
            self._refuse(spec, refused, bool(able))
        yield from able

    @property
    def names(self) -> list[str]:
        """Every name that a request may give, aliases last."""
        aliases = [alias for one in self._classes.values() for alias in one.aliases]
        return [*self._classes, *aliases]

    def close(self) -> None:
        """Close the backends that have something to close."""
        for backend in self._made.values():
            close = getattr(backend, "close", None)
            if close is not None:
                close()

    def _ordered(self, spec: GrammarSpec) -> list[str]:
        """Names of what is installed: ours as suits the grammar, others by rank around them."""
        ours = {name: place for place, name in enumerate(order_of(spec))}

        def place(name: str) -> tuple[float, int, str]:
            rank = self._classes[name].rank
            before = -1.0 if rank < 0 else float(len(ours))
            return (ours.get(name, before), rank, name)

        installed = (name for name, one in self._classes.items() if one.missing() is None)
        return sorted(installed, key=place)

    def _installed(self, wanted: str) -> str:
        for name, one in self._classes.items():
            if wanted == name or wanted in one.aliases:
                hint = one.missing()
                if hint is not None:
                    raise ValidationError(
                        f"{_FIELD} {wanted!r} cannot be used: {hint}",
                        parameter=_FIELD,
                        value=wanted,
                    )
                return name
        known = [AUTO, *self.names]
        raise ValidationError(
            f"{_FIELD} must be one of {', '.join(known)}, got {wanted!r}"
            f"{did_you_mean(wanted, known)}",
            parameter=_FIELD,
            value=wanted,
        )

    def _get(self, name: str) -> ConstraintBackend:
        with self._lock:
            made = self._made.get(name)
            if made is None:
                made = self._made[name] = self._classes[name](self._vocabulary, self._settings)
            return made

    def _refuse(self, spec: GrammarSpec, refused: Sequence[Candidate], can_widen: bool) -> None:
        parts = [(c.name, refusal) for c in refused for refusal in c.suited.refusals]
        # Whoever does not know the kind at all is named only if nobody does.
        tried = [part for part in parts if part[1].what != spec.kind] or parts
        shown = "; ".join(f"{name}: {said(refusal)}" for name, refusal in tried[:_MOST_NAMED])
        if len(tried) > _MOST_NAMED:
            shown += f"; and {len(tried) - _MOST_NAMED} more"
        hints = [hint for one in self._classes.values() if (hint := one.missing())]
        text = f"{spec.kind} cannot be enforced exactly ({shown or 'no backend is installed'})"
        if can_widen:
            text += "; strict=False generates approximately and checks the text"
        if hints:
            text += f"; {'; '.join(hints)}"
        raise ValidationError(text, parameter=spec.kind, value=spec.text)


def said(refusal: Refusal) -> str:
    """One refusal as part of a sentence."""
    where = f" at {refusal.pointer}" if refusal.pointer else ""
    return f"{refusal.what}{where} ({refusal.reason})"
