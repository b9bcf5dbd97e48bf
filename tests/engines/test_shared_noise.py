"""Noise that public groups share by themselves: runs that began without it, books, queries."""

from dataclasses import replace

import pyarrow.parquet as pq
import pytest

import dpstream as dps
from dpstream.engines.query_run import KIND
from dpstream.errors import StateError
from dpstream.explanation.alternatives import alternatives
from dpstream.privacy.state.run_directory import read_about
from dpstream.query.noise_plan import plan_query
from tests.support.runs import (
    SHARING,
    SHARING_CHOSEN,
    break_off,
    published,
    start,
    table,
    whole,
    write,
)

ALONE = replace(SHARING, correlated_noise=False)


def test_a_run_that_began_without_it_goes_on_without_it(tmp_path):
    """As runs of earlier versions: the same bytes; asked for by name it is another query."""
    unbroken = whole(tmp_path / "whole", ALONE)
    write(tmp_path / "broken", table())
    break_off(tmp_path / "broken", 4, ALONE)
    with pytest.raises(StateError, match="correlated_noise"):
        start(tmp_path / "broken", replace(SHARING, correlated_noise=True)).finish()
    start(tmp_path / "broken", SHARING).finish()

    assert published(tmp_path / "broken") == unbroken
    assert published(tmp_path / "broken") != whole(tmp_path / "sharing", SHARING)


@pytest.mark.parametrize("asked", [SHARING, SHARING_CHOSEN], ids=["given", "chosen"])
def test_a_run_that_began_with_it_goes_on_with_it(tmp_path, asked):
    """Whether it was asked for or applies by itself is the same query; without it is another."""
    unbroken = whole(tmp_path / "whole", asked)
    write(tmp_path / "broken", table())
    break_off(tmp_path / "broken", 4, asked)
    with pytest.raises(StateError, match="correlated_noise"):
        start(tmp_path / "broken", replace(asked, correlated_noise=False)).finish()
    start(tmp_path / "broken", replace(asked, correlated_noise=True)).finish()

    assert published(tmp_path / "broken") == unbroken


def bars(place):
    """The error bars of every release, by file."""
    files = sorted((place / "out").glob("*.parquet"), key=lambda path: path.name)
    columns = ["page", "clicks_stddev", "seconds_stddev"]
    return [pq.read_table(path, columns=columns).sort_by("page") for path in files]


def test_a_book_of_finer_periods_gets_noise_of_its_own(tmp_path):
    """In one of half its periods: restarted too, and charged as a query without it is."""
    half = {"window": dps.Tumble("2 hours"), "privacy_unit_period": "2 hours"}
    charged = {}
    for name, asked in (("sharing", SHARING), ("alone", ALONE)):
        place, book = tmp_path / name, dps.Ledger(tmp_path / f"book of {name}")
        shared = {"ledger": book.path, "fixed": False}
        book.open("stream", replace(ALONE, **half).promise(epsilon=24, delta=1e-3))
        write(place, table())
        break_off(place, 4, asked, **shared)
        assert "correlated_noise" not in read_about(place / "state", kind=KIND)["facts"]
        start(place, asked, **shared).finish()
        (line,) = dps.Ledger(book.path).report()[0]["spent_on"]
        charged[name] = line["amount"]
    whole(tmp_path / "shared", SHARING)

    assert bars(tmp_path / "sharing") == bars(tmp_path / "alone") != bars(tmp_path / "shared")
    assert charged["sharing"] == charged["alone"]


def test_two_queries_on_one_book(tmp_path):
    """Neither changes what the other publishes, and both are charged as one alone is."""
    terms = plan_query(SHARING).terms()
    book = dps.Ledger(tmp_path / "book")
    book.open("stream", SHARING.promise(epsilon=24, delta=1e-3))
    shared = {"ledger": book.path, "fixed": False}
    for name in ("one", "other"):
        write(tmp_path / name, table())
    other = iter(start(tmp_path / "other", replace(SHARING, name="other"), **shared))
    next(other)
    break_off(tmp_path / "one", 3, SHARING, **shared)
    next(other)
    start(tmp_path / "one", SHARING, **shared).finish()
    list(other)
    whole(tmp_path / "whole", SHARING)

    assert bars(tmp_path / "one") == bars(tmp_path / "other") == bars(tmp_path / "whole")
    assert [line["amount"] for line in dps.Ledger(book.path).report()[0]["spent_on"]] == [
        str(terms.total)
    ] * 2


def test_explain_says_so():
    """What is alike, and how to switch it off; beside the settings, what that would do."""
    told = dps.explain(SHARING)
    shared = [each["derivation"] for each in told.measures if "alike in all" in each["derivation"]]
    assert len(shared) == 1  # rows; values about their middle have noise of their own
    assert all("correlated_noise = FALSE" in words for words in shared)
    bars, alone = (dps.explain(query).columns[0] for query in (SHARING, ALONE))
    assert bars["last"] < 0.85 * alone["last"]
    assert bars["first"] == pytest.approx(alone["first"], rel=1e-4)
    found = {one.setting: one.noise for one in alternatives(SHARING)}
    assert found["correlated_noise = FALSE"] == pytest.approx(alone["last"])
