"""What pooling requests return: a raw tensor, an embedding, class probabilities or a score.

The classes exist so that code written for them loads and converts; no engine path fills them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from .errors import ValidationError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class PoolingOutput:
    """The pooled tensor, of a shape that depends on the task."""

    data: Tensor


@dataclass
class EmbeddingOutput:
    """One vector."""

    embedding: list[float]

    @classmethod
    def from_base(cls, pooled: PoolingOutput) -> Self:
        """Convert a 1-D tensor; ValidationError on another shape."""
        return cls([float(item) for item in _flat(pooled.data, "an embedding")])

    @property
    def hidden_size(self) -> int:
        """The length of the vector."""
        return len(self.embedding)


@dataclass
class ClassificationOutput:
    """One probability a class."""

    probs: list[float]

    @classmethod
    def from_base(cls, pooled: PoolingOutput) -> Self:
        """Convert a 1-D tensor; ValidationError on another shape."""
        return cls([float(item) for item in _flat(pooled.data, "class probabilities")])

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.probs)


@dataclass
class ScoringOutput:
    """How well two texts fit."""

    score: float

    @classmethod
    def from_base(cls, pooled: PoolingOutput) -> Self:
        """Convert a tensor of one element; ValidationError on another shape."""
        scalar = pooled.data.squeeze()
        if scalar.ndim != 0:
            raise _bad_shape(pooled.data, "a score needs a tensor of one element")
        return cls(float(scalar.item()))


T = TypeVar("T")


@dataclass
class PoolingRequestOutput(Generic[T]):
    """The result of one pooling request."""

    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


@dataclass
class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """The result of `embed`."""

    @staticmethod
    def from_base(base: PoolingRequestOutput[PoolingOutput]) -> EmbeddingRequestOutput:
        """Convert the raw result."""
        return EmbeddingRequestOutput(
            base.request_id,
            EmbeddingOutput.from_base(base.outputs),
            base.prompt_token_ids,
            base.num_cached_tokens,
            base.finished,
        )


@dataclass
class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """The result of `classify`."""

    @staticmethod
    def from_base(base: PoolingRequestOutput[PoolingOutput]) -> ClassificationRequestOutput:
        """Convert the raw result."""
        return ClassificationRequestOutput(
            base.request_id,
            ClassificationOutput.from_base(base.outputs),
            base.prompt_token_ids,
            base.num_cached_tokens,
            base.finished,
        )


@dataclass
class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """The result of `score`."""

    @staticmethod
    def from_base(base: PoolingRequestOutput[PoolingOutput]) -> ScoringRequestOutput:
        """Convert the raw result."""
        return ScoringRequestOutput(
            base.request_id,
            ScoringOutput.from_base(base.outputs),
            base.prompt_token_ids,
            base.num_cached_tokens,
            base.finished,
        )


def _flat(data: Tensor, what: str) -> list[float]:
    if data.ndim != 1:
        raise _bad_shape(data, f"{what} needs a 1-D tensor")
    values: list[float] = data.tolist()
    return values


def _bad_shape(data: Tensor, needed: str) -> ValidationError:
    shape = tuple(data.shape)
    return ValidationError(f"{needed}, got shape {shape}", parameter="data", value=shape)
