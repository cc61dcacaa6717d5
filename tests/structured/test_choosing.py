"""Which backend takes a grammar, and what a refusal says."""

import json
from typing import Any, ClassVar

import pytest

from decodekit.core.constraint import GrammarSpec, Refusal, Suited, Vocabulary
from decodekit.core.errors import ValidationError
from decodekit.core.registry import Registry
from decodekit.structured.choosing import Backends

WIDER = GrammarSpec("json", '{"description":"without what is refused"}')
OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED = {**OPEN, "additionalProperties": False}


def stub(name_: str, rank_: int, *refusals: Refusal, absent: str | None = None) -> Any:
    """Make a backend that refuses what it is told to."""

    class Stub:
        name: ClassVar[str] = name_
        aliases: ClassVar[tuple[str, ...]] = (f"{name_}-package",)
        rank: ClassVar[int] = rank_

        def __init__(self, vocabulary: Vocabulary, settings: Any) -> None: ...

        @classmethod
        def missing(cls) -> str | None:
            return absent

        def suit(self, spec: GrammarSpec) -> Suited:
            kept = spec if not refusals or refusals[0].what == spec.kind else WIDER
            return Suited(kept, refusals)

        def compile(self, spec: GrammarSpec) -> Any: ...

    return Stub


def backends(tiny: Vocabulary, *classes: Any) -> Backends:
    return Backends(tiny, {one.name: one for one in classes}, {})


def names(chosen: Backends, spec: GrammarSpec, *args: Any, **kwargs: Any) -> list[str]:
    return [candidate.name for candidate in chosen.candidates(spec, *args, **kwargs)]


STUBS = (("patient", 99), ("outlines", 30), ("guidance", 10), ("xgrammar", 20), ("eager", -1))


@pytest.mark.parametrize(
    ("kind", "text", "order"),
    [
        ("json", json.dumps(CLOSED), ["guidance", "xgrammar", "outlines"]),
        ("json", json.dumps(OPEN), ["guidance", "xgrammar", "outlines"]),
        ("json", "{}", ["guidance", "xgrammar", "outlines"]),
        ("json_object", '{"type":"object"}', ["guidance", "xgrammar", "outlines"]),
        ("grammar", 'root ::= "a"', ["xgrammar", "guidance", "outlines"]),
        ("regex", "a", ["guidance", "xgrammar", "outlines"]),
    ],
)
def test_auto_asks_in_the_order_that_suits_the_grammar(
    kind: str, text: str, order: list[str], tiny: Vocabulary
) -> None:
    chosen = backends(tiny, *(stub(name, rank) for name, rank in STUBS))

    assert names(chosen, GrammarSpec(kind, text)) == ["eager", *order, "patient"]


def test_the_built_in_backends_are_offered_by_the_catalogue(tiny: Vocabulary) -> None:
    offered = Registry.load(autoload=False).constraint_backends

    assert set(offered) >= {"trie", "automaton", "guidance", "xgrammar", "outlines"}
    chosen = Backends(tiny, offered, {})
    assert names(chosen, GrammarSpec("choice", '["a"]'))[0] == "trie"
    assert names(chosen, GrammarSpec("regex", "[a-c]+"))[0] == "automaton"


def test_aliases_are_the_packages_names(tiny: Vocabulary) -> None:
    offered = Registry.load(autoload=False).constraint_backends
    chosen = Backends(tiny, offered, {})

    for alias, name in (("llguidance", "guidance"), ("outlines_core", "outlines")):
        assert names(chosen, GrammarSpec("regex", "a"), alias) == [name]


def test_a_choice_is_the_tries_unless_the_request_itself_names_a_backend(
    tiny: Vocabulary,
) -> None:
    chosen = backends(tiny, stub("trie", 0), stub("xgrammar", 20))
    spec = GrammarSpec("choice", '["a"]')

    assert names(chosen, spec, "xgrammar", insist=False)[0] == "trie"
    assert names(chosen, spec, "xgrammar") == ["xgrammar"]
    assert names(chosen, GrammarSpec("regex", "a"), "xgrammar", insist=False) == ["xgrammar"]


def test_a_refusal_names_every_keyword_its_place_and_the_backends(tiny: Vocabulary) -> None:
    chosen = backends(
        tiny,
        stub("guidance", 10, Refusal("/properties/a", "uniqueItems", "not counted")),
        stub("xgrammar", 20, Refusal("/b", "not", "ignored"), Refusal("/c", "if", "ignored")),
    )

    with pytest.raises(ValidationError) as caught:
        names(chosen, GrammarSpec("json", "{}"))

    text = str(caught.value)
    for part in (
        "guidance: uniqueItems at /properties/a (not counted)",
        "xgrammar: not at /b (ignored)",
        "xgrammar: if at /c (ignored)",
        "strict=False",
    ):
        assert part in text
    assert caught.value.parameter == "json"


def test_without_strict_the_wider_specs_are_taken_guidance_first(tiny: Vocabulary) -> None:
    refusal = Refusal("/a", "not", "ignored")
    chosen = backends(tiny, stub("xgrammar", 20, refusal), stub("guidance", 10, refusal))

    first, second = chosen.candidates(GrammarSpec("json", "{}"), strict=False)

    assert (first.name, second.name) == ("guidance", "xgrammar")
    assert first.suited.spec is second.suited.spec is WIDER
    assert first.suited.refusals == (refusal,)


def test_without_strict_an_exact_backend_is_still_preferred(tiny: Vocabulary) -> None:
    chosen = backends(tiny, stub("guidance", 10, Refusal("/a", "not", "")), stub("third", 15))

    assert names(chosen, GrammarSpec("json", "{}"), strict=False) == ["third"]


def test_a_kind_that_a_backend_lacks_is_never_approximated(tiny: Vocabulary) -> None:
    chosen = backends(tiny, stub("trie", 0, Refusal("", "regex", "choices alone")))

    with pytest.raises(ValidationError, match=r"trie: regex \(choices alone\)"):
        names(chosen, GrammarSpec("regex", "a"), strict=False)


def test_what_is_not_installed_is_passed_over_and_told_when_named(tiny: Vocabulary) -> None:
    hint = "xgrammar is not installed; pip install decodekit[structured]"
    chosen = backends(tiny, stub("guidance", 10), stub("xgrammar", 20, absent=hint))
    spec = GrammarSpec("json", json.dumps(CLOSED))

    assert names(chosen, spec) == ["guidance"]
    with pytest.raises(ValidationError, match=r"pip install decodekit\[structured\]"):
        names(chosen, spec, "xgrammar")
    alone = backends(tiny, stub("xgrammar", 20, absent=hint))
    with pytest.raises(ValidationError, match=r"pip install decodekit\[structured\]"):
        names(alone, spec)


def test_an_unknown_backend_is_refused_with_the_list(tiny: Vocabulary) -> None:
    chosen = backends(tiny, stub("guidance", 10), stub("xgrammar", 20))

    with pytest.raises(ValidationError) as caught:
        names(chosen, GrammarSpec("regex", "a"), "lm-format-enforcer")

    assert "auto, guidance, xgrammar, guidance-package, xgrammar-package" in str(caught.value)
    assert caught.value.parameter == "structured_outputs.backend"
