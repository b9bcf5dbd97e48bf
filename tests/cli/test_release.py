"""`dpstream release`: what it publishes, repeats and extends."""

import csv
import io
import json
import shutil
from datetime import datetime
from zoneinfo import ZoneInfo

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

SAMPLE = ("--mechanism", "sample", "--window", "3", "--epsilon", "1")


def test_stdout_carries_the_series_and_nothing_else(run, visits):
    """A pipe reads clean CSV; notes are on stderr."""
    done = run("release", str(visits), *SAMPLE)

    rows = [*csv.DictReader(io.StringIO(done.out))]
    assert done.code == 0
    assert [row["paid"] for row in rows] == ["true", "false", "false"] * 2
    assert [*rows[0]] == [
        "step", "time", "north", "north_stddev", "south", "south_stddev", "paid", "held",
    ]  # fmt: skip
    assert rows[5]["time"] == "2024-03-06"
    assert "not shared with others" in done.err


def test_json_holds_parameters_budget_and_rows(run, visits):
    """A script finds everything in one document."""
    done = run("release", str(visits), *SAMPLE, "--json")

    found = done.json
    assert (found["steps"], found["paid_steps"], found["new_charges"]) == (6, 2, 2)
    assert found["parameters"] == {"epsilon": "1", "window": "3"}
    assert found["columns"] == ["north", "south"]
    assert len(found["rows"]) == 6
    assert all("note" in json.loads(line) for line in done.err.splitlines())


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_every_output_format_holds_the_same_values(run, visits, folder, suffix):
    """The run is repeated from its state, so that all formats show one release."""
    shown = run("release", str(visits), *SAMPLE, "--state", "state", "--json").json["rows"]
    done = run("release", str(visits), *SAMPLE, "--state", "state", "--out", f"out.{suffix}")

    path = folder / f"out.{suffix}"
    if suffix == "csv":
        north = [int(row["north"]) for row in csv.DictReader(path.open())]
    elif suffix == "jsonl":
        north = [json.loads(line)["north"] for line in path.open()]
    else:
        north = pq.read_table(path)["north"].to_pylist()
    assert done.out == ""
    assert north == [row["north"] for row in shown]


def test_parquet_input_with_a_time_column(run, folder):
    """Dates of an Arrow table are the time, not a bin."""
    days = pa.array(["2024-03-01", "2024-03-02"]).cast(pa.date32())
    pq.write_table(pa.table({"day": days, "visits": [12, 15]}), folder / "x.parquet")

    rows = run("release", "x.parquet", *SAMPLE, "--json").json["rows"]

    assert [row["time"] for row in rows] == ["2024-03-01", "2024-03-02"]
    assert "visits" in rows[0]


def test_columns_and_time_can_be_named(run, folder):
    """Only what is named is published; whole numbers serve as time too."""
    (folder / "x.csv").write_text("week,a,b,region\n7,1,2,west\n8,3,4,west\n")

    done = run("release", "x.csv", *SAMPLE, "--column", "b", "--time-column", "week", "--json")

    assert done.json["columns"] == ["b"]
    assert [row["time"] for row in done.json["rows"]] == ["7", "8"]


def test_event_level_parameters_and_settings(run, visits):
    """Common flags and --set reach the same fields; fractions stay exact."""
    flags = ("--lo", "0", "--hi", "50", "--set", "quantum=1/2", "--epsilon", "1/3")

    done = run("release", str(visits), "--mechanism", "naive", *flags, "--json")

    assert done.json["parameters"] == {"epsilon": "1/3", "lo": "0", "hi": "50", "quantum": "1/2"}


def test_the_same_data_are_published_again_for_nothing(run, visits, folder):
    """With a state directory the bytes are the same and no charge is added."""
    run("release", str(visits), *SAMPLE, "--state", "state", "--out", "a.csv")
    done = run("release", str(visits), *SAMPLE, "--state", "state", "--out", "b.csv", "--json")

    assert (folder / "a.csv").read_bytes() == (folder / "b.csv").read_bytes()
    assert done.json["new_charges"] == 0


