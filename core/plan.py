"""Plans: the chain of one request, bound and ready to run, and the planner that makes them.

admit: flat fields and chain -> drafts (`draft.py`) -> bind -> drop what changes nothing -> Plan.
Numbers are not part of a plan's key, so requests that differ in them alone share one program.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from itertools import count
from threading import Lock
from typing import TYPE_CHECKING, Any

from .binding import (
    BoundStop,
    Points,
    ask,
    bind_observers,
    bind_stage,
    bind_stops,
    refuse_unknown_points,
    watched_points,
)
from .draft import Draft, chain_key, draft_chain
from .drive_binding import BoundDriver, bind_driver
from .driver_stages import with_own
from .errors import ChainError, ValidationError, did_you_mean
from .fused import FusedChains, fusion_note
from .order import Order, soft_violations
from .plan_report import DroppedStep, PlanReport, PlanStep
from .plan_text import changes, describe, shown_values
from .program import compile_program
from .request_params import FrozenDict
from .review import Advice, Review, with_notes
from .stage import After, BindContext, Need, Observer, Profile, Stage, Tap, TextStop

if TYPE_CHECKING:
    import torch

    from .params import RequestParams
    from .reasoning import ReasoningMarkers
    from .registry import Registry

MAX_CACHED = 1024  # chains kept by one planner
NOTHING: Mapping[str, str] = {}
_CONTEXT = tuple(item.name for item in fields(BindContext))


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """One stage of a plan. `params` is what `bind` returned."""

    stage: type[Stage]
    instance: str
    params: Any
    structure: Hashable  # the part of the parameters that changes the code path
    guarded: bool  # not a built-in: checked for resurrected tokens after it ran
    provenance: Mapping[str, str]  # parameter -> the layer that set it


@dataclass(frozen=True, slots=True)
class Plan:
    """What one request runs. Equal `key` means equal program; the numbers are in the entries.

    A key is a number that the planner gave to the structure, so that looking a program up is cheap
    at the step; it means nothing outside that planner.
    """

    entries: tuple[PlanEntry, ...]  # the last one is the picker
    key: int
    observers: tuple[tuple[Observer, Hashable], ...]  # with this request's orders
    stops: tuple[BoundStop, ...]  # in order
    report: PlanReport
    needs: frozenset[Need]
    stateful: tuple[int, ...]  # places of the entries that keep a state
    eos_id: int | None
    enders: tuple[int, ...] = ()  # places of the entries that may end a sequence
    tellers: tuple[int, ...] = ()  # places of the entries that give fields of the output
    pending: tuple[Future[Any], ...] = ()  # what must be done before the request runs
    advice: tuple[Advice, ...] = ()  # of the plan's review
    driver: BoundDriver | None = None
    text_stops: tuple[TextStop, ...] = ()


@dataclass(frozen=True, slots=True)
class _Chain:
    """The part of a plan that equal requests share."""

    entries: tuple[PlanEntry, ...]
    structure: Hashable
    report: PlanReport
    needs: frozenset[Need]
    stateful: tuple[int, ...]
    enders: tuple[int, ...]
    tellers: tuple[int, ...]
    pending: tuple[Future[Any], ...]


class _WatchedContext(BindContext):
    """Notes whether a bind looked at what belongs to one request; its result is then not shared."""

    __slots__ = ("touched",)
    touched: bool

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        object.__setattr__(self, "touched", False)

    def __getattribute__(self, name: str) -> Any:
        if name in ("request", "prompt_ids", "prompt_len"):
            object.__setattr__(self, "touched", True)
        return object.__getattribute__(self, name)


class Planner:
    """Makes the plans of one engine. Equal requests share their chain; the caches are bounded."""

    def __init__(
        self,
        registry: Registry,
        *,
        vocab_size: int,
        tokenizer_size: int,
        max_model_len: int,
        device: torch.device,
        eos_ids: Sequence[int] = (),
        tokenizer: Any = None,
        profile: str = "default",
        logprobs_mode: str = "raw_logprobs",
        reasoning: ReasoningMarkers | None = None,
        plan_review: bool = False,
        structured_outputs_config: Any = None,
    ) -> None:
        self.registry = registry
        self.profile = profile
        self.eos_ids = tuple(eos_ids)
        self._setting = {
            "vocab_size": vocab_size,
            "tokenizer_size": tokenizer_size,
            "max_model_len": max_model_len,
            "eos_ids": self.eos_ids,
            "device": device,
            "tokenizer": tokenizer,
            "logprobs_mode": logprobs_mode,
            "reasoning": reasoning,
            "structured_outputs_config": structured_outputs_config,
            "shared": {},
        }
        self._chains: OrderedDict[Hashable, _Chain] = OrderedDict()
        self._keys: dict[Hashable, int] = {}
        self._serial = count(1)
        self._orders: dict[str, Order] = {}
        self._generation = registry.generation
        self._lock = Lock()
        self._fuses = FusedChains.possible(device)
        self._fusion_notes: dict[int, str] = {}  # by key
        self._review = Review() if plan_review else None
        self._profile_of(None)

    def admit(
        self,
        params: RequestParams,
        *,
        prompt_ids: Sequence[int] = (),
        prompt_len: int | None = None,
        stop_ids: Sequence[int] | None = None,
        provenance: Mapping[str, str] | None = None,
    ) -> Plan:
        """Return the plan of a request, or raise ChainError or ValidationError with one sentence.

        `stop_ids` are the end ids and the request's own; None takes them from `params`.
        `provenance` names the layer of request fields that the request itself did not set.
        """
        if stop_ids is None:
            stop_ids = sorted(params.all_stop_token_ids.union(self.eos_ids))
        context = BindContext(
            **self._setting,
            stop_ids=tuple(stop_ids),
            request=params,
            prompt_ids=tuple(prompt_ids),
            prompt_len=len(prompt_ids) if prompt_len is None else prompt_len,
            constraint_backends=self.registry.constraint_backends,
        )
        with self._lock:
            self._follow_registry()
            driver = bind_driver(self.registry.drivers, params, context)
            if driver is not None:
                params, context = driver.adjusted.params, driver.context
            observers = bind_observers(self.registry.observers, params, context)
            stops = bind_stops(self.registry.stops, params, context)
            chain = self._chain(params, context, observers, provenance or NOTHING, driver)
            mode = driver and (driver.kind.chooses, driver.adjusted.on_logprobs)
            key = self._number((chain.structure, observers, mode))
        advice: tuple[Advice, ...] = ()
        if self._review is not None and params.plan_review:
            advice = self._review.advise(self.registry.reviewers, chain.report, params)
        plan = Plan(
            chain.entries,
            key,
            observers,
            tuple(stop for stop in stops if not isinstance(stop.check, TextStop)),
            with_notes(_driven(chain.report, driver), params, advice),
            chain.needs,
            chain.stateful,
            self.eos_ids[0] if self.eos_ids else None,
            chain.enders,
            chain.tellers,
            chain.pending,
            advice,
            driver,
            tuple(stop.check for stop in stops if isinstance(stop.check, TextStop)),
        )
        return self._with_fusion(plan) if self._fuses else plan

    def _with_fusion(self, plan: Plan) -> Plan:
        """Note why the stages of a plan run one by one, if they do."""
        note = self._fusion_notes.get(plan.key)
        if note is None:
            note = self._fusion_notes[plan.key] = fusion_note(compile_program(plan))
        if not note:
            return plan
        return replace(plan, report=replace(plan.report, notes=(*plan.report.notes, note)))

    def explain(
        self, params: RequestParams, *, provenance: Mapping[str, str] | None = None
    ) -> PlanReport:
        """Return what would run for `params`, without a prompt and without running it."""
        return self.admit(params, provenance=provenance).report

    # --- the chain --------------------------------------------------------------------------------

    def _chain(
        self,
        params: RequestParams,
        context: BindContext,
        observers: Sequence[tuple[Observer, Hashable]],
        provenance: Mapping[str, str],
        driver: BoundDriver | None,
    ) -> _Chain:
        points = watched_points(observers)
        own = () if driver is None else driver.stages
        if driver is not None and driver.kind.chooses:
            # It reads the end of the chain, as an observer of Tap.FINAL does.
            points = FrozenDict({**points, Tap.FINAL: "driver"})
        mark = self._mark(params, context, points, provenance, own)
        if mark is not None and mark in self._chains:
            self._chains.move_to_end(mark)
            return self._chains[mark]
        profile = self._profile_of(params.profile)
        watched = _WatchedContext(**{name: getattr(context, name) for name in _CONTEXT})
        chain = self._build(params, watched, profile, points, provenance, own)
        # What is prepared for one request is its own, so that an abort may call it off.
        if mark is not None and not watched.touched and not chain.pending:
            self._chains[mark] = chain
            if len(self._chains) > MAX_CACHED:
                self._chains.popitem(last=False)
        return chain

    def _mark(
        self,
        params: RequestParams,
        context: BindContext,
        points: Points,
        provenance: Mapping[str, str],
        own: Sequence[Stage],
    ) -> Hashable | None:
        """Return all that a request's chain depends on; None if it cannot be hashed."""
        values = params.__dict__
        names = [*self.registry.fields, *self.registry.lost_fields]
        try:
            mark = (
                tuple([values[name] for name in names]),
                tuple([provenance.get(name) for name in (*names, "chain")]) if provenance else None,
                params.profile,
                params.greedy,
                params.fields_set,
                context.stop_ids,
                points,
                chain_key(params.chain),
                chain_key(None if params.picker is None else (params.picker,)),
                chain_key(own),
            )
            hash(mark)
        except TypeError:
            return None
        return mark

    def _build(
        self,
        params: RequestParams,
        context: BindContext,
        profile: Profile,
        points: Points,
        provenance: Mapping[str, str],
        own: Sequence[Stage],
    ) -> _Chain:
        order = self._order_of(profile)
        drafted = draft_chain(params, self.registry, profile, order, provenance)
        notes = [*profile.notes, *drafted.notes]
        drafts = with_own(drafted.drafts, own)
        bound = [(draft, bind_stage(draft, context)) for draft in drafts]
        for draft, value in bound:
            notes += changes(draft.instance, draft.check(), value)
            notes += ask(draft, draft.stage.remarks, value)
        bound, dropped = self._without_idle(bound, points)
        dropped = [*self._neutral(params), *dropped]
        refuse_unknown_points(points, [draft.instance for draft, _ in bound], dropped)
        entries = tuple(self._entry(draft, value) for draft, value in bound)
        notes += soft_violations(entries)
        steps = tuple(_step(draft, value) for draft, value in bound)
        structure = tuple(
            (entry.stage, entry.stage.version, entry.instance, entry.structure, entry.guarded)
            for entry in entries
        )
        report = PlanReport(
            _fingerprint(entries), steps, tuple(dropped), tuple(notes), profile.name
        )
        return _Chain(
            entries=entries,
            structure=structure,
            report=report,
            needs=frozenset().union(*(entry.stage.caps.needs for entry in entries)),
            stateful=_places(entries, _keeps_state),
            enders=_places(entries, lambda stage: _has(stage, "ended")),
            tellers=_places(entries, lambda stage: _has(stage, "result")),
            pending=_pending(entries),
        )

    def _without_idle(
        self, bound: Sequence[tuple[Draft, Any]], points: Points
    ) -> tuple[list[tuple[Draft, Any]], list[DroppedStep]]:
        """Leave out identities, and what cannot change the winner right before a greedy pick."""
        kept: list[tuple[Draft, Any]] = []
        dropped: list[DroppedStep] = []
        for draft, value in bound:
            if ask(draft, draft.stage.is_identity, value):
                kind = draft.stage.kind.name
                dropped.append(DroppedStep(draft.instance, _idle_reason(draft), kind))
            else:
                kept.append((draft, value))
        picker = kept[-1][0].stage.name
        if Tap.FINAL in points or picker not in {p.greedy for p in self.registry.profiles.values()}:
            return kept, dropped
        # Only from the end: before a stage that may change the winner, a shape still matters.
        while len(kept) > 1 and ask(kept[-2][0], kept[-2][0].stage.argmax_invariant, kept[-2][1]):
            if After(kept[-2][0].instance) in points:
                break
            draft, _ = kept.pop(-2)
            reason = f"it cannot change the winner, and {picker!r} takes the winner"
            dropped.append(DroppedStep(draft.instance, reason, draft.stage.kind.name))
        return kept, dropped

    def _neutral(self, params: RequestParams) -> list[DroppedStep]:
        """Tell of fields that the request set to a value that switches their stage off."""
        reason = (
            "is off, since temperature 0 takes the best token" if params.greedy else "is neutral"
        )
        return [
            DroppedStep(stage.name, f"{name} {reason}", stage.kind.name)
            for name, (stage, _) in self.registry.fields.items()
            if name in params.fields_set and getattr(params, name) is None
        ]

    def _entry(self, draft: Draft, value: Any) -> PlanEntry:
        structure = ask(draft, draft.stage.structure, value)
        try:
            hash(structure)
        except TypeError:
            raise ChainError(
                f"stage {draft.stage.name!r} returned {type(structure).__name__} from structure, "
                f"which must be hashable",
                parameter="chain",
            ) from None
        return PlanEntry(
            stage=draft.stage,
            instance=draft.instance,
            params=value,
            structure=structure,
            guarded=not self.registry.built_in(draft.stage),
            provenance={
                name: draft.sources.get(name, "default") for name in draft.stage.Params.model_fields
            },
        )

    def _number(self, structure: Hashable) -> int:
        """Return the key of a structure; equal ones get equal keys while they are remembered."""
        key = self._keys.get(structure)
        if key is None:
            if len(self._keys) >= MAX_CACHED:  # old programs live on; new requests get new keys
                self._keys.clear()
            key = self._keys[structure] = next(self._serial)
        return key

    # --- what changes with the registry --------------------------------------------------------

    def _follow_registry(self) -> None:
        if self._generation != self.registry.generation:
            self._generation = self.registry.generation
            self._chains.clear()
            self._orders.clear()

    def _profile_of(self, name: str | None) -> Profile:
        wanted = self.profile if name is None else name
        profile = self.registry.profiles.get(wanted)
        if profile is None:
            known = ", ".join(self.registry.profiles)
            raise ValidationError(
                f"profile must be one of {known}, got {wanted!r}"
                f"{did_you_mean(wanted, self.registry.profiles)}",
                parameter="profile",
                value=wanted,
            )
        return profile

    def _order_of(self, profile: Profile) -> Order:
        if profile.name not in self._orders:
            stages = self.registry.stages.values()
            self._orders[profile.name] = Order(stages, profile, self.registry.constraints)
        return self._orders[profile.name]


