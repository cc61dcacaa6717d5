"""Grammars through llguidance: next to nothing at compile time, masks derived at the step.

Its matcher keeps an error for ever once a token is refused, so tokens are only ever tried; stop ids
are handled by the gate of `matching.py`, since the library knows one set of them per tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar

from ..core.constraint import GrammarSpec, Suited, Vocabulary
from ..core.errors import ValidationError
from ..core.hookspecs import hookimpl
from .matching import Gate, GatedMatcher, Words

if TYPE_CHECKING:
    from torch import Tensor

BOUNDED = r"[\x20\x0A\x0D\x09]{1,8}"  # whitespace in one place; the library makes it optional
FIRST_ROW = 64 << 10  # bytes that a program takes before its first walk, about
KEPT_TOKENS = 8  # masks of places up to so many tokens after the start are kept,
KEPT_ROWS = 64  # so many of them


class GuidanceBackend:
    """One tokenizer of llguidance for one vocabulary."""

    name: ClassVar[str] = "guidance"
    aliases: ClassVar[tuple[str, ...]] = ("llguidance",)
    rank: ClassVar[int] = 10

    @classmethod
    def missing(cls) -> str | None:
        """Say what to install, if llguidance is not there."""
        if find_spec("llguidance") is not None:
            return None
        return "guidance (llguidance) is not installed; pip install decodekit[structured]"

    def __init__(self, vocabulary: Vocabulary, settings: Mapping[str, Any]) -> None:
        self.vocabulary = vocabulary
        self._tokenizer: Any = None
        self._lock = Lock()

    def suit(self, spec: GrammarSpec) -> Suited:
        """Rewrite `spec` so that it is exact here, or name what is not."""
        from .suit import suit

        return suit(self.name, spec)

    def compile(self, spec: GrammarSpec) -> GuidanceProgram:
        """Compile what `suit` returned; ValidationError with the library's reason."""
        import llguidance

        try:
            grammar = _grammar(llguidance, spec)
        except ValueError as error:
            if isinstance(error, ValidationError):
                raise
            self._refuse(spec, str(error))
        first = llguidance.LLMatcher(self._ready(), grammar, log_level=0)
        if first.is_error():
            self._refuse(spec, first.get_error())
        return GuidanceProgram(first, self.vocabulary, spec.kind, len(grammar))

    def _refuse(self, spec: GrammarSpec, message: str) -> None:
        raise ValidationError(
            f"guidance cannot compile this {spec.kind}: {first_lines(message)}",
            parameter="structured_outputs",
            value=spec.text,
        )

    def _ready(self) -> Any:
        with self._lock:
            if self._tokenizer is None:
                import llguidance

                wrapper = llguidance.TokenizerWrapper(_Spelled(self.vocabulary))
                self._tokenizer = llguidance.LLTokenizer(
                    wrapper,
                    n_vocab=self.vocabulary.size,
                    eos_token=wrapper.eos_token_id,
                )
            return self._tokenizer


def own_end(vocabulary: Vocabulary) -> int:
    """Return an id that no text has, for the end that the library insists on; it is never shown.

    Padding if there is any, since no grammar can name it.
    """
    padding = [vocabulary.size - 1] if vocabulary.tokenizer_size < vocabulary.size else []
    candidates = [*padding, *vocabulary.eos_ids, *sorted(vocabulary.control_ids)]
    if not candidates:
        raise ValidationError(
            "guidance needs a vocabulary with an end token or another control token",
            parameter="structured_outputs",
        )
    return candidates[0]


