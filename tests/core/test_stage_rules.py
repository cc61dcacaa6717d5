"""What a stage class must be before it may run."""

from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from decodekit.core.stage import (
    ApiRange,
    Caps,
    CutParams,
    CutStage,
    Form,
    Kind,
    Picker,
    Stage,
    StageParams,
)
from decodekit.core.stage_rules import fault_of


class Good(Stage):
    name = "good"

    def transform(self, logits: Any, rows: Any) -> None:
        logits.neg_()


class GoodCut(CutStage):
    name = "good_cut"

    def keep(self, ranking: Any, rows: Any) -> Any:
        return ranking.alive


class GoodPicker(Picker):
    name = "good_picker"

    def pick(self, view: Any, rows: Any) -> Any:
        return view.logits.argmax(1)


class Loose(StageParams):
    model_config = ConfigDict(extra="ignore")


class Taken(StageParams):
    id: int = 0


class Named(StageParams):
    k: int | None = None


def but(base: type[Stage], **attributes: Any) -> type[Stage]:
    return type("Variant", (base,), attributes)


@pytest.mark.parametrize("stage", [Good, GoodCut, GoodPicker])
def test_a_sound_stage_has_no_fault(stage: type[Stage]) -> None:
    assert fault_of(stage, is_local=True) is None


@pytest.mark.parametrize(
    ("stage", "reason"),
    [
        (but(Good, name=""), "not made of lower-case words"),
        (but(Good, name="Top A"), "not made of lower-case words"),
        (but(Good, name="a", aliases=("B",)), "not made of lower-case words"),
        (but(Good, aliases=("top_k",)), "its alias 'top_k' is a request field"),
        (but(Good, api=ApiRange(2, 4)), "stage API 2 to 4 and this decodekit has 1; a newer"),
        (but(Good, api=ApiRange(0, 0)), "stage API 0 and this decodekit has 1; an older"),
        (but(Good, fields={"nonsense": "k"}, Params=Named), "'nonsense', which does not exist"),
        (but(Good, fields={"top_k": "q"}, Params=Named), "'q', which is no parameter"),
        (but(Good, fields={"top_k": "k"}, Params=Named), "only built-in stages expand"),
        (but(Good, Params=BaseModel), "no StageParams"),
        (but(Good, Params=Loose), "forbid unknown names"),
        (but(Good, Params=Taken), "'id' has a name that chain entries use"),
        (but(Stage, name="a"), "does not implement transform"),
        (but(CutStage, name="a"), "does not implement keep"),
        (but(Picker, name="a"), "does not implement pick"),
        (but(Good, kind=Kind.PICK), "kind PICK and class Picker"),
        (but(Good, form=Form.PICKER), "form PICKER and class Picker"),
        (but(Good, form=Form.TRUNCATION), "needs the class CutStage"),
        (but(GoodCut, kind=Kind.MASK), "a CutStage is of kind CUT"),
        (but(Good, caps=Caps(keeps_top_segment=True)), "keeps_top_segment is for kind CUT"),
        (but(Good, caps=Caps(monotone=True)), "monotone needs form ELEMENTWISE"),
        (but(Good, caps=Caps(stateful=True)), "stateful needs open or rebuild"),
        (but(Good, caps=Caps(spec="maybe")), "spec is 'maybe'"),
        (but(Good, mandatory=True), "only a MASK may be mandatory"),
    ],
)
def test_a_fault_is_named(stage: type[Stage], reason: str) -> None:
    fault = fault_of(stage, is_local=True)

    assert fault is not None
    assert reason in fault


def test_a_bare_name_is_for_built_in_and_local_stages() -> None:
    assert fault_of(Good, is_built_in=True) is None
    assert fault_of(Good, is_local=True) is None
    assert "call it 'dist.good'" in str(fault_of(Good))
    assert fault_of(but(Good, name="acme.good")) is None


def test_a_cut_that_writes_its_own_transform_needs_no_keep() -> None:
    assert fault_of(but(CutStage, name="a", transform=Good.transform), is_local=True) is None


def test_only_local_and_built_in_masks_may_be_mandatory() -> None:
    mask = but(Good, name="acme.good", kind=Kind.MASK, mandatory=True, Params=CutParams)

    assert fault_of(mask, is_built_in=True) is None
    assert fault_of(mask, is_local=True) is None
    assert "cannot make its stage mandatory" in str(fault_of(mask))


def test_only_local_stages_may_join_every_default_chain() -> None:
    stage = but(Good, name="acme.good", automatic=True)

    assert fault_of(stage, is_local=True) is None
    assert "every default chain" in str(fault_of(stage))
