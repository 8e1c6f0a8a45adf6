"""The template: a process with torch imported that forks one child per launch.

Forking takes a fifth of a second; a fresh import takes five. Forking is only safe while the template stays pristine:
it runs no tensor operation, imports no workload and has a single thread. If it has more (libraries and monitoring
agents start some when torch is imported), it spawns the child instead, which then imports torch itself.

The template also reaps whatever a launch leaves behind. As the subreaper of its descendants it inherits orphans, and
after the leader exits it kills and reaps until it has no children. Only then does it report the exit.

Messages are JSON, one per datagram of a SOCK_SEQPACKET pair:

    <- {"ready": true}                           torch is imported
    -> {"launch": "/path/spec.json"} + 3 fds     stdout, stderr, beats
    <- {"pid": 123}                              forked; or {"refused": "why no process can be started"}; or spawned:
       {"pid": 123, "threads": ["reporter"], "import_s": 4.6}
                                                 it writes `{"imported": true}` to its beats when it begins
    -> {"signal": 9}                             sent to the leader, at any time
    <- {"exit": -11, "stuck": [], "shm": [0, 4194304]}
                                                 "exit" as in `os.waitstatus_to_exitcode`; all processes of the
                                                 launch are dead except those in "stuck"; "shm" is the free bytes
                                                 and the size of /dev/shm right after the leader exited
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from autotune.base.files import CANNOT_WRITE, no_room
from autotune.child import temporary
from autotune.machine import system
from autotune.machine.host import shared_memory

#: How long to keep killing what a launch left behind. Only a process stuck in the kernel survives this.
REAP_S = 20.0
#: Grace period for processes that clean up after the others, such as multiprocessing's resource tracker.
TIDY_S = 2.0
_MESSAGE_BYTES = 65536
#: Variable that gives a spawned leader the folder for its processes' sockets.
_SOCKETS = "AUTOTUNE_SOCKETS"


def serve(connection: socket.socket) -> int:
    """Fork a child per request until the other side hangs up; return the exit code. The child never returns."""
    system.die_with_parent()
    system.become_subreaper()
    # Before torch is imported, which starts as many threads as there are cores.
    if cores := os.environ.pop("AUTOTUNE_CORES", ""):
        os.sched_setaffinity(0, map(int, cores.split(",")))
    # Ctrl-C in a terminal signals the whole foreground group; the parent decides how to handle it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    temporary.sweep(temporary.base())
    began = time.monotonic()
    _import()
    import_s = time.monotonic() - began
    _send(connection, {"ready": True})
    while True:
        try:
            data, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 3)
        except ConnectionResetError:
            return 0
        if not data:
            return 0
        message = json.loads(data)
        if "launch" not in message:
            continue  # a signal for a leader that ended just before
        # Each worker would make a folder of its own for its sockets, and leave it there when it is killed.
        with temporary.launch_folder() as folder:
            sockets = None if folder is None else str(folder)
            # Checked for each launch: an agent may start its thread some time after the import.
            others = system.other_threads()
            try:
                pid = _spawn(message["launch"], descriptors, sockets) if others else os.fork()
            except OSError as error:
                for descriptor in descriptors:
                    os.close(descriptor)
                _send(connection, {"refused": error.strerror})
                continue
            if pid == 0:
                connection.close()
                lead(Path(message["launch"]), descriptors, sockets)
            for descriptor in descriptors:
                os.close(descriptor)
            _send(connection, {"pid": pid, "threads": others, "import_s": import_s} if others else {"pid": pid})
            if not _attend(connection, pid):
                return 0


def _import() -> None:
    """Import what every launch needs: the libraries and our own code for children."""
    import scipy.special  # noqa: F401
    import torch  # noqa: F401
    import torchvision  # noqa: F401

    from autotune.child import run  # noqa: F401


def _spawn(spec: str, descriptors: list[int], sockets: str | None) -> int:
    """Start a fresh interpreter that runs `lead`; return its pid, which is left to the caller to reap."""
    command = [sys.executable, "-P", "-m", "autotune.child", spec, *map(str, descriptors)]
    env = {**os.environ, _SOCKETS: sockets or ""}
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=descriptors, env=env)
    process.returncode = 0  # otherwise subprocess would check on it, and warn that it is still running
    return process.pid


def _attend(connection: socket.socket, pid: int) -> bool:
    """Wait for the leader to exit, forwarding signals. Return False if the other side hung up."""
    leader = os.pidfd_open(pid)
    connected = True
    try:
        while True:
            watched = [leader, connection.fileno()] if connected else [leader]
            readable, _, _ = select.select(watched, [], [])
            if leader in readable:
                break
            with contextlib.suppress(ConnectionResetError):
                if data := connection.recv(_MESSAGE_BYTES):
                    # The child is not reaped yet, so its pid cannot have been given to another.
                    signal.pidfd_send_signal(leader, json.loads(data)["signal"])
                    continue
            connected = False
            signal.pidfd_send_signal(leader, signal.SIGKILL)
    finally:
        os.close(leader)
    # Workers release shared memory when they die, so this is the last moment at which a full /dev/shm is visible.
    free_and_size = shared_memory()
    _, status = os.waitpid(pid, 0)
    stuck = _end_descendants()
    if connected:
        code = os.waitstatus_to_exitcode(status)
        _send(connection, {"exit": code, "stuck": stuck, "shm": free_and_size})
    return connected


def _end_descendants() -> list[int]:
    """Kill and reap until no child is left; return the pids of those that cannot be ended."""
    began = time.monotonic()
    while True:
        children = system.children_of(os.getpid())
        # Killing these with the rest would leak the other processes' files in /dev/shm.
        spared = [c for c in children if system.tidies_up(c)] if time.monotonic() < began + TIDY_S else []
        for child in children:
            if child not in spared:
                # A process that has changed its user id cannot be killed.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(child, signal.SIGKILL)
        try:
            # Children of killed processes are reparented to this one: repeat until none is left.
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return []
        if time.monotonic() > began + REAP_S:
            return system.children_of(os.getpid())
        time.sleep(0.005)


def lead(spec: Path, descriptors: list[int], sockets: str | None = None, *, spawned: bool = False) -> NoReturn:
    """Become the leader of a launch, with its own session, streams, random state and the user's environment."""
    os.setsid()
    sockets = os.environ.pop(_SOCKETS, "") or None if spawned else sockets
    if sockets is not None:
        # This is multiprocessing's own key for it; processes pass it on to their children.
        multiprocessing.current_process()._config["tempdir"] = sockets  # type: ignore[attr-defined]
    system.die_with_parent()
    stdout, stderr, beats = descriptors
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    for descriptor in (stdout, stderr):
        os.close(descriptor)
    os.set_inheritable(beats, False)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for name, value in json.loads(os.environ.pop("AUTOTUNE_RESTORE", "{}")).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if spawned:
        # The import may hang too, and `run` asks for stack dumps only after it.
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        _import()
        os.write(beats, b'{"imported": true}\n')
    # Forked children would share the template's random state. A workload's own seed is applied later.
    random.seed()
    system.report_processes(beats)
    from autotune.child.run import run

    try:
        code = run(spec, beats)
    except Exception as error:
        # run() reports every failure itself, unless it cannot write.
        code = CANNOT_WRITE if no_room(error) else 1
        with contextlib.suppress(OSError, ValueError):
            traceback.print_exc()
    system.leave(code)


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.send(json.dumps(message).encode())
