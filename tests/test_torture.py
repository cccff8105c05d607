"""A few rounds of `make torture`: runs that are killed, damaged or starved of space lose nothing."""

from __future__ import annotations

import pytest

from tests.torture import LAYOUTS, Torture
from tests.torture_round import Report


@pytest.fixture(scope="module")
def torture(tmp_path_factory: pytest.TempPathFactory) -> Torture:
    """One rank, and a pipeline of two."""
    return Torture(tmp_path_factory.mktemp("torture"), seed=1, layouts=(LAYOUTS[1], LAYOUTS[3]))


def one_round(torture: Torture, number: int, kind: str) -> Report:
    report = torture.round(number, (kind,))
    assert not report.complaints, "\n".join(report.complaints)
    return report


@pytest.mark.parametrize(("number", "kind"), [(0, "killed"), (1, "killed_later"), (2, "removed")])
def test_a_run_that_is_disturbed_ends_as_if_nothing_had_been(
    torture: Torture, number: int, kind: str
) -> None:
    assert one_round(torture, number, kind).tally["starts"] > 1


def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_taken(torture: Torture) -> None:
    tally = one_round(torture, 3, "damaged").tally
    assert (tally["refused by name"], tally["resumed"]) == (1, 1)


@pytest.mark.parametrize(("number", "kind"), [(4, "full"), (5, "refused")])
def test_a_save_that_cannot_be_written_says_so_and_the_next_start_goes_on(
    torture: Torture, number: int, kind: str
) -> None:
    if not torture.mountable:
        pytest.skip("mounting a small disk is not permitted")
    tally = one_round(torture, number, kind).tally
    assert (tally["failed clearly"], tally["resumed"]) == (1, 1)
