"""The event log of a running search. The job's process writes it; ``autotune jobs attach`` and the web page read it.

Each line is a JSON object with one key, the name of an `Observer` method. Each run starts a new file.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from autotune.base.clock import Clock
from autotune.base.observer import Observer
from autotune.base.records import Beat, Config, StudyHeat, StudySpec, Trial, Value

#: Minimum interval between frequent events of the same kind.
EVERY_S = 1.0
_CONFIG: TypeAdapter[dict[str, Value]] = TypeAdapter(dict[str, Value])


class EventLog:
    """An observer that writes every event to a file. Write errors, as on a full disk, are ignored."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._clock = clock
        self._written_s: dict[str, float] = {}
        path.unlink(missing_ok=True)
        # Line-buffered, so that readers see each event at once.
        self._stream = path.open("w", buffering=1)

    def begins(self, spec: StudySpec, headline: str) -> None:
        self._write("begins", [spec.model_dump(mode="json"), headline])

    def says(self, sentence: str) -> None:
        self._write("says", [sentence])

    def data_progress(self, done: int, total: int) -> None:
        if done == total or self._due("data_progress"):
            self._write("data_progress", [done, total])

    def launch_begins(self, title: str, config: Config) -> None:
        self._write("launch_begins", [title, dict(config)])

    def heat_begins(self, title: str, entrants: Sequence[Config]) -> None:
        self._write("heat_begins", [title, [dict(config) for config in entrants]])

    def beat(self, beat: Beat) -> None:
        if self._due(f"beat {beat.phase}"):
            self._write("beat", [beat.model_dump(mode="json")])

    def trial_ends(self, trial: Trial) -> None:
        self._write("trial_ends", [trial.model_dump(mode="json")])

    def heat_ends(self, heat: StudyHeat) -> None:
        self._write("heat_ends", [heat.model_dump(mode="json")])

    def clock(self, spent_s: float, budget_s: float) -> None:
        if self._due("clock"):
            self._write("clock", [spent_s, budget_s])

    def ends(self) -> None:
        self._write("ends", [])

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        self._stream.close()

    def _due(self, what: str) -> bool:
        now = self._clock.now()
        if now - self._written_s.get(what, -EVERY_S) < EVERY_S:
            return False
        self._written_s[what] = now
        return True

    def _write(self, name: str, values: list[Any]) -> None:
        # Writing to a closed stream raises ValueError.
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(json.dumps({name: values}) + "\n")


def follow(path: Path, *, from_end: bool = False) -> Iterator[str | None]:
    """Yield the lines of a file that another process writes, and ``None`` whenever there is nothing new.

    A file that is replaced by a new one of the same name is followed like ``tail -F`` does.

    Args:
        from_end: skip the lines that the file already has.
    """
    stream = None
    rest = ""
    try:
        while True:
            if stream is None:
                with contextlib.suppress(OSError):
                    stream = path.open(errors="replace")
                    stream.seek(0, os.SEEK_END if from_end else os.SEEK_SET)
                    from_end, rest = False, ""
            text = stream.read() if stream is not None else ""
            *lines, rest = (rest + text).split("\n")
            yield from lines
            if text:
                continue
            if stream is not None and _is_replaced(path, stream.fileno()):
                stream.close()
                stream = None
            yield None
    finally:
        if stream is not None:
            stream.close()


def tell(line: str, observer: Observer) -> None:
    """Report the event in a line to an observer. Unknown events are ignored, since the writer may be newer."""
    with contextlib.suppress(ValueError, TypeError, LookupError, ValidationError, AttributeError):
        ((name, values),) = json.loads(line).items()
        if name == "begins":
            observer.begins(StudySpec.model_validate(values[0]), values[1])
        elif name == "launch_begins":
            observer.launch_begins(values[0], _CONFIG.validate_python(values[1]))
        elif name == "heat_begins":
            observer.heat_begins(values[0], [_CONFIG.validate_python(config) for config in values[1]])
        elif name == "beat":
            observer.beat(Beat.model_validate(values[0]))
        elif name == "trial_ends":
            observer.trial_ends(Trial.model_validate(values[0]))
        elif name == "heat_ends":
            observer.heat_ends(StudyHeat.model_validate(values[0]))
        elif name in ("says", "data_progress", "clock", "ends"):
            getattr(observer, name)(*values)


def _is_replaced(path: Path, descriptor: int) -> bool:
    try:
        return os.stat(path).st_ino != os.fstat(descriptor).st_ino
    except OSError:
        # Between two runs the old file is removed before the new one exists.
        return False
