"""Leftovers of a launch: escaped processes, and files in /dev/shm."""

import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing import shared_memory

import torch

#: Maximum lifetime of a process that a test leaves behind, even if autotune fails to kill it.
LIFE_S = 60


def hold(ctx):
    """Take a lock that is released when the last process forked from here has ended."""
    held = os.open(os.path.join(ctx.arg("folder"), "held"), os.O_RDONLY | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_SH)
    return held


def note(ctx, *pids):
    """Tell the test which processes to look for."""
    with open(os.path.join(ctx.arg("folder"), "left-behind"), "a") as stream:
        stream.writelines(f"{pid}\n" for pid in pids)


def _slip_away():
    """Fork twice into a new session and ignore signals, to escape parent and group. Returns 0 in the new process."""
    told, tells = os.pipe()
    first = os.fork()
    if first == 0:
        os.setsid()
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        second = os.fork()
        if second:
            os.write(tells, str(second).encode())
            os._exit(0)
        return 0
    os.waitpid(first, 0)
    return int(os.read(told, 32))


def double_fork(ctx):
    pid = _slip_away()
    if pid == 0:
        time.sleep(LIFE_S)
        os._exit(0)
    note(ctx, pid)


def double_fork_and_crash(ctx):
    double_fork(ctx)
    os.abort()


def double_fork_and_wait(ctx):
    double_fork(ctx)
    time.sleep(LIFE_S)


def without_an_environment(ctx):
    """A process without a mark in its environment, either."""
    command = ["env", "-i", "setsid", "sh", "-c", f"trap '' TERM HUP INT; sleep {LIFE_S} >/dev/null & echo $!"]
    note(ctx, int(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout))


def keep_forking(ctx):
    """A process that keeps replacing itself: each one lives only until it has forked the next."""
    held = hold(ctx)
    pid = _slip_away()
    if pid == 0:
        end = time.monotonic() + LIFE_S
        while time.monotonic() < end:
            if os.fork():
                os._exit(0)
        os._exit(0)
    os.close(held)
    note(ctx, pid)


def keep_forking_fast(ctx):
    """The same in a process without PyTorch, in which a fork takes a millisecond."""
    code = (
        "import fcntl, os, sys, time\n"
        "held = open(sys.argv[2], 'w'); fcntl.flock(held, fcntl.LOCK_SH)\n"
        "os.setsid(); end = time.monotonic() + float(sys.argv[1]); hops = 0\n"
        "while time.monotonic() < end:\n"
        "    if os.fork(): os._exit(0)\n"
        "    hops += 1\n"
        "    if hops == 20: os.close(1)\n"
    )
    # Its stdout closes once it is running.
    held = os.path.join(ctx.arg("folder"), "held")
    subprocess.run([sys.executable, "-S", "-c", code, str(LIFE_S), held], stdout=subprocess.PIPE, check=True)


def spawn_a_python(ctx):
    """A child that is executed rather than forked, in its own session, and stopped."""
    code = f"import os, signal, time; os.setsid(); os.kill(os.getpid(), signal.SIGSTOP); time.sleep({LIFE_S})"
    note(ctx, subprocess.Popen([sys.executable, "-c", code]).pid)


def a_child_to_wait_for(ctx):
    """A process that the interpreter waits for at exit."""
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(LIFE_S,))
    process.start()
    note(ctx, process.pid)


def kill_noted(ctx):
    note(ctx, os.getpid())
    os.kill(os.getpid(), signal.SIGKILL)


def shared_memory_and_kill(ctx):
    """A block created by Python's own module, whose cleanup helper belongs to the launch too."""
    block = shared_memory.SharedMemory(create=True, size=4096)
    with open(os.path.join(ctx.arg("folder"), "shared-memory"), "w") as stream:
        stream.write(block.name)
    os.kill(os.getpid(), signal.SIGKILL)


def tensors_as_files_and_kill(ctx):
    """PyTorch's other way to share tensors, used where file descriptors run out."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    kept = [torch.zeros(1000).share_memory_() for _ in range(4)]
    note(ctx, os.getpid())
    os.kill(os.getpid(), signal.SIGKILL)
    return kept


def workers_share_tensors_as_files(ctx):
    torch.multiprocessing.set_sharing_strategy("file_system")
    return _KillsItsLeader(ctx)


class _KillsItsLeader(torch.utils.data.Dataset):
    """Its workers kill their leader while batches are on the way to it."""

    def __init__(self, ctx):
        self.ctx = ctx
        self.made = 0

    def __len__(self):
        return 80_000

    def __getitem__(self, index):
        self.made += 1
        if self.made == 1:
            note(self.ctx, os.getpid(), os.getppid())
        if self.made == 800:
            os.kill(os.getppid(), signal.SIGKILL)
        return torch.zeros(16), index % 4
