"""decodekit: a decoding framework for language models in which every step is a plugin.

`from decodekit import LLM, SamplingParams`. Names load on first use, so importing the package
costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from decodekit.core import vllm_names

if TYPE_CHECKING:
    from decodekit.core.async_llm import AsyncLLM, AsyncLLMEngine
    from decodekit.core.batch import RowView
    from decodekit.core.choosing import ChoiceOutput
    from decodekit.core.config import AsyncEngineArgs, EngineArgs
    from decodekit.core.engine import LLMEngine
    from decodekit.core.hookspecs import hookimpl
    from decodekit.core.inputs import PromptType, TextPrompt, TokensPrompt
    from decodekit.core.llm import LLM
    from decodekit.core.outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from decodekit.core.params import SamplingParams
    from decodekit.core.pooling_params import PoolingParams
    from decodekit.core.request_schema import request_schema
    from decodekit.core.stage import Caps, Form, Kind, Order, Stage, StageParams
    from decodekit.core.transformers_processor import GrammarProcessor

    __version__: str
    __version_tuple__: tuple[int | str, ...]

vllm_names.install()

__all__ = [
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "Caps",
    "ChoiceOutput",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "Form",
    "GrammarProcessor",
    "Kind",
    "LLM",
    "LLMEngine",
    "Order",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RequestOutput",
    "RowView",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "Stage",
    "StageParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
    "__version_tuple__",
    "hookimpl",
    "request_schema",
]

# Name -> module of `core`.
_HOMES = {
    "AsyncEngineArgs": "config",
    "AsyncLLM": "async_llm",
    "AsyncLLMEngine": "async_llm",
    "Caps": "stage",
    "ChoiceOutput": "choosing",
    "ClassificationOutput": "outputs",
    "ClassificationRequestOutput": "outputs",
    "CompletionOutput": "outputs",
    "EmbeddingOutput": "outputs",
    "EmbeddingRequestOutput": "outputs",
    "EngineArgs": "config",
    "Form": "stage",
    "GrammarProcessor": "transformers_processor",
    "Kind": "stage",
    "LLM": "llm",
    "LLMEngine": "engine",
    "Order": "stage",
    "PoolingOutput": "outputs",
    "PoolingParams": "pooling_params",
    "PoolingRequestOutput": "outputs",
    "PromptType": "inputs",
    "RequestOutput": "outputs",
    "RowView": "batch",
    "SamplingParams": "params",
    "ScoringOutput": "outputs",
    "ScoringRequestOutput": "outputs",
    "Stage": "stage",
    "StageParams": "stage",
    "TextPrompt": "inputs",
    "TokensPrompt": "inputs",
    "hookimpl": "hookspecs",
    "request_schema": "request_schema",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _version()
    elif name == "__version_tuple__":
        parts = _version().split(".")
        value = tuple(int(part) if part.isdecimal() else part for part in parts)
    elif name in _HOMES:
        value = getattr(import_module(f"decodekit.core.{_HOMES[name]}"), name)
    else:
        raise AttributeError(f"module 'decodekit' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


def _version() -> str:
    """Read the version of this checkout's pyproject.toml, else the installed distribution's."""
    from importlib.metadata import version
    from pathlib import Path

    project = Path(__file__).with_name("pyproject.toml")
    if not project.is_file():
        return version("decodekit")
    import tomllib

    found: str = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"]
    return found
