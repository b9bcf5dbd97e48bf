"""What survives the process: secrets, run ids, window keys, snapshots and logs."""

from dpstream.privacy.state.input_log import InputLog
from dpstream.privacy.state.journal import Journal
from dpstream.privacy.state.secret import Secret, mint_run_id
from dpstream.privacy.state.serial import pack, read_packed, rebuild, storable, unpack, write_packed
from dpstream.privacy.state.window_keys import MemoryWindowKeys, WindowKeys, WindowKeySource

__all__ = [
    "InputLog",
    "Journal",
    "MemoryWindowKeys",
    "Secret",
    "WindowKeySource",
    "WindowKeys",
    "mint_run_id",
    "pack",
    "read_packed",
    "rebuild",
    "storable",
    "unpack",
    "write_packed",
]
