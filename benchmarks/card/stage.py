"""What a part gets: the device, the sizes, a folder, and a place for its figures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from autotune.base.files import write_atomic

_T = TypeVar("_T")
ROOT = Path(__file__).resolve().parent.parent.parent
#: Lines of an output that go into a result.
TAIL = 12
#: From the request to end to the kill.
GRACE_S = 15.0


class Skipped(Exception):
    """The part cannot run here. The message says why."""


#: Stands in the row of what a part did not come to.
NO_TIME = "no time left"


class Stage:
    """The surroundings of one part.

    Args:
        work: a folder on this machine for all parts, kept between calls.
        out: the folder of the results.
        left_s: seconds until the part is ended.

    Attributes:
        device, uuid: a name for `TrialSpec.devices`, and the card's UUID; ``None`` for a CPU.
        env: variables with which a process sees that card alone.
    """

    def __init__(self, *, work: Path, out: Path, stem: str, rehearsal: bool, left_s: float, uuid: str | None) -> None:
        self.work = work
        self.out = out
        self.stem = stem
        self.rehearsal = rehearsal
        self.uuid = uuid
        self.device = "cpu" if uuid is None else "cuda:0"
        self.env = {} if uuid is None else {"CUDA_VISIBLE_DEVICES": uuid}
        self.figures: dict[str, Any] = {}
        self.folder = Path(tempfile.mkdtemp(prefix="part-", dir=work))
        self._ends = time.monotonic() + left_s

    @property
    def left_s(self) -> float:
        """Seconds until the part is ended."""
        return self._ends - time.monotonic()

    def pick(self, on_card: _T, rehearsed: _T) -> _T:
        """Return a size: the card's, or the rehearsal's."""
        return rehearsed if self.rehearsal else on_card

    def note(self, **figures: Any) -> None:
        """Add figures. They are in the result even if the part fails after this."""
        self.figures.update(figures)
        write_atomic(self.work / "figures.json", json.dumps(self.figures, default=str))

    def add(self, name: str, row: Mapping[str, Any]) -> None:
        """Add a row to a list of figures."""
        self.note(**{name: [*self.figures.get(name, []), dict(row)]})

    def waits(self, sentence: str) -> None:
        """Note why a launch waits. For `ProcessLauncher`."""
        self.add("waits", {"sentence": sentence})

    def replaced(self, what: str) -> None:
        """Note what a rehearsal does in place of something that needs a card."""
        if self.rehearsal:
            self.note(replaced=[*self.figures.get("replaced", []), what])

    def python(
        self, *arguments: str, limit_s: float, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run Python in the checkout, with the card alone visible; return output and exit code.

        After ``limit_s`` it is interrupted as by Ctrl-C, then killed; the exit code is negative then.
        """
        command = [sys.executable, *arguments]
        with subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **self.env, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                output, errors = process.communicate(timeout=max(1.0, limit_s))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
                try:
                    output, errors = process.communicate(timeout=GRACE_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    output, errors = process.communicate()
            except BaseException:
                process.terminate()
                # The part itself is being ended, and has little time left for its report.
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_S / 3)
                process.kill()
                raise
        return subprocess.CompletedProcess(command, process.returncode, output, errors)

    def script(self, name: str, *arguments: str, limit_s: float, env: Mapping[str, str] | None = None) -> Any:
        """Run a module of `benchmarks.card` that prints one JSON object; return the object.

        Raises:
            RuntimeError: it printed none.
        """
        ended = self.python("-m", f"benchmarks.card.{name}", *arguments, limit_s=limit_s, env=env)
        return last_json(ended)


def last_json(ended: subprocess.CompletedProcess[str]) -> Any:
    """Return the JSON object in the last line of an output.

    Raises:
        RuntimeError: there is none.
    """
    try:
        return json.loads(ended.stdout.strip().rpartition("\n")[2])
    except ValueError:
        told = tail(ended.stderr) or tail(ended.stdout)
        raise RuntimeError(f"no result (exit code {ended.returncode}): {told}") from None


def tail(text: str, lines: int = TAIL) -> str:
    """Return the last lines of a text."""
    return "\n".join(text.strip().splitlines()[-lines:])


def wait_until(holds: Callable[[], bool], limit_s: float, gap_s: float = 0.05) -> float | None:
    """Return the seconds until ``holds`` is true; ``None`` if it is not within the limit."""
    began = time.monotonic()
    while time.monotonic() - began < limit_s:
        if holds():
            return time.monotonic() - began
        time.sleep(gap_s)
    return None
