"""The cases that any library must get right, as they are written, under `auto` and each backend.

A text is accepted if some spelling of it in tokens is legal all the way and may end: the
tokenizer's own, or byte by byte, since a grammar may allow the one and not the other.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from decodekit.core.constraint import FillState, GrammarSpec, Vocabulary
from decodekit.core.errors import ValidationError
from decodekit.core.structured_params import StructuredOutputsParams
from decodekit.structured.automaton import AutomatonBackend
from decodekit.structured.choosing import Backends
from decodekit.structured.guidance import GuidanceBackend
from decodekit.structured.outlines import OutlinesBackend
from decodekit.structured.spec import spec_of
from decodekit.structured.trie import TrieBackend
from decodekit.structured.xgrammar import XGrammarBackend

CASES = json.loads(Path(__file__).with_name("cases.json").read_text())
KINDS = (TrieBackend, AutomatonBackend, GuidanceBackend, XGrammarBackend, OutlinesBackend)
# Who must refuse which case, rather than be wrong: backend -> ids.
REFUSED = {
    "guidance": {"so-15"},
    "xgrammar": set(),
    "outlines": {"so-03", "so-05", "so-07", "so-08", "so-14", "so-15"},
}


def spec_of_case(case: dict[str, Any]) -> GrammarSpec:
    value = case["spec"]
    if case["kind"] == "structural_tag":
        value = json.dumps(value)
    return spec_of(StructuredOutputsParams(**{case["kind"]: value}))


@pytest.fixture(scope="module")
def backends(tiny: Vocabulary) -> Any:
    made = Backends(tiny, {kind.name: kind for kind in KINDS}, {})
    yield made
    made.close()


def accepts(program: Any, vocabulary: Vocabulary, text: str) -> bool:
    single = {token: i for i, token in enumerate(vocabulary.tokens) if len(token) == 1}
    spellings = [vocabulary.encode(text), [single[bytes([byte])] for byte in text.encode()]]
    return any(legal(program, vocabulary, ids) for ids in spellings)


def legal(program: Any, vocabulary: Vocabulary, ids: list[int]) -> bool:
    matcher = program.matcher(vocabulary.eos_ids)
    mask = torch.zeros(1, -(-vocabulary.size // 32), dtype=torch.int32)
    for token in [*ids, vocabulary.eos_ids[0]]:
        if matcher.fill(mask, 0).state is FillState.DEAD:
            return False
        if not (int(mask[0, token // 32]) >> (token % 32)) & 1:
            return False
        assert matcher.accept(token), "a legal token was refused"
    return True


def check(case: dict[str, Any], program: Any, vocabulary: Vocabulary) -> None:
    rejected = [text for text in case["accept"] if not accepts(program, vocabulary, text)]
    accepted = [text for text in case["reject"] if accepts(program, vocabulary, text)]
    assert (rejected, accepted) == ([], [])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_auto_accepts_and_rejects_as_written(
    case: dict[str, Any], backends: Any, tiny: Vocabulary
) -> None:
    if case.get("expect_error"):
        with pytest.raises(ValidationError, match="position"):
            spec_of_case(case)
        return

    picked = next(backends.candidates(spec_of_case(case)))

    check(case, picked.backend.compile(picked.suited.spec), tiny)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize(
    "case", [case for case in CASES if not case.get("expect_error")], ids=lambda case: case["id"]
)
def test_each_backend_is_exact_or_refuses(
    name: str, case: dict[str, Any], backends: Any, tiny: Vocabulary
) -> None:
    spec = spec_of_case(case)

    try:
        picked = next(backends.candidates(spec, name))
    except ValidationError:
        assert case["id"] in REFUSED[name]
        return

    assert case["id"] not in REFUSED[name]
    check(case, picked.backend.compile(picked.suited.spec), tiny)
