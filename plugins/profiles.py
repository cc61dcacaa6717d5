"""The named default chains: ours, and those of other systems, so that results can be compared.

An order holds inside the segments that every chain has: masks and forced tokens first, then biases,
then temperatures and truncations together, then watermarks, then the draw. Names that no installed
stage has are skipped. `settings` are what a system gives to parameters that ours leaves open.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..core.hookspecs import hookimpl
from ..core.stage import Profile

MASKS = (
    "vocab_padding",
    "grammar",
    "allowed_tokens",
    "suppress_tokens",
    "bad_words",
    "min_tokens",
    "no_repeat_ngram",
    "thinking_budget",
    "forced_tokens",
)
MARKS = ("green_list", "synthid")
MASKS_FIRST = "masks and forced tokens run first; biases and penalties leave a masked token masked"
PROMPT_TOO: Mapping[str, object] = {"scope": "both"}

DEFAULT = Profile(
    name="default",
    order=(
        *MASKS,
        "logit_bias",
        "sequence_bias",
        "per_request",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "dry",
        "length_decay",
        "temperature",
        "dynamic_temperature",
        "temperature_schedule",
        "quadratic",
        "min_p",
        "top_k",
        "top_p",
        "top_k_top_p",
        "typical_p",
        "epsilon",
        "eta",
        "top_a",
        "top_n_sigma",
        "tail_free",
        "top_h",
        "p_less",
        "xtc",
        *MARKS,
    ),
    picker="race",
    greedy="greedy",
    description="vLLM's order: masks, biases, penalties, temperature, min-p, top-k, top-p.",
    notes=(
        "top_k 1 keeps the lowest id of a tie, so that it is greedy",
        "raw log-probs are taken before every stage, a grammar included",
    ),
)

VLLM = Profile(
    name="vllm",
    order=DEFAULT.order,
    description="vLLM V1: masks, biases, custom, penalties, temperature, min-p, top-k, top-p.",
    notes=(
        "vLLM keeps every token of a tie at top_k 1; here the lowest id stays",
        "vLLM takes raw log-probs after a grammar; here they are taken before every stage",
    ),
)

TRANSFORMERS = Profile(
    name="transformers",
    order=(
        *MASKS,
        "sequence_bias",
        "repetition_penalty",
        "length_decay",
        "per_request",
        "temperature",
        "top_h",
        "top_k",
        "top_p",
        "min_p",
        "typical_p",
        "epsilon",
        "eta",
        *MARKS,
    ),
    description="transformers' generate: temperature, top-H, top-k, top-p, min-p, typical, eta.",
    notes=(
        MASKS_FIRST,
        "top-H looks at the 100 best tokens alone",
        "no NaN is replaced: a row with NaN or infinity ends its request",
    ),
    settings={"top_h": {"window": 100}, "bad_words": PROMPT_TOO},
)

LLAMA_CPP = Profile(
    name="llama.cpp",
    order=(
        *MASKS,
        "logit_bias",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "dry",
        "top_n_sigma",
        "top_k",
        "typical_p",
        "top_p",
        "min_p",
        "xtc",
        "temperature",
        "dynamic_temperature",
        *MARKS,
    ),
    description="llama.cpp: penalties, DRY, truncations on the untempered row, temperature last.",
    notes=(
        "a grammar masks before the chain; llama.cpp checks a drawn token first",
        "penalties look at the last 64 tokens, the prompt included",
        "top_k keeps exactly k tokens of a tie",
    ),
    settings={
        "repetition_penalty": {"scope": "both", "last_n": 64},
        "frequency_penalty": {"scope": "both", "last_n": 64},
        "presence_penalty": {"scope": "both", "last_n": 64},
        "dry": {"range": 64},
        "top_k": {"ties": "index"},
    },
)

SGLANG = Profile(
    name="sglang",
    order=(
        *MASKS,
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "logit_bias",
        "per_request",
        "temperature",
        "top_k_top_p",
        "min_p",
        *MARKS,
    ),
    description="SGLang: penalties, bias, temperature, top-k and top-p on one distribution, min-p.",
    notes=(
        MASKS_FIRST,
        "top_k and top_p become the stage top_k_top_p, which measures both on the whole row",
    ),
    fields={"top_k": ("top_k_top_p", "k"), "top_p": ("top_k_top_p", "p")},
)

TEXT_GENERATION_WEBUI = Profile(
    name="text-generation-webui",
    order=(
        *MASKS,
        "logit_bias",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "dry",
        "temperature",
        "dynamic_temperature",
        "quadratic",
        "top_n_sigma",
        "top_k",
        "top_p",
        "typical_p",
        "epsilon",
        "eta",
        "tail_free",
        "top_a",
        "min_p",
        "xtc",
        *MARKS,
    ),
    description="text-generation-webui: penalties, DRY, temperatures, truncations, XTC last.",
    notes=(
        "no_repeat_ngram runs with the masks, where the webui has it after its truncations",
        "adaptive_p and mirostat choose the token here, so XTC stands before them",
        "epsilon and eta are plain numbers here, in the webui units of 1e-4",
    ),
    settings={"frequency_penalty": PROMPT_TOO, "presence_penalty": PROMPT_TOO},
)

KOBOLDCPP = Profile(
    name="koboldcpp",
    order=(
        *MASKS,
        "logit_bias",
        "dry",
        "repetition_penalty",
        "presence_penalty",
        "top_k",
        "top_a",
        "tail_free",
        "typical_p",
        "top_p",
        "min_p",
        "temperature",
        "dynamic_temperature",
        "quadratic",
        "top_n_sigma",
        "xtc",
        *MARKS,
    ),
    description="KoboldCpp: DRY, repetition, top-k, top-a, tail-free, typical, top-p, temperature.",
    notes=(
        "mirostat takes the picker's place alone; in KoboldCpp it leaves every other sampler out",
        "presence counts the prompt, too",
    ),
    settings={"presence_penalty": PROMPT_TOO, "top_k": {"ties": "index"}},
)

EXLLAMAV3 = Profile(
    name="exllamav3",
    order=(
        *MASKS,
        "logit_bias",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "temperature",
        "min_p",
        "top_k",
        "top_p",
        *MARKS,
    ),
    description="exllamav3: bans, bias, penalties, temperature, min-p, top-k, top-p.",
    notes=(
        "top_p keeps the token that crosses p, which exllamav3's stepwise path drops",
        "presence and frequency count the prompt, too",
    ),
    settings={"frequency_penalty": PROMPT_TOO, "presence_penalty": PROMPT_TOO},
)


@hookimpl
def decodekit_profiles() -> Iterable[Profile]:
    return [
        DEFAULT,
        VLLM,
        TRANSFORMERS,
        LLAMA_CPP,
        SGLANG,
        TEXT_GENERATION_WEBUI,
        KOBOLDCPP,
        EXLLAMAV3,
    ]
