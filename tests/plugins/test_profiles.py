"""The named default chains, and the one of transformers beside transformers' own list."""

import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, LogitsProcessorList

from decodekit.core.batch import PickView
from decodekit.core.errors import ChainError
from decodekit.core.order import Order
from decodekit.core.params import SamplingParams
from decodekit.core.plan import Plan, Planner
from decodekit.core.registry import Registry
from decodekit.core.request_params import freeze
from decodekit.core.stage import Kind
from decodekit.kernels.ops import race_list
from decodekit.plugins.author.rows import apply_stage, make_rows
from decodekit.plugins.pick.race import Race
from decodekit.plugins.profiles import DEFAULT, TRANSFORMERS, decodekit_profiles

INF = float("inf")
VOCAB = 300
NUDGE = 1e-5
REGISTRY = Registry.load(autoload=False)
PROFILES = {profile.name: profile for profile in decodekit_profiles()}

# Our stage and parameter, transformers' name, and values.
WARPERS: list[tuple[str, str, str, list[float]]] = [
    ("temperature", "t", "temperature", [0.5, 0.8, 1.7]),
    ("top_h", "alpha", "top_h", [0.4, 0.9]),
    ("top_k", "k", "top_k", [5, 40]),
    ("top_p", "p", "top_p", [0.3, 0.9]),
    ("min_p", "p", "min_p", [0.02, 0.1]),
    ("typical_p", "p", "typical_p", [0.5, 0.95]),
    ("epsilon", "epsilon", "epsilon_cutoff", [3e-3, 2e-2]),
    ("eta", "epsilon", "eta_cutoff", [3e-3, 5e-2]),
]
Mix = list[tuple[str, str, str, float]]


def planned(profile: str, **fields: Any) -> Plan:
    planner = Planner(
        REGISTRY,
        vocab_size=VOCAB,
        tokenizer_size=VOCAB,
        max_model_len=512,
        eos_ids=(0,),
        device=torch.device("cpu"),
    )
    return planner.admit(freeze(SamplingParams(profile=profile, **fields)))


def steps(plan: Plan) -> list[str]:
    return [entry.stage.name for entry in plan.entries]


# --- the default ----------------------------------------------------------------------------------


def test_the_default_order_is_the_documented_one() -> None:
    documented = (
        "grammar allowed_tokens suppress_tokens bad_words min_tokens no_repeat_ngram "
        "thinking_budget forced_tokens logit_bias sequence_bias per_request repetition_penalty "
        "frequency_penalty presence_penalty dry length_decay temperature dynamic_temperature "
        "temperature_schedule quadratic min_p top_k top_p top_k_top_p typical_p epsilon eta top_a "
        "top_n_sigma tail_free top_h p_less xtc green_list synthid"
    )

    assert DEFAULT.name == "default"
    assert DEFAULT.order == ("vocab_padding", *documented.split())
    assert (DEFAULT.picker, DEFAULT.greedy) == ("race", "greedy")


def test_the_default_order_names_every_stage_but_the_pickers() -> None:
    stages = {name for name, stage in REGISTRY.stages.items() if stage.kind is not Kind.PICK}

    assert stages <= set(DEFAULT.order)


# --- all ------------------------------------------------------------------------------------------


def test_the_profiles_are_these() -> None:
    assert list(PROFILES) == [
        "default",
        "vllm",
        "transformers",
        "llama.cpp",
        "sglang",
        "text-generation-webui",
        "koboldcpp",
        "exllamav3",
    ]
    assert set(REGISTRY.profiles) >= set(PROFILES)


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_speaks_of_known_stages_and_has_what_to_say(name: str) -> None:
    profile = PROFILES[name]

    assert set(profile.order) - set(REGISTRY.stages) <= {"grammar"}
    assert len(set(profile.order)) == len(profile.order)
    for stage, settings in profile.settings.items():
        REGISTRY.stage(stage).validate(settings)
    assert profile.description
    assert profile.notes


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vllm", "repetition frequency presence temperature min_p top_k top_p"),
        ("transformers", "repetition frequency presence temperature top_k top_p min_p"),
        ("llama.cpp", "repetition frequency presence top_k top_p min_p temperature"),
        ("sglang", "frequency presence repetition temperature top_k_top_p min_p"),
        ("text-generation-webui", "repetition presence frequency temperature top_k top_p min_p"),
        ("koboldcpp", "repetition presence frequency top_k top_p min_p temperature"),
        ("exllamav3", "repetition presence frequency temperature min_p top_k top_p"),
    ],
)
def test_flat_fields_run_in_the_order_of_the_profile(name: str, expected: str) -> None:
    plan = planned(
        name,
        temperature=0.7,
        top_k=20,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        presence_penalty=0.3,
        allowed_token_ids=[1, 2, 3],
        min_tokens=2,
    )

    names = [part.removesuffix("_penalty") for part in steps(plan)]
    assert names == ["allowed_tokens", "min_tokens", *expected.split(), "race"]
    assert plan.report.profile == name
    assert set(PROFILES[name].notes) <= set(plan.report.notes)


