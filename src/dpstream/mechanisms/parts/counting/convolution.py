"""Long convolutions by fast Fourier transform, without loading the rest of `scipy.signal`."""

from __future__ import annotations

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft

from dpstream.records import Reals


def convolved(left: Reals, right: Reals, length: int) -> Reals:
    """The first `length` entries of the convolution of `left` and `right`, along the first axis.

    >>> convolved(np.array([1.0, 2.0, 3.0]), np.array([1.0, 1.0]), 4).round(9).tolist()
    [1.0, 3.0, 5.0, 3.0]
    """
    full = len(left) + len(right) - 1
    size = next_fast_len(full, real=True)
    product = rfft(left, size, axis=0) * rfft(right, size, axis=0)
    return np.asarray(irfft(product, size, axis=0)[:full][:length], dtype=np.float64)
