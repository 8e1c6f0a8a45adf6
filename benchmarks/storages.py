"""What storing a trial costs, in a SQLite file and in a PostgreSQL server, with many who write at once.

    python -m benchmarks.storages [--workers 1,10,50] [--trials 1000] [--storage URL] [--limit 30m] [--markdown FILE]

Each worker is a process that stores trials as a search does (a row for Optuna to ask for, its configuration, our record
of it, and our tables' rows of its launch), one after another, with nothing trained in between: the trials are replayed,
so that the seconds are those of the storage. With ``separate``, each has a study of its own, as searches have that
share a server; with ``together``, all write to one, which autotune's own searches never do, because one search decides
for all of its workers: it is Optuna's way of working together, and shows where a storage gives up.

Without ``--storage``, a PostgreSQL server of its own is started (`apt-get install postgresql`), which waits until what
is stored is on disk, as SQLite does. A cell is given up after ``--limit``, or as soon as a worker fails, which is said.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from statistics import median

from autotune.base.clock import SystemClock
from autotune.base.errors import AutotuneError
from autotune.base.layout import STORAGE_URL, StudyFiles
from autotune.base.parsing import duration_s
from autotune.base.records import StudySpec, Trial, TrialResult, TrialSpec, TrialStatus
from autotune.space import Choice, Space
from autotune.study.database import Patience, SharedDatabase, SharedStudy, open_shared
from autotune.study.history import History
from autotune.study.storage_url import url_of_environment
from autotune.study.tables import LaunchTables
from benchmarks.tables import ResultTable, seconds
from tests.support import make_measurement, make_spec

BATCHES = tuple(2**n for n in range(3, 11))
SPACE = Space(
    {
        "precision": (Choice("fp32"), Choice("bf16")),
        "batch_size": tuple(map(Choice, BATCHES)),
        "num_workers": tuple(map(Choice, range(9))),
    },
    {},
    {"precision": "fp32", "batch_size": 32, "num_workers": 0},
)
_POSTGRES = Path(__file__).parents[1] / "tests" / "cluster" / "postgres.py"


def worker(folder: Path, name: str, trials: int) -> None:
    """Store trials, and print the seconds of each as JSON. `STORAGE_URL` names the database, if it is not a file."""
    files = StudyFiles(folder / name)
    files.folder.mkdir(parents=True, exist_ok=True)
    url, shared, study = url_of_environment(), None, None
    if url is not None:
        asked = StudySpec(name=name, mark=f"benchmark-{name}", created="", model="recorded", storage=url.address)
        database = SharedDatabase(url, make=True, keep=True)
        shared = SharedStudy(database, asked.mark, Patience(url.address, SystemClock()))
        study = open_shared(shared, asked, files)
    history, tables = History(files, SPACE, study=study), LaunchTables(files, shared)
    took = []
    for number in range(trials):
        began = time.monotonic()
        _store(files, history, tables, number)
        took.append(time.monotonic() - began)
    print(json.dumps(took))


def _store(files: StudyFiles, history: History, tables: LaunchTables, turn: int) -> None:
    values = {"precision": "bf16", "batch_size": BATCHES[turn % len(BATCHES)], "num_workers": turn % 9}
    history.enqueue(values)
    number, config, _ = history.ask()
    measurement = make_measurement(100.0 + turn % 7, batch_size=values["batch_size"])
    spec: TrialSpec = make_spec(files.trial(number).folder, number=number, config=config)
    result = TrialResult(launch=spec.launch, status=TrialStatus.COMPLETE, measurement=measurement)
    tables.add(spec, result)
    history.record(Trial(number=number, config=config, result=result, score=measurement.samples_per_s))


def cell(url: str | None, workers: int, trials: int, together: bool, limit_s: float) -> tuple[str, ...]:
    """Have workers store trials at once; return the cells of a row after its first three."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, **({} if url is None else {STORAGE_URL: url})}
        # Names are unique in a server, which may have been used before.
        names = [f"{Path(folder).name}-{0 if together else n}" for n in range(workers)]
        if url is None:
            env.pop(STORAGE_URL, None)
        words = [sys.executable, "-m", "benchmarks.storages", "worker", folder]
        # Made beforehand: who makes it is not the question.
        for name in dict.fromkeys(names):
            subprocess.run([*words, name, "0"], env=env, stdout=subprocess.DEVNULL, check=True)
        began = time.monotonic()
        running = []
        for n, name in enumerate(names):
            with Path(folder, f"{n}.out").open("w") as out, Path(folder, f"{n}.err").open("w") as err:
                running.append(subprocess.Popen([*words, name, str(trials)], env=env, stdout=out, stderr=err))
        while any(one.poll() is None for one in running):
            if time.monotonic() - began > limit_s:
                for one in running:
                    one.kill()
            time.sleep(0.1)
        wall_s = time.monotonic() - began
        took = [s for n in range(workers) for s in json.loads(Path(folder, f"{n}.out").read_text() or "[]")]
        lines = [(Path(folder, f"{n}.err").read_text().strip().splitlines() or [""])[-1] for n in range(workers)]
        failed = Counter(line[:90] for line, one in zip(lines, running, strict=True) if one.returncode > 0)
        killed = sum(one.returncode < 0 for one in running)
    said = "; ".join(f"{number} failed: {line}" for line, number in failed.most_common(1))
    if killed:
        said = f"{said}; {killed} not done after {seconds(limit_s)}".removeprefix("; ")
    if not took:
        return "", "", "", said
    ordered = sorted(took)
    return seconds(median(took)), seconds(ordered[int(0.99 * (len(took) - 1))]), f"{len(took) / wall_s:.0f}", said


def storages(url: str | None, counts: Sequence[int], trials: int, limit_s: float) -> ResultTable:
    """Fill the table.

    Args:
        url: of a database that may be written to; ``None`` starts a server.
    """
    columns = ("storage", "studies", "workers", "a trial, median", "99th percentile", "trials/s of all", "gave up")
    table = ResultTable(f"What storing a trial costs: {trials} trials of each worker, replayed", columns)
    with ExitStack() as ends:
        if url is None:
            sys.path.insert(0, str(_POSTGRES.parent))
            import postgres  # type: ignore[import-not-found, unused-ignore]

            why = postgres.missing()
            if why is not None:
                raise SystemExit(why)
            server = ends.enter_context(postgres.postgres_server(connections=4 * max(counts) + 20, fsync=True))
            url = server.url("postgres")
        for together, (kind, where), workers in product((False, True), (("SQLite", None), ("PostgreSQL", url)), counts):
            row = cell(where, workers, trials, together, limit_s)
            table.add(kind, "one for all" if together else "one each", str(workers), *row)
            print(*table.rows[-1], sep=" | ", file=sys.stderr)
    table.notes.append(
        "All processes are on one machine, and so is the server. A trial is asked for, its launch entered in our "
        "tables, and its result told, as a search does it; starting the processes counts in trials/s."
    )
    return table


def main() -> None:
    if sys.argv[1:2] == ["worker"]:
        try:
            worker(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
        except AutotuneError as error:
            sys.exit(f"{error}")
        return
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", default="1,10,50")
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--storage", help="the URL of a PostgreSQL database, instead of a server of its own")
    parser.add_argument("--limit", default="30m")
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    counts = [int(text) for text in args.workers.split(",")]
    storages(args.storage, counts, args.trials, duration_s(args.limit, "--limit")).show(args.markdown)


if __name__ == "__main__":
    main()
