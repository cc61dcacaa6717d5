"""Rules as EBNF text, in the dialect of GBNF and xgrammar."""

from __future__ import annotations

from .regex_tree import Alt, Node, Ref, Rep, Seq, Set
from .schema_grammar import Grammar


def ebnf(grammar: Grammar) -> str:
    """The whole grammar; its first rule is `root`."""
    rules = {"root": grammar.root, **grammar.rules}
    return "\n".join(f"{name} ::= {_print(body, 0)}" for name, body in rules.items())


def _print(node: Node, level: int) -> str:
    """`level`: 0 takes anything, 1 no bare alternation, 2 a single item only."""
    if isinstance(node, Set):
        return _set(node)
    if isinstance(node, Ref):
        return node.name
    if isinstance(node, Rep):
        return _print(node.item, 2) + _times(node.low, node.high)
    if isinstance(node, Alt):
        text = " | ".join(_print(item, 1) for item in node.items)
        return text if level == 0 else f"({text})"
    if isinstance(node, Seq):
        return _sequence(node, level)
    raise ValueError("an anchor is left in the grammar")


def _sequence(node: Seq, level: int) -> str:
    parts: list[str] = []
    text = ""
    for item in _flat(node):
        if isinstance(item, Set) and _single(item):
            text += _char(item.ranges[0][0], '"\\')
            continue
        if text:
            parts.append(f'"{text}"')
            text = ""
        parts.append(_print(item, 2 if isinstance(item, Alt) else 1))
    if text or not parts:
        parts.append(f'"{text}"')
    return parts[0] if len(parts) == 1 and level < 2 else _grouped(" ".join(parts), level)


def _grouped(text: str, level: int) -> str:
    return text if level < 2 else f"({text})"


def _flat(node: Seq) -> list[Node]:
    found: list[Node] = []
    for item in node.items:
        found += _flat(item) if isinstance(item, Seq) else [item]
    return found


def _single(node: Set) -> bool:
    return not node.props and len(node.ranges) == 1 and node.ranges[0][0] == node.ranges[0][1]


def _set(node: Set) -> str:
    if _single(node):
        return f'"{_char(node.ranges[0][0], chr(34) + chr(92))}"'
    parts = []
    for low, high in node.ranges:
        parts.append(_char(low, "\\]-^["))
        if high > low:
            parts.append("-" + _char(high, "\\]-^["))
    return f"[{''.join(parts)}]"


def _char(code: int, special: str) -> str:
    char = chr(code)
    if char == "\n":
        return "\\n"
    if char == "\r":
        return "\\r"
    if char == "\t":
        return "\\t"
    if char in special:
        return "\\" + char if char in '"\\]-' else f"\\x{code:02x}"
    if code < 0x20 or 0x7F <= code < 0xA0:
        return f"\\x{code:02x}"
    if char.isprintable():
        return char
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _times(low: int, high: int | None) -> str:
    if high is None:
        return {0: "*", 1: "+"}.get(low, f"{{{low},}}")
    if (low, high) == (0, 1):
        return "?"
    return f"{{{low}}}" if low == high else f"{{{low},{high}}}"
