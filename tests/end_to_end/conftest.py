"""Engines on table models, made once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from decodekit import LLM
from decodekit.plugins.author.table_model import flat_table, write_table_model

Maker = Callable[..., LLM]


@pytest.fixture(scope="session")
def make_llm(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """Return a function that builds an engine on a table."""

    def make(table: Tensor, *, model: dict[str, Any] | None = None, **engine: Any) -> LLM:
        folder: Path = write_table_model(tmp_path_factory.mktemp("table"), table, **(model or {}))
        if "tokenizer" not in (model or {}):
            engine.setdefault("skip_tokenizer_init", True)
        engine.setdefault("max_num_seqs", 64)
        return LLM(str(folder), **engine)

    return make


@pytest.fixture(scope="session")
def flat_llm(make_llm: Maker) -> LLM:
    """A model of 64 equally likely tokens, forever."""
    return make_llm(flat_table(97))
