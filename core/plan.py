"""Plans: the chain of one request, bound and ready to run, and the planner that makes them.

admit: flat fields and chain -> drafts (`draft.py`) -> bind -> drop what changes nothing -> Plan.
Numbers are not part of a plan's key, so requests that differ in them alone share one program.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from itertools import count
from threading import Lock
from typing import TYPE_CHECKING, Any

from .binding import BoundStop, ask, bind_observers, bind_stage, bind_stops
from .draft import Draft, chain_key, draft_chain
from .errors import ChainError, NotInThisVersion, ValidationError, did_you_mean
from .order import Order, soft_violations
from .plan_report import DroppedStep, PlanReport, PlanStep
from .plan_text import changes, describe, shown_values
from .stage import BindContext, Need, Observer, Profile, Stage, Tap

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


@dataclass(frozen=True, slots=True)
class _Chain:
    """The part of a plan that equal requests share."""

    entries: tuple[PlanEntry, ...]
    structure: Hashable
    report: PlanReport
    needs: frozenset[Need]
    stateful: tuple[int, ...]


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
        }
        self._chains: OrderedDict[Hashable, _Chain] = OrderedDict()
        self._keys: dict[Hashable, int] = {}
        self._serial = count(1)
        self._orders: dict[str, Order] = {}
        self._generation = registry.generation
        self._lock = Lock()
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
        )
        if params.driver is not None:
            raise NotInThisVersion(
                "driver is not in this version; leave it unset", parameter="driver"
            )
        with self._lock:
            self._follow_registry()
            observers = bind_observers(self.registry.observers, params, context)
            stops = bind_stops(self.registry.stops, params, context)
            chain = self._chain(params, context, observers, provenance or NOTHING)
            key = self._number((chain.structure, observers))
        return Plan(
            chain.entries,
            key,
            observers,
            stops,
            chain.report,
            chain.needs,
            chain.stateful,
            self.eos_ids[0] if self.eos_ids else None,
        )

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
    ) -> _Chain:
        watches_final = False
        for observer, order in observers:
            watches_final |= Tap.FINAL in observer.taps(order)
        mark = self._mark(params, context, watches_final, provenance)
        if mark is not None and mark in self._chains:
            self._chains.move_to_end(mark)
            return self._chains[mark]
        profile = self._profile_of(params.profile)
        watched = _WatchedContext(**{name: getattr(context, name) for name in _CONTEXT})
        chain = self._build(params, watched, profile, watches_final, provenance)
        if mark is not None and not watched.touched:
            self._chains[mark] = chain
            if len(self._chains) > MAX_CACHED:
                self._chains.popitem(last=False)
        return chain

    def _mark(
        self,
        params: RequestParams,
        context: BindContext,
        watches_final: bool,
        provenance: Mapping[str, str],
    ) -> Hashable | None:
        """Return all that a request's chain depends on; None if it cannot be hashed."""
        values = params.__dict__
        names = [*self.registry.fields, *self.registry.lost_fields]
        try:
            mark = (
                tuple([values[name] for name in names]),
                tuple([provenance.get(name) for name in names]) if provenance else None,
                params.profile,
                params.greedy,
                params.fields_set,
                context.stop_ids,
                watches_final,
                chain_key(params.chain),
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
        watches_final: bool,
        provenance: Mapping[str, str],
    ) -> _Chain:
        order = self._order_of(profile)
        drafted = draft_chain(params, self.registry, profile, order, provenance)
        notes = [*profile.notes, *drafted.notes]
        bound = [(draft, bind_stage(draft, context)) for draft in drafted.drafts]
        for draft, value in bound:
            notes += changes(draft.instance, draft.check(), value)
        bound, dropped = self._without_idle(bound, watches_final)
        dropped = [*self._neutral(params), *dropped]
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
            stateful=tuple(
                place for place, entry in enumerate(entries) if _keeps_state(entry.stage)
            ),
        )

    def _without_idle(
        self, bound: Sequence[tuple[Draft, Any]], watches_final: bool
    ) -> tuple[list[tuple[Draft, Any]], list[DroppedStep]]:
        """Leave out identities, and what cannot change the winner right before a greedy pick."""
        kept: list[tuple[Draft, Any]] = []
        dropped: list[DroppedStep] = []
        for draft, value in bound:
            if ask(draft, draft.stage.is_identity, value):
                dropped.append(DroppedStep(draft.instance, _idle_reason(draft)))
            else:
                kept.append((draft, value))
        picker = kept[-1][0].stage.name
        if watches_final or picker not in {p.greedy for p in self.registry.profiles.values()}:
            return kept, dropped
        # Only from the end: before a stage that may change the winner, a shape still matters.
        while len(kept) > 1 and ask(kept[-2][0], kept[-2][0].stage.argmax_invariant, kept[-2][1]):
            draft, _ = kept.pop(-2)
            reason = f"it cannot change the winner, and {picker!r} takes the winner"
            dropped.append(DroppedStep(draft.instance, reason))
        return kept, dropped

    def _neutral(self, params: RequestParams) -> list[DroppedStep]:
        """Tell of fields that the request set to a value that switches their stage off."""
        reason = (
            "is off, since temperature 0 takes the best token" if params.greedy else "is neutral"
        )
        return [
            DroppedStep(stage.name, f"{name} {reason}")
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
