"""Ways to die, and ways to refuse to die."""

import ctypes
import mmap
import multiprocessing
import os
import signal
import time

_DEAF = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def bus(ctx):
    """Touch a page of a mapped file that has been truncated."""
    path = os.path.join(ctx.arg("folder"), f"cut-{os.getpid()}")
    with open(path, "wb+") as stream:
        stream.truncate(mmap.PAGESIZE)
        mapped = mmap.mmap(stream.fileno(), mmap.PAGESIZE)
        stream.truncate(0)
    mapped[0] = 1


def outgrow_shared_memory(ctx):
    """Pages are allocated on first touch, and touching one too many is fatal."""
    with open("/dev/shm/outgrown", "w+b") as stream:
        stream.truncate(64 * 2**20)
        with mmap.mmap(stream.fileno(), 0) as pages:
            for start in range(0, len(pages), mmap.PAGESIZE):
                pages[start] = 1


def segv(ctx):
    ctypes.string_at(0)


def abort(ctx):
    os.abort()


def kill(ctx):
    os.kill(os.getpid(), signal.SIGKILL)


def lose_workers(ctx):
    """Kill the loader's workers, and leave a note if that has not interrupted this function."""
    workers = multiprocessing.active_children()
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join()
    time.sleep(0.1)
    with open(os.path.join(ctx.arg("folder"), "uninterrupted"), "w") as stream:
        stream.write(str(len(workers)))


def leave_with_0(ctx):
    os._exit(0)


def leave_politely(ctx):
    raise SystemExit(0)


def wait(ctx):
    while True:
        time.sleep(1000)


def wait_deaf(ctx):
    """Keep running through every signal but SIGKILL."""
    for number in _DEAF:
        signal.signal(number, signal.SIG_IGN)
    wait(ctx)


def wait_in_c(ctx):
    """Wait inside a C library that never returns to the interpreter, so no Python signal handler runs again."""
    for number in _DEAF:
        signal.signal(number, lambda *_: None)
    while True:
        ctypes.PyDLL(None).sleep(1000)


def wait_for(ctx, seconds):
    time.sleep(float(seconds))


def leave_politely_in_a_fork(ctx):
    pid = os.fork()
    if pid == 0:
        raise SystemExit(0)
    os.waitpid(pid, 0)
