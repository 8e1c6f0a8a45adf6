"""The cost of the daemon: a request, a list, and idling, with ten thousand jobs in its queue.

    python -m benchmarks.daemon [--jobs 10000] [--markdown FILE]

Starts a real daemon in a temporary folder and queries its socket from this process, so that Python's start-up does not
count. The machine should be idle.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil  # type: ignore[import-untyped, unused-ignore]

from autotune.base.clock import SystemClock
from autotune.base.errors import DaemonUnreachableError
from autotune.base.layout import DaemonFiles
from autotune.base.records import Job, JobRequest, StudySpec
from autotune.daemon.client import Client, short_name
from autotune.daemon.queue import open_queue

#: Goals: seconds for a submission and for the list; percent of a core and bytes for an idle daemon.
SUBMIT_S, LIST_S, CPU_PERCENT, MEMORY_BYTES = 0.05, 0.5, 1.0, 80_000_000
STATUS_S = 1.0
SUBMISSIONS = 200
CROWD = 500
IDLE_S = 60.0


def request(number: int) -> JobRequest:
    """A request that never starts: like most jobs of a long queue it waits, here for a time of day that is over."""
    spec = StudySpec(name=f"net-{number}", mark=f"mark-{number}", created="2026-11-22T03:00:00+00:00", model="resnet50")
    return JobRequest(
        spec=spec,
        label="resnet50",
        studies_dir="/nowhere/studies",
        folder="/nowhere",
        python=sys.executable,
        environment={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/home/me"},
        not_before=4e9,
    )


def fill(files: DaemonFiles, count: int) -> None:
    """Insert jobs directly into the database, because submitting them one by one would take minutes."""
    files.state.mkdir(parents=True)
    queue = open_queue(files.queue).queue
    queue.restore([Job(id=n, submitted="2026-11-22T03:00:00+00:00", request=request(n)) for n in range(1, count + 1)])
    queue.close()


def started(files: DaemonFiles) -> subprocess.Popen[bytes]:
    """Start a daemon and wait until it answers."""
    command = [sys.executable, "-P", "-m", "autotune", "daemon", "run", "--state-dir", str(files.state)]
    process = subprocess.Popen([*command, "--quiet-for", "0s", "--idle-cores", "1000"], stderr=subprocess.DEVNULL)
    clock = SystemClock()
    while True:
        try:
            Client(files).status()
            return process
        except DaemonUnreachableError:
            clock.sleep(0.1)


def timed(clock: SystemClock, times: int, do: object) -> list[float]:
    """Return the seconds of each call."""
    seconds = []
    for number in range(times):
        began = clock.now()
        do(number)  # type: ignore[operator]
        seconds.append(clock.now() - began)
    return seconds


def idle(pid: int, clock: SystemClock) -> tuple[float, int]:
    """Return the percentage of a core used over `IDLE_S`, and the resident memory in bytes after it."""
    process = psutil.Process(pid)
    before, began = process.cpu_times(), clock.now()
    clock.sleep(IDLE_S)
    after = process.cpu_times()
    used_s = after.user + after.system - before.user - before.system
    return 100 * used_s / (clock.now() - began), process.memory_info().rss


def report(count: int) -> list[tuple[str, str, str]]:
    """Return rows ``(what, measured, goal)``."""
    clock = SystemClock()
    rows: list[tuple[str, str, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        files = DaemonFiles(Path(folder) / "state", Path(folder) / "state" / "run")
        fill(files, count)
        process = started(files)
        client = Client(files)
        try:
            submit = timed(clock, SUBMISSIONS, lambda n: client.submit(request(count + 1 + n)))
            listed = timed(clock, 10, lambda n: client.rows())
            status = timed(clock, 50, lambda n: client.status())
            with contextlib.ExitStack() as crowd:
                for number in range(CROWD):
                    silent = crowd.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                    with short_name(files.socket) as name:
                        silent.connect(name)
                    if number % 2:
                        with contextlib.suppress(OSError):
                            silent.sendall(b'{"version": 1, ')
                crowded = timed(clock, 20, lambda n: client.status())
            cpu_percent, memory_bytes = idle(process.pid, clock)
        finally:
            process.terminate()
            process.wait()
    named = [("submit", submit, SUBMIT_S), ("list", listed, LIST_S), ("status", status, STATUS_S)]
    named.append((f"status among {CROWD} connections that say nothing", crowded, STATUS_S))
    for what, seconds, goal_s in named:
        seen = f"median {1000 * statistics.median(seconds):.1f} ms, worst {1000 * max(seconds):.1f} ms"
        rows.append((f"{what}, {len(seconds)} times", seen, f"{1000 * goal_s:.0f} ms"))
    rows.append(("idle, CPU", f"{cpu_percent:.2f} % of a core", f"{CPU_PERCENT:g} %"))
    rows.append(("idle, memory", f"{memory_bytes / 1e6:.1f} MB", f"{MEMORY_BYTES / 1e6:.0f} MB"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    lines = [f"With {options.jobs:,} jobs queued:", "", "| what | seen | goal |", "|---|---|---|"]
    lines += [f"| {what} | {seen} | {goal} |" for what, seen, goal in report(options.jobs)]
    print("\n".join(lines))
    if options.markdown is not None:
        options.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
