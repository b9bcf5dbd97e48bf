"""Whole books under attack: what their samplers run, what holds, and what is caught.

Secrets are fixed, and every verdict below has an error of 1e-6 instead of a report's 1e-3.
"""

from contextlib import closing, suppress
from dataclasses import replace
from hashlib import sha256

import numpy as np
import pytest

import dpstream as dps
from dpstream.audit.controls.broken_engine import forked_ledger, ledger_without_last_charge
from dpstream.audit.ledger_samplers import DATASET, RestartedQuery, SharedLedgerRuns
from dpstream.audit.ledger_targets import ledger_controls, ledger_targets, pair_at_all_bounds
from dpstream.audit.query_samplers import scenario_table, unit_spellings, values_by_run
from dpstream.audit.report import catalogue
from dpstream.engines.embedded.embedded_engine import LocalRun
from dpstream.engines.query_run import EngineOptions
from dpstream.errors import BudgetExceeded, InvalidInput, NoiseReuse
from dpstream.privacy.ledger.charges import Cells, Charge, Terms
from dpstream.privacy.ledger.ledger import Ledger
from tests.audit.test_sampled_paths import found
from tests.support.fixed import SECRET

SOUND = dict.fromkeys(ledger_targets(), 1_200) | {
    "latched_spelled_keys": 2_000,
    "latched_spelled_units": 1_000,
}
"""Runs of each shipped row; a whole audit makes more."""
CAUGHT = {
    "book_forked": 2_500,
    "book_forked_windows": 1_000,
    "book_forgets_a_charge": 2_500,
    "book_forgets_begun_periods": 2_500,
    "book_forgets_last_periods": 2_500,
    "book_frees_places_twice": 2_500,
    "state_lost_keys": 2_500,
    "state_lost_log": 500,
    "state_lost_types": 4_000,
    "key_as_spelled": 500,
    "type_from_data": 120,
    "unit_by_spelling": 1_000,
}
"""Runs that show it, of each control."""


@pytest.mark.audit
@pytest.mark.parametrize("name", CAUGHT)
def test_a_control_is_caught(name):
    """Few runs will do, at an error of 1e-6."""
    assert found(name, CAUGHT[name]) > catalogue()[name]().epsilon


@pytest.mark.audit
@pytest.mark.parametrize("name", SOUND)
def test_what_is_shipped_is_not(name):
    """The same attacks on sound books stay below the claim."""
    assert found(name, SOUND[name]) < catalogue()[name]().epsilon


def difference(target):
    """World one less world two with the same secret: where the noise is the same, exact."""
    pair = target.pairs[0]
    one, two = (target.sample(data, 1, SECRET) for data in (pair.one, pair.two))
    return (one - two)[0].tolist()


@pytest.mark.parametrize(
    "name", ["book_of_users", "book_of_windows", "book_of_events", "book_of_held_places"]
)
def test_the_book_has_no_room_for_one_more(name):
    """Otherwise less than the claim would be under attack; a part more is refused by the ledger."""
    sample = ledger_targets()[name]().sample
    sharing = (*sample.sharing, sample.sharing[0])

    with pytest.raises(BudgetExceeded):
        replace(sample, sharing=sharing)(ledger_targets()[name]().pairs[0].one, 1, SECRET)


def test_tables_that_are_shown_again_are_the_same():
    """They are columns of their own; in a book that has lost its keys they differ."""
    target, lost = ledger_targets()["latched_restarts"](), ledger_controls()["state_lost_keys"]()
    shown = target.sample(target.pairs[0].one, 50, SECRET).reshape(50, -1, 2)
    copies = lost.sample(lost.pairs[0].one, 50, SECRET)

    assert target.sample.sharing[0].kills == (1, 2)
    assert shown.shape[1] == 1 + 2 + 3
    for first, again in ((0, 1), (1, 3), (2, 4)):
        np.testing.assert_array_equal(shown[:, first], shown[:, again])
    assert copies.shape == (50, 15 + 3)
    assert len(np.unique(copies[0, :16])) > 3


def test_a_sampled_part_is_what_a_session_publishes(tmp_path):
    """The sampler leaves out nothing of the path that users run, restarts included."""
    target = ledger_targets()["latched_restarts"]()
    data, part = target.pairs[0].one, target.sample.sharing[0]
    (sampled,) = target.sample(data, 1, SECRET)
    rows, secret = scenario_table(data, 1, 2, windows=False), bytes(4) + SECRET[4:]
    seen, run_id = [], sha256(secret + b"\0").digest()[:16]
    for kill in (*part.kills, None):
        run = dps.run(
            part.query(1),
            source=rows,
            state=tmp_path / "state",
            secret=secret,
            ledger=tmp_path / "ledger",
            dataset=DATASET,
            options=EngineOptions(run_id=run_id),
        )
        tables = iter(run)
        taken = list(tables) if kill is None else [next(tables) for _ in range(kill)]
        run.close()
        seen += [values_by_run(table, ["n"], runs=1, groups=2)[0] for table in taken]

    np.testing.assert_array_equal(np.concatenate(seen), sampled)


