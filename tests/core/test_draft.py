"""Which chain a request asks for: flat fields, explicit chains, and the two together."""

from types import ModuleType
from typing import Any

import pytest
from pydantic import PositiveInt

from decodekit.core.draft import MAX_STAGES, Draft, chain_key, draft_chain
from decodekit.core.errors import ChainError, NotInThisVersion
from decodekit.core.hookspecs import hookimpl
from decodekit.core.order import Order
from decodekit.core.params import SamplingParams
from decodekit.core.registry import Registry
from decodekit.core.stage import Kind, Picker, Profile, Stage, StageParams


class Toy(Stage):
    def transform(self, logits: Any, rows: Any) -> None:
        logits.neg_()


class Value(StageParams):
    v: Any = None
    extra: int = 0


class Pad(Toy):
    name, kind, mandatory = "pad", Kind.MASK, True


class Only(Toy):
    name, kind, Params, fields = "only", Kind.MASK, Value, {"allowed_token_ids": "v"}


class Ban(Toy):
    name, kind, Params, fields = "ban", Kind.MASK, Value, {"bad_words": "v"}


class Bias(Toy):
    name, kind, Params, fields = "bias", Kind.BIAS, Value, {"logit_bias": "v"}


class Heat(Toy):
    name, kind, aliases, fields = "heat", Kind.SHAPE, ("warm",), {"temperature": "t"}

    class Params(StageParams):
        t: float | None = None


class Top(Toy):
    name, kind, fields = "top", Kind.CUT, {"top_k": "k"}

    class Params(StageParams):
        k: int | None = None


class Nucleus(Toy):
    name, kind, Params, fields = "nucleus", Kind.CUT, Value, {"top_p": "v"}


class Mark(Toy):
    name, kind = "mark", Kind.MARK


class Guide(Toy):
    name, kind = "guide", Kind.FORWARD


class Best(Picker):
    name = "best"

    def pick(self, view: Any, rows: Any) -> Any:
        return view.logits.argmax(1)


class Draw(Best):
    name = "draw"


class Mine(Toy):
    """A class that no registry knows."""

    name, kind = "mine", Kind.CUT

    class Params(StageParams):
        a: float


TOYS = ModuleType("toys")
TOYS.decodekit_stages = hookimpl(  # type: ignore[attr-defined]
    lambda: [Pad, Only, Ban, Bias, Heat, Top, Nucleus, Mark, Guide]
)
TOYS.decodekit_pickers = hookimpl(lambda: [Best, Draw])  # type: ignore[attr-defined]
DEFAULT = Profile(
    "default", ("pad", "only", "ban", "bias", "heat", "top", "nucleus"), "draw", "best"
)
TOYS.decodekit_profiles = hookimpl(lambda: [DEFAULT])  # type: ignore[attr-defined]


def draft(*, without: tuple[str, ...] = (), **fields: Any) -> Any:
    registry = Registry.load(
        catalogue=(TOYS,), autoload=False, environ={}, plugins=[f"no:{name}" for name in without]
    )
    order = Order(registry.stages.values(), DEFAULT, registry.constraints)
    return draft_chain(SamplingParams(**fields).snapshot(), registry, DEFAULT, order, {})


def names(**fields: Any) -> list[str]:
    return [each.instance for each in draft(**fields).drafts]


def given(**fields: Any) -> dict[str, dict[str, object]]:
    return {each.instance: each.given for each in draft(**fields).drafts}


# --- flat fields ----------------------------------------------------------------------------------


def test_nothing_asked_is_the_mandatory_stage_and_the_draw() -> None:
    assert names() == ["pad", "draw"]


def test_flat_fields_expand_in_the_profile_s_order() -> None:
    order = names(top_p=0.5, top_k=3, temperature=0.7, logit_bias={1: 2.0}, allowed_token_ids=[1])

    assert order == ["pad", "only", "bias", "heat", "top", "nucleus", "draw"]


def test_temperature_0_ends_in_the_greedy_pick() -> None:
    assert names(temperature=0) == ["pad", "best"]


@pytest.mark.parametrize("fields", [{"top_k": 3}, {"top_k": 3, "chain": ["best"]}])
def test_a_field_whose_stage_is_blocked_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ChainError, match="top_k=3 cannot be honoured.*'top' is blocked") as caught:
        draft(without=("top",), **fields)

    assert caught.value.parameter == "top_k"


