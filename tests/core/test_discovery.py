"""Installed plugins: found, chosen, refused, quarantined; in one order whatever the path says."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from decodekit.core.discovery import Origin, Selection, find
from decodekit.core.errors import ChainError, PluginError
from decodekit.core.hookspecs import hookimpl
from decodekit.core.registry import Registry
from decodekit.core.stage import Picker, Profile

STAGE = """
from decodekit.core.stage import ApiRange, Kind, Order, Stage
class It(Stage):
    name = {name!r}
    {body}
    def transform(self, logits, rows):
        logits.neg_()
"""
Install = Callable[..., str]


class Best(Picker):
    name = "best"

    def pick(self, view: Any, rows: Any) -> Any:
        return view.logits.argmax(1)


PICK = ModuleType("toy.pick")
PICK.decodekit_pickers = hookimpl(lambda: [Best])  # type: ignore[attr-defined]
PICK.decodekit_profiles = hookimpl(  # type: ignore[attr-defined]
    lambda: [Profile("default", (), picker="best", greedy="best")]
)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a distribution with one entry point, in a folder of its own on the path."""

    def install(
        dist: str,
        stage: str = "",
        *,
        body: str = "pass",
        source: str | None = None,
        point: str | None = None,
    ) -> str:
        folder = tmp_path / dist
        module = dist.replace("-", "_") + "_plugin"
        info = folder / f"{dist.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\n")
        entry = f"{point or dist.split('-')[0]} = {module}:It"
        (info / "entry_points.txt").write_text(f"[decodekit]\n{entry}\n")
        text = STAGE.format(name=stage, body=body) if source is None else source
        (folder / f"{module}.py").write_text(text)
        monkeypatch.syspath_prepend(folder)
        monkeypatch.delitem(sys.modules, module, raising=False)
        return module

    return install


def load(*plugins: object, **settings: Any) -> Registry:
    settings.setdefault("environ", {})
    return Registry.load(plugins=plugins, catalogue=(PICK,), **settings)


def info_of(registry: Registry, name: str) -> Any:
    return next(info for info in registry.plugins() if info.name == name)


def test_an_installed_stage_is_there_with_its_distribution(install: Install) -> None:
    install("acme-top", "acme.top")

    info = info_of(load(), "acme")

    assert (info.distribution, info.version, info.state) == ("acme-top", "1.0", "active")
    assert info.stages == ("acme.top",)
    assert info.api is not None and (info.api.low, info.api.high) == (1, 1)


@pytest.mark.parametrize("order", [("beta", "alpha"), ("alpha", "beta")])
def test_the_order_is_that_of_names_not_of_installation(
    install: Install, order: tuple[str, str]
) -> None:
    for dist in order:
        install(dist, f"{dist}.it")

    registry = load()

    assert list(registry.stages) == ["best", "alpha.it", "beta.it"]
    assert registry.fingerprint == load().fingerprint


# --- broken ones ----------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["import no_such_library", "raise SystemExit(3)", "def ("])
def test_a_broken_plugin_is_quarantined_and_the_others_load(install: Install, source: str) -> None:
    install("acme", source=source)
    install("zeta", "zeta.it")

    with pytest.warns(RuntimeWarning, match="acme .quarantined") as warned:
        registry = load()

    assert len(warned) == 1
    assert "zeta.it" in registry.stages
    assert info_of(registry, "acme").state == "quarantined"
    assert any(f.level == "error" and "acme" in f.message for f in registry.doctor())


def test_a_request_for_its_stage_gets_the_original_error(install: Install) -> None:
    install("acme-top", source="import no_such_library")
    with pytest.warns(RuntimeWarning):
        registry = load()

    with pytest.raises(ChainError, match="No module named 'no_such_library'") as caught:
        registry.stage("acme.top")

    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_strict_makes_it_fatal(install: Install) -> None:
    install("acme", source="import no_such_library")

    with pytest.raises(PluginError, match="no_such_library") as caught:
        load(strict=True)

    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


@pytest.mark.parametrize(
    ("stage", "body", "reason"),
    [
        ("it", "pass", "no prefix; call it 'dist.it'"),
        ("acme.it", "aliases = ('it',)", "no prefix"),
        ("acme.it", "api = ApiRange(2, 3)", "stage API 2 to 3 and this decodekit has 1"),
        ("acme.it", "fields = {'top_k': 'k'}", "no parameter of it|only built-in stages"),
        ("acme.it", "kind, mandatory = Kind.MASK, True", "cannot make its stage mandatory"),
    ],
)
def test_a_stage_that_breaks_the_contract_is_quarantined_with_the_reason(
    install: Install, stage: str, body: str, reason: str
) -> None:
    install("acme", stage, body=body)

    with pytest.warns(RuntimeWarning, match=reason):
        registry = load()

    assert info_of(registry, "acme").state == "quarantined"
    with pytest.raises(ChainError, match=reason):
        registry.stage(stage)


