"""A state that was lost goes on from a backup: the same releases, no second charge, or refused."""

import itertools
import shutil
import tarfile
from contextlib import closing
from threading import Thread

import pyarrow as pa
import pytest

import dpstream as dps
from dpstream.errors import DpstreamError, NoiseReuse, RowsLost, StateError
from dpstream.privacy.state import WindowKeys, window_keys
from dpstream.privacy.state.backup import Restoration, back_up, runs_in
from dpstream.privacy.state.inspection import find_faults
from dpstream.privacy.state.run_directory import read_about, rotate_keys
from dpstream.privacy.state.secret import Secret
from tests.support import lost_files
from tests.support.fixed import SECRET
from tests.support.kill_and_replay import AfterReleases, BeforeDiskOperation, KindOfRun
from tests.support.live_runs import (
    LAST,
    TIMES,
    Pipe,
    ScriptedClock,
    arrivals,
    lines,
    start_live,
)
from tests.support.long import is_long
from tests.support.lost_files import STEPS, Grouped, Series, Stepped, rows, some
from tests.support.runs import CHOOSING, charges, options, published, query, start, table, write

LIVE_SERIES = dps.sql(
    """SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 2, privacy_unit = 'w_event',
    w = 3, mechanism = 'budget_distribution', privacy_unit_column = user, time_unit = 'us',
    public_groups = ('/1', '/2'), start = '1970-01-01', end = '1970-01-01 06:00') window_start,
    page, COUNT(*) AS n FROM TUMBLE(clicks, DESCRIPTOR(at), INTERVAL '1' HOUR)
    GROUP BY window_start, page""",
    name="series",
)
KINDS = {"group by": Grouped(), "series": Series(), "runner": Stepped()}
PLACES = [(s, t) for s in range(1, STEPS) for t in range(s, STEPS + 1)]
if not is_long():
    PLACES = [(1, 4), (2, 5), (5, 6)]


def put_back(source, folder, **more):
    return Restoration(folder=folder, because="a test", who="ann", **more).restore(source)


def lose(place, kind, s, t, ledger):
    """What was shown by t steps, the newest state lost; a backup was taken after s, on the way."""
    running = kind.start(place / "state", ledger, 0)
    shown = [kind.shown(one) for one in itertools.islice(running, s)]
    back_up(place / "state", place / "backup.tar")
    shown += [kind.shown(one) for one in itertools.islice(running, t - s)]
    running.close()
    shutil.rmtree(place / "state")
    return dict(shown)


def spent(ledger):
    """What any unit has lost, and how often somebody was charged."""
    with closing(dps.Ledger(ledger)) as book:
        return [each["spent"] for each in book.report()], charges(ledger)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("s", "t"), PLACES)
def test_a_restored_run_shows_what_was_shown_and_pays_nothing(tmp_path, kind, s, t):
    """On another path, from any step to any other; what it cannot show again is listed."""
    run, book = KINDS[kind], tmp_path / "book"
    shown = lose(tmp_path, run, s, t, book)
    before = spent(book)
    (restored,) = put_back(tmp_path / "backup.tar", tmp_path / "new").values()
    after = some(run, tmp_path / "new", book, STEPS)

    assert all(after[key] == shown[key] for key in after.keys() & shown.keys())
    assert restored.told >= t
    left_out = STEPS - len(shown | after)
    if kind == "group by":
        assert (left_out > 0) == bool(restored.lost and t < STEPS)
        assert spent(book) == before
    else:
        assert left_out == 0
    assert find_faults(tmp_path / "new", secret=Secret.of(SECRET)) == []


H = 3600
LATE_AND_PREFERRED = [
    *((1000 + n, "/hot", h * H + 60 + n, h * H + 60 + n) for n in range(400) for h in range(8)),
    # at their bounds: /hot in the first window, again and again and other pages in the second, and
    # late in the first, when the second is published already
    *(
        (n, page, at, came)
        for n in range(200)
        for page, at, came in (
            ("/hot", 60, 60),
            *(("/hot", 2 * H + 100 + k, 2 * H + 100 + k) for k in range(4)),
            *((f"/x{k}", 2 * H + 200 + k, 2 * H + 200 + k) for k in range(20)),
            *(("/hot", 2 * H - 10 - k, 3 * H + 50 + k) for k in range(3)),
        )
    ),
]


