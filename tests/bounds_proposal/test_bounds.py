import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pytest
from scipy.stats import chi2

import dpstream as dps
from benchmarks.generated_logs import customer_orders, web_sessions
from dpstream.bounds_proposal.histograms import (
    COUNTS,
    SIZES,
    bins_of,
    collect_unit_facts,
    count_bins,
    exact_histograms,
    histogram_query,
    noisy_histograms,
    value_bins,
    value_sums,
)
from dpstream.bounds_proposal.smooth_histogram import smooth_histogram
from dpstream.cli import main
from dpstream.connectors.registry import open_source
from dpstream.errors import BudgetExceeded, InvalidParameter
from dpstream.privacy.state import Secret
from dpstream.query.noise_plan import plan_query

SECRET, RUN = Secret(bytes(range(32))), bytes(16)
FALSE_ALARM = 1e-7
KNOWN = {"privacy_unit_column": "user", "keys": ["item"]}
NAMES = ("groups", "rows", "value amount")


def asked_of(**options):
    """A query whose bounds are to be chosen."""
    known = KNOWN | {"epsilon": 1, "delta": 1e-9, "max_groups_contributed": 1}
    return dps.Query(**known | options)


def paid_on(query, *, epsilon, **options):
    return histogram_query(query, facts=NAMES, epsilon=epsilon, delta=1e-9, **options)


def orders(units=300, seed=5):
    """Users with Zipf numbers of orders; amounts of both signs."""
    rng = np.random.default_rng(seed)
    users = np.repeat(np.arange(units), np.minimum(rng.zipf(1.7, units), 60))
    return pa.table(
        {
            "user": users,
            "item": rng.integers(0, 12, len(users)),
            "at": rng.integers(0, 10 * 86_400, len(users)),
            "amount": np.round(rng.normal(3, 20, len(users)), 2),
        }
    )


def reading(**options):
    known = {"privacy_unit_column": "user", "keys": ["item"], "epsilon": 1, "delta": 1e-9}
    aggregates = [dps.Count("count"), *value_sums("amount")]
    return dps.Query(**known | {"aggregates": aggregates, "max_groups_contributed": 1} | options)


def facts_of(table, query=None, share=1.0):
    source = open_source(table)
    query = reading() if query is None else query
    return collect_unit_facts(
        source, query, secret=SECRET, run=RUN, share=share, progress=lambda *_: None
    )


def test_facts_are_those_of_the_rows():
    """Groups are counted as a dictionary counts them; the rows and the value are of one's own."""
    table = orders()
    found, seen = facts_of(table), {}
    for row in table.to_pylist():
        groups, amounts = seen.setdefault(row["user"], ({}, set()))
        groups[row["item"]] = groups.get(row["item"], 0) + 1
        amounts.add(row["amount"])

    assert sorted(found.groups.tolist()) == sorted(len(groups) for groups, _ in seen.values())
    assert len(found.rows) == len(found.values) == len(seen)
    one = table.filter(pa.compute.equal(table["user"], 7))
    alone = facts_of(one)
    groups, amounts = seen[7]
    assert alone.groups.tolist() == [len(groups)]
    assert alone.rows[0] in groups.values()
    assert float(alone.values[0, 0]) in amounts


def test_facts_do_not_depend_on_chunks_or_order(tmp_path):
    """Which row stands for a unit follows from the rows, not from how they are read."""
    table = orders()
    whole = facts_of(table)
    pa_csv.write_csv(
        table.take(np.random.default_rng(1).permutation(len(table))), tmp_path / "a.csv"
    )
    mixed = collect_unit_facts(
        open_source(table.take(np.random.default_rng(2).permutation(len(table)))),
        reading(),
        secret=SECRET,
        run=RUN,
        share=1.0,
        progress=lambda *_: None,
    )
    for name, bins in exact_histograms(whole, NAMES).bins.items():
        assert (bins == exact_histograms(mixed, NAMES).bins[name]).all()
    assert len(facts_of(str(tmp_path / "a.csv")).units) == len(whole.units)