# --- contested names ------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [("beta", "alpha"), ("alpha", "beta")])
def test_a_contested_stage_goes_to_the_first_distribution_by_name(
    install: Install, order: tuple[str, str]
) -> None:
    modules = {dist: install(dist, "shared.it") for dist in order}

    with pytest.warns(
        RuntimeWarning, match="beta .shadowed: stage 'shared.it'.* belongs to 'alpha'"
    ):
        registry = load()

    assert registry.stage("shared.it").__module__ == modules["alpha"]
    assert info_of(registry, "beta").state == "shadowed"


def test_a_contested_stage_goes_to_what_was_asked_for(install: Install) -> None:
    install("alpha", "shared.it")
    module = install("beta", "shared.it")

    with pytest.warns(RuntimeWarning, match="alpha .shadowed"):
        registry = load("beta")

    assert registry.stage("shared.it").__module__ == module


def test_of_two_distributions_with_one_entry_point_name_the_later_is_quarantined(
    install: Install,
) -> None:
    install("alpha", "alpha.it", point="same")
    install("beta", "beta.it", point="same")

    with pytest.warns(RuntimeWarning, match="the entry-point name 'same' belongs to alpha"):
        registry = load()

    assert "alpha.it" in registry.stages
    assert "beta.it" not in registry.stages


def test_wishes_of_two_distributions_that_contradict_name_both(install: Install) -> None:
    install("alpha", "alpha.it", body="order = Order(before=('beta.it',))")
    install("beta", "beta.it", body="order = Order(before=('alpha.it',))")

    with pytest.warns(RuntimeWarning, match="of alpha.*of beta"):
        registry = load()

    assert {"alpha.it", "beta.it"} <= registry.stages.keys()
    assert not any(registry.constraints.edges.values())


# --- selection ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["point", "acme_top_plugin", "acme-top", "Acme_Top"])
def test_entry_point_module_and_distribution_names_all_work(install: Install, name: str) -> None:
    install("acme-top", "acme.top", point="point")

    assert "acme.top" in load(name, autoload=False).stages
    assert "acme.top" not in load(f"no:{name}").stages


def test_without_autoload_only_what_is_named_loads(install: Install) -> None:
    module = install("acme", "acme.it")

    registry = load(autoload=False)

    assert info_of(registry, "acme").reason == "plugin autoload is off"
    with pytest.raises(ChainError, match="'acme' of acme is blocked: plugin autoload is off"):
        registry.stage("acme.it")
    assert module not in sys.modules


@pytest.mark.parametrize(
    ("environ", "loaded"),
    [
        ({}, {"alpha.it", "beta.it"}),
        ({"DECODEKIT_PLUGINS": ""}, set()),
        ({"DECODEKIT_PLUGINS": "alpha"}, {"alpha.it"}),
        ({"DECODEKIT_PLUGINS": "alpha, beta"}, {"alpha.it", "beta.it"}),
        ({"VLLM_PLUGINS": "beta,some_vllm_plugin"}, {"beta.it"}),
        ({"DECODEKIT_PLUGINS": "alpha", "VLLM_PLUGINS": "beta"}, {"alpha.it"}),
    ],
)
def test_the_environment_may_list_what_loads(
    install: Install, environ: dict[str, str], loaded: set[str]
) -> None:
    install("alpha", "alpha.it")
    install("beta", "beta.it")

    assert set(load(environ=environ).stages) - {"best"} == loaded


def test_an_unknown_name_in_the_environment_is_an_error(install: Install) -> None:
    install("alpha", "alpha.it")

    with pytest.raises(PluginError, match="DECODEKIT_PLUGINS: .*'alhpa'; did you mean 'alpha'"):
        load(environ={"DECODEKIT_PLUGINS": "alhpa"})


def test_asking_by_name_is_stronger_than_the_environment_and_denying_than_asking(
    install: Install,
) -> None:
    install("alpha", "alpha.it")

    assert "alpha.it" in load("alpha", environ={"DECODEKIT_PLUGINS": ""}).stages
    assert "alpha.it" not in load("alpha", "no:alpha").stages


def test_a_denied_plugin_is_not_imported(install: Install) -> None:
    module = install("acme", source="raise RuntimeError")

    registry = load("no:acme")

    assert info_of(registry, "acme").state == "blocked"
    assert module not in sys.modules


@pytest.mark.parametrize("plugins", [("",), ("no:",), "acme"])
def test_a_senseless_selection_is_refused(plugins: Any) -> None:
    with pytest.raises(PluginError, match="plugins must"):
        Selection.parse(plugins)


def test_find_imports_nothing(install: Install) -> None:
    module = install("acme", source="raise RuntimeError")

    found = find(Selection(), catalogue=(), autoload=True, environ={})

    assert [source.origin for source in found] == [Origin.ENTRY_POINT]
    assert module not in sys.modules
