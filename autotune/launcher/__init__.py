"""Real launches: a template process per search that forks one child per launch, watched from here. No torch.

The verdict on a launch is taken from its wait status, its result file and the system's evidence, in that order
(`verdict` holds the table); texts come last, and only the child reads them.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from typing import Protocol

from autotune.clock import Clock
from autotune.errors import MachineError
from autotune.files import FREE_SOME_SPACE, write_atomic
from autotune.launcher.folder import open_folder
from autotune.launcher.fork_client import Exit, Template, TemplateLost
from autotune.launcher.leftovers import remove_leftovers
from autotune.launcher.quiet import Quiet, Stopped, cards_of, stopped_waiting
from autotune.launcher.survivors import STUDY_MARK, end_survivors
from autotune.launcher.verdict import lacked_room, verdict
from autotune.launcher.watch import Watch
from autotune.layout import LaunchFiles
from autotune.machine import gpu
from autotune.machine.host import oom_kill_count
from autotune.records import Beat, TrialResult, TrialSpec

__all__ = ["STUDY_MARK", "Launcher", "ProcessLauncher", "end_survivors"]


class Launcher(Protocol):
    """Runs one launch at a time.

    `run` may be called from the main thread only, one call after the other. It returns exactly one result for every
    spec, whatever the child does; a half-done launch is ended before it returns or raises, its processes included.

    Raises:
        MachineError: no child can be started at all (no template, no folder, a full disk, a card that does not become
            quiet), or the disk was full before the child could report. Nothing is known of the configuration then.
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
        cards: what the driver says of the cards now.
        on_wait: told, one sentence, what a launch has to wait for before it begins.
    """

    def __init__(
        self,
        study_mark: str,
        clock: Clock,
        *,
        cards: Callable[[], list[gpu.Gpu] | gpu.NvmlUnavailable] = gpu.gpus,
        on_wait: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self._mark = study_mark
        self._clock = clock
        self._quiet = Quiet(clock, cards, on_wait)
        self._template: Template | None = None

    def run(self, spec: TrialSpec, *, on_beat: Callable[[Beat], None], stop: Callable[[], bool]) -> TrialResult:
        files = open_folder(spec)
        try:
            waited_s = self._quiet.wait(cards_of(spec), stop)
        except Stopped as stopped:
            result = stopped_waiting(spec, stopped.waited_s)
        else:
            result = self._launch(spec, files, Watch(spec, self._clock, on_beat, stop))
            result = result.model_copy(update={"waited_s": waited_s})
        write_atomic(files.result, result.model_dump_json())
        return result

    def close(self) -> None:
        if self._template is not None:
            self._template.close()
            self._template = None

    def _launch(self, spec: TrialSpec, files: LaunchFiles, watch: Watch) -> TrialResult:
        oom_kills = oom_kill_count()
        began = self._clock.now()
        try:
            ended = self._ready(spec.env).launch(files, watch)
        except TemplateLost:
            # Its children die with it; what had left them for a session of its own does not.
            ended = Exit(-signal.SIGKILL)
            self.close()
            end_survivors(self._mark, self._clock)
        except BaseException:
            # Its template has ended with it; the next launch gets a new one.
            self.close()
            raise
        finally:
            remove_leftovers(watch.pids)
        self._quiet.stuck += ended.stuck
        kernel_killed = oom_kills is not None and (oom_kill_count() or 0) > oom_kills
        result = verdict(spec, files, ended.code, watch, kernel_killed=kernel_killed, shared_memory=ended.shared_memory)
        if lacked_room(result, files):
            # What it says instead is no verdict on the configuration, and a resume must not take it for one.
            files.result.unlink(missing_ok=True)
            raise MachineError(f"the disk of {files.folder} is full", advice=FREE_SOME_SPACE)
        return result.model_copy(update={"wall_s": self._clock.now() - began})

    def _ready(self, env: Mapping[str, str]) -> Template:
        # What a process reads while it is loaded (allocators, OMP, LD_PRELOAD) cannot be changed by a fork.
        if self._template is not None and self._template.env != dict(env):
            self.close()
        if self._template is None:
            self._template = Template(env, self._mark, self._clock)
        return self._template
