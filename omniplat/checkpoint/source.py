"""Where the files of a checkpoint come from: what opening and planning ask of a folder or a repository."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from omniplat.checkpoint.tensors import TensorInfo
from omniplat.errors import InvalidCheckpointError


class Source(Protocol):
    """Files of one checkpoint by relative POSIX path. Every method raises InvalidCheckpointError naming the file."""

    @property
    def root(self) -> Path:
        """The folder of the files; for a repository its id, which is no folder."""
        ...

    @property
    def is_local(self) -> bool: ...

    def names(self, folder: str = "") -> list[str]:
        """Sorted names of the files and folders in `folder`."""
        ...

    def is_file(self, file: str) -> bool: ...

    def is_folder(self, folder: str) -> bool: ...

    def size(self, file: str) -> int: ...

    def read_file(self, file: str) -> bytes:
        """All of a config or index."""
        ...

    def read_range(self, file: str, start: int, length: int) -> bytes:
        """At most `length` bytes from `start`; fewer where the file ends."""
        ...

    def prepare(self, shards: Sequence[str]) -> None:
        """The headers of these shards are about to be read."""
        ...

    def read_tensor(self, info: TensorInfo, among: Mapping[str, TensorInfo]) -> bytes:
        """The bytes of a small tensor; `among` are the component's tensors, of which similar ones may follow."""
        ...


class LocalFolder:
    """A folder on disk."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.is_local = True

    def names(self, folder: str = "") -> list[str]:
        path = self.root / folder
        try:
            return sorted(os.listdir(path))
        except OSError as exc:
            raise InvalidCheckpointError(f"cannot be listed: {exc.strerror or exc}", file=str(path)) from exc

    def is_file(self, file: str) -> bool:
        try:
            return (self.root / file).is_file()
        except OSError:  # no name that a file can have, such as one that is too long
            return False

    def is_folder(self, folder: str) -> bool:
        try:
            return (self.root / folder).is_dir()
        except OSError:
            return False

    def size(self, file: str) -> int:
        try:
            return (self.root / file).stat().st_size
        except OSError as exc:
            raise _unreadable(file, exc) from exc

    def read_file(self, file: str) -> bytes:
        try:
            return (self.root / file).read_bytes()
        except (OSError, ValueError) as exc:
            raise _unreadable(file, exc) from exc

    def read_range(self, file: str, start: int, length: int) -> bytes:
        """The only way in which planning reads a shard."""
        try:
            with open(self.root / file, "rb", buffering=0) as opened:
                return os.pread(opened.fileno(), length, start)
        except OSError as exc:
            raise _unreadable(file, exc) from exc

    def prepare(self, shards: Sequence[str]) -> None:
        """Nothing: the files are here."""

    def read_tensor(self, info: TensorInfo, among: Mapping[str, TensorInfo]) -> bytes:
        return self.read_range(info.shard, info.start, info.nbytes)


def _unreadable(file: str, exc: OSError | ValueError) -> InvalidCheckpointError:
    reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else exc
    return InvalidCheckpointError(f"cannot be read: {reason}", file=file)
