"""Counting under noise: what is in memory and in files, what it costs, and what a kill leaves."""

import gc
import hashlib
import itertools
import json
import math
import shutil
from fractions import Fraction

import numpy as np
import pytest

import dpstream as dps
from dpstream.errors import BudgetExceeded, InvalidInput, InvalidParameter, NoiseReuse, StateError
from dpstream.mechanisms import (
    BudgetAbsorption,
    BudgetDistribution,
    FastW,
    Pacer,
    Sample,
    Spas,
    Uniform,
)
from dpstream.mechanisms.pan_private import PanPrivateRunner
from tests.support.kill_and_replay import KindOfRun, kill_everywhere
from tests.support.long import is_long
from tests.support.processes import run_in_fork

HALF = Fraction(1, 2)
FITTING = [Uniform, Sample, BudgetDistribution, BudgetAbsorption, Pacer, FastW]
Z = 4.9  # two-sided false-alarm rate below 1e-6


class Fixed(PanPrivateRunner):
    """Keys from a counter instead of the system, remembered here for the tests."""

    def _new_key(self):
        keys = self.__class__.keys
        keys.append(hashlib.sha256(f"{self.salt} {len(keys)}".encode()).digest())
        return keys[-1]


def fixed(mechanism, salt="", **more):
    """A run with noise that is the same in every test run."""
    kind = type("Fixed", (Fixed,), {"keys": [], "salt": salt})
    return kind(mechanism, **{"bins": 3, "intrusion": HALF} | more)


def published(runner, steps, events=lambda step: [step % 3]):
    """The releases of some steps."""
    out = []
    for _ in range(steps):
        runner.count(events(runner.steps_done))
        out.append(runner.end_step())
    return out


@pytest.mark.parametrize("mechanism", FITTING)
def test_a_book_of_one_run_holds_the_mechanism_and_one_intrusion(mechanism):
    """Epsilon is the sum; the intrusion is charged once, to every window, before any draw."""
    runner = dps.PanPrivateRunner(mechanism(epsilon=1, window=4), bins=2, intrusion=HALF)
    book = runner.ledger
    at_first = book.report()[0]["spent_on"]
    published(runner, 40, lambda step: [step % 2] * 50)
    spent = {line["purpose"]: line for line in book.report()[0]["spent_on"]}

    assert [(line["purpose"], line["amount"]) for line in at_first] == [("intrusion", "1/2")]
    assert book.terms("stream").total == Fraction(3, 2)
    assert (spent["intrusion"]["charges"], spent["intrusion"]["amount"]) == (1, "1/2")
    assert book.peak("stream") <= Fraction(3, 2)


def test_a_window_loses_exactly_epsilon_and_the_intrusion():
    """Sample spends all of epsilon at one step, and the intruder may come at another."""
    runner = dps.PanPrivateRunner(Sample(epsilon=1, window=4), bins=2, intrusion=HALF)
    published(runner, 9, lambda step: [0])

    assert runner.ledger.peak("stream") == Fraction(3, 2)
    assert runner.left == 0


def test_a_book_that_lacks_the_intrusion_refuses_the_run():
    """Before anything is counted."""
    book = dps.Ledger()
    book.open("stream", dps.Terms(unit="w_event", window=4, total=HALF))
    with pytest.raises(BudgetExceeded):
        dps.PanPrivateRunner(Sample(epsilon=1, window=4), bins=2, intrusion=1, ledger=book)


def test_counts_begin_at_noise_and_move_with_every_event():
    """What is in memory is the first noise plus the events so far; at the end the next noise."""
    runner = fixed(Uniform(epsilon=1, window=4), bins=5)
    first = runner._counts.copy()
    runner.count(4)
    runner.count([4, 0])
    moved = runner._counts - first
    runner.end_step()

    assert first.any()
    assert moved.tolist() == [1, 0, 0, 0, 2]
    assert (runner._counts != first).any()


@pytest.mark.parametrize(("off", "passes"), [(1.0, True), (1.2, False), (0.8, False)])
def test_the_first_noise_and_all_noise_have_the_declared_scale(off, passes):
    """Of 20,000 bins: counts begin with scale 1 / intrusion, releases have both variances."""
    bins = 20_000
    runner = fixed(Sample(epsilon=1, window=1), bins=bins)
    first = runner._counts.astype(float)
    release = runner.end_step()

    assert agree(first, math.sqrt(geometric_variance(2)) * off) == passes
    assert agree(release.values, float(release.stddev[0]) * off) == passes
    continuous = 2 * (2**2 + 1**2)
    assert release.stddev[0] == pytest.approx(math.sqrt(continuous), rel=0.06)


