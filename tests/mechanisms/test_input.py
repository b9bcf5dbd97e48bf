"""Bad input: one clear error each."""

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import dpstream as dps
from dpstream.errors import InvalidInput, InvalidParameter, SecretError
from dpstream.mechanisms import Naive, Sample, Uniform

SAMPLE = Sample(epsilon=1, window=3)


@pytest.mark.parametrize("epsilon", [0, -1, float("nan"), float("inf"), "much", None, True, [1]])
def test_epsilon_must_be_a_positive_number(epsilon):
    """Anything else is refused at construction, naming the parameter."""
    with pytest.raises(InvalidParameter, match="epsilon"):
        Uniform(epsilon=epsilon, window=3)


@pytest.mark.parametrize("window", [0, -3, 2.5, float("nan"), "w", None, True])
def test_window_must_be_a_whole_number(window):
    """A window of no steps protects nothing."""
    with pytest.raises(InvalidParameter, match="window must be a whole number of at least 1"):
        Sample(epsilon=1, window=window)


def test_numbers_of_every_usual_kind_are_taken():
    """NumPy scalars, strings and integers mean the same as Python floats."""
    assert Sample(epsilon=np.float64(0.5), window=np.int64(3)) == Sample(epsilon="1/2", window=3)


@pytest.mark.parametrize(
    ("range_", "message"),
    [
        ({"lo": 1, "hi": 1}, "lo < hi"),
        ({"lo": 2, "hi": 1}, "lo < hi"),
        ({"lo": 0, "hi": float("nan")}, "hi must be a finite number"),
        ({"lo": 0, "hi": 1, "quantum": 0}, "quantum must be greater than 0"),
        ({"lo": 0, "hi": 1, "quantum": 0.3}, "must be a multiple of quantum"),
    ],
)
def test_the_public_range_lies_on_the_grid(range_, message):
    """lo, hi and quantum are checked at construction."""
    with pytest.raises(InvalidParameter, match=message):
        Naive(epsilon=1, **range_)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([[1, 2], [3]], r"row 1 has 1"),
        ([[1, 2], 3], "row 1 has 0"),
        ([1, 2, -3], "row 2, bin 0 is negative: -3"),
        ([1, 2.5], "row 1, bin 0 is not whole: 2.5"),
        ([1, float("nan")], "row 1, bin 0 is nan"),
        ([1, float("inf")], "row 1, bin 0 is inf"),
        ([2**60], "too large"),
        (["a", "b"], "must be numbers; got dtype"),
        ([None, 1], "must be numbers; got dtype"),
        (np.zeros((2, 2, 2)), "steps x bins; got shape"),
        (np.zeros((2, 0)), "steps x bins; got shape"),
        (7, "steps x bins; got shape"),
    ],
)
def test_data_that_is_no_histogram_is_refused(data, message):
    """The error names the first offending place; nothing is published."""
    with pytest.raises(InvalidInput, match=message):
        dps.release(SAMPLE, data)


def test_a_step_must_have_the_same_bins():
    """Bins do not appear or vanish in the middle of a stream."""
    runner = dps.Runner(SAMPLE)
    runner.step([1, 2])
    with pytest.raises(InvalidInput, match="2 bins, as the first one; got 3"):
        runner.step([1, 2, 3])


def test_bad_data_charge_nothing():
    """Data are checked before the ledger is touched."""
    ledger = dps.Ledger()
    with pytest.raises(InvalidInput):
        dps.release(SAMPLE, [1, -1], ledger=ledger)

    assert ledger.report() == []


def monthly(rows):
    return pd.DataFrame({"date": pd.to_datetime(rows), "x": range(len(rows))})


def test_months_and_weeks_are_even_steps():
    """Calendar months count as even, so do equal numbers of days."""
    months = monthly(["2024-01-01", "2024-02-01", "2024-03-01", "2024-04-01"])
    weeks = monthly(["2024-01-01", "2024-01-08", "2024-01-15"])

    assert len(dps.release(SAMPLE, months)) == 4
    assert len(dps.release(SAMPLE, weeks, time_column="date")) == 3


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            ["2024-01-01", "2024-02-01", "2024-04-01", "2024-05-01"],
            "row 2 .2024-04-01.* not follow",
        ),
        (
            ["2024-01-01", "2024-01-08", "2024-01-15", "2024-01-29"],
            "row 3 .2024-01-29.* not follow",
        ),
        (["2024-01-01", "2024-03-01", "2024-02-01"], "row 2 has 2024-02-01.* after 2024-03-01"),
        (["2024-01-01", "2024-01-01"], "must increase"),
        (["2024-01-01", None], "no time in row 1"),
    ],
)
def test_gaps_and_disorder_in_time_are_refused(rows, message):
    """A missing or misplaced step would shift the protected window."""
    with pytest.raises(InvalidInput, match=message):
        dps.release(SAMPLE, monthly(rows))


