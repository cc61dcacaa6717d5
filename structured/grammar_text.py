"""Grammar text: which dialect it is, whether its rules are there, and whether it has a sentence.

EBNF as GBNF and xgrammar write it (`root ::= "a" | b`), or Lark as llguidance writes it
(`start: "a" | b`). What a backend alone knows (token references, attributes) is left to it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NoReturn

from ..core.errors import ValidationError, did_you_mean
from .limits import LIMITS, check

_EBNF = re.compile(r"^[ \t]*[\w.-]+(?:\[[^\]\n]*\])?[ \t]*::=", re.M)
_LARK = re.compile(r"^[ \t]*[?!]?start(?:\.-?\d+)?(?:\[[^\]\n]*\])?[ \t]*:(?!:=)", re.M)
_TOKEN = {
    "grammar": re.compile(
        r"(?P<skip>[ \t\r\n]+|#[^\n]*)|(?P<define>(?P<name>[\w.-]+)(?:\[[^\]\n]*\])?\s*::=)"
        r'|(?P<text>"(?:[^"\\\n]|\\.)*")|(?P<set>\[(?:[^\]\\]|\\.)*\])|(?P<times>\{[\d\s,]*\})'
        r"|(?P<ref>[A-Za-z_][\w.-]*)|(?P<mark>[|()*+?])"
    ),
    "lark": re.compile(
        r"(?P<skip>[ \t\r]+|//[^\n]*|\n(?=\s*[|)]))|(?P<line>\n)"
        r"|(?P<define>[?!]?(?P<name>[A-Za-z_]\w*)(?:\.-?\d+)?(?:\[[^\]\n]*\])?(?:\{[^}\n]*\})?\s*:)"
        r'|(?P<text>"(?:[^"\\\n]|\\.)*"i?(?:\s*\.\.\s*"(?:[^"\\\n]|\\.)*")?)'
        r"|(?P<set>/(?![/*])(?:[^/\\\n]|\\.)+/[imslux]*)|(?P<times>~\s*\d+(?:\s*\.\.\s*\d+)?|\{[\d,]*\})"
        r"|(?P<ref>[A-Za-z_]\w*)|(?P<mark>[|()\[\]*+?])|(?P<alias>->\s*\w+)"
    ),
}


@dataclass(slots=True)
class _Rule:
    """A rule: alternatives of sequences of references; what needs no rule is left out."""

    line: int
    column: int
    refs: list[tuple[str, int, int]] = field(default_factory=list)
    body: list[_Item] = field(default_factory=list)


_Item = str | list["_Item"] | tuple[str, list[list["_Item"]]]  # a name, or ("or", sequences)


def checked(text: str) -> tuple[str, str]:
    """Return kind ("grammar" or "lark") and text; ValidationError names rule, line and column."""
    check("grammar", "characters", len(text), LIMITS.grammar)
    kind = _dialect(text)
    if "%" in text and kind == "lark":
        return kind, text  # directives define names that only a backend knows
    rules = _Reader(text, kind).rules()
    if rules is None:
        return kind, text
    start = "root" if kind == "grammar" else "start"
    if start not in rules:
        _refuse(f"has no start rule {start!r}{did_you_mean(start, rules)}", text)
    for name, rule in rules.items():
        for ref, line, column in rule.refs:
            if ref not in rules:
                _refuse(
                    f"names the rule {ref!r} in {name!r} at line {line} column {column}, "
                    f"which is not defined{did_you_mean(ref, rules)}",
                    text,
                )
    if start not in _productive(rules):
        rule = rules[start]
        _refuse(
            f"has no sentence: the rule {start!r} at line {rule.line} column {rule.column} "
            "never comes to an end",
            text,
        )
    return kind, text


def _dialect(text: str) -> str:
    if _EBNF.search(text):
        return "grammar"
    if _LARK.search(text):
        return "lark"
    _refuse(
        "must be EBNF with a rule such as 'root ::= ...' or Lark with a rule 'start: ...'", text
    )


class _Reader:
    """A tolerant parser: None where it meets syntax that is a backend's own."""

    def __init__(self, text: str, kind: str) -> None:
        self.text = text
        self.kind = kind
        self.tokens: list[tuple[str, str, int]] = []

    def rules(self) -> dict[str, _Rule] | None:
        at = 0
        pattern = _TOKEN[self.kind]
        while at < len(self.text):
            found = pattern.match(self.text, at)
            if found is None:
                return None
            kind = found.lastgroup if found.lastgroup != "name" else "define"
            if kind == "define":
                self.tokens.append(("define", found["name"], at))
            elif kind not in ("skip", "alias"):
                self.tokens.append((str(kind), found.group(), at))
            at = found.end()
        return self._read()

    def _read(self) -> dict[str, _Rule] | None:
        rules: dict[str, _Rule] = {}
        at = 0
        while at < len(self.tokens):
            kind, name, offset = self.tokens[at]
            if kind == "line":
                at += 1
                continue
            if kind != "define":
                return None
            line, column = self._where(offset)
            rule = rules.setdefault(name, _Rule(line, column))
            body, at = self._sequences(at + 1, rule)
            if at < len(self.tokens) and self.tokens[at][0] not in ("define", "line"):
                return None
            rule.body.append(("or", body))
        return rules

    def _sequences(self, at: int, rule: _Rule) -> tuple[list[list[_Item]], int]:
        """Alternatives from `at` up to what cannot belong to them."""
        sequences: list[list[_Item]] = [[]]
        while at < len(self.tokens):
            kind, value, offset = self.tokens[at]
            if kind in ("define", "line") or kind == "mark" and value in ")]":
                break
            if kind == "mark" and value == "|":
                sequences.append([])
                at += 1
                continue
            item: _Item = []
            if kind == "ref":
                rule.refs.append((value, *self._where(offset)))
                item = value
            elif kind == "mark" and value in "([":
                inner, at = self._sequences(at + 1, rule)
                item = [] if value == "[" else ("or", inner)
            at += 1
            if at < len(self.tokens) and self._may_be_empty(self.tokens[at]):
                item = []
            while at < len(self.tokens) and self._is_suffix(self.tokens[at]):
                at += 1
            sequences[-1].append(item)
        return sequences, at

    @staticmethod
    def _is_suffix(token: tuple[str, str, int]) -> bool:
        return token[0] == "times" or token[0] == "mark" and token[1] in "*+?"

    @staticmethod
    def _may_be_empty(token: tuple[str, str, int]) -> bool:
        digits = re.search(r"\d+", token[1])
        if token[0] == "times":
            return not digits or int(digits.group()) == 0 or token[1].startswith("{,")
        return token[0] == "mark" and token[1] in "*?"

    def _where(self, offset: int) -> tuple[int, int]:
        line = self.text.count("\n", 0, offset) + 1
        return line, offset - self.text.rfind("\n", 0, offset)


def _productive(rules: dict[str, _Rule]) -> set[str]:
    """Names of the rules from which some text can be finished."""
    good: set[str] = set()

    def ends(item: _Item) -> bool:
        if isinstance(item, str):
            return item in good
        if isinstance(item, tuple):
            return any(all(ends(part) for part in sequence) for sequence in item[1])
        return all(ends(part) for part in item)

    grown = True
    while grown:
        found = {
            name for name, rule in rules.items() if name not in good and any(map(ends, rule.body))
        }
        good |= found
        grown = bool(found)
    return good


def _refuse(problem: str, text: str) -> NoReturn:
    raise ValidationError(f"grammar {problem}", parameter="grammar", value=text)