def test_appended_rows_are_new_and_the_old_ones_stay(run, visits, folder):
    """Step 6 starts a new window: one new charge."""
    run("release", str(visits), *SAMPLE, "--state", "state", "--out", "a.csv")
    visits.write_text(visits.read_text() + "2024-03-07,10,30\n")
    done = run("release", str(visits), *SAMPLE, "--state", "state", "--out", "b.csv", "--json")

    assert (folder / "b.csv").read_text().startswith((folder / "a.csv").read_text())
    assert (done.json["steps"], done.json["new_charges"]) == (7, 1)


def test_changed_rows_are_refused_and_nothing_is_published(run, visits, folder):
    """The same noise must not meet other data."""
    run("release", str(visits), *SAMPLE, "--state", "state", "--out", "a.csv")
    visits.write_text(visits.read_text().replace("11,35", "12,35"))
    done = run("release", str(visits), *SAMPLE, "--state", "state", "--out", "b.csv", "--json")

    assert (done.code, done.error["error"], done.out) == (4, "NoiseReuse", "")
    assert not (folder / "b.csv").exists()


def test_the_secret_is_announced_once(run, visits, folder):
    """Its place is told when it is made, with the advice to back it up."""
    first = run("release", str(visits), *SAMPLE, "--state", "state")
    second = run("release", str(visits), *SAMPLE, "--state", "state")

    assert "created the secret" in first.err
    assert "back it up" in first.err
    assert "secret" not in second.err
    assert (folder / "state.secret").stat().st_mode & 0o777 == 0o600


def test_secret_and_ledger_default_to_the_environment(run, visits, folder, monkeypatch):
    """Both files are made where the variables say."""
    monkeypatch.setenv("DPSTREAM_SECRET_FILE", "key")
    monkeypatch.setenv("DPSTREAM_LEDGER", "book")

    done = run("release", str(visits), *SAMPLE)

    assert "created the secret key" in done.err
    assert "not shared" not in done.err
    assert (folder / "book").exists()


def test_of_two_copies_one_goes_on(run, visits, folder):
    """The ledger lies outside: a copy goes on for nothing, and then the original is refused."""
    command = ("release", str(visits), *SAMPLE, "--secret", "key", "--ledger", "book")
    run("ledger", "open", "--ledger", "book", "--dataset", "stream", "--privacy-unit", "w_event",
        "--window", "3", "--epsilon", "2")  # fmt: skip
    run(*command, "--state", "state")
    shutil.copytree(folder / "state", folder / "copy")

    done = run(*command, "--state", "copy")
    assert done.code == 0
    assert "no new charges" in done.err
    refused = run(*command, "--state", "state")
    assert refused.code == 4
    assert "another copy of it has gone on since" in refused.err


def test_plot_draws_the_series(run, visits, folder):
    """A picture of the first column."""
    pytest.importorskip("matplotlib")

    assert run("release", str(visits), *SAMPLE, "--plot", "p.png").code == 0
    assert (folder / "p.png").read_bytes().startswith(b"\x89PNG")


def test_a_window_alone_asks_for_pacer(run, visits):
    """The default is named; other parameters are those of any mechanism."""
    done = run("release", str(visits), "--window", "3", "--epsilon", "1", "--json")

    assert done.code == 0
    assert done.json["mechanism"] == "pacer"
    assert "with --window it is pacer" in done.err


WAITING = ("--mechanism", "contin_group", "--epsilon", "1", "--delay", "4", "--lo", "0", "--hi",
           "50", "--column", "north", "--state", "state")  # fmt: skip


def test_a_kept_release_does_not_publish_an_unfinished_batch(run, visits, folder):
    """Six steps, batches of four: two wait, until rows are appended; what is out stays as it is."""
    first = run("release", str(visits), *WAITING, "--out", "a.csv", "--json")
    visits.write_text(visits.read_text() + "2024-03-07,10,30\n2024-03-08,10,30\n")
    second = run("release", str(visits), *WAITING, "--out", "b.csv", "--json")

    assert (first.json["steps"], first.json["waiting"], first.json["new_charges"]) == (4, 2, 1)
    assert (second.json["steps"], second.json["waiting"], second.json["new_charges"]) == (8, 0, 1)
    assert (folder / "b.csv").read_text().startswith((folder / "a.csv").read_text())


