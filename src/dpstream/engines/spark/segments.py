"""A bucket's state as a chain of files: one that is whole, then what each job added.

A job reads a chain that is fixed before it begins, and each try of a task writes one more file
under a name of its own. So a task that is done twice begins from the same state, and what one try
writes another cannot spoil: the driver adds the file of the try whose output was accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dpstream.engines.parts import (
    Owner,
    Watermarks,
    extract_groups,
    extract_units,
    owners,
    restore_groups,
    restore_units,
    size_of,
)
from dpstream.engines.spark.files import SharedFiles
from dpstream.privacy.state import pack, unpack
from dpstream.privacy.state.serial import checksum_of
from dpstream.stages.flow import Flow

Stored = tuple[str, int, str]
"""A file, its size, and the checksum of its content."""
Chain = Sequence[Stored]
"""Files, the oldest first."""
_GROWTH = 2  # a chain that holds this many times what there is is written anew
_SMALL = 1 << 20  # bytes; waste below is left alone
_LONGEST = 32  # files


def load(files: SharedFiles, flow: Flow, stage: str, chain: Chain) -> dict[Owner, Watermarks]:
    """Take a chain in; answers how much of each part it has."""
    watermarks: dict[Owner, Watermarks] = {}
    for name, _, checksum in chain:
        content = files.read(name).to_pybytes()
        of = bytes.fromhex(checksum)
        segment = unpack(content, kind="segment", origin=name, checksum=of)
        living = {(kind, number) for kind, number in segment["owners"]}
        for owner in [owner for owner in watermarks if owner not in living]:
            del watermarks[owner]
            _drop(flow, owner)
        for kind, number, part in segment["parts"]:
            if stage == "units":
                watermarks[kind, number] = restore_units(flow, (kind, number), part)
            else:
                watermarks[kind, number] = restore_groups(flow, number, part)
    return watermarks


def save(
    files: SharedFiles,
    flow: Flow,
    stage: str,
    name: str,
    chain: Chain,
    watermarks: dict[Owner, Watermarks],
) -> tuple[Stored, bool]:
    """Write what is new since the chain; (the file, whether it holds everything)."""
    current = [owner for owner in owners(flow) if stage == "units" or owner[0] == "window"]
    stored = sum(size for _, size, _ in chain)
    needed = sum(size_of(flow, owner) for owner in current)
    whole = not chain or len(chain) >= _LONGEST or stored > _GROWTH * needed + _SMALL
    whole = whole or any(owner not in current for owner in watermarks)  # what is over must not stay
    parts = []
    for owner in current:
        known = None if whole else watermarks.get(owner)
        if stage == "units":
            part, _ = extract_units(flow, owner, known)
        else:
            part, _ = extract_groups(flow, owner[1], known)
        parts.append([*owner, part])
    packed = pack({"owners": [list(o) for o in current], "parts": parts}, kind="segment")
    files.write(name, packed)
    return (name, len(packed), checksum_of(packed).hex()), whole


def _drop(flow: Flow, owner: Owner) -> None:
    kind, number = owner
    drop: dict[str, Callable[[int], None]] = {
        "window": flow.evict,
        "period": flow.state.evict_period,
    }
    drop[kind](number)
