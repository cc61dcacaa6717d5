"""Writes a complete plugin package that passes its own tests as it stands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path
from string import Template

from ...core.errors import ValidationError

NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
PREFIX = "decodekit-"  # of a distribution's name, no part of a stage's


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What differs from kind to kind."""

    summary: str
    examples: str = "{}"
    own: str = ""  # a test of its meaning
    request: str = "temperature=0"
    table: str = ""
    hook: str = "decodekit_stages"
    listed: str = "registry.stages"

    @property
    def is_watcher(self) -> bool:
        """Whether it is a stop or an observer, which have no rows of their own."""
        return self.hook in ("decodekit_stops", "decodekit_observers")


BLUEPRINTS: dict[str, Blueprint] = {
    "mask": Blueprint(
        "Bans some tokens at the beginning of an answer.",
        '{"ids": [1, 2], "from_position": 4}',
        """def test_tokens_are_banned_at_the_beginning_only(decodekit_apply):
    params = [{"ids": [1], "from_position": 2}] * 2
    after = decodekit_apply($class_name, torch.zeros(2, 4), params, outputs=[[3], [3, 3]])
    assert (after == -torch.inf).tolist() == [[False, True, False, False], [False] * 4]
""",
        'chain=[{"stage": "$name", "ids": [28, 198]}, "greedy"]',
        "| parameter | meaning |\n|---|---|\n| `ids` | tokens that are banned |\n"
        "| `from_position` (3) | how many tokens of the answer that lasts |",
    ),
    "force": Blueprint(
        "Writes one given token at one given position.",
        '{"token": 1}, {"token": 2, "at": 3}',
        """def test_only_the_token_is_left_at_its_position(decodekit_apply):
    params = [{"token": 2, "at": 1}] * 2
    after = decodekit_apply($class_name, torch.zeros(2, 4), params, outputs=[[], [3]])
    assert (after > -torch.inf).tolist() == [[True] * 4, [False, False, True, False]]
""",
        'chain=[{"stage": "$name", "token": 28}, "greedy"]',
        "| parameter | meaning |\n|---|---|\n| `token` | its id |\n"
        "| `at` (0) | its position in the answer |",
    ),
    "bias": Blueprint(
        "Makes the latest tokens of an answer less likely.",
        '{"amount": 1.5}, {"amount": 4.0, "window": 2}',
        """def test_only_tokens_of_the_window_lose(decodekit_apply):
    params = [{"amount": 2.0, "window": 2}]
    after = decodekit_apply($class_name, torch.zeros(1, 5), params, outputs=[[4, 1, 3, 3]])
    assert after.tolist() == [[0.0, 0.0, 0.0, -2.0, 0.0]]
""",
        'chain=[{"stage": "$name", "amount": 1.5}, "temperature"], temperature=0.8',
        "| parameter | meaning |\n|---|---|\n| `amount` | what their logits lose |\n"
        "| `window` (8) | how many tokens count as recent |",
    ),
    "shape": Blueprint(
        "Bends large logits down.",
        '{"cap": 15.0}, {"cap": 3.0}',
        """def test_no_logit_is_above_the_cap(decodekit_apply):
    after = decodekit_apply($class_name, torch.tensor([[9.0, 1.0, -9.0]]), [{"cap": 2.0}])
    assert after.abs().max() <= 2.0
    assert after[0, 0] > after[0, 1] > after[0, 2]
""",
        'chain=["temperature", {"stage": "$name", "cap": 15.0}], temperature=0.8',
        "| parameter | meaning |\n|---|---|\n| `cap` | the bound of the logits, above 0 |",
    ),
    "cut": Blueprint(
        "Keeps the tokens that are likely beside the best one.",
        '{"a": 0.2}, {"a": 0.9, "min_keep": 2}',
        """def test_what_is_kept_is_what_the_formula_says(decodekit_apply):
    logits = torch.tensor([[2.0, 1.0, 0.5, -3.0]])
    p = logits.softmax(1)
    after = decodekit_apply($class_name, logits, [{"a": 0.9}])
    assert torch.equal(after > -torch.inf, p >= 0.9 * p.max() ** 2)
""",
        'chain=["temperature", {"stage": "$name", "a": 0.2}], temperature=0.8',
        "| parameter | meaning |\n|---|---|\n"
        "| `a` | the factor before the square of max p, 0 to 1 |\n"
        "| `min_keep` (1) | how many tokens stay at least |",
    ),
    "mark": Blueprint(
        "Marks an answer for readers who know the key.",
        '{"delta": 2.0}, {"delta": 1.0, "key": 7}',
        """def test_other_keys_raise_other_tokens(decodekit_apply):
    params = [{"delta": 1.0, "key": key} for key in (1, 2)]
    after = decodekit_apply($class_name, torch.zeros(2, 64), params)
    assert set(after.unique().tolist()) == {0.0, 1.0}
    assert not torch.equal(after[0], after[1])
""",
        'chain=["temperature", {"stage": "$name", "delta": 2.0}], temperature=0.8',
        "| parameter | meaning |\n|---|---|\n| `delta` | what the chosen half gains |\n"
        "| `key` (1) | the secret |",
    ),
    "pick": Blueprint(
        "Draws among what the chain left, all with the same chance.",
        "{}",
        """def test_every_alive_token_has_its_turn(decodekit_engine):
    from decodekit.plugins.author.hostile import Ask

    asks = [
        Ask(({"stage": "top_k", "k": 3}, $class_name()), (number,), key=number)
        for number in range(8)
    ]
    answers = decodekit_engine(asks).run()
    assert len({tuple(answer.tokens) for answer in answers.values()}) == 8
""",
        'chain=["top_k", "$name"], top_k=5',
        hook="decodekit_pickers",
        listed="registry.pickers",
    ),
    "stop": Blueprint(
        "Ends an answer that says the same token too often in a row.",
        hook="decodekit_stops",
        listed="{stop.name for stop in registry.stops}",
    ),
    "observer": Blueprint(
        "Notes how sure the model was at each token.",
        request='observers=["$name"]',
        hook="decodekit_observers",
        listed="{observer.name for observer in registry.observers}",
    ),
}
KINDS = tuple(BLUEPRINTS)


