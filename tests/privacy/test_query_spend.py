"""A query's stream to noise: ledger first, then durable input, then normals, each of them once."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import pytest

from dpstream.errors import BudgetExceeded, InvalidParameter, LedgerError, NoiseReuse, StateError
from dpstream.privacy.accounting.accountant import FloatError
from dpstream.privacy.accounting.promises import promise
from dpstream.privacy.ledger.charges import Terms
from dpstream.privacy.ledger.ledger import Ledger
from dpstream.privacy.query_spend import QuerySpend
from dpstream.privacy.state import MemoryWindowKeys, Secret, WindowKeys

SECRET, RUN = Secret(bytes(range(100, 132))), bytes(range(16))
ERROR = FloatError(xi=Fraction(1, 10**6), tau=Fraction(1, 10**18))
PRICE = {
    "amount": Fraction(1, 4),
    "delta_slack": Fraction(1, 10**10),
    "error": ERROR,
    "digest": "aa",
}
IDS = np.arange(40, dtype=np.uint64).reshape(20, 2)


def spend(ledger=None, keys=None, **more):
    """A query that has not paid, with windows' keys that another one can derive again."""
    if ledger is None:
        ledger = Ledger()
        ledger.open("clicks", promise(epsilon=6, delta=1e-9))
    keys = keys or MemoryWindowKeys(derived_for_tests=SECRET)
    named = {"run": RUN, "query": "by url", "dataset": "clicks"} | more
    return QuerySpend(ledger=ledger, keys=keys, **named)


def ready(step=0, price=PRICE, **more):
    made = spend(**more)
    made.pay(**price)
    made.begin(step)
    return made


def drawn(query, *, window=3, column="users", part=0, release=1, purpose="step", ids=IDS, each=1):
    stream = query.noise_stream(window=window, column=column, part=part)
    return stream.normals(ids, release=release, purpose=purpose, each=each)


def test_nothing_is_drawn_before_the_ledger_and_the_log():
    """No stream before the charge, no draw before the input is durable."""
    query = spend()
    for early in (lambda: query.begin(0), lambda: query.noise_stream(window=0, column="n", part=0)):
        with pytest.raises(StateError, match="paid"):
            early()
    query.pay(**PRICE)
    stream = query.noise_stream(window=0, column="n", part=0)
    with pytest.raises(StateError, match="begin"):
        stream.normals(IDS, release=1, purpose="step")
    query.begin(0)

    assert stream.normals(IDS, release=1, purpose="step").shape == (20, 1)


def test_a_refused_charge_opens_no_stream():
    """Beyond the book's mu^2, tail or drift nothing can be drawn."""
    for beyond in (
        {"amount": Fraction(2)},
        {"delta_slack": Fraction(1, 10**9)},
        {"error": FloatError(xi=Fraction(1), tau=Fraction(0))},
        {"error": FloatError(xi=Fraction(0), tau=Fraction(1, 10**11))},  # times e^6
    ):
        query = spend()
        with pytest.raises(BudgetExceeded):
            query.pay(**PRICE | beyond)
        with pytest.raises(StateError):
            query.noise_stream(window=0, column="n", part=0)


def test_one_charge_counts_all_of_it_once(tmp_path):
    """mu^2, tail with the lost mass at the book's epsilon, and drift; a replay adds nothing."""
    ledger = Ledger(tmp_path / "ledger")
    ledger.open("clicks", promise(epsilon=6, delta=1e-9))
    for book in (ledger, ledger, Ledger(tmp_path / "ledger")):
        again = spend(ledger=book)
        again.pay(**PRICE)
        again.pay(**PRICE)
    (report,) = ledger.report()

    assert report["spent"] == "1/4"
    assert Fraction(report["drift"]["spent"]) == ERROR.xi
    assert float(Fraction(report["tail"]["spent"])) == pytest.approx(1e-10 + 404.4288e-18)
    spend(ledger=ledger, query="another").pay(**PRICE)
    spend(ledger=ledger, run=bytes(16)).pay(**PRICE)
    assert ledger.report()[0]["spent"] == "3/4"


def test_a_run_keeps_its_plan():
    """The same run and query with another amount or another plan is refused."""
    ledger = Ledger()
    ledger.open("clicks", promise(epsilon=6, delta=1e-9))
    spend(ledger=ledger).pay(**PRICE)
    for other, error in (
        ({"amount": Fraction(1, 5)}, LedgerError),
        ({"delta_slack": Fraction(1, 10**11)}, LedgerError),
        ({"digest": "bb"}, NoiseReuse),
        ({"digest": ""}, InvalidParameter),
        ({"amount": Fraction(0)}, InvalidParameter),
    ):
        with pytest.raises(error):
            spend(ledger=ledger).pay(**PRICE | other)


@pytest.mark.parametrize(
    "terms",
    [
        Terms(unit="event", total=1, measure="mu_squared"),
        Terms(unit="user", total=1, measure="rho"),
        Terms(unit="w_event", window=3, total=1),
    ],
)
def test_only_a_book_of_users_in_gdp_will_do(terms):
    """Anything else would count another unit, or another measure."""
    ledger = Ledger()
    ledger.open("clicks", terms)
    with pytest.raises(InvalidParameter, match="book of users"):
        spend(ledger=ledger)
    with pytest.raises(InvalidParameter, match="no book"):
        spend(ledger=ledger, dataset="other")


def test_a_replay_draws_the_same_noise():
    """Another process with the same run, keys and plan, also with other buckets of keys."""
    whole = drawn(ready())
    parts = ready(step=7)
    halves = [drawn(parts, part=part, ids=IDS[part::2]) for part in (0, 1)]

    assert (whole == drawn(ready())).all()
    assert (whole[0::2] == halves[0]).all()
    assert (whole[1::2] == halves[1]).all()


