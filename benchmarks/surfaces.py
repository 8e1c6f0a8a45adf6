"""Records the space of a workload on this machine, launch by launch, as a surface for replaying searches.

    python -m benchmarks.surfaces record DESIGN FILE
    python -m benchmarks.surfaces show FILE…

DESIGN is the name of one in `benchmarks.designs`, or a JSON file with the same fields. Every configuration is launched
twice, in random order, with a launch of the baseline before every tenth; then the device alone and the loader alone,
once for each part of a configuration that they depend on; last, heats of the device and of the loader, in which nobody
drops out. Each launch is appended as a line when it ends. A recording interrupted with Ctrl-C can be continued. Run
nothing else meanwhile. See `autotune.search.replay` for the format.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from pydantic import ValidationError

from autotune import stats
from autotune.base.clock import SystemClock, timestamp
from autotune.base.errors import AutotuneError
from autotune.base.files import write_atomic
from autotune.base.layout import StudyFiles
from autotune.base.records import (
    Config,
    HeatPlan,
    LaunchKind,
    MeasurePlan,
    PhaseLimits,
    StudySpec,
    TrialResult,
    TrialSpec,
    TrialStatus,
    Value,
)
from autotune.knobs import spell
from autotune.launcher import ProcessLauncher
from autotune.machine.host import read_host
from autotune.search import Environment
from autotune.search.replay import PARTS, Heading, Row, Surface, read_surface
from autotune.search.request import check_request
from autotune.search.setup import run_of, set_up
from autotune.space import Space, canonical, device_part, key, loader_part
from autotune.stats import Rate
from autotune.study.launches import BUSY_FRACTION, LaunchConditions
from benchmarks.designs import DESIGNS, Design, heats
from benchmarks.launching import WORKLOADS, run
from benchmarks.rows import row_of
from benchmarks.tables import machine
from tests.support import run_heat

REPEATS = 2
REFERENCE_EVERY = 10
#: Maximum number of attempts for a launch that is disturbed or killed from outside.
ATTEMPTS = 5
PLAN = MeasurePlan(max_measure_s=3.0, max_warmup_s=6.0, min_window_s=0.3)


@dataclass(frozen=True)
class Planned:
    """One launch to make."""

    kind: LaunchKind
    config: dict[str, Value]
    reference: bool = False


def planned(design: Design, baseline: Config, seed: int = 0) -> list[Planned]:
    """Return every launch of a design in random order: each configuration once before any is launched again."""
    rng = random.Random(seed)
    configurations = design.configurations()
    found: list[Planned] = []
    for _ in range(REPEATS):
        rng.shuffle(configurations)
        for config in configurations:
            if len(found) % (REFERENCE_EVERY + 1) == 0:
                found.append(Planned(LaunchKind.MEASURE, dict(baseline), reference=True))
            found.append(Planned(LaunchKind.MEASURE, config))
    parts = {
        (kind, key(part(config))): Planned(kind, config)
        for kind, part in ((LaunchKind.DEVICE_ONLY, device_part), (LaunchKind.LOADER_ONLY, loader_part))
        for config in configurations
    }
    ceilings = list(parts.values())
    rng.shuffle(ceilings)
    return found + ceilings


class Recorder:
    """Makes the launches of a design on this machine and appends each to a file."""

    def __init__(self, design: Design, file: Path, folder: Path, *, allow_busy: bool) -> None:
        self.design = design
        self.file = file
        self.folder = folder
        self.clock = SystemClock()
        self.launcher = ProcessLauncher(uuid.uuid4().hex, self.clock)
        busy = None if allow_busy else BUSY_FRACTION * read_host().cores
        self.plan = PLAN.model_copy(update={"busy_cores": busy})

    def record(self) -> None:
        """Make the missing launches.

        Raises:
            SystemExit: the file was recorded on another machine or with other settings, or a launch cannot be made.
        """
        conditions, space = self.conditions()
        heading = self._heading(space)
        todo = planned(self.design, heading.baseline)
        done = self._begun(heading)
        # The monotonic clock restarts with the machine, so a continued recording counts on from its last row.
        offset_s = time.monotonic() - (done[-1].began_s + done[-1].wall_s if done else 0.0)
        for number in range(len(done), len(todo)):
            row = self.launch(number, todo[number], conditions, offset_s)
            self._append(row, f"{number + 1} of {len(todo)}")
        surface = read_surface(self.file)
        # What cannot be trained would disturb the others of a heat.
        trained = [c for c in self.design.configurations() if key(device_part(c)) not in surface.failed]
        plans = [plan for side in PARTS for plan in heats(side, trained, heading.baseline)]
        for number in range(max(len(done), len(todo)), len(todo) + len(plans)):
            row = self.heat(number, plans[number - len(todo)], conditions, offset_s)
            self._append(row, f"heat {number - len(todo) + 1} of {len(plans)}")

    def _append(self, row: Row, title: str) -> None:
        with self.file.open("a") as stream:
            stream.write(row.model_dump_json(exclude_none=True) + "\n")
        rate = f"{row.rate_per_s:.1f} samples/s" if row.rate_per_s else row.status.value
        told = " ".join(spell(v) for v in row.config.values())
        print(f"{title}: {row.kind} {told}: {rate}, {row.wall_s:.1f} s", file=sys.stderr)

    def conditions(self) -> tuple[LaunchConditions, Space]:
        """Probe the workload as a search does."""
        d = self.design
        own = WORKLOADS / f"{d.workload}.py"
        spec = StudySpec(
            name=d.name,
            mark=uuid.uuid4().hex,
            created=timestamp(),
            model=str(own) if own.is_file() else d.workload,
            args=d.args,
            data=d.data,
            device=d.device,
            batch_size=d.batch_size,
            image_size=d.image_size,
            memory_limit_bytes=d.memory_limit_bytes,
        )
        env = replace(Environment.real(), launcher=lambda mark, _: self.launcher)
        with run_of(StudyFiles(self.folder), spec, check_request(spec), env) as run:
            setup = set_up(run)
        return setup.conditions, setup.space

    def _heading(self, space: Space) -> Heading:
        d = self.design
        configurations = d.configurations()
        baseline = {n: v for n, v in space.baseline.items() if any(n in c for c in configurations)}
        baseline |= {n: v for n, v in d.base.items() if n in baseline}
        knobs: dict[str, tuple[Value, ...]] = {}
        for name in space.choices:
            values = {spell(c[name]): c[name] for c in [*configurations, baseline] if name in c}
            if values:
                numeric = all(isinstance(v, int) and not isinstance(v, bool) for v in values.values())
                knobs[name] = tuple(sorted(values.values(), key=int) if numeric else values.values())
        return Heading(
            name=d.name,
            machine=machine().removeprefix("Machine: ").rstrip("."),
            workload=" ".join([d.workload, *(f"{n}={v}" for n, v in d.args.items()), f"({d.data} data)"]),
            device="cpu" if d.device in ("auto", "cpu") else d.device,
            batch_size=d.batch_size,
            image_size=d.image_size,
            memory_bytes=d.memory_limit_bytes,
            plan=self.plan,
            knobs=knobs,
            baseline=canonical(baseline),
        )

    def _begun(self, heading: Heading) -> list[Row]:
        """Return the rows already in the file; write the heading into an empty one."""
        if not self.file.exists() or not self.file.read_text():
            self.file.write_text(heading.model_dump_json() + "\n")
            return []
        text = self.file.read_text()
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            self.file.write_text(whole)
        first, *lines = whole.splitlines()
        then = Heading.model_validate_json(first)
        day = {"machine": heading.machine, "surface": heading.surface}
        if then.model_copy(update=day) != heading or then.machine.split(";")[:2] != heading.machine.split(";")[:2]:
            raise SystemExit(f"{self.file} was recorded on another machine, or with another design")
        if then.surface < heading.surface:
            # Earlier versions lack what comes last.
            then = then.model_copy(update={"surface": heading.surface})
            write_atomic(self.file, "\n".join([then.model_dump_json(), *lines, ""]))
        return [Row.model_validate_json(line) for line in lines]

    def launch(self, number: int, one: Planned, conditions: LaunchConditions, offset_s: float) -> Row:
        """Make one launch.

        Args:
            number: unique. offset_s: monotonic seconds at the start of the recording.

        Raises:
            SystemExit: the launch cannot be made.
        """
        for attempt in range(1, ATTEMPTS + 1):
            spec = self._spec(f"{number:05d}-{attempt}", one.kind, one.config, conditions)
            spec = spec.model_copy(update={"limits": PhaseLimits(total_s=180.0)})
            began_s = time.monotonic() - offset_s
            result = run(self.launcher, spec)
            if not result.transient:
                break
        else:
            raise SystemExit(f"launch {number} ended as {result.status} {ATTEMPTS} times: {result.cause}")
        if result.status is TrialStatus.USER_ERROR:
            raise SystemExit(f"launch {number} ended as {result.status}: {result.cause}")
        part = {LaunchKind.DEVICE_ONLY: device_part, LaunchKind.LOADER_ONLY: loader_part}.get(one.kind, dict)
        return row_of(result, part(one.config), kind=one.kind, number=number, began_s=began_s, reference=one.reference)

    def heat(self, number: int, plan: HeatPlan, conditions: LaunchConditions, offset_s: float) -> Row:
        """Make one heat, with a cold compile cache."""
        cache = self.folder / f"compile-cache-{number}"
        wall_s = 0.0

        def launch(made: int, part: HeatPlan) -> TrialResult:
            nonlocal wall_s
            spec = self._spec(f"{number:05d}-{made}", LaunchKind.HEAT, part.entrants[0], conditions)
            result = run(self.launcher, spec.model_copy(update={"heat": part, "cache_folder": str(cache)}))
            wall_s += result.wall_s
            return result

        began_s = time.monotonic() - offset_s
        heat = run_heat(launch, plan)
        shown = any(any(entrant.turns) for entrant in heat.entrants)
        status = TrialStatus.COMPLETE if shown else TrialStatus.INTERRUPTED
        result = TrialResult(launch=f"{number:05d}", status=status, cause=heat.ended, wall_s=wall_s, heat=heat)
        return row_of(result, plan.entrants[0], kind=LaunchKind.HEAT, number=number, began_s=began_s)

    def _spec(self, launch: str, kind: LaunchKind, config: Config, conditions: LaunchConditions) -> TrialSpec:
        c = conditions
        return TrialSpec(
            kind=kind,
            launch=launch,
            folder=str(self.folder / launch),
            workload=c.workload,
            data=c.data,
            config=dict(config),
            devices=(c.device,),
            env=dict(c.env),
            seed=c.seed,
            image_size=c.image_size,
            batch_size=int(config["batch_size"]),
            worker_start_method=c.worker_start_method,
            memory_limit_bytes=c.memory_limit_bytes,
            cache_folder=str(self.folder / "compile-cache"),
            plan=self.plan,
        )


def shown(surface: Surface) -> str:
    """Summarize a surface in a few lines."""
    rates = {k: [r.rate_per_s for r in rows if r.rate_per_s] for k, rows in surface.launches.items()}
    known = {k: fmean(found) for k, found in rates.items() if found}
    statuses = Counter(r.status.value for rows in surface.launches.values() for r in rows)
    best = max(known, key=lambda k: known[k])
    noise = stats.launch_noise([[Rate(r, r, r) for r in found] for found in rates.values()], prior=stats.PRIORS["cpu"])
    hours = sum(r.wall_s for r in surface.rows) / 3600
    return "\n".join(
        [
            f"{surface.heading.name}: {surface.heading.workload}, {len(surface.launches)} configurations, "
            f"{len(surface.rows)} launches, {60 * hours:.0f} minutes; {surface.heading.machine}",
            f"  {', '.join(f'{n} {s}' for s, n in statuses.most_common())}; launches of equals differ by "
            f"{100 * noise.sd:.1f} % (one standard deviation)",
            f"  baseline {known[key(surface.heading.baseline)]:.1f} samples/s, best {known[best]:.1f} with {best}",
        ]
    )


def design_of(text: str) -> Design:
    """Return a design by name, or from a JSON file.

    Raises:
        SystemExit: ``text`` is neither.
    """
    if text in DESIGNS:
        return DESIGNS[text]
    try:
        return Design.model_validate_json(Path(text).read_text())
    except (OSError, ValidationError) as error:
        raise SystemExit(f"{text} is none of {', '.join(DESIGNS)}, and no design in a file: {error}") from error


def main(arguments: Sequence[str] | None = None) -> None:
    """Record a surface, or summarize surfaces."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="do", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("design", help=f"{', '.join(DESIGNS)}, or a JSON file")
    recording.add_argument("file", type=Path)
    recording.add_argument("--allow-busy", action="store_true", help="keep windows in which others used the cores")
    showing = commands.add_parser("show")
    showing.add_argument("files", type=Path, nargs="+")
    options = parser.parse_args(arguments)
    if options.do == "show":
        for file in options.files:
            print(shown(read_surface(file)))
        return
    with tempfile.TemporaryDirectory(prefix="autotune-surface-") as folder:
        recorder = Recorder(design_of(options.design), options.file, Path(folder), allow_busy=options.allow_busy)
        try:
            recorder.record()
        except AutotuneError as error:
            raise SystemExit(str(error)) from error
        except KeyboardInterrupt:
            raise SystemExit("ended; the same command goes on with it") from None
        finally:
            recorder.launcher.close()


if __name__ == "__main__":
    main()
