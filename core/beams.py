"""`LLM.beam_search`: BeamSearchParams to requests with a driver, and their outputs to beams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import ValidationError
from .outputs import BeamSearchOutput, BeamSearchSequence, RequestOutput
from .params import BeamSearchParams, RequestOutputKind, SamplingParams
from .tokenizer import Tokenizer

DRIVER = "beam_search"
PROFILES = ("default", "vllm", "transformers")


def request_params(params: Any, max_num_seqs: int) -> SamplingParams:
    """Return the request of one beam search; ValidationError for what it cannot have."""
    if not isinstance(params, BeamSearchParams):
        raise ValidationError(
            f"params must be BeamSearchParams, got {type(params).__name__}", parameter="params"
        )
    if params.profile not in PROFILES:
        raise ValidationError(
            f"profile must be one of {', '.join(PROFILES)}, got {params.profile!r}",
            parameter="profile",
            value=params.profile,
        )
    if params.beam_width > max_num_seqs:
        raise ValidationError(
            f"beam_width must be at most max_num_seqs ({max_num_seqs}), since every beam is a "
            f"running sequence; got {params.beam_width}",
            parameter="beam_width",
            value=params.beam_width,
        )
    given = params.sampling_params
    made = SamplingParams(temperature=0.0) if given is None else given.clone()
    for name in ("n", "best_of", "seed", "driver"):
        if given is not None and name in given.fields_set:
            raise ValidationError(
                f"sampling_params.{name} must be unset in a beam search, which sets it itself",
                parameter=f"sampling_params.{name}",
                value=getattr(given, name),
            )
    made.driver = {
        "driver": DRIVER,
        "width": params.beam_width,
        "length_penalty": params.length_penalty,
        "early_stopping": params.early_stopping,
        "profile": params.profile,
    }
    made.n = params.beam_width
    made.max_tokens = params.max_tokens
    made.ignore_eos = params.ignore_eos
    made.logprobs = 0 if made.logprobs is None else made.logprobs
    made.output_kind = RequestOutputKind.FINAL_ONLY
    return made


def beams_of(prompt: Any, output: RequestOutput, tokenizer: Tokenizer | None) -> BeamSearchOutput:
    """Return the beams of a finished request, best first; RuntimeError if it failed."""
    prompt_ids = list(output.prompt_token_ids or ())
    beams = []
    for part in output.outputs:
        if part.error is not None:
            raise RuntimeError(f"beam search of request {output.request_id} failed: {part.error}")
        tokens = [*prompt_ids, *part.token_ids]
        beams.append(
            BeamSearchSequence(
                orig_prompt=prompt if isinstance(prompt, Mapping) else {"prompt": prompt},
                tokens=tokens,
                logprobs=list(part.logprobs or ()),
                lora_request=part.lora_request,
                cum_logprob=part.cumulative_logprob or 0.0,
                text=(
                    None
                    if tokenizer is None
                    else tokenizer.decode(tokens, skip_special_tokens=False)
                ),
                finish_reason=part.finish_reason,
                stop_reason=part.stop_reason,
                score=part.beam_score or 0.0,
            )
        )
    return BeamSearchOutput(beams)
