"""Mistakes that authors make, each caught by the law that names it, in a sentence they can use."""

from __future__ import annotations

import random
import re
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from pydantic import Field
from torch import Tensor

from decodekit.core.batch import PickView, Ranking, RowView
from decodekit.core.stage import (
    Caps,
    CutParams,
    CutStage,
    Form,
    Kind,
    Need,
    Picker,
    Stage,
    StageParams,
)
from decodekit.plugins.author.check import check_stage, law_names

INF = float("inf")


class Trap(NamedTuple):
    """A broken plugin, the law that it breaks, and words of the sentence."""

    stage: type[Stage]
    law: str
    says: str
    examples: tuple[dict[str, Any], ...] = ({"a": 0.5}, {"a": 0.8})


class Params(StageParams):
    """One number."""

    a: float = Field(default=0.5, gt=0, le=1)


class Base(Stage):
    """What the traps share."""

    kind = Kind.SHAPE
    Params = Params


# --- tokens that are dead ------------------------------------------------------------------------


class NanToNum(Base):
    """transformers' remover of NaN and infinities: -inf becomes the dtype's lowest number."""

    name = "trap.nan_to_num"

    def transform(self, logits: Tensor, rows: RowView) -> None:
        logits.copy_(torch.nan_to_num(logits) * rows.column("a")[:, None])


class MaskedZerosInStd(Base):
    """top-n-sigma that counts masked entries as zeros."""

    name = "trap.masked_zeros"
    kind = Kind.CUT

    def transform(self, logits: Tensor, rows: RowView) -> None:
        spread = logits.masked_fill(logits == -INF, 0.0).std(1, unbiased=False, keepdim=True)
        least = logits.amax(1, keepdim=True) - rows.column("a")[:, None] * spread
        logits.masked_fill_(logits < least, -INF)


class StdOverInfinities(Base):
    """top-n-sigma with a plain std: NaN as soon as one token is masked, and then all stay."""

    name = "trap.std_over_inf"
    kind = Kind.CUT

    def transform(self, logits: Tensor, rows: RowView) -> None:
        spread = logits.std(1, unbiased=False, keepdim=True)
        least = logits.amax(1, keepdim=True) - rows.column("a")[:, None] * spread
        logits.masked_fill_(logits < least, -INF)


class EntropyOfDeadTokens(Base):
    """Entropy with 0 * ln 0, which is NaN."""

    name = "trap.entropy_nan"

    def transform(self, logits: Tensor, rows: RowView) -> None:
        p = logits.softmax(1)
        logits.div_(0.5 + -(p * p.log()).sum(1, keepdim=True))


class CountsTheVocabulary(Base):
    """A dynamic temperature that divides by ln V where n alive is meant."""

    name = "trap.counts_vocab"

    def transform(self, logits: Tensor, rows: RowView) -> None:
        entropy = torch.special.entr(logits.softmax(1)).sum(1, keepdim=True)
        logits.div_(0.5 + entropy / np.log(logits.shape[1] + 1))


class KillsTheRow(Base):
    """A threshold that nothing may reach."""

    name = "trap.kills_row"
    kind = Kind.CUT

    def transform(self, logits: Tensor, rows: RowView) -> None:
        logits.masked_fill_(logits.softmax(1) < rows.column("a")[:, None], -INF)


class ForgetsMinKeep(Base):
    """A cut that takes `min_keep` and ignores it."""

    name = "trap.forgets_min_keep"
    kind = Kind.CUT

    class Params(CutParams):
        a: float = Field(default=0.5, gt=0, le=1)

    def transform(self, logits: Tensor, rows: RowView) -> None:
        least = logits.amax(1, keepdim=True) - rows.column("a")[:, None]
        logits.masked_fill_(logits < least, -INF)


class RaisesOnADeadRow(Base):
    """A distribution object that refuses a row without tokens."""

    name = "trap.dead_row"

    def transform(self, logits: Tensor, rows: RowView) -> None:
        if bool((logits == -INF).all(1).any()):
            raise ValueError("the parameter logits has invalid values")
        logits.mul_(rows.column("a")[:, None])


