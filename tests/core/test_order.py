"""The default order is a function of the set of stages, and grants what it can; the hard rules."""

from dataclasses import dataclass
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decodekit.core.errors import ChainError
from decodekit.core.order import (
    SEGMENT,
    Constraints,
    Order,
    check_hard_rules,
    settle,
    soft_violations,
)
from decodekit.core.stage import Caps, Kind, Profile, Stage
from decodekit.core.stage import Order as Wish

StageClass = type[Stage]


@dataclass(frozen=True)
class Entry:
    stage: StageClass
    instance: str


def stage(name: str, kind: Kind = Kind.BIAS, **attributes: Any) -> StageClass:
    wish = Wish(attributes.pop("before", ()), attributes.pop("after", ()))
    return type(name.title(), (Stage,), {"name": name, "kind": kind, "order": wish, **attributes})


def entries(*stages: StageClass) -> list[Entry]:
    return [Entry(each, each.name) for each in stages]


def arranged(stages: list[StageClass], *order: str) -> list[str]:
    profile = Profile("p", order)
    return [each.name for each in Order(stages, profile, settle(stages)).arrange(stages)]


NAMES = "abcdefgh"
PICK = stage("pick", Kind.PICK)
MASK, FORCE = stage("mask", Kind.MASK), stage("force", Kind.FORCE)
BIAS, SHAPE = stage("bias"), stage("shape", Kind.SHAPE)
CUT, MARK = stage("cut", Kind.CUT), stage("mark", Kind.MARK)


@st.composite
def stage_sets(draw: st.DrawFn) -> list[StageClass]:
    """Stages of any kinds with any wishes among each other, cycles included."""
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    targets = st.lists(
        st.one_of(st.sampled_from(NAMES), st.sampled_from(Kind)), max_size=2, unique=True
    ).map(tuple)
    kinds = st.sampled_from(Kind)
    return [stage(n, draw(kinds), before=draw(targets), after=draw(targets)) for n in names]


@given(stage_sets(), st.data())
def test_the_order_does_not_depend_on_the_order_of_arrival(
    stages: list[StageClass], data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(stages))
    profile = data.draw(st.lists(st.sampled_from(NAMES), unique=True))

    assert arranged(shuffled, *profile) == arranged(stages, *profile)


@given(stage_sets(), st.data())
def test_every_edge_that_was_settled_holds_in_every_subset(
    stages: list[StageClass], data: st.DataObject
) -> None:
    constraints = settle(stages)
    order = Order(stages, Profile("p", ()), constraints)
    subset = data.draw(st.lists(st.sampled_from(stages), unique=True))

    place = {each.name: i for i, each in enumerate(order.arrange(subset))}

    assert place.keys() == {each.name for each in subset}
    for earlier, later in constraints.edges.items():
        assert all(
            place[earlier] < place[name] for name in later if {name, earlier} <= place.keys()
        )


@given(stage_sets())
def test_the_default_order_never_breaks_a_hard_rule(stages: list[StageClass]) -> None:
    body = [each for each in stages if each.kind is not Kind.PICK]

    names = arranged([*body, PICK])

    by_name = {each.name: each for each in [*body, PICK]}
    check_hard_rules([Entry(by_name[name], name) for name in names])


@given(stage_sets())
def test_a_wish_is_dropped_only_if_it_lies_on_a_cycle(stages: list[StageClass]) -> None:
    """Brute force: an edge may go only if the others, with the hard rules, lead back."""
    dropped = len(settle(stages).conflicts)
    wanted, rules = set(), set()
    for a in stages:
        for b in stages:
            if a is b:
                continue
            if any(t == b.name or t is b.kind for t in a.order.before):
                wanted.add((a.name, b.name))
            if any(t == a.name or t is a.kind for t in b.order.after):
                wanted.add((a.name, b.name))
            if _is_legal_pair_only_in_this_order(a, b):
                rules.add((a.name, b.name))
    edges = wanted | rules
    reach = {each.name: {each.name} for each in stages}
    for _ in stages:
        for a, b in edges:
            for known in reach.values():
                if a in known:
                    known.add(b)

    assert dropped == sum(a in reach[b] for a, b in wanted)


def _is_legal_pair_only_in_this_order(a: StageClass, b: StageClass) -> bool:
    """Ask the public rule: the pair (b, a) is refused and (a, b) is not."""

    def is_legal(*pair: StageClass) -> bool:
        chain = entries(*pair) if pair[-1].kind is Kind.PICK else entries(*pair, PICK)
        try:
            check_hard_rules(chain)
        except ChainError:
            return False
        return True

    return is_legal(a, b) and not is_legal(b, a)


# --- kinds, profile, wishes -----------------------------------------------------------------------


@pytest.mark.parametrize("given_order", list(permutations((PICK, MARK, CUT, BIAS)))[::5])
def test_kinds_give_the_coarse_order(given_order: tuple[StageClass, ...]) -> None:
    assert arranged([*given_order, FORCE, MASK]) == ["mask", "force", "bias", "cut", "mark", "pick"]


def test_the_profile_orders_within_a_kind_and_shapes_among_cuts() -> None:
    stages = [SHAPE, CUT, BIAS, stage("bias2")]

    assert arranged(stages, "bias2", "bias", "cut", "shape") == ["bias2", "bias", "cut", "shape"]
    assert arranged(stages, "bias", "bias2", "shape", "cut") == ["bias", "bias2", "shape", "cut"]