def test_sglang_measures_top_k_and_top_p_on_one_row() -> None:
    plan = planned("sglang", top_k=20, top_p=0.9)

    assert steps(plan) == ["top_k_top_p", "race"]
    assert (plan.entries[0].params.k, plan.entries[0].params.p) == (20, 0.9)
    with pytest.raises(ChainError, match="top_p"):
        planned("sglang", top_p=0.9, chain=["temperature", "race"])


def test_a_profile_gives_what_a_request_leaves_open() -> None:
    plan = planned("llama.cpp", repetition_penalty=1.2, top_k=5)
    top, penalty = plan.entries[1], plan.entries[0]

    assert (penalty.params.scope, penalty.params.last_n) == ("both", 64)
    assert penalty.provenance["last_n"] == "profile"
    assert penalty.provenance["penalty"] == "request"
    assert top.params.ties == "index"


def test_what_the_chain_says_wins_over_the_profile() -> None:
    chain = [{"stage": "top_h", "alpha": 0.4, "window": 7}, {"stage": "top_h", "alpha": 0.4}]

    plan = planned("transformers", chain=chain)

    assert [entry.params.window for entry in plan.entries[:2]] == [7, 100]
    assert [entry.provenance["window"] for entry in plan.entries[:2]] == ["chain", "profile"]


# --- transformers ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """The least model that knows how transformers puts its list together."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
        )
    )


def theirs(model: LlamaForCausalLM, mix: Mix, nudge: float = 0.0) -> LogitsProcessorList:
    fields: dict[str, Any] = {"top_k": 0, "temperature": 1.0}
    fields |= {
        name: value if name in ("top_k", "temperature") else value * (1 + nudge)
        for _, _, name, value in mix
    }
    config = GenerationConfig(do_sample=True, **fields)
    made = model._get_logits_processor(generation_config=config, input_ids_seq_length=1)
    assert len(made) == len(mix)
    return made


def ours(logits: Tensor, mix: Mix) -> Tensor:
    """Run the stages in the order of the profile, with its settings."""
    order = Order(REGISTRY.stages.values(), TRANSFORMERS, REGISTRY.constraints)
    given = {name: {own: value} for name, own, _, value in mix}
    for stage in order.arrange([REGISTRY.stage(name) for name in given]):
        params = {**TRANSFORMERS.settings.get(stage.name, {}), **given[stage.name]}
        logits = apply_stage(stage, logits, [params] * len(logits))
    return logits


def mixes(count: int) -> Iterable[Mix]:
    rng = random.Random(5)
    for _ in range(count):
        chosen = [warper for warper in WARPERS if rng.random() < 0.5] or [WARPERS[0]]
        rng.shuffle(chosen)  # the profile decides the order
        yield [(name, own, field, rng.choice(values)) for name, own, field, values in chosen]


def test_transformers_keeps_the_same_tokens_and_draws_the_same_one(
    model: LlamaForCausalLM, rng: torch.Generator
) -> None:
    no_ids = torch.zeros(1, 1).long()
    tried = unclear = 0
    for mix in mixes(60):
        logits = (
            torch.randn(20, VOCAB, generator=rng) * torch.tensor([0.5, 2.0, 4.0, 8.0] * 5)[:, None]
        )
        result = ours(logits, mix)
        expected = theirs(model, mix)(no_ids, logits)
        same = (result.isneginf() == expected.isneginf()).all(1)
        if not same.all():
            low, high = (theirs(model, mix, n)(no_ids, logits.double()) for n in (-NUDGE, NUDGE))
            decided = (low.isneginf() == high.isneginf()).all(1)
            assert not (decided & ~same).any(), mix
        tried += 20
        unclear += int((~same).sum())
        assert torch.equal(result[same], expected[same])
        check_draws(result[same], expected[same])
    print(f"transformers profile: {tried} rows, {unclear} at a border, 0 differ")
    assert unclear < 10


def check_draws(result: Tensor, expected: Tensor) -> None:
    """Give their scores our noise: the token is the one that our picker draws."""
    made = make_rows(Race, [{}] * len(result), vocab_size=VOCAB)
    view = PickView(ranking=None, dense=result, has_cut=True, vocab_size=VOCAB)

    tokens = Race.prototype().pick(view, made.view)

    ids = torch.arange(VOCAB).expand(len(result), VOCAB)
    rows = made.rows
    drawn = race_list(expected, ids, rows.keys, made.view.positions, rows.branches)
    assert torch.equal(tokens, drawn)
