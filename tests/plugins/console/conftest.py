"""A tiny model folder with a chat template, and a way to call the command line."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner, Result

from decodekit.core.cli import app
from decodekit.core.config import EngineArgs
from decodekit.core.engine import LLMEngine

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>", "<s>")

Decodekit = Callable[..., Result]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a config for a two-layer Llama and a byte tokenizer; its weights are random."""
    folder = tmp_path_factory.mktemp("tiny")
    write_model(folder)
    return str(folder)


def write_model(folder: Path, template: str = CHATML, **generation_config: object) -> None:
    """Write everything but weights, which `--load-format dummy` makes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 259,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "chat_template": template,
    }
    for name, content in (
        ("config", config),
        ("tokenizer_config", tokenizer_config),
        ("generation_config", generation_config),
    ):
        (folder / f"{name}.json").write_text(json.dumps(content))


@pytest.fixture(scope="session")
def engine(tiny_model: str) -> Iterator[LLMEngine]:
    """An engine on the tiny model, for tests of the parts under the commands."""
    yield LLMEngine.from_engine_args(EngineArgs(model=tiny_model, load_format="dummy"))


@pytest.fixture
def decodekit(tiny_model: str) -> Decodekit:
    """Call the command line; "TINY" stands for the tiny model and its options."""

    def call(*args: str, input: str | None = None) -> Result:
        given: list[str] = []
        for arg in args:
            given += [tiny_model, "--load-format", "dummy"] if arg == "TINY" else [arg]
        return CliRunner().invoke(app, given, input=input)

    return call
