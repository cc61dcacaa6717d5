"""The advisor: legal settings that defeat themselves, one rule each, told in the plan's notes.

A rule looks at the plan as it runs, so a value counts whether a flat field, the chain, a preset or
a profile gave it. Bounds are those where people report trouble: the providers' guides warn of
temperatures near 2 and of changing temperature and top-p together, and penalties punish the
brackets and names that code and JSON need. `no:NAME` among the engine's plugins takes one rule out,
`plan_review=False` (engine or request) all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..core.hookspecs import hookimpl
from ..core.plan_report import PlanReport, PlanStep
from ..core.stage import Finding, Kind, Reviewer

if TYPE_CHECKING:
    from ..core.request_params import RequestParams

HOT = 1.2  # a temperature from here on flattens the row
TOO_HOT = 1.5
TINY_TOP_P = 0.2
MOST_CANDIDATES = 3
OF_THE_MODEL = "generation_config"
ADDITIVE = ("presence_penalty", "frequency_penalty")
PENALTIES = ("repetition_penalty", *ADDITIVE, "dry", "no_repeat_ngram")
STRENGTH = {"dry": "multiplier", "no_repeat_ngram": "n"}


def steps(report: PlanReport, *stages: str) -> Iterator[PlanStep]:
    """Yield the executed steps of these stages."""
    return (step for step in report.order if step.stage in stages)


def heats(report: PlanReport) -> Iterator[tuple[str, float]]:
    """Yield each temperature of the plan at its highest, with what to call it."""
    for step in steps(report, "temperature"):
        yield "temperature", step.params.get("t", 1.0)
    for step in steps(report, "dynamic_temperature"):
        yield "the dynamic temperature's high end", step.params.get("high", 1.0)
    for step in steps(report, "temperature_schedule"):
        points = step.params.get("points")
        if isinstance(points, list):  # a long one is shown by its length alone
            yield "the temperature schedule's top", max(point[1] for point in points)


def shares(report: PlanReport) -> Iterator[float]:
    """Yield the top-p of each step that cuts by one."""
    for step in steps(report, "top_p", "top_k_top_p"):
        if step.params.get("p") is not None:
            yield step.params["p"]


def penalty_names(report: PlanReport) -> list[str]:
    """Name the penalties that run, with their strength."""
    return [
        f"{step.stage}={step.params.get(STRENGTH.get(step.stage, 'penalty'))}"
        for step in steps(report, *PENALTIES)
    ]


class HotTinyTopP(Reviewer):
    """A high temperature spreads the mass that a tiny top-p then takes away."""

    name = "hot_tiny_top_p"

    def review(self, report: PlanReport, request: RequestParams) -> Iterable[Finding]:
        heat = max((t for _, t in heats(report)), default=1.0)
        share = min(shares(report), default=1.0)
        if heat >= HOT and share <= TINY_TOP_P:
            yield Finding(
                "warn",
                f"temperature {heat:g} spreads the choice and top_p {share:g} takes it away again",
                "raise top_p to 0.9, or lower the temperature and leave top_p out",
            )


class TooHot(Reviewer):
    """Above 1.5 most of the mass lies in the long tail."""

    name = "too_hot"

    def review(self, report: PlanReport, request: RequestParams) -> Iterable[Finding]:
        for what, heat in heats(report):
            if heat > TOO_HOT:
                yield Finding(
                    "warn",
                    f"{what} is {heat:g}, and above {TOO_HOT:g} most draws come from the tail",
                    "stay at or below 1.5, or cut with min_p or top_n_sigma before it heats up",
                )


class TopKAndTopP(Reviewer):
    """Two cuts for one purpose: which of them acts changes from token to token."""

    name = "top_k_and_top_p"

    def review(self, report: PlanReport, request: RequestParams) -> Iterable[Finding]:
        ks = {"top_k": "k", "top_k_top_p": "k"}
        ps = {"top_p": "p", "top_k_top_p": "p"}
        k, p = _given(report, ks), _given(report, ps)
        if k is None or p is None or {k[1], p[1]} == {OF_THE_MODEL}:
            return
        yield Finding(
            "info",
            f"top_k {k[0]} and top_p {p[0]:g} are both set, and whichever is stricter at a token "
            "acts",
            "tune one of them and leave the other out",
        )


def _given(report: PlanReport, places: Mapping[str, str]) -> tuple[Any, str] | None:
    """Return the first parameter of `places` that is set, and the layer that set it."""
    for step in steps(report, *places):
        own = places[step.stage]
        if step.params.get(own) is not None:
            return step.params[own], step.provenance.get(own, "")
    return None


class StackedPenalties(Reviewer):
    """The multiplicative penalty and the additive ones punish the same tokens twice."""

    name = "stacked_penalties"

    def review(self, report: PlanReport, request: RequestParams) -> Iterable[Finding]:
        one = [step.params.get("penalty") for step in steps(report, "repetition_penalty")]
        others = [f"{s.stage} {s.params.get('penalty')}" for s in steps(report, *ADDITIVE)]
        if one and others:
            yield Finding(
                "warn",
                f"repetition_penalty {one[0]} is stacked on {' and '.join(others)}, so tokens that "
                "were seen are punished twice",
                "use one kind of penalty",
            )


class PenalisedSyntax(Reviewer):
    """Code and structured text repeat brackets, keys and names; penalties make them rare."""

    name = "penalised_syntax"

    def review(self, report: PlanReport, request: RequestParams) -> Iterable[Finding]:
        listed = penalty_names(report)
        if not listed:
            return
        where = None
        if request.structured_outputs is not None or any(steps(report, "grammar")):
            where = "a grammar"
        elif "code" in request.presets:
            where = "the preset 'code'"
        if where is not None:
            yield Finding(
                "warn",
                f"{', '.join(listed)} with {where} punishes the brackets, keys and names that "
                "have to come again",
                "leave the penalties out here",
            )


class ManyCandidates(Reviewer):
    """More candidates than three cost as many times the work for little."""

    name = "many_candidates"

    def review(self, report: PlanReport, request: RequestParams) -> Iterable[Finding]:
        width, what = request.best_of, "best_of"
        if request.use_beam_search:
            what = "a beam width of"
        elif request.best_of <= request.n:  # all are wanted, none is thrown away
            width = 0
        driver = request.driver
        if isinstance(driver, Mapping):
            widths = [driver.get(key) for key in ("width", "beam_width", "best_of", "num_beams")]
            whole = [value for value in widths if isinstance(value, int)]
            if whole and max(whole) > width:
                width, what = max(whole), f"{driver.get('driver', 'a driver')} with a width of"
        if width > MOST_CANDIDATES:
            yield Finding(
                "info",
                f"{what} {width} costs {width} times the work; answers hardly get better above "
                f"{MOST_CANDIDATES}, and likelier ones get blander",
                f"use {MOST_CANDIDATES} or fewer",
            )


class IdleCuts(Reviewer):
    """Temperature 0 takes the best token, which no cut removes."""

    name = "idle_cuts"

    def review(self, report: PlanReport, request: RequestParams) -> Iterable[Finding]:
        if not request.greedy:
            return
        names = list(request.idle_cuts)
        names += [
            step.stage
            for step in report.dropped
            if step.kind == Kind.CUT.name and step.reason.startswith("it cannot change")
        ]
        if names:
            listed = ", ".join(dict.fromkeys(names))
            one = len(set(names)) == 1
            yield Finding(
                "info",
                f"{listed} {'does' if one else 'do'} nothing at temperature 0",
                f"leave {'it' if one else 'them'} out, or set a temperature above 0",
            )


@hookimpl
def decodekit_reviewers() -> Iterable[Reviewer]:
    return [
        HotTinyTopP(),
        TooHot(),
        TopKAndTopP(),
        StackedPenalties(),
        PenalisedSyntax(),
        ManyCandidates(),
        IdleCuts(),
    ]
