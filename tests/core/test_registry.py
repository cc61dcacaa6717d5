"""Loading plugins: who owns which name, and what happens to broken ones."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from decodekit.core.errors import ChainError, PluginError
from decodekit.core.hookspecs import hookimpl
from decodekit.core.registry import Registry
from decodekit.core.stage import (
    CommandSpec,
    Finding,
    Kind,
    Observer,
    Order,
    Picker,
    Profile,
    Stage,
    StageParams,
    Stop,
)

Load = Callable[..., Registry]


class Transforming(Stage):
    def transform(self, logits: Any, rows: Any) -> None:
        logits.neg_()


class Pad(Transforming):
    name = "pad"
    kind = Kind.MASK
    mandatory = True


class Scale(Transforming):
    name = "scale"
    aliases = ("stretch",)
    kind = Kind.SHAPE
    fields = {"temperature": "t"}

    class Params(StageParams):
        t: float | None = None


class Best(Picker):
    name = "best"

    def pick(self, view: Any, rows: Any) -> Any:
        return view.logits.argmax(1)


class Draw(Best):
    name = "draw"


class Never(Stop):
    name = "never"

    def bind(self, ctx: Any) -> None:
        return None


class Watch(Observer):
    name = "watch"

    def bind(self, ctx: Any) -> None:
        return None


DEFAULT = Profile("default", order=("pad", "scale"), picker="draw", greedy="best")


def module(name: str, **hooks: Any) -> ModuleType:
    """A plugin module whose hooks return the given things."""
    made = ModuleType(name)
    for hook, things in hooks.items():
        setattr(made, f"decodekit_{hook}", hookimpl(lambda things=things: things))
    return made


BUILT_INS = (
    module("toy.pad", stages=[Pad]),
    module("toy.scale", stages=[Scale]),
    module("toy.pick", pickers=[Best, Draw]),
    module("toy.rest", stops=[Never()], observers=[Watch()], profiles=[DEFAULT]),
)


def load(*plugins: object, **settings: Any) -> Registry:
    settings.setdefault("catalogue", BUILT_INS)
    settings.setdefault("environ", {})
    return Registry.load(plugins=plugins, autoload=False, **settings)


def named(name: str, **attributes: Any) -> type[Stage]:
    return type(name.replace(".", "_").title(), (Transforming,), {"name": name, **attributes})


def state_of(registry: Registry, name: str) -> tuple[str, str]:
    return next((info.state, info.reason) for info in registry.plugins() if info.name == name)


# --- what there is --------------------------------------------------------------------------------


def test_everything_on_offer_is_found_by_name() -> None:
    registry = load()

    assert list(registry.stages) == ["pad", "scale", "best", "draw"]
    assert list(registry.pickers) == ["best", "draw"]
    assert [stop.name for stop in registry.stops] == ["never"]
    assert [observer.name for observer in registry.observers] == ["watch"]
    assert registry.profiles["default"] is DEFAULT
    assert registry.fields["temperature"] == (Scale, "t")
    assert {info.state for info in registry.plugins()} == {"active"}


def test_an_alias_is_its_stage() -> None:
    assert load().stage("stretch") is Scale


def test_an_unknown_stage_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ChainError, match="unknown stage 'scael'; did you mean 'scale'") as caught:
        load().stage("scael")

    assert (caught.value.parameter, caught.value.value) == ("chain", "scael")


def test_stops_come_by_rank_then_name() -> None:
    ranked = [
        type("S", (Never,), {"name": n, "rank": r})() for n, r in (("b", 1), ("a", 1), ("c", 0))
    ]

    registry = load(*ranked)

    assert [stop.name for stop in registry.stops] == ["c", "a", "b", "never"]


def test_a_missing_built_in_is_an_error() -> None:
    with pytest.raises(PluginError, match="no_such_module"):
        load(catalogue=("no_such_module",))


def test_a_built_in_that_contradicts_itself_is_an_error() -> None:
    wrong = named("wrong", mandatory=True)

    with pytest.raises(PluginError, match="only a MASK may be mandatory"):
        load(catalogue=(*BUILT_INS, module("toy.wrong", stages=[wrong])))


def test_hooks_of_a_newer_version_are_tolerated_and_told() -> None:
    newer = module("newer", stages=[named("fresh")], time_travel=[1])

    registry = load(newer)

    assert registry.stage("fresh").name == "fresh"
    assert state_of(registry, "newer") == (
        "active",
        "hook 'decodekit_time_travel' is unknown to this version and never called",
    )


def test_a_known_hook_with_an_unknown_argument_is_refused() -> None:
    broken = ModuleType("broken")

    def decodekit_stages(extra: int) -> list[type[Stage]]:
        return []

    broken.decodekit_stages = hookimpl(decodekit_stages)  # type: ignore[attr-defined]

    with pytest.raises(PluginError, match="extra"):
        load(broken)


def test_a_hook_wrapper_is_refused() -> None:
    wrapper = ModuleType("wrapper")

    def decodekit_stages() -> Any:
        return (yield)

    wrapper.decodekit_stages = hookimpl(wrapper=True)(decodekit_stages)  # type: ignore[attr-defined]

    with pytest.raises(PluginError, match="hook wrapper"):
        load(wrapper)


def test_a_hook_that_returns_the_wrong_thing_is_refused() -> None:
    with pytest.raises(
        PluginError, match="decodekit_stages returned 3, which is no subclass of Stage"
    ):
        load(module("odd", stages=[3]))


def test_a_plugin_without_hooks_is_refused() -> None:
    class Empty:
        pass

    with pytest.raises(PluginError, match="offers nothing"):
        load(Empty())


# --- in process -----------------------------------------------------------------------------------


def test_register_adds_to_this_registry_alone() -> None:
    mine, other = load(), load()

    mine.register(named("mine"))

    assert "mine" in mine.stages
    assert "mine" not in other.stages


def test_registering_changes_generation_and_fingerprint() -> None:
    registry = load()
    generation, fingerprint = registry.generation, registry.fingerprint

    registry.register(named("mine"))

    assert registry.generation != generation
    assert registry.fingerprint != fingerprint


def test_registering_twice_changes_nothing() -> None:
    registry, mine = load(), named("mine")
    registry.register(mine)
    generation = registry.generation

    registry.register(mine)

    assert registry.generation == generation


def test_a_class_defined_again_replaces_its_former_self() -> None:
    registry = load()
    registry.register(named("mine"))
    again = named("mine", version=2)

    registry.register(again)

    assert registry.stage("mine") is again


def test_a_taken_name_is_refused_and_nothing_changes() -> None:
    registry = load()
    before = dict(registry.stages)

    with pytest.raises(PluginError, match="stage 'scale' belongs to 'toy.scale'"):
        registry.register(named("scale"))

    assert dict(registry.stages) == before


@pytest.mark.parametrize("by_name", [True, False])
def test_unregister_takes_it_out(by_name: bool) -> None:
    registry, mine = load(), named("mine")
    registry.register(mine)

    registry.unregister("mine" if by_name else mine)

    assert "mine" not in registry.stages
    with pytest.raises(PluginError, match="not registered"):
        registry.unregister("mine" if by_name else mine)


def test_a_built_in_cannot_be_unregistered() -> None:
    with pytest.raises(PluginError, match="not registered"):
        load().unregister("scale")


def test_stop_and_observer_objects_profiles_and_commands_are_registered_as_they_are() -> None:
    registry = load()
    stop = type("Loop", (Never,), {"name": "loop"})()
    command = CommandSpec("toy", app=print)

    for plugin in (
        stop,
        type("Eye", (Watch,), {"name": "eye"}),
        Profile("mine", (), "draw", "best"),
        command,
    ):
        registry.register(plugin)

    assert stop in registry.stops
    assert "eye" in [observer.name for observer in registry.observers]
    assert "mine" in registry.profiles
    assert registry.commands == (command,)


def test_a_stage_object_is_refused_with_its_class_named() -> None:
    with pytest.raises(PluginError, match="register its class Scale"):
        load().register(Scale(t=1.0))


def test_only_built_ins_count_as_built_in() -> None:
    registry, mine = load(), named("mine")
    registry.register(mine)

    assert registry.built_in(Scale)
    assert not registry.built_in(mine)


# --- files ----------------------------------------------------------------------------------------

SOURCE = """
from decodekit.core.stage import Stage
class Local(Stage):
    name = "local"
    def transform(self, logits, rows):
        logits.neg_()
