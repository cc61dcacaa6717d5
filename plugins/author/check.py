"""Try a plugin against its contract: `check_stage`, `check_stop`, `check_observer`.

    from decodekit.plugins.author.check import check_stage

    check_stage(TopA, examples=[{"a": 0.2}, {"a": 0.9}]).raise_if_broken()

Every law is tried on rows of many shapes, on histories, and in an engine that preempts, drafts,
rewinds and forks. A law that is broken gives one sentence and the smallest example found.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...core.errors import DecodekitError, ValidationError
from ...core.stage import JointStage, Kind, Observer, Stage, Stop
from . import claims, row_laws, state_laws, watch_laws
from .hostile import VOCAB, Ask, HostileEngine, script
from .report import BROKEN, KEPT, SKIPPED, Breach, NotTried, Outcome, Report
from .trials import SIZES, TIMED, Bench, History, Row

SCRIPTS = ((1, 3, True), (2, 8, False), (3, 16, True))  # seed, number of events, fusion
MOST_EXAMPLES = 3  # that meet in the hostile engine


@dataclass(frozen=True, slots=True)
class Law:
    """A law by name; without those it `needs`, its verdict would mean nothing."""

    name: str
    test: Callable[[Bench], None]
    needs: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The law in a sentence."""
        return " ".join((self.test.__doc__ or "").split("\n\n")[0].split())


def survives_a_hostile_engine(bench: Bench) -> None:
    """Preempted, paused, rewound, drafted, forked, in any company: the tokens of a solo run."""
    for size in (VOCAB, 257, 1009):
        given = []
        for params in bench.examples:
            try:
                bench.bind(Row(torch.zeros(size), params))
                given.append(params)
            except DecodekitError:
                continue
        if given:
            break
    else:
        raise NotTried("no example can be bound at its vocabularies")
    asks = _asks(bench, given[:MOST_EXAMPLES])
    calm = HostileEngine(asks, vocab_size=size, context=bench.changes)
    for seed, num_events, fusion in SCRIPTS:
        engine = HostileEngine(
            asks, vocab_size=size, fusion=fusion, seed=seed, context=bench.changes, calm=calm
        )
        events = script(seed, len(asks), num_events)
        told = engine.differences(events)
        if told:
            few = engine.shrunk(events)
            told = engine.differences(few)
            how = "; ".join(map(str, few)) or "company alone"
            raise Breach(f"{told[0]}: {how}", str(asks[int(told[0].split()[1].split("+")[0])]))