class Overflows(Base):
    """A power that leaves float32."""

    name = "trap.overflows"

    def transform(self, logits: Tensor, rows: RowView) -> None:
        dead = logits == -INF
        logits.copy_(logits.sign() * logits.abs() ** 12)
        logits.masked_fill_(dead, -INF)


# --- rows that look at each other -----------------------------------------------------------------


class BatchWideStatistic(Base):
    """A temperature by the entropy of the whole batch."""

    name = "trap.batch_wide"

    def transform(self, logits: Tensor, rows: RowView) -> None:
        entropy = torch.special.entr(logits.softmax(1)).sum()
        logits.div_(0.5 + entropy)


class BatchWideMaximum(Base):
    """Quadratic smoothing around the largest logit of the batch."""

    name = "trap.batch_max"

    def transform(self, logits: Tensor, rows: RowView) -> None:
        logits.sub_(logits.max()).mul_(rows.column("a")[:, None])


class FirstRowsParameters(Base):
    """One row's number for all."""

    name = "trap.first_rows"

    def transform(self, logits: Tensor, rows: RowView) -> None:
        logits.mul_(rows.params[0].a)


class RowNumberForSlot(Base):
    """The place in the batch as if it meant something."""

    name = "trap.row_number"

    def transform(self, logits: Tensor, rows: RowView) -> None:
        logits.mul_(1.0 + torch.arange(len(rows))[:, None])


class NumbersInStructure(Base):
    """A program for each value."""

    name = "trap.structure_number"

    @classmethod
    def structure(cls, params: Any) -> float:
        return float(params.a)

    def transform(self, logits: Tensor, rows: RowView) -> None:
        logits.mul_(rows.mode)


# --- what it leaves behind ------------------------------------------------------------------------


class GlobalNoise(Base):
    """torch.rand."""

    name = "trap.global_rng"
    caps = Caps(random=True)

    def transform(self, logits: Tensor, rows: RowView) -> None:
        logits.add_(torch.rand(logits.shape))


class PythonNoise(Base):
    """random.random for XTC's coin."""

    name = "trap.python_rng"
    caps = Caps(random=True)

    def transform(self, logits: Tensor, rows: RowView) -> None:
        logits.mul_(0.25 if random.random() < 0.5 else 0.5)


class OwnGenerator(Base):
    """A generator that moves on from call to call."""

    name = "trap.own_generator"
    caps = Caps(random=True)
    generator = torch.Generator()

    def transform(self, logits: Tensor, rows: RowView) -> None:
        logits.add_(torch.rand(logits.shape, generator=self.generator))


class SameNoiseForEveryone(Base):
    """A generator that is seeded at each call."""

    name = "trap.seeded"
    kind = Kind.BIAS
    caps = Caps(random=True)

    def transform(self, logits: Tensor, rows: RowView) -> None:
        logits.add_(torch.rand(logits.shape[1], generator=torch.Generator().manual_seed(1)))


class UndeclaredNoise(Base):
    """Addressed, and not declared."""

    name = "trap.undeclared_noise"
    kind = Kind.BIAS

    def transform(self, logits: Tensor, rows: RowView) -> None:
        ids = torch.arange(logits.shape[1]).expand_as(logits)
        logits.add_(rows.uniform(ids).float())


class RemembersOnTheObject(Base):
    """A counter on the shared object."""

    name = "trap.on_the_object"

    def transform(self, logits: Tensor, rows: RowView) -> None:
        self.calls = getattr(self, "calls", 0) + 1
        logits.mul_(rows.column("a")[:, None])


class ReturnsACopy(Base):
    """The habit of transformers."""

    name = "trap.returns"

    def transform(self, logits: Tensor, rows: RowView) -> None:
        return logits * rows.column("a")[:, None]  # type: ignore[return-value]


class RebindsItsCopy(Base):
    """Work that is lost."""

    name = "trap.rebinds"

    def transform(self, logits: Tensor, rows: RowView) -> None:
        logits = logits * rows.column("a")[:, None]


