"""The list of cases is whole, and says the truth about which of them have a test here.

`census.tsv` has a line for each case: its id, whether it is one of those that come first, its area,
its state, and whether a part of it waits for the server. The states: `tested`; `http`, for a case
that speaks of the server alone; `beams` and `adapters`, for features of their own; and
`waits for ...`, whose tests are expected to fail until the feature is there.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.cases.conftest import Case

FOLDER = Path(__file__).parent
UNTESTED = {"http", "adapters"}


@pytest.fixture(scope="module")
def named() -> set[str]:
    """Ids that a test function of this folder carries in its name."""
    sources = [path.read_text() for path in FOLDER.glob("test_*.py")]
    return {number for text in sources for number in re.findall(r"def test_dec_(\d{3})_", text)}


def test_dec_census_holds_every_case_once(census: list[Case]) -> None:
    assert [case.number for case in census] == [f"{number:03d}" for number in range(1, 114)]
    assert sum(case.is_first for case in census) == 54
    assert {case.state for case in census if not case.state.startswith("waits for ")} <= (
        UNTESTED | {"tested"}
    )


def test_dec_census_names_what_is_tested(census: list[Case], named: set[str]) -> None:
    assert named == {case.number for case in census if case.state not in UNTESTED}


def test_dec_census_leaves_no_case_of_the_server_untested(census: list[Case]) -> None:
    alone = [case.number for case in census if case.state == "http"]
    assert not alone  # every such case has its test
