"""What a backend makes of a spec: the exact rewrite, or the reasons against; and who takes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

from ..core.constraint import ConstraintBackend, GrammarSpec, Refusal, Suited
from ..core.errors import ValidationError, did_you_mean
from . import regex_syntax
from .ebnf_print import ebnf
from .exactness import KINDS, schema_refusals, text_refusals
from .regex_tree import EMPTY, Node, Rep, Set, nullable, printed
from .schema_grammar import Grammar
from .schema_normal import children_of, normal_form
from .schema_print import printed_schema
from .shapes import ANYTHING, Anything, Object, Schema, String
from .tag_suit import suited_tag

BOUNDED_SPACE = Rep(0, 8, Set(((0x09, 0x0A), (0x0D, 0x0D), (0x20, 0x20))))
LONGEST_EXPRESSION = 20_000  # of a whole schema, for outlines

# The order in which `auto` asks, by what is asked for; a name that is not here comes after, by
# its rank. A closed schema compiles fast with xgrammar and its masks are the cheapest; with counted
# characters they are the dearest.
_ORDER = {
    "choice": ("trie", "automaton", "guidance", "xgrammar", "outlines"),
    "regex": ("automaton", "guidance", "xgrammar", "outlines"),
    "json": ("guidance", "xgrammar", "outlines"),
    "json plain": ("xgrammar", "guidance", "outlines"),
    "json_object": ("guidance", "xgrammar", "outlines"),
    "grammar": ("xgrammar", "guidance"),
    "lark": ("xgrammar", "guidance"),
    "structural_tag": ("xgrammar",),
}
KNOWN = {"lm-format-enforcer": "no built-in backend; a plugin may register it"}


def suit(backend: str, spec: GrammarSpec) -> Suited:
    """Rewrite `spec` so that `backend` is exact, and name what it cannot honour exactly.

    Where something is refused the spec that is returned allows all that the asked one does, and
    more: what `strict=False` uses.
    """
    if spec.kind not in KINDS[backend]:
        reason = f"{backend} has no grammars of this kind"
        return Suited(spec, (Refusal("", spec.kind, reason),))
    if spec.kind in ("json", "json_object"):
        return _suited_schema(backend, spec)
    if spec.kind == "structural_tag":
        return suited_tag(spec, space_of(spec))
    return Suited(spec, tuple(text_refusals(backend, spec)))


@lru_cache(maxsize=256)
def _suited_schema(backend: str, spec: GrammarSpec) -> Suited:
    schema = normal_form(spec.text, spec.option("format") == "assert")
    refusals = schema_refusals(backend, schema)
    if backend == "guidance":
        words = printed_schema(schema)
        words = {} if words is True else words
        text = json.dumps(words, ensure_ascii=False, separators=(",", ":"))
        options = tuple(item for item in spec.options if item[0] != "format")
        return Suited(GrammarSpec(spec.kind, text, options), tuple(refusals))
    grammar = Grammar(schema, space_of(spec), recursive=backend == "xgrammar")
    refusals += [refusal for refusal in grammar.refusals if refusal not in refusals]
    if backend == "xgrammar":
        return Suited(GrammarSpec("grammar", ebnf(grammar)), tuple(refusals))
    return _suited_expression(spec, grammar, refusals)


def _suited_expression(spec: GrammarSpec, grammar: Grammar, refusals: list[Refusal]) -> Suited:
    if grammar.refusals:
        # A part that no expression says is left empty, so there is nothing wider to fall back on.
        return Suited(spec, tuple(refusals))
    text = printed(grammar.root)
    if len(text) > LONGEST_EXPRESSION:
        reason = (
            f"its regular expression is over the limit of {LONGEST_EXPRESSION:,} characters, "
            f"got {len(text):,}"
        )
        refusals.append(Refusal("", "the schema", reason))
    return Suited(GrammarSpec("regex", text), tuple(refusals))


def space_of(spec: GrammarSpec) -> Node:
    """The whitespace that JSON text may have in one place, as an expression."""
    pattern = spec.option("whitespace_pattern")
    if pattern is not None:
        tree = regex_syntax.parse(pattern, "whitespace_pattern")
        return tree if nullable(tree) else Rep(0, 1, tree)
    return EMPTY if spec.option("whitespace", "bounded") == "compact" else BOUNDED_SPACE


class Picked(NamedTuple):
    """Who compiles a spec, and what is not exact about it."""

    backend: ConstraintBackend
    suited: Suited
    approximate: tuple[str, ...] = ()  # JSON pointers, where `strict=False` asked for it


def pick(
    spec: GrammarSpec,
    backends: Iterable[Any],
    wanted: str = "auto",
    strict: bool = True,
    ready: Callable[[Any], ConstraintBackend] = lambda backend: backend,
) -> Picked:
    """Return the first backend that is exact for `spec`, in the order for what it asks.

    `backends` are backends or their classes, of which `ready` makes one. A backend that is named
    is never replaced by another. ValidationError lists every place that stands against it; with
    `strict=False` the best approximation is taken instead, and `approximate` says where.
    """
    asked = _asked(list(backends), wanted, spec)
    refused: list[tuple[str, Suited, Any]] = []
    for backend in asked:
        suited = ready(backend).suit(spec)
        if not suited.refusals:
            return Picked(ready(backend), suited)
        refused.append((backend.name, suited, backend))
    if not strict:
        for name, suited, backend in sorted(refused, key=lambda item: item[0] != "guidance"):
            if name in KINDS and spec.kind in KINDS[name] and suited.spec is not spec:
                pointers = tuple(dict.fromkeys(item.pointer for item in suited.refusals))
                return Picked(ready(backend), suited, pointers)
    _refuse(spec, [(name, suited.refusals) for name, suited, _ in refused])


def _asked(backends: Sequence[Any], wanted: str, spec: GrammarSpec) -> list[Any]:
    names = [backend.name for backend in backends]
    if wanted == "auto":
        order = _ORDER[_what(spec)]
        places = {name: place for place, name in enumerate(order)}
        ranked = sorted(backends, key=lambda item: (places.get(item.name, len(order)), item.rank))
        return [backend for backend in ranked if backend.missing() is None]
    for backend in backends:
        if wanted in (backend.name, *backend.aliases):
            missing = backend.missing()
            if missing is not None:
                raise ValidationError(missing, parameter="backend", value=wanted)
            return [backend]
    known = f"auto, {', '.join(names)}"
    more = f" ({wanted} has {KNOWN[wanted]})" if wanted in KNOWN else did_you_mean(wanted, names)
    raise ValidationError(
        f"backend must be one of {known}, got {wanted!r}{more}", parameter="backend", value=wanted
    )


def order_of(spec: GrammarSpec) -> tuple[str, ...]:
    """Names of backends in the order in which `auto` asks them for `spec`."""
    return _ORDER.get(_what(spec), ())


def _what(spec: GrammarSpec) -> str:
    if spec.kind != "json":
        return spec.kind
    schema = normal_form(spec.text, spec.option("format") == "assert")
    return "json plain" if _is_plain(schema) else "json"


def _is_plain(schema: Schema) -> bool:
    """Whether no value and no name is left open, and no string has a form or a length."""
    if schema.root == ANYTHING:
        return False
    return not any(
        isinstance(shape, Anything)
        or (isinstance(shape, Object) and shape.rest is not None)
        or (isinstance(shape, String) and (shape.patterns or shape.low or shape.high is not None))
        for shapes in schema.nodes[1:]
        for shape in shapes
    ) and not any(ANYTHING in children_of(shape) for shapes in schema.nodes[1:] for shape in shapes)


def _refuse(spec: GrammarSpec, refused: list[tuple[str, tuple[Refusal, ...]]]) -> NoReturn:
    """One sentence with every keyword, its place, and why each backend that was asked refuses."""
    if not refused:
        raise ValidationError(
            f"no backend for a constraint of kind {spec.kind!r} is installed; "
            "pip install decodekit[structured]",
            parameter="structured_outputs",
        )
    told = []
    for name, refusals in refused:
        reasons = "; ".join(
            f"{item.what} at {item.pointer or 'the root'}: {item.reason}" for item in refusals
        )
        told.append(f"{name} ({reasons})")
    field = "json" if spec.kind.startswith("json") else spec.kind
    raise ValidationError(
        f"{field} cannot be enforced exactly by {', '.join(told)}; "
        "strict=False allows an approximation where there is one",
        parameter=field,
        value=spec.text,
    )
