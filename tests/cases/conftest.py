"""What the cases run on: table models, engines with a large or a small cache, streams, scripts.

Test modules name `Bench` and `Make` for the type checker alone; at run time they come as fixtures.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import torch
from torch import Tensor

from decodekit import LLM, CompletionOutput, RequestOutput, SamplingParams
from decodekit.core.engine import LLMEngine
from decodekit.plugins.author.table_model import byte_alphabet, flat_table, write_table_model
from decodekit.plugins.serve.live import LiveServer
from decodekit.plugins.serve.settings import ServeSettings
from decodekit.sampling_params import RequestOutputKind

CENSUS = Path(__file__).with_name("census.tsv")
Make = Callable[..., "Bench"]
MakeSite = Callable[..., "Site"]
Prompts = Sequence[Any]
Params = SamplingParams | Sequence[SamplingParams]


class Case(NamedTuple):
    """A line of the census."""

    number: str  # three digits
    is_first: bool
    area: str
    state: str
    waits_for_server: bool


def read_census() -> list[Case]:
    """Return every case in order of its number."""
    lines = [line.split("\t") for line in CENSUS.read_text().splitlines()[1:]]
    return [
        Case(number, first == "*", area, state, server != "-")
        for number, first, area, state, server in lines
    ]


@pytest.fixture(scope="session")
def census() -> list[Case]:
    """Every case, tested or not."""
    return read_census()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the cases by area: what ran, and how many are still to be counted."""
    outcomes: dict[str, set[str]] = {}
    for outcome, reports in terminalreporter.stats.items():
        for report in reports:
            found = re.search(r"::test_dec_(\d{3})_", getattr(report, "nodeid", ""))
            if found and outcome in ("passed", "failed", "error", "xfailed", "xpassed"):
                outcomes.setdefault(found[1], set()).add(outcome)
    if outcomes:
        terminalreporter.section("decoding cases by area")
        for line in census_lines(read_census(), outcomes):
            terminalreporter.write_line(line)


def census_lines(cases: Sequence[Case], outcomes: Mapping[str, set[str]]) -> list[str]:
    """Return a line for each area and one for the whole.

    A case counts as passed if all of its tests did; one that has not run is listed by its state.
    """
    areas: dict[str, Counter[str]] = {}
    for case in cases:
        seen = outcomes.get(case.number, set())
        if seen == {"passed"}:
            word = "passed"
        elif seen:
            word = "expected to fail" if seen <= {"passed", "xfailed"} else "FAILED"
        else:
            word = "not run" if case.state == "tested" else case.state
        areas.setdefault(case.area, Counter())[word] += 1
    width = max(map(len, areas))
    lines = [f"{area:{width}}  {_counted(counts)}" for area, counts in areas.items()]
    partly = sum(case.waits_for_server and case.state != "http" for case in cases)
    whole = _counted(sum(areas.values(), Counter()))
    return [*lines, f"{'all':{width}}  {whole}", f"{partly} of them have an HTTP part to come"]


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {word}" for word, count in counts.items())


@dataclass
class Stream:
    """Everything that one request said while it ran, in order."""

    outputs: list[RequestOutput] = field(default_factory=list)

    def parts(self, index: int = 0) -> list[CompletionOutput]:
        """What was said about the answer `index`."""
        return [part for output in self.outputs for part in output.outputs if part.index == index]

    def text(self, index: int = 0) -> str:
        """Its deltas, joined."""
        return "".join(part.text for part in self.parts(index))

    def ids(self, index: int = 0) -> list[int]:
        """Its token ids, joined."""
        return [token for part in self.parts(index) for token in part.token_ids]

    def last(self, index: int = 0) -> CompletionOutput:
        """Its last part."""
        return self.parts(index)[-1]


