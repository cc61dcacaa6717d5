"""Compiling in the background: once, within limits, given up when nobody waits, counted."""

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError
from typing import Any, ClassVar

import pytest

from decodekit.core.constraint import GrammarSpec, Refusal, Suited, Vocabulary
from decodekit.core.errors import ValidationError
from decodekit.structured.compiler import Compiler
from decodekit.structured.trie import TrieBackend


def regex(text: str) -> GrammarSpec:
    return GrammarSpec("regex", text)


class Program:
    """A program of a known size."""

    def __init__(self, size: int) -> None:
        self.memory_bytes = size

    def matcher(self, stop_ids: Any) -> Any:
        raise NotImplementedError


class Slow:
    """A backend that compiles when it is let, and counts."""

    name: ClassVar[str] = "slow"
    aliases: ClassVar[tuple[str, ...]] = ("sluggish",)
    rank: ClassVar[int] = 1

    @classmethod
    def missing(cls) -> str | None:
        return None

    def __init__(self, vocabulary: Vocabulary, settings: Mapping[str, Any]) -> None:
        self.gate: threading.Event = settings["gate"]
        self.begun: list[str] = settings["begun"]

    def suit(self, spec: GrammarSpec) -> Suited:
        if spec.text == "never":
            refusal = Refusal("/a", "never", "it is so")
            return Suited(GrammarSpec("regex", "wider"), (refusal,), ("a note",))
        return Suited(spec)

    def compile(self, spec: GrammarSpec) -> Program:
        self.begun.append(spec.text)
        assert self.gate.wait(30)
        if spec.text.startswith("bad"):
            raise ValidationError(f"{spec.text} cannot be", parameter="regex", value=spec.text)
        return Program(len(spec.text))


class Later(Slow):
    """Takes what the other fails at."""

    name: ClassVar[str] = "later"
    aliases: ClassVar[tuple[str, ...]] = ()
    rank: ClassVar[int] = 2

    def compile(self, spec: GrammarSpec) -> Program:
        if spec.text == "bad at both":
            raise ValidationError("later neither")
        return Program(1)


@pytest.fixture
def settings() -> dict[str, Any]:
    gate = threading.Event()
    gate.set()
    return {"gate": gate, "begun": [], "workers": 1, "cache_bytes": 100}


@pytest.fixture
def compiler(tiny: Vocabulary, settings: dict[str, Any]) -> Iterator[Compiler]:
    made = Compiler(tiny, {"slow": Slow}, settings)
    yield made
    settings["gate"].set()
    made.close()


def test_a_program_is_compiled_once_and_kept(compiler: Compiler, settings: dict[str, Any]) -> None:
    first = compiler.submit(regex("a")).future.result(30)
    second = compiler.submit(regex("a"))

    assert second.future.done() and second.future.result() is first
    assert settings["begun"] == ["a"]
    stats = compiler.stats
    assert (stats.compiles, stats.hits, stats.programs, stats.program_bytes) == (1, 1, 1, 1)
    assert stats.compile_ms >= stats.longest_ms > 0


def test_requests_at_the_same_time_share_one_compilation(
    compiler: Compiler, settings: dict[str, Any]
) -> None:
    settings["gate"].clear()
    tickets = [compiler.submit(regex("a")) for _ in range(5)]
    settings["gate"].set()

    programs = {id(ticket.future.result(30)) for ticket in tickets}

    assert len(programs) == 1 and settings["begun"] == ["a"]
    assert compiler.stats.joined == 4


def test_one_of_several_waiters_may_leave(compiler: Compiler, settings: dict[str, Any]) -> None:
    settings["gate"].clear()
    first, second = compiler.submit(regex("a")), compiler.submit(regex("a"))

    assert first.future.cancel()
    settings["gate"].set()

    assert second.future.result(30).memory_bytes == 1
    with pytest.raises(CancelledError):
        first.future.result()


def test_a_compilation_that_nobody_waits_for_is_dropped(
    compiler: Compiler, settings: dict[str, Any]
) -> None:
    settings["gate"].clear()
    running = compiler.submit(regex("a"))  # the only worker is busy
    while not settings["begun"]:
        pass
    queued = [compiler.submit(regex("b")) for _ in range(2)]

    assert all(ticket.future.cancel() for ticket in queued)
    assert compiler.stats.cancelled == 1
    settings["gate"].set()
    running.future.result(30)
    again = compiler.submit(regex("b"))

    assert again.future.result(30) and settings["begun"] == ["a", "b"]