def test_people_are_told_what_waits(run, visits):
    """And how to publish it."""
    done = run("release", str(visits), *WAITING)

    assert "2 steps at the end wait for their delay; --final publishes them" in done.err


def test_final_publishes_what_waits_and_closes_the_series(run, visits, folder):
    """It may be repeated, with or without the flag; rows cannot be appended any more."""
    run("release", str(visits), *WAITING)
    final = run("release", str(visits), *WAITING, "--final", "--out", "a.csv", "--json")
    again = run("release", str(visits), *WAITING, "--out", "b.csv", "--json")
    visits.write_text(visits.read_text() + "2024-03-07,10,30\n")
    late = run("release", str(visits), *WAITING, "--json")

    assert (final.json["steps"], final.json["waiting"], final.json["new_charges"]) == (6, 0, 1)
    assert again.json["new_charges"] == 0
    assert (folder / "a.csv").read_bytes() == (folder / "b.csv").read_bytes()
    assert (late.code, late.error["error"]) == (4, "StateError")
    assert "was finished after 6 steps" in late.error["message"]


def test_without_a_state_nothing_is_held_back(run, visits):
    """There is no later run that could publish it."""
    done = run("release", str(visits), *WAITING[:-2], "--json")

    assert (done.json["steps"], done.json["waiting"]) == (6, 0)


def test_a_delay_alone_asks_for_the_smoother(run, visits):
    """The default for series that may be late."""
    command = ("release", str(visits), "--delay", "3", "--epsilon", "1", "--lo", "0", "--hi", "50")
    done = run(*command, "--json")

    assert done.json["mechanism"] == "block_smoother"
    assert "with --delay it is block_smoother" in done.err
    assert run(*command, "--window", "3").code == 2


def test_truncation_takes_its_options_as_settings(run, visits):
    """Of the mechanism inside too."""
    settings = ("--set", "inside=contin_group", "--set", "options=publish=pp,smoother=median")
    done = run("release", str(visits), "--mechanism", "sensitivity_truncation", *WAITING[2:-2],
               *settings, "--json")  # fmt: skip

    assert done.code == 0
    assert "median" in done.json["parameters"]["options"]


MINUTES = "minute,visits\n0,4\n1,6\n2,5\n5,9\n"


@pytest.mark.parametrize("text", [MINUTES, "n,visits\n7,4\n8,6\n9,5\n", "Day,v\n1,1\n4,2\n9,3\n"])
def test_a_column_that_numbers_the_steps_is_never_a_count(run, folder, text):
    """It is offered as the time; a column that was named is published, whatever it is."""
    (folder / "series.csv").write_text(text)
    index = text.partition(",")[0]
    done = run("release", "series.csv", *SAMPLE)

    assert done.code == 2
    assert f"column {index!r} numbers the steps" in done.err
    assert f"--time-column {index}" in done.err
    assert run("release", "series.csv", *SAMPLE, "--column", index).code == 0


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_missing_steps_are_filled_when_asked(run, folder, suffix):
    """With 0 they are steps; held, nothing is spent on them and the last release stands there."""
    (folder / "series.csv").write_text(MINUTES)
    if suffix == "parquet":
        columns = {"minute": [0, 1, 2, 5], "visits": [4, 6, 5, 9]}
        pq.write_table(pa.table(columns), folder / "series.parquet")
    asked = ("release", f"series.{suffix}", "--mechanism", "uniform", "--window", "5")
    asked = (*asked, "--epsilon", "10000", "--time-column", "minute", "--json")
    refused = run(*asked)
    zero, held = (run(*asked, "--fill", fill).json for fill in ("0", "hold"))

    assert "--fill 0" in refused.err
    assert [row["visits"] for row in zero["rows"]] == [4, 6, 5, 0, 0, 9]
    assert [row["visits"] for row in held["rows"]] == [4, 6, 5, 5, 5, 9]
    assert [row["held"] for row in held["rows"]] == [False, False, False, True, True, False]
    assert (zero["new_charges"], held["new_charges"]) == (6, 4)
    assert [str(row["time"]) for row in held["rows"]] == ["0", "1", "2", "3", "4", "5"]


