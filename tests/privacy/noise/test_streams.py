"""Addressed noise: one stream per address, one block per use, the same for every process."""

import dataclasses
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from dpstream.errors import InvalidParameter, NoiseExhausted, NoiseReuse
from dpstream.privacy.noise import (
    Address,
    Stream,
    add_laplace,
    choose,
    discrete_gaussian,
    discrete_laplace,
    respond,
)
from dpstream.privacy.noise.keyed_draws import ATTEMPTS, EXTENSIONS, LANES, MAX_STEP, counter
from tests.support.processes import run_python

FALSE_ALARM = 1e-6
KEY = bytes(range(32))
HOME = Address(run=b"stream tests 001", query="q", column="c", window=3, purpose="p")
ELSEWHERE = {
    "run": dataclasses.replace(HOME, run=b"stream tests 002"),
    "query": dataclasses.replace(HOME, query="Q"),
    "column": dataclasses.replace(HOME, column=""),
    "window": dataclasses.replace(HOME, window=-3),
    "purpose": dataclasses.replace(HOME, purpose="p\0"),
    "fields moved": dataclasses.replace(HOME, query="qc", column=""),
}
Words = npt.NDArray[np.uint64]

names = st.text(max_size=15)
addresses = st.builds(
    Address,
    run=st.binary(min_size=16, max_size=16),
    query=names,
    column=names,
    window=st.integers(-(1 << 63), (1 << 63) - 1),
    purpose=st.text(max_size=11),
)
modes = st.sampled_from(["vector", "keyed"])


def key_ids(count: int) -> Words:
    """Distinct 128-bit ids."""
    return np.random.default_rng(3).integers(0, 1 << 64, (count, 2), dtype=np.uint64)


@given(addresses, modes, addresses, modes)
def test_different_addresses_have_different_encodings(one, one_mode, other, other_mode):
    """The encoding has one length and tells every two (address, mode) pairs apart."""
    left, right = one.encode(one_mode), other.encode(other_mode)

    assert len(left) == len(right) == 212
    assert (left == right) == ((one, one_mode) == (other, other_mode))


@given(addresses, st.sampled_from(["query", "column", "purpose"]), st.integers(0, 3))
def test_padding_and_neighbouring_fields_do_not_run_together(address, field, zeros):
    """A name, and the name with a trailing zero or with the next field's text, differ."""
    encodings = {
        dataclasses.replace(address, **{field: text}).encode("vector")
        for text in ("", "\0" * (zeros + 1), "a", "a" + "\0" * (zeros + 1))
    }

    assert len(encodings) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"run": b"short"}, "run id must be 16 bytes"),
        ({"query": "q" * 64}, "query must be shorter than 64 bytes"),
        ({"column": "é" * 32}, "column must be shorter than 64 bytes"),
        ({"purpose": "p" * 48}, "purpose must be shorter than 48 bytes"),
    ],
)
def test_fields_that_do_not_fit_are_refused(change, message):
    """A name is never cut to fit: two long names would share their noise."""
    with pytest.raises(InvalidParameter, match=message):
        Stream(KEY, dataclasses.replace(HOME, **change))


def uncorrelated(one: npt.NDArray[np.int64], other: npt.NDArray[np.int64]) -> bool:
    """The sample correlation of independent draws is near normal with deviation 1/sqrt(n)."""
    correlation = np.corrcoef(one, other)[0, 1]
    return bool(abs(correlation) * np.sqrt(len(one)) < norm.isf(FALSE_ALARM / 2))


def home_noise(address: Address = HOME, key: bytes = KEY, step: int = 5, size: int = 100_000):
    """Laplace noise at one step of an address."""
    return discrete_laplace(Stream(key, address).at(step, size), Fraction(1000))