class Bench:
    """One engine on one model, and the ways in which a case runs requests on it."""

    def __init__(self, folder: Path, table: Tensor | None, options: dict[str, Any]) -> None:
        self.folder = folder
        self.table = table
        self.options = options
        self.llm = LLM(str(folder), **options)
        self._done: dict[str, RequestOutput] = {}

    @property
    def engine(self) -> LLMEngine:
        return self.llm.llm_engine

    def fresh(self, **changes: Any) -> Bench:
        """The same model in another engine, with `changes` to its arguments."""
        return Bench(self.folder, self.table, {**self.options, **changes})

    # --- whole calls ----------------------------------------------------------------------------

    def generate(self, prompts: Prompts, params: Params) -> list[RequestOutput]:
        return self.llm.generate(prompts, params, use_tqdm=False)

    def ids(self, prompts: Prompts, params: Params) -> list[list[int]]:
        """Token ids of the first answer to each prompt."""
        return [list(output.outputs[0].token_ids) for output in self.generate(prompts, params)]

    def all_ids(self, prompts: Prompts, params: Params) -> list[list[list[int]]]:
        """Token ids of every answer to each prompt."""
        outputs = self.generate(prompts, params)
        return [[list(part.token_ids) for part in output.outputs] for output in outputs]

    def solo(self, prompt: Any, params: SamplingParams) -> list[int]:
        """Token ids of a request alone on a fresh engine."""
        return self.fresh().ids([prompt], params)[0]

    def stream(self, prompts: Prompts, params: Params) -> list[Stream]:
        """Run requests together and keep each delta."""
        own = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        streams: dict[str, Stream] = {}
        for number, (prompt, each) in enumerate(zip(prompts, own, strict=True)):
            delta = each.clone()
            delta.output_kind = RequestOutputKind.DELTA
            streams[self.engine.add_request(f"stream-{number}", prompt, delta)] = Stream()
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                streams[output.request_id].outputs.append(output)
        return list(streams.values())

    # --- requests that come and go --------------------------------------------------------------

    def add(self, name: str, prompt: Any, params: SamplingParams) -> None:
        """Queue a request; `finish` returns its result."""
        own = params.clone()
        own.output_kind = RequestOutputKind.FINAL_ONLY
        self.engine.add_request(name, prompt, own)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for output in self.engine.step():
                assert output.request_id not in self._done, "a request was reported twice"
                self._done[output.request_id] = output

    def finish(self) -> dict[str, RequestOutput]:
        """Run until nothing is left; return the results since the last call by name."""
        while self.engine.has_unfinished_requests():
            self.step()
        done, self._done = self._done, {}
        return done

    # --- what is known --------------------------------------------------------------------------

    def count(self, name: str) -> float:
        """The metric `name`."""
        return next(m.value for m in self.llm.get_metrics() if m.name == f"decodekit:{name}")

    def check_idle(self) -> None:
        """Nothing runs, waits or holds cache."""
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert self.count(name) == 0, name

    def check_answers(self) -> None:
        """The engine answers: a plain greedy request gives what the table says."""
        self.check_idle()
        greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        assert self.ids([[1]], greedy) == [self.path(1, 4)]

    def path(self, token: int, count: int) -> list[int]:
        """The greedy continuation of `token` by the table, the lowest id first in a tie."""
        assert self.table is not None
        found: list[int] = []
        for _ in range(count):
            token = int(self.table[token].numpy().argmax())
            found.append(token)
        return found

    def logprobs_after(self, token: int) -> np.ndarray[Any, Any]:
        """Log-softmax of the table's row, float64 [tokens]."""
        assert self.table is not None
        row = self.table[token].numpy().astype(np.float64)
        return row - row.max() - math.log(np.exp(row - row.max()).sum())

    def kept_after(
        self,
        token: int,
        *,
        temperature: float = 1.0,
        min_p: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
    ) -> set[int]:
        """The tokens that may follow `token`, by the formulas in float64, ties by the lower id."""
        row = self.logprobs_after(token) / temperature
        order = np.argsort(-row, kind="stable")
        row = row[order]
        num_alive = len(row)
        if 0 < top_k < len(row):
            num_alive = 1 if top_k == 1 else int((row >= row[top_k - 1]).sum())
        if min_p:
            num_alive = min(num_alive, int((row >= row[0] + math.log(min_p)).sum()))
        mass = np.exp(row[:num_alive] - row[0])
        before = (mass.cumsum() - mass) / mass.sum()
        return set(order[:num_alive][before < top_p + 1e-9].tolist())


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Build an engine on a table.

    `model` are arguments of `write_table_model`, `blocks` the size of the cache in blocks of 16
    tokens, the rest those of the engine.
    """

    def build(
        table: Tensor, *, model: dict[str, Any] | None = None, blocks: int = 0, **options: Any
    ) -> Bench:
        folder = tmp_path_factory.mktemp("table")
        write_table_model(folder, table, **(model or {}))
        if "tokenizer" not in (model or {}):
            options["skip_tokenizer_init"] = True
        options.setdefault("max_num_seqs", 64)
        bench = Bench(folder, table, options)
        return with_blocks(bench, blocks) if blocks else bench

    return build


def with_blocks(bench: Bench, blocks: int) -> Bench:
    """The same engine with a cache of `blocks` blocks."""
    backend = bench.engine.parts.runner.backend
    each = backend.bytes_per_block(backend.layout)  # type: ignore[attr-defined]
    return bench.fresh(kv_cache_memory_bytes=blocks * each)


@pytest.fixture(scope="session")
def small_pool() -> Callable[[Bench, int], Bench]:
    """Return a function that makes the same engine with a cache of so many blocks."""
    return with_blocks


@pytest.fixture(scope="session")
def flat(make: Make) -> Bench:
    """97 tokens, of which 64 are equally likely after any."""
    return make(flat_table(97))


@pytest.fixture(scope="session")
def rough_table() -> Tensor:
    """97 tokens with random logits in multiples of 1/16, so exact in any batch."""
    generator = torch.Generator().manual_seed(5)
    return (torch.randint(-80, 81, (97, 97), generator=generator) / 16).float()


@pytest.fixture(scope="session")
def rough(make: Make, rough_table: Tensor) -> Bench:
    """The random table in an engine."""
    return make(rough_table)


@pytest.fixture(scope="session")
def attentive_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model that looks at its context: two layers, 97 tokens, float32."""
    import transformers

    torch.manual_seed(11)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,  # so large that attention decides
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    folder = tmp_path_factory.mktemp("attentive")
    transformers.LlamaForCausalLM(config).float().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def attentive(attentive_folder: Path) -> Bench:
    """That model in an engine."""
    options = {"skip_tokenizer_init": True, "max_num_seqs": 64, "dtype": "float32"}
    return Bench(attentive_folder, None, options)


