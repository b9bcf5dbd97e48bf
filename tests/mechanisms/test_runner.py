"""Runs that are saved, killed, copied, rolled back and brought back."""

import shutil
from fractions import Fraction

import numpy as np
import pytest

import dpstream as dps
from dpstream.errors import (
    BudgetExceeded,
    InvalidInput,
    InvalidParameter,
    NoiseReuse,
    SecretError,
    StateError,
)
from dpstream.mechanisms import ContinGroup, Sample, Uniform
from tests.support.fixed import RUN, SECRET
from tests.support.processes import run_python

DATA = np.arange(40).reshape(20, 2)


def values(runner, block):
    return [r.values.tolist() for batch in runner.feed(block) for r in batch]


def saved(folder, steps=7):
    """A run saved after `steps` steps, and the steps it published before."""
    runner = sample(folder, run_id=RUN)
    before = values(runner, DATA[:steps])
    runner.save()
    return runner, before


def sample(folder, **more):
    """A run of Sample in a state directory, begun or gone on with."""
    return dps.Runner(Sample(epsilon=1, window=3), state=folder, **{"secret": SECRET} | more)


def test_two_processes_with_one_secret_and_run_publish_the_same(tmp_path):
    """Noise is a function of secret, run and address; the process does not matter."""
    script = (
        "import dpstream as dps, sys; from dpstream.mechanisms import Uniform\n"
        "s = dps.release(Uniform(epsilon=1, window=3), [[5, 5]] * 9,"
        " secret=bytes(range(32)), run_id=bytes(range(16)))\n"
        "print(s.values.tolist())"
    )
    there = run_python(script)
    here = dps.release(Uniform(epsilon=1, window=3), [[5, 5]] * 9, secret=SECRET, run_id=RUN)

    assert there.stdout == f"{here.values.tolist()}\n"


def test_steps_one_by_one_or_all_at_once_publish_the_same():
    """Batching is invisible in what is published and in what is spent."""
    for mechanism in (Sample(epsilon=1, window=3), Uniform(epsilon=1, window=3)):
        single = dps.Runner(mechanism, secret=SECRET, run_id=RUN)
        block = dps.Runner(mechanism, secret=SECRET, run_id=RUN)
        one_by_one = [r.values.tolist() for row in DATA for r in single.step(row)]

        assert one_by_one == values(block, DATA)
        assert single.left == block.left


def test_a_steady_mechanism_writes_one_ledger_entry_per_batch(tmp_path):
    """A thousand equal charges are one durable record, written before the first draw."""
    ledger = dps.Ledger(tmp_path / "ledger")
    dps.release(Uniform(epsilon=1, window=3), [[1]] * 2500, ledger=ledger)
    charges = [r for r in ledger.history() if "amount" in r]

    assert [r.get("repeat") for r in charges] == [1024, 1024, 452]


def test_charges_are_durable_before_noise_is_drawn(tmp_path, monkeypatch):
    """When a sampler is called, the ledger file already holds its charge."""
    from dpstream.privacy import noise

    path, seen, real = tmp_path / "ledger", [], noise.add_laplace

    def spy(*asked):
        seen.append(sum(r.get("repeat", 1) for r in dps.Ledger(path).history() if "amount" in r))
        return real(*asked)

    monkeypatch.setattr(noise, "add_laplace", spy)
    dps.release(Sample(epsilon=1, window=3), [[1]] * 7, ledger=path)

    assert seen == [1, 2, 3]


def test_the_fixed_run_id_fixes_everything_else_too(tmp_path):
    """One run id with other parameters is refused by the ledger."""
    ledger = dps.Ledger(tmp_path / "ledger")
    ledger.open("stream", dps.Terms(unit="w_event", window=3, total=10))
    dps.release(Sample(epsilon=1, window=3), DATA, secret=SECRET, run_id=RUN, ledger=ledger)
    with pytest.raises(NoiseReuse):
        dps.release(Sample(epsilon=2, window=3), DATA, secret=SECRET, run_id=RUN, ledger=ledger)


