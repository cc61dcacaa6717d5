"""Calls into the worker and the model of an engine in this process."""

from __future__ import annotations

import threading

import pytest

from decodekit import LLM
from decodekit.core.runner import Runner


def test_a_function_gets_the_worker_first_and_a_name_is_its_method(flat_llm: LLM) -> None:
    def add(worker: Runner, a: int, *, b: int) -> tuple[bool, int]:
        return isinstance(worker, Runner), a + b

    assert flat_llm.collective_rpc(add, args=(1,), kwargs={"b": 2}) == [(True, 3)]
    assert flat_llm.collective_rpc("copy_blocks", args=([],)) == [None]
    assert flat_llm.apply_model(lambda model: model.spec.vocab_size) == [97]


def test_a_call_that_takes_longer_than_its_timeout_raises(flat_llm: LLM) -> None:
    release = threading.Event()

    with pytest.raises(TimeoutError):
        flat_llm.collective_rpc(lambda worker: release.wait(30), timeout=0.05)

    release.set()
    assert flat_llm.collective_rpc(lambda worker: 7, timeout=30) == [7]


@pytest.mark.parametrize("timeout", [None, 30])
def test_an_error_of_the_worker_propagates(flat_llm: LLM, timeout: float | None) -> None:
    def fail(worker: Runner) -> None:
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        flat_llm.collective_rpc(fail, timeout=timeout)
