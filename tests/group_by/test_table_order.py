"""The order of rows grows release by release, and is that of a layout made at once."""

import numpy as np
import pyarrow as pa
import pytest

from dpstream.group_by.groups import GroupBucket
from dpstream.group_by.perturb import NoisySums, TableOrder
from dpstream.query.aggregates import Measure


@pytest.mark.parametrize("buckets", [1, 3])
def test_groups_that_join_later_stand_behind_and_by_id(buckets):
    """Whatever bucket they are in; sums and keys move with them."""
    rng = np.random.default_rng(buckets)
    made = [GroupBucket([Measure(kind="units")]) for _ in range(buckets)]
    shown = [[] for _ in made]  # (release, first word, second word, group) of each bucket
    layout = TableOrder()
    for release in range(1, 9):
        for number, bucket in enumerate(made):
            many = int(rng.integers(0, 5)) * (release % 4 > 0)
            ids = rng.integers(0, 3, (many, 2)).astype(np.uint64)
            ids[:, 1] += np.uint64(1000 * release + 100 * number) + np.arange(many, dtype=np.uint64)
            names = [f"{a}-{b}" for a, b in ids.tolist()]
            bucket.open(ids, pa.table({"key": pa.array(names, pa.string())}))
            first = len(bucket.active) - many
            order = np.lexsort((ids[:, 1], ids[:, 0]))
            shown[number] += [(release, *ids[at].tolist(), first + at) for at in order]
        noisy = [parts(rows) for rows in shown]
        sums, keys = layout.arrange(made, noisy)
        again, other = TableOrder().arrange(made, noisy)

        expected = sorted(row[:3] for rows in shown for row in rows)
        assert sums[:, 0].tolist() == [b for _, _, b in expected] == again[:, 0].tolist()
        names = [f"{a}-{b}" for _, a, b in expected]
        assert (keys["key"].to_pylist() if keys is not None else []) == names
        assert (other["key"].to_pylist() if other is not None else []) == names


def parts(rows):
    """What a bucket publishes; a group's sum is the second word of its id."""
    table = np.array(rows, np.int64).reshape(-1, 4)
    ids = table[:, 1:3].astype(np.uint64)
    return NoisySums(ids=ids, since=table[:, 0], sums=table[:, 2:3], groups=table[:, 3])
