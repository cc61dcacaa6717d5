"""The laws of a matcher, for every backend: masks, rollback, forks, ends, dead ends."""

import json
import re
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decodekit.core.constraint import Fill, FillState, Matcher, Vocabulary
from decodekit.structured.matching import Gate, canonical, token_words, told

Legal = Callable[[Matcher], set[int]]
END, TURN = 1, 2
CHOICES = json.dumps(["red", "green", "redder", "a", 'q"\n', " é😀"], ensure_ascii=False)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "enum": ["a", "é", "abc"]},
        "ok": {"type": "boolean"},
        "n": {"type": "integer"},
        "t": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
    },
    "required": ["name", "ok"],
    "additionalProperties": False,
}
REGEX = r"[0-9]{1,3}(?:\.[0-9]+)?(?:red|green)?"
EBNF = 'root ::= "a" item* ("b" | "é")\nitem ::= "(" item ")" | [0-9]'


class Case(NamedTuple):
    backend: str
    kind: str
    text: str


CASES = [
    *(Case(name, "choice", CHOICES) for name in ("trie", "guidance", "xgrammar", "outlines")),
    *(Case(name, "regex", REGEX) for name in ("automaton", "guidance", "xgrammar", "outlines")),
    *(Case(name, "json", json.dumps(SCHEMA)) for name in ("guidance", "xgrammar", "outlines")),
    *(Case(name, "grammar", EBNF) for name in ("guidance", "xgrammar")),
]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.backend}-{case.kind}")


def is_sentence(case: Case, text: bytes) -> bool:
    """What a text is, said by something that knows nothing of tokens."""
    if case.kind == "choice":
        return text.decode() in json.loads(CHOICES)
    if case.kind == "regex":
        return re.fullmatch(REGEX, text.decode()) is not None
    if case.kind == "json":
        return jsonschema.Draft202012Validator(SCHEMA).is_valid(json.loads(text))
    body = r"a(?:[0-9]|\(+[0-9]\)+)*[bé]"
    return re.fullmatch(body, text.decode()) is not None and text.count(b"(") == text.count(b")")


def walk(
    matcher: Matcher, legal: Legal, choose: Callable[[list[int]], int], most: int
) -> list[int]:
    """Accept chosen legal tokens until a stop id or `most`; returns them."""
    path: list[int] = []
    while not matcher.is_terminated and len(path) < most:
        allowed = sorted(legal(matcher))
        assert allowed, "a dead end"
        path.append(choose(allowed))
        assert matcher.accept(path[-1])
    return path


@each_case
@given(seed=st.integers(0, 2**32))
@settings(max_examples=25)
def test_random_walks_end_in_sentences(
    case: Case, seed: int, compile_with: Any, legal: Legal, tiny: Vocabulary
) -> None:
    matcher = compile_with(*case).matcher([END, TURN])
    random = Random(seed)

    def choose(allowed: list[int]) -> int:
        short = [i for i in allowed if len(tiny.tokens[i]) == 1 or i in (END, TURN)]
        return random.choice(short if short and random.random() < 0.5 else allowed)

    path = walk(matcher, legal, choose, 200)

    if matcher.is_terminated:
        assert is_sentence(case, b"".join(tiny.tokens[i] for i in path[:-1]))
        assert legal(matcher) == {END, TURN}
        assert not matcher.accept(path[0]) and not matcher.accept(END)


@each_case
@given(data=st.data())
@settings(max_examples=20)
def test_rollback_fork_and_rebuild_agree(
    case: Case, data: Any, compile_with: Any, legal: Legal
) -> None:
    program = compile_with(*case)
    matcher = program.matcher([END])
    random = Random(data.draw(st.integers(0, 2**32)))
    masks = []
    path: list[int] = []
    while not matcher.is_terminated and len(path) < 25:
        masks.append((legal(matcher), matcher.is_completed))
        path.append(random.choice(sorted(masks[-1][0])))
        assert matcher.accept(path[-1])
    masks.append((legal(matcher), matcher.is_completed))

    back = data.draw(st.integers(0, len(path)))
    kept = len(path) - back
    other = matcher.fork()
    other.rollback(back)

    assert (legal(other), other.is_completed) == masks[kept]
    assert (legal(matcher), matcher.is_completed) == masks[-1]  # the fork is another
    rebuilt = program.matcher([END])
    rebuilt.rebuild(path[:kept])
    assert (legal(rebuilt), rebuilt.is_completed) == masks[kept]
    for token in path[kept:]:
        assert other.accept(token)
    assert (legal(other), other.is_terminated) == (masks[-1][0], matcher.is_terminated)
    rebuilt.rebuild(path)
    assert legal(rebuilt) == masks[-1][0] and rebuilt.is_terminated == matcher.is_terminated


