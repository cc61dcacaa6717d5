"""Grammars through xgrammar: masks precomputed for every grammar state at compile time.

Stop ids are never told to the library; the gate of `matching.py` handles them. Its warnings go to
the C++ standard error alone, so nothing here relies on them: what is exact is decided in `suit`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar

from ..core.constraint import GrammarSpec, Suited, Vocabulary
from ..core.errors import ValidationError
from ..core.hookspecs import hookimpl
from .matching import Gate, GatedMatcher, Words, told
from .token_tags import with_token_ids

if TYPE_CHECKING:
    from torch import Tensor

WHITESPACE_BOUND = 8  # characters in one place outside strings
EAGER_SECONDS = 2.0  # a grammar that would take longer gets its masks at the first visits
# Sets of nearly all characters make the cost: seconds for each, at 49,152 tokens. An open object
# has many of them, in the names that it does not declare.
WIDE_SECONDS = 0.015


class XGrammarBackend:
    """One compiler for one vocabulary; compiling lets the interpreter go on."""

    name: ClassVar[str] = "xgrammar"
    aliases: ClassVar[tuple[str, ...]] = ()
    rank: ClassVar[int] = 20

    @classmethod
    def missing(cls) -> str | None:
        """Say what to install, if xgrammar is not there."""
        if find_spec("xgrammar") is not None:
            return None
        return "xgrammar is not installed; pip install decodekit[structured]"

    def __init__(self, vocabulary: Vocabulary, settings: Mapping[str, Any]) -> None:
        self.vocabulary = vocabulary
        self._threads = int(settings.get("compile_threads", 1))
        self._compilers: tuple[Any, Any] | None = None  # eager and dynamic
        self._lock = Lock()

    def suit(self, spec: GrammarSpec) -> Suited:
        """Rewrite `spec` so that it is exact here, or name what is not."""
        from .suit import suit

        return suit(self.name, spec)

    def compile(self, spec: GrammarSpec) -> XGrammarProgram:
        """Compile what `suit` returned; ValidationError with the library's reason."""
        compile_it = self._deed(spec)
        try:
            return XGrammarProgram(*compile_it(), self.vocabulary)
        except (RuntimeError, ValueError) as error:
            raise ValidationError(
                f"xgrammar cannot compile this {spec.kind}: {told(error)}",
                parameter="structured_outputs",
                value=spec.text,
            ) from error

    def _deed(self, spec: GrammarSpec) -> Callable[[], tuple[Any, frozenset[int] | None]]:
        """Return what compiles `spec`, to a program and the control ids it may name, if any."""
        import xgrammar

        read, text, controls = xgrammar.Grammar, spec.text, self.vocabulary.control_ids
        compiler = self._ready()[0]
        if spec.kind in ("json", "json_object"):
            options = json_options(spec)
            return lambda: (self._compile(read.from_json_schema(text, **options)), None)
        if spec.kind == "regex":
            return lambda: (self._compile(read.from_regex(text)), None)
        if spec.kind == "choice":
            choices = choice_grammar(json.loads(text))
            return lambda: (self._compile(read.from_ebnf(choices)), None)
        if spec.kind == "grammar":
            return lambda: (self._compile(read.from_ebnf(text)), controls)
        if spec.kind == "lark":
            return lambda: (compiler.compile_lark(text), controls)
        if spec.kind == "structural_tag":
            tag, named = with_token_ids(text, self.vocabulary)
            return lambda: (compiler.compile_structural_tag(tag), named)
        raise ValidationError(
            f"xgrammar has no grammars of kind {spec.kind!r}",
            parameter="structured_outputs",
            value=spec.kind,
        )

    def _compile(self, grammar: Any) -> Any:
        """Compile all masks ahead, or, where that would take long, each at its first visit."""
        text = str(grammar)
        wide = text.count("[^") + text.count("\\U0010ffff")
        seconds = wide * WIDE_SECONDS * self.vocabulary.size / 49_152
        eager, dynamic = self._ready()
        return (dynamic if seconds > EAGER_SECONDS else eager).compile_grammar(grammar)

    def _ready(self) -> tuple[Any, Any]:
        with self._lock:
            if self._compilers is None:
                import xgrammar

                info = xgrammar.TokenizerInfo(
                    list(self.vocabulary.tokens),
                    xgrammar.VocabType.RAW,
                    vocab_size=self.vocabulary.size,
                    stop_token_ids=[],
                    add_prefix_space=False,
                )
                eager, dynamic = (
                    xgrammar.GrammarCompiler(
                        info,
                        max_threads=self._threads,
                        cache_enabled=False,
                        enable_dynamic_compilation=later,
                    )
                    for later in (False, True)
                )
                self._compilers = eager, dynamic
            return self._compilers


