"""A draft model: a small model with the same tokenizer writes ahead, and the engine's model checks.

Where the request draws, the draft is drawn with the noise that the request's own draw will read, at
the same place: the more alike the two models' distributions, the more often both draw the same
token. Of the request's chain the draft knows temperature, top-k, top-p and min-p alone; whatever
else is in it shows in fewer right guesses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from ...core.errors import ValidationError
from ...core.hookspecs import hookimpl
from ...core.proposer import Ask, FurtherModel, Proposer, ProposerContext, Speaker
from ...kernels.ops import race_list, race_segments, rank_top

LISTED = 256  # tokens of a draft's row that cuts look at
SIGN = 2**63


@dataclass(frozen=True, slots=True)
class Draft:
    """The model, with the parameters that it was asked for with."""

    model: FurtherModel
    params: DraftModel.Params


class DraftModel(Proposer):
    """A smaller model with the same tokenizer writes ahead."""

    name = "draft_model"
    of_engine = True
    needs_prompt_ids = True

    class Params(Proposer.Params):
        """`model` is a folder, a .gguf file or a hub name."""

        num_speculative_tokens: int = Field(default=4, ge=1, le=64)
        model: str = Field(min_length=1)
        revision: str | None = None

    def __init__(self, bound: Draft, speaker: Speaker) -> None:
        super().__init__(bound, speaker)
        self._speaker = speaker
        self._memory: Any = bound.model.open()

    @classmethod
    def bind(cls, params: Any, ctx: ProposerContext) -> Draft:
        assert ctx.load is not None
        return Draft(ctx.load(params.model, revision=params.revision), params)

    @classmethod
    def rebind(cls, bound: Draft, params: Any) -> Draft:
        if (params.model, params.revision) != (bound.params.model, bound.params.revision):
            raise ValidationError(
                f"speculation.model is the engine's own {bound.params.model!r} for a request, got "
                f"{params.model!r}",
                parameter="speculation.model",
                value=params.model,
            )
        return Draft(bound.model, params)

    @classmethod
    def propose_all(cls, asks: Sequence[Ask]) -> Sequence[Sequence[int]]:
        model: FurtherModel = asks[0].proposer.bound.model
        drafts: list[list[int]] = [[] for _ in asks]
        texts = [[*ask.prompt_ids, *ask.output_ids] for ask in asks]
        going = list(range(len(asks)))
        while going:
            read = [(_of(asks[i])._memory, texts[i]) for i in going]
            places, logits = model.read(read)
            going = [going[place] for place in places]
            if not going:
                break
            speakers = [_of(asks[i])._speaker for i in going]
            ahead = [len(drafts[i]) for i in going]
            for i, token in zip(going, _choose(logits, speakers, ahead), strict=True):
                drafts[i].append(token)
                texts[i].append(token)
            going = [i for i in going if len(drafts[i]) < asks[i].k]
        return drafts

    def close(self) -> None:
        self.bound.model.close(self._memory)


def _of(ask: Ask) -> DraftModel:
    assert isinstance(ask.proposer, DraftModel)
    return ask.proposer


def _choose(logits: Tensor, speakers: Sequence[Speaker], ahead: Sequence[int]) -> list[int]:
    """Choose a token for each row of `logits` [rows, vocab], `ahead` tokens after the sequence."""
    greedy = [speaker.params.greedy for speaker in speakers]
    tokens: list[int] = logits.argmax(1).tolist()
    for has_cut in (False, True):
        rows = [
            row
            for row, speaker in enumerate(speakers)
            if not greedy[row] and _has_cut(speaker) is has_cut
        ]
        if rows:
            part = _draw(
                logits[rows].float(),
                [speakers[row] for row in rows],
                [ahead[row] for row in rows],
                has_cut=has_cut,
            )
            for row, token in zip(rows, part, strict=True):
                tokens[row] = token
    return tokens


def _draw(
    logits: Tensor, speakers: Sequence[Speaker], ahead: Sequence[int], *, has_cut: bool
) -> list[int]:
    device = logits.device
    heat = torch.tensor([speaker.params.temperature or 1.0 for speaker in speakers], device=device)
    logits = logits / heat[:, None]
    positions = [len(s.output_ids) + more for s, more in zip(speakers, ahead, strict=True)]
    address = (
        torch.tensor([(s.key + SIGN) % (2 * SIGN) - SIGN for s in speakers], device=device),
        torch.tensor(positions, device=device),
        torch.tensor([speaker.branch for speaker in speakers], device=device),
    )
    if not has_cut:
        drawn: list[int] = race_segments(logits, *address).tolist()
        return drawn
    ranked = rank_top(logits, min(LISTED, logits.shape[1]))
    kept = ranked.values.masked_fill(~_kept(ranked.values, logits, speakers), -torch.inf)
    drawn = race_list(kept, ranked.ids, *address).tolist()
    return drawn


def _kept(values: Tensor, logits: Tensor, speakers: Sequence[Speaker]) -> Tensor:
    """Say which of the best tokens [rows, n] the flat cuts of the requests keep."""
    device, width = values.device, values.shape[1]
    params = [speaker.params for speaker in speakers]
    most = torch.tensor([p.top_k or width for p in params], device=device)
    mass = torch.tensor([p.top_p or 2.0 for p in params], device=device)
    is_cut = torch.tensor([p.top_k is not None or p.min_p is not None for p in params])
    least = torch.tensor([p.min_p or 0.0 for p in params], device=device)
    probs = (values - logits.logsumexp(1, keepdim=True)).exp()
    kept = torch.arange(width, device=device) < most[:, None]
    kept &= probs >= least[:, None] * probs[:, :1]
    probs = probs.masked_fill(~kept, 0.0)
    total = torch.where(is_cut.to(device), probs.sum(1), 1.0)  # of what reaches top-p
    kept &= probs.cumsum(1) - probs < (mass * total)[:, None]
    kept[:, 0] = True
    return kept


def _has_cut(speaker: Speaker) -> bool:
    params = speaker.params
    return any(value is not None for value in (params.top_k, params.top_p, params.min_p))


@hookimpl
def decodekit_proposers() -> Iterable[type[Proposer]]:
    return [DraftModel]
