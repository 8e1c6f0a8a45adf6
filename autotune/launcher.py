"""Real launches: a template process per search that forks one child per launch, watched from here. No torch.

The verdict on a launch is taken from its wait status, its result file and the system's evidence, in that order
(`verdict` holds the table); texts come last, and only the child reads them.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from autotune.clock import Clock
from autotune.errors import AutotuneError, MachineError
from autotune.files import write_atomic
from autotune.host import oom_kill_count
from autotune.layout import LaunchFiles
from autotune.records import Beat, Phase, TrialResult, TrialSpec, TrialStatus

#: A template that has not imported torch by then will not.
TEMPLATE_READY_S = 180.0
#: From the signal to the stack dump in stderr.log.
DUMP_S = 1.0
#: From SIGKILL until the template has reaped the whole tree; longer than its own `REAP_S`.
REAPED_S = 30.0
#: A result is some kilobytes per second measured. What is larger was not written by us.
MAX_RESULT_BYTES = 64 * 2**20
EVIDENCE_LINES = 15
_STEPPING = (Phase.WARMUP, Phase.MEASURE)
#: In the environment of every process of a study, by which survivors of a crash are found.
STUDY_MARK = "AUTOTUNE_STUDY"
#: Held at one thread while torch is imported, so that the template can fork; the child gets its own back.
_TEMPLATE_ENV = {"OPENBLAS_NUM_THREADS": "1", "TORCH_WARM_POOL": "0"}


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
        self._template: _Template | None = None

    def run(self, spec: TrialSpec, *, on_beat: Callable[[Beat], None], stop: Callable[[], bool]) -> TrialResult:
        files = LaunchFiles(Path(spec.folder))
        files.folder.mkdir(parents=True, exist_ok=True)
        # A launch that is tried again under the same name must not inherit the old one's result.
        files.result.unlink(missing_ok=True)
        write_atomic(files.spec, spec.model_dump_json(indent=1))
        oom_kills = oom_kill_count()
        watch = _Watch(spec, self._clock, on_beat, stop)
        began = self._clock.now()
        try:
            template = self._ready(spec.env)
            exit_code = template.launch(files, watch)
        except _TemplateLost:
            exit_code = -signal.SIGKILL
            self.close()
        kernel_killed = oom_kills is not None and (oom_kill_count() or 0) > oom_kills
        result = verdict(spec, files, exit_code, watch, kernel_killed=kernel_killed)
        result = result.model_copy(update={"wall_s": self._clock.now() - began})
        write_atomic(files.result, result.model_dump_json())
        return result

    def close(self) -> None:
        if self._template is not None:
            self._template.close()
            self._template = None

    def _ready(self, env: Mapping[str, str]) -> _Template:
        # What a process reads while it is loaded (allocators, OMP, LD_PRELOAD) cannot be changed by a fork.
        if self._template is not None and self._template.env != dict(env):
            self.close()
        if self._template is None:
            self._template = _Template(env, self._mark, self._clock)
        return self._template


class _Watch:
    """What is known of a running launch, and whether it must end."""

    def __init__(
        self, spec: TrialSpec, clock: Clock, on_beat: Callable[[Beat], None], stop: Callable[[], bool]
    ) -> None:
        self.spec = spec
        self.clock = clock
        self.phase: Phase | None = None
        self.phase_s: dict[str, float] = {}
        self.peak_bytes: int | None = None
        #: Why it was ended from here, if it was.
        self.ended: TrialStatus | None = None
        self.cause = ""
        self._on_beat = on_beat
        self._stop = stop
        self._phase_began = self._last_beat = clock.now()
        self._buffer = b""

    def feed(self, data: bytes) -> None:
        """Beats as they come through the pipe."""
        self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            with contextlib.suppress(ValidationError):
                self._beat(Beat.model_validate_json(line))
        # A line without end is not ours: the pipe is writable for the user's code too.
        self._buffer = self._buffer[-4096:]

    def _beat(self, beat: Beat) -> None:
        now = self.clock.now()
        if beat.phase is not self.phase:
            self._book(now)
            self.phase, self._phase_began = beat.phase, now
        self._last_beat = now
        if beat.memory_bytes is not None:
            self.peak_bytes = max(self.peak_bytes or 0, beat.memory_bytes)
        self._on_beat(beat)

    def _book(self, now: float) -> None:
        if self.phase is not None:
            self.phase_s[self.phase] = self.phase_s.get(self.phase, 0.0) + now - self._phase_began

    def finish(self) -> None:
        """Book the last phase's seconds."""
        self._book(self.clock.now())

    def overdue(self) -> bool:
        """Whether the launch must end now; notes the status and the cause."""
        now = self.clock.now()
        limits, phase = self.spec.limits, self.phase or Phase.LOAD
        if self._stop():
            self.ended, self.cause = TrialStatus.INTERRUPTED, "the search was ended while it ran"
        elif phase in _STEPPING and now - self._last_beat > limits.silence_s:
            self.ended = TrialStatus.HANG
            self.cause = f"no step was finished for {limits.silence_s:.4g} s in phase {phase}"
        elif now - self._phase_began > limits.of(phase):
            self.ended = TrialStatus.TIMEOUT
            self.cause = f"phase {phase} took longer than its limit of {limits.of(phase):.4g} s"
        return self.ended is not None


