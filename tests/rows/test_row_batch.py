"""Steps and windows of many times in order: the same as one by one."""

import numpy as np
import pytest

from dpstream.query.schedule import Schedule
from dpstream.query.windows import DAY, SECOND, Ticks
from dpstream.rows.row_batch import is_constant, rising, stepwise

SIZE = 40_000
HOUR = 3600 * SECOND


def schedule(**facts):
    common = {
        "start": 0,
        "end": 3 * DAY,
        "edges": Ticks(origin=0, size=DAY),
        "triggers": Ticks(origin=0, size=HOUR),
    }
    return Schedule(**common | facts)


def times(low, high):
    return np.sort(np.random.default_rng(5).integers(low, high, SIZE))


@pytest.mark.parametrize("span", [(0, 3 * DAY), (-DAY, 5 * DAY), (HOUR, 2 * HOUR), (5, 6)])
@pytest.mark.parametrize("triggers", ["regular", "listed", "none"])
def test_blocks_give_what_single_times_give(span, triggers):
    """Also where times lie outside all windows on both sides, and -1 stands there."""
    listed = tuple(range(HOUR, 4 * DAY, 7 * HOUR))
    kinds = {"regular": Ticks(origin=0, size=HOUR), "listed": listed, "none": None}
    found, plan = times(*span), schedule(triggers=kinds[triggers])

    assert rising(found)
    for function in (plan.step_of, plan.window_of):
        assert (stepwise(function, found) == function(found)).all()


def test_one_value_is_kept_once():
    """A day's rows have one window, which takes no memory a row."""
    found = stepwise(schedule().window_of, times(DAY, 2 * DAY))

    assert is_constant(found)
    assert len(found) == SIZE
    assert (found == 1).all()


def test_times_out_of_order_are_taken_one_by_one():
    """One late row in the middle, and two far ones that look alike at the ends."""
    found, plan = times(0, 3 * DAY), schedule()
    found[20_000] = 5
    assert not rising(found)
    assert (stepwise(plan.step_of, found) == plan.step_of(found)).all()
    around = np.concatenate([[-5], times(0, 3 * DAY), [4 * DAY]])
    assert (stepwise(plan.window_of, around) == plan.window_of(around)).all()