class MissingColumn(Base):
    """A column that no table fills."""

    name = "trap.no_column"

    def transform(self, logits: Tensor, rows: RowView) -> None:
        logits.mul_(rows.column("alpha")[:, None])


class ReadsHiddenTokens(Base):
    """Reads token values without saying so: placeholders under asynchronous scheduling."""

    name = "trap.hidden_need"
    kind = Kind.BIAS

    def transform(self, logits: Tensor, rows: RowView) -> None:
        for row in range(len(rows)):
            for token in rows.output(row):
                logits[row, token] -= 1.0


# --- declarations that are not true ---------------------------------------------------------------


class ClaimsTheWinner(Base):
    """typical-p says that it keeps the best token."""

    name = "trap.winner"
    kind = Kind.CUT

    @classmethod
    def argmax_invariant(cls, params: Any) -> bool:
        return True

    def transform(self, logits: Tensor, rows: RowView) -> None:
        logp = logits.log_softmax(1)
        entropy = torch.special.entr(logp.exp()).sum(1, keepdim=True)
        far = (logp + entropy).abs().masked_fill(logits == -INF, INF)
        logits.masked_fill_(far > far.amin(1, keepdim=True) + rows.column("a")[:, None], -INF)


class WinnerAtSomeParameters(Base):
    """True at the examples, false elsewhere in the range: quadratic smoothing with any curve."""

    name = "trap.winner_range"
    kind = Kind.BIAS

    class Params(StageParams):
        curve: float = Field(default=2.0, ge=0, le=8)

    @classmethod
    def argmax_invariant(cls, params: Any) -> bool:
        return True

    def transform(self, logits: Tensor, rows: RowView) -> None:
        c = rows.column("curve")[:, None]
        best = logits.amax(1, keepdim=True)
        d = (logits - best).clamp(min=-100.0)
        changed = best - (3 - c) / 2 * 0.3 * d**2 + (c - 1) / 2 * 0.3 * d**3
        logits.copy_(changed.masked_fill(logits == -INF, -INF))


class ClaimsMonotone(Base):
    """Looks at the whole row and says that it does not."""

    name = "trap.monotone"
    form = Form.ELEMENTWISE
    caps = Caps(monotone=True)

    def transform(self, logits: Tensor, rows: RowView) -> None:
        alive = logits > -INF
        mean = logits.masked_fill(~alive, 0.0).sum(1) / alive.sum(1).clamp(min=1)
        logits.sub_(mean[:, None])


class ClaimsASegment(CutStage):
    """Drops the best token of a ranked list."""

    name = "trap.segment"

    class Params(CutParams):
        a: float = Field(default=0.5, gt=0, le=1)

    def keep(self, ranking: Ranking, rows: RowView) -> Tensor:
        count = ranking.alive.sum(1, keepdim=True)
        return (ranking.ranks > 0) | (count < 3)


class NeedsTheWholeRow(CutStage):
    """Takes the mass of the list for that of the row."""

    name = "trap.short_list"

    class Params(CutParams):
        a: float = Field(default=0.5, gt=0, le=1)

    def keep(self, ranking: Ranking, rows: RowView) -> Tensor:
        mass = ranking.mass.double()
        return mass / mass.sum(1, keepdim=True) >= rows.column("a")[:, None] * 0.05


class TiesByChance(Base):
    """Decides ties by what the kernel happened to do."""

    name = "trap.ties"
    kind = Kind.CUT

    def transform(self, logits: Tensor, rows: RowView) -> None:
        odd = torch.arange(logits.shape[1]) % 2 == 1
        best = logits.amax(1, keepdim=True)
        logits.masked_fill_((logits < best) & odd, -INF)


class SwapsTokens(Base):
    """A SHAPE that is not increasing."""

    name = "trap.swaps"

    def transform(self, logits: Tensor, rows: RowView) -> None:
        dead = logits == -INF
        logits.copy_(logits.clamp(-50, 50).cos()).masked_fill_(dead, -INF)