@pytest.mark.parametrize(
    ("times", "filled"),
    [
        (["2024-01-30", "2024-02-01", "2024-02-02"], "2024-01-31"),
        (["2024-01", "2024-03", "2024-04"], "2024-02"),
        (
            ["2024-01-01T00:00:00", "2024-01-01T02:00:00", "2024-01-01T03:00:00"],
            "2024-01-01T01:00:00",
        ),
        (
            ["2024-01-01T00:00:00+02:00", "2024-01-01T02:00:00+02:00", "2024-01-01T03:00:00+02:00"],
            "2024-01-01T01:00:00+02:00",
        ),
        (["2024-01-01 00:00Z", "2024-01-01 02:00Z", "2024-01-01 03:00Z"], "2024-01-01 01:00Z"),
    ],
)
def test_filled_times_are_written_as_those_of_the_file(run, folder, times, filled):
    """Days, months and hours; steps that do not fit are refused."""
    rows = "".join(f"{time},{count}\n" for time, count in zip(times, (1, 2, 3), strict=True))
    (folder / "series.csv").write_text(f"at,visits\n{rows}")
    done = run("release", "series.csv", *SAMPLE, "--fill", "hold", "--json")

    assert [row["time"] for row in done.json["rows"]] == [times[0], filled, *times[1:]]
    (folder / "odd.csv").write_text("at,visits\n2024-01-01,1\n2024-01-03,2\n2024-01-06,3\n")
    uneven = run("release", "odd.csv", *SAMPLE, "--fill", "0").err
    assert "evenly spaced" in uneven
    assert "add the missing steps" not in uneven  # they cannot be
    (folder / "far.csv").write_text(
        "at,visits\n2024-01-01T00:00:00,1\n2024-01-01T00:00:01,2\n2924-01-01T00:00:02,3\n"
    )
    far = run("release", "far.csv", *SAMPLE, "--fill", "0")
    assert (far.code, "2924-01-01T00:00:02" in far.err) == (2, True)
    (folder / "none.csv").write_text("visits\n1\n2\n")
    assert "--time-column" in run("release", "none.csv", *SAMPLE, "--fill", "0").err


DAYS = [
    "03-27T00:00+01:00",
    "03-28T00:00+01:00",
    "03-29T00:00+01:00",
    "03-30T00:00+02:00",
    "03-31T00:00+02:00",
]


@pytest.mark.parametrize(
    ("left_out", "said"), [(None, ""), (1, ""), (3, "where the clock changes")]
)
def test_local_days_are_steps_through_a_change_of_the_clock(run, folder, left_out, said):
    """29 March has 23 hours; which offset a missing day has is told by its neighbours, or not."""
    times = [f"2026-{day}" for day in DAYS]
    rows = [f"{time},{n}\n" for n, time in enumerate(times) if n != left_out]
    (folder / "days.csv").write_text("day,visits\n" + "".join(rows))
    done = run("release", "days.csv", *SAMPLE, "--fill", "0", "--json")

    if said:
        assert (done.code, said in done.err) == (2, True)
    else:
        assert [row["time"] for row in done.json["rows"]] == times


def test_parquet_with_a_time_zone(run, folder):
    """Its times are written with their offsets."""
    zone = ZoneInfo("Europe/Berlin")
    days = [datetime(2026, 3, day, tzinfo=zone) for day in (28, 29, 30)]
    table = pa.table({"day": pa.array(days, pa.timestamp("s", zone.key)), "visits": [1, 2, 3]})
    pq.write_table(table, folder / "days.parquet")
    done = run("release", "days.parquet", *SAMPLE, "--json")

    assert [row["time"] for row in done.json["rows"]] == [day.isoformat() for day in days]
