"""What a backend makes of a spec: the exact rewrite, or the reasons against; who is asked first."""

from __future__ import annotations

import json
from functools import lru_cache

from ..core.constraint import GrammarSpec, Refusal, Suited
from . import regex_syntax
from .ebnf_print import ebnf
from .exactness import KINDS, schema_refusals, text_refusals
from .regex_tree import EMPTY, Node, Rep, Set, nullable, printed
from .schema_grammar import Grammar
from .schema_normal import normal_form
from .schema_print import printed_schema
from .tag_suit import suited_tag

BOUNDED_SPACE = Rep(0, 8, Set(((0x09, 0x0A), (0x0D, 0x0D), (0x20, 0x20))))
LONGEST_EXPRESSION = 20_000  # of a whole schema, for outlines

# The order in which `auto` asks, by what is asked for; a name that is not here comes after, by
# its rank. For schemas guidance compiles faster than xgrammar, and its masks are cheaper inside
# strings, which is where most tokens of a document are.
_ORDER = {
    "choice": ("trie", "automaton", "guidance", "xgrammar", "outlines"),
    "regex": ("automaton", "guidance", "xgrammar", "outlines"),
    "json": ("guidance", "xgrammar", "outlines"),
    "json_object": ("guidance", "xgrammar", "outlines"),
    "grammar": ("xgrammar", "guidance"),
    "lark": ("xgrammar", "guidance"),
    "structural_tag": ("xgrammar",),
}


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


def order_of(spec: GrammarSpec) -> tuple[str, ...]:
    """Names of our backends in the order in which `auto` asks them for `spec`."""
    return _ORDER.get(spec.kind, ())
