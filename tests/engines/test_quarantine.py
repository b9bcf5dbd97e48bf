"""Files that cannot be used are set aside whole, for good, and no run stops for them.

The noise of public groups does not depend on the data, so two runs publish the same exactly if they
have counted the same rows.
"""

import gzip
import hashlib
import io
import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dpstream as dps
from dpstream.connectors.encode import ENCODERS
from dpstream.connectors.files import trial
from dpstream.connectors.files.parquet import ParquetFile
from dpstream.connectors.files.source import GrowingDirectory
from dpstream.connectors.files.text import TextFile
from dpstream.connectors.messages import Decoder
from dpstream.errors import InvalidInput, InvalidParameter, UnusableFile
from tests.support.fixed import SECRET
from tests.support.live_runs import HOUR, QUERY, ScriptedClock, start_live
from tests.support.long import part_of
from tests.support.runs import options, published

ASKED = {name: value for name, value in QUERY.items() if name != "time_unit"}
SUFFIXES = ("parquet", "parquet", "csv", "jsonl", "csv.gz", "jsonl.gz")
COLUMNS = ["user", "page", "at"]


def clicks(seed, rows=120):
    """Rows of six hours, in no order; every file has users of its own."""
    rng = np.random.default_rng(seed)
    return pa.table(
        {
            "user": [f"{seed} {n}" for n in rng.integers(0, rows, rows)],
            "page": [f"/{n}" for n in rng.integers(1, 4, rows)],
            "at": pa.array(rng.integers(0, 6 * HOUR, rows), pa.timestamp("us", "UTC")),
            "seconds": rng.normal(size=rows),
        }
    )


def content(suffix, seed):
    """A whole file; Parquet in several ways."""
    table, kind = clicks(seed), suffix.removesuffix(".gz")
    if kind != "parquet":
        text = ENCODERS[kind](table)
        return gzip.compress(text, mtime=0) if suffix.endswith("gz") else text
    file = io.BytesIO()
    pq.write_table(
        table,
        file,
        row_group_size=50,
        compression=["snappy", "zstd", "gzip", "none"][seed % 4],
        use_dictionary=seed % 3 > 0,
        data_page_version=["1.0", "2.0"][seed % 2],
    )
    return file.getvalue()


def mutate(original, seed):
    """Cut it, overwrite bytes, remove some, add some, or turn bits near its end or its start."""
    rng, data = np.random.default_rng(seed), bytearray(original)
    way, at = int(rng.integers(6)), int(rng.integers(len(data)))
    if way == 0:
        return bytes(data[:at])
    if way == 1:
        data[at : at + int(rng.integers(64))] = b""
    elif way == 2:
        data[at:at] = rng.bytes(int(rng.integers(1, 64)))
    for _ in range(0 if way < 3 else int(rng.choice([1, 2, 8]))):
        reach = min(len(data), 1200) if way > 3 else len(data)
        place = int(rng.integers(reach))
        data[place if way < 5 else len(data) - 1 - place] ^= int(rng.integers(1, 256))
    return bytes(data)


def write_files(folder, first, count):
    """Whole files and mutants of all formats; names of the whole ones begin with "good"."""
    folder.mkdir(parents=True)
    for number in range(first, first + count):
        suffix = SUFFIXES[number % len(SUFFIXES)]
        original = content(suffix, number % 24)
        (folder / f"m{number:05d}.{suffix}").write_bytes(mutate(original, number))
    for number, suffix in enumerate(SUFFIXES):
        (folder / f"good{number}.{suffix}").write_bytes(content(suffix, 1000 + number))
    return sorted(folder.iterdir())


def start(place, source, asked=ASKED, **named):
    """A run over files, of public groups and a fixed secret."""
    settings = {
        "sink": place / "out",
        "state": place / "state",
        "secret": SECRET,
        "options": options(),
    }
    return dps.run(dps.Query(**asked), source=source, **(settings | named))


BATCH = 80