@pytest.mark.parametrize("gone", [0, 17, 299])
def test_a_unit_moves_one_bin_of_each_fact(gone):
    """What the noise is scaled to: with or without a unit, one bin per fact differs, by one."""
    table = orders()
    without = table.filter(pa.compute.not_equal(table["user"], gone))
    more, less = (exact_histograms(facts_of(each), NAMES).bins for each in (table, without))
    for name in NAMES:
        assert sorted(more[name] - less[name])[-1] == 1
        assert np.abs(more[name] - less[name]).sum() == 1


def test_noise_is_as_declared_and_not_a_fifth_off():
    """False alarms below 10^-7 on either side; 20% more or less noise fails."""
    facts = facts_of(orders())
    asked = paid_on(reading(), epsilon=1)
    truth = exact_histograms(facts, NAMES).bins
    errors = []
    for _ in range(8):
        found = noisy_histograms(facts, asked, NAMES, ledger=None, dataset="stream")
        errors += [found.bins[name] - truth[name] for name in NAMES]
    squares = float((np.concatenate(errors) ** 2).sum())
    freedom = sum(map(len, errors))

    def holds(stddev):
        ratio = squares / stddev**2
        return min(chi2.cdf(ratio, freedom), chi2.sf(ratio, freedom)) > FALSE_ALARM / 2

    assert holds(found.stddev)
    assert not holds(found.stddev * 0.8)
    assert not holds(found.stddev * 1.2)


def test_noise_fits_three_facts():
    """Sensitivity sqrt(3) over mu; one fact more or less would be another noise."""
    asked = paid_on(reading(), epsilon=1)
    plan = plan_query(asked)
    mu = math.sqrt(plan.calibrated.mu_squared)
    assert plan.window(1).sigmas[0] == pytest.approx(math.sqrt(3) / mu, rel=1e-6)
    assert asked.schedule.steps == 1
    assert plan.delta_slack == 0


def test_the_book_pays_first_and_refuses_what_does_not_fit(tmp_path):
    """The charge is in the dataset's own book; a book that cannot pay gives nothing."""
    table, book = orders(), dps.Ledger(tmp_path / "book")
    book.open("orders", reading().promise(epsilon=1.1, delta=1e-6))
    bought = {"epsilon": 1, "delta": 1e-7, "ledger": book, "dataset": "orders"}
    dps.bounds(asked_of(), table, **bought)
    lines = book.report()[0]["spent_on"]
    assert all(line["query"].startswith("bounds ") for line in lines)
    assert len(lines) == 2
    with pytest.raises(BudgetExceeded):
        dps.bounds(asked_of(), table, **bought)
    assert len(book.report()[0]["spent_on"]) == 2


def test_a_book_with_room_for_half_of_it_pays_nothing(tmp_path):
    """The histograms alone would fit."""
    book = dps.Ledger(tmp_path / "book")
    book.open("orders", reading().promise(epsilon=1, delta=1e-7))
    with pytest.raises(BudgetExceeded):
        dps.bounds(asked_of(), orders(), epsilon=1.2, delta=1e-7, ledger=book, dataset="orders")
    assert book.report()[0]["spent_on"] == []


def test_a_book_of_other_units_refuses(tmp_path):
    """The histograms protect the unit that was named, in the words of the dataset's book."""
    book = dps.Ledger(tmp_path / "book")
    common = {"epsilon": 1, "delta": 1e-6, "max_groups_contributed": 1}
    query = dps.Query(privacy_unit_column="shop", **common)
    book.open("orders", query.promise(epsilon=5, delta=1e-6))
    with pytest.raises(dps.DpstreamError, match="shop"):
        dps.bounds(asked_of(), orders(), epsilon=1, delta=1e-7, ledger=book, dataset="orders")