@each_case
@given(seed=st.integers(0, 2**32))
@settings(max_examples=8)
def test_a_token_is_accepted_just_where_its_bit_is_set(
    case: Case, seed: int, compile_with: Any, legal: Legal, tiny: Vocabulary
) -> None:
    matcher = compile_with(*case).matcher([END])
    random = Random(seed)

    for _ in range(6):
        allowed = legal(matcher)
        taken = set()
        for token in range(-1, tiny.size + 2):
            trial = matcher.fork()
            if trial.accept(token):
                taken.add(token)
                trial.rollback(1)
            assert legal(trial) == allowed if token % 40 == 0 else True
        assert taken == allowed
        matcher.accept(random.choice(sorted(allowed)))
        if matcher.is_terminated:
            break


@each_case
def test_the_mask_is_what_the_library_takes_token_by_token(
    case: Case, compile_with: Any, legal: Legal, tiny: Vocabulary
) -> None:
    matcher = compile_with(*case).matcher([])
    random = Random(7)

    for _ in range(8):
        allowed = legal(matcher)
        taken = {i for i in range(tiny.size) if matcher.steps.copy().step(i)}
        if case.backend == "guidance":  # where text is forced it admits the tokenizer's own pieces
            assert allowed <= taken
            assert allowed == taken or not matcher.is_completed
        else:
            assert allowed == taken
        if not allowed:
            break
        matcher.accept(random.choice(sorted(allowed)))


@pytest.mark.parametrize("kind", ["choice", "regex"])
@given(seed=st.integers(0, 2**32))
@settings(max_examples=25)
def test_backends_agree_on_every_mask(
    kind: str, seed: int, compile_with: Any, legal: Legal
) -> None:
    names = [case.backend for case in CASES if case.kind == kind]
    text = CHOICES if kind == "choice" else REGEX
    matchers = {name: compile_with(name, kind, text).matcher([END]) for name in names}
    random = Random(seed)

    for _ in range(12):
        masks = {name: legal(matcher) for name, matcher in matchers.items()}
        canonical_ones = masks.pop("guidance")
        assert len({frozenset(mask) for mask in masks.values()}) == 1
        assert canonical_ones and canonical_ones <= next(iter(masks.values()))
        token = random.choice(sorted(canonical_ones))
        assert all(matcher.accept(token) for matcher in matchers.values())
        if token == END:
            break


# --- stop ids -------------------------------------------------------------------------------------


@each_case
def test_every_stop_id_waits_for_the_end(
    case: Case, compile_with: Any, legal: Legal, tiny: Vocabulary
) -> None:
    ordinary = tiny.encode("1")[0]  # text, and a stop id of this request
    stops = [END, TURN, ordinary, tiny.size - 1, tiny.size + 100]
    inside = {END, TURN, ordinary, tiny.size - 1}
    matcher = compile_with(*case).matcher(stops)
    random = Random(3)

    for _ in range(60):
        allowed = legal(matcher)
        assert inside <= allowed if matcher.is_completed else inside.isdisjoint(allowed)
        if not matcher.is_completed:
            assert not any(matcher.accept(stop) for stop in stops)
        if allowed <= inside:
            break
        matcher.accept(random.choice(sorted(allowed - inside)))
    if matcher.is_completed:
        assert matcher.accept(ordinary) and matcher.is_terminated
        matcher.rollback(1)
        assert not matcher.is_terminated and matcher.is_completed


