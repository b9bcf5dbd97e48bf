"""Names that end up in noise keys are written identities: names of the code may change."""

import re
import sys
from dataclasses import dataclass, replace
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import dpstream as dps
from dpstream.errors import InvalidParameter
from dpstream.mechanisms import REGISTRY, find
from dpstream.mechanisms.base import HistogramMechanism
from dpstream.mechanisms.counter import key_ids
from dpstream.mechanisms.w_event import spas
from dpstream.privacy.state import serial, storable
from dpstream.privacy.state.identity import Identified, canonical, readable
from dpstream.query import aggregates, query
from tests.laws.cases import NAMES, bins_of, example, stream
from tests.laws.queries import busy, query_of, run_of
from tests.support.fixed import RUN, SECRET

WRITTEN = Path(__file__).with_name("identities.txt")


def classes():
    """Every class that is shipped and has an identity; the auditor's broken forms are not."""
    for name in REGISTRY:
        find(name)
    import_module("dpstream.ext")  # and all aggregates
    found, left = set(), [Identified]
    while left:
        new = [cls for cls in left.pop().__subclasses__() if cls not in found]
        found.update(new)
        left += new
    shipped = re.compile(r"dpstream\.(?!audit\.|bench\.)")
    return [cls for cls in found if cls.identity is not None and shipped.match(cls.__module__)]


def renamed(module, monkeypatch, *changes):
    """A copy of a module in which its words are others, and its classes take the place of its own.

    A change is (pattern, word).
    """
    text = Path(module.__file__).read_text()
    for pattern, word in changes:
        text, count = re.subn(pattern, word, text)
        assert count, pattern
    others = {n: cls for n, cls in serial._CLASSES.items() if cls.__module__ != module.__name__}
    monkeypatch.setattr(serial, "_CLASSES", others)
    copy = ModuleType("another_name")
    monkeypatch.setitem(sys.modules, "another_name", copy)
    exec(compile(text, module.__file__, "exec"), vars(copy))
    return copy


@pytest.fixture
def sparse(monkeypatch):
    """`Spas` by another name, with other names for its own parameter and a method."""
    words = (
        (r"\bwarm_up\b", "settling"),
        (r'"update settling theta', '"update warm_up=settling theta'),
        (r"\bSpas\b", "Sparse"),
        (r"\bSpasState\b", "SparseState"),
    )
    return renamed(spas, monkeypatch, *words).Sparse


@pytest.fixture
def question(monkeypatch):
    """`Query` by another name, with another name for one field."""
    words = (
        (r"\bweights\b", "shares"),
        (r"last_budget shares\n", "last_budget weights=shares\n"),
        (r"\bclass Query\b", "class Question"),
    )
    return renamed(query, monkeypatch, *words).Question


def released(mechanism, steps=12):
    block = stream(mechanism, steps)
    return dps.release(mechanism, block, secret=SECRET, run_id=RUN).values


def fingerprint(mechanism):
    return dps.Runner(mechanism, secret=SECRET, run_id=RUN).fingerprint()


def test_every_identity_is_written_down():
    """The list changes by new lines alone: another identity or key is other noise for everybody."""
    found = {cls.identity: sorted(cls.written_keys.values()) for cls in classes()}
    lines = (line.partition(": ") for line in WRITTEN.read_text().splitlines())

    assert found == {identity: sorted(keys.split()) for identity, _, keys in lines}


def test_identities_are_unique():
    """No two classes share one, and a mechanism's is the name that users know it by."""
    identities = [cls.identity for cls in classes()]

    assert len(set(identities)) == len(identities)
    assert [find(name).identity for name in NAMES] == NAMES


def test_a_mechanism_by_other_names_publishes_the_same(sparse):
    """Class, parameter and module have other names; fingerprint and releases are the same."""
    one, two = example("spas"), sparse(epsilon=1, window=example("spas").window)

    assert (type(two).__name__, two.settling) == ("Sparse", one.warm_up)
    assert fingerprint(one) == fingerprint(two)
    assert np.array_equal(released(one), released(two))


def test_a_saved_run_goes_on_under_other_names(monkeypatch, tmp_path, request):
    """Files hold identities and keys, so that a newer version with other names reads them."""
    one = dps.mechanisms.Spas(epsilon=1, window=4, warm_up=3)
    block = stream(one, 12)
    whole = dps.release(one, block, secret=SECRET, run_id=RUN).values
    with dps.Runner(one, state=tmp_path / "state", secret=SECRET, run_id=RUN) as runner:
        first = [r.values for row in block[:6] for r in runner.step(row)]
        runner.save()
    cls = request.getfixturevalue("sparse")

    two = cls(epsilon=1, window=4, settling=3)
    with dps.Runner(two, state=tmp_path / "state", secret=SECRET) as later:
        rest = [r.values for row in block[6:] for r in later.step(row)]

    assert (type(later.mechanism), later.mechanism.settling) == (cls, 3)
    assert np.array_equal(whole, [*first, *rest])