@pytest.mark.parametrize(("taken", "more"), [(2, 4), (1, 7), (9, 11)])
def test_windows_that_remember_keys_are_given_up_together(tmp_path, taken, more):
    """Bounding prefers the keys that a window remembers, and one that was given up remembers none:
    what other windows may keep of the same units would be other rows, under the noise of before."""
    user, page, at, came = zip(*LATE_AND_PREFERRED, strict=True)
    source = pa.table({"user": user, "page": page, "at": at, "came": came})
    asked = dps.Query(
        name="clicks",
        privacy_unit_column="user",
        keys=("page",),
        aggregates=(dps.Count("n"),),
        epsilon=2,
        delta=1e-6,
        time_column="at",
        time_unit="s",
        arrival_column="came",
        start="1970-01-01",
        end="1970-01-01T12:00",
        window=dps.Tumble("2 hours"),
        every="1 hour",
        allowed_lateness="3 hours",
        privacy_unit_period="forever",
        max_groups_contributed=3,
        max_rows_per_group=4,
        max_rows_contributed=6,
        report_bias=False,
    )

    def tables(place, count=None):
        facts = {"secret": SECRET, "ledger": tmp_path / "book", "source": source}
        settings = dps.EngineOptions(buckets=1, threads=1, snapshot_every=3)
        running = iter(dps.run(asked, state=tmp_path / place, options=settings, **facts))
        for made in itertools.islice(running, count):
            rows = made.to_pylist()
            yield {(r["window_start"], r["trigger_time"], r["page"]): r["n"] for r in rows}
        running.close()

    shown = {}
    running = tables("state", taken + more)
    for made in itertools.islice(running, taken):
        shown |= made
    back_up(tmp_path / "state", tmp_path / "backup.tar")
    for made in running:
        shown |= made
    shutil.rmtree(tmp_path / "state")
    (restored,) = put_back(tmp_path / "backup.tar", tmp_path / "new").values()
    after = [*tables("new")]
    again = {key: n for made in after for key, n in made.items()}

    assert all(again[key] == shown[key] for key in again.keys() & shown.keys())
    assert restored.lost
    assert restored.remembers_from == max(restored.lost) + 1
    assert after  # it goes on


@pytest.mark.parametrize("more", [0, 3])
def test_a_run_that_chooses_bounds_is_put_back_only_where_nothing_was_lost(tmp_path, more):
    """Periods may have begun since, with bounds that the backup does not know."""
    write(tmp_path, table(1500))
    facts = {"options": options(3), "ledger": tmp_path / "book", "secret": SECRET}
    facts["source"] = tmp_path / "rows.parquet"
    running = iter(dps.run(CHOOSING, state=tmp_path / "state", **facts))
    shown = [made.to_pylist() for made in itertools.islice(running, 7)]
    if more:
        back_up(tmp_path / "state", tmp_path / "backup.tar")
        shown += [made.to_pylist() for made in itertools.islice(running, more)]
    running.close()
    if not more:
        back_up(tmp_path / "state", tmp_path / "backup.tar")
    shutil.rmtree(tmp_path / "state")
    if more:
        with pytest.raises(StateError, match=r"chooses the bounds of each period.*--take-over"):
            put_back(tmp_path / "backup.tar", tmp_path / "new")
        return
    put_back(tmp_path / "backup.tar", tmp_path / "new")
    rest = [made.to_pylist() for made in dps.run(CHOOSING, state=tmp_path / "new", **facts)]

    assert len(shown) + len(rest) >= 24
    assert rest[-1]


