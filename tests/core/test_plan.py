"""Plans: what is bound, dropped, noted and shared; and that admission asks no hook."""

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pluggy
import pytest
import torch
from pydantic import Field, SecretStr
from torch import Tensor

from decodekit.core.errors import ChainError, ValidationError
from decodekit.core.hookspecs import hookimpl
from decodekit.core.params import RequestParams, SamplingParams
from decodekit.core.plan import Plan, Planner
from decodekit.core.registry import Registry
from decodekit.core.stage import (
    Caps,
    Form,
    Kind,
    Need,
    Observer,
    Order,
    Picker,
    Profile,
    Stage,
    StageParams,
    Stop,
    Tap,
)

VOCAB = 10


class Toy(Stage):
    def transform(self, logits: Tensor, rows: Any) -> None:
        logits.neg_()


class Pad(Toy):
    name, kind, mandatory = "pad", Kind.MASK, True

    class Bound(StageParams):
        padding: int

    @classmethod
    def bind(cls, params: Any, ctx: Any) -> Any:
        return cls.Bound(padding=ctx.vocab_size - ctx.tokenizer_size)

    @classmethod
    def is_identity(cls, params: Any) -> bool:
        return params.padding == 0


class Only(Toy):
    name, kind, fields = "only", Kind.MASK, {"allowed_token_ids": "ids"}
    calls = 0

    class Params(StageParams):
        ids: tuple[int, ...] | None = None

    @classmethod
    def bind(cls, params: Any, ctx: Any) -> Any:
        Only.calls += 1
        for token in params.ids or ():
            if token >= ctx.vocab_size:
                raise ChainError(
                    f"only.ids must be below {ctx.vocab_size}, got {token}",
                    parameter="only.ids",
                    value=token,
                )
        return params

    @classmethod
    def is_identity(cls, params: Any) -> bool:
        return params.ids is None

    @classmethod
    def structure(cls, params: Any) -> Any:
        return "short" if len(params.ids) < 3 else "long"


class Bias(Toy):
    name, kind, fields = "bias", Kind.BIAS, {"logit_bias": "values"}
    caps = Caps(needs=frozenset({Need.COUNTS}))

    class Params(StageParams):
        values: Mapping[int, float] | None = None


class Heat(Toy):
    name, kind, form, fields = "heat", Kind.SHAPE, Form.ELEMENTWISE, {"temperature": "t"}

    class Params(StageParams):
        t: float | None = None

    @classmethod
    def bind(cls, params: Any, ctx: Any) -> Any:
        too_cold = params.t is not None and params.t < 0.01
        return params.model_copy(update={"t": 0.01}) if too_cold else params

    @classmethod
    def is_identity(cls, params: Any) -> bool:
        return params.t in (None, 1.0)

    @classmethod
    def argmax_invariant(cls, params: Any) -> bool:
        return True


class Keep(Toy):
    """What the two cuts share; `kept` says how many of the sorted probabilities stay."""

    kind = Kind.CUT

    @classmethod
    def argmax_invariant(cls, params: Any) -> bool:
        return True

    def transform(self, logits: Tensor, rows: Any) -> None:
        order = logits[0].argsort(descending=True)
        probabilities = logits[0].softmax(0)[order].tolist()
        logits[0, order[self.kept(probabilities, rows.params[0]) :]] = -torch.inf

    def kept(self, probabilities: Sequence[float], params: Any) -> int:
        raise NotImplementedError


class Top(Keep):
    name, fields = "top", {"top_k": "k"}

    class Params(StageParams):
        k: int | None = None

    @classmethod
    def is_identity(cls, params: Any) -> bool:
        return params.k is None or params.k >= VOCAB

    def kept(self, probabilities: Sequence[float], params: Any) -> int:
        return int(params.k)


class Nucleus(Keep):
    name, fields = "nucleus", {"top_p": "p"}

    class Params(StageParams):
        p: float | None = None

    def kept(self, probabilities: Sequence[float], params: Any) -> int:
        mass, count = 0.0, 0
        while mass < params.p:
            mass += probabilities[count]
            count += 1
        return count


class Best(Picker):
    name = "best"

    def pick(self, view: Any, rows: Any) -> Any:
        return view.logits.argmax(1)


class Draw(Best):
    name = "draw"


