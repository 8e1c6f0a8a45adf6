"""Real launches: a template process per search that forks one child per launch, watched from here. No torch.

The verdict on a launch is taken from its wait status, its result file and the system's evidence, in that order
(`verdict` holds the table); texts come last, and only the child reads them.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from typing import Protocol

from autotune.clock import Clock
from autotune.files import write_atomic
from autotune.host import oom_kill_count
from autotune.launcher.folder import open_folder
from autotune.launcher.survivors import STUDY_MARK, end_survivors
from autotune.launcher.template import Template, TemplateLost
from autotune.launcher.verdict import verdict
from autotune.launcher.watch import Watch
from autotune.records import Beat, TrialResult, TrialSpec

__all__ = ["STUDY_MARK", "Launcher", "ProcessLauncher", "end_survivors"]


class Launcher(Protocol):
    """Runs one launch at a time.

    `run` may be called from the main thread only, one call after the other. It returns exactly one result for every
    spec, whatever the child does; a half-done launch is ended before it returns or raises, its processes included.

    Raises:
        MachineError: no child can be started at all (no template, no folder, a full disk).
    """

    def run(self, spec: TrialSpec, *, on_beat: Callable[[Beat], None], stop: Callable[[], bool]) -> TrialResult:
        """Run one launch to its end. ``stop`` is asked a few times a second; True ends it as interrupted."""
        ...

    def close(self) -> None:
        """Let go of what is kept between launches. May be called twice."""
        ...


class ProcessLauncher:
    """The real launcher.

    Args:
        study_mark: unique to the study; marks every process in its environment.
    """

    def __init__(self, study_mark: str, clock: Clock) -> None:
        self._mark = study_mark
        self._clock = clock
        self._template: Template | None = None

    def run(self, spec: TrialSpec, *, on_beat: Callable[[Beat], None], stop: Callable[[], bool]) -> TrialResult:
        files = open_folder(spec)
        oom_kills = oom_kill_count()
        watch = Watch(spec, self._clock, on_beat, stop)
        began = self._clock.now()
        try:
            template = self._ready(spec.env)
            exit_code = template.launch(files, watch)
        except TemplateLost:
            # Its children die with it; what had left them for a session of its own does not.
            exit_code = -signal.SIGKILL
            self.close()
            end_survivors(self._mark, self._clock)
        except BaseException:
            # Its template has ended with it; the next launch gets a new one.
            self.close()
            raise
        kernel_killed = oom_kills is not None and (oom_kill_count() or 0) > oom_kills
        result = verdict(spec, files, exit_code, watch, kernel_killed=kernel_killed)
        result = result.model_copy(update={"wall_s": self._clock.now() - began})
        write_atomic(files.result, result.model_dump_json())
        return result

    def close(self) -> None:
        if self._template is not None:
            self._template.close()
            self._template = None

    def _ready(self, env: Mapping[str, str]) -> Template:
        # What a process reads while it is loaded (allocators, OMP, LD_PRELOAD) cannot be changed by a fork.
        if self._template is not None and self._template.env != dict(env):
            self.close()
        if self._template is None:
            self._template = Template(env, self._mark, self._clock)
        return self._template