def alter(table, hour, how):
    """Change one row of an hour."""
    columns = {name: table[name].to_pylist() for name in table.column_names}
    row = next(n for n, at in enumerate(columns["at"]) if at // 3600 == hour)
    if how == "drop":
        return pa.table(
            {name: values[:row] + values[row + 1 :] for name, values in columns.items()}
        )
    columns["page" if how == "alter" else "at"][row] = (
        "/d" if how == "alter" else 3600 * hour + 3601
    )
    return pa.table(columns)


CHANGES = list(itertools.product([Grouped(), Series()], ["alter", "drop", "move"]))


@pytest.mark.parametrize(("kind", "how"), CHANGES)
def test_one_other_row_is_refused(tmp_path, monkeypatch, kind, how):
    """The ledger was told of every step before its draw; noise never meets other data."""
    book = tmp_path / "book"
    lose(tmp_path, kind, 2, 5, book)
    put_back(tmp_path / "backup.tar", tmp_path / "new")
    other = alter(rows(0), 3, how)
    monkeypatch.setattr(lost_files, "rows", lambda extra: other)
    with pytest.raises(NoiseReuse, match="step 3 was already published from other data"):
        some(kind, tmp_path / "new", book, STEPS)


def test_a_ledger_that_may_be_older_needs_a_word(tmp_path):
    """A copy may be of any time; the backup's own is as old as the backup."""
    kind, book = KINDS["series"], tmp_path / "book"
    lose(tmp_path, kind, 2, 5, book)
    for end in ("", ".head"):
        shutil.copy(f"{book}{end}", f"{tmp_path}/copy{end}")
    source, copy = tmp_path / "backup.tar", tmp_path / "copy"
    with pytest.raises(StateError, match=r"not the file that was charged.*--newest-ledger"):
        put_back(source, tmp_path / "new", ledger=copy)
    assert not (tmp_path / "new").exists()
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path / "backup", filter="data")
    with pytest.raises(StateError, match="the backup's own ledger"):
        put_back(tmp_path / "backup", tmp_path / "new", ledger=tmp_path / "backup" / "ledger-0")
    assert put_back(source, tmp_path / "new", ledger=copy, newest_ledger=True)
    with closing(dps.Ledger(copy)) as ledger:
        assert "by word: this is the newest" in str(list(ledger.history()))


def test_without_the_newest_ledger_noise_would_meet_other_data(tmp_path, monkeypatch):
    """The control: with a ledger as old as the state nothing is noticed. So somebody must vouch."""
    kind, book = KINDS["series"], tmp_path / "book"
    shown = lose(tmp_path, kind, 2, 5, book)
    for path in tmp_path.glob("book*"):
        path.unlink()
    with pytest.raises(StateError, match=r"--nothing-since.*use a new state directory"):
        put_back(tmp_path / "backup.tar", tmp_path / "new")
    assert not book.exists()
    put_back(tmp_path / "backup.tar", tmp_path / "new", nothing_since=True)
    other = alter(rows(0), 3, "drop")
    monkeypatch.setattr(lost_files, "rows", lambda extra: other)
    after = some(kind, tmp_path / "new", book, STEPS)

    differences = [
        sum(abs(a["count"] - b["count"]) for a, b in zip(after[key], shown[key], strict=True))
        for key in after.keys() & shown.keys()
    ]
    assert sorted(differences) == [0, 0, 0, 0, 1]  # the row itself: the noise cancels


def test_both_put_back_go_on_if_nothing_was_published_since(tmp_path):
    """State and ledger are of one moment, on other paths."""
    kind = KINDS["group by"]
    shown = some(kind, tmp_path / "state", None, 2)
    back_up(tmp_path / "state", tmp_path / "backup")
    shutil.rmtree(tmp_path / "state")
    (restored,) = put_back(tmp_path / "backup", tmp_path / "new", nothing_since=True).values()
    after = some(kind, tmp_path / "new", None, STEPS)

    assert len(shown | after) == STEPS
    assert not restored.lost
    assert charges(tmp_path / "new" / "ledger") == 1


