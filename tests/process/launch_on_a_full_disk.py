"""``launch_on_a_full_disk.py FOLDER``: launches and a study's storage on a small disk that fills up while they run.

FOLDER is a file system of its own. Prints one JSON line per action: what it raised, or how it ended.
"""

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from autotune.base.clock import SystemClock
from autotune.base.errors import AutotuneError
from autotune.base.layout import LaunchFiles, StudyFiles
from autotune.base.records import Beat, Fingerprint, MeasurePlan, Phase, Trial, TrialResult, TrialSpec, TrialStatus
from autotune.launcher import ProcessLauncher
from autotune.space import Choice, Space
from autotune.study.history import History
from autotune.study.tables import LaunchTables, read_trials
from autotune.workload.catalog import find_workload
from tests.support import make_spec

disk = Path(sys.argv[1])
ballast = disk / "ballast"
FAULTS = str(Path(__file__).parent / "workloads" / "faults.py")
#: Long enough for the disk to be full before the launch ends, however busy the machine is.
LONGER = MeasurePlan(min_measure_s=2.0, max_measure_s=4.0)
SHORT = MeasurePlan(target_halfwidth=10.0, min_windows=2, min_window_s=0.02, max_measure_s=2.0)
CONFIG = {"batch_size": 8, "num_workers": 0, "intra_op_threads": 1}
SPACE = Space({"batch_size": (Choice(8), Choice(16)), "num_workers": (Choice(0),)}, {}, {"batch_size": 8})


def fill(leave: int = 0) -> None:
    """Fill the disk except for ``leave`` bytes."""
    with ballast.open("wb", buffering=0) as stream:
        for size in (2**20, 2**12, 1):
            with contextlib.suppress(OSError):
                while True:
                    stream.write(b"x" * size)
        stream.truncate(max(0, ballast.stat().st_size - leave))


def tell(name: str, act: Callable[[], object]) -> None:
    """Run an action, print its result, and free the disk again."""
    told: dict[str, object] = {"name": name, "raised": None}
    try:
        found = act()
        told["status"] = found.status.value if isinstance(found, TrialResult) else None
    except Exception as error:
        code = error.exit_code if isinstance(error, AutotuneError) else None
        told |= {"raised": type(error).__name__, "says": str(error), "code": code}
        told["advice"] = getattr(error, "advice", None)
    ballast.unlink(missing_ok=True)
    print(json.dumps(told))


def spec(name: str, fault: str = "", at: object = 1, plan: MeasurePlan = SHORT) -> TrialSpec:
    workload = find_workload(FAULTS, {"fault": fault, "at": str(at)})
    return make_spec(disk / name, workload=workload, config=CONFIG, batch_size=8, plan=plan)


def run(wanted: TrialSpec, fill_at: Phase | None = None) -> TrialResult:
    def on_beat(beat: Beat) -> None:
        if beat.phase is fill_at and not ballast.exists():
            fill()

    return launcher.run(wanted, on_beat=on_beat, stop=lambda: False)


def launch_when_full() -> TrialResult:
    fill()
    return run(spec("before"))


def has_result(name: str) -> None:
    if LaunchFiles(disk / name).result.exists():
        raise AssertionError(f"{name} has a result")


launcher = ProcessLauncher(f"test-{uuid4().hex}", SystemClock())
tell("no room for the spec", launch_when_full)
tell("no room for the result", lambda: run(spec("result", plan=LONGER), fill_at=Phase.WARMUP))
tell("no result is left", lambda: has_result("result"))
tell("a failure on a full disk", lambda: run(spec("failure", "fault_errors.of_the_users_own", 6), fill_at=Phase.WARMUP))
tell("no failure is left", lambda: has_result("failure"))
tell("a launch with room", lambda: run(spec("after")))
tell("a failure with room", lambda: run(spec("honest", "fault_errors.of_the_users_own", 2)))
launcher.close()


def when_full(act: Callable[[], object], leave: int = 0) -> Callable[[], object]:
    def acting() -> object:
        fill(leave)
        return act()

    return acting


study = StudyFiles(disk / "study")
study.folder.mkdir()
done = TrialResult(launch="00000", status=TrialStatus.OOM, cause="x" * 5000)
row = TrialResult(launch="row", status=TrialStatus.OOM, cause="x" * 5000)
# An empty Optuna database takes about 130 KiB.
tell("no room for a database", when_full(lambda: History(study, SPACE)))
tell("no room for the second half of a database", when_full(lambda: History(study, SPACE), leave=60 * 2**10))
tell("a database after half of one", lambda: History(study, SPACE))
history = History(study, SPACE)
tell("no room to bind", when_full(lambda: history.bind(Fingerprint(values={"cores": "2" * 5000}))))
history = History(study, SPACE)
history.bind(Fingerprint(values={"cores": 2}))
tell("no room to queue", when_full(lambda: [history.enqueue({"batch_size": 8, "num_workers": 0}) for _ in range(99)]))
history = History(study, SPACE)
history.enqueue({"batch_size": 8, "num_workers": 0})
while history.waiting:
    number, config, _ = history.ask()
    history.record(Trial(number=number, config=config, result=done))
before = [t.number for t in read_trials(study)]
tell("no room to ask", when_full(lambda: [history.ask() for _ in range(99)]))
history = History(study, SPACE)
for found in history.recover():
    history.record(found)
history.enqueue({"batch_size": 16, "num_workers": 0})
number, config, _ = history.ask()
trial = Trial(number=number, config=config, result=done)
tell("no room to record", when_full(lambda: [history.record(trial) for _ in range(1)]))
history = History(study, SPACE)
found = [t for t in history.recover() if t.number == number]
tell("nothing was told of it", lambda: None if len(found) == 1 else sys.exit("it was told"))
history.record(trial)
tell("no room for a row", when_full(lambda: [LaunchTables(study).add(spec(f"row-{i}"), row) for i in range(99)]))
LaunchTables(study).add(spec("row"), row)
print(json.dumps({"name": "all is remembered", "before": before, "now": [t.number for t in read_trials(study)]}))
