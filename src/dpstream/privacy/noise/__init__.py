"""Exact noise on keyed, addressed AES: the only randomness there is.

`keyed_draws.py` makes the blocks, `exact_samplers.py` integers of an exact law from them,
`normals.py` standard normals. Nothing outside `privacy` (and the benchmark of the samplers) may
import this package.
"""

from dpstream.privacy.noise.exact_samplers import (
    add_laplace,
    choose,
    choose_each,
    discrete_gaussian,
    discrete_laplace,
    respond,
    within,
)
from dpstream.privacy.noise.keyed_draws import NOISE_VERSION, Address, Draws, Mode, Stream
from dpstream.privacy.noise.normals import LARGEST, LOST, PRECISION, normals

__all__ = [
    "LARGEST",
    "LOST",
    "NOISE_VERSION",
    "PRECISION",
    "Address",
    "Draws",
    "Mode",
    "Stream",
    "add_laplace",
    "choose",
    "choose_each",
    "discrete_gaussian",
    "discrete_laplace",
    "normals",
    "respond",
    "within",
]