class _Spelled:
    """Our vocabulary as llguidance asks for it; called with the text that must come next."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        names = {i: text.encode() for text, i in vocabulary.control_texts.items()}
        self.tokens = [names.get(i, token) for i, token in enumerate(vocabulary.tokens)]
        self.special_token_ids = sorted(vocabulary.control_ids)
        self.eos_token_id = own_end(vocabulary)
        self.bos_token_id = None
        self._vocabulary = vocabulary

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        ids: list[int] = [] if self._vocabulary.encode is None else self._vocabulary.encode(text)
        return ids


def _grammar(library: Any, spec: GrammarSpec) -> str:
    matcher, text = library.LLMatcher, spec.text
    if spec.kind in ("json", "json_object"):
        return str(matcher.grammar_from_json_schema(text, overrides=json_options(spec)))
    if spec.kind == "regex":
        return str(matcher.grammar_from_regex(text))
    if spec.kind == "choice":
        if not json.loads(text):
            raise ValueError("choice must not be empty")
        return str(library.grammar_from("choice", text))
    if spec.kind == "grammar":
        return str(library.grammar_from("gbnf", text))
    if spec.kind == "lark":
        return str(matcher.grammar_from_lark(text))
    raise ValueError(f"it has no grammars of kind {spec.kind!r}")


def json_options(spec: GrammarSpec) -> dict[str, Any]:
    """Options of llguidance's schema compiler for those of a spec."""
    options: dict[str, Any] = {}
    pattern = spec.option("whitespace_pattern")
    policy = spec.option("whitespace", "bounded")
    if pattern is not None:
        options["whitespace_pattern"] = pattern
    elif policy == "compact":
        options |= {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
    elif policy == "json_dumps":
        options |= {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    elif policy == "bounded":
        options["whitespace_pattern"] = BOUNDED
    if spec.option("lenient", False):
        options["lenient"] = True
    return options


def first_lines(message: str) -> str:
    """Return the sentence of an error of llguidance, without its dump of the parser's state."""
    text = message.split("\n<state>")[0]
    lines = [line.strip() for line in text.splitlines()]
    kept = [line for line in lines if line and not set(line) <= {"^", "|", " "}]
    kept = [line for line in kept if not line.split(" | ")[0].isdigit()]  # quoted source
    return " ".join(kept)[:500]


def _all_but(bit: int) -> int:
    """The int32 in which `bit` alone is clear."""
    value = 0xFFFFFFFF ^ (1 << bit)
    return value - (1 << 32) if value >> 31 else value


class GuidanceProgram:
    """An opened matcher, copied for every sequence."""

    def __init__(self, first: Any, vocabulary: Vocabulary, kind: str, source_bytes: int) -> None:
        self._first = first
        self._vocabulary = vocabulary
        self._source_bytes = source_bytes
        self._names_tokens = kind in ("lark", "grammar")
        self._lock = Lock()
        self._end = own_end(vocabulary)
        self.beginnings: dict[tuple[int, ...], Words] = {}  # masks by the tokens that led there

    @property
    def memory_bytes(self) -> int:
        """A guess: the library does not say; tables grow with the states that are met."""
        rows = len(self.beginnings) * self._vocabulary.size // 8
        return FIRST_ROW + 8 * self._source_bytes + rows

    def matcher(self, stop_ids: Sequence[int]) -> GatedMatcher:
        """Return a matcher at the start; see `core.constraint.CompiledGrammar`."""
        gate = Gate(self._vocabulary, stop_ids, names_tokens=self._names_tokens)
        return GatedMatcher(GuidanceSteps(self, self._end), gate)

    def open(self) -> Any:
        """Return a new library matcher at the start."""
        with self._lock:
            return self._first.deep_copy()


class GuidanceSteps:
    """llguidance's matcher, and the tokens it has taken, in case it must be opened again."""

    mask_is_truth: ClassVar[bool] = False
    state: int | None = None

    def __init__(self, program: GuidanceProgram, end: int) -> None:
        self._program = program
        self._end = end
        self.matcher = program.open()
        self._path: list[int] = []

    def mask(self, bitmask: Tensor, row: int, words: Words) -> str | None:
        """Fill the row; first masks are kept, since every sequence of the program asks for them."""
        known = self.known()
        if known is not None:
            words[:] = known
            return None
        width = bitmask.shape[1] * 4
        self.matcher.unsafe_compute_mask_ptr(bitmask.data_ptr() + row * width, width)
        return self.settle(words)

    def known(self) -> Words | None:
        """Return the kept mask of this place, if there is one."""
        if len(self._path) > KEPT_TOKENS:
            return None
        return self._program.beginnings.get(tuple(self._path))

    def settle(self, words: Words) -> str | None:
        """Finish a row that the library filled: its own end is cleared, a limit it hit is told."""
        if self.matcher.is_error():
            return first_lines(self.matcher.get_error())
        words[self._end >> 5] &= _all_but(self._end & 31)
        kept = self._program.beginnings
        if len(self._path) <= KEPT_TOKENS and len(kept) < KEPT_ROWS:
            kept[tuple(self._path)] = words.copy()
        return None

    def step(self, token: int) -> bool:
        """Advance; trying never spoils the matcher, consuming would."""
        if token == self._end or self.matcher.try_consume_tokens([token]) != 1:
            return False
        self._path.append(token)
        return True

    def undo(self, count: int) -> None:
        """Take steps back; a matcher that gave up is opened again."""
        del self._path[len(self._path) - count :]
        if self.matcher.is_error() or not self.matcher.rollback(count):
            self._reopen()

    def copy(self) -> GuidanceSteps:
        """Copy: one microsecond."""
        twin = GuidanceSteps.__new__(GuidanceSteps)
        twin._program, twin._end = self._program, self._end
        twin.matcher = self.matcher.deep_copy()
        twin._path = list(self._path)
        return twin

    def restart(self) -> None:
        """Go back to the start."""
        self._path.clear()
        self._reopen()

    def may_end(self) -> bool:
        """Whether the text so far is a whole sentence."""
        return bool(self.matcher.is_accepting())

    def certain(self) -> Sequence[int]:
        """Return the fast-forward tokens, in the model's own spelling."""
        return list(self.matcher.compute_ff_tokens())

    def _reopen(self) -> None:
        self.matcher = self._program.open()
        if self._path and self.matcher.try_consume_tokens(self._path) != len(self._path):
            raise ValueError("the tokens that were accepted no longer fit the grammar")


@hookimpl
def decodekit_constraint_backends() -> list[type[GuidanceBackend]]:
    return [GuidanceBackend]