def geometric_variance(scale):
    """Of the discrete Laplace law."""
    return 0.5 / math.sinh(0.5 / scale) ** 2


def agree(noise, stddev):
    """Is the mean square that of this deviation, at a level of 1e-6?"""
    error = (noise**4).mean() - (noise**2).mean() ** 2
    return abs((noise**2).mean() - stddev**2) < Z * math.sqrt(error / len(noise))


def reachable(root):
    """Everything that an object holds, as far as Python's collector sees it; no code."""
    seen, todo, found = set(), [root], []
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, type) or hasattr(one, "__code__"):
            continue
        seen.add(id(one))
        found.append(one)
        if type(one).__name__ not in ("module", "builtin_function_or_method"):
            todo += gc.get_referents(one)
    return found


def keeps_a_key(runner):
    keys = set(type(runner).keys)
    return any(isinstance(one, bytes) and one in keys for one in reachable(runner))


def test_no_key_of_any_noise_is_kept():
    """Neither of the first noise while a step runs, nor of the others after it."""
    runner = fixed(Pacer(epsilon=1, window=4))
    published(runner, 6)
    runner.count(1)

    assert len(type(runner).keys) == len(set(type(runner).keys)) == 14
    assert not keeps_a_key(runner)


def test_the_search_for_keys_finds_a_kept_one():
    """Control: the same run, which keeps its newest `Spend`."""
    runner = fixed(Pacer(epsilon=1, window=4))
    runner.kept = runner._new_spend()

    assert keeps_a_key(runner)


def files_after(folder, monkeypatch, events):
    """All records of a run's files but times, with marks and run id from a counter."""
    marks = itertools.count()
    name = "dpstream.mechanisms.pan_private.mint_run_id"
    monkeypatch.setattr(name, lambda: next(marks).to_bytes(16, "big"))
    monkeypatch.setattr(
        "dpstream.privacy.state.run_directory.mint_run_id",
        lambda: (1000 + next(marks)).to_bytes(16, "big"),
    )
    runner = fixed(Sample(epsilon=1, window=4), state=folder)
    published(runner, 7, events)
    runner.close()
    log = next(folder.glob("inputs*")).read_text().splitlines()
    records = [json.loads(line.partition(" ")[2]) for line in log]
    snapshot = dps.privacy.state.read_packed(folder / "snapshot.dps", kind="snapshot")
    book = list(dps.Ledger(folder / "ledger").history())
    timed = ("ledger", "ledger head", "at")  # checksums of the book, which has times, and times
    return [
        {key: value for key, value in record.items() if key not in timed}
        for record in (*records, snapshot, *book)
    ]


def test_events_of_a_held_step_leave_no_trace_in_any_file(tmp_path, monkeypatch):
    """Other data where nothing is published: log, snapshot and ledger are the same."""
    one = files_after(tmp_path / "one", monkeypatch, lambda step: [0])
    two = files_after(
        tmp_path / "two", monkeypatch, lambda step: [0] if step % 4 == 0 else [2] * 90
    )

    assert len(one) > 20
    assert repr(one) == repr(two)


def test_a_keyed_run_leaves_a_trace(tmp_path):
    """Control: a Runner's log tells the two streams apart, by its digests."""
    logs = []
    for place, high in (("one", 1), ("two", 90)):
        data = np.where(np.arange(7)[:, None] % 4 == 0, 1, high)
        with dps.Runner(
            Sample(epsilon=1, window=4),
            state=tmp_path / place,
            secret=bytes(32),
            run_id=bytes(16),
        ) as runner:
            list(runner.feed(data))
        (log,) = (tmp_path / place).glob("inputs*")
        logs.append([line for line in log.read_text().splitlines() if "digest" in line])

    assert len(logs[0]) == len(logs[1]) == 7
    assert logs[0] != logs[1]


def test_a_restart_repeats_the_newest_release_and_goes_on(tmp_path):
    """The same bytes, the same ledger, and the steps after it are drawn as if nothing had been."""
    runner = dps.PanPrivateRunner(
        BudgetAbsorption(epsilon=1, window=4), bins=3, intrusion=HALF, state=tmp_path / "state"
    )
    before = published(runner, 5, lambda step: [1] * 40 * (step % 2))
    runner.count([1, 2])  # a step that is not ended is lost with the process
    charged = runner.ledger.report()
    runner.close()
    again = dps.PanPrivateRunner(
        BudgetAbsorption(epsilon=1, window=4), bins=3, intrusion=HALF, state=tmp_path / "state"
    )

    assert again.steps_done == 5
    assert again.last.values.tolist() == before[-1].values.tolist()
    assert again.last.stddev.tolist() == before[-1].stddev.tolist()
    assert again.ledger.report() == charged
    assert [r.step for r in published(again, 20)] == list(range(5, 25))
    again.close()


