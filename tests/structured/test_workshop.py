"""Work in a helper process: answers, errors, ends by time, by memory and by closing."""

import gc
import operator
import os
import threading
import time
from collections.abc import Iterator

import pytest

from decodekit.structured.workshop import Died, OverTime, Workshop


@pytest.fixture
def workshop() -> Iterator[Workshop]:
    made = Workshop(memory_bytes=4 << 30)
    yield made
    made.close()


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_it_answers_from_one_process_that_is_not_this_one(workshop: Workshop) -> None:
    assert workshop.call(operator.add, 2, 3, seconds=20) == 5
    first = workshop.call(os.getpid, seconds=20)

    assert first != os.getpid() and workshop.call(os.getpid, seconds=20) == first


def test_what_the_function_raises_is_raised_here(workshop: Workshop) -> None:
    with pytest.raises(ZeroDivisionError):
        workshop.call(operator.truediv, 1, 0, seconds=20)
    assert workshop.call(operator.add, 1, 1, seconds=20) == 2


def test_a_job_over_its_time_is_ended_and_the_next_one_works(workshop: Workshop) -> None:
    pid = workshop.call(os.getpid, seconds=20)

    with pytest.raises(OverTime, match=r"over 0\.3 seconds"):
        workshop.call(time.sleep, 60, seconds=0.3)

    assert not is_running(pid)
    assert workshop.call(operator.add, 1, 2, seconds=20) == 3


def test_a_job_over_the_memory_limit_does_not_hurt_this_process() -> None:
    small = Workshop(memory_bytes=1 << 30)
    try:
        with pytest.raises((MemoryError, Died)):
            small.call(bytearray, 1 << 33, seconds=20)
    finally:
        small.close()


def test_a_process_that_dies_is_told(workshop: Workshop) -> None:
    with pytest.raises(Died):
        workshop.call(os._exit, 3, seconds=20)
    assert workshop.call(operator.add, 1, 2, seconds=20) == 3


def test_closing_ends_the_job_at_once(workshop: Workshop) -> None:
    workshop.call(os.getpid, seconds=20)
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            workshop.call(time.sleep, 60, seconds=50)
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    while not workshop._lock.locked():
        time.sleep(0.01)
    workshop.close()
    thread.join(20)

    assert not thread.is_alive() and isinstance(raised[0], Died)
    with pytest.raises(Died, match="closed"):
        workshop.call(os.getpid, seconds=1)


def test_a_forgotten_workshop_takes_its_process_along() -> None:
    forgotten = Workshop(memory_bytes=4 << 30)
    pid = forgotten.call(os.getpid, seconds=20)

    del forgotten
    gc.collect()

    assert not is_running(pid)
