"""Finds the live processes of a study, waits for conditions, and runs commands on a small disk."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from autotune.base.clock import SystemClock
from autotune.launcher import STUDY_MARK


def marked(mark):
    """Return the processes that carry a study's mark, as ``{pid: parent's pid}``. Zombies have no environment."""
    found = {}
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and f"{STUDY_MARK}={mark}".encode() in Path(f"/proc/{entry}/environ").read_bytes():
                found[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    return found


def measuring(files, after=0):
    """Return whether a launch of a study runs, which has a spec and no result, and so many others have theirs."""
    specs = list(files.folder.glob("*/*/spec.json"))
    done = sum((spec.parent / "result.json").exists() for spec in specs)
    return len(specs) > done >= after


def wait_until(condition, deadline_s=30.0):
    clock = SystemClock()
    end = clock.now() + deadline_s
    while not condition():
        assert clock.now() < end, f"not within {deadline_s} s"
        clock.sleep(0.02)


def on_small_disk(folder, size, *words):
    """Run a command in a mount namespace of its own, with a file system of a size (``4m``) at a folder.

    Skips the test where that is not permitted. Returns the lines of JSON that the command prints.
    """
    elsewhere = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    mount = f'mount -t tmpfs -o size={size} tmpfs "$0"'
    if shutil.which("unshare") is None or subprocess.run([*elsewhere, mount, folder], capture_output=True).returncode:
        pytest.skip("mounting a small disk in a namespace of its own is not permitted here")
    command = [*elsewhere, f'{mount} && exec "$@"', folder, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
