"""The binary tree counter."""

from __future__ import annotations

from dataclasses import dataclass

from dpstream.mechanisms.counters.factorised_counter import TreeMechanism


@dataclass(frozen=True, kw_only=True)
class TreeCounter(TreeMechanism, identity="tree"):
    """Running sums from a binary tree of noisy partial sums.

    Guarantee: event-level rho-zCDP: one event moves at most one node per level by `sensitivity`,
        floor(log2 T) + 1 of them, T = `steps`.
    Unit: one event, which moves one bin of one step by at most `sensitivity`.
    Delay: none.
    Paper: Chan, Shi, Song, "Private and Continual Release of Statistics", 2011.

    >>> from dpstream import release
    >>> series = release(TreeCounter(rho=1, steps=128), [[10], [12], [11]], secret=bytes(32))
    >>> series.values.shape, float(series.stddev[2, 0])
    ((3, 1), 2.828427...)
    """