def test_periods_make_other_units():
    """A user on two days is two units, in the facts and in what is charged."""
    days = {"time_column": "at", "time_unit": "s", "start": "1970-01-01", "end": "1970-01-11"}
    daily = reading(privacy_unit_period="1 day", **days)
    table = orders()
    found = facts_of(table, daily)
    pairs = {(row["user"], row["at"] // 86_400) for row in table.to_pylist()}
    assert len(found.units) == len(pairs)
    asked = paid_on(daily, epsilon=1)
    answer = noisy_histograms(found, asked, NAMES, ledger=None, dataset="stream")
    assert answer.bins["groups"].sum() == pytest.approx(len(pairs), abs=6 * answer.stddev * 7)


def test_a_share_of_the_units_is_taken_whole():
    """A sample keeps all rows of a unit or none."""
    table = orders(units=2000)
    some, everyone = facts_of(table, share=0.25), facts_of(table)
    known = dict(zip(map(tuple, everyone.units.tolist()), everyone.groups, strict=True))
    assert 350 < len(some.units) < 650  # 500 expected, 7.5 standard deviations
    assert all(
        known[tuple(unit)] == groups
        for unit, groups in zip(some.units.tolist(), some.groups, strict=True)
    )


def test_bins_hold_what_they_say():
    """Every count and size lies at or below its bin's edge and above the one before."""
    numbers = np.arange(1, 70_000)
    bins = count_bins(numbers)
    inside = numbers <= COUNTS[-1]
    assert (COUNTS[bins][inside] >= numbers[inside]).all()
    assert (COUNTS[bins[inside & (bins > 0)] - 1] < numbers[inside & (bins > 0)]).all()
    assert [bins_of(name) for name in NAMES] == [40, 120, 2 * len(SIZES) + 1]
    sizes = np.array([0.0015, 1.0, 1.01, 499.0])
    assert SIZES[value_bins(sizes) - len(SIZES) - 1].tolist() == [0.002, 1.0, 2.0, 500.0]
    assert (value_bins(-sizes) == 2 * len(SIZES) - value_bins(sizes)).all()


def test_empty_bins_of_large_sizes_do_not_drown_the_rest():
    """Noise of a few units in bins of thousands would be most of all rows."""
    rng = np.random.default_rng(3)
    below = np.concatenate([[0], COUNTS[:-1]])
    bins = rng.normal(0, 10, len(COUNTS))
    bins[1] += 5000
    middles, widths = (below + 1 + COUNTS) / 2, (COUNTS - below).astype(float)
    found = smooth_histogram(bins, sizes=middles, widths=widths, stddev=10.0)
    assert found.kept(2) == pytest.approx(1.0, abs=0.05)
    believed = np.maximum(bins, 0)
    assert (believed * np.minimum(COUNTS, 2)).sum() < 0.5 * (believed * COUNTS).sum()
    assert (
        smooth_histogram(np.zeros(4), sizes=middles[:4], widths=widths[:4], stddev=1.0).total == 0
    )


@pytest.mark.parametrize(("sign", "clamps"), [(1, (0, 1)), (-1, (-1, 0)), (0, (-1, 1))])
def test_signs_of_values_are_found(sign, clamps):
    """Clamps of a column that is never negative begin at 0."""
    table = orders()
    amount = table["amount"].to_numpy()
    if sign:
        table = table.set_column(3, "amount", pa.array(sign * np.abs(amount)))
    total = dps.Sum("s", column="amount", contribution_bounds_per_row=(0, 2))
    found = dps.bounds(asked_of(aggregates=[total]), table, public=True)
    edge = max(map(abs, found.clamps["amount"]))
    assert found.clamps["amount"] == tuple(edge * each for each in clamps)


def test_larger_keys_want_larger_bounds():
    """A key of millions cannot afford bias, a small one cannot afford noise."""
    found = [
        dps.bounds(asked_of(), orders(), public=True, key_size=size) for size in (100, 1e4, 1e7)
    ]
    sizes = [each.max_groups_contributed * each.max_rows_per_group for each in found]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


def test_proposals_can_be_pasted():
    """The SQL is understood, the Python is a Query."""
    total = dps.Sum("amount", column="amount", contribution_bounds_per_row=(0, 2))
    found = dps.bounds(asked_of(aggregates=[total]), orders(), public=True)
    options, aggregate = found.sql().splitlines()
    text = (
        f"SELECT WITH DIFFERENTIAL_PRIVACY {options} item, {aggregate} AS amount "
        "FROM o GROUP BY item"
    )
    query = dps.sql(text)
    assert query.bounds.groups == found.max_groups_contributed
    same = eval(f"dps.Query(**KNOWN, epsilon=1, delta=1e-9, {found.python()})")
    assert same.bounds == query.bounds == found.bounded_query.bounds
    assert (same.aggregates[0].lo, same.aggregates[0].hi) == found.clamps["amount"]


@pytest.mark.parametrize("sets", [[[], ["item", "at"], ["item"]], [["item"], ["at"]]])
def test_sets_of_keys_that_are_found(sets):
    """Noise and threshold are those of the set with most keys, wherever it stands."""
    asked = asked_of(keys=["item", "at"], grouping_sets=sets)
    found = dps.bounds(asked, orders(), public=True)
    choice = next(c for c in found.trade_off if c.groups == found.max_groups_contributed)
    window = plan_query(found.bounded_query).window(1)
    largest = max(range(len(sets)), key=lambda at: len(sets[at]))
    measures = found.bounded_query.measures_of["count"]
    row = window.measures * largest + found.bounded_query.measures.index(measures[0])

    assert choice.threshold == window.thresholds[largest, -1]
    assert math.isclose(choice.noise, window.stddevs[row, -1], rel_tol=1e-6)


@pytest.mark.parametrize(
    "options", [{}, {"public": True, "epsilon": 1}, {"epsilon": 1, "sample": 0}]
)
def test_what_is_asked_must_be_one_thing(options):
    """Public or paid, and a share that is one."""
    with pytest.raises(InvalidParameter):
        dps.bounds(asked_of(), orders(), **options)


def left_out(table, unit, groups, query):
    """The share of rows that the bounds of a query leave out: by hand, rows in random order."""
    order = np.random.default_rng(1).permutation(len(table))
    seen, kept, bounds = {}, 0, query.bounds
    units, keys = table[unit].to_numpy()[order], groups[order]
    for one, key in zip(units.tolist(), keys.tolist(), strict=True):
        mine = seen.setdefault(one, {})
        if (key in mine or len(mine) < bounds.groups) and mine.get(key, 0) < bounds.rows_per_group:
            mine[key] = mine.get(key, 0) + 1
            kept += 1
    return 1 - kept / len(table)


def weekly(**options):
    times = {"time_column": "ts", "time_unit": "s", "time_origin": "1997-01-01"}
    return dps.Query(
        privacy_unit_column="customer",
        aggregates=[
            dps.Count("n"),
            dps.Sum("revenue", column="amount", contribution_bounds_per_row=(0, 2)),
        ],
        epsilon=1,
        delta=1e-9,
        window=dps.Tumble("7 days"),
        start="1997-01-01",
        end="1998-07-01",
        max_groups_contributed=1,
        **times | options,
    )


def test_what_is_left_out_is_said_as_it_is():
    """Rows beyond one a group count, and clamps hold revenue: exact figures, within a tenth."""
    table = customer_orders(customers=4000)
    found = dps.bounds(weekly(), table, public=True)
    weeks = table["ts"].to_numpy() // (7 * 86_400)
    truth = left_out(table, "customer", weeks, found.bounded_query)
    assert found.left_out == pytest.approx(truth, rel=0.1)
    assert found.rows == pytest.approx(len(table), rel=0.02)
    lo, hi = found.clamps["amount"]
    amounts = table["amount"].to_numpy()
    cut = 1 - np.clip(amounts, lo, hi).sum() / amounts.sum()
    assert found.values_left_out["amount"] == pytest.approx(cut, abs=0.05)
    assert hi >= np.quantile(amounts, 0.5)

    pages = web_sessions(sessions=6000)
    query = dps.Query(
        privacy_unit_column="session", epsilon=1, delta=1e-9, max_groups_contributed=9
    )
    total = dps.bounds(query, pages, public=True)  # no keys: all rows of a unit are in one group
    truth = left_out(pages, "session", np.zeros(len(pages), np.int64), total.bounded_query)
    assert total.max_groups_contributed == 1
    assert total.left_out == pytest.approx(truth, rel=0.25, abs=0.002)


def test_what_was_paid_for_is_kept(tmp_path):
    """A second question reads, pays and draws nothing; `again` pays, and draws anew."""
    book = dps.Ledger(tmp_path / "book")
    book.open("orders", asked_of().promise(epsilon=5, delta=1e-6))
    table, kept = orders(), {"ledger": book, "dataset": "orders", "state": tmp_path / "kept"}
    first = dps.bounds(asked_of(), table, epsilon=1, **kept)
    same = dps.bounds(asked_of(), table, epsilon=1, **kept)
    other = dps.bounds(asked_of(epsilon=3), table.slice(0, 0), key_size=50, **kept)
    assert (first.measured_before, same.measured_before, other.measured_before) == (
        False,
        True,
        True,
    )
    assert same.units == other.units == first.units
    assert other.epsilon == 1
    assert len(book.report()[0]["spent_on"]) == 2
    anew = dps.bounds(asked_of(), table, epsilon=1, again=True, **kept)
    assert anew.units != first.units
    assert len(book.report()[0]["spent_on"]) == 4
    assert dps.bounds(asked_of(), table, **kept).units == anew.units
    with pytest.raises(InvalidParameter):  # other keys: another measurement
        dps.bounds(asked_of(keys=()), table, **kept)


def test_a_measurement_that_was_broken_off_goes_on(tmp_path, monkeypatch):
    """Killed after the charge: the next call draws the same noise, and pays nothing more."""
    book = dps.Ledger(tmp_path / "book")
    book.open("orders", asked_of().promise(epsilon=5, delta=1e-6))
    table, place = orders(), tmp_path / "kept"
    kept = {"ledger": book, "dataset": "orders", "state": place, "epsilon": 1}
    whole = dps.bounds(asked_of(), table, **kept)
    for release in place.glob("*/released/*.parquet"):
        release.unlink()
    with pytest.raises(dps.DpstreamError, match="again"):
        dps.bounds(asked_of(), table, **kept)
    assert len(book.report()[0]["spent_on"]) == 2

    def lost(*_):
        raise OSError("the disk is full")

    place = tmp_path / "other"
    with monkeypatch.context() as broken:
        broken.setattr("dpstream.bounds_proposal.histograms.DirectorySink.publish", lost)
        with pytest.raises(dps.DpstreamError, match="full"):
            dps.bounds(asked_of(), table, **kept | {"state": place})
    assert len(book.report()[0]["spent_on"]) == 3
    found = dps.bounds(asked_of(), table, **kept | {"state": place})
    assert len(book.report()[0]["spent_on"]) == 4
    assert found.units != whole.units
    assert not found.measured_before


def test_command(tmp_path, capsys, monkeypatch):
    """Table, JSON, plot and charge from the command line; bounds need not be there."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    pa_csv.write_csv(orders(), "orders.csv")
    (tmp_path / "items.sql").write_text(
        "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 1, delta = 1e-9, "
        "privacy_unit_column = user) item, SUM(amount) AS s FROM orders GROUP BY item"
    )
    common = ["bounds", "items.sql", "--source", "orders=orders.csv"]
    with pytest.raises(SystemExit) as left:
        main([*common, "--epsilon", "2", "--json", "--plot", "b.png"])
    assert left.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert found["private"]
    assert found["epsilon"] == 2
    assert (tmp_path / "b.png").stat().st_size > 1000
    with pytest.raises(SystemExit):
        main([*common, "--json", "--key-size", "1000"])
    again = json.loads(capsys.readouterr().out)
    assert again["measured_before"]
    assert again["units"] == found["units"]
    with pytest.raises(SystemExit):
        main([*common, "--public"])
    assert "max_groups_contributed =" in capsys.readouterr().out


def test_joined_and_united_rows_are_measured_after_the_join(tmp_path, capsys, monkeypatch):
    """Bounds are for what rows become: those that one row meets count, and those of all sources."""
    monkeypatch.chdir(tmp_path)
    clause = "WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 2, delta = 1e-9, privacy_unit_column = u"
    text = (
        f"""SELECT {clause}) kind, COUNT(*) AS n FROM log JOIN pages USING (page) GROUP BY kind"""
    )
    rows = pa.table({"u": [n % 300 for n in range(300)], "page": ["a"] * 300})
    pages = pa.table({"page": ["a"] * 3, "kind": ["k"] * 3})
    pa_csv.write_csv(rows, "log.csv")
    pa_csv.write_csv(pages, "pages.csv")

    def proposed(*arguments):
        with pytest.raises(SystemExit) as left:
            main(["bounds", *arguments, "--public", "--json"])
        told = capsys.readouterr()
        return json.loads(told.out) if left.value.code == 0 else told.err

    found = proposed(text, "--source", "log=log.csv", "--public-table", "pages=pages.csv")
    assert (found["max_groups_contributed"], found["max_rows_per_group"]) == (1, 3)
    assert "say --public-table pages=FILE" in proposed(text, "--source", "log=log.csv")
    both = f"""SELECT {clause}) page, COUNT(*) AS n FROM
        (SELECT u, page FROM a UNION ALL SELECT u, page FROM b) GROUP BY page"""
    found = proposed(both, "--source", "a=log.csv", "--source", "b=log.csv")
    assert (found["max_groups_contributed"], found["max_rows_per_group"]) == (1, 2)
    with pytest.raises(InvalidParameter, match="give a source for 'b' too"):
        dps.bounds(dps.sql(both, max_groups_contributed=1), {"a": rows}, public=True)
    with pytest.raises(InvalidParameter, match="'pages' is joined, and it is not declared"):
        dps.bounds(dps.sql(text, max_groups_contributed=1), rows, public=True)


def test_bounds_of_pairs_and_of_keys_alone_are_proposed():
    """Pairs of columns keep their clamps and count as rows; weighted keys as units."""
    rng = np.random.default_rng(3)
    user, key = rng.integers(0, 900, 3000), rng.integers(0, 5, 3000)
    table = pa.table({"user": user, "key": key, "x": rng.uniform(0, 9, 3000)})
    common = {"privacy_unit_column": "user", "keys": ["key"], "epsilon": 1, "delta": 1e-9}
    common["max_groups_contributed"] = 4
    about = {"columns": ("x", "x"), "contribution_bounds_per_row": ((0, 9), (0, 9))}
    pairs = dps.bounds(
        dps.Query(**common, aggregates=[dps.Correlation("r", **about)]), source=table, public=True
    )
    keys = dps.bounds(
        dps.Query(**common, aggregates=[], weighted_keys=True), source=table, public=True
    )
    assert pairs.clamps == keys.clamps == {}
    assert {each.aggregate for each in pairs.expected} == {"r"}
    assert min(each.noise for each in pairs.expected) < 0.1
    assert pairs.max_groups_contributed > 1 < keys.max_groups_contributed
