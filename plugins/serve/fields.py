"""Which fields of a body act, which have no effect and are named, and which are refused."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher, get_close_matches
from typing import Any
from urllib.parse import quote

from pydantic import BaseModel

from ...core.param_rules import shown
from .errors import bad

log = logging.getLogger("decodekit.serve")

IGNORED_HEADER = "X-Decodekit-Ignored"
NOTE_HEADER = "X-Decodekit-Note"

MOST_NAMED = 32  # fields in the header
MOST_LETTERS = 64  # of one of them

NO_EFFECT = ("user", "metadata")  # known to every endpoint of OpenAI's

# Names that belong to something else, with what to write instead.
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object"),
        "use structured_outputs",
    ),
    "guided_decoding_backend": "use structured_outputs.backend",
    "guided_whitespace_pattern": "use structured_outputs.whitespace_pattern",
    "logits_processors": "code is taken in Python only; name stages in chain",
    "output_tensors": "tensors are returned in Python only; use logprobs",
    "output_kind": "use stream",
    "detokenize": "use /inference/v1/generate for token ids alone",
    "functions": "use tools",
    "function_call": "use tool_choice",
}
# Fields of other servers that resemble ours and mean something else.
FOREIGN = frozenset(
    """audio cache_prompt dynatemp_range grammar guidance mirostat mirostat_eta mirostat_tau
    modalities model_kwargs models moderation n_predict n_probs num_ctx num_predict options plugins
    prediction prompt_cache_key prompt_cache_retention provider safety_identifier sampler_seed
    samplers service_tier store tfs tfs_z top_a transforms typical typical_p verbosity
    web_search_options""".split()
)


@dataclass(slots=True)
class Sorted:
    """A body without its fields of no effect, and what to tell the client of them."""

    body: dict[str, Any]
    ignored: dict[str, str | None] = field(default_factory=dict)  # name -> what was maybe meant

    @property
    def headers(self) -> dict[str, str]:
        """The header that names the fields without effect."""
        if not self.ignored:
            return {}
        told = [
            (quote(name[:MOST_LETTERS], safe="[]$@") or '""') + (f";maybe={meant}" if meant else "")
            for name, meant in self.ignored.items()
        ]
        if len(told) > MOST_NAMED:
            told[MOST_NAMED:] = [f"and-{len(told) - MOST_NAMED}-more"]
        return {IGNORED_HEADER: ", ".join(told)}


def sort_fields(
    body: Mapping[str, Any], model: type[BaseModel], *, strict: bool, stages: Collection[str] = ()
) -> Sorted:
    """Take the fields of `model` out of `body`; name the others, or refuse them.

    A near-miss of a known field is always refused. `strict` refuses every unknown one. `stages`
    are the names that a chain may list.
    """
    known = model.model_fields
    found = Sorted({})
    for name, value in body.items():
        if name in known:
            found.body[name] = value
        elif name in REFUSED:
            if value is not None:
                raise bad(f"the field {name} is not served; {REFUSED[name]}", name)
        elif name in NO_EFFECT:
            if value is not None:
                found.ignored[name] = None
        else:
            _unknown(found, name, known, strict, stages)
    if found.ignored:
        log.info("fields without effect: %s", found.headers[IGNORED_HEADER])
    return found


def _unknown(
    found: Sorted, name: str, known: Iterable[str], strict: bool, stages: Collection[str]
) -> None:
    near = None if name in FOREIGN or name in stages else near_miss(name, known)
    if near is not None:
        raise bad(f"there is no field {shown(name)}; did you mean {near!r}?", name)
    meant = "chain" if name in stages else None
    if meant is None and name not in FOREIGN:
        meant = next(iter(get_close_matches(name, list(known), n=1, cutoff=0.7)), None)
    if strict:
        hint = f"; did you mean {meant!r}?" if meant else ""
        raise bad(f"there is no field {shown(name)}{hint} (--strict-fields is set)", name)
    found.ignored[name] = meant


def near_miss(name: str, known: Iterable[str]) -> str | None:
    """Return the field that `name` misspells beyond doubt: "topp", "max-tokens", "temprature"."""
    plain = _plain(name)
    best, score = None, 0.84
    for other in known:
        if plain == _plain(other):
            return other
        ratio = SequenceMatcher(None, name, other).ratio()
        if ratio > score:
            best, score = other, ratio
    return best


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")