def json_options(spec: GrammarSpec) -> dict[str, Any]:
    """Keywords of xgrammar's schema reader for the options of a spec.

    Its strict mode closes every object and array that does not say otherwise, which is not what a
    schema means; an option of the spec may ask for it.
    """
    options: dict[str, Any] = {"strict_mode": bool(spec.option("strict_mode", False))}
    if spec.option("whitespace_pattern") is not None:
        raise ValidationError(
            "whitespace_pattern is not available with xgrammar; guidance and outlines have it",
            parameter="whitespace_pattern",
            value=spec.option("whitespace_pattern"),
        )
    policy = spec.option("whitespace", "bounded")
    if policy == "compact":
        options |= {"any_whitespace": False, "separators": (",", ":")}
    elif policy == "json_dumps":
        options |= {"any_whitespace": False}
    elif policy == "bounded":
        options |= {"max_whitespace_cnt": WHITESPACE_BOUND}
    return options


def choice_grammar(choices: Sequence[str]) -> str:
    """EBNF of exactly these texts."""
    return "root ::= " + " | ".join(json.dumps(text, ensure_ascii=False) for text in choices)


class XGrammarProgram:
    """A compiled grammar."""

    def __init__(self, compiled: Any, named: frozenset[int] | None, vocabulary: Vocabulary) -> None:
        self._compiled = compiled
        self._vocabulary = vocabulary
        # Free text of a structural tag is bytes of any kind: it would admit control tokens.
        self._names_tokens = named is not None
        self._never = vocabulary.control_ids - named if named is not None else ()

    @property
    def memory_bytes(self) -> int:
        """What xgrammar says it takes."""
        return int(self._compiled.memory_size_bytes)

    def matcher(self, stop_ids: Sequence[int]) -> GatedMatcher:
        """Return a matcher at the start; see `core.constraint.CompiledGrammar`."""
        import xgrammar

        gate = Gate(self._vocabulary, stop_ids, names_tokens=self._names_tokens, never=self._never)
        return GatedMatcher(XGrammarSteps(xgrammar.GrammarMatcher(self._compiled)), gate)


class XGrammarSteps:
    """xgrammar's matcher, which may take tokens that its own mask forbids."""

    mask_is_truth: ClassVar[bool] = False
    state: int | None = None

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher

    def mask(self, bitmask: Tensor, row: int, words: Words) -> str | None:
        """Fill the row; bits between the vocabulary's size and the next 32 come out set."""
        self.matcher.fill_next_token_bitmask(bitmask, row)
        return None

    def step(self, token: int) -> bool:
        """Advance; a refused token leaves the matcher as it was."""
        return bool(self.matcher.accept_token(token))

    def undo(self, count: int) -> None:
        """Take steps back, without a limit."""
        self.matcher.rollback(count)

    def copy(self) -> XGrammarSteps:
        """Fork: 2 microseconds."""
        return XGrammarSteps(self.matcher.fork())

    def restart(self) -> None:
        """Go back to the start."""
        self.matcher.reset()

    def may_end(self) -> bool:
        """Whether the root rule may be complete here."""
        return bool(self.matcher.is_completed())

    def certain(self) -> Sequence[int]:
        """Return the jump-forward tokens; they stop before one that a longer token could extend."""
        return list(self.matcher.find_jump_forward_tokens())


@hookimpl
def decodekit_constraint_backends() -> list[type[XGrammarBackend]]:
    return [XGrammarBackend]
