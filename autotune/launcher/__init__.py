"""Real launches. A template process per search forks one child per launch, which is monitored from here. No torch.

A launch is judged by its wait status, its result file and evidence from the system, in that order (see the table in
`verdict`). Error messages come last, and only the child interprets them.
"""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Callable
from typing import Protocol

from autotune.base.clock import SystemClock
from autotune.base.errors import MachineError
from autotune.base.files import FREE_SOME_SPACE, write_atomic
from autotune.base.layout import LaunchFiles
from autotune.base.records import Beat, TrialResult, TrialSpec, TrialStatus
from autotune.launcher.fork_client import Exit, Template, TemplateLost
from autotune.launcher.quiet import Quiet, Stopped, cards_of, stopped_waiting
from autotune.launcher.result import lacked_room, verdict
from autotune.launcher.watch import (
    LAUNCHER_MARK,
    STUDY_MARK,
    Watch,
    end_survivors,
    make_way,
    open_folder,
    remove_leftovers,
)
from autotune.machine import gpu
from autotune.machine.host import oom_kill_count

__all__ = ["STUDY_MARK", "Launcher", "ProcessLauncher", "end_survivors"]


class Launcher(Protocol):
    """Runs one launch at a time.

    `run` and `close` are called in the same thread, one call at a time. That thread outlives the launcher: children die
    with the thread that started them (PR_SET_PDEATHSIG). `run` returns exactly one result per spec, whatever the child
    does. An unfinished launch and all its processes are ended before `run` returns or raises.

    Raises:
        MachineError: no child can be started (no template, no folder, a full disk, a card that stays busy), or the
            disk was full before the child could report. The configuration is not judged then.
    """

    def run(self, spec: TrialSpec, *, on_beat: Callable[[Beat], None], stop: Callable[[], bool]) -> TrialResult:
        """Run one launch to its end. ``stop`` is polled several times a second; if it returns True, the launch ends as
        interrupted."""
        ...

    def close(self) -> None:
        """Release what is kept between launches. May be called twice."""
        ...


class ProcessLauncher:
    """The real launcher.

    Args:
        study_mark: unique to the study; set in the environment of all its processes.
        clock: does not count the time in which this process was stopped while a launch ran.
        cards: returns the driver's current view of the cards.
        on_wait: called with a sentence when a launch has to wait before it can begin, or is slow to begin.
    """

    def __init__(
        self,
        study_mark: str,
        clock: SystemClock,
        *,
        cards: Callable[[], list[gpu.Gpu] | gpu.NvmlUnavailable] = gpu.gpus,
        on_wait: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self._marks = {STUDY_MARK: study_mark, LAUNCHER_MARK: uuid.uuid4().hex}
        #: As it is now, however often a process has to be started anew: all launches of this run share it.
        self._environ = dict(os.environ)
        self._clock = clock
        self._quiet = Quiet(clock, cards, on_wait)
        self._on_wait = on_wait
        self._said_spawned = False
        self._template: Template | None = None
        #: The launch whose script is kept.
        self._kept: TrialSpec | None = None

    @property
    def keeps(self) -> bool:
        """Whether the script of an earlier launch trains on, for launches that may follow it."""
        return self._template is not None and self._template.keeps

    def let_go(self) -> None:
        """End the script that is kept, if one is."""
        if self._template is None or self._kept is None or not self._template.keeps:
            return
        watch = Watch(self._kept, self._clock, lambda beat: None, lambda: False)
        try:
            exit_info = self._template.let_go(watch)
            if exit_info is not None:
                self._quiet.stuck += exit_info.stuck
        except TemplateLost:
            self._lost()
        finally:
            remove_leftovers(watch.pids)
            self._kept = None

    def run(self, spec: TrialSpec, *, on_beat: Callable[[Beat], None], stop: Callable[[], bool]) -> TrialResult:
        files, result = open_folder(spec), None
        if self.keeps and spec.follows:
            result = self._launch(spec, files, Watch(spec, self._clock, on_beat, stop), follows=True)
            if not _says_something(spec, result):
                # What went wrong there says nothing about a launch of its own, whose startup the limit leaves out.
                spec = spec.model_copy(update={"limits": spec.limits.model_copy(update={"total_s": None})})
                files, result = open_folder(spec), None
        if result is None:
            self.let_go()
            try:
                waited_s = self._quiet.wait(cards_of(spec), stop, allow_busy=spec.plan.busy_cores is None)
                result = self._launch(spec, files, Watch(spec, self._clock, on_beat, stop))
                result = result.model_copy(update={"waited_s": waited_s})
            except Stopped as stopped:
                result = stopped_waiting(spec, stopped.waited_s)
        make_way(files.result)
        write_atomic(files.result, result.model_dump_json())
        return result

    def close(self) -> None:
        self.let_go()
        self._end_template()

    def _end_template(self) -> None:
        if self._template is not None:
            self._template.close()
            self._template = None

    def _lost(self) -> None:
        # The template's children die with it, except those in a session of their own.
        self._end_template()
        end_survivors(self._marks[LAUNCHER_MARK], self._clock, LAUNCHER_MARK)

    def _launch(self, spec: TrialSpec, files: LaunchFiles, watch: Watch, *, follows: bool = False) -> TrialResult:
        oom_kills = oom_kill_count()
        began_s = self._clock.now()
        try:
            template = self._ready(spec)
            exit_info = template.follow(files, watch) if follows else template.launch(files, watch)
            self._kept = spec if template.keeps else None
        except TemplateLost:
            exit_info = Exit(-signal.SIGKILL)
            self._lost()
        except BaseException:
            # The template has ended too; the next launch starts a new one.
            self.close()
            raise
        finally:
            remove_leftovers(watch.pids)
        # A launch that is kept has reported, and its processes go on.
        exit_info = Exit(0) if exit_info is None else exit_info
        self._quiet.stuck += exit_info.stuck
        kernel_killed = oom_kills is not None and (oom_kill_count() or 0) > oom_kills
        result = verdict(
            spec, files, exit_info.code, watch, kernel_killed=kernel_killed, shared_memory=exit_info.shared_memory
        )
        if lacked_room(result, files):
            # The reported failure says nothing about the configuration, so a resumed study must not read it.
            files.result.unlink(missing_ok=True)
            raise MachineError(f"the disk of {files.folder} is full", advice=FREE_SOME_SPACE)
        return result.model_copy(update={"began_s": began_s, "wall_s": self._clock.now() - began_s})

    def _ready(self, spec: TrialSpec) -> Template:
        # Settings read while a process is loaded (allocators, OMP, LD_PRELOAD) cannot be changed after a fork.
        template = self._template
        if template is not None and (template.env, template.cores) != (dict(spec.env), spec.cores):
            self.close()
        if self._template is None:
            self._template = Template(self._environ, spec.env, spec.cores, self._marks, self._clock, self._say_spawned)
        return self._template

    def _say_spawned(self, sentence: str) -> None:
        if not self._said_spawned:
            self._said_spawned = True
            self._on_wait(sentence)


def _says_something(spec: TrialSpec, result: TrialResult) -> bool:
    """Return whether a launch inside a script that another launch started says something about its configuration, or
    about the search. Anything else may be the script's fault, and is tried again by itself."""
    if spec.heat is not None:
        # The entrant that ended the heat is charged with that, and the others run again by themselves.
        return result.status is not TrialStatus.USER_ERROR
    if result.status is TrialStatus.TIMEOUT:
        return spec.limits.total_s is not None and result.wall_s >= spec.limits.total_s
    return result.status in (TrialStatus.COMPLETE, TrialStatus.PRUNED, TrialStatus.INTERRUPTED)