def _places(entries: Sequence[PlanEntry], holds: Callable[[type[Stage]], bool]) -> tuple[int, ...]:
    return tuple(place for place, entry in enumerate(entries) if holds(entry.stage))


def _has(stage: type[Stage], method: str) -> bool:
    """Whether a stage has its own version of a class method of the contract."""
    own = getattr(getattr(stage, method), "__func__", None)
    return own is not getattr(Stage, method).__func__


def _driven(report: PlanReport, driver: BoundDriver | None) -> PlanReport:
    """Say in a report which driver runs, and what it leaves without effect."""
    if driver is None:
        return report
    said = ", ".join(f"{name}={value!r}" for name, value in driver.values.items())
    notes = [f"driver {driver.kind.name}({said}), at most {driver.width} sequences at once"]
    if driver.adjusted.ignored:
        named = ", ".join(driver.adjusted.ignored)
        notes.append(f"{named} have no effect under driver {driver.kind.name!r}")
    return replace(report, notes=(*report.notes, *notes, *driver.adjusted.notes))


def _pending(entries: Sequence[PlanEntry]) -> tuple[Future[Any], ...]:
    found = [entry.stage.pending(entry.params) for entry in entries]
    return tuple(future for future in found if future is not None)


def _keeps_state(stage: type[Stage]) -> bool:
    return (
        stage.caps.stateful
        or stage.open is not Stage.open
        or stage.rebuild is not Stage.rebuild
        or stage.accept is not Stage.accept
    )


