"""What each library would get wrong, and the tables of our own programs."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch

from decodekit.core.constraint import CompiledGrammar, ConstraintBackend, Matcher, Vocabulary
from decodekit.core.errors import ValidationError
from decodekit.structured.automaton import AutomatonBackend
from decodekit.structured.batch_fill import BatchFiller
from decodekit.structured.guidance import GuidanceBackend
from decodekit.structured.outlines import OutlinesBackend
from decodekit.structured.trie import TrieBackend
from decodekit.structured.xgrammar import XGrammarBackend

Legal = Callable[[Matcher], set[int]]
END = 1
LIBRARIES = ("guidance", "xgrammar", "outlines")
OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def takes(program: CompiledGrammar, vocabulary: Vocabulary, text: str) -> bool:
    """Whether a program takes a whole text in the tokenizer's spelling."""
    matcher = program.matcher([END])
    return all(map(matcher.accept, vocabulary.encode(text))) and matcher.accept(END)


@pytest.mark.parametrize(
    "backend",
    [TrieBackend, AutomatonBackend, GuidanceBackend, XGrammarBackend, OutlinesBackend],
)
def test_each_is_a_constraint_backend(backend: Any, tiny: Vocabulary) -> None:
    made = backend(tiny, {})

    assert isinstance(made, ConstraintBackend) and backend.missing() is None