def test_a_compilation_under_way_is_kept_for_the_next_one(
    compiler: Compiler, settings: dict[str, Any]
) -> None:
    settings["gate"].clear()
    ticket = compiler.submit(regex("a"))
    while not settings["begun"]:
        pass
    assert ticket.future.cancel()

    other = compiler.submit(regex("a"))
    settings["gate"].set()

    assert other.future.result(30) and settings["begun"] == ["a"]


def test_the_ones_not_asked_for_the_longest_go_first(
    compiler: Compiler, settings: dict[str, Any]
) -> None:
    for text in ("a" * 40, "b" * 40):
        compiler.submit(regex(text)).future.result(30)
    compiler.submit(regex("a" * 40)).future.result(30)

    compiler.submit(regex("c" * 40)).future.result(30)

    assert compiler.submit(regex("a" * 40)).future.done()
    assert compiler.stats.evictions == 1 and compiler.stats.program_bytes == 80
    compiler.submit(regex("b" * 40)).future.result(30)
    assert len(settings["begun"]) == 4


def test_a_program_over_the_limit_is_used_and_not_kept(compiler: Compiler) -> None:
    assert compiler.submit(regex("a" * 101)).future.result(30).memory_bytes == 101
    assert compiler.stats.programs == 0


def test_a_failure_is_the_futures_and_remembered_for_a_while(
    compiler: Compiler, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        with pytest.raises(ValidationError, match="bad cannot be"):
            compiler.submit(regex("bad")).future.result(30)
    assert settings["begun"] == ["bad"] and compiler.stats.failures == 1

    monkeypatch.setattr("decodekit.structured.compiler.monotonic", lambda: 1e12)
    with pytest.raises(ValidationError):
        compiler.submit(regex("bad")).future.result(30)
    assert settings["begun"] == ["bad", "bad"]


def test_auto_goes_on_to_the_next_exact_backend_and_says_so(
    tiny: Vocabulary, settings: dict[str, Any]
) -> None:
    compiler = Compiler(tiny, {"later": Later, "slow": Slow}, settings)
    try:
        ticket = compiler.submit(regex("bad"))
        ticket.future.result(30)
        assert ticket.backend == "later"
        assert compiler.submit(regex("bad")).backend == "later"  # kept
        assert compiler.submit(regex("a")).backend == "slow"
        with pytest.raises(ValidationError, match="bad at both cannot be"):
            compiler.submit(regex("bad at both")).future.result(30)
        with pytest.raises(ValidationError, match="bad cannot be"):  # a named one never falls back
            compiler.submit(regex("bad"), "slow").future.result(30)
    finally:
        compiler.close()


def test_an_approximation_says_what_it_leaves_out(compiler: Compiler) -> None:
    ticket = compiler.submit(regex("never"), strict=False)

    assert [refusal.pointer for refusal in ticket.approximate] == ["/a"]
    assert ticket.notes == ("a note",) and ticket.future.result(30)


def test_closing_leaves_no_thread_and_no_waiter(tiny: Vocabulary, settings: dict[str, Any]) -> None:
    before = set(threading.enumerate())
    compiler = Compiler(tiny, {"slow": Slow}, settings)
    settings["gate"].clear()
    tickets = [compiler.submit(regex(text)) for text in "abc"]
    threading.Timer(0.2, settings["gate"].set).start()

    compiler.close()

    assert all(ticket.future.cancelled() for ticket in tickets)
    with pytest.raises(RuntimeError, match="shutting down"):
        compiler.submit(regex("d"))
    left = [t for t in set(threading.enumerate()) - before if "compile" in t.name]
    assert left == []


def test_a_real_backend_compiles_in_a_worker(tiny: Vocabulary) -> None:
    compiler = Compiler(tiny, {"trie": TrieBackend})
    try:
        ticket = compiler.submit(GrammarSpec("choice", '["a","b"]'))
        matcher = ticket.future.result(30).matcher([1])
        assert ticket.backend == "trie" and matcher.accept(tiny.encode("b")[0])
    finally:
        compiler.close()