STAGE_LAWS: tuple[Law, ...] = (
    Law("declarations", claims.declares_no_contradiction),
    Law("parameters", claims.checks_its_parameters),
    Law("runs", row_laws.runs_on_every_shape, ("parameters",)),
    Law("columns", claims.gives_numbers_as_columns, ("runs",)),
    Law("in_place", row_laws.works_in_place, ("runs",)),
    Law("returns_ids", row_laws.returns_ids, ("runs",)),
    Law("writes_no_row", row_laws.writes_no_row, ("returns_ids",)),
    Law("acts", row_laws.does_something, ("runs", "in_place")),
    Law("global_noise", row_laws.leaves_generators_alone, ("runs",)),
    Law("repeatable", row_laws.gives_equal_results, ("runs", "global_noise")),
    Law("shared_object", row_laws.keeps_nothing, ("runs",)),
    Law("needs", row_laws.declares_what_it_reads, ("runs",)),
    Law("addressed_noise", claims.draws_by_its_address, ("repeatable",)),
    Law("keyless", row_laws.depends_on_no_key, ("repeatable", "needs")),
    Law("no_resurrection", row_laws.revives_no_token, ("runs",)),
    Law("finite", row_laws.stays_finite, ("runs",)),
    Law("keeps_a_token", row_laws.kills_no_row, ("repeatable", "finite")),
    Law("dead_rows", row_laws.leaves_dead_rows_dead, ("runs",)),
    Law("alive_only", row_laws.counts_alive_tokens_only, ("repeatable", "finite")),
    Law("row_alone", row_laws.looks_at_no_other_row, ("repeatable", "finite")),
    Law("row_order", row_laws.minds_no_order, ("repeatable", "finite")),
    Law("batch_size", row_laws.minds_no_batch_size, ("repeatable", "finite")),
    Law("structure", row_laws.shares_a_program_rightly, ("row_alone",)),
    Law("structure_numbers", claims.keeps_numbers_out_of_structure, ("runs",)),
    Law("shape_order", row_laws.keeps_the_order, ("repeatable",)),
    Law("ties", row_laws.decides_ties_by_id, ("repeatable",)),
    Law("identity", claims.skips_only_identities, ("repeatable",)),
    Law("argmax", claims.keeps_the_winner_where_it_says_so, ("repeatable", "finite")),
    Law("monotone", claims.is_monotone_if_it_says_so, ("repeatable",)),
    Law("top_segment", claims.keeps_a_top_segment_if_it_says_so, ("repeatable",)),
    Law("short_list", claims.needs_no_more_than_the_best, ("repeatable",)),
    Law("list_or_row", claims.picks_alike_from_a_list, ("repeatable", "returns_ids")),
    Law("state_read_only", state_laws.reads_only_in_transform, ("repeatable",)),
    Law("state_pieces", state_laws.accepts_in_any_pieces, ("state_read_only",)),
    Law("state_rollback", state_laws.takes_tokens_back, ("state_read_only",)),
    Law("state_fork", state_laws.forks_apart, ("state_read_only",)),
    Law("state_rebuild", state_laws.rebuilds_from_tokens, ("state_read_only",)),
    Law("state_apart", state_laws.shares_nothing, ("runs",)),
    Law("hostile_engine", survives_a_hostile_engine, ("repeatable", "finite")),
)


def check_stage(
    stage: type[Stage],
    params: Mapping[str, object] | None = None,
    *,
    examples: Sequence[Mapping[str, object]] = (),
    histories: Sequence[History] = (),
    sizes: Sequence[int] = SIZES,
    context: Mapping[str, Any] | None = None,
    only: Sequence[str] = (),
    without: Sequence[str] = (),
) -> Report:
    """Try a Stage or Picker class against every law, and report.

    `params` and `examples` are parameters to try it with; numbers near them and at the ends of
    their range are tried too. `histories` are (prompt, output) pairs at which it acts, beside
    common ones. `sizes` are vocabularies; `context` are fields of BindContext. `only` and `without`
    name laws (`law_names`).

    Raises ValidationError for what is no stage of its own.
    """
    _refuse_strangers(stage)
    known = law_names()
    for name in (*only, *without):
        if name not in known:
            raise ValidationError(
                f"there is no law {name!r}; known: {', '.join(known)}", parameter="only", value=name
            )
    own = ([] if params is None else [params]) + list(examples)
    bench = Bench(stage, own, histories=histories, sizes=sizes, context=context)
    chosen = [law for law in STAGE_LAWS if law.name not in without]
    outcomes: list[Outcome] = []
    broken: set[str] = set()
    for law in chosen:
        if only and law.name not in only and not _is_needed(law.name, only):
            continue
        outcome = _tried(law, bench, broken)
        if outcome.state == BROKEN or outcome.sentence.startswith(_AFTER):
            broken.add(law.name)
        if not only or law.name in only:
            outcomes.append(outcome)
    speed = None if broken else _microseconds(bench)
    return Report(f"{stage.name or stage.__name__}", tuple(outcomes), bench.num_rows, speed)


def check_stop(
    stop: Stop, *, request: Mapping[str, object] | None = None, context: Any = None
) -> Report:
    """Try a Stop object: its check is a function of the tokens and of nothing else.

    `request` are SamplingParams under which it is active.
    """
    return watch_laws.check_stop(stop, request or {}, context or {})


