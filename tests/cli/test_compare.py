"""`dpstream compare`: ranks on data that are no secret, and says so when they are."""

from dataclasses import dataclass

import numpy as np
import pytest

from dpstream import mechanisms
from dpstream.mechanisms.base import HistogramMechanism
from dpstream.records import Release

CHOICE = ("--mechanism", "uniform", "--mechanism", "sample")
BUDGET = ("--window", "20", "--epsilon", "1", "--runs", "4")


@dataclass(frozen=True, kw_only=True)
class Overspender(HistogramMechanism, identity="overspender"):
    """Spends epsilon at every step."""

    def start(self):
        return None

    def step(self, state, x, spend):
        noisy = spend.laplace(x, sensitivity=1, epsilon=self.budget, purpose="publish")
        return None, [Release(step=spend.step, values=noisy.astype(float), paid=True)]


@pytest.fixture
def flat(folder):
    """A stream that never moves: one good publication per window is best."""
    path = folder / "flat.csv"
    path.write_text("count\n" + "500\n" * 60)
    return str(path)


@pytest.fixture
def wild(folder):
    """A stream that jumps by far more than any noise: publishing every step is best."""
    path = folder / "wild.csv"
    values = np.random.default_rng(0).integers(0, 10**6, 60)
    path.write_text("count\n" + "".join(f"{value}\n" for value in values))
    return str(path)


def test_the_better_mechanism_is_first_on_a_stream_made_for_it(run, flat, wild):
    """Holding wins where nothing moves, publishing wins where everything does."""
    for series, first in ((flat, "sample"), (wild, "uniform")):
        found = run("compare", series, *BUDGET, *CHOICE, "--public", "--json").json

        (one,) = found["comparisons"]
        best, second, zeros = one["ranking"]
        assert (best["mechanism"], best["rank"], second["rank"]) == (first, 1, 2)
        assert best["mre"] + 2 * best["mre_se"] < second["mre"]
        assert not second["tied"]
        assert (zeros["mechanism"], zeros["rank"]) == ("zeros", None)
        assert f"--mechanism {first} --window 20 --epsilon 1" in one["command"]


def test_the_printed_command_publishes(run, visits):
    """What is printed can be run as it is, columns and time included."""
    words = ("--column", "south", "--time-column", "day", "--window", "3", "--epsilon", "1/3")
    done = run("compare", str(visits), *words, *CHOICE, "--runs", "2", "--public")

    (command,) = [line for line in done.out.splitlines() if "dpstream release" in line]
    published = run(*command.partition("dpstream ")[2].split())
    assert published.code == 0
    assert published.out.startswith("step,time,south,")


def test_without_a_declaration_the_warning_is_everywhere(run, flat):
    """On stderr before any figure, and in the JSON."""
    plain = run("compare", flat, *BUDGET, *CHOICE)
    told = run("compare", flat, *BUDGET, *CHOICE, "--not-private", "--json")

    assert "THIS COMPARISON IS NOT PRIVATE" in plain.err
    assert "THIS COMPARISON IS NOT PRIVATE" in told.err
    assert (told.json["private"], told.json["declared_public"]) == (False, False)
    assert "NOT PRIVATE" in told.json["warning"]


def test_declared_data_are_compared_without_a_warning(run, flat):
    """The figures are still not private, and the JSON still says so."""
    done = run("compare", flat, *BUDGET, *CHOICE, "--public", "--json")

    assert done.err == ""
    assert (done.json["private"], done.json["declared_public"]) == (False, True)
    assert "warning" not in done.json


def test_every_budget_has_its_own_ranking(run, flat):
    """A table with error bars for each, and what needs no data."""
    done = run("compare", flat, *BUDGET, "--epsilon", "0.1", *CHOICE, "--public")

    assert done.out.count("publish with the first: ") == 2
    assert "epsilon = 0.1, window = 20" in done.out
    assert "±" in done.out
    assert done.out.count("needs no data") == 2


def test_equals_are_called_equals(run, flat):
    """Two names of one law: the second is as good as the first, whichever it is."""
    args = ("compare", flat, "--window", "1", "--epsilon", "1", *CHOICE, "--runs", "10", "--json")
    for _ in range(5):  # by chance a difference of two errors is not seen as a tie, 1 time in 20
        ranking = run(*args).json["comparisons"][0]["ranking"]
        if ranking[1]["tied"]:
            return
    raise AssertionError("two equal mechanisms were never called equal")