def test_tables_of_every_kind_give_the_same_series():
    """pandas, Polars, Arrow, NumPy and lists are one and the same to a release."""
    columns = {"a": [1, 2, 3], "b": [4, 5, 6]}
    fixed = {"secret": bytes(32), "run_id": bytes(16)}
    series = [
        dps.release(SAMPLE, data, **fixed)
        for data in (
            pd.DataFrame(columns),
            pl.DataFrame(columns),
            pa.table(columns),
            np.array([[1, 4], [2, 5], [3, 6]]),
            [[1, 4], [2, 5], [3, 6]],
        )
    ]

    assert all((s.values == series[0].values).all() for s in series)
    assert series[0].names == series[1].names == series[2].names == ["a", "b"]
    assert list(series[0].to_pandas().columns) == series[1].to_polars().columns
    assert list(series[0].to_polars().columns)[:3] == ["step", "a", "a_stddev"]


def test_times_come_back_in_every_kind_of_table():
    """A time column goes through a release and into pandas and Polars."""
    rows = {"day": ["2024-01-01", "2024-01-02", "2024-01-03"], "a": [1, 2, 3]}
    for data in (
        pl.DataFrame(rows).with_columns(pl.col("day").str.to_date()),
        pd.DataFrame(rows).astype({"day": "datetime64[s]"}),
    ):
        series = dps.release(SAMPLE, data)
        assert str(series.to_polars()["time"][1]).startswith("2024-01-02")
        assert str(series.to_pandas()["time"][1]).startswith("2024-01-02")


def test_a_mechanism_comes_first():
    """A name or swapped arguments get a sentence, not an attribute error."""
    with pytest.raises(InvalidParameter, match="takes a mechanism first"):
        dps.release("sample", [1, 2])


def test_a_series_longer_than_its_counter_spends_nothing(tmp_path):
    """The number of steps is public: it is checked before the budget is touched."""
    ledger = dps.Ledger(tmp_path / "ledger")
    with pytest.raises(InvalidInput, match="nothing was spent"):
        dps.release(dps.mechanisms.BltCounter(rho=1, steps=3), [1] * 7, ledger=ledger)
    assert ledger.report() == []


def test_a_text_column_is_not_a_bin():
    """The error says which column, and what to do with it."""
    with pytest.raises(InvalidInput, match="column 'name' is not numeric"):
        dps.release(SAMPLE, pd.DataFrame({"name": ["x"], "n": [1]}))
    with pytest.raises(InvalidInput, match="no column 'when'"):
        dps.release(SAMPLE, pd.DataFrame({"n": [1]}), time_column="when")


@pytest.mark.parametrize("names", [("n", "step"), ("n", "paid"), ("n", "n_stddev")])
def test_a_column_name_of_the_release_is_refused(names):
    """A bin must not be overwritten by a column that the release adds."""
    with pytest.raises(InvalidInput, match=f"column '{names[1]}' would collide"):
        dps.release(SAMPLE, pd.DataFrame({name: [1, 2] for name in names}))


def test_a_secret_that_others_may_read_is_refused(tmp_path):
    """Mode 0644 is refused with the command that mends it."""
    path = tmp_path / "secret"
    dps.release(SAMPLE, [1], secret=path)
    path.chmod(0o644)
    with pytest.raises(SecretError, match="chmod 600"):
        dps.release(SAMPLE, [1], secret=path)


def test_a_short_secret_is_refused():
    """Bytes must be a whole key; a path must not be given as bytes."""
    with pytest.raises(SecretError, match="32 bytes; got 6 bytes"):
        dps.release(SAMPLE, [1], secret=b"secret")


def test_an_empty_stream_publishes_nothing():
    """No steps, no releases, no charges."""
    series = dps.release(SAMPLE, np.zeros((0, 2)))

    assert len(series) == 0
