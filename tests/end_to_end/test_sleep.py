"""An engine sleeps at three levels and wakes with the same answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from decodekit import LLM, SamplingParams
from decodekit.plugins.author.table_model import flat_table

Maker = Callable[..., LLM]
PARAMS = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture
def sleeper(make_llm: Maker) -> LLM:
    return make_llm(flat_table(97), enable_sleep_mode=True)


def answer(llm: LLM) -> list[int]:
    return list(llm.generate([[1, 2, 3]], PARAMS, use_tqdm=False)[0].outputs[0].token_ids)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_the_answer_after_waking_is_the_same(sleeper: LLM, level: int) -> None:
    before = answer(sleeper)

    sleeper.sleep(level)
    asleep = sleeper.is_sleeping()
    sleeper.wake_up()

    assert asleep
    assert not sleeper.is_sleeping()
    assert answer(sleeper) == before


def test_levels_with_memory_need_sleep_mode(make_llm: Maker) -> None:
    llm = make_llm(flat_table(97))

    with pytest.raises(RuntimeError, match="enable_sleep_mode=True"):
        llm.sleep(1)

    llm.sleep(0)
    llm.wake_up()
    assert answer(llm)


def test_scheduling_resumes_only_when_all_memory_is_back(sleeper: LLM) -> None:
    sleeper.sleep(2)
    sleeper.wake_up(["weights"])
    half = sleeper.is_sleeping()
    sleeper.wake_up(["kv_cache"])

    assert half
    assert not sleeper.is_sleeping()


def test_generate_while_asleep_says_so(sleeper: LLM) -> None:
    sleeper.sleep(1)

    with pytest.raises(RuntimeError, match="wake_up"):
        answer(sleeper)

    sleeper.wake_up()
    assert answer(sleeper)


def test_running_requests_are_kept_or_aborted(sleeper: LLM) -> None:
    engine = sleeper.llm_engine
    plain = SamplingParams(seed=1, max_tokens=20)
    expected = list(sleeper.generate([[5]], plain, use_tqdm=False)[0].outputs[0].token_ids)

    engine.add_request("kept", [5], plain)
    engine.step()
    sleeper.sleep(1, mode="keep")
    sleeper.wake_up()
    while engine.has_unfinished_requests():
        kept = engine.step()
    engine.add_request("gone", [5], plain)
    engine.step()
    sleeper.sleep(1, mode="abort")
    gone = engine.step()
    sleeper.wake_up()

    assert list(kept[0].outputs[0].token_ids) == expected
    assert gone[0].outputs[0].finish_reason == "abort"


def test_bad_arguments_are_named(sleeper: LLM) -> None:
    with pytest.raises(ValueError, match="level must be 0, 1 or 2"):
        sleeper.sleep(3)
    with pytest.raises(ValueError, match="mode must be"):
        sleeper.sleep(1, mode="later")
    with pytest.raises(ValueError, match="tags must be of"):
        sleeper.wake_up(["wheights"])


def test_a_profile_is_written(make_llm: Maker, tmp_path: Path) -> None:
    llm = make_llm(flat_table(97), profiler_config={"torch_profiler_dir": str(tmp_path)})

    llm.start_profile("mine")
    answer(llm)
    llm.stop_profile()

    assert (tmp_path / "mine-rank0-0.json").stat().st_size > 1000


def test_a_profile_without_a_folder_says_what_is_missing(sleeper: LLM) -> None:
    with pytest.raises(RuntimeError, match="torch_profiler_dir"):
        sleeper.start_profile()