@pytest.mark.parametrize("name", NAMES)
def test_another_parameter_is_another_run(name):
    """Every amount of a mechanism, and nothing else, changes what it is known by."""
    one, two = example(name), example(name, epsilon=2)

    assert fingerprint(one) == fingerprint(replace(one))
    assert fingerprint(one) != fingerprint(two)
    assert bins_of(one) == bins_of(two)


def test_parameters_of_a_mechanism_inside_have_keys(monkeypatch):
    """The options of `SensitivityTruncation` are hashed by their keys, as if it stood alone."""
    outer = example("sensitivity_truncation")
    before = canonical(outer)
    inner = find(outer.inside)
    keys = {**inner.written_keys, "threshold": "another key"}
    monkeypatch.setattr(inner, "written_keys", keys)

    assert outer.options[0][0] == "threshold"
    assert canonical(outer) == before.replace('"threshold"', '"another key"')


def test_a_query_by_other_names_publishes_the_same(question):
    """Class, field and module have other names; facts and releases are the same."""
    given = {"window": dps.Tumble("6 hours"), "every": "3 hours", "end": "1970-01-02"}
    one = query_of(**given, weights={"count": 2})
    parts = {name: getattr(one, name) for name in one.written_keys if name != "weights"}
    two = question(**parts, shares={"count": 2})

    assert one.facts() == two.facts()
    tables = [list(run_of(asked, busy())) for asked in (one, two)]
    assert tables[0] == tables[1]
    assert sum(map(len, tables[0])) > 10
    assert two.facts() != replace(two, shares={"count": 3}).facts()


def test_an_aggregate_by_another_name_is_the_same(monkeypatch):
    """Its identity is what a query is known by."""
    words = (
        (r"\bAvg\b", "Mean"),
        (r"\bcolumn: str\b", "of: str"),
        (r"self\.column\b", "self.of"),
        (r'"name column lo', '"name column=of lo'),
        (r'"column most', '"column=of most'),
    )
    copy = renamed(aggregates, monkeypatch, *words)
    one = dps.Avg("a", column="x", contribution_bounds_per_row=(0, 1))

    assert canonical(copy.Mean("a", of="x", contribution_bounds_per_row=(0, 1))) == canonical(one)
    assert canonical(copy.Mean("a", of="y", contribution_bounds_per_row=(0, 1))) != canonical(one)


def test_a_mechanism_without_identity_is_refused():
    """At its definition, in words that say what to write."""
    with pytest.raises(
        TypeError, match=r'class Stride\(HistogramMechanism, identity="\.\.\.", key'
    ):

        class Stride(HistogramMechanism):
            stride: int = 2

    with pytest.raises(TypeError, match=r'no key for pace; .* keys="stride pace"'):

        class Pace(HistogramMechanism, identity="test pace", keys="stride"):
            stride: int = 2
            pace: int = 2

    with pytest.raises(TypeError, match="a key for 'gone', which it does not declare"):

        class Gone(HistogramMechanism, identity="test gone", keys="gone"):
            pass

    with pytest.raises(TypeError, match="one key for two parameters"):

        class Twice(HistogramMechanism, identity="test twice", keys="epsilon=share"):
            share: int = 2

    with pytest.raises(TypeError, match=r"'spas' is the identity of dpstream.*Spas and cannot"):

        class Other(HistogramMechanism, identity="spas"):
            pass


def test_a_mechanism_that_is_no_identified_class_is_refused():
    """One that only follows the protocol is told so before anything is charged."""

    class Loose:
        terms = dps.mechanisms.Sample(epsilon=1, window=2).terms

        def start(self):
            return None

    with pytest.raises(InvalidParameter, match="a Loose has no identity"):
        dps.Runner(Loose())


def test_a_class_may_be_defined_again():
    """A notebook runs a cell twice: the later definition counts."""

    def define():
        @storable("test cell")
        @dataclass(frozen=True)
        class Cell:
            value: int

        return Cell

    first, second = define(), define()

    packed = serial.pack(first(3), kind="test")
    assert type(serial.unpack(packed, kind="test")) is second


def test_values_are_written_by_what_they_are():
    """NumPy's numbers as Python's; a float is no integer, a text is no number."""
    assert canonical(np.int64(3)) == canonical(3) == "3"
    assert canonical(np.float64(0.1)) == canonical(0.1)
    different = [3, 3.0, "3", True, Fraction(3), (3,), [3], None, b"3", np.datetime64(3, "D")]
    assert len({canonical(value) for value in different}) == len(different)
    assert "Fraction" not in canonical(Fraction(1, 3))
    assert readable(canonical(example("sample"))).startswith("sample(epsilon=1, window=")


def test_keys_of_a_counter_are_values():
    """Equal keys have equal ids, whatever type holds them; an object is no key."""
    assert np.array_equal(key_ids([1, "a"]), key_ids([np.int64(1), "a"]))
    with pytest.raises(InvalidParameter, match="a object has no identity"):
        key_ids([object()])