def check_observer(
    observer: Observer,
    *,
    request: Mapping[str, object] | None = None,
    wish: Mapping[str, object] | None = None,
    context: Any = None,
) -> Report:
    """Try an Observer object: it reads rows one by one, changes nothing, and fills known fields.

    `wish` are its own parameters, as in `observers=[{"observer": name, ...}]`.
    """
    return watch_laws.check_observer(observer, request or {}, wish, context or {})


def law_names() -> tuple[str, ...]:
    """Return the names of the laws of stages, in the order in which they are tried."""
    return tuple(law.name for law in STAGE_LAWS)


_AFTER = "not tried, since "


def _tried(law: Law, bench: Bench, broken: set[str]) -> Outcome:
    first = next((name for name in law.needs if name in broken), None)
    if first is not None:
        return Outcome(law.name, law.title, SKIPPED, f"{_AFTER}{first!r} is broken")
    try:
        law.test(bench)
    except NotTried as reason:
        return Outcome(law.name, law.title, SKIPPED, str(reason))
    except Breach as breach:
        return Outcome(law.name, law.title, BROKEN, breach.sentence, breach.example)
    return Outcome(law.name, law.title, KEPT)


def _is_needed(name: str, only: Sequence[str]) -> bool:
    needed = set(only)
    for law in reversed(STAGE_LAWS):
        if law.name in needed:
            needed.update(law.needs)
    return name in needed


def _refuse_strangers(stage: object) -> None:
    if not (isinstance(stage, type) and issubclass(stage, Stage)):
        raise ValidationError(
            f"check_stage takes a Stage class, got {stage!r}", parameter="stage", value=stage
        )
    if issubclass(stage, JointStage):
        raise ValidationError(
            f"stage {stage.name!r} works on all rows of a step at once, which only the engine can "
            "try",
            parameter="stage",
        )
    if stage.kind is Kind.FORWARD:
        raise ValidationError(
            f"stage {stage.name!r} is of kind FORWARD, whose rows come from a model",
            parameter="stage",
        )


def _asks(bench: Bench, given: Sequence[Mapping[str, object]]) -> list[Ask]:
    """Return requests of the plugin with each example, and company that uses other chains."""
    company = (
        [{"stage": "repetition_penalty", "penalty": 1.3}, {"stage": "top_k", "k": 5}],
        [{"stage": "temperature", "t": 0.8}, {"stage": "top_p", "p": 0.9}],
    )
    asks = []
    for number in range(max(len(given), 2)):
        params = given[number % len(given)]
        own = bench.stage(id=None, **dict(params))
        if bench.is_picker:
            chain: list[Any] = [{"stage": "top_k", "k": 12}, own]
        else:
            before = {"stage": "temperature", "t": 1.25}
            last = bench.stage.kind in (Kind.CUT, Kind.MARK)
            chain = [before, own] if last else [own, before]
        asks.append(Ask(tuple(chain), (number + 1, 2, number + 1, 2), key=100 + number))
    asks += [
        Ask(tuple(chain), (5, number), key=200 + number) for number, chain in enumerate(company)
    ]
    return asks


def _microseconds(bench: Bench) -> float | None:
    """Return the time that one row takes in a batch of 64."""
    params = next((each for each in bench.examples if bench.acts(each, TIMED)), None)
    if params is None:
        return None
    rows = bench.rows(TIMED, params, 64)
    best = float("inf")
    bench.run(rows)
    bound = [bench.bind(row) for row in rows]
    structure = bench.stage.structure(bound[0])
    if any(bench.stage.structure(each) != structure for each in bound):
        return None
    for _ in range(3):
        begun = time.perf_counter()
        bench.run_group(rows, bound)
        best = min(best, time.perf_counter() - begun)
    return 1e6 * best / len(rows)
