"""`dpstream audit`: lists, tables, JSON, exit codes."""

import json

import dpstream.audit.report


def test_without_a_name_it_lists_what_there_is(run):
    """Shipped things and controls, with a line each."""
    done = run("audit", "--json")
    listed = {line["name"]: line["control"] for line in done.json}

    assert done.code == 0
    assert (listed["uniform"], listed["svt_5"], listed["svt_1"]) == (False, True, False)
    assert "keys_only_when_touched" in run("audit").out


def test_rows_as_json(run):
    """`{rows: [...]}` with what scripts read."""
    done = run("audit", "svt_5", "--quick", "--json")
    (row,) = done.json["rows"]

    assert done.code == 0
    assert (row["name"], row["control"], row["claimed"], row["rejected"]) == (
        "svt_5",
        True,
        1,
        True,
    )
    assert row["lower_bound"] > 1
    assert row["witness"]["pair"]["one"] == [[0], [1]]
    assert done.json["summary"] == {"shipped": 0, "rejected": [], "controls": 1, "missed": []}


def test_the_report_finds_what_an_audit_wrote(run, folder):
    """`--out` names the benches' folder; the machine is in the file."""
    run("audit", "svt_5", "--quick", "--out", "results")
    found = run("bench", "report", "--out", "results", "--json").json

    assert [one["reached"] for one in found["targets"]] == [True, True]
    assert json.loads((folder / "results" / "audit.json").read_text())["machine"]["cores"] > 0
    assert "<h2>audit</h2>" in (folder / "results" / "report.html").read_text()


def test_a_table_for_people(run):
    """Verdict, share of the claim, and the event that shows it."""
    done = run("audit", "same_noise_other_data", "--quick")

    assert done.code == 0
    assert "caught" in done.out
    assert "worst: one event; the event" in done.out


def test_a_missed_control_is_a_failure(run, monkeypatch):
    """The exit code says so, and a note names it."""
    sound = dpstream.audit.report.catalogue()["svt_1"]
    monkeypatch.setattr(dpstream.audit.report, "controls", lambda: {"weak": _as_control(sound)})
    done = run("audit", "weak", "--quick")

    assert done.code == 1
    assert "MISSED" in done.out
    assert "not as it should be: weak" in done.err


def _as_control(make):
    from dataclasses import replace

    return lambda: replace(make(), name="weak", control=True)


def test_what_is_asked_must_make_sense(run):
    """A name or everything, and a name that exists."""
    assert run("audit", "laplace", "--all").code == 2
    wrong = run("audit", "lapalce", "--json")
    assert wrong.code == 2
    assert "did you mean 'laplace'" in wrong.error["message"]
