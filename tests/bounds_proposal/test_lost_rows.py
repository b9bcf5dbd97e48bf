"""The sum of rows that proposed bounds leave out: what it reads, what it costs, what is kept."""

import math
from contextlib import closing
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

import dpstream as dps
from dpstream.audit.query_samplers import run_plan
from dpstream.bounds_proposal import lost_rows as module
from dpstream.bounds_proposal.lost_rows import Asked, Measurement, lost_rows
from dpstream.bounds_proposal.propose import reading_of
from dpstream.evaluate.trials import fixed_noise
from dpstream.query.noise_plan import plan_query
from tests.bounds_proposal.test_bounds import asked_of, facts_of, orders

ABOUT = Asked(groups=2, rows=1, cut=6)


def measurement(epsilon=1, **options):
    return Measurement.of(
        reading_of(asked_of(**options), []),
        ("groups", "rows"),
        epsilon=epsilon,
        delta=1e-9,
        about="x",
    )


def test_what_a_unit_loses_is_the_mean_over_the_order_of_its_groups():
    """One by one: three groups of 1, 2 and 5 rows, of which two are kept with a row each."""
    rows = [("ann", item) for item, many in ((1, 1), (2, 2), (3, 5)) for _ in range(many)]
    rows += [("bob", 1)] * 4
    user, item = zip(*rows, strict=True)
    facts = facts_of(pa.table({"user": user, "item": item, "amount": [1.0] * len(rows)}))

    assert sorted(lost_rows(facts, 2, 1)) == [3, 8 - 2]
    assert sorted(lost_rows(facts, 1, 2)) == pytest.approx([2, 8 - 5 / 3])
    assert lost_rows(facts, 3, 5).tolist() == [0, 0]


def test_what_a_unit_loses_is_a_function_of_its_own_rows():
    """In whatever order they come; and without one unit the table has its row less."""
    table = orders()
    shuffled = table.take(np.random.default_rng(1).permutation(len(table)))
    paid = measurement()
    whole, other = (paid.lost_table(facts_of(one), ABOUT).to_pylist() for one in (table, shuffled))
    key = lambda row: row["user"]  # noqa: E731

    assert sorted(whole, key=key) == sorted(other, key=key)
    for gone in (0, 7, 123):
        rest = table.filter(pa.compute.not_equal(table["user"], gone))
        less = paid.lost_table(facts_of(rest), ABOUT).to_pylist()
        [moved] = [row for row in whole if row not in less]
        assert len(less) == len(whole) - 1
        assert 0 <= moved[module.LOST] <= ABOUT.cut


@pytest.mark.parametrize("epsilon", [0.1, 1, 8])
@pytest.mark.parametrize("period", ["forever", "1 day"])
def test_both_questions_cost_what_was_asked(epsilon, period):
    """In mu^2, in which noise adds up: what a book of this promise has, and hardly less.

    What float arithmetic may add is within that book's slack, too.
    """
    days = {"time_column": "at", "time_unit": "s", "start": "1970-01-01", "end": "1970-01-11"}
    more = {} if period == "forever" else {"privacy_unit_period": period, **days}
    paid = measurement(epsilon, **more)
    one, two = plan_query(paid.asked), plan_query(paid.sum_query(ABOUT))
    whole = asked_of(**more).promise(epsilon=epsilon, delta=1e-9)

    assert 0.9999 * whole.total < one.total + two.total <= whole.total
    assert two.total / whole.total == pytest.approx(float(module.PART), rel=1e-4)
    assert one.error.xi + two.error.xi < whole.rounding_slack
    assert one.delta_slack == two.delta_slack == 0