"""


@pytest.mark.parametrize("as_text", [True, False])
def test_a_file_without_hooks_offers_the_stages_it_defines(tmp_path: Path, as_text: bool) -> None:
    path = tmp_path / "my_stage.py"
    path.write_text(SOURCE)

    registry = load(str(path) if as_text else path)

    assert registry.stage("local").__name__ == "Local"


def test_a_file_that_is_missing_or_raises_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text("raise RuntimeError('no luck')")

    with pytest.raises(PluginError, match="does not exist"):
        load("./nowhere.py")
    with pytest.raises(PluginError, match="no luck") as caught:
        load(path)
    assert isinstance(caught.value.__cause__, RuntimeError)


# --- selection ------------------------------------------------------------------------------------


def test_a_built_in_stage_can_be_blocked_and_says_what_goes_with_it() -> None:
    registry = load("no:scale")

    assert "scale" not in registry.stages
    with pytest.raises(ChainError, match="stage 'stretch' is blocked: no:scale"):
        registry.stage("stretch")
    assert registry.lost_fields == {"temperature": "its stage 'scale' is blocked (no:scale)"}
    assert any("'temperature' is refused" in note for note in registry.notes)


def test_a_built_in_module_can_be_blocked() -> None:
    registry = load("no:toy.scale")

    assert state_of(registry, "toy.scale") == ("blocked", "no:toy.scale")
    assert "scale" not in registry.stages


@pytest.mark.parametrize(
    "name", ["pad", "best", "draw", "toy.pad", "toy.pick", "default", "toy.rest"]
)
def test_what_no_chain_can_do_without_cannot_be_blocked(name: str) -> None:
    with pytest.raises(PluginError, match="no chain can do without"):
        load(f"no:{name}")


def test_a_profile_goes_with_its_picker() -> None:
    extra = module("toy.extra", pickers=[type("Third", (Best,), {"name": "third"})],
                   profiles=[Profile("odd", (), picker="third", greedy="best")])  # fmt: skip

    registry = load("no:third", catalogue=(*BUILT_INS, extra))

    assert list(registry.profiles) == ["default"]
    assert any("profile 'odd' is gone" in note for note in registry.notes)


def test_deny_beats_allow() -> None:
    registry = load(named("mine"), "no:mine")

    assert "mine" not in registry.stages
    with pytest.raises(ChainError, match="blocked: no:mine"):
        registry.stage("mine")


@pytest.mark.parametrize("name", ["no:toy.scael", "toy.scael"])
def test_an_unknown_name_is_an_error_with_a_suggestion(name: str) -> None:
    with pytest.raises(PluginError, match="scael.*did you mean"):
        load(name)


# --- conflicts ------------------------------------------------------------------------------------


def test_order_wishes_that_contradict_are_reported_and_not_applied() -> None:
    first = named("first", order=Order(before=("second",)))
    second = named("second", order=Order(before=("first",)))
    registry = load(first)

    registry.register(second)

    assert len(registry.notes) == 2
    assert registry.constraints.edges["first"] == frozenset()
    assert any(
        f.level == "warn" and "'first' before 'second'" in f.message for f in registry.doctor()
    )


def test_doctor_asks_each_plugin_and_survives_one_that_raises() -> None:
    good = module("good", doctor=[Finding("ok", "all well")])
    bad = ModuleType("bad")

    def decodekit_doctor() -> list[Finding]:
        raise RuntimeError("ill")

    bad.decodekit_doctor = hookimpl(decodekit_doctor)  # type: ignore[attr-defined]

    messages = [finding.message for finding in load(good, bad).doctor()]

    assert "all well" in messages
    assert "the self-check of plugin 'bad' failed: RuntimeError: ill" in messages


def test_loading_the_real_built_ins_imports_no_heavy_library() -> None:
    code = (
        "import sys\n"
        "from decodekit.core.registry import Registry\n"
        "assert Registry.load(autoload=False, environ={}).stages\n"
        "heavy = {'transformers', 'tokenizers', 'safetensors', 'gguf', 'fastapi', 'jinja2'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"
