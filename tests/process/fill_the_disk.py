"""``fill_the_disk.py FOLDER MOMENT…``: a search on a disk that is filled at each given moment, and its resumes.

FOLDER is a small file system of its own. Prints one JSON line per run of the search, including the last one, which is
not disturbed.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from autotune.base.layout import StudyFiles
from autotune.space import key
from autotune.study.tables import read_trials

WORKLOAD = Path(__file__).parent / "workloads" / "tiny.py"
DEADLINE_S = 60.0

folder = Path(sys.argv[1])
files = StudyFiles(folder / "studies" / "full")
ballast = folder / "ballast"
autotune = [sys.executable, "-m", "autotune"]
search = [
    *autotune, "search", "--model", str(WORKLOAD), "--study", "full", "--budget", "28s", "--trials", "4",
    "--fix", "workload.pause=false",
    "--device", "cpu", "--set", "compile_mode=off", "--set", "num_workers=0", "--allow-busy",
]  # fmt: skip


def fill() -> None:
    """Fill the disk to the last byte: a small file may still fit after a large one does not."""
    with ballast.open("wb", buffering=0) as stream:
        for size in (2**20, 2**12, 1):
            try:
                while True:
                    stream.write(b"x" * size)
            except OSError:
                continue


def remembered() -> dict[int, list[object]]:
    return {t.number: [key(t.config), t.result.status.value, t.score] for t in read_trials(files)}


def measuring() -> bool:
    return any(not (spec.parent / "result.json").exists() for spec in files.trials.glob("*/spec.json"))


def run(command: list[str], moment: str | None) -> None:
    known = len(remembered()) if files.database.exists() else 0
    moments = {
        "measuring": measuring,
        "recorded": lambda: files.database.exists() and len(remembered()) > known,
    }
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if moment is not None:
        deadline = time.monotonic() + DEADLINE_S
        while not moments[moment]():
            assert process.poll() is None and time.monotonic() < deadline, f"{moment} did not come"
            time.sleep(0.005)
        fill()
    _, stderr = process.communicate(timeout=2 * DEADLINE_S)
    ballast.unlink(missing_ok=True)
    print(json.dumps({"moment": moment, "code": process.returncode, "stderr": stderr, "trials": remembered()}))


os.environ["NO_COLOR"] = "1"
command = search
for moment in [*sys.argv[2:], None]:
    run(command, moment)
    command = [*autotune, "resume", "full"]
print(json.dumps({"profile": files.profile.exists(), "outcome": files.outcome.exists()}))