def test_a_mechanism_that_overspends_cannot_win(run, flat, monkeypatch):
    """It is listed with what the ledger said, below all others."""
    monkeypatch.setitem(mechanisms.REGISTRY, "overspender", f"{__name__}:Overspender")
    choice = ("--mechanism", "overspender", "--mechanism", "uniform")

    found = run("compare", flat, *BUDGET, *choice, "--public", "--json").json
    shown = run("compare", flat, *BUDGET, *choice, "--public").out

    first, refused, _ = found["comparisons"][0]["ranking"]
    assert (first["mechanism"], refused["mechanism"]) == ("uniform", "overspender")
    assert (refused["rank"], refused["mre"]) == (None, None)
    assert "asks for" in refused["refused"]
    assert "refused by the ledger" in shown
    alone = run("compare", flat, *BUDGET, *choice[:2], "--public", "--json").json
    assert alone["comparisons"][0]["command"] is None


def test_by_default_every_w_event_mechanism_is_a_candidate(run, flat):
    """One that is registered needs no line here."""
    done = run("compare", flat, "--window", "5", "--epsilon", "1", "--runs", "2", "--json")

    names = {row["mechanism"] for row in done.json["comparisons"][0]["ranking"]}
    assert {"uniform", "sample", "budget_distribution", "budget_absorption", "zeros"} <= names
    assert "naive" not in names


def test_the_errors_are_drawn(run, flat):
    """One panel per epsilon."""
    done = run("compare", flat, *BUDGET, "--epsilon", "2", *CHOICE, "--plot", "it.png", "--public")

    assert done.code == 0
    with open("it.png", "rb") as file:
        assert file.read(4) == b"\x89PNG"


@pytest.mark.parametrize(
    ("args", "problem"),
    [(("--epsilon", "1"), "--window"),
     (("--window", "5"), "--epsilon"),
     (("--window", "5", "--epsilon", "0"), "epsilon must be greater than 0"),
     (("--window", "0", "--epsilon", "1"), "window must be a whole number of at least 1"),
     (("--window", "5", "--epsilon", "1", "--runs", "1"), "--runs"),
     (("--window", "5", "--epsilon", "1", "-m", "naive"), "'naive' is no w-event mechanism"),
     (("--window", "5", "--epsilon", "1", "--plot", "it.txt"), "must end in .png")],
)  # fmt: skip
def test_unusable_parameters_are_refused(run, flat, args, problem):
    """Before anything runs."""
    done = run("compare", flat, *args)

    assert done.code == 2
    assert problem in done.err
    assert "NOT PRIVATE" not in done.err


def test_values_that_are_no_counts_are_refused_with_their_line(run, folder):
    """The same words as for a release."""
    (folder / "x.csv").write_text("count\n1\n2.5\n")

    done = run("compare", "x.csv", *BUDGET, "--public")

    assert done.code == 2
    assert "x.csv (row 0 is line 2)" in done.err
    assert "not whole: 2.5" in done.err


def test_a_delay_compares_event_level_mechanisms(run, flat):
    """By absolute error, with the middle of the range beside them."""
    flags = ("--delay", "10", "--lo", "0", "--hi", "1500", "--epsilon", "1", "--runs", "3")
    names = ("--mechanism", "naive", "--mechanism", "contin_group")
    found = run("compare", flat, *flags, *names, "--public", "--json").json

    (one,) = found["comparisons"]
    first, second, middle = one["ranking"]
    assert (first["mechanism"], second["mechanism"]) == ("contin_group", "naive")
    assert first["mae"] < second["mae"]
    assert (middle["mechanism"], middle["rank"], middle["mae"]) == ("midpoint", None, 250)
    assert one["command"].endswith("contin_group --epsilon 1 --delay 10 --lo 0 --hi 1500")


def test_compare_wants_a_window_or_a_delay(run, flat):
    """Not both, and one of them."""
    for flags in ((), ("--window", "3", "--delay", "3")):
        done = run("compare", flat, "--epsilon", "1", *flags, "--json")

        assert done.code == 2
        assert "compare needs --window" in done.error["message"]