@pytest.mark.parametrize("first", range(0, part_of(2400), BATCH))
def test_mutated_files_stop_no_run_and_are_counted_whole_or_not_at_all(tmp_path, first):
    """What is published is what a run over the files that were not set aside publishes."""
    files = write_files(tmp_path / "in", first, BATCH)
    run = start(tmp_path, files).finish()
    aside = {Path(name) for name in run.operator.quarantined}
    counted = [path for path in files if path not in aside]
    alone = start(tmp_path / "alone", counted, on_damage="stop").finish()

    assert published(tmp_path) == published(tmp_path / "alone")
    assert run.operator.read == alone.operator.read
    assert aside
    assert not any(path.name.startswith("good") for path in aside)
    for path in files:
        if path.name.endswith(".gz") and path not in aside:
            gzip.decompress(path.read_bytes())  # its checksum holds
        as_before = path.read_bytes().startswith(b'"user","page","at","seconds"\n')
        if path.suffix == ".jsonl" or (path.suffix == ".csv" and as_before):
            assert path not in aside  # only lines of it can be unusable


def test_mutated_files_in_a_live_directory(tmp_path):
    """Broken off and begun again, with the damaged files mended meanwhile: the same bytes."""
    count = part_of(600)
    files = write_files(tmp_path / "all", 5000, count)
    when = {path.name: (1 + number % 5) * HOUR - HOUR // 2 for number, path in enumerate(files)}

    def comes(folder):
        return [
            (time, lambda name=name: put(folder, name, (tmp_path / "all" / name).read_bytes()))
            for name, time in when.items()
        ]

    def begin(place, clock):
        return start_live(place, clock, ASKED)

    whole = tmp_path / "whole"
    unbroken = begin(whole, ScriptedClock(0, comes(whole / "in"))).finish()
    clock = ScriptedClock(0, comes(tmp_path / "in"))
    for releases in (1, 3, 6, 99):
        run = iter(begin(tmp_path, clock))
        for _ in range(releases):
            next(run, None)
        run.close()
        for name in unbroken.operator.quarantined:
            if is_logged(tmp_path / "state", name):
                (tmp_path / "in" / name).write_bytes(content(name.partition(".")[2], 7))

    assert unbroken.operator.quarantined
    assert not any(name.startswith("good") for name in unbroken.operator.quarantined)
    assert published(tmp_path) == published(whole)


def put(folder, name, data):
    """Put a file there whole, once."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / name).exists():
        (folder / f".{name}").write_bytes(data)
        os.rename(folder / f".{name}", folder / name)


def is_logged(state, name):
    """Is a quarantined file in the input log by now?"""
    return name.encode() in (state / "inputs.log").read_bytes()


def arrow(seed):
    """A whole message: a stream or a file, compressed or not, with a dictionary or not."""
    table, file = clicks(seed), io.BytesIO()
    if seed % 3 == 0:
        table = table.set_column(1, "page", table["page"].dictionary_encode())
    how = pa.ipc.IpcWriteOptions(compression=[None, "lz4", "zstd"][seed % 3])
    make = pa.ipc.new_file if seed % 2 else pa.ipc.new_stream
    with make(file, table.schema, options=how) as writer:
        writer.write_table(table, max_chunksize=50)
    return file.getvalue()


def test_mutated_arrow_messages_cost_only_themselves():
    """Each is read whole, or set aside with a reason; its neighbours are read."""
    decoder, good = Decoder("arrow"), arrow(100)
    for number in range(part_of(600)):
        mutant = mutate(arrow(number % 12), number)
        decoded = decoder.decode([good, mutant, good], COLUMNS)
        rows = np.bincount(decoded.origin, minlength=3)

        assert (rows[0], rows[2]) == (120, 120)
        assert rows[1] == 0 or 1 not in [at for at, _ in decoded.bad]


def damaged(original):
    """Cut in its middle."""
    return original[: len(original) // 2]


def two_files(folder):
    """A whole file and a damaged one."""
    put(folder, "a.parquet", damaged(content("parquet", 1)))
    put(folder, "b.parquet", content("parquet", 2))
    return folder


def letters(state):
    """All dead letters."""
    paths = sorted((state / "dead-letters").glob("*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def test_the_operator_is_told(engine, tmp_path, caplog):
    """In the log, in counts, in the dead letters: name, digest and reason."""
    source = two_files(tmp_path / "in")
    run = start(tmp_path, source, engine=engine).finish()
    name, digest = str(source / "a.parquet"), hashlib.sha256((source / "a.parquet").read_bytes())
    (letter,) = letters(tmp_path / "state")

    assert run.operator_facts()["quarantined"] == 1
    assert run.operator.read == 120
    assert letter["where"] == name
    assert letter["reason"].startswith(f"{name} cannot be read as Parquet: ")
    assert letter["row"] == f"the file, SHA-256 {digest.hexdigest()}"
    assert any(line.getMessage().startswith(f"{name} is quarantined") for line in caplog.records)


def test_a_live_directory_goes_on(engine, tmp_path):
    """Also where the damaged file is the first that comes."""
    folder = tmp_path / "in"
    comes = [(HOUR // 2, lambda: put(folder, "a.csv.gz", damaged(content("csv.gz", 1))))]
    comes += [(3 * HOUR // 2, lambda: put(folder, "b.csv.gz", content("csv.gz", 2)))]
    run = start_live(tmp_path, ScriptedClock(0, comes), ASKED, engine=engine).finish()

    assert list(run.operator.quarantined) == ["a.csv.gz"]
    assert run.operator.read == 120


@pytest.mark.parametrize("releases", [1, 3])
def test_a_mended_file_stays_out_of_a_run_that_has_begun(tmp_path, releases):
    """A restart counts what the first start has counted; another name is a new file."""
    expected = start(tmp_path / "whole", two_files(tmp_path / "whole" / "in")).finish()
    run = iter(start(tmp_path, two_files(tmp_path / "in")))
    for _ in range(releases):
        next(run)
    run.close()
    (tmp_path / "in" / "a.parquet").write_bytes(content("parquet", 1))
    again = start(tmp_path, tmp_path / "in").finish()

    assert published(tmp_path) == published(tmp_path / "whole")
    assert len(again.operator.quarantined) == len(expected.operator.quarantined) == 1


def test_a_file_that_is_damaged_after_it_was_counted_is_refused(tmp_path):
    """Leaving its later rows out would count it by half."""
    put(tmp_path / "in", "a.parquet", content("parquet", 1))
    put(tmp_path / "in", "b.parquet", content("parquet", 2))
    run = iter(start(tmp_path, tmp_path / "in"))
    next(run)
    run.close()
    (tmp_path / "in" / "a.parquet").write_bytes(damaged(content("parquet", 1)))

    with pytest.raises(InvalidInput, match="was read before and cannot be read any more"):
        start(tmp_path, tmp_path / "in").finish()


def test_nothing_is_spent_if_no_file_can_be_used(tmp_path):
    """As ever, a single file that is damaged, or lacks a column, is refused."""
    put(tmp_path / "in", "a.csv.gz", damaged(content("csv.gz", 1)))
    put(tmp_path / "in", "b.csv.gz", gzip.compress(b"user,site\n1,2\n"))
    book = dps.Ledger()

    with pytest.raises(UnusableFile, match=r"a\.csv\.gz cannot be read"):
        start(tmp_path, tmp_path / "in", ledger=book).finish()
    assert not list(book.history())


def test_a_damaged_file_can_be_refused(tmp_path):
    """`on_damage="stop"`, by files and live."""
    source = two_files(tmp_path / "in")

    with pytest.raises(UnusableFile, match=r"a\.parquet cannot be read as Parquet"):
        start(tmp_path, source, on_damage="stop").finish()
    with pytest.raises(UnusableFile, match=r"a\.parquet cannot be read as Parquet"):
        start_live(tmp_path, ScriptedClock(), ASKED, on_damage="stop").finish()
    with pytest.raises(InvalidParameter, match="on_damage must be quarantine or stop"):
        start(tmp_path, source, on_damage="ignore")


def test_a_file_without_a_wanted_column_is_set_aside_alone(tmp_path):
    """In a folder of files that have it; also of text."""
    put(tmp_path / "in", "a.csv", b"user,at\n1,1970-01-01\n")
    put(tmp_path / "in", "b.csv", content("csv", 2))
    run = start(tmp_path, tmp_path / "in").finish()

    assert list(run.operator.quarantined) == [str(tmp_path / "in" / "a.csv")]
    assert run.operator.read == 120


def test_a_file_that_is_cut_while_it_is_read_ends_there(tmp_path, monkeypatch, caplog):
    """Rows that were counted stay, the rest is set aside; a replay does the same."""
    folder, read = tmp_path / "in", TextFile.read
    data = gzip.compress(ENCODERS["csv"](clicks(1, 5000)), mtime=0)
    monkeypatch.setitem(TextFile.__init__.__kwdefaults__, "block", 1 << 17)

    def cut_and_read(self, position, *given):
        if position is not None:
            os.truncate(folder / "a.csv.gz", len(data) * 3 // 4)
        return read(self, position, *given)

    monkeypatch.setattr(TextFile, "read", cut_and_read)
    clock = ScriptedClock(0, [(HOUR // 2, lambda: put(folder, "a.csv.gz", data))])
    run = start_live(tmp_path, clock, ASKED)
    tables = iter(run)
    next(tables)
    read_before = run.operator.read
    tables.close()
    again = start_live(tmp_path, clock, ASKED).finish()

    assert 0 < read_before == again.operator.read < 5000
    assert "a.csv.gz cannot be read" in again.operator.quarantined["a.csv.gz"]
    assert letters(tmp_path / "state")[0]["row"].startswith("the file after ")
    assert caplog.text.count("a.csv.gz ") == caplog.text.count("a.csv.gz is quarantined") + 1 == 2


@pytest.mark.parametrize("whole", [False, True])
def test_parquet_that_is_written_to_while_it_is_read_is_tried_again(tmp_path, caplog, whole):
    """What is open has the footer of before: by that, bytes would be read that are others now."""
    path, end = tmp_path / "a.parquet", content("parquet", 2)
    path.write_bytes(content("parquet", 1))
    source = GrowingDirectory(tmp_path, on_damage="quarantine")
    first = source.read("a.parquet", None, columns=COLUMNS)
    path.write_bytes(end if whole else damaged(end))
    os.utime(path, ns=(0, 0))
    rest = source.read("a.parquet", first.position, columns=COLUMNS)

    assert len(first.table) == 50
    if whole:
        assert rest.table["user"].to_pylist() == clicks(2)["user"][50:100].to_pylist()
        assert source.read("a.parquet", rest.position, columns=COLUMNS).done
        assert caplog.text.count("a.parquet was written to while it was read") == 1
    else:
        assert rest.position["after"] == first.position == [1, 0]
        assert caplog.text.count("a.parquet is quarantined") == 1
    assert len(caplog.records) == 1


@pytest.mark.parametrize("on_done", ["keep", "move", "delete"])
@pytest.mark.parametrize("releases", [2, 5])
def test_a_quarantined_file_stays_where_it_is(tmp_path, on_done, releases):
    """Whatever becomes of files that are done; another file of its name is not read either."""
    folder = tmp_path / "in"
    comes = [(HOUR // 2, lambda: two_files(folder))]
    comes += [(11 * HOUR // 2, lambda: put(folder, "c.parquet", content("parquet", 3)))]
    clock, read = ScriptedClock(0, comes), []
    for stop in (releases, releases + 1, 99):
        run = start_live(tmp_path, clock, ASKED, on_done=on_done, options=options(every=1))
        for _ in zip(range(stop), run, strict=False):
            pass
        run.close()
        read.append(run.operator.read)
        assert list(run.operator.quarantined) == ["a.parquet"]
        put(folder, "new", content("parquet", 1))
        os.rename(folder / "new", folder / "a.parquet")

    assert sum(read) == 240
    there = {path.name for path in folder.glob("*.parquet")}
    assert there == {"a.parquet"} | (set() if on_done != "keep" else {"b.parquet", "c.parquet"})


def test_a_series_leaves_the_file_out_too(tmp_path):
    """Also after a kill."""
    asked = dps.SeriesQuery(
        mechanism=dps.mechanisms.Uniform(epsilon=1, window=2),
        **{name: ASKED[name] for name in ("name", "privacy_unit_column", "keys", "public_groups")},
        **{name: ASKED[name] for name in ("time_column", "start", "end")},
        window=dps.Tumble("1 hour"),
    )
    place = {"sink": tmp_path / "out", "state": tmp_path / "state", "secret": SECRET}
    run = dps.run(asked, source=two_files(tmp_path / "in"), **place)
    next(iter(run))
    run.close()
    (tmp_path / "in" / "a.parquet").write_bytes(content("parquet", 1))
    again = dps.run(asked, source=tmp_path / "in", **place).finish()

    assert again.operator.read == 120
    assert len(again.operator.quarantined) == 1


def test_several_queries_lose_only_the_files_that_they_cannot_read(tmp_path):
    """One column is damaged: a query that does not want it counts the file."""
    file = io.BytesIO()
    pq.write_table(clicks(3), file, compression="gzip", use_dictionary=False)
    data = bytearray(file.getvalue())
    data[pq.ParquetFile(file).metadata.row_group(0).column(3).data_page_offset + 300] ^= 255
    put(tmp_path / "in", "a.parquet", bytes(data))
    put(tmp_path / "in", "b.parquet", content("parquet", 2))
    spent = dps.Sum("spent", column="seconds", contribution_bounds_per_row=(0, 1))
    count = dps.Query(**ASKED | {"name": "count"})
    total = dps.Query(**ASKED | {"name": "total", "aggregates": (spent,)})
    book = dps.Ledger()
    book.open("stream", count.promise(epsilon=32, delta=1e-4))
    runs = dps.run_all([count, total], source=tmp_path / "in", ledger=book)
    runs.finish()

    assert not runs.runs["count"].operator.quarantined
    assert list(runs.runs["total"].operator.quarantined) == [str(tmp_path / "in" / "a.parquet")]


def test_a_file_that_ends_its_reader_is_set_aside(tmp_path, monkeypatch):
    """The process that tries it dies, is started anew, and the next file is read."""
    put(tmp_path, "a.parquet", content("parquet", 1))
    put(tmp_path, "b.parquet", content("parquet", 2))
    deadly = "import os, sys; sys.stdin.readline(); os.abort()"
    popen = trial.subprocess.Popen
    monkeypatch.setattr(trial, "_child", None)
    with monkeypatch.context() as patch:
        patch.setattr(
            trial.subprocess,
            "Popen",
            lambda command, **how: popen([command[0], "-c", deadly], **how),
        )
        with pytest.raises(UnusableFile, match=r"ends the process that reads it \(SIGABRT\)"):
            trial.try_parquet(tmp_path / "a.parquet", COLUMNS)

    trial.try_parquet(tmp_path / "b.parquet", COLUMNS)
    trial._end_trials()


def test_one_byte_that_ends_arrows_process_ends_no_run(tmp_path):
    """A footer whose column cannot be missing, with statistics of one that can: Arrow aborts."""
    data = content("parquet", 1)
    at = data.rindex(b"\x25\x02")  # in the last column of the schema: optional
    put(tmp_path / "in", "a.parquet", data[:at] + b"\x25\x00" + data[at + 2 :])
    put(tmp_path / "in", "b.parquet", content("parquet", 2))
    run = start(tmp_path, tmp_path / "in").finish()
    (reason,) = run.operator.quarantined.values()

    assert run.operator.read == 120
    assert "a.parquet cannot be read as Parquet: " in reason


def thrift(number):
    """A number of the compact protocol: zigzag, seven bits a byte."""
    number, data = (number << 1) ^ (number >> 63), bytearray()
    while number > 127:
        data.append(number & 127 | 128)
        number >>= 7
    return bytes([*data, number])


def lying_page(claimed=(1 << 31) - 1):
    """A whole file whose only page says that it has two gigabytes when it is unpacked."""
    file = io.BytesIO()
    how = {"use_dictionary": False, "write_statistics": False, "store_schema": False}
    pq.write_table(pa.table({"user": [str(n) for n in range(1000)]}), file, **how)
    chunk, data = pq.ParquetFile(file).metadata.row_group(0).column(0), file.getvalue()
    head, size = data[4:7], len(thrift(chunk.total_uncompressed_size))
    assert head == b"\x15\x00\x15"  # a data page; its size comes next
    more = len(thrift(claimed)) - size
    data = data[:7] + thrift(claimed) + data[7 + size :]
    packed, longer = (b"\x16" + thrift(chunk.total_compressed_size + n) for n in (0, more))
    return data.replace(packed, longer, 1)


def test_a_page_that_states_a_huge_size_takes_no_memory(tmp_path, monkeypatch):
    """The process that tries a file has a bound; the reason says what was asked for."""
    put(tmp_path, "a.parquet", lying_page())
    put(tmp_path, "b.parquet", content("parquet", 1))
    monkeypatch.setattr(trial, "_MEMORY", 2 << 30)
    with pytest.raises(UnusableFile, match=r"malloc of size 2147483\d+ failed.* row groups"):
        trial.try_parquet(tmp_path / "a.parquet", ["user"])
    trial.try_parquet(tmp_path / "b.parquet", COLUMNS)
    monkeypatch.setattr(trial, "_MEMORY", 8 << 30)  # the lie comes out when it is unpacked
    with pytest.raises(UnusableFile, match=r"cannot be read as Parquet: (?!malloc)"):
        trial.try_parquet(tmp_path / "a.parquet", ["user"])


@pytest.mark.parametrize(
    ("field", "lie", "said"),
    [
        ("num_values", 3001, "its footer has sizes of the column 'user' that cannot be true"),
        ("num_values", -1, "its footer has sizes of the column 'user' that cannot be true"),
        ("total_compressed_size", 1 << 40, "sizes of the column 'user' that cannot be true"),
        ("total_uncompressed_size", -1, "sizes of the column 'user' that cannot be true"),
        ("total_uncompressed_size", 1 << 40, "more than max_unpacked_bytes = 68719476736"),
    ],
)
def test_sizes_of_a_footer_that_cannot_be_true_are_refused_first(tmp_path, field, lie, said):
    """Of a column: what the whole row group states is left as it was."""
    file = io.BytesIO()
    pq.write_table(clicks(1, 3000).select(["user"]), file, compression="zstd")
    chunk, data = pq.ParquetFile(file).metadata.row_group(0).column(0), file.getvalue()
    size = int.from_bytes(data[-8:-4], "little")
    body, footer, told = data[: -8 - size], data[-8 - size : -8], getattr(chunk, field)
    before, after, rest = footer.partition(b"\x19\x1c\x19")  # where the row groups begin
    rest = rest.replace(b"\x16" + thrift(told), b"\x16" + thrift(lie), 1)
    footer = before + after + rest
    path = tmp_path / "a.parquet"
    path.write_bytes(body + footer + len(footer).to_bytes(4, "little") + b"PAR1")

    assert getattr(pq.ParquetFile(path).metadata.row_group(0).column(0), field) == lie
    with pytest.raises(UnusableFile, match=said):
        ParquetFile(path, name="a")


@pytest.mark.parametrize("name", [b"a\xff.csv", b"a\xff.parquet", b"cut\xff.parquet"])
def test_a_file_name_may_be_no_text(tmp_path, name):
    """It is counted, or set aside, as any other, also by a second start; letters show the bytes."""
    folder, name = tmp_path / "in", os.fsdecode(name)
    data = content(name.partition(".")[2], 1)
    data = damaged(data) if name.startswith("cut") else data + b"x,y\n" * name.endswith("csv")

    def come():
        put(folder, name, data)
        put(folder, "b.csv", content("csv", 2))

    clock = ScriptedClock(0, [(HOUR // 2, come)])
    run = start_live(tmp_path, clock, ASKED)
    next(iter(run))
    read = run.operator.read
    run.close()
    again = start_live(tmp_path, clock, ASKED).finish()

    assert again.operator.read == read == {"a": 240, "c": 120}[name[0]] + name.endswith("csv")
    assert list(again.operator.quarantined) == [name] * name.startswith("cut")
    shown = [letter["where"] for letter in letters(tmp_path / "state")]
    assert all(name.replace("\udcff", "\\udcff") in where for where in shown)
    assert len(shown) == (not name.startswith("a\udcff.p"))
