"""Writes the catalog of methods, `docs/methods.md`: `python docs/make_catalog.py`.

Every line comes from the code: docstrings say what a stage computes, and the schema of a request
what its parameters may be. The suite compares the page with what this script would write.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from decodekit.core.registry import Registry
from decodekit.core.request_schema import first_line, request_schema
from decodekit.core.stage import Kind, Stage

PAGE = Path(__file__).with_name("methods.md")
KINDS = {
    Kind.FORWARD: "combines the rows of several forward passes",
    Kind.MASK: "bans tokens",
    Kind.FORCE: "leaves the forced tokens alone",
    Kind.BIAS: "adds to logits, or scales them, by id or history",
    Kind.SHAPE: "bends the whole row and keeps its order",
    Kind.CUT: "keeps a part of the row",
    Kind.MARK: "reweights what the cuts left, as watermarks do",
    Kind.PICK: "chooses the token; every chain ends in one",
}
HEAD = """\
<!-- Written by docs/make_catalog.py from the code; changes here are lost. -->

# Catalog of methods

Every built-in stage: its formula, where it comes from, and what its parameters may be. A request
asks for a stage by its flat field, if it has one, or in [`chain`](parameters.md#the-chain-itself);
`decodekit schema --stage NAME` writes the same as a JSON schema. A parameter that is not given, or
null, is off unless the table names a default. In the formulas `l` is the row of logits, `p` its
softmax over the tokens that are alive, `M` the largest logit, `H` the entropy, `h` the history of
prompt and answer, and `t` the number of tokens of the answer so far.
"""


def page() -> str:
    """Return the whole page."""
    registry = Registry.load(autoload=False, environ={})
    schema = request_schema(registry)
    parts = [HEAD, overview(registry)]
    for kind, does in KINDS.items():
        modules: dict[Any, list[type[Stage]]] = {}
        for stage in registry.stages.values():
            if stage.kind is kind:
                modules.setdefault(inspect.getmodule(stage), []).append(stage)
        if modules:
            parts.append(f"## {kind.name}\n\nA stage of this kind {does}.\n")
        for module, stages in modules.items():
            parts += section(module, stages, schema)
    parts += others(registry)
    return "\n".join(parts)


def overview(registry: Registry) -> str:
    """One line a stage, in the order of the kinds."""
    lines = ["| stage | kind | in a word |", "|---|---|---|"]
    stages = sorted(registry.stages.values(), key=lambda stage: stage.kind)
    for stage in stages:
        lines.append(f"| `{stage.name}` | {stage.kind.name} | {cell(first_line(stage))} |")
    return "\n".join(lines) + "\n"


def section(module: Any, stages: list[type[Stage]], schema: dict[str, Any]) -> Iterator[str]:
    """The stages of one module: they share the docstring that has the formulas."""
    yield f"### {', '.join(f'`{stage.name}`' for stage in stages)}\n"
    yield marked(inspect.getdoc(module) or "") + "\n"
    for stage in stages:
        yield facts(stage, len(stages) > 1)
        table = parameters(schema["$defs"][f"stage.{stage.name}"])
        if table:
            yield table


def facts(stage: type[Stage], is_named: bool) -> str:
    """How a stage is asked for, and its parameters in an example."""
    told = [f"`{stage.name}`: {cell(first_line(stage))}."] if is_named else []
    if stage.mandatory:
        told.append("Part of every chain.")
    elif stage.automatic:
        told.append("Part of every default chain.")
    for field, own in stage.fields.items():
        told.append(f"The request field `{field}` fills `{own}`.")
    if stage.aliases:
        told.append(f"Also called {', '.join(f'`{alias}`' for alias in stage.aliases)}.")
    return " ".join(told) + "\n" if told else ""


def parameters(entry: dict[str, Any]) -> str:
    """The table of a stage's parameters; empty where it has none."""
    rows = []
    for name, schema in entry["properties"].items():
        if name in ("stage", "id"):
            continue
        default = schema.get("default")
        shown = "needed" if name in entry["required"] else f"`{json.dumps(default)}`"
        if default is None and shown != "needed":
            shown = "off"
        rows.append(f"| `{name}` | {cell(allowed(schema))} | {cell(shown)} |")
    if not rows:
        return ""
    return "\n".join(["| parameter | may be | default |", "|---|---|---|", *rows]) + "\n"


def allowed(schema: dict[str, Any]) -> str:
    """Say in words what a JSON schema allows; null is left out."""
    if "anyOf" in schema:
        choices = [allowed(choice) for choice in schema["anyOf"] if choice.get("type") != "null"]
        return ", or ".join(dict.fromkeys(choice for choice in choices if choice))
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(item)}`" for item in schema["enum"])
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    kind = schema.get("type")
    if kind in ("number", "integer"):
        return f"{'a number' if kind == 'number' else 'a whole number'}{bounds(schema)}"
    if kind == "array" and "prefixItems" in schema:
        return f"[{'; '.join(map(allowed, schema['prefixItems']))}]"
    if kind == "array":
        return f"a list of ({allowed(schema.get('items', {})) or 'Python objects'})"
    if kind == "object":
        values = schema.get("additionalProperties")
        return (
            f"an object from ids to ({allowed(values)})"
            if isinstance(values, dict)
            else "an object"
        )
    return {"string": "a text", "boolean": "true or false"}.get(str(kind), "")


def bounds(schema: dict[str, Any]) -> str:
    """The range of a number, such as " in (0, 1]"."""
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    if high is None and below is None:
        if above is not None:
            return f" above {above}"
        return "" if low is None else f" from {low} up"
    left = f"({above}" if above is not None else f"[{low}" if low is not None else "(..."
    right = f"{below})" if below is not None else f"{high}]"
    return f" in {left}, {right}"


def others(registry: Registry) -> Iterator[str]:
    """What stands beside the chain, a line each."""
    groups = (
        ("Stops", "end an answer", {stop.name: stop for stop in registry.stops}),
        ("Observers", "watch and report", {item.name: item for item in registry.observers}),
        ("Drivers", "run several sequences for one answer", dict(registry.drivers)),
        ("Reviewers", "advise", {item.name: item for item in registry.reviewers}),
    )
    for title, does, things in groups:
        if things:
            rows = [f"| `{name}` | {cell(first_line(thing))} |" for name, thing in things.items()]
            table = "\n".join(["| name | does |", "|---|---|", *rows])
            yield f"## {title}\n\nThey {does}.\n\n{table}\n"
    rows = [f"| `{name}` | {cell(item.description)} |" for name, item in registry.profiles.items()]
    yield "\n".join(["## Profiles\n", "| name | order |", "|---|---|", *rows]) + "\n"


def cell(text: str) -> str:
    """Escape what would end a table's cell, and markup outside of code."""
    return marked(text).replace("|", "&#124;")


def marked(text: str) -> str:
    """Turn a docstring into Markdown: formulas are no emphasis, lists stay lists."""
    pieces = re.split(r"(`[^`]*`)", text)
    for place in range(0, len(pieces), 2):
        piece = re.sub(r"(?<!\n)(?<!^)\*|\*(?! )", r"\\*", pieces[place])
        piece = piece.replace("_", r"\_").replace("[", r"\[").replace("<", "&lt;")
        pieces[place] = piece
    lines = "".join(pieces).split("\n")
    out: list[str] = []
    for line in lines:
        is_item = line.startswith("* ")
        if is_item and out and out[-1] and not out[-1].startswith(("* ", "  ")):
            out.append("")  # a list begins after an empty line
        out.append(line)
    return "\n".join(out)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