@dataclass(frozen=True, slots=True)
class Names:
    """Every name that a package has."""

    dist: str  # acme-top-a
    module: str  # acme_top_a
    stage: str  # acme.top_a
    file: str  # top_a
    class_name: str  # TopA


def names_of(dist: str, stage: str | None = None) -> Names:
    """Derive the names; `stage` replaces the one made from the distribution's.

    The stage of `acme-top-a` is `acme.top_a`; a name of one word serves as both. Raises
    ValidationError for a name that pip or the registry would not take.
    """
    if not NAME.fullmatch(dist):
        raise ValidationError(
            f"NAME must be lower-case words joined by '-', as in 'acme-top-a', got {dist!r}",
            parameter="NAME",
            value=dist,
        )
    words = dist.removeprefix(PREFIX).split("-")
    if stage is None:
        stage = f"{words[0]}.{'_'.join(words[1:] or words)}"
    elif not re.fullmatch(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)+", stage):
        raise ValidationError(
            f"--stage must be 'prefix.name' in lower case, as in 'acme.top_a', got {stage!r}",
            parameter="stage",
            value=stage,
        )
    last = stage.rpartition(".")[2]
    class_name = "".join(word.capitalize() for word in last.split("_"))
    return Names(dist, dist.replace("-", "_"), stage, last, class_name)


def write_package(folder: Path, names: Names, kind: str) -> list[Path]:
    """Write the package into `folder`, which must not exist; return the files.

    Raises ValidationError for an unknown kind and for a folder that is there.
    """
    if kind not in BLUEPRINTS:
        raise ValidationError(
            f"--kind must be one of {', '.join(KINDS)}, got {kind!r}", parameter="kind", value=kind
        )
    if folder.exists():
        raise ValidationError(
            f"{str(folder)!r} is there already; give another name or --into",
            parameter="NAME",
            value=str(folder),
        )
    written: list[Path] = []
    for name, text in _files(names, kind):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def _files(names: Names, kind: str) -> Iterator[tuple[str, str]]:
    plan = BLUEPRINTS[kind]
    asked = ", wish={}" if kind == "observer" else ""
    values = {
        "dist": names.dist,
        "module": names.module,
        "entry": names.stage.partition(".")[0],
        "name": names.stage,
        "file": names.file,
        "class_name": names.class_name,
        "summary": plan.summary,
        "hook": plan.hook,
        "listed": plan.listed,
        "offered": f"{names.class_name}()" if plan.is_watcher else names.class_name,
        "examples": plan.examples,
        "asked": asked,
        "version": _requirement(),
    }
    values["table"] = plan.table or "It has no parameters."
    values["own"] = Template(plan.own).substitute(values).rstrip()
    values["request"] = Template(plan.request).substitute(values)
    source = f"src/{names.module}"
    test = "test_watcher.py" if plan.is_watcher else "test_stage.py"
    yield "pyproject.toml", _filled("pyproject.toml", values)
    yield "README.md", _filled("README.md", values)
    yield "CHANGELOG.md", _filled("CHANGELOG.md", values)
    yield f"{source}/__init__.py", _filled("init.py", values)
    yield f"{source}/{names.file}.py", _filled(f"{kind}.py", values)
    yield f"{source}/py.typed", ""
    yield f"tests/test_{names.file}.py", _filled(test, values)
    yield "tests/test_package.py", _filled("test_package.py", values)


def _filled(name: str, values: dict[str, str]) -> str:
    package = __name__.rpartition(".")[0] + ".templates"
    text = resources.files(package).joinpath(f"{name}.tmpl").read_text(encoding="utf-8")
    return Template(text).substitute(values)


def _requirement() -> str:
    """Return ">=" and the installed version; nothing in a checkout that is not installed."""
    try:
        return f">={metadata.version(__name__.partition('.')[0])}"
    except metadata.PackageNotFoundError:
        return ""
