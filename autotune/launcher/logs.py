"""The logs of a launch: what it writes to stdout and stderr, up to a limit."""

from __future__ import annotations

import contextlib
import os
from types import TracebackType

from autotune.base.errors import MachineError
from autotune.base.files import FREE_SOME_SPACE, no_room
from autotune.launcher.folder import make_way
from autotune.base.layout import LaunchFiles

#: A log that has grown beyond this is cut to its first and last bytes.
LIMIT_BYTES = 16 * 2**20
KEPT_BYTES = 2**20


class Logs:
    """Both logs of one launch, open from before it is forked until it has ended.

    The launch writes to the files directly, without us in between. Since they are opened for appending, cutting them
    here moves the place of its next write, too.

    Raises:
        MachineError: the files cannot be made.
    """

    def __init__(self, files: LaunchFiles) -> None:
        self._open: list[int] = []
        #: Bytes cut out of each log.
        self._lost = [0, 0]
        try:
            for path in (files.stdout, files.stderr):
                # An earlier launch may have left anything under this name.
                make_way(path)
                path.unlink(missing_ok=True)
                self._open.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o666))
        except OSError as error:
            self._close()
            advice = FREE_SOME_SPACE if no_room(error) else "--studies-dir names another place."
            raise MachineError(f"cannot write into {files.folder}: {error.strerror}", advice=advice) from error

    @property
    def descriptors(self) -> list[int]:
        """The descriptors of stdout and stderr."""
        return self._open

    def cut(self) -> None:
        """Cut logs that are too long. Call it several times a second; each call allows for some more bytes to be
        written meanwhile."""
        for number, descriptor in enumerate(self._open):
            size = os.fstat(descriptor).st_size
            if size <= LIMIT_BYTES:
                continue
            self._lost[number] += size - 2 * KEPT_BYTES
            tail = os.pread(descriptor, KEPT_BYTES, size - KEPT_BYTES)
            note = f"\n[autotune: {self._lost[number] >> 20} MiB of this log were cut out here]\n".encode()
            # What is written between these two lines is lost, or comes before the note.
            os.ftruncate(descriptor, KEPT_BYTES)
            with contextlib.suppress(OSError):  # the disk is full
                os.write(descriptor, note + tail)

    def __enter__(self) -> Logs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cut()
        self._close()

    def _close(self) -> None:
        for descriptor in self._open:
            os.close(descriptor)
        self._open = []
