"""Ask the processor for memory ahead of its use: loops over large tables wait less for it.

A table of millions of rows is far larger than any cache, and each look at it misses; but which
rows will be looked at is known many rows ahead, so a dozen misses can be under way at once.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

FAR, NEAR = 24, 12
"""Rows ahead at which the slot of an index, and then the row it names, are asked for."""


@intrinsic
def _prefetch(typing_context, address):  # type: ignore[no-untyped-def]

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        number = ir.IntType(32)
        pointer = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, number, number, number])
        ask = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind)
        builder.call(ask, [pointer, number(0), number(3), number(1)])  # to read, keep, data
        return context.get_dummy_value()

    return types.void(types.uint64), generate


prefetch: Any = _prefetch
"""prefetch(address) begins to load a cache line; an address that is not mapped does no harm."""
