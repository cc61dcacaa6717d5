"""Structured output on 239 schemas: what is exact, what is wrong, what it costs.

`structured_corpus.json` beside this file holds schemas as tools, configuration files, extraction
tasks and web interfaces have them, each with valid and invalid documents. jsonschema (2020-12,
formats asserted, exact decimals) is asked about every document again before it counts. A document
is accepted if its tokens are legal one after another and the text may end there; a random walk
takes uniformly random legal tokens to the end, half of the steps among closing ones, so that it
gets there.

    python benchmarks/structured.py [--backends auto,guidance,...] [--every 1] [--walks 4]
                                    [--decode 16] [--json FILE]
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import random
import time
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from pathlib import Path
from statistics import median
from typing import Any

import jsonschema
import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from decodekit.core.constraint import FillState, Vocabulary
from decodekit.core.models.locate import embedded_path
from decodekit.core.structured_params import StructuredOutputsParams
from decodekit.core.tokenizer import Tokenizer, load_tokenizer
from decodekit.structured.automaton import AutomatonBackend
from decodekit.structured.choosing import Backends
from decodekit.structured.guidance import GuidanceBackend
from decodekit.structured.outlines import OutlinesBackend
from decodekit.structured.spec import spec_of
from decodekit.structured.trie import TrieBackend
from decodekit.structured.vocabulary import vocabulary_of
from decodekit.structured.xgrammar import XGrammarBackend

CORPUS = Path(__file__).with_name("structured_corpus.json")
NAMES = ("auto", "guidance", "xgrammar", "outlines")
LONGEST_WALK = 1_500  # tokens; a longer walk is given up, and counted as such
CLOSING = frozenset(('"', "}", "]", '"}', '"]', "}}", "]}", '","', '":', ",", ":", "0", "1"))


@dataclass
class Tally:
    """What happened under one backend."""

    exact: int = 0
    refused: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)  # suited, but the library could not compile
    wrong: list[str] = field(default_factory=list)  # invalid documents that were accepted
    lost: list[str] = field(default_factory=list)  # valid documents that were rejected
    valid: int = 0  # documents that were tried
    invalid: int = 0
    walks: int = 0
    unfinished: int = 0
    bad_walks: list[str] = field(default_factory=list)
    suit_ms: list[float] = field(default_factory=list)
    compile_ms: list[float] = field(default_factory=list)
    fill_us: list[float] = field(default_factory=list)
    chosen: dict[str, int] = field(default_factory=dict)


def judge(schema: Any) -> Any:
    """A validator of jsonschema for exact decimals, with formats."""
    default = jsonschema.Draft202012Validator
    base = jsonschema.validators.validator_for(schema, default) if schema is not True else default
    types = base.TYPE_CHECKER.redefine("number", _is_number).redefine("integer", _is_integer)
    exact = jsonschema.validators.extend(base, {"multipleOf": _multiple}, type_checker=types)
    return exact(_exact(json.dumps(schema)), format_checker=default.FORMAT_CHECKER)


def _exact(text: str) -> Any:
    return json.loads(text, parse_float=_decimal)


def _decimal(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:  # larger than any decimal
        return Decimal(repr(float(text)))


def _is_number(checker: Any, value: Any) -> bool:
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


def _is_integer(checker: Any, value: Any) -> bool:
    return _is_number(checker, value) and Decimal(value) == Decimal(value).to_integral_value()


def _multiple(validator: Any, multiple: Any, value: Any, schema: Any) -> Any:
    if _is_number(None, value) and Fraction(value) % Fraction(multiple) != 0:
        yield jsonschema.ValidationError(f"{value} is no multiple of {multiple}")


class Bench:
    """The corpus under several backends, on one vocabulary."""

    def __init__(self, tokenizer: Tokenizer, walks: int) -> None:
        self.tokenizer = tokenizer
        self.vocabulary: Vocabulary = vocabulary_of(tokenizer)
        self.walks = walks
        kinds = (TrieBackend, AutomatonBackend, GuidanceBackend, XGrammarBackend, OutlinesBackend)
        named = {kind.name: kind for kind in kinds}
        self.backends = Backends(self.vocabulary, named, {"compile_seconds": 10.0})
        self.mask = torch.zeros(1, -(-self.vocabulary.size // 32), dtype=torch.int32)
        texts = (token.decode("utf-8", "replace").strip() for token in self.vocabulary.tokens)
        self.closing = np.array([text in CLOSING for text in texts])

    def schema(self, name: str, entry: dict[str, Any], wanted: str, tally: Tally) -> None:
        """Try one schema under one backend and note everything."""
        begun = time.perf_counter()
        try:
            spec = spec_of(StructuredOutputsParams(json=_asked(entry["schema"])))
            picked = next(self.backends.candidates(spec, wanted))
        except ValueError as error:
            tally.refused.append(f"{name}: {error}")
            return
        suited = time.perf_counter()
        try:
            program = picked.backend.compile(picked.suited.spec)
        except ValueError as error:
            tally.failed.append(f"{name}: {error}")
            return
        tally.suit_ms.append((suited - begun) * 1e3)
        tally.compile_ms.append((time.perf_counter() - suited) * 1e3)
        tally.exact += 1
        tally.chosen[picked.backend.name] = tally.chosen.get(picked.backend.name, 0) + 1
        validator = judge(entry["schema"])
        self._documents(name, entry, program, validator, tally)
        self._walks(name, program, validator, tally)

    def _documents(
        self, name: str, entry: dict[str, Any], program: Any, validator: Any, tally: Tally
    ) -> None:
        for text in entry["valid"] + entry["invalid"]:
            good = validator.is_valid(_exact(text))
            tally.valid += good
            tally.invalid += not good
            accepted = self._accepts(program, text, tally)
            if accepted and not good:
                tally.wrong.append(f"{name}: {text}")
            elif good and not accepted:
                tally.lost.append(f"{name}: {text}")

    def _accepts(self, program: Any, text: str, tally: Tally) -> bool:
        matcher = program.matcher(self.vocabulary.eos_ids)
        for token in self.tokenizer.encode(text, add_special_tokens=False):
            legal = self._legal(matcher, tally)
            if legal is None or not legal[token] or not matcher.accept(token):
                return False
        return bool(matcher.is_completed)

    def _legal(self, matcher: Any, tally: Tally) -> Any:
        """Which ids are legal, as an array of booleans; None at a dead end."""
        begun = time.perf_counter()
        fill = matcher.fill(self.mask, 0)
        tally.fill_us.append((time.perf_counter() - begun) * 1e6)
        if fill.state is FillState.DEAD:
            return None
        bits = np.unpackbits(self.mask.numpy().view(np.uint8), bitorder="little")
        return bits[: self.vocabulary.size].astype(bool)

    def _walks(self, name: str, program: Any, validator: Any, tally: Tally) -> None:
        stops = list(self.vocabulary.eos_ids)
        for walk in range(self.walks):
            rng = random.Random(f"{name} {walk}")
            ids = self._walk(program, rng, stops, tally)
            if ids is None:
                tally.unfinished += 1
                continue
            tally.walks += 1
            data = b"".join(self.vocabulary.tokens[token] for token in ids)
            try:
                good = validator.is_valid(_exact(data.decode()))
            except ValueError:
                good = False
            if not good:
                tally.bad_walks.append(f"{name}: {data!r}")

    def _walk(
        self, program: Any, rng: random.Random, stops: list[int], tally: Tally
    ) -> list[int] | None:
        matcher = program.matcher(stops)
        ids: list[int] = []
        while len(ids) < LONGEST_WALK:
            legal = self._legal(matcher, tally)
            if legal is None:
                return None
            if legal[stops].any() and rng.random() < 0.5:
                return ids
            legal[stops] = False
            few = legal & self.closing
            if few.any() and (rng.random() < 0.5 or len(ids) > 200):
                legal = few
            allowed = np.flatnonzero(legal)
            if not len(allowed):
                return ids
            token = int(allowed[rng.randrange(len(allowed))])
            if not matcher.accept(token):
                return None
            ids.append(token)
        return None


def _asked(schema: Any) -> Any:
    return schema if isinstance(schema, dict) else json.dumps(schema)


def decode_rates(batch: int, tokens: int = 32, rounds: int = 3) -> dict[str, float]:
    """Tokens a second of the embedded model, free and under a schema, and the median share.

    The schema asks for a list that is too long to end within `tokens`, so that both sides decode
    the same number of them; the first round compiles and is left out.
    """
    from decodekit import LLM, SamplingParams

    item = {"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer"}}}
    closed = {**item, "required": ["name", "n"], "additionalProperties": False}
    schema = {"type": "array", "items": closed, "minItems": 100}
    llm = LLM()
    rates: dict[str, list[float]] = {"free": [], "constrained": []}
    for turn in range(rounds + 1):
        cells: list[tuple[str, Any]] = [("free", None), ("constrained", {"json": schema})]
        for name, wanted in cells[:: 1 if turn % 2 else -1]:
            params = [
                SamplingParams(
                    temperature=0.8,
                    seed=row,
                    max_tokens=tokens,
                    ignore_eos=True,
                    structured_outputs=wanted,
                )
                for row in range(batch)
            ]
            begun = time.perf_counter()
            outputs = llm.generate(["A long list as JSON:\n"] * batch, params, use_tqdm=False)
            passed = time.perf_counter() - begun
            made = sum(len(output.outputs[0].token_ids) for output in outputs)
            assert made == batch * tokens, (name, made)
            rates[name].append(made / passed)
    shares = [c / f for c, f in zip(rates["constrained"], rates["free"], strict=True)]
    return {
        "free": median(rates["free"][1:]),
        "constrained": median(rates["constrained"][1:]),
        "share": median(shares[1:]),
    }


def figures(tally: Tally, total: int) -> dict[str, Any]:
    """The numbers of one backend, as the table and the file have them."""
    fills = np.array(tally.fill_us or [0.0])
    return {
        "schemas": total,
        "exact": tally.exact,
        "refused": len(tally.refused),
        "failed_to_compile": len(tally.failed),
        "approximate": 0,
        "wrong_documents_accepted": len(tally.wrong),
        "invalid_documents": tally.invalid,
        "right_documents_rejected": len(tally.lost),
        "valid_documents": tally.valid,
        "walks": tally.walks,
        "walks_invalid": len(tally.bad_walks),
        "walks_unfinished": tally.unfinished,
        "suit_ms_p50": median(tally.suit_ms or [0.0]),
        "suit_ms_max": max(tally.suit_ms or [0.0]),
        "compile_ms_p50": median(tally.compile_ms or [0.0]),
        "compile_ms_max": max(tally.compile_ms or [0.0]),
        "fill_us_p50": float(np.percentile(fills, 50)),
        "fill_us_p99": float(np.percentile(fills, 99)),
        "chosen": tally.chosen,
        "examples": {
            "refused": tally.refused,
            "failed": tally.failed,
            "wrong": tally.wrong,
            "lost": tally.lost,
            "bad_walks": tally.bad_walks,
        },
    }


def table(results: dict[str, dict[str, Any]]) -> Table:
    """One column a backend."""
    shown = Table(title="Structured output, each backend alone beside auto")
    shown.add_column("")
    for name in results:
        shown.add_column(name, justify="right")
    rows = {
        "exact": lambda f: f"{f['exact']} of {f['schemas']}",
        "refused": lambda f: f"{f['refused'] + f['failed_to_compile']}",
        "approximate": lambda f: f"{f['approximate']}",
        "wrong documents accepted": lambda f: (
            f"{f['wrong_documents_accepted']} of {f['invalid_documents']}"
        ),
        "right documents rejected": lambda f: (
            f"{f['right_documents_rejected']} of {f['valid_documents']}"
        ),
        "finished walks valid": lambda f: f"{f['walks'] - f['walks_invalid']} of {f['walks']}",
        "walks given up": lambda f: f"{f['walks_unfinished']}",
        "suit ms p50 / max": lambda f: f"{f['suit_ms_p50']:.1f} / {f['suit_ms_max']:.1f}",
        "compile ms p50 / max": lambda f: f"{f['compile_ms_p50']:.1f} / {f['compile_ms_max']:.0f}",
        "fill µs p50 / p99": lambda f: f"{f['fill_us_p50']:.0f} / {f['fill_us_p99']:.0f}",
        "who compiled": lambda f: ", ".join(f"{k} {v}" for k, v in f["chosen"].items()),
    }
    for title, cell in rows.items():
        shown.add_row(title, *(cell(figure) for figure in results.values()))
    return shown


def main() -> None:
    """Parse the arguments, run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--backends", default=",".join(NAMES))
    parser.add_argument("--every", type=int, default=1, help="try every n-th schema only")
    parser.add_argument("--walks", type=int, default=4, help="random walks a schema and backend")
    parser.add_argument("--decode", type=int, default=0, help="batch of the decode rates; 0: none")
    parser.add_argument("--json", type=Path, help="write every figure there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    corpus = dict(list(json.loads(CORPUS.read_text()).items())[:: options.every])
    bench = Bench(load_tokenizer(embedded_path()), options.walks)
    results: dict[str, dict[str, Any]] = {}
    for wanted in options.backends.split(","):
        tally = Tally()
        warm = {"schema": {"type": "object", "additionalProperties": False}}
        bench.schema("warm", {**warm, "valid": [], "invalid": []}, wanted, Tally())
        for name, entry in track(corpus.items(), f"{wanted:9}", console=console):
            bench.schema(name, entry, wanted, tally)
        results[wanted] = figures(tally, len(corpus))
    bench.backends.close()
    console.print(table(results))
    for name, figure in results.items():
        examples = figure["examples"]
        for kind in ("wrong", "lost", "bad_walks", "failed"):
            for text in examples[kind][:5]:
                console.print(f"{name} {kind}: {text[:300]}", markup=False)
    for text in results.get("auto", {}).get("examples", {}).get("refused", []):
        console.print(f"auto refused {text[:300]}", markup=False)
    rates = decode_rates(options.decode) if options.decode else {}
    if rates:
        console.print(
            f"decode, batch {options.decode}: {rates['free']:.0f} tokens/s free, "
            f"{rates['constrained']:.0f} constrained ({rates['share']:.1%})"
        )
    if options.json:
        options.json.write_text(json.dumps({"backends": results, "decode": rates}, indent=1))


if __name__ == "__main__":
    main()
