"""Continual counters: factorisations of the prefix-sum matrix and their noise processes."""

from dpstream.mechanisms.counters.blt import BufferedLinearToeplitz
from dpstream.mechanisms.counters.honaker import Honaker
from dpstream.mechanisms.counters.naive import Naive
from dpstream.mechanisms.counters.smooth_binary import SmoothBinary
from dpstream.mechanisms.counters.stack import Node
from dpstream.mechanisms.counters.strategy import (
    NoiseProcess,
    Strategy,
    begin,
    late_normals,
    late_start,
    noise_paths,
    sensitivity,
    standard_deviation,
)
from dpstream.mechanisms.counters.toeplitz import Toeplitz
from dpstream.mechanisms.counters.tree import Tree
from dpstream.mechanisms.counters.unbounded import Unbounded

__all__ = [
    "BufferedLinearToeplitz",
    "Honaker",
    "Naive",
    "Node",
    "NoiseProcess",
    "SmoothBinary",
    "Strategy",
    "Toeplitz",
    "Tree",
    "Unbounded",
    "begin",
    "late_normals",
    "late_start",
    "noise_paths",
    "sensitivity",
    "standard_deviation",
]