def test_a_book_can_be_attacked_again():
    """The same secret gives the same transcript, live queries included; another does not."""
    for name in ("book_of_users", "live_queries", "state_lost_keys"):
        target = catalogue()[name]()
        data = target.pairs[0].one
        rows, same, other = (
            target.sample(data, 20, secret) for secret in (SECRET, SECRET, bytes(32))
        )
        np.testing.assert_array_equal(rows, same)
        assert (rows != other).any()


def test_other_data_after_a_restart_are_refused_where_the_log_is_whole():
    """What the control leaves out: with the sound engine the same story ends in a refusal."""
    target = ledger_controls()["state_lost_log"]()
    part = replace(target.sample.sharing[0], engine=LocalRun)

    assert difference(target)[:2] == [1.0, 0.0]  # the target's rows were gone the second time
    with pytest.raises(NoiseReuse):
        replace(target.sample, sharing=(part,))(target.pairs[0].one, 1, SECRET)


def test_bounds_begin_anew_with_each_type_where_types_are_lost():
    """Three types, three contributions; the sound engine counts one, or refuses the file."""
    target = ledger_controls()["state_lost_types"]()
    part = replace(target.sample.sharing[0], engine=LocalRun)
    sound = replace(target, sample=replace(target.sample, sharing=(part,)))

    assert difference(target) == [1.0, 2.0, 3.0]
    with suppress(InvalidInput):
        assert difference(sound) == [1.0, 1.0, 1.0]


def test_a_unit_in_four_spellings_is_four_units_only_in_the_control():
    """The rows of the target differ in how its number is written, and in nothing else."""
    target = catalogue()["unit_by_spelling"]()
    pair = target.pairs[0]
    rows = scenario_table(pair.one, 1, 1, windows=False)

    assert unit_spellings(rows)[:5] == ["0", "0.0", "0e0", '" 0"', "1"]
    assert difference(target)[0] == 4.0
    assert difference(catalogue()["latched_spelled_units"]())[0] == 1.0


def test_a_copy_has_all_charges_and_a_forgetful_ledger_all_but_the_last(tmp_path):
    """The books of the controls, charge by charge."""
    book = tmp_path / "ledger"
    terms = Terms(unit="user", total=10)
    with closing(Ledger(book)) as ledger:
        ledger.open(DATASET, terms)
        for number in range(3):
            cells = Cells(first=0, last=0)
            charge = Charge(
                run=f"{number}", query="q", purpose="p", step=0, amount=number + 1, cells=cells
            )
            ledger.charge(DATASET, charge)
    with closing(Ledger(forked_ledger(book, 1))) as copy:
        assert copy.left(DATASET) == 10 - 6
    with closing(Ledger(ledger_without_last_charge(book, 0))) as copy:
        assert copy.left(DATASET) == 10 - 3


def test_a_run_more_than_the_book_has_room_for_is_refused_without_the_control():
    """The forked book's queries on one ledger: the second one does not fit."""
    target = ledger_controls()["book_forked"]()
    sound = SharedLedgerRuns(terms=target.sample.terms, sharing=target.sample.sharing)

    with pytest.raises(BudgetExceeded):
        sound(target.pairs[0].one, 1, SECRET)


def test_a_run_that_is_to_end_shows_its_own_period_again_and_no_other():
    """Two starts of each of three runs; in the control eight runs go on to the last period."""
    target = ledger_targets()["book_of_held_places"]()
    shown = target.sample(target.pairs[0].one, 5, SECRET).reshape(5, 6, 2)
    broken = ledger_controls()["book_forgets_last_periods"]()
    control = broken.sample(broken.pairs[0].one, 5, SECRET).reshape(5, -1, 2)

    np.testing.assert_array_equal(shown[:, :3], shown[:, 3:])
    assert (shown[:, 0] != shown[:, 1]).any()
    assert control.shape[1] == 8 + sum(range(2, 10))


def test_a_unit_at_all_bounds_is_in_every_group_and_step():
    """One row each: what the bounds let in is all that they allow."""
    pair = pair_at_all_bounds(3)

    assert pair.one.unit == ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2))
    assert pair.two.unit == ()
    assert pair.one.others == pair.two.others == ((0, 0, 3), (1, 0, 3))


def test_parts_go_on_from_snapshots_too():
    """A part that saves after every step shows no table twice."""
    target = ledger_targets()["latched_restarts"]()
    part = replace(target.sample.sharing[0], snapshot_every=1, kills=(1, 1))
    rows = replace(target.sample, sharing=(part,))(target.pairs[0].one, 5, SECRET)

    assert isinstance(part, RestartedQuery)
    assert rows.shape == (5, 3 * 2)