def test_a_bad_flat_value_is_refused_under_the_field_s_name() -> None:
    with pytest.raises(ChainError, match="^top_k is 0, but") as caught:
        Draft(Strict, given={"k": 0}, flat={"k": "top_k"}).check()

    assert (caught.value.parameter, caught.value.value) == ("top_k", 0)


class Strict(Toy):
    name = "strict"

    class Params(StageParams):
        k: PositiveInt


# --- explicit chains ------------------------------------------------------------------------------


def test_a_chain_runs_as_written() -> None:
    chain = [{"stage": "nucleus", "v": 0.5}, {"stage": "heat", "t": 2.0}, {"stage": "top", "k": 3}]

    assert names(chain=chain) == ["pad", "nucleus", "heat", "top", "draw"]


def test_names_aliases_dicts_objects_and_classes_may_be_mixed() -> None:
    drafts = draft(chain=["warm", {"stage": "top", "k": 2}, Mine(a=0.2), Mark]).drafts

    assert [each.stage for each in drafts] == [Pad, Heat, Top, Mine, Mark, Draw]
    assert drafts[3].params.a == 0.2


def test_the_same_stage_twice_gets_ids_and_own_ids_are_kept() -> None:
    chain = ["top", {"stage": "top", "k": 1, "id": "mine"}, "top", Mine(a=1.0, id="m"), "top"]

    assert names(chain=chain) == ["pad", "top", "mine", "top#2", "m", "top#3", "draw"]


def test_a_made_up_id_steps_aside_for_a_given_one() -> None:
    chain = ["top", {"stage": "heat", "id": "top"}, {"stage": "heat", "id": "top#2"}, "top"]

    assert names(chain=chain) == ["pad", "top#3", "top", "top#2", "top#4", "draw"]


def test_two_equal_ids_are_refused() -> None:
    late = Mine(a=1.0)
    registry = Registry.load(catalogue=(TOYS,), autoload=False, environ={})
    order = Order(registry.stages.values(), DEFAULT, registry.constraints)
    params = SamplingParams(chain=[late, {"stage": "top", "id": "m"}]).snapshot()
    late.id = "m"  # after the parameters were checked

    with pytest.raises(ChainError, match="two stages of the chain have the id 'm'"):
        draft_chain(params, registry, DEFAULT, order, {})


@pytest.mark.parametrize(
    ("chain", "message"),
    [
        (["topp"], "unknown stage 'topp'; did you mean 'top'"),
        ([{"stage": "top", "q": 1}], "stage 'top' has no parameter 'q'"),
        ([{"stage": "top", "k": "many"}], "top.k is 'many', but"),
        ([Mine], "stage 'mine' needs the parameter 'a'"),
        (["guide"], "FORWARD"),
        (["top"] * MAX_STAGES, "at most 64 stages, got 66"),
        (["draw", "best"], "'draw' and 'best'"),
        (["draw", "top"], "'draw' must be last"),
        (["top", "ban"], "'ban' .MASK. must stand before 'top' .CUT."),
        (["mark", "top"], "'top' .CUT. must stand before 'mark' .MARK."),
        (["top", "pad"], "'pad' .MASK. must stand before 'top' .CUT."),
    ],
)
def test_a_chain_that_cannot_run_is_refused(chain: list[Any], message: str) -> None:
    with pytest.raises(
        ChainError if chain != ["guide"] else NotInThisVersion, match=message
    ) as caught:
        draft(chain=chain)

    assert caught.value.parameter is not None


def test_a_class_that_breaks_the_contract_is_refused_by_name() -> None:
    wrong = type("Wrong", (Toy,), {"name": "wrong", "mandatory": True})

    with pytest.raises(ChainError, match="stage 'wrong' cannot be used: .*mandatory"):
        draft(chain=[wrong])


def test_a_mandatory_stage_listed_late_still_runs_first_and_says_so() -> None:
    result = draft(chain=["bias", "pad"])

    assert [each.instance for each in result.drafts] == ["pad", "bias", "draw"]
    assert result.notes == ("'pad' always runs first",)


# --- flat fields beside a chain -------------------------------------------------------------------