def test_keys_that_were_erased_since_are_erased_first(tmp_path):
    """The backup has the key of a window that is final by now; nobody opens it again."""
    kind, book = KINDS["group by"], tmp_path / "book"
    some(kind, tmp_path / "state", book, 2)
    back_up(tmp_path / "state", tmp_path / "backup")
    some(kind, tmp_path / "state", book, STEPS)
    shutil.rmtree(tmp_path / "state")
    (restored,) = put_back(tmp_path / "backup", tmp_path / "new").values()

    assert (tmp_path / "backup" / "state" / "windows" / "0.key").exists()
    assert not list((tmp_path / "new" / "windows").glob("*.key"))
    assert [*restored.final, *restored.lost] == [0, 1]
    assert some(kind, tmp_path / "new", book, STEPS) == {}


def test_a_copy_that_still_runs_is_fenced_by_a_restore(tmp_path):
    """The disk was not lost after all."""
    kind, book = KINDS["group by"], tmp_path / "book"
    running = kind.start(tmp_path / "state", book, 0)
    next(running)
    back_up(tmp_path / "state", tmp_path / "backup")
    put_back(tmp_path / "backup", tmp_path / "new")
    with pytest.raises(StateError, match="was started again by another process"):
        list(running)
    running.close()
    with pytest.raises(StateError, match="dpstream state restore"):
        some(kind, tmp_path / "state", book, 1)


