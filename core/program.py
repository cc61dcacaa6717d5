"""A program: a plan without its numbers, cut into dense and ranked segments."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from .stage import After, CutStage, Form, JointStage, Kind, Need, Point, Stage, Tap

if TYPE_CHECKING:
    from .plan import Plan


@dataclass(frozen=True, slots=True)
class Element:
    """One stage of a program with the object that runs it."""

    index: int  # place in the plan's entries
    stage: Stage
    instance: str
    mode: Any
    min_keep: bool
    guarded: bool  # checked for resurrected tokens after it ran

    @property
    def name(self) -> str:
        return self.stage.name


class Segment(NamedTuple):
    """Neighbouring elements that run in one way."""

    elements: tuple[Element, ...]
    ranked: bool
    tap: After | None = None  # an observer looks at the rows after it


@dataclass(eq=False, slots=True)
class Program:
    """A compiled chain, shared by all requests whose plans have the same structure."""

    segments: tuple[Segment, ...]
    picker: Element
    observers: tuple[tuple[Any, Any], ...]
    taps: frozenset[Tap]  # those that are no stage's; the others stand in the segments
    has_cut: bool
    mutates: bool  # some segment writes the dense row
    hides: bool  # a mask or a cut could cover a broken logit before it is seen
    last_mask: int  # number of leading segments after which the masks are done
    needs_seen: bool
    stateful: tuple[int, ...]
    joint: tuple[JointStage, ...]  # those that meet the rows of other programs
    chooses: bool = False  # a driver chooses the tokens, and the picker does not
    on_logprobs: bool = False  # the chain begins with a log-softmax

    @property
    def elements(self) -> tuple[Element, ...]:
        """Every element but the picker, in order."""
        return tuple(itertools.chain.from_iterable(part.elements for part in self.segments))


def compile_program(plan: Plan, fusion: bool = True) -> Program:
    """Turn a plan's entries into a program."""
    elements = [
        Element(
            index=index,
            stage=entry.stage.prototype(),
            instance=entry.instance,
            mode=_mode(entry.stage, entry.params),
            min_keep=getattr(entry.params, "min_keep", 1) > 1,
            guarded=entry.guarded,
        )
        for index, entry in enumerate(plan.entries)
    ]
    *body, picker = elements
    points = frozenset(
        point for observer, order in plan.observers for point in observer.taps(order)
    )
    watched = {element.instance for element in body if is_watched(element.instance, points)}
    segments = _watched_segments(body, fusion, watched)
    masks = [
        number
        for number, segment in enumerate(segments)
        if any(part.stage.kind in (Kind.MASK, Kind.FORCE) for part in segment.elements)
    ]
    has_cut = any(part.stage.kind is Kind.CUT for part in body)
    driver = plan.driver
    chooses = driver is not None and driver.kind.chooses
    points |= {Tap.FINAL} if chooses else set()
    taps = frozenset(point for point in points if isinstance(point, Tap))
    return Program(
        segments=tuple(segments),
        picker=picker,
        observers=tuple(plan.observers),
        taps=taps,
        has_cut=has_cut,
        mutates=(
            any(not part.ranked for part in segments)
            or len(segments) > 1
            or bool(watched)
            or Tap.FINAL in taps
        ),
        hides=bool(masks) or has_cut,
        last_mask=masks[-1] + 1 if masks else 0,
        needs_seen=any(Need.COUNTS in entry.stage.caps.needs for entry in plan.entries),
        stateful=tuple(
            index
            for index, entry in enumerate(plan.entries)
            if entry.stage.accept is not Stage.accept
        ),
        joint=tuple(part.stage for part in body if isinstance(part.stage, JointStage)),
        chooses=chooses,
        on_logprobs=driver is not None and driver.adjusted.on_logprobs,
    )


def _mode(stage: type[Stage], params: Any) -> Any:
    return stage.mode(params) if issubclass(stage, CutStage) else stage.structure(params)


def is_watched(instance: str, points: Collection[Point]) -> bool:
    """Say whether an observer that reads `points` looks right after a stage."""
    return Tap.EACH in points or After(instance) in points


def _watched_segments(
    body: Sequence[Element], fusion: bool, watched: Collection[str]
) -> list[Segment]:
    """Split as `_segments` does, and after each watched stage."""
    segments: list[Segment] = []
    start = 0
    for end, element in enumerate(body, start=1):
        if element.instance in watched:
            *before, last = _segments(body[start:end], fusion)
            segments += [*before, last._replace(tap=After(element.instance))]
            start = end
    return segments + _segments(body[start:], fusion)


def _segments(body: Sequence[Element], fusion: bool) -> list[Segment]:
    """Split between dense and ranked runs, after the last mask, and around joint stages."""
    segments: list[Segment] = []
    run: list[Element] = []
    place = 0
    while place < len(body):
        end = _ranked_end(body, place) if fusion else place
        if end > place:
            if run:
                segments.append(Segment(tuple(run), ranked=False))
                run = []
            segments.append(Segment(tuple(body[place:end]), ranked=True))
            place = end
            continue
        if run and _parts(run[-1], body[place]):
            segments.append(Segment(tuple(run), ranked=False))
            run = []
        run.append(body[place])
        place += 1
    if run:
        segments.append(Segment(tuple(run), ranked=False))
    return segments


def _parts(before: Element, after: Element) -> bool:
    """Whether a segment ends between two neighbours: after the masks, around a joint stage."""
    joint = isinstance(before.stage, JointStage) or isinstance(after.stage, JointStage)
    return joint or _is_mask(before) != _is_mask(after)


def _is_mask(element: Element) -> bool:
    return element.stage.kind in (Kind.MASK, Kind.FORCE)


def _ranked_end(body: Sequence[Element], start: int) -> int:
    """Return the end of the longest run from `start` of monotone shapes and cuts, with a cut."""
    end = start
    last = start
    while end < len(body):
        stage = body[end].stage
        caps = stage.caps
        cut = isinstance(stage, CutStage) and caps.keeps_top_segment and not caps.needs_full_row
        if not cut and not (stage.caps.monotone and stage.form is Form.ELEMENTWISE):
            break
        end += 1
        if cut:
            last = end
    # Shapes after the last cut ride along: they see the same columns.
    return end if last > start else start
