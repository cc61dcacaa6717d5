"""Fixtures for the tests of a plugin package, found by pytest through the entry point `decodekit`.

    def test_laws(decodekit_check):
        decodekit_check(TopA, examples=[{"a": 0.2}, {"a": 0.9}])

Nothing of the package is imported until a fixture is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .hostile import HostileEngine
    from .report import Report


@pytest.fixture
def decodekit_check() -> Callable[..., Report]:
    """Check a Stage or Picker class, a Stop or an Observer; a breach fails the test and is told.

    Keywords are those of `check_stage`, `check_stop` and `check_observer`.
    """
    from ...core.stage import Observer, Stop
    from .check import check_observer, check_stage, check_stop

    def check(plugin: Any, *args: Any, **kwargs: Any) -> Report:
        tried = (
            plugin() if isinstance(plugin, type) and issubclass(plugin, Stop | Observer) else None
        )
        subject = plugin if tried is None else tried
        if isinstance(subject, Stop):
            report = check_stop(subject, *args, **kwargs)
        elif isinstance(subject, Observer):
            report = check_observer(subject, *args, **kwargs)
        else:
            report = check_stage(subject, *args, **kwargs)
        report.raise_if_broken()
        return report

    return check


@pytest.fixture
def decodekit_apply() -> Callable[..., Any]:
    """Return `apply_stage`: logits after a stage, each row with its own parameters."""
    from .rows import apply_stage

    return apply_stage


@pytest.fixture
def decodekit_engine() -> Callable[..., HostileEngine]:
    """Return the class of the hostile engine: chains on a toy model that preempts and rewinds."""
    from .hostile import HostileEngine

    return HostileEngine


@pytest.fixture
def decodekit_plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Return a function that loads a registry with the named plugins and no other installed one."""
    from ...core.registry import Registry

    monkeypatch.delenv("DECODEKIT_PLUGINS", raising=False)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)

    def load(*plugins: object, environ: Mapping[str, str] | None = None) -> Registry:
        return Registry.load(
            plugins=plugins, autoload=False, strict=True, environ=dict(environ or {})
        )

    yield load


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test of each law, where a test asks for `decodekit_law`."""
    if "decodekit_law" in metafunc.fixturenames:
        from .check import law_names

        metafunc.parametrize("decodekit_law", law_names())