@pytest.fixture(scope="session")
def same_by_tie_rule() -> Callable[[RequestOutput, RequestOutput], bool]:
    """Say whether two greedy outputs are equal, or part where the two best are within 1e-4.

    Both need `logprobs=2`.
    """

    def same(one: RequestOutput, other: RequestOutput) -> bool:
        mine, theirs = one.outputs[0], other.outputs[0]
        if list(mine.token_ids) == list(theirs.token_ids):
            return True
        pairs = zip(mine.token_ids, theirs.token_ids, strict=False)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if place is None or mine.logprobs is None:
            return False
        best = sorted((entry.logprob for entry in mine.logprobs[place].values()), reverse=True)
        return best[0] - best[1] < 1e-4

    return same


class Script:
    """A logits processor that leaves at step t only token t of its list."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)

    def __call__(self, output_ids: list[int], logits: Tensor) -> Tensor:
        only = torch.full_like(logits, -torch.inf)
        only[self.tokens[len(output_ids)]] = 0.0
        return only


@pytest.fixture(scope="session")
def spell() -> Callable[..., SamplingParams]:
    """Return a function that makes a request which writes given tokens, as many as there are."""

    def script(tokens: Sequence[int], **fields: Any) -> SamplingParams:
        fields.setdefault("max_tokens", len(tokens))
        return SamplingParams(logits_processors=[Script(tokens)], temperature=0.0, **fields)

    return script


@pytest.fixture(scope="session")
def ascii_tokenizer() -> Callable[..., Any]:
    """Return a maker of byte-level tokenizers: 128 ASCII bytes (ids 0..127), extra, special tokens.

    `merges` are pairs of texts that encoding joins; their results become tokens after `extra`.
    `adds_bos`: the tokenizer puts `bos` before each text.
    """
    return _ascii_tokenizer


def _ascii_tokenizer(
    extra: Sequence[str] = (),
    special: Sequence[str] = (),
    *,
    merges: Sequence[tuple[str, str]] = (),
    adds_bos: bool = False,
    **names: Any,
) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = byte_alphabet()

    def spelled(text: str) -> str:
        return "".join(alphabet[byte] for byte in text.encode())

    pairs = [(spelled(left), spelled(right)) for left, right in merges]
    joined = ["".join(pair) for pair in pairs]
    words = dict.fromkeys([*alphabet[:128], *map(spelled, extra), *joined])
    vocab = {word: place for place, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    if adds_bos:
        bos = names["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


class Site:
    """One live server, and the ways in which a case talks to it."""

    def __init__(self, server: LiveServer, table: Tensor) -> None:
        self.server = server
        self.table = table
        self.http = httpx.Client(base_url=server.url, timeout=60)

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def ask(self, path: str, **body: Any) -> Any:
        """Post a body that must be answered; return the answer, which must be strict JSON."""
        answer = self.post(path, body)
        assert answer.status_code == 200, answer.text
        return strict_json(answer.text)

    def chat(self, **body: Any) -> Any:
        body.setdefault("messages", [{"role": "user", "content": "hi"}])
        return self.ask("/v1/chat/completions", **body)

    def complete(self, **body: Any) -> Any:
        return self.ask("/v1/completions", **body)

    def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The events of a stream, which must end in [DONE] and hold strict JSON."""
        answer = self.post(path, {**body, "stream": True})
        assert answer.status_code == 200, answer.text
        lines = [line for line in answer.text.split("\n") if line]
        assert lines[-1] == "data: [DONE]", answer.text
        return [strict_json(line.removeprefix("data: ")) for line in lines[:-1]]

    def chat_events(self, **body: Any) -> list[dict[str, Any]]:
        body.setdefault("messages", [{"role": "user", "content": "hi"}])
        return self.events("/v1/chat/completions", **body)

    def refused(self, path: str, body: Any, *, status: int = 400) -> dict[str, Any]:
        """Post what must be refused; return the error."""
        answer = self.post(path, body)
        assert answer.status_code == status, answer.text
        error: dict[str, Any] = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == status
        return error

    def count(self, name: str) -> float:
        """The metric `name` of the engine."""
        engine = self.server.engine
        return next(m.value for m in engine.get_metrics() if m.name == f"decodekit:{name}")

    def check_answers(self) -> None:
        """The server answers: a greedy request gives what the table says."""
        body = {"prompt": [1], "temperature": 0, "max_tokens": 4, "ignore_eos": True,
                "return_token_ids": True}  # fmt: skip
        token, path = 1, []
        for _ in range(4):
            token = int(self.table[token].numpy().argmax())
            path.append(token)
        assert self.complete(**body)["choices"][0]["token_ids"] == path