def test_an_erased_unit_does_not_come_back(tmp_path):
    """The backup is from before the erasure."""
    state, book = tmp_path / "state", tmp_path / "book"
    facts = {"source": rows(0), "state": state, "secret": SECRET, "ledger": book}
    some(KINDS["group by"], state, book, 2)
    back_up(state, tmp_path / "backup")
    running = dps.run(Grouped.query, **facts, options=Grouped.options)
    for number, _ in enumerate(running):
        if number == 1:
            running.stop()
    dps.run(Grouped.query, **facts).erase_unit(5)
    shutil.rmtree(state)
    with pytest.raises(StateError, match="a unit was erased"):
        put_back(tmp_path / "backup", tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("how", ["changed", "missing", "new", "no backup"])
def test_a_backup_that_is_not_whole_is_refused(tmp_path, how):
    """Every file has its digest."""
    some(KINDS["group by"], tmp_path / "state", None, 1)
    backup = tmp_path / "backup"
    back_up(tmp_path / "state", backup)
    log = backup / "state" / "inputs.log"
    if how == "changed":
        log.write_bytes(log.read_bytes().replace(b"0", b"1", 1))
    elif how == "missing":
        log.unlink()
    elif how == "new":
        (backup / "state" / "windows" / "7.key").write_bytes(b"?")
    else:
        (backup / "backup.json").unlink()
    with pytest.raises(StateError, match="backup"):
        put_back(backup, tmp_path / "new", nothing_since=True)
    assert not (tmp_path / "new").exists()


def test_backups_of_a_run_that_goes_on_are_states_that_a_kill_could_leave(tmp_path):
    """Taken all the time while it publishes; each of them goes on, by the newest ledger."""
    kind, book, made = KINDS["group by"], tmp_path / "book", []
    running = kind.start(tmp_path / "state", book, 0)
    shown = [next(running)]

    def copy_on():
        while len(shown) < STEPS:
            made.append(tmp_path / f"backup-{len(made)}")
            back_up(tmp_path / "state", made[-1])

    copying = Thread(target=copy_on)
    copying.start()
    shown.extend(running)
    copying.join()
    known = dict(map(kind.shown, shown))
    shutil.rmtree(tmp_path / "state")
    for backup in made[:: max(1, len(made) // 3)]:
        folder = tmp_path / f"of-{backup.name}"
        put_back(backup, folder)
        assert find_faults(folder, secret=Secret.of(SECRET)) == []
        again = some(kind, folder, book, STEPS)
        assert all(again[key] == known[key] for key in again)
    assert made


@pytest.mark.parametrize("s", [1, 3] if not is_long() else range(1, 7))
def test_a_live_directory_is_read_again_to_where_each_step_had_read_it(tmp_path, s):
    """Arrivals are in the ledger: a file that came late stays in its step."""
    book = tmp_path / "book"
    clock = ScriptedClock(0, arrivals(tmp_path / "in"))
    with start_live(tmp_path, clock, ledger=book) as running:
        tables = iter(running)
        for _ in itertools.takewhile(lambda _: running.steps_done < s, tables):
            pass
        back_up(tmp_path / "state", tmp_path / "backup")
        for _ in itertools.takewhile(lambda _: running.steps_done < 5, tables):
            pass
    before = published(tmp_path)
    shutil.rmtree(tmp_path / "state")
    (restored,) = put_back(tmp_path / "backup", tmp_path / "new").values()
    assert restored.told == 5
    shutil.rmtree(tmp_path / "out")
    clock = ScriptedClock(clock.time, arrivals(tmp_path / "in"))
    start_live(tmp_path, clock, state=tmp_path / "new", ledger=book).finish()
    after = published(tmp_path)

    assert all(after[name] == before[name] for name in after.keys() & before.keys())
    lost = {window for each in read_about(tmp_path / "new")["abandoned"] for window in range(*each)}
    assert lost == {*restored.final, *restored.lost}
    assert {int(name.split("-w")[1][:6]) for name in LAST if name not in after} == lost


def test_a_live_series_is_repeated_too(tmp_path):
    """Its noise comes from the secret and the run, so nothing of it is lost."""
    book = tmp_path / "book"

    def go_on(state, clock):
        (tmp_path / "in").mkdir(exist_ok=True)
        return dps.run(
            LIVE_SERIES, source=tmp_path / "in", live=True, state=state, secret=SECRET,
            sink=tmp_path / "out", clock=clock, options=options(every=2), ledger=book,
        )  # fmt: skip

    clock = ScriptedClock(0, arrivals(tmp_path / "in"))
    with go_on(tmp_path / "state", clock) as running:
        tables = iter(running)
        next(tables)
        back_up(tmp_path / "state", tmp_path / "backup")
        list(itertools.islice(tables, 3))
    before = published(tmp_path)
    shutil.rmtree(tmp_path / "state")
    put_back(tmp_path / "backup", tmp_path / "new")
    shutil.rmtree(tmp_path / "out")
    go_on(tmp_path / "new", ScriptedClock(clock.time, arrivals(tmp_path / "in"))).finish()
    after = published(tmp_path)

    assert after.items() >= before.items()
    assert sum(name.endswith(".parquet") for name in after) == 6


def test_what_cannot_go_on_begins_with_the_next_period(tmp_path, monkeypatch):
    """Units are users within three hours: a run that takes over costs nothing more."""
    book, kind = tmp_path / "book", KINDS["group by"]
    lose(tmp_path, kind, 1, 2, book)
    before = spent(book)
    put_back(tmp_path / "backup.tar", tmp_path / "new")
    other = alter(rows(0), 1, "drop")
    monkeypatch.setattr(lost_files, "rows", lambda extra: other)
    with pytest.raises(NoiseReuse, match="--take-over from the next one on"):
        some(kind, tmp_path / "new", book, STEPS)
    anew = dps.run(
        Grouped.query, source=other, state=tmp_path / "anew", secret=SECRET, ledger=book,
        options=Grouped.options, take_over=True,
    )  # fmt: skip
    releases = iter(anew)
    tables = [next(releases)]
    back_up(tmp_path / "anew", tmp_path / "later.tar")
    tables += releases
    assert [table["window_start"][0].as_py().hour for table in tables] == [3, 3, 3]
    assert spent(book)[0] == before[0]
    shutil.rmtree(tmp_path / "anew")  # and the one that took over can be put back, too
    put_back(tmp_path / "later.tar", tmp_path / "anew")
    again = dps.run(
        Grouped.query, source=other, state=tmp_path / "anew", secret=SECRET, ledger=book,
        options=Grouped.options,
    ).finish()  # fmt: skip
    assert again.steps_done == 3
    assert again.beginning.takes_over
    assert spent(book)[0] == before[0]
    with pytest.raises(StateError, match="was ended for good"):
        put_back(tmp_path / "backup.tar", tmp_path / "third")


def from_pipe(place, state, now, releases, book, between=lambda _: None):
    """A run over the standard input of a process that ends after some releases; and the time."""
    pipe = Pipe()
    events = [(t - 1, lambda t=t: pipe.feed(lines(t))) for t in TIMES]
    clock = ScriptedClock(now, events)
    facts = {"source": pipe.source, "live": False, "state": state, "ledger": book}
    running = start_live(place, clock, **facts, options=options(every=1))
    for number, _ in enumerate(itertools.islice(running, releases), 1):
        between(number)
    running.close()
    pipe.close()
    return clock.time


@pytest.mark.parametrize("saved", [True, False])
def test_rows_that_can_be_read_once(tmp_path, saved):
    """They are kept in the state: what came since a backup is read again if that part was saved.

    Otherwise nobody has the rows any more, and the steps that have read them are not repeated from
    others.
    """
    state, book, new = tmp_path / "state", tmp_path / "book", tmp_path / "new"

    def copy_after_one(number):
        if number == 1:
            back_up(state, tmp_path / "backup")

    now = from_pipe(tmp_path, state, 0, 3, book, copy_after_one)
    before = published(tmp_path)
    put_back(tmp_path / "backup", new)
    if saved:
        for path in (state / "arrived").iterdir():
            shutil.copy(path, new / "arrived")
        from_pipe(tmp_path, new, now, 100, book)
        assert len(published(tmp_path)) > len(before)
    else:
        with pytest.raises(RowsLost, match="was read before and is not in"):
            from_pipe(tmp_path, new, now, 100, book)
    assert published(tmp_path).items() >= before.items()


def test_runs_of_a_pipeline_are_found(tmp_path):
    """One directory, or one for each query."""
    with pytest.raises(StateError, match="holds no run"):
        runs_in(tmp_path)
    with pytest.raises(DpstreamError, match="no backup at"):
        put_back(tmp_path / "none", tmp_path / "new")


def test_a_rotation_changes_no_release_and_the_old_secret_opens_no_later_key(tmp_path):
    """Open windows keep their noise; the control is a key from before."""
    kind, book, folder = KINDS["group by"], tmp_path / "book", tmp_path / "state"
    running = kind.start(folder, book, 0)
    shown = dict(kind.shown(one) for one in itertools.islice(running, 2))
    running.close()
    run, old = read_about(folder)["run"], Secret.of(SECRET)
    assert WindowKeys(folder / "windows", old, run=run).get(0)
    for number in (1, 2):
        place, windows = rotate_keys(folder, given_secret=SECRET)
        assert (place.name, windows) == (f"state.keys-{number}.secret", [0])
    assert [path.name for path in tmp_path.glob("*.secret")] == ["state.keys-2.secret"]
    again = some(kind, folder, book, 2)
    assert all(again[key] == shown[key] for key in again.keys() & shown.keys())
    assert find_faults(folder, secret=old) == []
    later = [int(path.stem) for path in (folder / "windows").glob("*.key")]
    assert 1 in later
    for window in later:
        with pytest.raises(StateError, match="does not open"):
            WindowKeys(folder / "windows", old, run=run).get(window)
    some(KINDS["series"], tmp_path / "series", None, 1)
    with pytest.raises(StateError, match="comes from its secret alone"):
        rotate_keys(tmp_path / "series", given_secret=SECRET)


def test_a_rotation_that_is_killed_goes_on(tmp_path, monkeypatch):
    """Some keys are wrapped by the new secret and some by the one before."""
    kind, book, folder = KINDS["group by"], tmp_path / "book", tmp_path / "state"
    shown = some(kind, folder, book, 4)
    rotate_keys(folder, given_secret=SECRET)
    with monkeypatch.context() as patch:
        patch.setattr(window_keys, "erase_part", interrupt)
        with pytest.raises(KeyboardInterrupt):
            rotate_keys(folder, given_secret=SECRET)
    again = some(kind, folder, book, 2)
    assert all(again[key] == shown[key] for key in again.keys() & shown.keys())
    rotate_keys(folder, given_secret=SECRET)

    assert len(list(tmp_path.glob("*.secret"))) == 1
    assert find_faults(folder, secret=Secret.of(SECRET)) == []


def test_a_rotation_makes_a_secret_of_its_own(tmp_path):
    """The one of a run that was in this directory before may have been read."""
    kind, book, folder = KINDS["group by"], tmp_path / "book", tmp_path / "state"
    some(kind, folder, book, 2)
    left, _ = rotate_keys(folder, given_secret=SECRET)
    before = left.read_bytes()
    shutil.rmtree(folder)
    some(kind, folder, tmp_path / "other", 2)
    place, _ = rotate_keys(folder, given_secret=SECRET)

    assert place.read_bytes() != before
    assert find_faults(folder, secret=Secret.of(SECRET)) == []


def interrupt(*_):
    raise KeyboardInterrupt


def test_the_drill(tmp_path):
    """Kill, lose the disk, put yesterday's backup back on another path, kill, go on.

    No release changes, nothing is charged twice, and what is missing is what was listed.
    """
    state = {"at": "state"}

    def go_on(place):
        return start(place, state=place / state["at"], ledger=place / "book", fixed=False)

    facts = {"published": published, "charges": lambda place: charges(place / "book")}
    kind = KindOfRun(prepare=lambda place: write(place, table()), start=go_on, **facts)
    kind.prepare(tmp_path)
    for releases in (3, 4):
        assert AfterReleases(releases).strike(kind, tmp_path)
        if releases == 3:
            back_up(tmp_path / "state", tmp_path / "yesterday.tar.gz")
    before = published(tmp_path)
    shutil.rmtree(tmp_path / "state")
    (restored,) = put_back(tmp_path / "yesterday.tar.gz", tmp_path / "elsewhere").values()
    (tmp_path / "state.secret").rename(tmp_path / "elsewhere.secret")
    state["at"] = "elsewhere"
    assert BeforeDiskOperation(40).strike(kind, tmp_path)
    kind.finish(tmp_path)
    after = published(tmp_path)

    assert after.items() >= before.items()
    assert charges(tmp_path / "book") == 1
    releases = {
        f"clicks-w{due.window:06d}-t{due.release:06d}.parquet": due.window
        for step in range(query().schedule.steps)
        for due in query().schedule.due(step)
    }
    missing = {window for name, window in releases.items() if name not in after}
    assert missing <= {*restored.final, *restored.lost}
    assert len(after) > len(before)


def test_of_several_runs_none_is_fenced_if_one_cannot_be_put_back(tmp_path, monkeypatch):
    """The second one's steps since the backup are not known: the first is left as it was."""
    book, state = tmp_path / "book", tmp_path / "state"
    with closing(dps.Ledger(book)) as ledger:
        ledger.open("stream", Grouped.query.promise(epsilon=10, delta=1e-5))
    for name in ("one", "two"):
        some(KINDS["group by"], state / name, book, 2)
    back_up(state, tmp_path / "backup.tar")
    for name in ("one", "two"):
        some(KINDS["group by"], state / name, book, 4)
    with closing(dps.Ledger(book)) as ledger:
        runs = {name: read_about(state / name)["run"].hex() for name in ("one", "two")}
        epochs = {run: ledger.known(run).epoch for run in runs.values()}
    shutil.rmtree(state)
    steps_of = dps.Ledger.steps_of

    def forgets(ledger, run):
        return ({}, {}) if run == runs["two"] else steps_of(ledger, run)

    monkeypatch.setattr(dps.Ledger, "steps_of", forgets)
    with pytest.raises(StateError, match="is not known"):
        put_back(tmp_path / "backup.tar", state)
    with closing(dps.Ledger(book)) as ledger:
        assert {run: ledger.known(run).epoch for run in runs.values()} == epochs
    put_back(tmp_path / "backup.tar", state, without=["two"])