class Ending(Stop):
    def __init__(self, name: str, rank: int, minds: bool = True) -> None:
        self.name, self.rank, self.respects_min_tokens = name, rank, minds  # type: ignore[misc]

    def bind(self, ctx: Any) -> Any:
        return None if ctx.request.ignore_eos else (lambda view: self.name)


class Watch(Observer):
    name = "watch"

    def bind(self, ctx: Any) -> Any:
        return ctx.request.logprobs

    def taps(self, order: Any) -> frozenset[Tap]:
        return frozenset({Tap.FINAL if order == 2 else Tap.RAW})


TOYS = ModuleType("toys")
PROFILE = Profile("default", ("pad", "only", "bias", "heat", "top", "nucleus"), "draw", "best")
OTHER = Profile("other", ("heat", "nucleus", "top"), "draw", "best", notes=("cuts swapped",))
for hook, things in {
    "stages": [Pad, Only, Bias, Heat, Top, Nucleus],
    "pickers": [Best, Draw],
    "profiles": [PROFILE, OTHER],
    "stops": [Ending("late", 2, minds=False), Ending("early", 1)],
    "observers": [Watch()],
}.items():
    setattr(TOYS, f"decodekit_{hook}", hookimpl(lambda things=things: things))

Admit = Callable[..., Plan]


@pytest.fixture
def registry() -> Registry:
    return Registry.load(catalogue=(TOYS,), autoload=False, environ={})


def make_planner(registry: Registry, **settings: Any) -> Planner:
    settings = {"tokenizer_size": VOCAB, "eos_ids": (3, 4), "max_model_len": 99, **settings}
    return Planner(registry, vocab_size=VOCAB, device=torch.device("cpu"), **settings)


@pytest.fixture
def planner(registry: Registry) -> Planner:
    return make_planner(registry)


@pytest.fixture
def admit(planner: Planner) -> Admit:
    return lambda **fields: planner.admit(snapshot(**fields), prompt_ids=(1, 2))


def snapshot(**fields: Any) -> RequestParams:
    return SamplingParams(**fields).snapshot()


def names(plan: Plan) -> list[str]:
    return [entry.instance for entry in plan.entries]


def dropped(plan: Plan) -> dict[str, str]:
    return {step.stage: step.reason for step in plan.report.dropped}


# --- order and what it does to a row --------------------------------------------------------------


def kept(plan: Plan, probabilities: list[float]) -> set[int]:
    """Run the plan's stages on one row and return the ids that are alive."""
    logits = torch.tensor([probabilities]).log()
    for entry in plan.entries[:-1]:
        entry.stage.prototype().transform(logits, SimpleNamespace(params=[entry.params]))  # type: ignore[arg-type]
    return set(torch.isfinite(logits[0]).nonzero()[:, 0].tolist())


def test_swapping_two_stages_of_a_chain_changes_the_kept_set(admit: Admit) -> None:
    """(.4, .3, .2, .1): two best, renormalised to (.57, .43), and .5 of that is one token; .5 of
    the row is two tokens, both among the two best."""
    values = {"top_k": 2, "top_p": 0.5}

    one = admit(chain=["top", "nucleus"], **values)
    two = admit(chain=["nucleus", "top"], **values)

    assert (names(one), names(two)) == (["top", "nucleus", "draw"], ["nucleus", "top", "draw"])
    assert kept(one, [0.4, 0.3, 0.2, 0.1]) == {0}
    assert kept(two, [0.4, 0.3, 0.2, 0.1]) == {0, 1}
    assert one.key != two.key


def test_a_cut_before_a_mask_is_refused_with_both_names(admit: Admit) -> None:
    with pytest.raises(ChainError, match="'only' .MASK. must stand before 'top' .CUT."):
        admit(chain=["top", "only"], top_k=2, allowed_token_ids=[1])


def test_an_unknown_stage_is_refused_with_a_suggestion(admit: Admit) -> None:
    with pytest.raises(ChainError, match="unknown stage 'nucleous'; did you mean 'nucleus'"):
        admit(chain=["nucleous"])


def test_a_profile_gives_the_order_and_its_notes(admit: Admit) -> None:
    plan = admit(top_k=2, top_p=0.5, profile="other")

    assert names(plan) == ["nucleus", "top", "draw"]
    assert plan.report.profile == "other"
    assert plan.report.notes == ("cuts swapped",)