def strict_json(text: str) -> Any:
    """Parse JSON without NaN and infinities."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def writes(text: str | bytes | Sequence[int], **fields: Any) -> dict[str, Any]:
    """Fields of a body that make the model write these bytes or ids, then what it likes."""
    ids = list(text.encode() if isinstance(text, str) else text)
    entry = {"stage": "forced_tokens", "prefix": ids}
    return {"chain": [entry], "temperature": 1.0, "max_tokens": len(ids), **fields}


@pytest.fixture(scope="session", name="writes")
def writes_fixture() -> Callable[..., dict[str, Any]]:
    """Return the maker of bodies that spell."""
    return writes


@pytest.fixture(scope="session")
def make_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeSite]:
    """Serve a table; `model` and `settings` are for the table model and the server."""
    with ExitStack() as stack:

        def serve(
            table: Tensor,
            *,
            model: dict[str, Any] | None = None,
            settings: dict[str, Any] | None = None,
            **engine: Any,
        ) -> Site:
            folder = tmp_path_factory.mktemp("site")
            write_table_model(folder, table, **(model or {}))
            engine.setdefault("max_num_seqs", 64)
            own = ServeSettings(**{"served_model_name": ["T"], **(settings or {})})
            server = LiveServer(str(folder), settings=own, **engine)
            site = Site(stack.enter_context(server), table)
            stack.callback(site.http.close)
            return site

        yield serve


PLAIN_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="session")
def byte_site(make_site: MakeSite) -> Site:
    """256 byte tokens of which the first 64 are equally likely, an end token, a chat template."""
    from decodekit.plugins.author.table_model import byte_tokenizer

    tokenizer = byte_tokenizer(special=["<end>"], eos="<end>", chat_template=PLAIN_TEMPLATE)
    table = flat_table(257)
    return make_site(table, model={"tokenizer": tokenizer, "eos_token_id": 256})
