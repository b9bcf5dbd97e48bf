"""The public feed says what the run has published, in every form it has."""

import csv
import io
import json
import math
from itertools import pairwise

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

import dpstream as dps
from dpstream.serve.public_facts import QueryDescription
from dpstream.serve.release_history import file_stream, order_threshold
from dpstream.serve.release_segments import key_id
from dpstream.session.pipeline import load_pipeline
from tests.support.pipelines import PAGES, public_side


def published(pipeline, query):
    """The run's own files, by window and release: what the feed must agree with."""
    folder = pipeline.path.parent / "out"
    found = {}
    for path in sorted(folder.glob(f"{query}-*.parquet")):
        _, window, trigger = path.stem.rsplit("-", 2)
        found[int(window[1:]), int(trigger[1:])] = pq.read_table(path).replace_schema_metadata(None)
    return found


def get(feed, path, **params):
    answer = feed.get(path, params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_queries_say_what_is_public(feed, pipeline):
    """Names, SQL, columns, bounds, windows: all that follows from the file."""
    found = {one["name"]: one for one in get(feed, "/api/queries")["queries"]}

    assert list(found) == ["pages", "changed", "all", "steps"]
    assert found["pages"]["sql"] == pipeline.texts["pages"]
    assert found["pages"]["columns"] == {
        "keys": ["page"],
        "aggregates": [
            {"name": name} | {end: f"{name}_{end}" for end in ("stddev", "low", "high", "high_all")}
            for name in ("clicks", "seconds")
        ],
    }
    assert found["pages"]["windows"]["releases_per_window"] == 4
    assert found["steps"]["mechanism"] == "uniform"
    assert found["steps"]["measure"] == "epsilon"
    assert all(one["finished"] for one in found.values())
    assert "memory" not in found["pages"]["explain"]
    assert get(feed, "/api/queries/pages") == found["pages"]


@pytest.mark.parametrize("query", ["pages", "changed", "all", "steps"])
def test_downloads_are_what_the_run_has_published(feed, pipeline, query):
    """As Parquet, Arrow, CSV and JSON lines, of all windows and of one."""
    truth = published(pipeline, query)
    whole = pa.concat_tables(truth.values())

    parquet = feed.get(f"/api/queries/{query}/download", params={"format": "parquet"})
    table = pq.read_table(io.BytesIO(parquet.content))
    assert table.drop_columns(["window", "release"]).equals(whole)
    assert set(zip(*(table[n].to_pylist() for n in ("window", "release")), strict=True)) == set(
        truth
    )

    arrow = feed.get(f"/api/queries/{query}/download", params={"format": "arrow", "window": 0})
    table = pa.ipc.open_stream(arrow.content).read_all()
    first = pa.concat_tables(one for (window, _), one in truth.items() if window == 0)
    assert table.drop_columns(["window", "release"]).equals(first)

    csv = feed.get(f"/api/queries/{query}/download", params={"format": "csv"})
    options = pyarrow.csv.ParseOptions(newlines_in_values=True)
    table = pyarrow.csv.read_csv(io.BytesIO(csv.content), parse_options=options)
    name = "clicks" if "clicks" in table.column_names else "users"
    assert table[name].to_pylist() == whole[name].to_pylist()

    lines = feed.get(f"/api/queries/{query}/download", params={"format": "jsonl"})
    assert [json.loads(line)[name] for line in lines.text.splitlines()] == whole[name].to_pylist()


@pytest.mark.parametrize("limit", [1, 3, 1000])
@pytest.mark.parametrize("query", ["pages", "changed"])
def test_pages_of_history_are_all_rows_once(feed, pipeline, query, limit):
    """Each cursor goes on where the page before has ended, in the middle of a release too."""
    rows, after = [], None
    while True:
        page = get(
            feed,
            f"/api/queries/{query}/releases",
            limit=limit,
            **({"after": after} if after else {}),
        )
        assert len(page["rows"]) <= limit
        rows += page["rows"]
        after = page["next"]
        if not page["rows"]:
            break
    truth = published(pipeline, query)

    assert [(row["window"], row["release_index"]) for row in rows] == [
        place
        for place, table in sorted(truth.items(), key=lambda one: _when(one[1]))
        for _ in range(len(table))
    ]
    assert [row["values"]["clicks"] for row in rows] == [
        value
        for _, table in sorted(truth.items(), key=lambda one: _when(one[1]))
        for value in table["clicks"].to_pylist()
    ]


def _when(table):
    return table["trigger_time"][0].as_py(), table["window_start"][0].as_py()


def test_history_as_files_has_its_cursor_in_a_header(feed, pipeline):
    """The same pages, as Arrow."""
    one = feed.get("/api/queries/pages/releases", params={"format": "arrow", "limit": 3})
    rest = feed.get(
        "/api/queries/pages/releases",
        params={"format": "arrow", "limit": 10_000, "after": one.headers["dpstream-next"]},
    )
    tables = [pa.ipc.open_stream(each.content).read_all() for each in (one, rest)]

    assert len(tables[0]) == 3
    assert sum(map(len, tables)) == sum(map(len, published(pipeline, "pages").values()))


def test_latest_is_sorted_and_says_which_orders_are_meaningful(feed, pipeline):
    """By the larger of two values' noises, at one confidence for the whole answer."""
    truth = published(pipeline, "pages")[1, 4]
    for order in ("desc", "asc"):
        found = get(feed, "/api/queries/pages/latest", sort="seconds", order=order)
        values = [row["values"]["seconds"] for row in found["rows"]]
        assert values == sorted(truth["seconds"].to_pylist(), reverse=order == "desc")
    spread = truth["seconds_stddev"][0].as_py()
    needed = order_threshold(len(values) - 1) * math.hypot(spread, spread)
    clear = [abs(a - b) > needed for a, b in pairwise(values)]

    assert [row["ordered"] for row in found["rows"]] == [*clear, None]
    assert (found["window"], found["release_index"], found["releases"], found["final"]) == (
        1,
        4,
        4,
        True,
    )
    assert found["deviations"] == order_threshold(4)


def test_an_order_within_the_noise_is_not_called_meaningful(feed):
    """With one row a page the next one still counts; without an error bar nothing is said."""
    page = get(feed, "/api/queries/pages/latest", limit=1)
    whole = get(feed, "/api/queries/pages/latest")

    assert page["rows"][0]["ordered"] is not None
    assert page["deviations"] < whole["deviations"]  # one order is asserted, not four


def test_latest_of_a_query_that_publishes_changes_has_every_key(feed, pipeline):
    """Each with its newest value, and when that was."""
    truth = published(pipeline, "changed")
    newest = {}
    for (_, release), table in sorted(truth.items()):
        for row in table.to_pylist():
            newest[row["page"]] = (row["clicks"], release)
    found = get(feed, "/api/queries/changed/latest")

    assert {row["key"][0][:200]: None for row in found["rows"]}.keys() == {
        key[:200] for key in newest
    }
    for row in found["rows"]:
        full = get(feed, f"/api/queries/changed/keys/{row['id']}")["key"][0]
        assert (row["values"]["clicks"], row["release_index"]) == newest[full]


def test_keys_are_searched_in_any_case_and_shown_in_full_on_request(feed):
    """Long ones are cut in lists, and say how long they are."""
    found = get(feed, "/api/queries/pages/latest", q="LONG X")
    row = found["rows"][0]

    assert (found["matched"], found["total"]) == (1, len(PAGES))
    assert len(row["key"][0]) == 200
    assert row["cut"] == [905]
    assert get(feed, f"/api/queries/pages/keys/{row['id']}")["key"] == [PAGES[4]]
    assert get(feed, "/api/queries/pages/latest", q="%")["matched"] == 0  # no pattern
    assert get(feed, "/api/queries/all/latest")["rows"][0]["key"] == []


def test_series_follow_keys_through_a_window(feed, pipeline):
    """By key or id; a key that was never published has no points, and nobody can tell why."""
    truth = published(pipeline, "pages")
    asked = {
        "key": json.dumps([PAGES[2]]),
        "id": [key_id(["home"]), key_id(["nowhere"])],
        "window": 0,
    }
    found = get(feed, "/api/queries/pages/series", **asked)
    by_key = {str(one["key"]): one for one in found["series"]}

    for page in ("home", PAGES[2]):
        line = by_key[str([page])]
        values = [
            row["clicks"]
            for (window, _), table in truth.items()
            for row in table.to_pylist()
            if window == 0 and row["page"] == page
        ]
        assert [point["values"]["clicks"] for point in line["points"]] == values
        assert line["first_seen"] == 5 - len(values)
    assert by_key["None"]["points"] == []


@pytest.mark.parametrize(("limit", "kept"), [(2, [3, 6]), (4, [3, 4, 6]), (6, [3, 5, 6])])
def test_series_of_many_releases_are_thinned(feed, limit, kept):
    """The newest and the one at which the key appeared stay; all of them tell changes only."""
    asked = {"key": json.dumps([PAGES[4]])}
    (line,) = get(feed, "/api/queries/changed/series", **asked)["series"]
    found = get(feed, "/api/queries/changed/series", **asked, limit=limit)
    (thin,) = found["series"]

    assert found["complete"] == (limit == 6)
    assert line["first_seen"] == thin["first_seen"] == 3
    assert [point["release_index"] for point in thin["points"]] == kept
    assert thin["points"][-1]["values"] == line["points"][-1]["values"]


def test_series_over_windows_take_the_newest_release_of_each(feed, pipeline):
    """Which is the only one where each window is published once."""
    truth = published(pipeline, "steps")
    (line,) = get(feed, "/api/queries/steps/series", key='["news"]', window="all")["series"]
    (other,) = get(feed, "/api/queries/all/series")["series"]

    assert [point["window"] for point in line["points"]] == list(range(6))
    assert [point["values"]["users"] for point in line["points"]] == [
        table.to_pylist()[1]["users"] for table in truth.values()
    ]
    assert line["points"][0]["held"] is False
    starts = [f"{table.to_pylist()[1]['window_start']:%FT%T}" for table in truth.values()]
    assert [point["start"].split("+")[0] for point in line["points"]] == starts
    assert all(point["final"] for point in line["points"])
    assert [point["release_index"] for point in other["points"]] == [1, 2, 3]


def test_figures_of_several_windows_are_told(feed):
    """They share noise: a change between two of them has another margin than the page would say."""
    query = dps.sql("""
        SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS (epsilon = 1, delta = 1e-9,
            privacy_unit_column = user, max_groups_contributed = 1, start = '1970-01-01',
            end = '1970-01-03') window_start, page, COUNT(*) AS n,
            n - LAG(n) OVER (PARTITION BY page ORDER BY window_start) AS more
        FROM TUMBLE(clicks, DESCRIPTOR(at), INTERVAL '1' DAY) GROUP BY page, window_start""")

    assert QueryDescription(query=query).public["looks_back"]
    assert not get(feed, "/api/queries/pages")["looks_back"]


def test_windows_are_listed_newest_first(feed):
    """With a cursor."""
    first = get(feed, "/api/queries/pages/windows", limit=1)
    second = get(feed, "/api/queries/pages/windows", limit=1, after=first["next"])

    assert [one["window"] for one in first["windows"] + second["windows"]] == [1, 0]
    assert second["next"] is None
    assert first["windows"][0]["last_release_time"] == "1970-01-01T07:00:00+00:00"


def test_the_ledger_has_declared_amounts_only(feed, public):
    """They add up, and nothing of them comes from a run."""
    books = {one["dataset"]: one for one in get(feed, "/api/ledger")["datasets"]}

    for book in books.values():
        spent = sum(line["amount"] for line in book["spent_on"])
        assert spent == pytest.approx(book["spent"])
        assert book["left"] == pytest.approx(book["total"] - spent)
    assert {line["query"] for line in books["clicks"]["spent_on"]} == {"pages", "changed", "all"}
    assert books["visits"]["spent"] == 1


def test_the_ledger_counts_what_other_runs_have_taken(pipeline, tmp_path):
    """In one line without names: a run of another state directory was charged to the same book."""
    elsewhere = pipeline.path.parent / "elsewhere.toml"
    elsewhere.write_text(
        pipeline.path.read_text()
        .replace('"state/"', '"state2/"\nsecret = "state.secret"')
        .replace("[budget.clicks]", '[budget.clicks]\nledger = "state/ledger"')
        .replace("[budget.visits]", '[budget.visits]\nledger = "state/ledger"')
    )
    book = next(b for b in public_side(load_pipeline(elsewhere)).ledger if b["dataset"] == "clicks")
    (line,) = [line for line in book["spent_on"] if line["query"] is None]

    assert line["amount"] == pytest.approx(book["spent"] / 2)


def test_what_if_agrees_with_explain(feed):
    """Twice the epsilon, less noise; without a change nothing changes."""
    told = get(feed, "/api/queries/pages")["explain"]
    same = get(feed, "/api/what-if", query="pages")
    named = [one["setting"] for one in same["now"]["alternatives"]]
    assert named[0] == "as it is"
    assert "epsilon = " in named[-1]
    more = get(feed, "/api/what-if", query="pages", epsilon=6)
    wider = get(feed, "/api/what-if", query="pages", max_groups_contributed=16)
    series = get(feed, "/api/what-if", query="steps", epsilon=2)

    assert same["now"] == same["then"]
    assert series["now"] == get(feed, "/api/what-if", query="steps", epsilon=1)["then"]
    assert same["now"]["columns"] == told["columns"]
    assert same["now"]["keys"]["last_threshold"] == told["keys"]["last_threshold"]
    assert more["then"]["columns"][0]["last"] < 0.7 * more["now"]["columns"][0]["last"]
    assert wider["then"]["columns"][0]["last"] == pytest.approx(
        2 * wider["now"]["columns"][0]["last"], rel=0.05
    )
    assert series["then"]["columns"][0]["first"] == pytest.approx(
        series["now"]["columns"][0]["first"] / 2, rel=0.05
    )
    refused = feed.get(
        "/api/what-if",
        params={
            "query": "pages",
            "epsilon": 0.001,
            "delta": 1e-18,
            "max_groups_contributed": 100000,
        },
    )
    assert refused.status_code in (200, 422)
    assert feed.get("/api/what-if", params={"query": "steps", "delta": 1e-9}).status_code == 409


def test_who_has_an_answer_is_told_so(feed):
    """Polling costs a header."""
    first = feed.get("/api/queries/pages/latest")
    again = feed.get("/api/queries/pages/latest", headers={"if-none-match": first.headers["etag"]})

    assert (again.status_code, again.content) == (304, b"")


def test_openapi_describes_every_route(feed, public):
    """Version 3.1, with every parameter."""
    document = get(feed, "/openapi.json")

    assert document["openapi"].startswith("3.1")
    assert set(document["paths"]) == {each.path for each in public.endpoints()}
    names = {
        p["name"] for p in document["paths"]["/api/queries/{name}/latest"]["get"]["parameters"]
    }
    assert names == {"name", "window", "sort", "order", "limit", "offset", "q"}


def test_formulas_are_escaped_in_csv_where_it_is_asked_for():
    """Text alone, and at its beginning alone; numbers, nulls and other kinds of files stay."""
    keys = ["=1+1", "+1", "-5", "@x", "\tx", "a=b", "'=x", "", None, "two\n=lines"]
    table = pa.table({"page": keys, "clicks": [-float(n) for n in range(10)]})
    schema = table.schema
    plain, escaped = (
        b"".join(file_stream("csv", [(0, 1, table)], schema, escape=escape))
        for escape in (False, True)
    )

    read = list(csv.DictReader(io.StringIO(escaped.decode())))
    assert [row["page"] for row in read] == [
        *("'" + key for key in keys[:5]),
        *(key or "" for key in keys[5:]),
    ]
    unescaped = list(csv.DictReader(io.StringIO(plain.decode())))
    assert [row["page"] for row in unescaped] == [key or "" for key in keys]
    assert [row["clicks"] for row in read] == [row["clicks"] for row in unescaped]


@pytest.mark.parametrize("route", ["download", "releases"])
def test_escapes_are_an_option_of_csv(feed, route):
    """Of both routes that give files; for other kinds it is refused."""
    path = f"/api/queries/pages/{route}?escape_formulas=1"
    assert feed.get(f"{path}&format=csv").status_code == 200
    assert feed.get(f"{path}&format=jsonl").status_code == 422
