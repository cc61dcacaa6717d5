"""Import lines of vLLM users work with `vllm` replaced by `decodekit`."""

import importlib
import pickle
import subprocess
import sys

import pytest

from decodekit.core.vllm_names import ALIASES, AliasFinder, install

LINES = """
import vllm
from vllm import LLM
from vllm import LLM, SamplingParams
from vllm import LLM, EngineArgs, SamplingParams
from vllm import AsyncEngineArgs, AsyncLLMEngine
from vllm import CompletionOutput, RequestOutput
from vllm import LLMEngine, PoolingParams, RequestOutput, SamplingParams
from vllm import TextPrompt, TokensPrompt
from vllm import EmbeddingRequestOutput, PoolingRequestOutput, ScoringRequestOutput
from vllm import __version__
import vllm.sampling_params
from vllm.sampling_params import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.sampling_params import BeamSearchParams
from vllm.sampling_params import RequestOutputKind
from vllm.sampling_params import RepetitionDetectionParams, SamplingType
from vllm.pooling_params import PoolingParams
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.outputs import EmbeddingRequestOutput, PoolingOutput, PoolingRequestOutput
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.sequence import Logprob
from vllm.beam_search import BeamSearchOutput, BeamSearchSequence
from vllm.inputs import TextPrompt, TokensPrompt
from vllm.inputs import EmbedsPrompt, PromptType
from vllm.inputs.data import TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.config import VllmConfig
from vllm.config import PoolerConfig, StructuredOutputsConfig
from vllm.config.vllm import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.engine.async_llm_engine import AsyncLLMEngine
from vllm.engine.llm_engine import LLMEngine
from vllm.entrypoints.llm import LLM
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.reader import Counter, Gauge, Histogram, Metric, Vector
from vllm.v1.metrics.stats import RequestStateStats
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor
from vllm.v1.sample.logits_processor import BatchUpdateBuilder, MoveDirectionality
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor
""".strip().splitlines()


@pytest.mark.parametrize("line", LINES)
def test_the_import_line_works_under_our_name(line: str) -> None:
    exec(line.replace("vllm", "decodekit", 1).replace("vllm.", "decodekit."), {})


@pytest.mark.parametrize("alias", ALIASES)
def test_both_names_give_the_same_objects(alias: str) -> None:
    real = importlib.import_module(f"decodekit.core.{ALIASES[alias]}")
    other = importlib.import_module(f"decodekit.{alias}")

    public = [
        name
        for name, value in vars(real).items()
        if isinstance(value, type) and not name.startswith("_")
    ]
    exported = getattr(real, "__all__", public)
    shared = [name for name in public if name in exported]
    assert shared
    assert all(getattr(other, name) is getattr(real, name) for name in shared)


def test_a_module_without_children_is_the_real_one() -> None:
    import decodekit.core.params as real
    import decodekit.sampling_params as alias

    assert alias is real
    assert real.__name__ == "decodekit.core.params"
    assert real.__spec__ is not None and real.__spec__.name == "decodekit.core.params"


def test_a_pickle_names_the_real_module() -> None:
    from decodekit.sampling_params import SamplingParams

    assert SamplingParams.__module__ == "decodekit.core.params"
    assert b"decodekit.sampling_params" not in pickle.dumps(SamplingParams())


def test_other_names_are_left_alone() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("decodekit.model_executor")
    with pytest.raises(ImportError):
        exec("from decodekit.sampling_params import NoSuchThing", {})
    assert AliasFinder().find_spec("elsewhere.sampling_params", None) is None


def test_installing_twice_leaves_one_finder() -> None:
    install()
    install()

    assert sum(isinstance(finder, AliasFinder) for finder in sys.meta_path) == 1


def test_words_load_without_torch_or_transformers() -> None:
    code = (
        "import sys, decodekit, decodekit.sampling_params, decodekit.outputs, decodekit.config\n"
        "import decodekit.v1.sample.logits_processor, decodekit.lora.request, decodekit.inputs\n"
        "from decodekit import SamplingParams, EngineArgs, RequestOutput\n"
        "print([m for m in ('torch', 'transformers', 'pydantic') if m in sys.modules])"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"