def test_an_unknown_profile_is_refused(admit: Admit, registry: Registry) -> None:
    with pytest.raises(ValidationError, match="one of default, other, got 'othr'; did you mean"):
        admit(profile="othr")
    with pytest.raises(ValidationError, match="profile must be one of"):
        make_planner(registry, profile="nope")


# --- what is left out -----------------------------------------------------------------------------


def test_an_identity_is_dropped_with_its_reason(admit: Admit) -> None:
    plan = admit(top_k=VOCAB, chain=["heat", "top", {"stage": "heat", "t": 1.0}])

    assert names(plan) == ["draw"]
    assert dropped(plan) == {
        "pad": "it was given nothing to do",
        "heat": "it was given nothing to do",
        "top": "k=10 changes nothing",
        "heat#2": "t=1.0 changes nothing",
    }


def test_a_neutral_value_that_was_set_is_told(admit: Admit) -> None:
    assert dropped(admit(top_k=0))["top"] == "top_k is neutral"
    assert "top" not in dropped(admit())


def test_the_mandatory_stage_runs_where_it_has_work(registry: Registry) -> None:
    planner = make_planner(registry, tokenizer_size=VOCAB - 1)

    assert names(planner.admit(snapshot())) == ["pad", "draw"]


def test_a_greedy_pick_needs_nothing_that_keeps_the_winner(admit: Admit) -> None:
    plan = admit(chain=[{"stage": "heat", "t": 2.0}, {"stage": "top", "k": 2}, "best"])

    assert names(plan) == ["best"]
    assert dropped(plan)["top"] == "it cannot change the winner, and 'best' takes the winner"


def test_a_shape_before_a_bias_is_kept_for_a_greedy_pick(admit: Admit) -> None:
    """Halving the row first makes the bias count twice."""
    chain = [{"stage": "heat", "t": 2.0}, {"stage": "bias", "values": {1: 1.0}}, "top", "best"]

    assert names(admit(chain=chain, top_k=2)) == ["heat", "bias", "best"]


def test_an_observer_of_the_final_row_keeps_every_stage(admit: Admit) -> None:
    chain = [{"stage": "top", "k": 2}, "best"]

    assert names(admit(chain=chain, logprobs=1)) == ["best"]
    assert names(admit(chain=chain, logprobs=2)) == ["top", "best"]


# --- binding --------------------------------------------------------------------------------------


def test_a_value_that_bind_changes_is_noted(admit: Admit) -> None:
    plan = admit(chain=[{"stage": "heat", "t": 0.001}])

    assert plan.entries[0].params.t == 0.01
    assert plan.report.notes == ("heat.t 0.001 became 0.01",)


def test_a_bind_error_names_the_request_field(admit: Admit) -> None:
    with pytest.raises(ChainError, match="^allowed_token_ids must be below 10, got 77$") as caught:
        admit(allowed_token_ids=[77])

    assert (caught.value.parameter, caught.value.value) == ("allowed_token_ids", 77)


def test_a_bind_error_of_a_chain_names_stage_and_parameter(admit: Admit) -> None:
    with pytest.raises(ChainError, match="^only.ids must be below 10") as caught:
        admit(chain=[{"stage": "only", "ids": [77]}])

    assert caught.value.parameter == "only.ids"


@pytest.mark.parametrize("method", ["bind", "is_identity", "structure"])
def test_whatever_a_guest_raises_becomes_one_sentence(admit: Admit, method: str) -> None:
    def explode(*_: Any) -> None:
        raise ZeroDivisionError("oh")

    guest = type("Guest", (Heat,), {"name": "guest", "fields": {}, method: explode})

    with pytest.raises(
        ChainError, match=r"stage 'guest' \(g\) .* with t=0.5: ZeroDivisionError: oh"
    ):
        admit(chain=[guest(t=0.5, id="g")])


def test_a_structure_that_cannot_be_hashed_is_refused(admit: Admit) -> None:
    guest = type(
        "Guest", (Toy,), {"name": "guest", "structure": classmethod(lambda cls, params: [])}
    )

    with pytest.raises(ChainError, match="returned list from structure, which must be hashable"):
        admit(chain=[guest])


