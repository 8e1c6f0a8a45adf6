"""The standard streams of a command, made to work whatever the caller has connected to them."""

from __future__ import annotations

import codecs
import io
import os
import re
import sys
from typing import TextIO

from autotune.base.errors import MachineError

#: What stands for a character that a stream's encoding does not have. The blocks of a curve become their heights.
_PLAIN = {
    **{ord(character): str(height) for height, character in enumerate("▁▂▃▄▅▆▇█", 1)},
    **{ord("×"): "x", ord("±"): "+-", ord("·"): "-", ord("…"): "...", ord("→"): "->", ord("–"): "-", ord("—"): "-"},
    **{ord("✓"): "+", ord("✗"): "x", ord("─"): "-", ord("━"): "=", ord("│"): "|", ord("≥"): ">=", ord("≤"): "<="},
}
_STREAMS = {1: "stdout", 2: "stderr"}


def prepare_streams() -> None:
    """Replace the standard streams by ones that never end a command for a reason that is not its own.

    A closed descriptor is opened on ``/dev/null``: otherwise the next file that is opened would get its number, and
    what is printed. A reader that has left (``| head``) is sent nothing more. A character that the encoding does not
    have is written as a similar one. A size that no terminal has is forgotten.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free number is this one, because the lower ones are open.
            os.open(os.devnull, os.O_RDWR)
    for variable in ("COLUMNS", "LINES"):
        # Shells set 0 where they do not know the size. rich takes it, and any other number, at its word.
        if not re.fullmatch("[1-9][0-9]{0,3}", os.environ.get(variable, "1")):
            del os.environ[variable]
    codecs.register_error("autotune.plain", _plain)
    for descriptor, name in _STREAMS.items():
        setattr(sys, name, _stream(descriptor, getattr(sys, name)))


def flush_streams() -> int:
    """Write what is still buffered, and return an exit code: that of `MachineError` if stdout cannot be written."""
    try:
        sys.stdout.flush()
    except MachineError as error:
        sys.stderr.write(f"autotune: {error}.\n          {error.advice}\n")
        return error.exit_code
    return 0


def _plain(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(_PLAIN.get(ord(c), "?") for c in error.object[error.start : error.end]), error.end


class _Descriptor(io.FileIO):
    """A descriptor that goes on as ``/dev/null`` after a failed write."""

    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            descriptor = os.open(os.devnull, os.O_WRONLY)
            os.dup2(descriptor, self.fileno())
            os.close(descriptor)
            if isinstance(error, BrokenPipeError) or self.fileno() != 1:
                return len(data)  # type: ignore[arg-type]
            raise MachineError(
                f"stdout cannot be written: {error.strerror}", advice="make room there, or send it elsewhere."
            ) from error


def _stream(descriptor: int, given: TextIO | None) -> TextIO:
    binary = _Descriptor(descriptor, "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(binary),
        encoding=given.encoding if given is not None else "utf-8",
        errors="autotune.plain",
        line_buffering=descriptor == 2 or binary.isatty(),
    )