def test_the_sums_noise_is_that_of_one_unit_at_the_cut():
    """The root of the mean square of 900 draws, and 20% off is found out (6 deviations)."""
    paid, facts = measurement(), facts_of(orders(units=40))
    plan, table = (
        plan_query(paid.sum_query(ABOUT)),
        paid.lost_table(facts_of(orders(units=40)), ABOUT),
    )
    truth = lost_rows(facts, ABOUT.groups, ABOUT.rows).clip(0, ABOUT.cut).sum()
    off = []
    for run in range(900):
        noise = fixed_noise("sum of lost rows", run)
        [(_, told)] = run_plan(plan, table, secret=noise["secret"], run=noise["run_id"])
        off.append(told.table[module.LOST][0].as_py() - truth)
    declared = ABOUT.cut / math.sqrt(plan.total)
    measured = math.sqrt(np.mean(np.square(off)))

    assert declared == pytest.approx(ABOUT.cut * paid.noise_of_one, rel=1e-6)
    assert abs(measured / declared - 1) < 6 / math.sqrt(2 * 900)
    assert abs(measured / (1.2 * declared) - 1) > 6 / math.sqrt(2 * 900) / 1.2


def test_a_measurement_that_was_broken_off_before_the_sum_goes_on(tmp_path, monkeypatch):
    """The histograms are not paid for again; the next call pays for the sum, and the one after
    that reads nothing. A question without epsilon pays for nothing."""
    book = dps.Ledger(tmp_path / "book")
    book.open("orders", asked_of().promise(epsilon=5, delta=1e-6))
    facts = {"ledger": book, "dataset": "orders", "state": tmp_path / "kept"}
    with monkeypatch.context() as broken:
        broken.setattr(Measurement, "lost", lambda *_, **__: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(OSError, match="full"):
            dps.bounds(asked_of(), orders(), epsilon=1, **facts)
    charges = lambda: len(book.report()[0]["spent_on"])  # noqa: E731
    assert charges() == 1
    without = dps.bounds(asked_of(), orders(), **facts)
    assert charges() == 1
    found = dps.bounds(asked_of(), orders(), epsilon=1, **facts)
    assert charges() == 2
    again = dps.bounds(asked_of(), orders().slice(0, 0), epsilon=1, **facts)
    assert charges() == 2
    assert without.units == found.units == again.units
    assert found.epsilon == again.epsilon == 1
    assert found.left_out == again.left_out


def test_what_was_measured_is_what_is_said(tmp_path):
    """Of the bounds that are proposed, exactly that, in the table and in what is expected.

    It is off by its noise and by that of the number of rows: in 25 runs by 1.0 deviations of the
    sum in the mean, give or take 1.2. Nine are six and a half of these more (false alarm 1e-10).
    """
    table = orders(units=4000)
    found = dps.bounds(asked_of(), table, epsilon=4, ledger=tmp_path / "book")
    bounds = found.max_groups_contributed, found.max_rows_per_group
    truth = lost_rows(facts_of(table), *bounds).sum() / len(table)
    [chosen] = [one for one in found.trade_off if one.groups == bounds[0]]
    [bias] = {one.bias for one in found.expected}
    noise = 60 * measurement(4).noise_of_one / len(table)  # no user has more than 60 rows

    assert abs(found.left_out - truth) < 9 * noise
    assert bias == pytest.approx(found.left_out)
    assert chosen.rows != bounds[1] or chosen.left_out == found.left_out


def test_a_query_beside_paid_bounds_is_told_to_set_the_budget(tmp_path):
    """A book that bounds have opened has no budget for it; once it is set, the query runs."""
    table = orders(units=400)
    dps.bounds(asked_of(), table, epsilon=0.1, ledger=tmp_path / "book", dataset="orders")
    book = {"ledger": tmp_path / "book", "dataset": "orders"}
    query = replace(asked_of(), max_groups_contributed=2)
    with pytest.raises(dps.BudgetExceeded, match=r"bounds that opened it.*ledger grow"):
        list(dps.run(query, table, **book))
    with closing(dps.Ledger(tmp_path / "book")) as ledger:
        ledger.grow("orders", query.promise(epsilon=9, delta=1e-6), because="agreed", who="ana")

    assert len(list(dps.run(query, table, **book))) == 1