# --- the rest of a plan ---------------------------------------------------------------------------


def test_a_plan_lists_needs_states_and_guests(admit: Admit) -> None:
    counting = type(
        "Counting", (Toy,), {"name": "counting", "open": lambda self, params, prompt: 0}
    )

    plan = admit(chain=[{"stage": "bias", "values": {1: 1.0}}, counting])

    assert plan.needs == frozenset({Need.COUNTS})
    assert plan.stateful == (1,)
    assert [entry.guarded for entry in plan.entries] == [False, True, False]
    assert plan.eos_id == 3


def test_stops_are_in_order_and_say_whether_they_mind_min_tokens(admit: Admit) -> None:
    stops = admit(stops=[Ending("middle", 1), "late", {"stop": "early"}]).stops

    assert [(check(None), minds) for check, minds, _ in stops] == [  # type: ignore[arg-type,func-returns-value]
        ("early", True),
        ("middle", True),
        ("late", False),
    ]
    assert admit(ignore_eos=True).stops == ()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stops": ["lat"]}, "unknown stop 'lat'; did you mean 'late'"),
        ({"stops": [{"stop": "late", "x": 1}]}, "stop 'late' has no parameter 'x'"),
        ({"observers": ["wach"]}, "unknown observer 'wach'; did you mean 'watch'"),
        ({"driver": {"driver": "beem"}}, "driver must be one of"),
    ],
)
def test_other_plugins_of_a_request_are_known_or_refused(
    admit: Admit, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        admit(**fields)


def test_an_observer_of_one_request_is_in_its_plan_alone(admit: Admit) -> None:
    eye = Watch()

    assert admit(logprobs=1, observers=[eye]).observers[-1] == (eye, 1)
    assert len(admit(logprobs=1).observers) == 1
    assert admit().observers == ()


def test_a_stop_that_cannot_be_bound_is_named(admit: Admit) -> None:
    class Broken(Ending):
        def bind(self, ctx: Any) -> Any:
            raise KeyError("x")

    with pytest.raises(ValidationError, match="stop 'broken' cannot be bound: KeyError"):
        admit(stops=[Broken("broken", 1)])


# --- the report -----------------------------------------------------------------------------------


def test_the_report_says_where_each_value_came_from(planner: Planner) -> None:
    params = snapshot(
        top_k=2, temperature=0.7, chain=[{"stage": "nucleus", "p": 0.5}, "top", "heat"]
    )

    steps = planner.explain(params, provenance={"top_k": "generation_config"}).order

    assert [(step.id, dict(step.params), dict(step.provenance)) for step in steps] == [
        ("nucleus", {"p": 0.5}, {"p": "chain"}),
        ("top", {"k": 2}, {"k": "generation_config"}),
        ("heat", {"t": 0.7}, {"t": "request"}),
        ("draw", {}, {}),
    ]


def test_a_default_of_the_stage_is_called_that(planner: Planner) -> None:
    guest = type("Guest", (Toy,), {"name": "guest", "Params": WithSecrets})

    step = planner.explain(snapshot(chain=[guest(token="abc", many=tuple(range(50)))])).order[0]

    assert step.provenance["size"] == "default"
    assert step.params == {"size": 3, "key": "<hidden>", "token": "<hidden>", "many": "<50 items>"}


class WithSecrets(StageParams):
    size: int = 3
    key: int = Field(default=1234, repr=False)
    token: SecretStr
    many: tuple[int, ...] = ()


def test_the_report_can_be_had_without_a_run_and_reads_well(planner: Planner) -> None:
    text = str(planner.explain(snapshot(top_k=3, temperature=0.7)))

    assert "1. heat(t=0.7 [request])" in text
    assert "2. top(k=3 [request])" in text


def test_an_order_wish_that_is_not_granted_is_noted(admit: Admit) -> None:
    shy = type("Shy", (Toy,), {"name": "shy", "order": Order(after=("top",))})

    assert admit(chain=[shy, "top"], top_k=2).report.notes == ("'shy' asks to stand after 'top'",)


# --- keys, fingerprints, caches -------------------------------------------------------------------


def test_numbers_are_not_in_the_key_and_structure_is(admit: Admit) -> None:
    short, other, long = (admit(allowed_token_ids=ids) for ids in ([1], [2, 5], [1, 2, 3]))

    assert short.key == other.key != long.key
    assert short.report.fingerprint == other.report.fingerprint != long.report.fingerprint
    assert short.entries[0].params != other.entries[0].params


def test_ids_and_observer_orders_are_in_the_key(admit: Admit) -> None:
    keys = {
        admit(top_k=2).key,
        admit(chain=[{"stage": "top", "k": 2, "id": "a"}]).key,
        admit(top_k=2, logprobs=1).key,
        admit(top_k=2, logprobs=2).key,
    }

    assert len(keys) == 4


def test_the_fingerprint_is_the_same_in_another_planner(registry: Registry) -> None:
    one, two = (make_planner(registry).explain(snapshot(top_k=2)) for _ in range(2))

    assert one.fingerprint == two.fingerprint


def test_an_equal_request_is_not_bound_again(admit: Admit) -> None:
    first = admit(allowed_token_ids=[1, 2], seed=1)
    calls = Only.calls

    second = admit(allowed_token_ids=[1, 2], seed=2)

    assert Only.calls == calls
    assert second.entries is first.entries
    assert admit(allowed_token_ids=[1, 7]).entries is not first.entries


def test_other_stop_ids_or_layers_are_other_requests(planner: Planner) -> None:
    params = snapshot(allowed_token_ids=[1])
    first = planner.admit(params, stop_ids=(3,))

    assert planner.admit(params, stop_ids=(3, 5)).entries is not first.entries
    layered = planner.admit(params, stop_ids=(3,), provenance={"allowed_token_ids": "preset"})
    assert layered.report.order[0].provenance == {"ids": "preset"}


def test_a_bind_that_reads_the_prompt_is_asked_every_time(planner: Planner) -> None:
    class Length(Toy):
        name = "length"

        class Params(StageParams):
            n: int = 0

        @classmethod
        def bind(cls, params: Any, ctx: Any) -> Any:
            return params.model_copy(update={"n": len(ctx.prompt_ids)})

    params = snapshot(chain=[Length])

    lengths = [planner.admit(params, prompt_ids=range(n)).entries[0].params.n for n in (1, 5)]

    assert lengths == [1, 5]


def test_a_chain_that_cannot_be_hashed_is_planned_all_the_same(admit: Admit) -> None:
    class Odd(Toy):
        name = "odd"

        class Params(StageParams):
            box: Any = None

    box = bytearray(b"x")

    first, second = (admit(chain=[Odd(box=box)]) for _ in range(2))

    assert names(first) == ["odd", "draw"]
    assert first.entries is not second.entries
    assert first.key == second.key


def test_the_cache_is_bounded(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decodekit.core.plan.MAX_CACHED", 3)
    plans = [planner.admit(snapshot(top_k=k)) for k in range(1, 7)]

    again = planner.admit(snapshot(top_k=1))

    assert again.entries is not plans[0].entries
    assert planner.admit(snapshot(top_k=6)).entries is plans[5].entries


def test_a_new_plugin_is_seen_by_the_next_request(planner: Planner, registry: Registry) -> None:
    guest = type("Guest", (Toy,), {"name": "guest"})
    with pytest.raises(ChainError, match="unknown stage 'guest'"):
        planner.admit(snapshot(chain=["guest"]))

    registry.register(guest)

    assert names(planner.admit(snapshot(chain=["guest"]))) == ["guest", "draw"]
    registry.unregister(guest)
    with pytest.raises(ChainError, match="unknown stage 'guest'"):
        planner.admit(snapshot(chain=["guest"]))


def test_admission_calls_no_hook(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    execute = pluggy.PluginManager._hookexec

    def count(self: Any, name: str, *rest: Any) -> Any:
        calls.append(name)
        return execute(self, name, *rest)

    monkeypatch.setattr(pluggy.PluginManager, "_hookexec", count)
    fresh = Registry.load(catalogue=(TOYS,), autoload=False, environ={})
    assert calls, "loading asks hooks, so that the count is known to work"
    calls.clear()

    planner = make_planner(fresh)
    for k in range(1, 4):
        planner.admit(snapshot(top_k=k, temperature=0.5, logprobs=1))
        planner.admit(snapshot(chain=["top", Heat(t=0.5)], top_k=k))

    assert calls == []