@pytest.mark.parametrize("part", ELSEWHERE)
def test_any_other_part_of_the_address_gives_independent_noise(part):
    """Another run, query, column, window or purpose shares nothing with this one."""
    noise, other = home_noise(), home_noise(ELSEWHERE[part])

    assert uncorrelated(noise, other)
    assert (noise == other).mean() < 0.002  # by chance about 1 in 4000
    assert not uncorrelated(noise, noise // 20 + other)  # the test sees a twentieth of the noise


def test_another_step_key_and_coordinate_give_independent_noise():
    """So do another step, another window key, and neighbouring coordinates."""
    noise = home_noise()

    assert uncorrelated(noise, home_noise(step=6))
    assert uncorrelated(noise, home_noise(key=bytes(32)))
    assert uncorrelated(noise[:-1], noise[1:])


def test_another_key_id_and_mode_give_independent_noise():
    """Per-key noise differs between ids, steps and from the vector noise of the same address."""
    ids = key_ids(100_000)
    keyed = Stream(KEY, HOME, "keyed")
    first, second = (discrete_laplace(keyed.at_keys(t, ids), Fraction(1000)) for t in (5, 6))
    near = ids ^ np.array([0, 1], dtype=np.uint64)
    other = discrete_laplace(Stream(KEY, HOME, "keyed").at_keys(5, near), Fraction(1000))

    assert uncorrelated(first, second)
    assert uncorrelated(first, other)
    assert uncorrelated(first, home_noise())


class Recorder:
    """Every block that leaves AES as noise, as (stream key, input block)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drawn: list[tuple[bytes, bytes]] = []
        self.ids: Words | None = None
        original = Stream.encrypt

        def encrypt(stream: Stream, blocks: Words) -> Words:
            name = KEY + stream.address.encode(stream.mode)
            # the first pass of keyed mode masks ids and is never noise itself
            if self.ids is None or not np.array_equal(blocks, self.ids):
                self.drawn += [(name, row.tobytes()) for row in blocks]
            return original(stream, blocks)

        monkeypatch.setattr(Stream, "encrypt", encrypt)


def test_no_block_is_used_twice(monkeypatch):
    """Over vectors, keys, retries, extensions and all samplers, no AES input comes twice."""
    recorder = Recorder(monkeypatch)
    exact = 2.0**60
    for address in (HOME, *ELSEWHERE.values()):
        vector = Stream(KEY, address)
        for step in (0, 1, 1 << 16, MAX_STEP):
            draws = vector.at(step, 300)
            if step == 0:  # retries and extensions: words of few known bits
                discrete_gaussian(draws, Fraction(2), margin=exact)
                draws.extension(299, 0, 0, 1)
                draws.extension(299, 0, 1, 1)
                draws.extension(299, 0, 1, EXTENSIONS - 1)
                draws.extension(298, ATTEMPTS - 1, LANES - 1, EXTENSIONS - 1)
            elif step == 1:
                discrete_laplace(draws, Fraction(1, 3))
            elif step == MAX_STEP:
                respond(draws, np.zeros(300, np.int64), buckets=40, epsilon=Fraction(3))
            else:
                discrete_laplace(draws, Fraction(10))
        choices = Stream(KEY, dataclasses.replace(address, purpose=address.purpose + "C"))
        for step in range(20):
            choose(choices.at(step, 1), np.array([0] + [6] * 200), Fraction(1))
        keyed = Stream(KEY, address, "keyed")
        for step in (0, 1, 2, MAX_STEP):
            for part in range(2):
                recorder.ids = key_ids(300)[part::2]
                discrete_laplace(keyed.at_keys(step, recorder.ids, part), Fraction(1, 2))
        recorder.ids = None

    assert len(recorder.drawn) > 30_000
    assert len(set(recorder.drawn)) == len(recorder.drawn)


def test_stream_keys_differ():
    """No two addresses or modes share an AES key (seen through the same input block)."""
    block = np.zeros((1, 2), dtype=np.uint64)
    streams = [Stream(KEY, a, m) for a in (HOME, *ELSEWHERE.values()) for m in ("vector", "keyed")]

    assert len({stream.encrypt(block).tobytes() for stream in streams}) == len(streams)


@given(
    st.tuples(
        st.integers(0, ATTEMPTS - 1), st.integers(0, LANES - 1), st.integers(0, EXTENSIONS - 1)
    ),
    st.tuples(
        st.integers(0, ATTEMPTS - 1), st.integers(0, LANES - 1), st.integers(0, EXTENSIONS - 1)
    ),
)
def test_counters_are_injective_in_32_bits(one, other):
    """Attempt, lane and extension never run into each other."""
    assert 0 <= counter(*one) < 1 << 32
    assert (counter(*one) == counter(*other)) == (one == other)


def test_a_second_draw_at_a_step_raises():
    """Steps only move forward; a repeated or older one raises and names the purpose."""
    stream = Stream(KEY, HOME)
    stream.at(3, 10)

    for step in (3, 2):
        with pytest.raises(
            NoiseReuse, match=f"'p' was already drawn at step 3; asked again at step {step}"
        ):
            stream.at(step, 1)
    stream.at(4, 10)


def test_each_part_of_the_keys_draws_once_a_step():
    """Parts are separate shares of one step; the same part twice raises."""
    stream = Stream(KEY, HOME, "keyed")
    for part in (0, 1):
        stream.at_keys(0, key_ids(2), part)

    with pytest.raises(NoiseReuse):
        stream.at_keys(0, key_ids(2), 1)
    stream.at_keys(1, key_ids(2), 1)
    with pytest.raises(NoiseReuse):
        stream.at_keys(0, key_ids(2), 2)


def test_modes_and_ranges_are_checked():
    """A stream serves one mode; steps and sizes outside the block's fields are refused."""
    with pytest.raises(InvalidParameter, match="keyed"):
        Stream(KEY, HOME, "keyed").at(0, 1)
    with pytest.raises(InvalidParameter, match="vector stream"):
        Stream(KEY, HOME).at_keys(0, key_ids(1))
    for step in (-1, MAX_STEP + 1):
        with pytest.raises(InvalidParameter, match="noise step"):
            Stream(KEY, HOME).at(step, 1)
    with pytest.raises(InvalidParameter, match="coordinates"):
        Stream(KEY, HOME).at(0, 1 << 48)


def test_running_out_of_attempts_raises(monkeypatch):
    """A sampler that is always rejected stops at the end of its own counter range."""
    monkeypatch.setattr(Stream, "encrypt", lambda _, blocks: np.full_like(blocks, (1 << 64) - 1))

    with pytest.raises(NoiseExhausted, match="attempts"):
        respond(Stream(KEY, HOME).at(0, 1), np.array([0]), buckets=10, epsilon=Fraction(1))


def test_running_out_of_extensions_raises(monkeypatch):
    """A comparison that no bit decides stops at the end of its lane."""
    read: list[int] = []

    def zeros(_: Stream, blocks: Words) -> Words:
        read.extend((blocks[:, 1] & np.uint64(0xFFFFFFFF)).tolist())
        return np.zeros_like(blocks)

    monkeypatch.setattr(Stream, "encrypt", zeros)
    with pytest.raises(NoiseExhausted, match="too many bits"):
        discrete_laplace(Stream(KEY, HOME).at(0, 1), Fraction(10))
    # the first block, looked at once per attempt made ahead, and its own lane to the end
    assert max(c for c in read if c % (LANES * EXTENSIONS)) == EXTENSIONS - 1


SCRIPT = """
import sys
from fractions import Fraction
import numpy as np
from dpstream.privacy.noise import Address, Stream, discrete_gaussian, discrete_laplace
home = Address(run=b"stream tests 001", query="q", column="c", window=3, purpose="p")
key = bytes(range(32))
vector = discrete_laplace(Stream(key, home).at(5, 50), Fraction(1000))
ids = np.arange(40, dtype=np.uint64).reshape(-1, 2)
keyed = discrete_gaussian(Stream(key, home, "keyed").at_keys(7, ids), Fraction(10**12))
print(vector.tolist(), keyed.tolist())
"""


def test_two_processes_draw_identical_noise():
    """One secret and one run id: the same noise in another process, on every platform."""
    there = run_python(SCRIPT).stdout
    vector = discrete_laplace(Stream(KEY, HOME).at(5, 50), Fraction(1000))
    ids = np.arange(40, dtype=np.uint64).reshape(-1, 2)
    keyed = discrete_gaussian(Stream(KEY, HOME, "keyed").at_keys(7, ids), Fraction(10**12))

    assert there == f"{vector.tolist()} {keyed.tolist()}\n"


def test_vector_noise_does_not_depend_on_the_size_of_the_call():
    """Coordinate j's noise is the same in a short and in a long vector, across chunks."""
    short, long = home_noise(size=100), home_noise(size=70_000)

    np.testing.assert_array_equal(short, long[:100])


@given(st.permutations(range(40)))
def test_permuting_the_keys_permutes_the_noise(order):
    """A key's noise belongs to the key, not to its row."""
    ids = key_ids(40)
    noise, permuted = (
        discrete_gaussian(Stream(KEY, HOME, "keyed").at_keys(1, rows), Fraction(1000))
        for rows in (ids, ids[order])
    )

    np.testing.assert_array_equal(permuted, noise[order])


@given(st.lists(st.integers(0, 3), min_size=40, max_size=40))
def test_splitting_the_keys_into_parts_changes_nothing(parts):
    """However keys are spread over parts, also empty ones, each has the noise of the whole."""
    ids, share = key_ids(40), np.array(parts)
    whole = discrete_laplace(Stream(KEY, HOME, "keyed").at_keys(1, ids), Fraction(1000))
    stream, split = Stream(KEY, HOME, "keyed"), np.empty_like(whole)
    for part in range(4):
        mine = share == part
        split[mine] = discrete_laplace(stream.at_keys(1, ids[mine], part), Fraction(1000))

    np.testing.assert_array_equal(split, whole)


def test_equal_key_ids_are_refused():
    """Two rows with one id would share their noise."""
    ids = key_ids(5)
    with pytest.raises(NoiseReuse, match="same id"):
        Stream(KEY, HOME, "keyed").at_keys(0, ids[[0, 1, 2, 1]])


def test_draws_serve_one_sampler_once():
    """Two samplers on the same draws would read the same bits: the second raises."""
    draws = Stream(KEY, HOME).at(0, 5)
    discrete_laplace(draws, Fraction(3))

    with pytest.raises(NoiseReuse, match="already used"):
        discrete_gaussian(draws, Fraction(3))


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 64, 2, 65, 64), (1, 300, 1, 7)])
def test_blocks_made_ahead_are_those_of_their_address(sizes):
    """Few draws or many, steps in a row or far apart: the noise is that of the address alone."""
    ahead, steps = Stream(KEY, HOME), (0, 1, 2, 300, 301, 9_000, MAX_STEP - 1, MAX_STEP)
    for step in steps:
        size = sizes[step % len(sizes)]
        exact = np.arange(size)
        noisy = add_laplace(exact, ahead.at(step, size), 7, 2)
        alone = discrete_laplace(Stream(KEY, HOME).at(step, size), Fraction(7, 2))

        assert noisy is not None
        assert np.array_equal(noisy - exact, alone)


def test_a_ratio_need_not_be_reduced():
    """70 / 20 is 7 / 2; scales out of bounds are refused either way."""
    one, other = (
        add_laplace(np.zeros(50, np.int64), Stream(KEY, HOME).at(3, 50), over, under)
        for over, under in ((7, 2), (70, 20))
    )
    assert one is not None
    assert np.array_equal(one, other)
    for over, under in ((0, 1), (1 << 45, 1), (-1, 3)):
        with pytest.raises(InvalidParameter, match="noise scale"):
            add_laplace(np.zeros(1, np.int64), Stream(KEY, HOME).at(3, 1), over, under)
