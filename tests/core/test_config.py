"""EngineArgs and EngineConfig: names, ranges, sizes as text, defaults by device."""

import pickle
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest

from decodekit.core.config import AsyncEngineArgs, EngineArgs, EngineConfig, VllmConfig
from decodekit.core.config_rules import parse_size
from decodekit.core.errors import NotInThisVersion, ParameterTypeError, ValidationError

# Names and defaults of vLLM's constructor tables, and our own.
DEFAULTS = {
    "model": None,
    "runner": "auto",
    "convert": "auto",
    "tokenizer": None,
    "tokenizer_mode": "auto",
    "skip_tokenizer_init": False,
    "trust_remote_code": False,
    "allowed_local_media_path": "",
    "allowed_media_domains": None,
    "tensor_parallel_size": 1,
    "dtype": "auto",
    "quantization": None,
    "revision": None,
    "tokenizer_revision": None,
    "chat_template": None,
    "seed": 0,
    "gpu_memory_utilization": 0.9,
    "cpu_offload_gb": 0,
    "offload_group_size": 0,
    "offload_num_in_group": 1,
    "offload_prefetch_step": 1,
    "offload_params": None,
    "enforce_eager": False,
    "enable_return_routed_experts": False,
    "disable_custom_all_reduce": False,
    "hf_token": None,
    "hf_overrides": None,
    "mm_processor_kwargs": None,
    "pooler_config": None,
    "structured_outputs_config": None,
    "profiler_config": None,
    "attention_config": None,
    "kv_cache_memory_bytes": None,
    "compilation_config": None,
    "logits_processors": None,
    "max_model_len": None,
    "block_size": 16,
    "kv_cache_dtype": "auto",
    "max_logprobs": 20,
    "max_logprob_token_ids": 128,
    "logprobs_mode": "raw_logprobs",
    "scheduling_policy": "fcfs",
    "async_scheduling": None,
    "stream_interval": 1,
    "generation_config": "auto",
    "override_generation_config": {},
    "served_model_name": None,
    "enable_sleep_mode": False,
    "enable_lora": False,
    "max_loras": 1,
    "max_lora_rank": 16,
    "max_cpu_loras": None,
    "lora_dtype": "auto",
    "fully_sharded_loras": False,
    "default_mm_loras": None,
    "mm_processor_cache_gb": 4,
    "enable_prompt_embeds": False,
    "reasoning_parser": "",
    "reasoning_config": None,
    "speculative_config": None,
    "weight_transfer_config": None,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "distributed_executor_backend": None,
    "load_format": "auto",
    "model_impl": "auto",
    "plugins": None,
    "plugin_autoload": True,
    "vllm_entry_points": False,
    "strict_plugins": False,
    "profile": "default",
    "fusion": True,
    "batch_invariant": False,
    "debug": False,
}
# Settled by the device or by this version: the argument stands, its default is None.
LATE = ("max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching", "enable_chunked_prefill")

BAD = [
    ({"model": ""}, "model"),
    ({"model": 3}, "model"),
    ({"dtype": "int8"}, "dtype"),
    ({"runner": "train"}, "runner"),
    ({"model_impl": "terratorch"}, "model_impl"),
    ({"convert": "x"}, "convert"),
    ({"seed": 1.5}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"gpu_memory_utilization": 0}, "gpu_memory_utilization"),
    ({"gpu_memory_utilization": 1.01}, "gpu_memory_utilization"),
    ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization"),
    ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes"),
    ({"max_model_len": 0}, "max_model_len"),
    ({"max_model_len": -2}, "max_model_len"),
    ({"max_model_len": "1.5K"}, "max_model_len"),
    ({"max_model_len": "1.0005k"}, "max_model_len"),
    ({"max_model_len": "lots"}, "max_model_len"),
    ({"max_model_len": True}, "max_model_len"),
    ({"max_num_seqs": 0}, "max_num_seqs"),
    ({"max_num_batched_tokens": 0}, "max_num_batched_tokens"),
    ({"max_num_batched_tokens": 8, "max_num_seqs": 9}, "max_num_batched_tokens"),
    (
        {"max_num_batched_tokens": 64, "max_model_len": 65, "enable_chunked_prefill": False},
        "max_num_batched_tokens",
    ),
    ({"block_size": 0}, "block_size"),
    ({"max_logprobs": -2}, "max_logprobs"),
    ({"max_logprob_token_ids": -2}, "max_logprob_token_ids"),
    ({"logprobs_mode": "x"}, "logprobs_mode"),
    ({"scheduling_policy": "lifo"}, "scheduling_policy"),
    ({"stream_interval": 0}, "stream_interval"),
    ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
    ({"offload_group_size": -1}, "offload_group_size"),
    ({"offload_group_size": 2, "offload_num_in_group": 3}, "offload_num_in_group"),
    ({"offload_prefetch_step": 0}, "offload_prefetch_step"),
    ({"max_lora_rank": 12}, "max_lora_rank"),
    ({"max_loras": 4, "max_cpu_loras": 2}, "max_cpu_loras"),
    ({"enforce_eager": "yes"}, "enforce_eager"),
    ({"load_format": "zip"}, "load_format"),
    ({"generation_config": ""}, "generation_config"),
    ({"override_generation_config": {"topp": 0.5}}, "override_generation_config"),
    ({"override_generation_config": {"top_p": 3}}, "top_p"),
    ({"served_model_name": ""}, "served_model_name"),
    ({"served_model_name": [1]}, "served_model_name"),
    ({"plugins": "mine"}, "plugins"),
    ({"plugins": [3]}, "plugins"),
    ({"hf_overrides": 3}, "hf_overrides"),
    ({"logits_processors": "pkg:Processor"}, "logits_processors"),
    ({"logits_processors": [3]}, "logits_processors"),
    ({"hf_token": 3}, "hf_token"),
    ({"profile": ""}, "profile"),
]


