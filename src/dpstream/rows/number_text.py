"""One spelling for each number: 5, 5.0, 5e0 and 50e-1 are all written 5.

Text sources hand numbers over as they were written. Whoever writes 5 today and 5.0 tomorrow must
stay one user, and a key must not show which of its rows came first. What counts as a number is
JSON's grammar: 007 and +5 are text.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.compiled import compiled

LONGEST = 40
"""Characters up to which a number is written without an exponent."""
_NUMBER = re.compile(
    r"[ \t\n\v\f\r]*(-?)(0|[1-9][0-9]*)(?:\.([0-9]+))?(?:[eE]([+-]?)0*([0-9]+))?[ \t\n\v\f\r]*",
    re.ASCII,
)
_SIMPLE = r"^[ \t\n\v\f\r]*(-?(?:0|[1-9][0-9]*))(?:\.0+|(\.[0-9]*[1-9])0*)?[ \t\n\v\f\r]*$"
"""Without an exponent: the number is what is left without spaces and zeros at its end."""
_LAST_OF_NUMBERS = ord("9")
"""A number begins with white space, a minus or a digit: no byte of these is larger."""
_MOST_DIGITS = 1000  # of an exponent; what has more stays as it was written


def number_text(text: str) -> str:
    """The one spelling of a number; other text stays as it is.

    >>> [number_text(text) for text in ("5", "5.0", "50e-1", " 5", "-0.0", "1.50", "1E3")]
    ['5', '5', '5', '5', '0', '1.5', '1000']
    >>> number_text("1e400"), number_text("10e399"), number_text("007"), number_text("1.2.3")
    ('1e400', '1e400', '007', '1.2.3')
    """
    number = _NUMBER.fullmatch(text)
    if number is None:
        return text
    minus, integer, fraction, sign, power = (part or "" for part in number.groups())
    if len(power) > _MOST_DIGITS:
        return text
    digits = (integer + fraction).lstrip("0")
    exponent = int(f"{sign}{power or 0}") - len(fraction) + len(digits)
    digits = digits.rstrip("0")
    if not digits:
        return "0"
    exponent -= len(digits)  # the value is digits * 10^exponent
    return minus + _spell(digits, exponent, LONGEST - len(minus))


def _spell(digits: str, exponent: int, longest: int) -> str:
    point = len(digits) + exponent  # digits before the point
    if exponent >= 0:
        size = point
    elif point > 0:
        size = len(digits) + 1
    else:
        size = 2 - point + len(digits)
    if size > longest:
        rest = f".{digits[1:]}" if len(digits) > 1 else ""
        return f"{digits[0]}{rest}e{point - 1}"
    if exponent >= 0:
        return digits + "0" * exponent
    if point > 0:
        return f"{digits[:point]}.{digits[point:]}"
    return "0." + "0" * -point + digits


def one_number_spelling(array: pa.Array) -> pa.Array:
    """A column of strings in which numbers have one spelling, and other text stays as it is.

    >>> one_number_spelling(pa.array(["5", " 5", "5.0", None, "ann", "1.10"])).to_pylist()
    ['5', '5', '5', None, 'ann', '1.1']
    """
    mask = _odd(array)
    if mask is None:
        return array
    few = pc.replace_substring_regex(array.filter(mask), _SIMPLE, r"\1\2")
    left = _odd(few)
    if left is not None:
        cells = few.filter(left).dictionary_encode()
        texts = [None if t is None else number_text(t) for t in cells.dictionary.to_pylist()]
        spelled = pa.array(texts, pa.string()).take(cells.indices)
        few = pc.replace_with_mask(few, left, spelled)
    return pc.replace_with_mask(array, mask, few)


def _odd(array: pa.Array) -> pa.Array | None:
    """Which cells may be numbers in another than their one spelling; None if there are none."""
    text = slices(array)
    if text is None:
        return None
    offsets, data = text
    odd: Any = np.zeros(len(array), np.bool_)
    return pa.array(odd) if _find_odd(data, offsets, odd) else None


@compiled
def _find_odd(data: Any, offsets: Any, odd: Any) -> bool:
    """Mark every cell that may be a number in another than its one spelling."""
    some = False
    for i in range(len(odd)):
        start, stop = np.uint64(offsets[i]), np.uint64(offsets[i + 1])
        if start < stop and data[start] <= _LAST_OF_NUMBERS:  # else looking at it costs more
            odd[i] = _is_odd(data, offsets[i], offsets[i + 1])
            some |= odd[i]
    return some


@compiled
def _is_odd(data: Any, start: int, stop: int) -> bool:
    odd, points = stop - start > LONGEST, 0
    for at in range(start, stop):
        byte = data[at]
        if 48 <= byte <= 57:
            continue
        if byte == 46:  # a point
            points += 1
        elif byte == 45 and at == start:  # a minus; of a zero it goes
            odd |= at + 1 < stop and data[at + 1] == 48
        elif byte == 32 or 9 <= byte <= 13 or byte == 43 or byte == 45 or byte == 69 or byte == 101:
            odd = True  # white space, or an exponent
        else:
            return False
    return (odd or (points == 1 and data[stop - 1] == 48)) and points < 2


def is_ascii(array: pa.Array) -> bool:
    """Is every byte of its text ASCII? (If not, it may be valid UTF-8 all the same.)

    >>> is_ascii(pa.array(["a", None, "b"])), is_ascii(pa.array(["caf\u00e9"]))
    (True, False)
    """
    text = slices(array)
    if text is None:
        return False
    offsets, data = text
    return bool(data[offsets[0] : offsets[-1]].max(initial=0) < 128)


def lengths(array: pa.Array) -> tuple[int, int]:
    """Bytes of the shortest and of the longest, or wider limits; a NULL row may count as 0.

    >>> lengths(pa.array(["abc", "z", "zz"]))
    (1, 3)
    """
    text = slices(array)
    if text is None:
        return 0, 1 << 62
    sizes = np.diff(text[0])
    return int(sizes.min()), int(sizes.max())


def slices(array: pa.Array) -> tuple[Any, Any] | None:
    """(offsets, data) of strings that lie one after another; None for other arrays, or no rows."""
    if not len(array) or array.type not in (pa.string(), pa.binary()):
        return None
    _, where, data = array.buffers()
    offsets = np.frombuffer(where, np.int32, len(array) + 1, 4 * array.offset)
    return offsets, np.frombuffer(data or b"", np.uint8)
