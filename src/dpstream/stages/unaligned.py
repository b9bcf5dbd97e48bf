"""Read memory by its address, which need not be aligned: for compiled loops over bytes.

Nothing is checked here: who asks for an address knows that the bytes are there.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


def _loader(bits: int) -> Any:
    """Code that reads `bits` bits at an address."""

    @intrinsic
    def load(typing_context, address):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            pointer = builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer())
            return builder.zext(builder.load(pointer, align=1), ir.IntType(64))

        return types.uint64(types.uint64), generate

    return load


load_byte, load_word = _loader(8), _loader(64)
"""load_word(address): the 8 bytes there as a number; load_byte(address): the byte."""
