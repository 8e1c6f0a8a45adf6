"""Finds the live processes of a study, and waits for conditions."""

import os
from pathlib import Path

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
