"""A user's script in a process of its own, watched from outside."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import termios
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from autotune.base.errors import MachineError, WorkloadError
from autotune.base.layout import LaunchFiles
from autotune.base.records import CommandRef, DeliveryPlan, LaunchKind, Phase, TrialSpec
from autotune.child.failure import Disturbed, ScriptKilled, Slow, last_line, last_words, rebuilt
from autotune.child.launch import Beats
from autotune.child.script_folders import Refused, View, elsewhere, importing, prepare, silent, temporary_folder
from autotune.child.trail import Readings, SeenStep, Trail, told_deliveries
from autotune.launcher import script_entry
from autotune.launcher.result import end_of
from autotune.launcher.watch import KEPT
from autotune.machine import system
from autotune.machine.host import oom_kill_count

# Why a script cannot be measured although nothing has failed.


def too_short(script: Watched) -> WorkloadError:
    """Return the error for a script that ended before enough of its training was observed."""
    trail = script.trail
    if script.in_background and trail.elsewhere != "spawned":
        return WorkloadError(
            "the command has ended, and what it started goes on in the background, where it cannot be measured",
            advice="start the script in the foreground.",
        )
    taken = max(trail.optimizer_steps.values(), default=0)
    if isinstance(trail, Readings):
        return _told_too_little(trail, taken)
    if trail.torch_version is None:
        return WorkloadError(
            "the script ended and has not imported torch",
            advice="if it has, something on the way to it replaces PYTHONPATH, by which autotune enters; if it is not "
            "PyTorch's, it can tell its rate itself: --rate.",
        )
    if not taken and trail.elsewhere is not None:
        return trains_elsewhere(trail.elsewhere)
    if not taken:
        return WorkloadError(
            "the script ended and no optimizer of PyTorch has taken a step",
            advice="steps are seen of torch.optim's classes, and of those that are made from them.",
        )
    return WorkloadError(
        f"the script ended after {taken} step(s), too few to tell its rate",
        advice="let it train for longer; it is ended as soon as enough was seen.",
    )


def _told_too_little(trail: Readings, taken: int) -> WorkloadError:
    if taken:
        return WorkloadError(
            f"the program ended after it had told its rate {taken} time(s), too few to measure it",
            advice="let it train for longer, or tell its rate more often; it is ended as soon as enough was seen.",
        )
    where = "nothing that it wrote" if trail.events else "it wrote nothing that"
    return WorkloadError(
        f"the program ended, and {where} matches --rate {trail.expression!r}",
        advice="its lines are in stdout.log and stderr.log of the launch; a file of its own is named with --rate-file.",
    )


def trains_elsewhere(how: str) -> WorkloadError:
    """Return the error for a script that trains in a process that is not watched, ``forked`` or ``spawned``."""
    return WorkloadError(
        f"the script trains in a process that it has {how} itself, and which is not seen",
        advice="let it train in its own process, or start its ranks with torchrun.",
    )


def never_inside(trail: Trail) -> WorkloadError:
    """Return the error for a script that keeps training, but none of whose steps can be separated from the turns of its
    epochs and its evaluations."""
    if isinstance(trail, Readings):
        taken = trail.optimizer_steps[0]
        return WorkloadError(
            f"the program told its rate only {taken} time(s) in the time that a launch is measured",
            advice="let it tell its rate more often, or allow more time with --budget.",
        )
    loader = trail.loader
    batches = "" if loader is None or loader.batches is None else f", of {loader.batches} batch(es) each,"
    return WorkloadError(
        f"none of the script's steps began and ended inside an epoch{batches} without anything else between",
        advice="let it train on more data, or evaluate less often.",
    )


#: How often to look whether steps have ended.
LOOK_S = 0.02
#: A script that is to be kept must start to wait within this time, or it is ended.
PAUSE_S = 10.0
#: More steps than any launch takes.
_ENDLESS = 10**9
#: How long a program may take to end when it is asked to, before it is killed; shorter than the launcher's own wait.
END_S = 3.0
#: Programs that start others and are asked to end before they are killed, because what they have started may be
#: out of reach; by the names of programs and of Python modules.
_STARTERS = frozenset({
    "torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "accelerate.commands.launch",
    "deepspeed", "composer", "colossalai", "horovodrun", "mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun",
    "srun", "jsrun", "flux", "aprun", "docker", "podman", "nerdctl", "ssh", "ray",
})  # fmt: skip
#: ``-m`` is looked for among this many first words: Python's own options come before it.
_MODULE_BEFORE = 6
#: If a process that is not watched has trained for this long, and the script's own has not, it never will.
ELSEWHERE_S = 5.0
#: If nothing has trained for this long since an exception ended a thread, the script is over: for the thread that
#: trained, and for any other.
THREAD_S, OTHER_THREAD_S = 2.0, 60.0
#: If torch has been imported for this long where the agent could not enter, the agent never will.
KEPT_OUT_S = 5.0
#: Part of the name of a library that every process with torch in it has mapped.
_TORCHS = b"libtorch_python"
_SHELLS = 128
#: Python's exit code after an uncaught exception.
_PYTHONS = 1


class Terminal:
    """A terminal as the stdin of a command, which may ask for its width. There is nothing to read from it.

    Entering it returns the descriptor for the command, which is closed on leaving; ``DEVNULL`` where there are no
    terminals.
    """

    def __init__(self) -> None:
        self._ours = self._theirs = -1
        with contextlib.suppress(OSError, termios.error):
            self._ours, self._theirs = os.openpty()
            columns, rows = shutil.get_terminal_size()
            termios.tcsetwinsize(self._theirs, (rows, columns))
            modes = termios.tcgetattr(self._theirs)
            # A read returns at once, with nothing.
            modes[3] &= ~termios.ICANON
            modes[6][termios.VMIN] = modes[6][termios.VTIME] = 0
            termios.tcsetattr(self._theirs, termios.TCSANOW, modes)

    def __enter__(self) -> int:
        return subprocess.DEVNULL if self._theirs < 0 else self._theirs

    def __exit__(self, *_: object) -> None:
        if self._theirs >= 0:
            os.close(self._theirs)

    def close(self) -> None:
        """Hang up."""
        if self._ours >= 0:
            os.close(self._ours)
            self._ours = -1


class Watched(ABC):
    """A script that trains, watched from here.

    Args:
        trail: what the agent has written so far, or what a program without the agent has reported.
        commands: descriptor of the pipe on which the agent is told what comes next; ``None`` if it is told nothing.

    Attributes:
        found: the steps that ended between the last two looks.
        in_background: the command has ended, but something that it started is still running.
        rate_per_s: the rate to report.
    """

    def __init__(self, trail: Trail, commands: int | None) -> None:
        self.trail, self.commands = trail, commands
        self.found: list[SeenStep] = []
        self.in_background = False
        self.rate_per_s: float | None = None

    @property
    @abstractmethod
    def has_ended(self) -> bool:
        """Whether the script has ended by itself."""

    @abstractmethod
    def looks(self) -> Iterator[int]:
        """Keep yielding the number of steps that an optimizer has taken, with `found` updated each time, until the
        script ends."""

    def enter(self, phase: Phase) -> None:
        """Note that a phase begins, if anybody waits for phases."""
        return

    def tell(self, **told: Any) -> None:
        """Tell the agent what comes next. The pipe takes this much at once: nothing is written before the last turn has
        ended."""
        assert self.commands is not None
        os.write(self.commands, json.dumps(told).encode() + b"\n")

    def wait_for_all(self) -> None:
        """Wait until everything that the script trains with has been observed. Raises `WorkloadError` if it ends
        before."""
        for _ in self.looks():
            if self.trail.own is not None:
                return
        raise too_short(self)


class ScriptProcess(Watched):
    """The process of a command, with the agent in it.

    Args:
        spec: holds the configuration to run it under.
        asked: the plan for the agent, in place of that configuration; see `script_entry.probe_plan`.
        losses: for how many calls of ``backward`` the agent reports the loss.
        seed: seeds the random numbers if the script does not; ``None`` leaves them unseeded.
        commands: of `commands_pipe`, if configurations are to take turns. Closed by `end`.
        deliveries: how to note what its loaders deliver; ``None`` to note nothing.

    Raises:
        UsageError: there is no value for a place in the command.
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
        commands: int | None = None,
        deliveries: DeliveryPlan | None = None,
    ) -> None:
        self._beats = beats
        self.files = files = LaunchFiles(Path(spec.folder))
        files.trail.unlink(missing_ok=True)
        self._warm = False
        self._command_rate = command.rate is not None
        #: When processes that keep the agent out were last looked for, and since when there have been some.
        self._looked_at = time.monotonic()
        self._out_since: float | None = None
        #: When something was last read from the trail.
        self._read_at = 0.0
        self._oom_kills = oom_kill_count()
        self._terminal = Terminal()
        folder, output = prepare(command, files)
        words = script_entry.words_of(command, spec.config, output)
        temporary = temporary_folder()
        # A trial is not one of the trainings that its user tracks.
        env: Mapping[str, str] = silent(os.environ, temporary or files.folder)
        tells_in = None if command.rate_file is None else (output or folder) / command.rate_file
        self._view: View | None = None
        if command.view is not False:
            try:
                self._view = View(spec, command, folder, temporary, hidden=tells_in)
            except Refused as refused:
                if command.view:
                    raise _no_view(command.folder, refused) from refused
        self._looks = spec.kind is LaunchKind.PROBE
        if command.scratch:
            words = elsewhere(words, command.folder)
            env = importing(env, words, command.folder)
        if command.rate is not None:
            rates_path = tells_in if tells_in is None or self._view is None else self._view.written(tells_in)
            samples = script_entry.samples_in_step(command, spec.config)
            super().__init__(Readings(files, command, rates_path, samples), None)
            # Without a terminal, Python would buffer what the program prints.
            env = {"PYTHONUNBUFFERED": "1", **env}
        else:
            super().__init__(Trail(files.trail), commands)
            in_command = script_entry.set_by(command)
            plan = {
                **(asked or script_entry.agent_plan(spec.config, spec.launch, in_command=in_command)),
                "watch": str(files.trail),
                "losses": losses,
                "sockets": None if temporary is None else str(temporary),
            }
            if seed is not None:
                plan["seed"] = seed
            if commands is not None:
                plan["commands"] = str(files.commands)
            if command.repeats is not None and deliveries is None:
                plan["repeats"] = command.repeats
            if deliveries is not None:
                plan["deliveries"] = told_deliveries(deliveries, files, goes_on=commands is not None)
            env = script_entry.agent_environment(env, plan, spec.config, in_command=in_command)
        # Nothing shows when a program without the agent begins to train: until its first rate, allow it the time of a
        # first step.
        beats.enter(Phase.LOAD if command.rate is None else Phase.COMPILE)
        try:
            self._process = self._started(words, env, folder, must=bool(command.view))
        except OSError as error:
            raise WorkloadError(f"{words[0]!r} cannot be run: {error.strerror}") from error
        # The launcher terminates before it kills, so that the processes of a script can be ended in the right order.
        signal.signal(signal.SIGTERM, self._leave)

    def _started(
        self, words: Sequence[str], env: Mapping[str, str], folder: Path, *, must: bool
    ) -> subprocess.Popen[bytes]:
        """Start the command, in a view if there is one, or must be one, because the other launches have one."""
        # A process group of its own, so that it can be ended without this process.
        how: dict[str, Any] = {"env": env, "cwd": folder, "process_group": 0}
        with self._terminal as stdin:
            if self._view is not None:
                try:
                    return self._view.start(words, stdin=stdin, **how)
                except Refused as refused:
                    if must:
                        raise _no_view(self._view.folder, refused) from refused
                    self._view = None
            return subprocess.Popen(words, stdin=stdin, **how)

    def _leave(self, number: int, _frame: object) -> None:
        self.end()
        os._exit(_SHELLS + number)

    def go_on(self, beats: Beats) -> None:
        """From now on, report progress to another launch."""
        self._beats, self._looks, self.rate_per_s = beats, False, None
        # The new settings may have to be compiled.
        beats.enter(Phase.COMPILE)

    def enter(self, phase: Phase) -> None:
        self._beats.enter(phase)

    @property
    def pid(self) -> int:
        """The process id of the command."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def steps(self) -> Iterator[SeenStep]:
        """Yield the steps of the training as they end, except the very first, until the script ends.

        Raises:
            ScriptKilled: a signal ended the script.
            WorkloadError: it ended with an exit code other than 0, without an exception, or does not train as far as
                can be seen.
            Exception: what the script did not catch, in the form that `classify` understands.
        """
        for _ in self.looks():
            yield from self.found

    def looks(self) -> Iterator[int]:
        # Raises as `steps` does.
        ended = False
        while True:
            before = self.trail.events
            self.found = self.trail.read(decide=ended)
            if self._view is not None and self._looks:
                self._view.check_size(self.pid)
            if self.trail.lost is not None:
                # The fault may be the script's own, which is then about to die of it.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=END_S)
                    self.trail.read()
                if self.trail.raised is not None:
                    raise self._told(self.trail.raised)
                raise WorkloadError(f"the script can be watched no longer: {self.trail.lost}")
            self._raise_if_unseen()
            if self.trail.events > before:
                self._read_at = time.monotonic()
            ended_by = self._what_ended_its_thread()
            if ended_by is not None:
                raise self._told(ended_by)
            taken = max(self.trail.optimizer_steps.values(), default=0)
            self._enter_phases(taken)
            if self.trail.events > before:
                # Evaluations, and batches that no step has used yet, are signs of life as well.
                self._beats.step(taken, rate_per_s=self.rate_per_s)
            yield taken
            if ended:
                self._judge()
                return
            # Read once more after the end: what was written last may only just have arrived.
            ended = self._process.poll() is not None
            # Then the template has adopted it.
            adopted = psutil.Process(os.getppid()).children() if ended else ()
            self.in_background = any(child.pid != os.getpid() and _goes_on(child) for child in adopted)
            if not ended and not self.found:
                time.sleep(LOOK_S)

    def _raise_if_unseen(self) -> None:
        """Raise `WorkloadError` if the script trains where, or in a way in which, its steps cannot be observed."""
        trail, now = self.trail, time.monotonic()
        if trail.elsewhere is not None and trail.began_at is None and now - trail.elsewhere_at > ELSEWHERE_S:
            raise trains_elsewhere(trail.elsewhere)
        if trail.unseen is not None and not trail.optimizer_steps:
            raise WorkloadError(
                f"the script trains, and no optimizer of PyTorch takes a step: {trail.unseen}",
                advice="update its weights by an optimizer of torch.optim, or a class made from one, or let the script "
                "print its rate, and say how with --rate.",
            )
        if self._command_rate or trail.torch_version is not None or now - self._looked_at < KEPT_OUT_S / 5:
            return
        self._looked_at = now
        if not _has_torch_without_us(self._process.pid):
            self._out_since = None
            return
        self._out_since = now if self._out_since is None else self._out_since
        if now - self._out_since > KEPT_OUT_S:
            raise WorkloadError(
                "the script has imported torch, and autotune could not enter it: something on the way to it replaces "
                "PYTHONPATH, or has Python ignore it",
                advice="put folders in front of what is there (PYTHONPATH=DIR:$PYTHONPATH), or let the script print "
                "its rate, and say how with --rate.",
            )

    def _what_ended_its_thread(self) -> list[list[Any]] | None:
        """Return the exception that ended a thread of the script, if nothing has trained for long enough since."""
        thread = self.trail.thread
        if thread is None or self.trail.began_at is None:
            return None
        silence_s = time.monotonic() - self._read_at
        return thread.chain if silence_s > (THREAD_S if thread.trained else OTHER_THREAD_S) else None

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
        if code - _SHELLS in signal.valid_signals():
            # This is how a shell reports that its child was ended by a signal.
            code = _SHELLS - code
        raised, thread = self.trail.raised, self.trail.thread
        if raised is None and thread is not None and thread.trained:
            raised = thread.chain
        if raised is not None:
            raise self._told(raised)
        if code and self._view is not None and self._view.is_full:
            raise self._view.no_room
        if code < 0:
            kills = oom_kill_count()
            by_kernel = None not in (kills, self._oom_kills) and (kills or 0) > (self._oom_kills or 0)
            raise ScriptKilled(-code, by_kernel=by_kernel)
        if code == _PYTHONS:
            # A framework may have caught what ended the script, or it was raised before torch was imported, out of the
            # agent's sight.
            chain = last_words(end_of(self.files.stderr))
            if chain is not None:
                raise self._told(chain)
        if code:
            line = last_line(end_of(self.files.stderr))
            raise WorkloadError(
                f"the script ended with exit code {code}" + (f" (its last line: {line})" if line else "")
            )

    def _told(self, chain: list[list[Any]]) -> Exception:
        """Return the exception that ended the script, or the full disk that led to it."""
        error = rebuilt(chain)
        if self._view is not None and self._view.is_full:
            full = self._view.no_room
            full.__cause__ = error
            return full
        return error

    def end(self) -> None:
        """End the script and everything it has started.

        A launch has nothing to save, and a script that is asked to end may do more than that: save its state for the
        next run, or have itself restarted. So everything is killed, except that programs which have started the script
        elsewhere, or several times, are asked to end first, and processes that tidy up are left to do so.
        """
        processes = _processes(self._process)
        self._beats.processes(process.pid for process in processes)
        starters = [process for process in processes if _starts_others(process)]
        for process in processes:
            # Parents first, so that none sees its children die.
            if process not in starters and not system.tidies_up(process.pid):
                with contextlib.suppress(psutil.Error):
                    process.kill()
        for process in starters:
            with contextlib.suppress(psutil.Error):
                process.terminate()
        deadline = time.monotonic() + END_S
        while any(map(_goes_on, starters)) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        for process in starters:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.wait()
        # The template ends what is left, except for processes that remove shared memory.
        self.trail.close()
        self._terminal.close()
        # A signal may call this again at any time.
        commands, self.commands = self.commands, None
        if commands is not None:
            os.close(commands)


def _no_view(folder: str | Path, refused: Refused) -> MachineError:
    return MachineError(
        f"{folder} cannot be viewed copy-on-write any more, as the launches before did: {refused}",
        advice="`autotune resume` looks again at what is possible.",
    )


def _processes(leader: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return the running processes of a command, parents before their children; the template has adopted those that
    lost their parent."""
    roots = [p for p in psutil.Process(os.getppid()).children() if p.pid != os.getpid()]
    # Once it has been reaped, its pid may be another process's.
    if leader.poll() is None:
        roots.insert(0, psutil.Process(leader.pid))
    processes = []
    for root in roots:
        with contextlib.suppress(psutil.Error):
            processes += [root, *root.children(recursive=True)]
    return processes


