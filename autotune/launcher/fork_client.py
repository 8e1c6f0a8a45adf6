"""The parent's side of a template process: starts it, runs one launch at a time, and kills one that is overdue."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from autotune.base.clock import SystemClock
from autotune.base.errors import MORE_PROCESSES, MachineError
from autotune.base.layout import STORAGE_URL, LaunchFiles
from autotune.base.records import TrialStatus
from autotune.launcher.result import EVIDENCE_LINES
from autotune.launcher.watch import Logs, Watch, make_way

#: Time limit for the template to import torch.
TEMPLATE_READY_S = 180.0
#: Time from the signal to the kill, for writing the stack dump to stderr.log.
DUMP_S = 1.0
#: Time for a script's leader to end it; longer than the leader gives the script itself.
LEAVE_S = 6.0
#: Time from SIGKILL until the template has reaped the whole tree; longer than its own `REAP_S`.
REAPED_S = 30.0
#: How often to check a running launch, and the time without a check that means this process was stopped (Ctrl-Z).
LOOK_S = 0.1
STOPPED_S = 2.0
#: Keeps torch's import single-threaded so that the template can fork; the child restores the user's values.
IMPORT_ENV = {"OPENBLAS_NUM_THREADS": "1", "TORCH_WARM_POOL": "0"}


class TemplateLost(Exception):
    """The template process and its children are gone."""


@dataclass(frozen=True)
class Exit:
    """The end of a launch and its processes.

    Attributes:
        code: exit code of the leader, as in `os.waitstatus_to_exitcode`.
        stuck: pids of processes that could not be killed.
        shared_memory: free bytes and size of /dev/shm right after the leader exited.
    """

    code: int
    stuck: tuple[int, ...] = ()
    shared_memory: tuple[int, int] = (0, 0)


@dataclass
class _Open:
    """A launch that has not ended: its logs, and the descriptors that are read."""

    files: LaunchFiles
    logs: Logs
    selector: selectors.BaseSelector
    beats: int
    pids: set[int] = field(default_factory=set)

    def close(self) -> None:
        self.logs.close()
        self.selector.close()
        os.close(self.beats)


class Template:
    """One template process and the socket to it. The process dies with the thread that started it.

    Args:
        environ: the environment of the search. env: what its launches have in addition.
        cores: the cores to which it and its descendants are pinned; empty: not pinned.
        marks: environment variables by which its processes are found.
        on_spawn: called with one sentence whenever a launch cannot be forked and is spawned, which takes longer.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        env: Mapping[str, str],
        cores: Sequence[int],
        marks: Mapping[str, str],
        clock: SystemClock,
        on_spawn: Callable[[str], None],
    ) -> None:
        self.env = dict(env)
        self.cores = tuple(cores)
        self._clock = clock
        self._stops = clock.stops
        self._on_spawn = on_spawn
        self._open: _Open | None = None
        parent_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = parent_end
        base = {**{n: v for n, v in environ.items() if n != STORAGE_URL}, **env}
        settings = {
            **IMPORT_ENV,
            **marks,
            "AUTOTUNE_RESTORE": json.dumps({name: base.get(name) for name in IMPORT_ENV}),
            "AUTOTUNE_CORES": ",".join(map(str, cores)),
        }
        with child_end:
            # -P: keep the user's working folder from shadowing our modules or torch's.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "autotune.child", str(child_end.fileno())],
                env={**base, **settings},
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                # Own process group: the search decides what Ctrl-C in the terminal does.
                process_group=0,
            )
        try:
            self._socket.settimeout(TEMPLATE_READY_S)
            ready = json.loads(self._socket.recv(65536) or b"{}")
        except (OSError, ValueError):
            ready = {}
        if not ready.get("ready"):
            try:
                killed = self._process.wait(timeout=DUMP_S) == -signal.SIGKILL
            except subprocess.TimeoutExpired:
                killed = False
            self._process.kill()
            _, stderr = self._process.communicate()
            self._socket.close()
            if killed:
                raise MachineError(
                    "the process that imports torch was killed, as the kernel does when memory runs out",
                    advice="give the machine or the container more memory.",
                )
            raise MachineError(
                str(ready.get("reason", "the process that imports torch did not come up")),
                advice="try `python -c 'import torch, torchvision'` in this environment.",
                detail="\n".join(stderr.decode(errors="replace").splitlines()[-EVIDENCE_LINES:]) or None,
            )

    @property
    def keeps(self) -> bool:
        """Whether a finished launch waits for another one."""
        return self._open is not None

    def launch(self, files: LaunchFiles, watch: Watch) -> Exit | None:
        """Start a child and monitor it until it exits; return ``None`` if it is kept after its report.

        Raises:
            TemplateLost: the template ended or did not answer.
            MachineError: the child's log files cannot be opened.
        """
        self._stops = self._clock.stops
        read_end, write_end = os.pipe()
        # A process stuck in the kernel may still hold the other end and must not block us.
        os.set_blocking(read_end, False)
        try:
            logs = Logs(files)
        except BaseException:
            os.close(read_end)
            os.close(write_end)
            raise
        selector = selectors.DefaultSelector()
        selector.register(self._socket, selectors.EVENT_READ)
        selector.register(read_end, selectors.EVENT_READ)
        running = self._open = _Open(files, logs, selector, read_end)
        message = json.dumps({"launch": str(files.spec)}).encode()
        watch.begin()
        try:
            socket.send_fds(self._socket, [message], [*logs.descriptors, write_end])
        except OSError as error:
            self.close()
            raise TemplateLost from error
        finally:
            os.close(write_end)
        return self._until_over(running, files, watch)

    def follow(self, files: LaunchFiles, watch: Watch) -> Exit | None:
        """Let the launch that is kept carry out another spec; otherwise like `launch`."""
        running = self._open
        assert running is not None
        for path, existing in ((files.stdout, running.files.stdout), (files.stderr, running.files.stderr)):
            # Its script goes on writing to the same files.
            with contextlib.suppress(OSError):
                make_way(path)
                path.unlink(missing_ok=True)
                os.link(existing, path)
        watch.pids |= running.pids
        watch.begin()
        # If the launch is gone, so is the pipe or its reader, and the exit is reported through the socket.
        with contextlib.suppress(OSError):
            further = os.open(running.files.further, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.write(further, os.fsencode(files.spec) + b"\n")
            finally:
                os.close(further)
        return self._until_over(running, files, watch)

    def let_go(self, watch: Watch) -> Exit | None:
        """End the launch that is kept, and return its exit; ``None`` if there is none."""
        running = self._open
        if running is None:
            return None
        watch.pids |= running.pids
        self._signal(signal.SIGTERM)
        exit_info = self._until_over(running, running.files, watch, leave_s=LEAVE_S)
        for path in (running.files.trail, running.files.commands, running.files.further):
            path.unlink(missing_ok=True)
        return exit_info

    def _until_over(
        self, running: _Open, files: LaunchFiles, watch: Watch, *, leave_s: float | None = None
    ) -> Exit | None:
        exit_info = None
        try:
            exit_info = self._attend(running, files, watch, leave_s)
        except BaseException:
            # On our own error or Ctrl-C, the running launch ends with the template.
            self.close()
            raise
        finally:
            watch.finish()
            running.pids |= watch.pids
            if exit_info is not None and self._open is running:
                running.close()
                self._open = None
        return exit_info

    def _skip_stop(self, since: float, watch: Watch) -> None:
        """Leave the time since ``since`` uncounted if it is so long that this process must have been stopped."""
        self._clock.skip_stop(since, STOPPED_S)
        # The thread of another launch may have noticed it first.
        watch.was_stopped = watch.was_stopped or self._clock.stops != self._stops

    def _attend(self, running: _Open, files: LaunchFiles, watch: Watch, leave_s: float | None) -> Exit | None:
        """Monitor a launch until it ends, and return its exit; ``None`` if it is kept. One that has been asked to leave
        is killed after ``leave_s`` seconds."""
        selector, beats = running.selector, running.beats
        kill_at = None if leave_s is None else self._clock.now() + leave_s
        lost_at: float | None = None
        while True:
            polled = self._clock.now()
            events = selector.select(timeout=LOOK_S)
            self._skip_stop(polled, watch)
            woken = self._clock.now()
            running.logs.cut()
            if os.path.lexists(files.result):
                watch.reported()
            for ready, _ in events:
                if ready.fd == beats:
                    data = os.read(beats, 65536)
                    if data:
                        watch.feed(data)
                    else:
                        selector.unregister(beats)
                    continue
                try:
                    message = json.loads(self._socket.recv(65536) or b"{}")
                except OSError as error:
                    raise TemplateLost from error
                if not message:
                    raise TemplateLost
                if "refused" in message:
                    sentence = f"no process can be started: {message['refused']}"
                    raise MachineError(sentence, advice=MORE_PROCESSES)
                if "pid" in message:
                    watch.pids.add(message["pid"])
                if message.get("threads"):
                    watch.spawned()
                    self._on_spawn(_spawned(message["threads"], message["import_s"]))
                if "exit" in message:
                    with contextlib.suppress(BlockingIOError):
                        while data := os.read(beats, 65536):
                            watch.feed(data)
                    free, size = message["shm"]
                    return Exit(message["exit"], tuple(message["stuck"]), (free, size))
            if watch.kept and leave_s is None:
                return None
            # This process may be stopped at any moment, not only in the wait above.
            self._skip_stop(woken, watch)
            now = self._clock.now()
            if kill_at is None and lost_at is None and watch.overdue():
                kill_at = now + self._prepare_kill(watch)
            if kill_at is not None and now >= kill_at:
                self._signal(signal.SIGKILL)
                kill_at, lost_at = None, now + REAPED_S
            if lost_at is not None and now >= lost_at:
                raise TemplateLost

    def _prepare_kill(self, watch: Watch) -> float:
        """Ask a launch for its last output; return how many seconds it has for that."""
        if watch.spec.command is not None:
            # The leader only watches the script. It asks the script to end, and kills it if it does not.
            self._signal(signal.SIGTERM)
            return LEAVE_S
        if watch.ended in (TrialStatus.TIMEOUT, TrialStatus.HANG):
            self._signal(signal.SIGUSR1)
            return DUMP_S
        return 0.0

    def _signal(self, number: int) -> None:
        with contextlib.suppress(OSError):
            self._socket.send(json.dumps({"signal": int(number)}).encode())

    def close(self) -> None:
        """End the template. It kills its remaining children when the socket closes."""
        if self._open is not None:
            self._open.close()
            self._open = None
        self._socket.close()
        try:
            self._process.wait(timeout=REAPED_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()


def _spawned(threads: list[str], import_s: float) -> str:
    count = "a second thread" if len(threads) == 1 else f"{len(threads)} more threads"
    return (
        f"importing torch leaves {count} running here ({', '.join(sorted(set(threads)))}), so no launch can be forked: "
        f"each imports torch itself, which took {import_s:.1f} s."
    )
