"""The cost of autotune itself: a launch, eight workers, a trial's sampler and storage, and a whole search.

    python -m benchmarks.overhead [--parts launch,workers,sampler,storage,search] [--repetitions 7] [--markdown FILE]
    [--quick]

Prints one table. Sides to compare are run in alternating order; figures are medians with the smallest and the largest
value. Run nothing else meanwhile. On two cores it takes about seven minutes.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from autotune.base.clock import SystemClock, timestamp
from autotune.base.errors import AutotuneError
from autotune.base.observer import Observer
from autotune.base.records import DataRef, LaunchKind, MeasurePlan, StudySpec, TrialResult, TrialSpec, Value
from autotune.launcher import ProcessLauncher
from autotune.machine.gpu import gpus
from autotune.machine.host import read_host
from autotune.search import Environment, search
from autotune.workload.catalog import find_workload
from autotune.workload.data.sets import ensure_generated, synthetic
from benchmarks.launching import measurement_of, plain_config, workload
from benchmarks.proposing import gpu_space, proposal_s
from benchmarks.spawning import Forked, fixed_s, in_turns, ratios, spawned
from benchmarks.tables import ResultTable, in_memory, met, seconds, spread
from tests.support import FakeClock, Play, ScriptedLauncher, make_probe

#: Goals: fixed seconds of a launch by kind of device; a spawned launch's fixed seconds over a forked one's; the
#: fraction of a search's seconds inside kept windows.
FIXED_S = {"cpu": 0.5, "cuda": 3.0}
SPAWNED_OVER_FORKED = 5.0
SAMPLER_S, STORAGE_S = 0.02, 0.08
KEPT_SHARE = 0.5
IMAGE_SIZE, BATCH_SIZE, WORKERS = 64, 32, 8
#: One short measurement, because only the time around it is of interest.
PLAN = MeasurePlan(min_windows=3, min_window_s=0.3, max_measure_s=1.5, max_warmup_s=3.0)
#: Number of trials over which the storage's time is averaged.
AROUND = 10
PARTS = ("launch", "workers", "sampler", "storage", "search")


@dataclass(frozen=True)
class Place:
    """A device, and the environment variables that a process needs to use it."""

    device: str
    env: dict[str, str]
    config: dict[str, Value]

    @property
    def kind(self) -> str:
        return self.device.partition(":")[0]


def places() -> list[Place]:
    """Return the CPU, and the first card if there is one."""
    plain = plain_config(BATCH_SIZE, read_host().cores)
    found = [Place("cpu", {}, plain)]
    cards = gpus()
    if isinstance(cards, list) and cards:
        on_card = {name: value for name, value in plain.items() if name != "intra_op_threads"}
        found.append(Place("cuda:0", {"CUDA_VISIBLE_DEVICES": cards[0].uuid}, on_card))
    return found


def times(value: float) -> str:
    return f"{value:.1f}×"


def launch_rows(table: ResultTable, place: Place, folder: Path, repetitions: int, say: Callable[[str], None]) -> None:
    """Measure the fixed cost of a launch of ResNet-18, forked and spawned."""
    photographs = ensure_generated(processes=read_host().cores, on_progress=lambda done, total: None)
    launcher = ProcessLauncher(uuid.uuid4().hex, SystemClock())
    forked = Forked(launcher)
    startup: dict[str, list[float]] = {}

    def side(
        name: str, data: DataRef, launch: Callable[[TrialSpec], tuple[TrialResult, float]]
    ) -> Callable[..., float]:
        def once(number: int) -> float:
            spec = TrialSpec(
                kind=LaunchKind.MEASURE,
                launch=f"{name}-{number}",
                folder=str(folder / place.kind / f"{name}-{number}"),
                workload=find_workload("resnet18", {}),
                data=data,
                config=place.config,
                devices=(place.device,),
                env=place.env,
                image_size=IMAGE_SIZE,
                batch_size=BATCH_SIZE,
                plan=PLAN,
            )
            result, wall_s = launch(spec)
            startup.setdefault(name, []).append(measurement_of(result).startup_s)
            return fixed_s(result, wall_s)

        return once

    try:
        began = time.monotonic()
        # The first launch starts the template, which happens once per search.
        side("first", synthetic(), forked)(0)
        first_s = time.monotonic() - began
        sides = {
            "forked": side("forked", synthetic(), forked),
            "spawned": side("spawned", synthetic(), spawned),
            "photographs": side("photographs", photographs, forked),
        }
        found = in_turns(repetitions, list(sides.values()), f"launch, {place.kind}", say)
    finally:
        launcher.close()
    plain, fresh, decoding = found
    goal = FIXED_S[place.kind]
    on = f"ResNet-18, {IMAGE_SIZE} px, no workers, {place.kind}"
    told = f"at most {goal:g} s"
    table.add(f"launch, fixed cost: {on}", spread(plain, seconds), told, met(median(plain) <= goal))
    table.add("  of it until the first step", spread(startup["forked"], seconds), "", "")
    table.add("  the same with photographs to decode", spread(decoding, seconds), told, met(median(decoding) <= goal))
    table.add("  the same in a freshly spawned Python", spread(fresh, seconds), "", "")
    over = ratios(fresh, plain)
    table.add(
        "  spawned over forked",
        spread(over, times),
        f"at least {times(SPAWNED_OVER_FORKED)}",
        met(median(over) >= SPAWNED_OVER_FORKED),
    )
    table.add(f"first launch of a search in all, template included, {place.kind}", seconds(first_s), "", "")


def worker_rows(table: ResultTable, folder: Path, repetitions: int, say: Callable[[str], None]) -> None:
    """Measure the time until eight loader workers have made one batch each."""
    cores = read_host().cores
    config: dict[str, Value] = {
        **plain_config(8, cores),
        "num_workers": WORKERS,
        "prefetch_factor": 2,
        "persistent_workers": True,
    }
    launcher = ProcessLauncher(uuid.uuid4().hex, SystemClock())
    loader_s: list[float] = []

    def side(name: str, launch: Callable[[TrialSpec], tuple[TrialResult, float]]) -> Callable[[int], float]:
        def once(number: int) -> float:
            log = folder / f"{name}-{number}.log"
            spec = TrialSpec(
                kind=LaunchKind.MEASURE,
                launch=f"{name}-{number}",
                folder=str(folder / f"{name}-{number}"),
                workload=workload("ready_workers", log=str(log)),
                data=synthetic(),
                config=config,
                batch_size=8,
                plan=PLAN,
            )
            began = time.monotonic()
            measurement_of(launch(spec)[0])
            noted = [line.split() for line in log.read_text().splitlines()]
            ready = {who: float(at_s) for who, at_s in reversed(noted)}
            opened = ready.pop("opened")
            if len(ready) != WORKERS:
                raise SystemExit(f"{len(ready)} of {WORKERS} workers made a batch: {sorted(ready)}")
            if name == "forked":
                loader_s.append(max(ready.values()) - opened)
            return max(ready.values()) - began

        return once

    try:
        forked = side("forked", Forked(launcher))
        forked(-1)
        loader_s.clear()
        found = in_turns(repetitions, [forked, side("spawned", spawned)], f"{WORKERS} workers", say)
    finally:
        launcher.close()
    plain, fresh = found
    table.add(f"{WORKERS} loader workers, first batch of each, from the launch's begin", spread(plain, seconds), "", "")
    table.add("  of it from opening the data set", spread(loader_s, seconds), "", "")
    table.add("  the same in a freshly spawned Python", spread(fresh, seconds), "", "")
    table.add("  spawned over forked", spread(ratios(fresh, plain), times), "", "")


def sampler_rows(table: ResultTable, trials: Sequence[int], say: Callable[[str], None]) -> None:
    """Time proposals of `--sampler auto` in a space of about 10⁵ configurations."""
    found = proposal_s(gpu_space(), trials, AROUND)
    for number, some in found.items():
        goal = met(median(some) <= SAMPLER_S)
        table.add(f"a proposal of the sampler, after {number} trials", spread(some, seconds), seconds(SAMPLER_S), goal)
    say(f"sampler: {max(trials)} proposals")


def storage_rows(table: ResultTable, folder: Path, trials: Sequence[int], say: Callable[[str], None]) -> None:
    """Time a whole search whose launches and proposals take no time: the storage and scoring remain."""
    with tempfile.TemporaryDirectory(prefix="autotune-overhead-", dir=in_memory()) as memory:
        for where, kept in (("", folder), (", files in memory", Path(memory))):
            gaps = between_launches(kept, max(trials))
            for number in trials:
                last = gaps[:number][-AROUND:]
                goal = (seconds(STORAGE_S), met(median(last) <= STORAGE_S)) if not where else ("", "")
                table.add(f"a trial's storage and score, up to trial {number}{where}", spread(last, seconds), *goal)
            say(f"storage{where}: {len(gaps)} trials in {sum(gaps):.1f} s")


def between_launches(studies: Path, trials: int) -> list[float]:
    """Return the wall seconds from the start of each trial to the start of the next, with instant launches."""
    clock, rng = FakeClock(), random.Random(0)
    began_s: list[float] = []

    def instant(spec: TrialSpec) -> Play:
        if spec.number is not None:
            began_s.append(time.perf_counter())
        return Play(rate_per_s=rng.uniform(90, 110), wall_s=0.5)

    env = Environment(Observer(), clock, lambda: None, lambda *_: ScriptedLauncher(instant, clock, probe=make_probe()))
    spec = StudySpec(
        name="storage",
        mark=uuid.uuid4().hex,
        created=timestamp(),
        model="resnet18",
        data="synthetic",
        device="cpu",
        budget_s=86_400,
        trials=trials + 1,
        # Random choice costs almost nothing.
        sampler="random",
    )
    search(spec, studies, env)
    return [b - a for a, b in pairwise(began_s)]


def search_rows(
    table: ResultTable, folder: Path, budget_s: float, say: Callable[[str], None], *, allow_busy: bool
) -> None:
    """Measure which fraction of a real search of ResNet-18 lies inside kept windows."""
    spec = StudySpec(
        name="search",
        mark=uuid.uuid4().hex,
        created=timestamp(),
        model="resnet18",
        image_size=IMAGE_SIZE,
        device="cpu",
        budget_s=budget_s,
        allow_busy=allow_busy,
    )
    try:
        outcome = search(spec, folder, Environment.real()).outcome
    except AutotuneError as error:
        # The earlier rows are still worth printing.
        table.add("a search of ResNet-18", f"no result: {error}", "", met(False))
        return
    say(f"search: {outcome.elapsed_s:.0f} s, {sum(outcome.trials.values())} trials, {outcome.stopped}")
    searching = [row for row in outcome.ledger if row.purpose == "searching"]
    for name, rows in (("searching", searching), ("everything", outcome.ledger)):
        open_s = sum(row.seconds - row.compile_s for row in rows)
        share = sum(row.kept_s for row in rows) / open_s
        goal = KEPT_SHARE if name == "searching" else None
        table.add(
            f"inside kept windows, of {name}'s seconds but compiling: ResNet-18, {IMAGE_SIZE} px, "
            f"{budget_s:.0f} s, {sum(row.launches for row in rows)} launches",
            f"{100 * share:.0f} % of {open_s:.0f} s",
            "" if goal is None else f"at least {100 * goal:.0f} %",
            met(None if goal is None else share >= goal),
        )
    for row in outcome.ledger:
        table.notes.append(
            f"{row.purpose}: {row.launches} launches, {row.seconds:.1f} s: start {row.start_s:.1f}, compile "
            f"{row.compile_s:.1f}, warm-up {row.warmup_s:.1f}, kept {row.kept_s:.1f}, rest {row.rest_s:.1f}"
        )


def main() -> None:
    """Run what is asked for and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated; default: all")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--trials", default="10,100,300,1000", help="for sampler and storage")
    parser.add_argument("--budget", type=float, default=180.0, help="seconds of the real search")
    parser.add_argument("--markdown", type=Path, default=None)
    parser.add_argument("--quick", action="store_true", help="only to see that it runs: the figures mean nothing")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    repetitions = 1 if options.quick else options.repetitions
    trials = [2, 12] if options.quick else [int(n) for n in options.trials.split(",")]
    budget_s = 40.0 if options.quick else options.budget

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    table = ResultTable("What autotune itself costs", ("what", "median (smallest to largest)", "goal", ""))
    table.notes.append(f"{repetitions} repetitions in turns; ratios are of neighbours in time.")
    with tempfile.TemporaryDirectory(prefix="autotune-overhead-") as name:
        folder = Path(name)
        if "launch" in parts:
            for place in places():
                launch_rows(table, place, folder, repetitions, say)
        if "workers" in parts:
            worker_rows(table, folder, repetitions, say)
        if "sampler" in parts:
            sampler_rows(table, trials, say)
        if "storage" in parts:
            table.notes.append(f"Sampler and storage: over the {AROUND} trials up to the one named.")
            storage_rows(table, folder, trials, say)
        if "search" in parts:
            search_rows(table, folder, budget_s, say, allow_busy=options.quick)
    table.show(options.markdown)


if __name__ == "__main__":
    main()
