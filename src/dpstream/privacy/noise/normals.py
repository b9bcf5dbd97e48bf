"""Standard normals from one whole AES block each: a sign and 127 bits of tail probability.

A block gives u = (k + 1/2) / 2^127, k its 127 upper bits, and |z| is the point that a normal passes
with probability u, so that small u, the tail, keeps its full relative precision. The inverse is a
table of polynomials: 16 pieces for each power of two that u may have, degree 8, Chebyshev
interpolants computed in 60-digit arithmetic. Only exact steps and nine roundings happen here, so
the result is the same on every platform.

Guarantee: the normals are within PRECISION of ideal ones (drawn from the same bits and further bits
of u) unless u < 2^-77, which has probability LOST and is where |z| passes LARGEST.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.resources import files
from io import BytesIO

import numpy as np

from dpstream.compiled import njit
from dpstream.privacy.noise.keyed_draws import Draws, counter
from dpstream.records import Reals

PRECISION = 2.0**-48
LARGEST = 10.2
LOST = 2.0**-77

BINADES, PIECES, TERMS = 128, 16, 9
_CHUNK = 1 << 13  # blocks in flight stay in the cache
_TWO_63, _TWO_64 = 2.0**-63, 2.0**-64
_BIAS, _ONE, _FRACTION = 1023, 1023 << 52, (1 << 52) - 1  # of a double


def normals(draws: Draws, each: int = 1) -> Reals:
    """`each` independent standard normals per draw, `[draws, each]`."""
    draws.use()
    out = np.empty((draws.size, each))
    for start in range(0, draws.size, _CHUNK):
        blocks = draws.between(start, min(start + _CHUNK, draws.size))
        for number in range(each):
            _invert(blocks(counter(number)), table(), out[start : start + _CHUNK, number])
    return out


@lru_cache(maxsize=1)
def table() -> Reals:
    """Coefficients by (minus the exponent of u, piece, power)."""
    data = files("dpstream.privacy.noise").joinpath("normal_table.npy").read_bytes()
    loaded: Reals = np.load(BytesIO(data), allow_pickle=False).astype(np.float64)
    return loaded


@njit(cache=True, nogil=True)
def _invert(words, table, out):  # type: ignore[no-untyped-def]
    for row in range(words.shape[0]):
        high, low = words[row, 0] >> np.uint64(1), words[row, 1]
        u = (np.float64(high) + (np.float64(low) + 0.5) * _TWO_64) * _TWO_63
        # u = m 2^e, m in [1, 2): its exponent and fraction, as they stand in the bits of a double
        bits = np.float64(u).view(np.int64)
        exponent = (bits >> 52) - _BIAS
        place = (np.int64((bits & _FRACTION) | _ONE).view(np.float64) - 1.0) * PIECES
        piece = int(place)
        t = 2.0 * (place - piece) - 1.0
        z = 0.0
        if exponent < 0:  # else u was rounded up to 1, the middle of the bell
            for power in range(TERMS - 1, -1, -1):
                z = z * t + table[-1 - exponent, piece, power]
        out[row] = -z if words[row, 0] & np.uint64(1) else z