def test_a_stage_the_profile_does_not_name_follows_the_last_of_its_kind() -> None:
    guests = [stage("guest", Kind.CUT), stage("other", Kind.SHAPE)]

    order = arranged([*guests, SHAPE, CUT, BIAS], "bias", "shape", "cut")

    assert order == ["bias", "shape", "other", "cut", "guest"]


def test_without_a_profile_shapes_come_before_cuts_and_names_decide() -> None:
    assert arranged([CUT, stage("b", Kind.SHAPE), stage("a", Kind.SHAPE)]) == ["a", "b", "cut"]


def test_a_mandatory_stage_is_first_whatever_others_wish() -> None:
    pad = stage("pad", Kind.MASK, mandatory=True)

    assert arranged([stage("a", Kind.MASK, before=("pad",)), pad], "a", "pad") == ["pad", "a"]


def test_a_wish_moves_a_stage_right_before_or_after_its_target() -> None:
    early = stage("early", Kind.CUT, before=("shape",))
    late = stage("late", Kind.BIAS, after=("cut",))

    order = arranged([late, early, SHAPE, CUT, BIAS, PICK], "bias", "shape", "cut")

    assert order == ["bias", "early", "shape", "cut", "late", "pick"]


def test_a_wish_may_name_a_kind_or_an_alias() -> None:
    shape = stage("shape", Kind.SHAPE, aliases=("warp",))

    assert arranged([stage("z", Kind.CUT, before=("warp",)), shape]) == ["z", "shape"]
    assert arranged([stage("a", Kind.SHAPE, after=(Kind.CUT,)), CUT]) == ["cut", "a"]


def test_a_wish_about_something_absent_is_granted() -> None:
    assert arranged([stage("a", before=("nobody",), after=("no_one",)), BIAS]) == ["a", "bias"]


def test_a_wish_against_a_hard_rule_is_reported_and_not_applied() -> None:
    wild = stage("wild", Kind.CUT, before=(Kind.MASK,))

    constraints = settle([wild, MASK], owner=lambda each: f"plugin of {each.name}")

    assert len(constraints.conflicts) == 1
    assert "'wild' before 'mask' (asked by plugin of wild)" in constraints.conflicts[0]
    assert arranged([wild, MASK]) == ["mask", "wild"]


def test_a_guest_that_contradicts_a_built_in_loses() -> None:
    ours = stage("ours", before=("guest",))
    guest = stage("guest", before=("ours",))

    constraints = settle([ours, guest], is_built_in=lambda each: each is ours)

    assert constraints.edges == {"ours": frozenset({"guest"}), "guest": frozenset()}
    assert len(constraints.conflicts) == 1


def test_every_kind_has_a_segment() -> None:
    assert SEGMENT.keys() == set(Kind)


# --- hard rules -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chain", "named", "why"),
    [
        ((CUT, MASK, PICK), ("cut", "mask"), "illegal tokens"),
        ((CUT, BIAS, FORCE, PICK), ("cut", "force"), "illegal tokens"),
        ((MARK, CUT, PICK), ("mark", "cut"), "what the truncations left"),
        ((PICK, CUT), ("pick", "cut"), "must be last"),
        ((PICK, PICK), ("pick", "pick"), "one picker"),
    ],
)
def test_a_breach_names_both_stages_and_the_reason(
    chain: tuple[StageClass, ...], named: tuple[str, str], why: str
) -> None:
    with pytest.raises(ChainError, match=why) as caught:
        check_hard_rules(entries(*chain))

    assert all(repr(name) in str(caught.value) for name in named)


@pytest.mark.parametrize("chain", [(), (MASK, CUT)])
def test_a_chain_without_a_picker_is_refused(chain: tuple[StageClass, ...]) -> None:
    with pytest.raises(ChainError, match="end in a picker"):
        check_hard_rules(entries(*chain))


@pytest.mark.parametrize(
    "chain", [(CUT, SHAPE, BIAS, PICK), (BIAS, MASK, CUT, MARK, PICK), (PICK,)]
)
def test_any_other_order_is_a_request_s_own_choice(chain: tuple[StageClass, ...]) -> None:
    check_hard_rules(entries(*chain))

    assert soft_violations(entries(*chain)) == []


# --- notes ----------------------------------------------------------------------------------------


def test_a_wish_that_an_order_does_not_grant_is_noted() -> None:
    shy = stage("shy", Kind.CUT, after=("cut",), before=(Kind.SHAPE,))

    assert soft_violations(entries(shy, CUT)) == ["'shy' asks to stand after 'cut'"]
    assert soft_violations(entries(SHAPE, shy)) == ["'shy' asks to stand before 'shape'"]
    assert soft_violations(entries(CUT, shy, SHAPE)) == []


def test_a_multiplied_logit_after_a_shifted_row_is_noted() -> None:
    normalise = stage("normalise", caps=Caps(shifts_row=True))
    multiply = stage("multiply", caps=Caps(reads_zero=True))

    notes = soft_violations(entries(normalise, multiply))

    assert len(notes) == 1
    assert "'multiply' multiplies logits and stands after 'normalise'" in notes[0]
    assert soft_violations(entries(multiply, normalise)) == []


def test_no_stages_have_no_constraints() -> None:
    assert settle([]) == Constraints({}, {}, ())