def test_every_release_of_a_dataset_counts(tmp_path):
    """A second release of the same dataset does not fit a book made for one."""
    ledger = dps.Ledger(tmp_path / "ledger")
    dps.release(Sample(epsilon=1, window=3), DATA, ledger=ledger)
    with pytest.raises(BudgetExceeded):
        dps.release(Sample(epsilon=1, window=3), DATA, ledger=ledger)
    dps.release(Sample(epsilon=1, window=3), DATA, ledger=ledger, dataset="another")


def test_a_state_goes_on_where_it_was(tmp_path):
    """Loaded, the run publishes the rest; steps fed twice replay and charge nothing."""
    whole = values(dps.Runner(Sample(epsilon=1, window=3), secret=SECRET, run_id=RUN), DATA)
    runner, before = saved(tmp_path / "state")
    lost = values(runner, DATA[7:12])
    runner.close()
    again = sample(tmp_path / "state")
    charged = again.ledger.report()
    replayed = values(again, DATA[7:12])

    assert before + lost == whole[:12]
    assert replayed == lost
    assert again.ledger.report() == charged
    assert values(again, DATA[12:]) == whole[12:]


def test_other_data_after_a_restart_publish_nothing(tmp_path):
    """A step that was logged before the kill cannot come back with other data."""
    runner, _ = saved(tmp_path / "state")
    values(runner, DATA[7:12])
    runner.close()
    again = sample(tmp_path / "state")
    feed = again.feed(DATA[7:12] + 1)
    with pytest.raises(NoiseReuse):
        next(feed)

    assert again.steps_done == 7


def test_a_copied_state_is_refused_or_a_new_run(tmp_path):
    """A copy would draw the noise that the original draws: asked to, it begins anew, and pays.

    Noise of epsilon 1 is 0 in 47% of draws, more often than any other value: 26 values of another
    run are all those of the original by chance in fewer than 1e-8 of runs of this test.
    """
    runner, _ = saved(tmp_path / "state")
    more = np.tile(DATA, (2, 1))
    original = values(runner, more)
    runner.close()
    shutil.copytree(tmp_path / "state", tmp_path / "copy")
    with pytest.raises(StateError, match="copy"):
        sample(tmp_path / "copy")
    book = tmp_path / "book"
    dps.Ledger(book).close()
    with pytest.raises(StateError, match=r"is not the file that .* is charged to"):
        sample(tmp_path / "copy", ledger=book)
    copy = sample(tmp_path / "copy", ledger=book, new_run=True)

    assert copy.run_id != RUN
    assert values(copy, more) != original
    assert copy.ledger.report()[0]["spent_on"][0]["run"] == copy.run_id.hex()


@pytest.mark.parametrize("left", [None, b""])
def test_a_lost_log_is_refused_or_a_new_run(tmp_path, left):
    """Without the log nothing says which steps were drawn already."""
    runner, _ = saved(tmp_path / "state")
    runner.close()
    log = next((tmp_path / "state").glob("inputs-*.log"))
    log.unlink() if left is None else log.write_bytes(left)
    with pytest.raises(StateError, match=r"inputs-.* is (missing|empty)"):
        sample(tmp_path / "state")
    again = sample(tmp_path / "state", new_run=True)
    again.close()

    assert again.run_id != RUN
    assert sample(tmp_path / "state").run_id == again.run_id


def test_a_log_behind_the_ledger_takes_its_steps_from_there(tmp_path):
    """A log restored from a backup has forgotten steps that the ledger remembers."""
    runner, _ = saved(tmp_path / "state")
    values(runner, DATA[7:9])
    log = next((tmp_path / "state").glob("inputs-*.log"))
    old = log.read_bytes()
    lost = values(runner, DATA[9:12])
    runner.close()
    log.write_bytes(old)  # in place: the file stays the same file
    other = sample(tmp_path / "state")
    with pytest.raises(NoiseReuse):
        values(other, [*DATA[7:11], DATA[11] + 1])
    other.close()
    again = sample(tmp_path / "state")
    assert values(again, DATA[7:12])[2:] == lost
    again.close()
    log.write_bytes(old)
    with pytest.raises(StateError, match="rolled back, or another copy"):
        sample(tmp_path / "state")


