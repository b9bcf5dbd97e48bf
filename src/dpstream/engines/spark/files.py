"""Files that driver and executors share: rows that wait for their step, and bucket state.

They lie on a path that every machine of the cluster sees. A local or mounted path is written
durably (fsync, atomic rename); another address (`s3://`, `hdfs://`, `gs://`) through Arrow's file
systems, whose files appear whole when they are closed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs

from dpstream.errors import StateError
from dpstream.privacy.state.files import erase, replace, writing


@dataclass(frozen=True)
class SharedFiles:
    """A folder of immutable files, named by what they hold."""

    location: str

    @property
    def local(self) -> Path | None:
        """The folder, if it is a path."""
        return None if "://" in self.location else Path(self.location)

    def write(self, name: str, *content: Any) -> None:
        """Put a file there, whole."""
        if self.local is not None:
            with writing(self.local / name):
                replace(self.local / name, *content)
            return
        system, root = _system(self.location)
        place = f"{root}/{name}"
        system.create_dir(place.rpartition("/")[0], recursive=True)
        with system.open_output_stream(place) as stream:
            for piece in content:
                stream.write(piece)

    def read(self, name: str) -> pa.Buffer:
        """All of a file; one that is gone is an error, never empty."""
        try:
            if self.local is not None:
                return pa.memory_map(str(self.local / name)).read_buffer()
            system, root = _system(self.location)
            with system.open_input_file(f"{root}/{name}") as file:
                return file.read_buffer()
        except FileNotFoundError:
            raise StateError(
                f"{self.location} lacks {name}; every executor must see the same files there: use "
                "a path that is mounted everywhere, or an address such as s3:// or hdfs://; if "
                "files were lost, restore them, or use a new state directory (a new run, charged "
                "anew)"
            ) from None

    def remove(self, names: Iterable[str]) -> None:
        """Remove files that nothing refers to any more; state, which holds noise, is overwritten
        first."""
        for name in names:
            if self.local is not None:
                path = self.local / name
                if path.exists() and name.startswith("state/"):
                    erase(path)
                else:
                    path.unlink(missing_ok=True)
                continue
            system, root = _system(self.location)
            if system.get_file_info(f"{root}/{name}").type != fs.FileType.NotFound:
                system.delete_file(f"{root}/{name}")

    def remove_all(self) -> None:
        """Remove the folder with everything in it; state, which holds noise, is overwritten."""
        self.remove(self.names("state"))
        system, root = _system(self.location)
        if system.get_file_info(root).type == fs.FileType.Directory:
            system.delete_dir(root)

    def names(self, folder: str) -> list[str]:
        """What is in a folder."""
        system, root = _system(self.location)
        asked = fs.FileSelector(f"{root}/{folder}", allow_not_found=True)
        return [f"{folder}/{found.base_name}" for found in system.get_file_info(asked)]


@lru_cache(maxsize=8)
def _system(location: str) -> tuple[Any, str]:
    if "://" not in location:
        return fs.LocalFileSystem(), location
    system, root = fs.FileSystem.from_uri(location)
    return system, root.rstrip("/")