FILLED = [
    # chain, fields, what each instance is given
    (["nucleus", "heat"], {"top_p": 0.9, "temperature": 0.7},
     {"nucleus": {"v": 0.9}, "heat": {"t": 0.7}}),
    ([{"stage": "nucleus", "extra": 2}], {"top_p": 0.9}, {"nucleus": {"v": 0.9, "extra": 2}}),
    ([{"stage": "nucleus", "v": 0.5}], {"top_p": 0.9}, {"nucleus": {"v": 0.5}}),
    ([{"stage": "top", "k": None}], {"top_k": 5}, {"top": {"k": None}}),
    (["top", "top"], {"top_k": 5}, {"top": {"k": 5}, "top#2": {"k": 5}}),
    (["top", {"stage": "top", "k": 2}], {"top_k": 5}, {"top": {"k": 5}, "top#2": {"k": 2}}),
    (["ban"], {"bad_words": ["x"]}, {"ban": {"v": ("x",)}}),
    ([Top()], {"top_k": 5}, {"top": {"k": 5}}),
    ([Top(k=1)], {"top_k": 5}, {"top": {"k": 1}}),
]  # fmt: skip


@pytest.mark.parametrize(("chain", "fields", "filled"), FILLED)
def test_flat_fields_fill_what_the_entries_leave_open(
    chain: list[Any], fields: dict[str, Any], filled: dict[str, Any]
) -> None:
    found = given(chain=chain, **fields)

    assert {name: values for name, values in found.items() if values} == filled


def test_a_value_that_the_chain_overrules_is_noted() -> None:
    assert draft(chain=[{"stage": "top", "k": 2}], top_k=5).notes == (
        "top_k=5 is not used: the chain gives top k=2",
    )
    assert draft(chain=[{"stage": "top", "k": 5}], top_k=5).notes == ()


def test_masks_of_flat_fields_keep_their_place_in_front() -> None:
    order = names(chain=["top", "heat"], bad_words=["x"], allowed_token_ids=[1, 2])

    assert order == ["pad", "only", "ban", "top", "heat", "draw"]


def test_a_mask_that_the_chain_lists_stays_where_it_is_listed() -> None:
    assert names(chain=["bias", "only", "top"], allowed_token_ids=[1]) == [
        "pad", "bias", "only", "top", "draw",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [("top_k", 3), ("top_p", 0.5), ("temperature", 0.5), ("logit_bias", {1: 1.0})],
)
def test_a_field_that_the_chain_would_ignore_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ChainError, match=f"{field}=.* would be ignored") as caught:
        draft(chain=["mark"], **{field: value})

    assert caught.value.parameter == field


@pytest.mark.parametrize("field", [{"top_k": 0}, {"top_p": 1.0}, {"temperature": 1.0}])
def test_a_neutral_field_needs_no_stage(field: dict[str, Any]) -> None:
    assert names(chain=["mark"], **field) == ["pad", "mark", "draw"]


@pytest.mark.parametrize(
    ("temperature", "chain", "picker"),
    [(0, ["heat"], "best"), (0, ["best"], "best"), (1.0, [], "draw"), (1.0, ["best"], "best")],
)
def test_the_picker_is_the_chain_s_or_the_profile_s(
    temperature: float, chain: list[str], picker: str
) -> None:
    assert names(chain=chain, temperature=temperature)[-1] == picker


def test_temperature_0_beside_another_picker_is_refused() -> None:
    with pytest.raises(ChainError, match="asks for the picker 'best', but the chain has 'draw'"):
        draft(chain=["draw"], temperature=0)


# --- keys -----------------------------------------------------------------------------------------


def test_a_chain_key_tells_equal_chains_from_look_alikes() -> None:
    def key(*items: Any) -> Any:
        return chain_key(SamplingParams(chain=list(items)).snapshot().chain)

    assert key("top", {"stage": "top", "k": [1]}) == key("top", {"k": [1], "stage": "top"})
    assert key(Top(k=1)) == key(Top(k=1))
    different = [
        key(Top(k=1)),
        key(Top()),
        key(Top(k=None)),
        key(Top(k=1, id="a")),
        key("top"),
        key(Top),
        key({"stage": "top", "k": 1}),
        key({"stage": "top", "k": 1.0}),
        key({"stage": "top", "k": True}),
    ]
    assert len(set(different)) == len(different)