@pytest.mark.parametrize(
    "other",
    [
        {"run": bytes(16)},
        {"query": "by page"},
        {"price": PRICE | {"digest": "bb"}},
        {"keys": MemoryWindowKeys()},
    ],
)
def test_another_run_query_plan_or_key_has_other_noise(other):
    """Nothing is shared."""
    assert not np.isin(drawn(ready(**other)), drawn(ready())).any()


@pytest.mark.parametrize(
    "other",
    [
        {"window": 4},
        {"column": "clicks"},
        {"release": 2},
        {"purpose": "join"},
        {"part": 1, "ids": IDS + np.uint64(1)},
        {"column": "c" * 62},
        {"column": "c" * 300},
        {"column": "c" * 301},
    ],
)
def test_every_place_has_noise_of_its_own(other):
    """Window, column (of any length), release, purpose and key: independent normals."""
    assert not np.isin(drawn(ready(), **other), drawn(ready(), each=3)).any()


def test_long_names_do_not_meet():
    """A long name is hashed, and no short name can look like its hash."""
    query = ready()
    hashed = "#" + hashlib.sha256(b"c" * 63).hexdigest()
    names = ["c" * 62, "c" * 63, "c" * 64, "é" * 31, "é" * 32, "", "#", hashed[:62], hashed[:63]]
    first = {drawn(query, column=name)[0, 0] for name in names}

    assert len(first) == len(names)


def test_normals_are_standard():
    """Mean 0 and variance 1, rows and columns independent (each bound fails once in 10^7)."""
    ids = np.random.default_rng(1).integers(0, 2**63, (20_000, 2)).astype(np.uint64)
    z = drawn(ready(), ids=ids, each=3)
    bound = 5.4 / np.sqrt(len(ids))

    assert np.abs(z.mean(axis=0)).max() < bound
    assert np.abs(np.cov(z.T) - np.eye(3)).max() < bound * np.sqrt(2)
    assert np.abs(np.cov(1.1 * z.T) - np.eye(3)).max() > bound * np.sqrt(2)  # control


def test_releases_only_move_forward():
    """A second draw at a release, or an earlier one, would meet other data."""
    stream = ready().noise_stream(window=0, column="n", part=0)
    stream.normals(IDS, release=2, purpose="step")
    stream.normals(IDS, release=2, purpose="join")
    for release in (1, 2):
        with pytest.raises(NoiseReuse):
            stream.normals(IDS, release=release, purpose="step")
    stream.normals(IDS, release=3, purpose="step")
    for wrong in ({"release": 0}, {"release": 9, "each": 0}, {"release": 9, "ids": IDS[0]}):
        with pytest.raises(InvalidParameter):
            stream.normals(**{"ids": IDS, "purpose": "step"} | wrong)


def test_schedule_steps_only_move_forward():
    """Going back is a replay, which starts from the state directory."""
    query = ready(step=4)
    for step in (4, 3):
        with pytest.raises(NoiseReuse, match="only move forward"):
            query.begin(step)


def test_a_place_has_one_stream():
    """Two streams to one place would give the same normals to different data."""
    query = ready()
    query.noise_stream(window=0, column="n", part=0)
    with pytest.raises(NoiseReuse, match="stream already"):
        query.noise_stream(window=0, column="n", part=0)


def test_a_final_window_has_no_noise(tmp_path):
    """Its streams close, its key leaves the disk, and it is never opened again."""
    keys = WindowKeys(tmp_path / "keys", SECRET)
    query = ready(keys=keys)
    stream = query.noise_stream(window=0, column="n", part=0)
    other = query.noise_stream(window=1, column="n", part=0)
    query.erase(0)

    with pytest.raises(StateError, match="window 0 is final"):
        stream.normals(IDS, release=1, purpose="step")
    with pytest.raises(StateError, match="window 0 is final"):
        query.noise_stream(window=0, column="n", part=0)
    assert other.normals(IDS, release=1, purpose="step").shape == (20, 1)
    assert not (tmp_path / "keys" / "0.key").exists()


def test_a_fork_is_refused():
    """A child would draw the same noise for other data."""
    query = ready()
    stream = query.noise_stream(window=0, column="n", part=0)
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (
            lambda: stream.normals(IDS, release=1, purpose="step"),
            lambda: query.begin(9),
            lambda: query.noise_stream(window=1, column="n", part=0),
        ):
            try:
                call()
            except StateError:
                refused += 1
        os._exit(refused)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


def test_threads_use_streams_at_once():
    """Sixteen streams in four threads give what they give one after another."""
    places = [(window, part) for window in range(4) for part in range(4)]
    ids = np.arange(8_000, dtype=np.uint64).reshape(-1, 2)

    def draw(query, place):
        window, part = place
        stream = query.noise_stream(window=window, column="n", part=part)
        steps = [
            stream.normals(ids[part::4], release=release, purpose="step") for release in (1, 2, 3)
        ]
        return np.concatenate(steps)

    one, many = ready(), ready()
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda place: draw(many, place), places))

    assert all((draw(one, p) == t).all() for p, t in zip(places, together, strict=True))


def test_one_stream_used_by_many_threads_draws_once():
    """Of sixteen calls for one release a single one succeeds."""
    stream = ready().noise_stream(window=0, column="n", part=0)

    def attempt(_):
        try:
            return len(stream.normals(IDS, release=1, purpose="step"))
        except NoiseReuse:
            return 0

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(attempt, range(16))) == len(IDS)