class ClaimsIdentity(Base):
    """Leaves itself out where it would act."""

    name = "trap.identity"

    @classmethod
    def is_identity(cls, params: Any) -> bool:
        return bool(params.a < 0.6)

    def transform(self, logits: Tensor, rows: RowView) -> None:
        logits.mul_(rows.column("a")[:, None])


class TakesAnything(Base):
    """Ignores what it does not know."""

    name = "trap.takes_anything"

    class Params(StageParams):
        model_config = {"extra": "ignore"}
        a: float = 0.5

    def transform(self, logits: Tensor, rows: RowView) -> None:
        logits.mul_(rows.column("a")[:, None])


# --- state ----------------------------------------------------------------------------------------


class Remembers(Stage):
    """A sound base: bans the tokens of the output, from its own state."""

    kind = Kind.MASK
    caps = Caps(stateful=True)
    Params = Params

    def open(self, params: Any, prompt: Any) -> Any:
        return {"tokens": []}

    def accept(self, state: Any, tokens: Any) -> None:
        state["tokens"].extend(tokens)

    def rollback(self, state: Any, count: int) -> None:
        del state["tokens"][len(state["tokens"]) - count :]

    def fork(self, state: Any) -> Any:
        return {"tokens": list(state["tokens"])}

    def transform(self, logits: Tensor, rows: RowView) -> None:
        for row, state in enumerate(rows.states):
            for token in state["tokens"]:
                logits[row, token] = -INF


class Sound(Remembers):
    name = "trap.sound"


class AdvancesInTransform(Remembers):
    """Counts its calls: chunks, drafts and second runs are calls too."""

    name = "trap.in_transform"

    def transform(self, logits: Tensor, rows: RowView) -> None:
        super().transform(logits, rows)
        for state in rows.states:
            state["calls"] = state.get("calls", 0) + 1
        for row, state in enumerate(rows.states):
            logits[row, : state["calls"]] = -INF


class ForgetsRollback(Remembers):
    """Takes nothing back."""

    name = "trap.no_rollback"

    def rollback(self, state: Any, count: int) -> None:
        pass


class LacksRollback(Stage):
    """Does not implement it."""

    name = "trap.lacks_rollback"
    kind = Kind.MASK
    caps = Caps(stateful=True)
    Params = Params
    open, accept, fork = Remembers.open, Remembers.accept, Remembers.fork
    transform = Remembers.transform


class ForkSharesTheList(Remembers):
    """A shallow copy."""

    name = "trap.shallow_fork"

    def fork(self, state: Any) -> Any:
        return dict(state)


class ForkForgets(Remembers):
    """A clone that starts anew."""

    name = "trap.fresh_fork"

    def fork(self, state: Any) -> Any:
        return {"tokens": []}


class OneListForAll(Remembers):
    """A mutable default."""

    name = "trap.shared_list"
    shared: list[int] = []

    def open(self, params: Any, prompt: Any) -> Any:
        self.shared.clear()
        return {"tokens": self.shared}


class RebuildsFromTheEnd(Remembers):
    """A rebuild that looks at the last token alone."""

    name = "trap.bad_rebuild"

    def rebuild(self, params: Any, prompt: Any, output: Any) -> Any:
        return {"tokens": list(output[-1:])}


class TakesOneTokenOnly(Remembers):
    """Expects one token a call."""

    name = "trap.one_token"

    def accept(self, state: Any, tokens: Any) -> None:
        state["tokens"].append(tokens[0])


class UndeclaredState(Remembers):
    """Keeps a state and does not say so."""

    name = "trap.undeclared_state"
    caps = Caps()


# --- pickers --------------------------------------------------------------------------------------


class PicksTheDead(Picker):
    """argmax over all-masked rows is token 0; here, the last token whatever it is."""

    name = "trap.picks_dead"

    def pick(self, view: PickView, rows: RowView) -> Tensor:
        return torch.full((len(rows),), view.vocab_size - 1)