def test_importing_the_backends_imports_no_library() -> None:
    code = (
        "import sys; from decodekit.structured import guidance, outlines, xgrammar, compiler; "
        "print([n for n in ('xgrammar', 'llguidance', 'outlines_core') if n in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert shown.stdout.strip() == "[]"


def test_a_missing_package_has_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in (GuidanceBackend, XGrammarBackend, OutlinesBackend):
        monkeypatch.setattr(f"{backend.__module__}.find_spec", lambda name: None)

        assert "pip install decodekit[structured]" in str(backend.missing())


# --- whitespace -----------------------------------------------------------------------------------

COMPACT, DUMPS = '{"a":1,"b":true}', '{"a": 1, "b": true}'
WIDE, TOO_WIDE = '{  "a":\n\n1,"b"  : true }', f'{{"a":{" " * 9}1,"b":true}}'
POLICIES = {
    "bounded": (True, True, True, False),
    "compact": (True, False, False, False),
    "json_dumps": (None, True, False, False),
}


@pytest.mark.parametrize("backend", LIBRARIES)
@pytest.mark.parametrize("policy", POLICIES)
def test_whitespace_follows_the_policy(
    backend: str, policy: str, compile_with: Any, tiny: Vocabulary
) -> None:
    program = compile_with(backend, "json", json.dumps(OBJECT), whitespace=policy)

    for text, wanted in zip((COMPACT, DUMPS, WIDE, TOO_WIDE), POLICIES[policy], strict=True):
        if wanted is not None:
            assert takes(program, tiny, text) == wanted, text


@pytest.mark.parametrize("backend", ["guidance", "outlines"])
def test_a_whitespace_pattern_of_ones_own(
    backend: str, compile_with: Any, tiny: Vocabulary
) -> None:
    program = compile_with(backend, "json", json.dumps(OBJECT), whitespace_pattern="[ ]{0,3}")

    assert takes(program, tiny, '{"a":   1,"b":true}')
    assert not takes(program, tiny, '{"a":\n1,"b":true}')


def test_xgrammar_refuses_a_whitespace_pattern(compile_with: Any) -> None:
    with pytest.raises(ValidationError, match="guidance and outlines have it"):
        compile_with("xgrammar", "json", "{}", whitespace_pattern="[ ]*")


# --- traps ----------------------------------------------------------------------------------------


def test_outlines_keeps_what_goes_on_after_an_end(compile_with: Any, tiny: Vocabulary) -> None:
    number = compile_with("outlines", "regex", r"-?[0-9]+(?:\.[0-9]+)?")
    names = compile_with("outlines", "choice", '["ion","ion_delta","ion_delta_orbit"]')

    assert all(takes(number, tiny, text) for text in ("1", "-12", "12.5"))
    assert not takes(number, tiny, "12.")
    assert all(takes(names, tiny, text) for text in ("ion", "ion_delta", "ion_delta_orbit"))


def test_outlines_takes_choices_with_every_sign(compile_with: Any, tiny: Vocabulary) -> None:
    signs = [chr(code) for code in range(1, 128)] + ["é", "😀", "a-b&&[c]~", " #"]
    program = compile_with("outlines", "choice", json.dumps(signs))

    assert all(takes(program, tiny, sign) for sign in signs)
    assert not takes(program, tiny, "ab")


def test_xgrammar_leaves_open_objects_open(compile_with: Any, tiny: Vocabulary) -> None:
    program = compile_with("xgrammar", "json", '{"type":"object"}')

    assert takes(program, tiny, '{"a":[1,{}]}')


def test_a_schema_that_is_dear_for_xgrammar_is_compiled_as_it_goes(
    compile_with: Any, tiny: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decodekit.structured.xgrammar.EAGER_SECONDS", 0.0)
    program = compile_with("xgrammar", "json", '{"type":"object","properties":{"a":{}}}')

    assert takes(program, tiny, '{"a":1,"b":"x"}')
    assert not takes(program, tiny, '{"a":1,"b":x}')


def test_guidance_and_xgrammar_read_lark_and_ebnf(compile_with: Any, tiny: Vocabulary) -> None:
    for backend in ("guidance", "xgrammar"):
        lark = compile_with(backend, "lark", 'start: "a" B\nB: /[0-9]{2}/')
        ebnf = compile_with(backend, "grammar", 'root ::= "a" b+\nb ::= "(" root? ")"')

        assert takes(lark, tiny, "a12") and not takes(lark, tiny, "a1")
        assert takes(ebnf, tiny, "a(a())()") and not takes(ebnf, tiny, "a(")


@pytest.mark.parametrize(
    ("backend", "kind", "text", "message"),
    [
        ("xgrammar", "grammar", "root ::= foo", 'Rule "foo" is not defined'),
        ("xgrammar", "json", '{"type":"strin"}', 'Unsupported type "strin"'),
        ("xgrammar", "nonsense", "", "no grammars of kind 'nonsense'"),
        ("guidance", "lark", "start: foo", 'unknown name: "foo"'),
        ("guidance", "regex", "(a", "unclosed group"),
        ("guidance", "json", '{"not":{}}', "not"),
        ("guidance", "choice", "[]", "must not be empty"),
        ("guidance", "structural_tag", "{}", "no grammars of kind 'structural_tag'"),
        ("outlines", "regex", "a(?=b)", "error building NFA"),
        ("outlines", "grammar", "", "no grammars of kind 'grammar'"),
        ("outlines", "regex", "a" * 20_001, "over the limit of 20,000 characters"),
        ("automaton", "regex", "[a-z]{1,2500}", "more than 2,000 bytes"),
    ],
)
def test_what_a_library_cannot_compile_is_one_sentence(
    backend: str, kind: str, text: str, message: str, compile_with: Any
) -> None:
    with pytest.raises(ValidationError) as caught:
        compile_with(backend, kind, text)

    assert message in str(caught.value)
    for noise in (".cc:", "\n", "<state>", "Check failed"):
        assert noise not in str(caught.value)


def test_a_table_that_does_not_end_is_given_up(tiny: Vocabulary) -> None:
    backend = OutlinesBackend(tiny, {"compile_seconds": 0.5})
    try:
        from decodekit.core.constraint import GrammarSpec

        start = time.monotonic()
        with pytest.raises(ValidationError, match=r"compile time over the limit of 0\.5 seconds"):
            backend.compile(GrammarSpec("regex", "(.{0,200}x){0,40}"))
        assert time.monotonic() - start < 30
    finally:
        backend.close()


# --- our own programs -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "kind", "text"),
    [
        ("trie", "choice", '["red","redder","green","a",""]'),
        ("automaton", "regex", "[0-9]{1,3}(?:é|red)*"),
        ("outlines", "regex", "[0-9]{1,3}(?:é|red)*"),
    ],
)
def test_the_table_of_masks_is_what_fills_write(
    backend: str, kind: str, text: str, compile_with: Any, tiny: Vocabulary
) -> None:
    program = compile_with(backend, kind, text)
    table = program.mask_table([END, 2])
    bitmask = torch.zeros(1, table.shape[1], dtype=torch.int32)
    random = Random(5)

    for _ in range(20):
        matcher = program.matcher([END, 2])
        while not matcher.is_terminated:
            matcher.fill(bitmask, 0)
            assert torch.equal(table[matcher.state], bitmask[0])
            legal = [i for i in range(tiny.size) if bitmask[0][i >> 5] >> (i & 31) & 1]
            assert matcher.accept(random.choice(legal))


def test_a_table_over_the_limit_is_none(compile_with: Any) -> None:
    choices = json.dumps([f"{i:04}" for i in range(300)])
    program = compile_with("trie", "choice", choices)

    assert program.mask_table([END], limit=50) is None
    assert compile_with("automaton", "regex", "[a-z]{1,90}").mask_table([END], limit=50) is None


def test_only_programs_of_ours_have_a_state(compile_with: Any) -> None:
    for backend, has in (("trie", True), ("outlines", True), ("xgrammar", False)):
        matcher = compile_with(backend, "choice", '["a"]').matcher([END])
        assert (matcher.state is not None) == has


def test_ten_thousand_choices_are_ready_at_once(
    compile_with: Any, legal: Legal, embedded_vocabulary: Vocabulary
) -> None:
    choices = [f"item {i} of the list" for i in range(10_000)]
    program = compile_with("trie", "choice", json.dumps(choices), real=True)

    matcher = program.matcher([2])
    for token in embedded_vocabulary.encode(choices[7_654]):
        assert token in legal(matcher) and matcher.accept(token)
    assert legal(matcher) == {2}
    assert program.memory_bytes > 100_000


def test_equal_masks_are_kept_once(compile_with: Any) -> None:
    program = compile_with("automaton", "regex", "[a-z]{0,40}x?")

    assert len(program._unique) < len(program._rows)


# --- several rows ---------------------------------------------------------------------------------


def test_a_batch_is_filled_as_each_row_alone(compile_with: Any, tiny: Vocabulary) -> None:
    program = compile_with("guidance", "json", json.dumps(OBJECT))
    other = compile_with("trie", "choice", '["a","b"]')
    matchers: list[Any] = [program.matcher([END]) for _ in range(12)]
    matchers += [other.matcher([END]), program.matcher([END])]
    text = tiny.encode('{\n\n\n"a"  : 12')
    for number, matcher in enumerate(matchers[:12]):
        matcher.rebuild(text[: number + 1] if number else [])
    program.beginnings.clear()
    rows = list(range(len(matchers)))[::-1]
    together = torch.full((len(rows) + 1, (tiny.size + 31) // 32), 7, dtype=torch.int32)
    alone = together.clone()

    fills = BatchFiller(1).fill(list(zip(matchers, rows, strict=True)), together)

    assert fills == [m.fork().fill(alone, row) for m, row in zip(matchers, rows, strict=True)]
    assert torch.equal(together, alone)
    assert all(m.accept(token) for m in matchers[:1] for token in text)