@each_case
def test_control_tokens_are_no_text(case: Case, compile_with: Any, legal: Legal) -> None:
    matcher = compile_with(*case).matcher([])
    random = Random(1)

    for _ in range(40):
        allowed = legal(matcher)
        assert allowed.isdisjoint(range(4))
        if not allowed:
            assert matcher.is_completed
            break
        matcher.accept(random.choice(sorted(allowed)))


@pytest.mark.parametrize("backend", ["guidance", "xgrammar", "outlines"])
def test_control_tokens_are_not_in_strings_of_a_real_vocabulary(
    backend: str, compile_with: Any, legal: Legal, embedded_vocabulary: Vocabulary
) -> None:
    matcher = compile_with(backend, "json", '{"type":"string"}', real=True).matcher([2])
    matcher.accept(embedded_vocabulary.encode('"')[0])

    allowed = legal(matcher)

    assert len(allowed) > 45_000
    assert allowed.isdisjoint(embedded_vocabulary.control_ids)
    assert max(allowed) < embedded_vocabulary.tokenizer_size  # padding, and past the last column


def test_the_only_stop_id_ends_a_text_that_nothing_may_follow(
    compile_with: Any, tiny: Vocabulary
) -> None:
    program = compile_with("trie", "choice", '["red"]')
    bitmask = torch.zeros(1, (tiny.size + 31) // 32, dtype=torch.int32)
    one, two, none = (program.matcher(stops) for stops in ([END], [END, TURN], []))

    for matcher in (one, two, none):
        matcher.rebuild(tiny.encode("red"))

    assert one.fill(bitmask, 0) == Fill(FillState.CONSTRAINED, END, ended=True)
    assert two.fill(bitmask, 0) == Fill(FillState.CONSTRAINED, None, ended=True)
    assert none.fill(bitmask, 0) == Fill(FillState.DEAD, None, ended=True)
    assert none.is_completed


def test_a_single_legal_token_is_named(compile_with: Any, tiny: Vocabulary) -> None:
    program = compile_with("automaton", "regex", r"\n")
    bitmask = torch.zeros(1, (tiny.size + 31) // 32, dtype=torch.int32)

    assert program.matcher([END]).fill(bitmask, 0) == Fill(
        FillState.CONSTRAINED, tiny.encode("\n")[0]
    )


def test_an_empty_choice_may_end_at_once(compile_with: Any, legal: Legal) -> None:
    for backend in ("trie", "xgrammar", "guidance"):
        matcher = compile_with(backend, "choice", '["","zz"]').matcher([END])

        assert matcher.is_completed and END in legal(matcher)


# --- what goes wrong ------------------------------------------------------------------------------


def test_a_dead_end_is_reported(compile_with: Any, tiny: Vocabulary) -> None:
    matcher = compile_with("xgrammar", "grammar", 'root ::= root "a"').matcher([END])
    bitmask = torch.ones(1, (tiny.size + 31) // 32, dtype=torch.int32)

    assert matcher.fill(bitmask, 0) == Fill(FillState.DEAD)
    assert not bitmask.any() and not matcher.is_completed and matcher.failure is None


def test_tokens_past_the_vocabulary_do_not_spoil_a_matcher(
    compile_with: Any, legal: Legal, tiny: Vocabulary
) -> None:
    for case in CASES:
        matcher = compile_with(*case).matcher([END])
        before = legal(matcher)
        for token in (-1, tiny.size - 1, tiny.size, 10**9):
            assert not matcher.accept(token)
        assert legal(matcher) == before and matcher.failure is None


def test_a_library_that_gives_up_is_a_dead_end_with_its_words(
    compile_with: Any, legal: Legal, tiny: Vocabulary
) -> None:
    matcher = compile_with("guidance", "regex", "[0-9]+").matcher([END])
    matcher.accept(tiny.encode("1")[0])
    matcher.steps.matcher.consume_token(tiny.encode("x")[0])  # a limit hit looks the same
    matcher.steps._path *= 6  # past the kept masks
    bitmask = torch.ones(1, (tiny.size + 31) // 32, dtype=torch.int32)
    matcher.steps._path += [5] * 9

    assert matcher.fill(bitmask, 0) == Fill(FillState.DEAD)
    assert matcher.failure and "<state>" not in matcher.failure and "\n" not in matcher.failure
    assert not matcher.is_completed and not matcher.accept(5) and list(matcher.forced()) == []
    matcher.steps._path = tiny.encode("1")
    matcher.rollback(1)  # opened again
    assert matcher.failure is None and tiny.encode("2")[0] in legal(matcher)


@each_case
def test_rollback_and_rebuild_refuse_what_cannot_be(
    case: Case, compile_with: Any, legal: Legal
) -> None:
    matcher = compile_with(*case).matcher([END])
    start = legal(matcher)
    matcher.accept(min(start))

    with pytest.raises(ValueError, match=r"rollback must be in \[0, 1\], got 2"):
        matcher.rollback(2)
    with pytest.raises(ValueError, match="token 2 at place 1 is not legal"):
        matcher.rebuild([min(start), TURN])
    assert legal(matcher) == start


def test_a_mask_of_another_width_is_refused(compile_with: Any) -> None:
    matcher = compile_with("trie", "choice", '["a"]').matcher([END])

    with pytest.raises(ValueError, match=r"int32 \[rows, 10\], got int32 \[1, 11\]"):
        matcher.fill(torch.zeros(1, 11, dtype=torch.int32), 0)


# --- forced tokens --------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["automaton", "guidance", "xgrammar", "outlines"])
def test_forced_tokens_are_a_prefix_of_what_must_come(
    backend: str, compile_with: Any, tiny: Vocabulary
) -> None:
    matcher = compile_with(backend, "regex", "[ab]xyzw;[0-9]").matcher([END])
    matcher.accept(tiny.encode("b")[0])

    forced = list(matcher.forced())

    assert forced and b"xyzw;".startswith(b"".join(tiny.tokens[i] for i in forced))
    assert all(matcher.accept(token) for token in forced)


def test_nothing_is_forced_where_the_text_may_end(compile_with: Any, tiny: Vocabulary) -> None:
    for backend in ("trie", "guidance", "xgrammar", "outlines"):
        matcher = compile_with(backend, "choice", '["xy","xyzw"]').matcher([END])
        matcher.rebuild(tiny.encode("xy"))

        assert matcher.is_completed and list(matcher.forced()) == []


def test_canonical_text_leaves_out_what_a_longer_token_could_take(tiny: Vocabulary) -> None:
    def extends(token: bytes) -> bool:
        return token == b"re"

    assert canonical(tiny, b"xre", False, extends) == tiny.encode("x")
    assert canonical(tiny, b"xre", True, extends) == tiny.encode("xre")
    assert canonical(tiny, "xé".encode()[:-1], False, extends) == tiny.encode("x")


# --- small parts ----------------------------------------------------------------------------------


@given(ids=st.sets(st.integers(0, 316)), size=st.sampled_from([317, 320, 321]))
def test_words_hold_exactly_the_ids(ids: set[int], size: int) -> None:
    words = token_words(ids, size)

    assert {i for i in range(32 * len(words)) if int(words[i >> 5]) >> (i & 31) & 1} == ids


@given(
    stops=st.sets(st.integers(0, 330), max_size=6),
    never=st.sets(st.integers(0, 316), max_size=6),
    ids=st.sets(st.integers(0, 319)),
)
def test_the_gate_opens_and_shuts_its_ids_alone(
    stops: set[int], never: set[int], ids: set[int], tiny: Vocabulary
) -> None:
    gate = Gate(tiny, stops, names_tokens=True, never=never)
    words = token_words(ids, 320)

    gate.shut(words)
    shut = token_words({i for i in ids if i < 317} - stops - never, 317)
    assert (words == shut).all()
    gate.open(words)
    opened = ({i for i in ids if i < 317} - never) | {i for i in stops if i < 317}
    assert (words == token_words(opened, 317)).all()


def test_messages_lose_the_place_in_foreign_sources() -> None:
    raw = "[20:32:09] /project/cpp/grammar_parser.cc:820: EBNF parser error at line 1: no rule\n"

    assert told(RuntimeError(raw)) == "EBNF parser error at line 1: no rule"
    assert told(RuntimeError("plain: text")) == "plain: text"