def test_one_state_has_one_owner(tmp_path):
    """A second process on the same state directory is refused."""
    script = (
        "import dpstream as dps, sys\n"
        "mechanism = dps.mechanisms.Sample(epsilon=1, window=3)\n"
        "try: dps.Runner(mechanism, state=sys.argv[1], secret=bytes(range(32)))\n"
        "except dps.errors.StateError as refusal: print(refusal)"
    )
    runner, _ = saved(tmp_path / "state")
    refused = run_python(script, tmp_path / "state")
    runner.close()

    assert "in use by another process" in refused.stdout
    sample(tmp_path / "state").close()


def test_replay_of_a_growing_file(tmp_path):
    """The same rows publish the same values for nothing; appended rows are new."""
    mechanism = Sample(epsilon=1, window=3)
    first = dps.Runner(mechanism, state=tmp_path / "state", replay=True)
    old = values(first, DATA[:8])
    spent = first.ledger.report()
    first.close()
    second = dps.Runner(mechanism, state=tmp_path / "state", replay=True)
    assert values(second, DATA[:8]) == old
    assert second.ledger.report() == spent
    values(second, DATA[8:])
    second.close()

    assert (tmp_path / "state.secret").stat().st_mode & 0o777 == 0o600
    with pytest.raises(StateError, match="same parameters"):
        dps.Runner(Sample(epsilon=1, window=4), state=tmp_path / "state", replay=True)


def test_a_run_without_a_state_directory_cannot_be_saved():
    """It says how to have one."""
    with pytest.raises(StateError, match="state=PATH"):
        dps.Runner(Sample(epsilon=1, window=3)).save()


def test_a_new_run_cannot_be_replayed_from_its_first_step(tmp_path):
    """What the run before it has published is not in its log."""
    saved(tmp_path / "state")[0].close()
    sample(tmp_path / "state", new_run=True).close()
    with pytest.raises(StateError, match="logged from step 7 on only"):
        sample(tmp_path / "state", replay=True)


def test_the_wrong_secret_is_refused(tmp_path):
    """Another secret would mean other noise over data already published."""
    saved(tmp_path / "state")[0].close()
    with pytest.raises(StateError, match="another secret"):
        sample(tmp_path / "state", secret=SECRET[::-1])
    with pytest.raises(SecretError, match="no secret"):
        sample(tmp_path / "state", secret=None)


@pytest.mark.parametrize("name", ["run.dps", "snapshot.dps"])
@pytest.mark.parametrize("content", [b"", b"dpstr", b"PK\x03\x04 something else entirely"])
def test_a_truncated_or_foreign_state_is_refused(tmp_path, name, content):
    """Nothing is guessed from a damaged state without an older snapshot."""
    saved(tmp_path / "state")[0].close()
    (tmp_path / "state" / "snapshot.1.dps").unlink()
    (tmp_path / "state" / name).write_bytes(content)
    with pytest.raises(StateError, match=r"not a dpstream file|truncated"):
        sample(tmp_path / "state")


def test_a_half_state_is_refused(tmp_path):
    """A snapshot that was cut off is not taken; the older one is."""
    saved(tmp_path / "state")[0].close()
    blob = (tmp_path / "state" / "snapshot.dps").read_bytes()
    (tmp_path / "state" / "snapshot.dps").write_bytes(blob[:-1])
    with sample(tmp_path / "state") as older:
        assert older.steps_done == 0
    (tmp_path / "state" / "snapshot.1.dps").unlink()
    with pytest.raises(StateError, match="checksum"):
        sample(tmp_path / "state")