def _starts_others(process: psutil.Process) -> bool:
    """Return whether a process is a program that starts trainings, on this machine or elsewhere, and ends them when it
    is asked to end itself."""
    words: list[str] = []
    with contextlib.suppress(psutil.Error):
        words = process.cmdline()
    if not words:
        return False
    module = next((name for option, name in pairwise(words[:_MODULE_BEFORE]) if option == "-m"), None)
    return os.path.basename(script_entry.python_file(words) or module or words[0]) in _STARTERS


def _has_torch_without_us(pid: int) -> bool:
    """Return whether a process, or one that it has started, has imported torch, but was started without the agent's
    folder in its ``PYTHONPATH``, or with an option that makes Python ignore that."""
    with contextlib.suppress(psutil.Error):
        for process in (leader := psutil.Process(pid), *leader.children(recursive=True)):
            with contextlib.suppress(psutil.Error, OSError):
                if _TORCHS not in Path(f"/proc/{process.pid}/maps").read_bytes():
                    continue
                folders = process.environ().get("PYTHONPATH", "").split(os.pathsep)
                if str(script_entry.FOLDER) not in folders or script_entry.deaf(process.cmdline()) is not None:
                    return True
    return False


def _goes_on(process: psutil.Process) -> bool:
    """Return whether a process has not ended yet, other than one that only removes shared memory at the end."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE and not system.tidies_up(process.pid)
    except psutil.Error:
        return False


class KeptScript:
    """The script of a launch that is over, kept to train on for the launches that follow.

    Attributes:
        script: ``None`` if there is none. launch: the launch that started it, made unique.
        startup_s: seconds that it took to begin to train.
    """

    def __init__(self) -> None:
        self.script: ScriptProcess | None = None
        self.launch = ""
        self.startup_s = 0.0

    def hold(self, script: ScriptProcess, spec: TrialSpec, startup_s: float, *, cut: bool) -> None:
        """Keep a script, whose epochs so far may have been cut short, if it starts to wait for commands soon."""
        self.script, self.startup_s = script, startup_s
        # A resumed study has another launch of the same name.
        self.launch = f"{spec.launch}:{uuid.uuid4().hex[:8]}"
        self.pause()
        for loader in script.trail.loaders.values() if cut else ():
            # They say nothing about the epochs to come.
            loader.before = loader.taken = 0

    def pause(self) -> None:
        """Make the script wait between two of its steps; end it if it does not get there soon."""
        script = self.script
        if script is None:
            return
        before, deadline = script.trail.waits, time.monotonic() + PAUSE_S
        script.tell(wait=True)
        # What goes wrong in it now does not concern the launch that is over.
        with contextlib.suppress(Exception):
            for _ in script.looks():
                if script.trail.waits > before and not script.has_ended:
                    return
                if script.has_ended or time.monotonic() > deadline:
                    break
        self.end()

    def go_on(self, beats: Beats, doors: Mapping[str, Any]) -> ScriptProcess:
        """Let the script train under other settings, given for each of its doors, until it is paused; return it. Raises
        `WorkloadError` if it cannot be switched to them, or has ended."""
        script = self.script
        assert script is not None
        script.go_on(beats)
        turn = script.trail.turns + 1
        script.tell(steps=_ENDLESS, doors=doors, open=True)
        for _ in script.looks():
            if script.trail.turns == turn:
                break
        else:
            raise too_short(script)
        if script.trail.unswitched is not None:
            raise WorkloadError(f"the script's training could not be switched to it: {script.trail.unswitched}")
        return script

    def next_spec(self, beats: int) -> Path | None:
        """Wait for another launch; return the path of its spec, or ``None`` if no script is kept. That there may be
        another one is told over the pipe of the beats."""
        if self.script is None:
            return None
        path = self.script.files.further
        try:
            path.unlink(missing_ok=True)
            os.mkfifo(path)
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            # Some file systems have no pipes.
            self.end()
            return None
        try:
            os.write(beats, KEPT + b"\n")
            line = b""
            while not line.endswith(b"\n"):
                line += os.read(descriptor, 4096)
            return Path(os.fsdecode(line[:-1]))
        finally:
            os.close(descriptor)
            path.unlink(missing_ok=True)

    def end(self) -> None:
        """End the script."""
        script, self.script = self.script, None
        if script is not None:
            script.end()
            script.files.trail.unlink(missing_ok=True)
            script.files.commands.unlink(missing_ok=True)


@contextlib.contextmanager
def training(
    spec: TrialSpec, command: CommandRef, beats: Beats, kept: KeptScript, *, in_turns: bool = False
) -> Iterator[ScriptProcess]:
    """Yield a script that trains under the spec's configuration, or, in turns, as it is told: the kept one, or one that
    is started for this."""
    if kept.script is None:
        files = LaunchFiles(Path(spec.folder))
        commands = commands_pipe(files) if in_turns else None
        try:
            script = ScriptProcess(spec, command, beats, commands=commands)
            try:
                yield script
            finally:
                script.end()
        finally:
            files.commands.unlink(missing_ok=True)
        # After a failure it is kept, as evidence.
        files.trail.unlink(missing_ok=True)
    elif in_turns:
        kept.script.go_on(beats)
        yield kept.script
    else:
        doors = script_entry.door_arguments(spec.config, in_command=script_entry.set_by(command))
        try:
            yield kept.go_on(beats, doors)
        except (Disturbed, Slow):
            # The script goes on, for other launches.
            kept.pause()
            raise
        kept.pause()


def commands_pipe(files: LaunchFiles) -> int:
    """Create the pipe that carries commands to a script's agent; return a descriptor of it."""
    files.commands.unlink(missing_ok=True)
    os.mkfifo(files.commands)
    # Open it for reading, too, so as not to wait for the script, which opens it only once it has begun to train.
    return os.open(files.commands, os.O_RDWR | os.O_CLOEXEC)
