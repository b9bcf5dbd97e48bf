"""Sums over cells of a column's range, for quantiles and histograms: exact, and what noise shows.

Each group has a sum for every node that a row has reached, in one sparse table. Noise is drawn only
for the nodes that are looked at: all bins of a histogram, and of a tree those on the way to a
quantile of a group that is shown. A node that is looked at for the first time draws its noise from
the exact law that it has by then, and moves on with every release; which nodes are looked at
depends on noise of others alone, so this is the law of noise in all nodes. Proof:
`docs/soundness/quantiles.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from dpstream.compiled import compiled
from dpstream.counting.noise_process import KeyedNoise
from dpstream.errors import StateError
from dpstream.group_by.groups import TOO_LARGE
from dpstream.group_by.hash_tables import SLICE, HashTable, find_known
from dpstream.group_by.perturb import NoisySums, next_noise
from dpstream.privacy.query_spend import NoiseStream
from dpstream.query.noise_plan import WindowPlan
from dpstream.query.quantiles import FRACTION, Cells, Histogram, Quantile
from dpstream.query.query import Query
from dpstream.records import Integers, Reals, Words

_MIX = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], np.uint64)  # odd: no two nodes are alike

_LOOKED_UP = 1 << 20  # leaves of groups at a time
_MOST_ROWS = 1 << 41  # of a group: times a million parts they are integers of 62 bits


class CellSums:
    """The sums over one column's cells, of all groups of a window and hash bucket."""

    def __init__(self, cells: Cells) -> None:
        self.cells = cells
        self.table = HashTable(2)  # the sum, and one more than the place among those visited
        self.visited: list[Integers] = [np.zeros(0, np.int64) for _ in cells.levels]
        """By level: rows of the table, as they were first looked at."""
        self.noise: list[KeyedNoise | None] = [None for _ in cells.levels]

    def add(self, groups: Words, leaves: Integers, places: Integers) -> None:
        """Add the rows at `places`: each moves one node of each level."""
        depth = self.cells.depth if self.cells.haar else 0
        size = max(1, SLICE // max(1, depth))
        ids: Words = np.empty((size * max(1, depth), 2), np.uint64)
        signs: Integers = np.empty(len(ids), np.int64)
        for start in range(0, len(places), size):
            count = _nodes(groups, leaves, places[start : start + size], depth, _MIX, ids, signs)
            rows = self.table.rows(ids[:count])
            _add_signs(self.table.numbers, rows, signs[:count])

    def noisy(
        self,
        level: int,
        groups: Words,
        nodes: Integers,
        release: int,
        plan: WindowPlan,
        column: int,
        stream: NoiseStream,
    ) -> Integers:
        """The noisy sums of nodes of one level; once per release, with all that are looked at."""
        rows = self.table.rows(node_ids(groups, nodes))
        numbers, visited = self.table.numbers, self.visited[level]
        joining = np.unique(rows[numbers[rows, 1] == 0])
        numbers[joining, 1] = len(visited) + 1 + np.arange(len(joining))
        self.visited[level] = np.concatenate([visited, joining])
        ids = self.table.ids[joining]
        state, noise = next_noise(plan, column, self.noise[level], ids, release, stream)
        self.noise[level] = state
        if not len(rows):
            return np.zeros(0, np.int64)
        noisy: Integers = numbers[rows, 0] + noise[numbers[rows, 1] - 1]
        return noisy

    def occupied(self, groups: Words) -> Occupied:
        """The leaves of groups that have rows."""
        leaves = self.cells.leaves
        some, first = max(1, _LOOKED_UP // leaves), [np.zeros(1, np.int64)]
        places, upto = [], []
        for start in range(0, len(groups), some):
            part = groups[start : start + some]
            nodes = np.tile(np.arange(leaves), len(part))
            rows: Integers = np.empty(len(nodes), np.int64)
            ids = node_ids(np.repeat(part, leaves, axis=0), nodes)
            find_known(self.table.words, self.table.index, ids, rows)
            counts = np.where(rows >= 0, self.table.numbers[rows, 0], 0).reshape(-1, leaves)
            of_group, leaf = np.nonzero(counts)
            first.append(first[-1][-1] + np.cumsum((counts != 0).sum(axis=1)))
            places.append(leaf)
            upto.append(np.cumsum(counts, axis=1)[of_group, leaf])
        nothing: Integers = np.zeros(0, np.int64)
        return Occupied(
            first=np.concatenate(first),
            leaves=np.concatenate([nothing, *places]),
            upto=np.concatenate([nothing, *upto]),
        )

    @property
    def bytes(self) -> int:
        """Memory held."""
        states = (each for each in self.noise if each is not None)
        noise = sum(each.ids.nbytes + each.state.nbytes for each in states)
        return self.table.bytes + noise + sum(each.nbytes for each in self.visited)

    # What a snapshot holds.

    def delta(self, since: int) -> dict[str, Any]:
        """What is new since the table had so many rows, and all noise."""
        return {
            "table": self.table.delta(since),
            "visited": [each.copy() for each in self.visited],
            "noise": [None if each is None else each.state.copy() for each in self.noise],
            "steps": [None if each is None else each.step for each in self.noise],
        }

    def apply(self, delta: dict[str, Any]) -> None:
        """Take in what `delta` gave."""
        self.table.apply(delta["table"])
        self.visited = delta["visited"]
        self.noise = [
            None if state is None else KeyedNoise(ids=self.table.ids[rows], state=state, step=step)
            for rows, state, step in zip(self.visited, delta["noise"], delta["steps"], strict=True)
        ]


class Occupied(NamedTuple):
    """Leaves that have rows, group after group."""

    first: Integers
    """Where each group's begin, and the end."""
    leaves: Integers
    upto: Integers
    """Rows of the group in this leaf and below."""

    def gaps(self, share: Fraction, which: Integers, leaves: Integers) -> Integers:
        """How far the ranks of leaves of groups are from that of a quantile, in parts of a row.

        0 for the leaf that holds it.
        """
        over, under = share.numerator, share.denominator
        out: Integers = np.empty(len(which), np.int64)
        if not _gaps(which, leaves, self.first, self.leaves, self.upto, over, under, out):
            raise StateError(TOO_LARGE)
        return out


def node_ids(groups: Words, nodes: Integers) -> Words:
    """Ids of nodes within groups: group ids are pseudo-random, so a node's mark keeps them so."""
    marks = (nodes.astype(np.uint64) + np.uint64(1))[:, None] * _MIX
    return np.ascontiguousarray(groups ^ marks)


def read_cells(
    cells: Sequence[CellSums],
    query: Query,
    plan: WindowPlan,
    release: int,
    streams: Sequence[NoiseStream],
    noisy: NoisySums,
) -> NoisySums:
    """Beside the noisy sums of the groups shown, what is read off their cells."""
    found: dict[str, Integers] = {}
    first = len(query.measures)
    for each in cells:
        count = len(each.cells.levels)
        asked = [a for a in query.aggregates if getattr(a, "cells", None) == each.cells]
        mine = (query, plan, release, first, streams[:count], noisy)
        if each.cells.choices:
            found |= _choose(each, [a for a in asked if isinstance(a, Quantile)], *mine)
        elif each.cells.haar:
            found |= _walk(each, [a for a in asked if isinstance(a, Quantile)], *mine)
        else:
            found |= _bins(each, [a for a in asked if isinstance(a, Histogram)], *mine)
        first, streams = first + count, streams[count:]
    read = [found[a.name] for a in query.aggregates if a.name in found]
    return replace(noisy, sums=np.concatenate([noisy.sums, *read], axis=1))


def _bins(
    cells: CellSums,
    asked: Sequence[Histogram],
    query: Query,
    plan: WindowPlan,
    release: int,
    column: int,
    streams: Sequence[NoiseStream],
    noisy: NoisySums,
) -> dict[str, Integers]:
    """All bins of every group shown."""
    groups, bins = len(noisy.ids), cells.cells.leaves
    ids, nodes = np.repeat(noisy.ids, bins, axis=0), np.tile(np.arange(bins), groups)
    counts = cells.noisy(0, ids, nodes, release, plan, column, streams[0])
    return {each.name: counts.reshape(groups, bins) for each in asked}


def _choose(
    cells: CellSums,
    asked: Sequence[Quantile],
    query: Query,
    plan: WindowPlan,
    release: int,
    column: int,
    streams: Sequence[NoiseStream],
    noisy: NoisySums,
) -> dict[str, Integers]:
    """The middle of a leaf for each quantile, drawn anew at each release by exact ranks."""
    known, places = cells.occupied(noisy.ids), []
    for number, share in enumerate(cells.cells.choices):
        leaf = streams[number].choose(
            noisy.ids,
            release=release,
            count=cells.cells.leaves,
            gaps=partial(known.gaps, share),
            slope=plan.slopes[column + number],
        )
        places.append((leaf << FRACTION) + (1 << (FRACTION - 1)))
    found = np.stack(places, axis=1)
    return {each.name: found for each in asked}


def _walk(
    cells: CellSums,
    asked: Sequence[Quantile],
    query: Query,
    plan: WindowPlan,
    release: int,
    column: int,
    streams: Sequence[NoiseStream],
    noisy: NoisySums,
) -> dict[str, Integers]:
    """Walk from the root to a leaf: by the noisy rank of the middle edge, left or right.

    A walk goes right where the rank at that edge lies below the one it looks for, plus its slack
    in standard deviations of their difference.
    """
    depth = cells.cells.depth
    walks = [walk for each in asked for walk in each.walks(query.confidence)]
    p, slack = (np.array(part) for part in zip(*walks, strict=True))
    at_rows = query.measures.index(asked[0].rows)
    rows = noisy.sums[:, at_rows, None].astype(np.float64)  # groups x 1; a clamp would skew ranks
    spreads = plan.stddevs[column : column + depth, release - 1]
    of_rows = plan.stddevs[at_rows, release - 1]
    weights = cells.cells.rank_weights  # nodes x levels
    variances = sum(
        weights[:, n] * spreads[n] ** 2 for n in range(depth)
    )  # of a node's middle edge
    target = p * rows  # groups x walks
    node: Integers = np.ones(target.shape, np.int64)
    below: Reals = np.zeros(target.shape)  # rows left of the node
    inside: Reals = np.broadcast_to(rows, target.shape)  # rows in the node
    ids = np.repeat(noisy.ids, len(walks), axis=0)
    for level in range(depth):
        halves = cells.noisy(
            level, ids, node.reshape(-1), release, plan, column + level, streams[level]
        ).reshape(node.shape)
        left = (inside + halves) / 2
        x = (2 * (node - (1 << level)) + 1) / (2 << level)
        spread = np.sqrt(variances[node] + ((x - p) * of_rows) ** 2)
        right = below + left - target - slack * spread < 0
        below = np.where(right, below + left, below)
        inside = np.where(right, inside - left, left)
        node = 2 * node + right
    leaf, whole = node - (1 << depth), 1 << FRACTION
    with np.errstate(divide="ignore", invalid="ignore"):
        within = np.where(inside > 0, (target - below) / inside, 0.5)
    kinds = np.tile([0, 1, 2], len(walks) // 3)  # the quantile, its lowest and its highest place
    within = np.where(slack == 0, np.clip(within, 0, 1), 0.5)
    within = np.where(kinds == 0, within, kinds - 1)
    places = leaf * whole + np.rint(within * whole).astype(np.int64)
    ends = np.cumsum([each.found for each in asked])
    parts = np.split(places, ends[:-1], axis=1)
    return {each.name: part for each, part in zip(asked, parts, strict=True)}


@compiled
def _nodes(
    groups: Any, leaves: Any, places: Any, depth: int, mix: Any, ids: Any, signs: Any
) -> int:
    """Ids of the nodes that rows move, and by how much; with depth 0 the leaves. How many."""
    count = 0
    for i in range(len(places)):
        place = places[i]
        leaf = leaves[place]
        if leaf < 0:
            continue
        for level in range(max(depth, 1)):
            node, sign = leaf, 1
            if depth > 0:
                node = (1 << level) + (leaf >> (depth - level))
                sign = 1 - 2 * ((leaf >> (depth - level - 1)) & 1)
            mark = np.uint64(node + 1)
            ids[count, 0] = groups[place, 0] ^ (mark * mix[0])
            ids[count, 1] = groups[place, 1] ^ (mark * mix[1])
            signs[count] = sign
            count += 1
    return count


@compiled
def _gaps(
    which: Any,
    asked: Any,
    first: Any,
    leaves: Any,
    upto: Any,
    over: int,
    under: int,
    out: Any,
) -> bool:
    """The distance of over / under of a group's rows from the ranks of a leaf, times `under`.

    False where that leaves the integers.
    """
    for i in range(len(which)):
        begin, end, leaf = first[which[i]], first[which[i] + 1], asked[i]
        rows = upto[end - 1] if end > begin else 0
        if rows > _MOST_ROWS:
            return False
        place = begin + np.searchsorted(leaves[begin:end], leaf)
        below = upto[place - 1] if place > begin else 0
        here = upto[place] if place < end and leaves[place] == leaf else below
        out[i] = max(under * below - over * rows, over * rows - under * here, 0)
    return True


@compiled
def _add_signs(sums: Any, rows: Any, signs: Any) -> None:
    """Add to the sums of rows, which may repeat."""
    for i in range(len(rows)):
        sums[rows[i], 0] += signs[i]