def test_every_public_argument_has_vllms_name_and_default() -> None:
    args = EngineArgs()

    assert {name: getattr(args, name) for name in DEFAULTS} == DEFAULTS
    assert all(getattr(args, name) is None for name in LATE)


@pytest.mark.parametrize(("given", "parameter"), BAD)
def test_bad_values_are_refused_by_name(given: dict[str, Any], parameter: str) -> None:
    with pytest.raises(ValidationError) as caught:
        EngineArgs(**given)

    assert caught.value.parameter == parameter
    assert parameter in str(caught.value)


def test_unknown_arguments_are_type_errors_with_a_suggestion() -> None:
    with pytest.raises(ParameterTypeError, match="did you mean 'max_num_seqs'"):
        EngineArgs(max_num_seq=4)
    with pytest.raises(TypeError, match="AsyncEngineArgs has no parameter"):
        AsyncEngineArgs(max_num_seq=4)


def test_a_token_is_never_shown() -> None:
    with pytest.raises(ValidationError) as caught:
        EngineArgs(hf_token=["secret"])

    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("25.6k", 25_600),
        ("32K", 32_768),
        ("1k", 1000),
        ("2m", 2_000_000),
        ("1M", 1_048_576),
        ("0.5g", 500_000_000),
        ("1G", 2**30),
        ("1t", 10**12),
        ("1T", 2**40),
        (" 8 ", 8),
        (77, 77),
    ],
)
def test_sizes_are_read_as_on_the_command_line(text: str | int, size: int) -> None:
    assert parse_size("max_model_len", text, "a size") == size
    assert EngineArgs(max_model_len=text).max_model_len == size


@pytest.mark.parametrize("given", [-1, "auto", "-1"])
def test_auto_length_means_fit_to_memory(given: int | str) -> None:
    assert EngineArgs(max_model_len=given).resolve().max_model_len == -1


def test_defaults_follow_the_device() -> None:
    args = EngineArgs()

    def sizes(memory: int | None) -> tuple[int, int]:
        config = args.resolve(device_memory_bytes=memory)
        return config.max_num_seqs, config.max_num_batched_tokens

    assert sizes(None) == (256, 2048)
    assert sizes(24 * 2**30) == (256, 8192)
    assert sizes(80 * 2**30) == (1024, 16384)


def test_one_batch_limit_makes_room_for_the_other() -> None:
    assert EngineArgs(max_num_batched_tokens=64).resolve().max_num_seqs == 64
    assert EngineArgs(max_num_seqs=4000).resolve().max_num_batched_tokens == 4000
    whole = EngineArgs(enable_chunked_prefill=False, max_model_len=4096).resolve()
    assert whole.max_num_batched_tokens == 4096


def test_resolving_freezes_and_canonicalises() -> None:
    config = EngineArgs(
        "some/model", dtype="half", served_model_name="m", plugins=["no:top_k"]
    ).resolve()

    assert (config.model, config.dtype) == ("some/model", "float16")
    assert config.served_model_name == ("m",)
    assert config.plugins == ("no:top_k",)
    assert config.enable_chunked_prefill is True
    assert EngineArgs(served_model_name=["a", "b"]).resolve().served_model_name == ("a", "b")
    with pytest.raises(FrozenInstanceError):
        config.seed = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        config.override_generation_config["top_k"] = 3  # type: ignore[index]
    assert pickle.loads(pickle.dumps(config)) == config


def test_every_setting_of_the_config_comes_from_an_argument() -> None:
    arguments = {item.name for item in fields(EngineArgs)}

    assert {item.name for item in fields(EngineConfig)} <= arguments
    assert VllmConfig is EngineConfig


def test_resolving_checks_what_was_changed_after_construction() -> None:
    args = EngineArgs()
    args.stream_interval = 0

    with pytest.raises(ValidationError, match="stream_interval"):
        args.resolve()


def test_resolving_refuses_what_this_version_lacks() -> None:
    with pytest.raises(NotInThisVersion, match="tensor_parallel_size=2"):
        EngineArgs(tensor_parallel_size=2).create_engine_config()


def test_swap_space_is_accepted_with_a_deprecation_warning() -> None:
    with pytest.warns(DeprecationWarning, match="swap_space"):
        args = EngineArgs(swap_space=4)

    assert args.swap_space is None
    args.resolve()


def test_dtype_may_be_torchs_and_model_a_path() -> None:
    torch = pytest.importorskip("torch")

    args = EngineArgs(Path("/models/m"), dtype=torch.bfloat16)

    assert (args.model, args.dtype) == ("/models/m", "bfloat16")


def test_overrides_may_name_end_ids_and_none_is_unset() -> None:
    args = EngineArgs(override_generation_config={"eos_token_id": [1], "top_k": None, "top_p": 0.5})

    assert args.override_generation_config == {"eos_token_id": [1], "top_p": 0.5}
