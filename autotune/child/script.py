"""A script of the user's as a child of a launch: started with the agent in it, watched step by step, and ended."""

from __future__ import annotations

import builtins
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from autotune import entering
from autotune.child.beats import Beats
from autotune.child.trail import SeenStep, Trail
from autotune.errors import WorkloadError
from autotune.layout import LaunchFiles
from autotune.machine.host import oom_kill_count
from autotune.records import CommandRef, Phase, TrialSpec

#: How often to look whether steps have ended.
LOOK_S = 0.02
#: How long a script may take to end when it is asked to, before it is killed.
END_S = 3.0
_SHELLS = 128
#: Attribute of an exception that was raised in a script's process: the frames that it passed there, each ``[file,
#: line]``.
FRAMES = "_autotune_frames"


class ScriptKilled(Exception):
    """A signal ended the script.

    Attributes:
        number: of the signal. by_kernel: the kernel's memory killer has been at work meanwhile.
    """

    def __init__(self, number: int, *, by_kernel: bool) -> None:
        super().__init__(f"the script was ended by {_name(number)}")
        self.number = number
        self.by_kernel = by_kernel


class ScriptProcess:
    """The process of a command, with the agent in it.

    Args:
        spec: with the configuration to run it under.
        asked: what the agent is told instead of that configuration; see `entering.question`.
        losses: of how many calls of ``backward`` the agent tells the loss.
        seed: what random numbers begin with if the script does not say; ``None`` for as they come.
        commands: a pipe that tells whose turn it is, if configurations are to take turns.

    Attributes:
        trail: what the agent has written so far.
        found: the steps that have ended between the last two looks.
        in_background: the command has ended, and something that it had started goes on.

    Raises:
        UsageError: a value for a place in the command is not known.
        MachineError: the agent cannot enter.
        WorkloadError: the program cannot be run.
    """

    def __init__(
        self,
        spec: TrialSpec,
        command: CommandRef,
        beats: Beats,
        *,
        asked: dict[str, Any] | None = None,
        losses: int = 0,
        seed: int | None = None,
        commands: Path | None = None,
    ) -> None:
        self._beats = beats
        path = LaunchFiles(Path(spec.folder)).trail
        path.unlink(missing_ok=True)
        self.trail = Trail(path)
        self.found: list[SeenStep] = []
        self.in_background = False
        self._warm = False
        #: What beats tell.
        self.rate_per_s: float | None = None
        self._oom_kills = oom_kill_count()
        told = asked or entering.plan(spec.config, spec.launch, in_command=entering.places(command.words))
        told = {**told, "watch": str(path), "losses": losses}
        if seed is not None:
            told["seed"] = seed
        if commands is not None:
            told["commands"] = str(commands)
        env = entering.entered(os.environ, told, spec.config)
        words = entering.filled(command.words, spec.config)
        beats.enter(Phase.LOAD)
        try:
            # A group of its own, to be ended without this process.
            self._process = subprocess.Popen(
                words, env=env, cwd=command.folder, stdin=subprocess.DEVNULL, process_group=0
            )
        except OSError as error:
            raise WorkloadError(f"{words[0]!r} cannot be run: {error.strerror}") from error

    @property
    def pid(self) -> int:
        """The process id of the command."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the command has ended by itself."""
        return self._process.poll() is not None

    def steps(self) -> Iterator[SeenStep]:
        """Yield the steps of the training as they end, but for the very first. It goes on until the script ends.

        Raises:
            ScriptKilled: a signal ended the script.
            WorkloadError: it ended with an exit code other than 0, without an exception.
            Exception: what the script did not catch, in the shape in which `classify` understands it.
        """
        for _ in self.looks():
            yield from self.found

    def looks(self) -> Iterator[int]:
        """Yield the number of steps that an optimizer has taken, again and again, until the script ends.

        Raises: as `steps`.
        """
        ended = False
        while True:
            before = self.trail.events
            self.found = self.trail.read(decide=ended)
            if self.trail.lost is not None:
                # What has gone wrong there may be the script's own, of which it is about to die.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=END_S)
                    self.trail.read()
                if self.trail.raised is not None:
                    raise rebuilt(self.trail.raised)
                raise WorkloadError(f"the script can be watched no longer: {self.trail.lost}")
            taken = max(self.trail.optimizer_steps.values(), default=0)
            self._enter_phases(taken)
            if self.trail.events > before:
                # Evaluations, and batches that no step has used yet, are signs of life, too.
                self._beats.step(taken, rate_per_s=self.rate_per_s)
            yield taken
            if ended:
                self._judge()
                return
            # Read once more after it: what it wrote last may just have come.
            ended = self._process.poll() is not None
            self.in_background = ended and _has_orphans()
            if not ended and not self.found:
                time.sleep(LOOK_S)

    def _enter_phases(self, taken: int) -> None:
        if self._warm:
            return
        trail, phase = self.trail, self._beats.phase
        if phase is Phase.LOAD and trail.torch_version is not None:
            self._beats.enter(Phase.BUILD)
        if phase is Phase.BUILD and trail.began_at is not None:
            self._beats.enter(Phase.COMPILE)
        if self._beats.phase is Phase.COMPILE and taken:
            self._beats.enter(Phase.WARMUP)
            self._warm = True

    def _judge(self) -> None:
        code = self._process.returncode
        if code > _SHELLS:
            # A shell tells so that its child was ended by a signal.
            code = _SHELLS - code
        if self.trail.raised is not None:
            raise rebuilt(self.trail.raised)
        if code < 0:
            kills = oom_kill_count()
            by_kernel = None not in (kills, self._oom_kills) and (kills or 0) > (self._oom_kills or 0)
            raise ScriptKilled(-code, by_kernel=by_kernel)
        if code:
            raise WorkloadError(f"the script ended with exit code {code}")

    def end(self) -> None:
        """End the script and what it has started, politely first."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            # What it leaves behind, the template ends, but for those that remove shared memory.
            self._process.kill()
            self._process.wait()
        self.trail.close()


def _has_orphans() -> bool:
    """Return whether a process of this launch has lost its parent, which has ended: the template has adopted it."""
    template = psutil.Process(os.getppid())
    return any(child.pid != os.getpid() for child in template.children())


def rebuilt(chain: list[list[Any]]) -> Exception:
    """Return an exception like one in a script: its name, its base, its message, and its causes.

    Args:
        chain: as the agent tells it; see `autotune_agent.facts.chain`.
    """
    links = [_link(*told) for told in chain]
    for link, cause in pairwise(links):
        link.__cause__ = cause
    return links[0]


def _link(name: str, bases: list[str], message: str, facts: dict[str, Any]) -> Exception:
    frames = facts.pop("frames", [])
    kind = next((known for n in (name, *bases) if (known := _known(n)) is not None), Exception)
    module, _, short = name.rpartition(".")
    # Of the same name, so that it is told, and classified, as what it was.
    made: type[Exception] = type(short, (kind,), {"__module__": module, "__init__": _init})
    found = made(message)
    setattr(found, FRAMES, frames)
    for attribute, value in facts.items():
        setattr(found, attribute, value)
    return found


def _init(self: Exception, message: str) -> None:
    # Some of them take other arguments.
    BaseException.__init__(self, message)


def _known(name: str) -> type[Exception] | None:
    module, _, short = name.rpartition(".")
    holder = builtins if module == "builtins" else sys.modules.get(module) if module.startswith("torch") else None
    found = getattr(holder, short, None)
    return found if isinstance(found, type) and issubclass(found, Exception) else None


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