class _TemplateLost(Exception):
    """The template process is gone, and its children with it."""


class _Template:
    """One template process and the socket to it."""

    def __init__(self, env: Mapping[str, str], mark: str, clock: Clock) -> None:
        self.env = dict(env)
        self._clock = clock
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        base = {**os.environ, **env}
        restore = {name: base.get(name) for name in _TEMPLATE_ENV}
        with theirs:
            # -P: the user's working folder must not shadow modules of ours or of torch.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "autotune.trial", str(theirs.fileno())],
                env={**base, **_TEMPLATE_ENV, STUDY_MARK: mark, "AUTOTUNE_RESTORE": json.dumps(restore)},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                # Its own group: a Ctrl-C in the terminal is for the search to decide upon.
                process_group=0,
            )
        try:
            self._socket.settimeout(TEMPLATE_READY_S)
            ready = json.loads(self._socket.recv(65536) or b"{}")
        except (OSError, ValueError):
            ready = {}
        if not ready.get("ready"):
            self._process.kill()
            _, stderr = self._process.communicate()
            self._socket.close()
            raise MachineError(
                str(ready.get("reason", "the process that imports torch did not come up")),
                advice="try `python -c 'import torch, torchvision'` in this environment.",
                detail="\n".join(stderr.decode(errors="replace").splitlines()[-EVIDENCE_LINES:]) or None,
            )

    def launch(self, files: LaunchFiles, watch: _Watch) -> int:
        """Fork a child, watch it to its end, and return its exit code (minus the signal's number)."""
        read_end, write_end = os.pipe()
        # Whoever still holds the other end (a process stuck in the kernel) must not make us wait.
        os.set_blocking(read_end, False)
        try:
            with files.stdout.open("wb") as stdout, files.stderr.open("wb") as stderr:
                message = json.dumps({"launch": str(files.spec)}).encode()
                try:
                    socket.send_fds(self._socket, [message], [stdout.fileno(), stderr.fileno(), write_end])
                except OSError as error:
                    raise _TemplateLost from error
                finally:
                    os.close(write_end)
            with selectors.DefaultSelector() as selector:
                selector.register(self._socket, selectors.EVENT_READ)
                selector.register(read_end, selectors.EVENT_READ)
                return self._attend(selector, read_end, watch)
        except BaseException:
            # An error of ours, or Ctrl-C: whatever runs now ends with the template.
            self.close()
            raise
        finally:
            watch.finish()
            os.close(read_end)

    def _attend(self, selector: selectors.BaseSelector, beats: int, watch: _Watch) -> int:
        kill_at: float | None = None
        lost_at: float | None = None
        while True:
            for ready, _ in selector.select(timeout=0.1):
                if ready.fd == beats:
                    data = os.read(beats, 65536)
                    if data:
                        watch.feed(data)
                    else:
                        selector.unregister(beats)
                    continue
                message = self._receive()
                if "exit" in message:
                    with contextlib.suppress(BlockingIOError):
                        while data := os.read(beats, 65536):
                            watch.feed(data)
                    return int(message["exit"])
            now = self._clock.now()
            if watch.ended is None and watch.overdue():
                dump = watch.ended in (TrialStatus.TIMEOUT, TrialStatus.HANG)
                if dump:
                    self._signal(signal.SIGUSR1)
                kill_at = now + (DUMP_S if dump else 0.0)
            if kill_at is not None and now >= kill_at:
                self._signal(signal.SIGKILL)
                kill_at, lost_at = None, now + REAPED_S
            if lost_at is not None and now >= lost_at:
                raise _TemplateLost

    def _receive(self) -> dict[str, Any]:
        try:
            data = self._socket.recv(65536)
        except OSError as error:
            raise _TemplateLost from error
        if not data:
            raise _TemplateLost
        message: dict[str, Any] = json.loads(data)
        return message

    def _signal(self, number: int) -> None:
        with contextlib.suppress(OSError):
            self._socket.send(json.dumps({"signal": int(number)}).encode())

    def close(self) -> None:
        """End the template; hanging up makes it kill what it still has."""
        self._socket.close()
        try:
            self._process.wait(timeout=REAPED_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()


def verdict(spec: TrialSpec, files: LaunchFiles, exit_code: int, watch: _Watch, *, kernel_killed: bool) -> TrialResult:
    """What a launch's end means, from wait status, result file and the system's evidence.

    ===============================  ===========  ===========  ==========================================
    the child                        exit code    result file  status
    ===============================  ===========  ===========  ==========================================
    reported success                 0            ok           complete (or pruned, as it says)
    reported a failure               1            failed       the one it names
    died by a signal of its own      −11, −7 …    none         crashed
    SIGKILL from outside             −9           none         host_oom if the kernel counted one, else killed
    ended, reported nothing          any          none         crashed: exit code 0 proves nothing
    reported success, died after it  not 0        ok           complete, `unclean_exit`
    was ended from here              −9           none         interrupted, timeout or hang
    ===============================  ===========  ===========  ==========================================
    """
    reported, unreadable = _read_result(files)
    evidence = tail(files.stderr)
    if reported is not None:
        success = reported.status in (TrialStatus.COMPLETE, TrialStatus.PRUNED)
        return reported.model_copy(
            update={
                "exit_code": exit_code,
                "unclean_exit": success and exit_code != 0,
                "evidence": None if success else evidence,
            }
        )
    status, cause, advice = TrialStatus.CRASHED, "", None
    if watch.ended is not None:
        status, cause = watch.ended, watch.cause
        if status is not TrialStatus.INTERRUPTED:
            advice = f"the stacks of all threads are in {files.stderr}."
    elif exit_code == -signal.SIGKILL and kernel_killed:
        status, cause = TrialStatus.HOST_OOM, "the kernel's memory killer ended it"
        advice = "use fewer workers, less prefetch or a smaller batch, or give the machine more memory."
    elif exit_code == -signal.SIGKILL:
        status, cause = TrialStatus.KILLED, "killed from outside (SIGKILL)"
    elif exit_code < 0:
        cause = f"died by {_signal_name(-exit_code)}"
    elif unreadable is not None:
        cause = unreadable
    else:
        cause = f"ended with exit code {exit_code} and reported nothing"
    if status is TrialStatus.CRASHED:
        advice = f"its last words are in {files.stderr}."
    return TrialResult(
        launch=spec.launch,
        status=status,
        phase=watch.phase,
        cause=cause,
        advice=advice,
        evidence=evidence,
        exit_code=exit_code,
        peak_bytes=watch.peak_bytes,
        phase_s=watch.phase_s,
    )


def _read_result(files: LaunchFiles) -> tuple[TrialResult | None, str | None]:
    """The child's own report, or why there is none that can be read."""
    try:
        if files.result.stat().st_size > MAX_RESULT_BYTES:
            return None, f"its result file is larger than {MAX_RESULT_BYTES >> 20} MiB"
        return TrialResult.model_validate_json(files.result.read_bytes()), None
    except FileNotFoundError:
        return None, None
    except (OSError, ValidationError) as error:
        return None, f"its result file cannot be read ({type(error).__name__})"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def tail(path: Path, lines: int = EVIDENCE_LINES) -> str | None:
    """The last lines of a log, whatever its bytes are; ``None`` if it is empty or missing."""
    try:
        with path.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - 16384))
            text = stream.read().decode(errors="replace")
    except OSError:
        return None
    return "\n".join(text.strip().splitlines()[-lines:]) or None


def end_survivors(mark: str, clock: Clock) -> int:
    """Kill what an earlier run of a study left alive; returns how many processes.

    Only processes that carry the study's mark in their environment are touched. Call it while holding the study's
    lock: then no live search owns them.

    Raises:
        AutotuneError: one of them could not be ended (stuck in the kernel).
    """
    wanted = f"{STUDY_MARK}={mark}".encode()
    ended: set[int] = set()
    deadline = clock.now() + REAPED_S
    while True:
        alive = [pid for pid in _processes() if pid != os.getpid() and wanted in _environment(pid)]
        if not alive:
            return len(ended)
        if clock.now() > deadline:
            raise AutotuneError(f"processes of an earlier run cannot be ended: {sorted(alive)}")
        for pid in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            ended.add(pid)
        clock.sleep(0.05)


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _environment(pid: int) -> list[bytes]:
    # Empty for zombies and for processes of others, which cannot be ours.
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