class DrawsTogether(Picker):
    """One uniform number for the whole batch."""

    name = "trap.draws_together"
    caps = Caps(random=True)

    def pick(self, view: PickView, rows: RowView) -> Tensor:
        unit = rows.uniform(torch.zeros(len(rows), 1, dtype=torch.int64))[0, 0]
        total = view.logits.double().softmax(1).cumsum(1)
        total[view.logits == -INF] = -1.0
        return (total >= unit * total.amax(1, keepdim=True)).int().argmax(1)


class Multinomial(Picker):
    """torch.multinomial."""

    name = "trap.multinomial"
    caps = Caps(random=True)

    def pick(self, view: PickView, rows: RowView) -> Tensor:
        sound = view.logits.masked_fill((view.logits == -INF).all(1, keepdim=True), 0.0)
        return torch.multinomial(sound.softmax(1), 1)[:, 0]


class WritesTheRow(Picker):
    """Leaves its working on the row that observers see."""

    name = "trap.writes_row"

    def pick(self, view: PickView, rows: RowView) -> Tensor:
        return view.logits.sub_(1.0).argmax(1)


TRAPS = [
    Trap(NanToNum, "no_resurrection", r"token \d+ was dead \(-inf\) and became -"),
    Trap(MaskedZerosInStd, "alive_only", "some statistic counts dead tokens"),
    Trap(StdOverInfinities, "alive_only", "some statistic counts dead tokens"),
    Trap(EntropyOfDeadTokens, "finite", "became nan"),
    Trap(CountsTheVocabulary, "alive_only", "some statistic counts dead tokens"),
    Trap(KillsTheRow, "keeps_a_token", r"it left 0 of \d+ alive tokens; it must keep at least 1"),
    Trap(ForgetsMinKeep, "keeps_a_token", "it must keep at least 2"),
    Trap(RaisesOnADeadRow, "dead_rows", "it raised ValueError: the parameter logits has invalid"),
    Trap(Overflows, "finite", r"token \d+ became inf"),
    Trap(BatchWideStatistic, "row_alone", r"the row alone became .*, in a batch of 1"),
    Trap(BatchWideMaximum, "row_alone", "the row alone became"),
    Trap(FirstRowsParameters, "structure", "take numbers of a request from rows.column"),
    Trap(RowNumberForSlot, "row_order", r"when it stood at place \d+"),
    Trap(RowNumberForSlot, "batch_size", "copy 1 of 2 equal rows became"),
    Trap(NumbersInStructure, "structure_numbers", "structure holds the number 'a'"),
    Trap(GlobalNoise, "global_noise", "it draws from the global generator of torch"),
    Trap(PythonNoise, "global_noise", "it draws from the global generator of random"),
    Trap(OwnGenerator, "repeatable", "it draws from a generator of its own"),
    Trap(SameNoiseForEveryone, "addressed_noise", "the same under every key of a request"),
    Trap(UndeclaredNoise, "needs", "do not declare random=True"),
    Trap(RemembersOnTheObject, "shared_object", "transform set 'calls' on the stage object"),
    Trap(ReturnsACopy, "in_place", "it must change the given logits in place and return None"),
    Trap(RebindsItsCopy, "acts", "it changed no row at all; work in place"),
    Trap(MissingColumn, "runs", "it asks for the column 'alpha', which its table does not have"),
    Trap(ReadsHiddenTokens, "needs", r"it reads rows.output, and .* do not declare Need.OUTPUT"),
    Trap(ClaimsTheWinner, "argmax", r"argmax_invariant says that the winner stays, and \d+ became"),
    Trap(WinnerAtSomeParameters, "argmax", "the winner stays", ({"curve": 2.0},)),
    Trap(ClaimsMonotone, "monotone", "it looks at more than a logit and its columns"),
    Trap(ClaimsASegment, "top_segment", r"it kept token \d+ and dropped token \d+"),
    Trap(NeedsTheWholeRow, "short_list", "must declare needs_full_row=True"),
    Trap(TiesByChance, "ties", "which no rule about ids explains"),
    Trap(SwapsTokens, "shape_order", "came out below it"),
    Trap(ClaimsIdentity, "identity", "change nothing, and with both a row changes"),
    Trap(TakesAnything, "parameters", "takes the unknown parameter 'no_such_parameter'"),
    Trap(TakesAnything, "declarations", "its Params must stay frozen and forbid unknown names"),
    Trap(AdvancesInTransform, "state_read_only", "transform changes the state, which only accept"),
    Trap(ForgetsRollback, "state_rollback", "rollback does not undo accept"),
    Trap(LacksRollback, "state_rollback", "rollback raised NotImplementedError"),
    Trap(ForkSharesTheList, "state_fork", "fork must copy what accept changes"),
    Trap(ForkForgets, "state_fork", "does something else than the state it was made of"),
    Trap(OneListForAll, "state_apart", "their states share something"),
    Trap(RebuildsFromTheEnd, "state_rebuild", "rebuilt from its tokens, as after a preemption"),
    Trap(TakesOneTokenOnly, "state_pieces", "at once gives another state than one by one"),
    Trap(UndeclaredState, "declarations", "do not declare stateful=True"),
    Trap(PicksTheDead, "returns_ids", r"it chose the dead token \d+", ({},)),
    Trap(DrawsTogether, "row_alone", r"alone became token \d+, in a batch of \d+ token", ({},)),
    Trap(Multinomial, "global_noise", "the global generator of torch", ({},)),
    Trap(WritesTheRow, "writes_no_row", "pick wrote into the row", ({},)),
]


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: f"{trap.stage.__name__}-{trap.law}")
def test_a_broken_plugin_is_caught_by_its_law_in_one_sentence(trap: Trap) -> None:
    sizes = (1, 2, 5, 65)
    report = check_stage(trap.stage, examples=trap.examples, only=[trap.law], sizes=sizes)

    outcome = report.of(trap.law)
    assert outcome.state == "broken", str(report)
    assert re.search(trap.says, outcome.sentence), outcome.sentence
    assert "\n" not in outcome.sentence