def test_a_refused_step_can_be_tried_again(tmp_path):
    """After BudgetExceeded the runner is where it was; with room in the book the step goes on."""
    ledger = dps.Ledger(tmp_path / "ledger")
    ledger.open("stream", dps.Terms(unit="w_event", window=3, total=1))
    blocker = dps.Runner(Uniform(epsilon="1/2", window=1), ledger=ledger, dataset="stream")
    blocker.step([1])
    runner = dps.Runner(Sample(epsilon=1, window=3), ledger=ledger, dataset="stream")
    with pytest.raises(BudgetExceeded):
        runner.step([1])

    assert runner.steps_done == 0


def test_a_finished_stream_takes_no_more(tmp_path):
    """Finish ends a run."""
    runner = dps.Runner(Sample(epsilon=1, window=3))
    runner.step([1])
    runner.finish()
    with pytest.raises(InvalidInput, match="finished"):
        runner.step([1])


def test_what_is_left_is_exact():
    """Left is a rational: a third per step leaves nothing after three steps."""
    runner = dps.Runner(Uniform(epsilon=1, window=3))
    seen = []
    for _ in range(3):
        runner.step([1])
        seen.append(runner.left)

    assert seen == [Fraction(2, 3), Fraction(1, 3), 0]


def test_release_with_a_state_directory_repeats_and_extends(tmp_path):
    """The same data again cost nothing; appended steps are new."""
    sample = Sample(epsilon=1, window=3)
    first = dps.release(sample, DATA[:8], state=tmp_path / "state")
    again = dps.release(sample, DATA, state=tmp_path / "state")

    assert (again.values[:8] == first.values).all()
    assert len(again) == 20


def test_a_closed_run_says_so(tmp_path):
    """Leaving a `with` block closes the run; a step afterwards is refused in words."""
    with dps.Runner(Sample(epsilon=1, window=3)) as runner:
        runner.step([1])
    with pytest.raises(StateError, match="closed"):
        runner.step([1])


def test_a_new_run_is_no_replay(tmp_path):
    """Both at once contradict each other: refused before anything is paid or written."""
    saved(tmp_path / "state")[0].close()
    before = (tmp_path / "state" / "run.dps").read_bytes()
    other = dps.Ledger()

    with pytest.raises(InvalidParameter, match="choose new_run or replay"):
        sample(tmp_path / "state", new_run=True, replay=True, ledger=other)

    assert other.report() == []
    assert (tmp_path / "state" / "run.dps").read_bytes() == before


def test_a_replay_knows_that_the_stream_has_ended(tmp_path):
    """A kill between `finish` and `save`: what a delay held back comes for those steps alone."""
    mechanism = ContinGroup(epsilon=1, delay=3, lo=0, hi=9)
    values_of_stream = np.arange(6.0)[:, None]
    first = dps.Runner(mechanism, state=tmp_path / "s", secret=SECRET, replay=True)
    values(first, values_of_stream[:5])
    first.finish()
    first.close()  # not saved

    again = dps.Runner(mechanism, state=tmp_path / "s", secret=SECRET, replay=True)
    with pytest.raises(StateError, match="was finished after 5 steps"):
        values(again, values_of_stream)
    again.close()


def test_a_release_that_fails_leaves_its_directory_open_to_others(tmp_path):
    """Also while the error is still held, as a notebook holds it."""
    mechanism, settings = Uniform(epsilon=1, window=3), {"secret": SECRET, "run_id": RUN}
    first = dps.release(mechanism, [[1], [2], [3]], state=tmp_path / "s", **settings)
    with pytest.raises(NoiseReuse) as held:
        dps.release(mechanism, [[1], [2], [4]], state=tmp_path / "s", secret=SECRET)
    again = dps.release(mechanism, [[1], [2], [3]], state=tmp_path / "s", secret=SECRET)

    assert held.value is not None
    assert (again.values == first.values).all()


def test_a_directory_is_made_before_the_first_step(tmp_path):
    """Later the steps before it would have no digest, and their noise could meet other data."""
    runner = dps.Runner(Uniform(epsilon=1, window=3), secret=SECRET)
    steps = runner.feed(DATA)
    next(steps)

    with pytest.raises(StateError, match="before a run's first step"):
        runner.attach(tmp_path / "state")

    assert not (tmp_path / "state").exists()
