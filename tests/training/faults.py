"""Disks that fail: the n-th access to files below a folder goes wrong, the same one each time."""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

FILLING = ("open to write", "write", "fsync", "mkdir")  # what a full disk refuses


class Disk:
    """Counts accesses to what lies below `root`, and raises OSError at number `at`.

    full: from then on nothing can be written any more, and of the write that fills the disk a part succeeds.
    short: nothing fails, but every read and write does half of what it is asked.
    """

    def __init__(self, root: Path, at: int | None = None, full: bool = False, short: bool = False) -> None:
        self.root, self.at, self.full, self.short = root, at, full, short
        self.count, self.fired = 0, ""

    def touch(self, what: str, path: Any = None) -> bool:
        """Note an access, and raise if it is the one; whether it may be done in part only."""
        if path is not None and not self.covers(path):
            return False
        if self.full and what not in FILLING:
            return self.short
        self.count += 1
        if self.full and self.fired:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.at is not None and self.count > self.at and not self.fired:
            self.fired = what
            if self.full and what == "write":
                return True
            code = errno.ENOSPC if self.full else errno.EIO
            raise OSError(code, os.strerror(code))
        return self.short

    def covers(self, path: Any) -> bool:
        return isinstance(path, int) or Path(path).absolute().is_relative_to(self.root)


class Raw(io.FileIO):
    """A file on such a disk, below the buffers of Python."""

    disk: Disk

    def read(self, size: int = -1) -> bytes | None:
        half = self.disk.touch("read")
        return super().read(max(1, size // 2) if half and size > 1 else size)

    def readall(self) -> bytes:
        return b"".join(iter(lambda: self.read(2**16) or b"", b""))

    def readinto(self, buffer: Any) -> int:
        content = self.read(len(buffer)) or b""
        buffer[: len(content)] = content
        return len(content)

    def write(self, content: Any) -> int:
        half = self.disk.touch("write")
        return super().write(memoryview(content)[: max(1, len(content) // 2)] if half else content)


@contextmanager
def failing(disk: Disk) -> Iterator[Disk]:
    """Everything that goes through Python's own files and `os` meets this disk."""
    plainly = io.open

    def opened(file: Any, mode: str = "r", buffering: int = -1, *texts: Any, **options: Any) -> Any:
        if not disk.covers(file) or options.get("opener"):
            return plainly(file, mode, buffering, *texts, **options)
        if not isinstance(file, int):
            disk.touch("read" if mode[0] == "r" else "open to write", file)
        raw = Raw(file, mode.replace("b", "").replace("t", ""))
        raw.disk = disk
        if buffering == 0:
            return raw
        buffer = io.BufferedReader(raw) if mode[0] == "r" else io.BufferedWriter(raw)
        return buffer if "b" in mode else io.TextIOWrapper(buffer, *texts, **options)

    def watched(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(path: Any, *rest: Any, **options: Any) -> Any:
            disk.touch(name, path)
            return real(path, *rest, **options)

        return call

    def opened_by_os(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        disk.touch("open to write" if flags & (os.O_WRONLY | os.O_RDWR) else "read", path)
        return really(path, flags, *rest, **options)

    really = os.open
    names = ("fsync", "replace", "rename", "unlink", "mkdir", "listdir")
    with ExitStack() as patches:
        for module in (io, builtins):
            patches.enter_context(mock.patch.object(module, "open", opened))
        patches.enter_context(mock.patch.object(os, "open", opened_by_os))
        for name in names:
            patches.enter_context(mock.patch.object(os, name, watched(name)))
        yield disk