HOSTILE = [
    AdvancesInTransform,
    ForgetsRollback,
    LacksRollback,
    ForkSharesTheList,
    ForkForgets,
    RebuildsFromTheEnd,
    BatchWideStatistic,
    FirstRowsParameters,
]


@pytest.mark.parametrize("stage", HOSTILE, ids=lambda stage: stage.__name__)
def test_the_hostile_engine_by_itself_catches_what_breaks_under_scheduling(
    stage: type[Stage],
) -> None:
    examples = [{"a": 0.4}, {"a": 0.9}]

    outcome = check_stage(stage, examples=examples, only=["hostile_engine"]).of("hostile_engine")

    assert outcome.state == "broken"
    assert re.search(r"request \d(\+\d)? (got|ended)", outcome.sentence)


def test_a_sound_plugin_breaks_nothing() -> None:
    report = check_stage(Sound, examples=[{"a": 0.5}])

    assert report.ok, str(report)
    assert "keeps its contract" in str(report)


def test_an_example_is_as_small_as_can_be() -> None:
    outcome = check_stage(KillsTheRow, {"a": 0.9}, only=["keeps_a_token"]).of("keeps_a_token")

    values = re.search(r"logits \[([^]]*)\]", outcome.example)
    assert values is not None
    assert len(values[1].split(",")) <= 5


def test_what_follows_from_a_breach_is_not_reported_again() -> None:
    report = check_stage(GlobalNoise, examples=[{"a": 0.5}])

    assert report.of("row_alone").state == "skipped"
    assert "'repeatable' is broken" in report.of("row_alone").sentence or (
        "'global_noise'" in report.of("repeatable").sentence
    )


def test_every_law_of_a_stage_catches_some_trap_or_is_kept_by_construction() -> None:
    caught = {trap.law for trap in TRAPS} | {"hostile_engine"}

    assert set(law_names()) - caught == {"columns", "keyless", "list_or_row"}


def test_need_is_what_it_says() -> None:
    assert {need.name for need in Need} == {"PROMPT", "OUTPUT", "COUNTS"}