def test_a_step_that_was_begun_and_not_logged_is_held_and_a_window_after_it(tmp_path, monkeypatch):
    """It is never drawn again, and no later step passes the ledger's limit."""
    mechanism, place = Uniform(epsilon=1, window=4), tmp_path / "state"
    runner = dps.PanPrivateRunner(mechanism, bins=3, intrusion=HALF, state=place)
    before = published(runner, 3)
    monkeypatch.setattr(runner, "_save", lambda: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        published(runner, 1)
    runner.close()
    again = dps.PanPrivateRunner(mechanism, bins=3, intrusion=HALF, state=place)
    assert (again.steps_done, again.last.step, again.last.held) == (4, 3, True)
    assert again.last.values.tolist() == before[-1].values.tolist()
    after = published(again, 8)
    again.close()

    assert [r.held for r in after] == [True] * 3 + [False] * 5


def test_for_a_first_step_that_is_lost_zeros_are_held(tmp_path, monkeypatch):
    """There is no release to hold, and the deviation of zeros is not known."""
    place = tmp_path / "state"
    runner = dps.PanPrivateRunner(Sample(epsilon=1, window=2), bins=3, state=place)
    monkeypatch.setattr(runner, "_save", lambda: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        runner.end_step()
    runner.close()
    with dps.PanPrivateRunner(Sample(epsilon=1, window=2), bins=3, state=place) as again:
        assert again.last.values.tolist() == [0, 0, 0]
        assert np.isnan(again.last.stddev).all()
        assert [r.paid for r in published(again, 3)] == [False, True, False]


def test_the_ledger_refuses_a_second_draw_of_a_step(tmp_path):
    """Even one whose log is gone: each draw has a mark of its own."""
    book = dps.Ledger(tmp_path / "book")
    runner = dps.PanPrivateRunner(Uniform(epsilon=1, window=4), bins=3, ledger=book)
    published(runner, 2)
    runner._steps = 1
    with pytest.raises(NoiseReuse):
        runner.end_step()
    with pytest.raises(StateError, match="closed"):
        runner.end_step()


def counting(mechanism, steps):
    """A run in a folder that publishes to a file, the newest release again after a restart."""

    def start(place):
        runner = dps.PanPrivateRunner(mechanism, bins=3, intrusion=HALF, state=place / "state")
        with runner, (place / "published").open("a") as out:

            def tell(release):
                line = {"step": release.step, "values": release.values.tolist()}
                out.write(json.dumps(line) + "\n")
                out.flush()

            if runner.last is not None:
                tell(runner.last)
            while runner.steps_done < steps:
                runner.count([runner.steps_done % 3] * 30)
                tell(runner.end_step())
                yield runner.last

    def told(place):
        lines = (place / "published").read_text().splitlines()
        return [(line["step"], line["values"]) for line in map(json.loads, lines)]

    def charges(place):
        history = dps.Ledger(place / "state" / "ledger").history()
        return [(c["step"], c["purpose"]) for c in history if "amount" in c]

    return KindOfRun(start=start, published=told, charges=charges)


@pytest.mark.parametrize("mechanism", [Uniform, Pacer])
def test_a_run_that_is_killed_anywhere_draws_no_step_twice(mechanism, tmp_path):
    """Killed before an operation on the disk: all steps come, each once, or repeated as it was."""
    steps = 5
    kind = counting(mechanism(epsilon=1, window=3), steps)
    points, seen = range(2, 300, 1 if is_long() else 11), 0
    for _, after in kill_everywhere(kind, tmp_path, points):
        by_step = {}
        for step, values in after.published:
            assert by_step.setdefault(step, values) == values
        assert sorted(by_step) == list(range(steps))
        assert len(after.charges) == len(set(after.charges))
        seen += 1

    assert seen > 5


def test_other_parameters_or_another_kind_of_run_are_refused(tmp_path):
    """A directory goes on with the run that made it."""
    place = tmp_path / "state"
    dps.PanPrivateRunner(Sample(epsilon=1, window=4), bins=3, state=place).close()
    with pytest.raises(StateError, match="other parameters"):
        dps.PanPrivateRunner(Sample(epsilon=1, window=4), bins=4, state=place)
    with pytest.raises(StateError, match="PanPrivateRunner"):
        dps.Runner(Sample(epsilon=1, window=4), state=place)
    dps.Runner(Sample(epsilon=1, window=4), state=tmp_path / "keyed").close()
    with pytest.raises(StateError, match="Runner"):
        dps.PanPrivateRunner(Sample(epsilon=1, window=4), bins=3, state=tmp_path / "keyed")


def test_a_copy_of_a_directory_is_refused(tmp_path):
    """Two copies of a book cannot keep one budget."""
    runner = dps.PanPrivateRunner(Sample(epsilon=1, window=4), bins=3, state=tmp_path / "state")
    published(runner, 3)
    runner.close()
    shutil.copytree(tmp_path / "state", tmp_path / "copy")
    with pytest.raises(StateError, match="copy"):
        dps.PanPrivateRunner(Sample(epsilon=1, window=4), bins=3, state=tmp_path / "copy")


@pytest.mark.parametrize("given", [3, -1, [0, 3], 1.0, "a"])
def test_events_outside_the_bins_are_refused_and_count_nothing(given):
    """Before any of them is added."""
    runner = fixed(Uniform(epsilon=1, window=4))
    before = runner._counts.copy()
    with pytest.raises(InvalidInput, match="bin numbers from 0 to 2"):
        runner.count(given)
    assert (runner._counts == before).all()


def test_a_mechanism_with_a_secret_threshold_is_refused():
    """With the mechanisms that fit named."""
    with pytest.raises(dps.DpstreamError, match="pacer"):
        dps.PanPrivateRunner(Spas(epsilon=1, window=4), bins=3)


def test_without_an_intrusion_the_book_is_the_mechanisms():
    """Protected between steps only: counts are exact while a step runs, and nothing is added."""
    runner = dps.PanPrivateRunner(Sample(epsilon=1, window=4), bins=3)
    runner.count([1, 1])

    assert runner._counts.tolist() == [0, 2, 0]
    assert runner.ledger.terms("stream").total == 1
    assert runner.end_step().stddev[0] == dps.release(Sample(epsilon=1, window=4), [1]).stddev[0, 0]


def test_a_forked_copy_may_not_go_on():
    """Two processes would count on under one noise, and each would draw the step."""
    runner = dps.PanPrivateRunner(Sample(epsilon=1, window=4), bins=3, intrusion=HALF)

    def child():
        with pytest.raises(StateError, match="fork"):
            runner.count(1)
        with pytest.raises(StateError, match="fork"):
            runner.end_step()

    assert run_in_fork(child) == 0
    runner.end_step()


def test_two_runs_of_one_book_pay_for_two_looks(tmp_path):
    """One look sees the counts of both: each run charges its own intrusion, beside a keyed run."""
    book = dps.Ledger(tmp_path / "book")
    book.open("stream", dps.Terms(unit="w_event", window=4, total=4))
    mechanism = Sample(epsilon=1, window=4)
    runs = [
        dps.PanPrivateRunner(
            mechanism, bins=2, intrusion=HALF, ledger=book, name=name, state=tmp_path / name
        )
        for name in ("one", "two")
    ]
    for run in runs:
        published(run, 6, lambda step: [0, 1])
        run.close()
    dps.release(mechanism, [[1, 1]] * 6, ledger=book, name="keyed")

    assert book.peak("stream") == 4
    with pytest.raises(BudgetExceeded):
        dps.PanPrivateRunner(mechanism, bins=2, intrusion=HALF, ledger=book, name="three")


def test_steps_that_only_the_ledger_knows_are_held(tmp_path):
    """A directory put back from an older copy: what it lacks is not drawn again."""
    place, older = tmp_path / "state", tmp_path / "older"
    book = dps.Ledger(tmp_path / "book")
    mechanism = Uniform(epsilon=1, window=3)
    with dps.PanPrivateRunner(mechanism, bins=2, ledger=book, state=place) as runner:
        kept = published(runner, 3, lambda step: [0])[-1]
        shutil.copytree(place, older)
        published(runner, 2, lambda step: [0])
    shutil.rmtree(place)
    older.rename(place)
    with dps.PanPrivateRunner(mechanism, bins=2, ledger=book, state=place) as again:
        assert (again.steps_done, again.last.held) == (5, True)
        assert again.last.values.tolist() == kept.values.tolist()
        assert [r.held for r in published(again, 4, lambda step: [0])] == [True, True, False, False]


def looked_at(place=None, **more):
    """A run of which two looks may fall into one window."""
    asked = {"bins": 3, "intrusion": HALF, "intrusions": 2, "state": place}
    return dps.PanPrivateRunner(Sample(epsilon=1, window=4), **asked | more)


@pytest.mark.parametrize("step", [0, 1, 6])
def test_an_announced_look_is_charged_from_its_step_on(step):
    """A window that has that step pays for two looks, all others for one; the book holds both."""
    runner = looked_at()
    published(runner, step)
    runner.announce_intrusion()
    published(runner, 10)
    lost = [Fraction(2) - runner.ledger.left("stream", end) for end in range(step + 10)]
    paid = [sum(4 * k in range(end - 3, end + 1) for k in range(9)) for end in range(step + 10)]

    assert runner.ledger.terms("stream").total == 2
    assert [a - b for a, b in zip(lost, paid, strict=True)] == [
        1 if end - 3 <= step <= end else HALF for end in range(step + 10)
    ]


def test_looks_far_enough_apart_go_on_for_ever():
    """Each charge ends with the next announcement, and leaves the window w steps later."""
    runner = looked_at()
    for _ in range(6):
        runner.announce_intrusion()
        published(runner, 4)

    assert runner.ledger.peak("stream") == 2


def test_a_look_too_many_ends_the_run(tmp_path):
    """Counts that were seen are not counted on without new noise."""
    runner = looked_at(tmp_path)
    runner.announce_intrusion()
    published(runner, 3)
    with pytest.raises(BudgetExceeded, match="3 looks in 4 steps"):
        runner.announce_intrusion()
    assert not runner._counts.any()
    with pytest.raises(StateError, match="closed"):
        runner.count(1)
    with pytest.raises(BudgetExceeded):  # nor does whoever goes on with its directory
        looked_at(tmp_path)


@pytest.mark.parametrize(("off", "passes"), [(1.0, True), (1.2, False), (0.8, False)])
def test_an_announced_look_covers_the_counts_anew(off, passes):
    """Of 20,000 bins: what two looks differ by is new noise of the same scale, events kept."""
    bins = 20_000
    runner = fixed(Sample(epsilon=1, window=1), bins=bins, intrusions=2)
    runner.count(np.arange(bins))
    seen = runner._counts.copy()
    runner.announce_intrusion()
    added = (runner._counts - seen).astype(float)
    release = runner.end_step()

    assert agree(added, math.sqrt(geometric_variance(2)) * off) == passes
    assert agree(release.values - 1, float(release.stddev[0]) * off) == passes
    assert runner.end_step().stddev[0] < release.stddev[0]
    assert not keeps_a_key(runner)


def test_announced_looks_are_charged_once_through_restarts(tmp_path):
    """Also where the charge was made long ago and has left the ledger's newest window."""
    for _ in range(3):
        with looked_at(tmp_path / "state") as runner:
            runner.announce_intrusion()
            published(runner, 9)
    with looked_at(tmp_path / "state") as runner:
        published(runner, 1)
        spent = {line["purpose"]: line["charges"] for line in runner.ledger.report()[0]["spent_on"]}
        assert runner.ledger.peak("stream") == 2
        assert runner.left == 0.5

    assert [spent[name] for name in ("intrusion 2", "intrusion 3", "intrusion 4")] == [1, 1, 1]


@pytest.mark.parametrize("broken", ["close_interval", "open_interval", "laplace"])
def test_a_kill_within_an_announcement_leaves_it_to_the_restart(broken, tmp_path, monkeypatch):
    """It was written down first: whoever goes on with the directory pays for it."""
    runner = looked_at(tmp_path / "state")
    published(runner, 2)
    with monkeypatch.context() as patch:
        patch.setattr(f"dpstream.privacy.spend.Spend.{broken}", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            runner.announce_intrusion()
    with looked_at(tmp_path / "state") as again:
        published(again, 2)
        assert again.ledger.peak("stream") == 2
        with pytest.raises(BudgetExceeded):
            again.announce_intrusion()


def test_looks_within_steps_need_a_price():
    """Without one, nothing can be announced; the number of looks belongs to the run."""
    with pytest.raises(InvalidParameter, match="what each of them may cost"):
        looked_at(intrusion=None)
    with pytest.raises(InvalidParameter, match="looks between its steps cost nothing"):
        looked_at(intrusion=None, intrusions=1).announce_intrusion()


def test_another_number_of_looks_is_another_run(tmp_path):
    """The book has room for as many as were named when it began."""
    looked_at(tmp_path / "state").close()
    with pytest.raises(StateError, match="other parameters"):
        looked_at(tmp_path / "state", intrusions=3)
