"""A piece of memory that processes share, without a name.

Processes get it by inheriting its file descriptor. What has no name cannot collide with another
engine's, cannot be opened by strangers, and is gone with the last process that has it, however that
ends: nothing is ever left behind to be cleaned up.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

_MEMORY_FOLDER = "/dev/shm"
"""A file system in memory, where there is one."""


class SharedSegment:
    """Shared memory, as seen by one process.

    Attributes:
        fd: The file descriptor, for `pass_fds` of a child process.
        memory: The bytes; writes are seen by every process that has the segment.
    """

    def __init__(self, fd: int) -> None:
        """Maps a segment that this process created or inherited.

        Args:
            fd: Its file descriptor; owned by this object from now on.
        """
        self.fd = fd
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        self.memory = memoryview(self._map)

    @classmethod
    def create(cls, size_bytes: int) -> SharedSegment:
        """Makes a segment of zeros that only this user may touch (permissions 0600)."""
        folder = _MEMORY_FOLDER if os.access(_MEMORY_FOLDER, os.W_OK) else None
        # Where the system allows it this never has a name; elsewhere it loses it before returning.
        with tempfile.TemporaryFile(dir=folder) as file:
            file.truncate(size_bytes)
            fd = os.dup(file.fileno())
        os.fchmod(fd, 0o600)
        return cls(fd)

    def close(self) -> None:
        """Gives the memory back; calling it again does nothing.

        Views of `memory` must have been released.
        """
        if self.fd >= 0:
            self.memory.release()
            self._map.close()
            os.close(self.fd)
            self.fd = -1


def memory_folder() -> Path | None:
    """Returns the folder in which segments live, if it is one that holds memory files."""
    return Path(_MEMORY_FOLDER) if os.path.isdir(_MEMORY_FOLDER) else None