def _step(draft: Draft, value: Any) -> PlanStep:
    values = shown_values(draft.check(), value)
    return PlanStep(
        stage=draft.stage.name,
        id=draft.instance,
        kind=draft.stage.kind.name,
        params=values,
        provenance={name: draft.sources.get(name, "default") for name in values},
    )


def _idle_reason(draft: Draft) -> str:
    values = describe(shown_values(draft.check()))
    return f"{values} changes nothing" if draft.given else "it was given nothing to do"


def _fingerprint(entries: Sequence[PlanEntry]) -> str:
    """Hash the structure of a chain: names, versions, ids, code paths; no numbers, no secrets."""
    lines = [
        f"{entry.stage.name} {entry.stage.version} {entry.instance} {_plain(entry.structure)}"
        for entry in entries
    ]
    return blake2b("\n".join(lines).encode(), digest_size=6).hexdigest()


def _plain(structure: Hashable) -> str:
    """Spell a structure so that it reads the same in every process: no addresses, no set order."""
    if isinstance(structure, tuple):
        return f"({','.join(map(_plain, structure))})"
    if isinstance(structure, frozenset):
        return f"{{{','.join(sorted(map(_plain, structure)))}}}"
    if structure is None or isinstance(structure, str | int | float | bytes):
        return repr(structure)
    named = structure if hasattr(structure, "__qualname__") else type(structure)
    return f"{named.__module__}.{named.__qualname__}"
