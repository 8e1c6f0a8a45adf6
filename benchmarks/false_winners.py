"""How often does the slower configuration win? Runs searches with a known, planted slowdown.

    python -m benchmarks.false_winners real [--searches 20] [--slowdown 5] [--budget 120] [--markdown FILE]
    python -m benchmarks.false_winners resampled FILE [--searches 1000] [--slowdown 2 5] [--markdown FILE]

`real` searches over `workloads/planted.py`, whose only knob is the number of matrix products per step: 100, or 5 %
more. In every other search the slow variant is the baseline, so the fast one has to be found. Each search takes about a
minute; run nothing else meanwhile. `resampled` draws its launches from a recording by `benchmarks.coverage record`, in
virtual time: three minutes for a thousand searches. Slowdowns are in per cent.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from autotune import stats
from autotune.base.clock import SystemClock, timestamp
from autotune.base.errors import AutotuneError
from autotune.base.records import DataRef, LaunchKind, MeasurePlan, Outcome, StudySpec, TrialSpec, Value
from autotune.knobs import spell
from autotune.launcher import ProcessLauncher
from autotune.machine.host import read_host
from autotune.search import Environment, search
from benchmarks.launching import measurement_of, plain_config, run, workload
from benchmarks.recording import read
from benchmarks.resampled_searches import Searches, Setting
from benchmarks.tables import ResultTable, in_memory, met

KNOB = "workload.repetitions"
FAST = 100
BATCH_SIZE = 8
#: Maximum fraction of the searches with a fast baseline in which the slow variant may win.
REAL_GOAL, RESAMPLED_GOAL = 1 / 20, 0.05
Ratio = tuple[float, float, float]


@dataclass(frozen=True)
class Ended:
    """The end of one real search.

    Attributes:
        ratio: the candidate's rate over the baseline's; ``None`` if the search pruned the candidate's trial.
        launches: number of launches of the baseline in the verification.
        failed: why there is no result, if there is none.
    """

    slow_baseline: bool
    winner: int | None = None
    ratio: Ratio | None = None
    launches: int = 0
    failed: str | None = None

    @property
    def false_winner(self) -> bool:
        """Whether the slow variant was chosen over a faster baseline."""
        return not self.slow_baseline and self.winner not in (None, FAST)

    @property
    def missed(self) -> bool:
        """Whether the slow baseline was kept."""
        return self.slow_baseline and self.winner not in (None, FAST)

    def holds(self, fast_over_slow: float) -> bool:
        """Return whether the interval contains a true ratio."""
        assert self.ratio is not None
        return self.ratio[1] <= (fast_over_slow if self.slow_baseline else 1 / fast_over_slow) <= self.ratio[2]

    def told(self, number: int) -> str:
        """Summarize it in one line."""
        what = f"Search {number}, baseline {'slow' if self.slow_baseline else 'fast'}:"
        if self.failed is not None:
            return f"{what} no result: {self.failed}"
        ratio = "its trial was ended early" if self.ratio is None else f"{told_ratio(self.ratio)} the baseline"
        judged = "FALSE WINNER" if self.false_winner else "missed" if self.missed else "right"
        return f"{what} candidate {ratio}, {self.launches} launches each, winner {self.winner} ({judged})."


def told_ratio(ratio: Ratio) -> str:
    return f"{ratio[0]:.3f}× (95 %: {ratio[1]:.3f} to {ratio[2]:.3f})"


def planted_config(repetitions: int) -> dict[str, Value]:
    return {**plain_config(BATCH_SIZE, read_host().cores), KNOB: repetitions}


def truth(slow: int, rounds: int, folder: Path, say: Callable[[str], None]) -> Ratio:
    """Measure the fast variant's rate over the slow one's, by long interleaved launches."""
    rows: dict[int, list[float | None]] = {FAST: [], slow: []}
    launcher = ProcessLauncher(uuid.uuid4().hex, SystemClock())
    try:
        for number in range(rounds):
            for repetitions in (FAST, slow) if number % 2 == 0 else (slow, FAST):
                launch = f"truth-{repetitions}-{number}"
                spec = TrialSpec(
                    kind=LaunchKind.MEASURE,
                    launch=launch,
                    folder=str(folder / launch),
                    workload=workload("planted"),
                    data=DataRef(kind="none"),
                    config=planted_config(repetitions),
                    batch_size=BATCH_SIZE,
                    plan=MeasurePlan(min_measure_s=5.0, max_measure_s=6.0),
                )
                rows[repetitions].append(measurement_of(run(launcher, spec)).samples_per_s)
            say(f"truth, round {number + 1}: {rows[FAST][-1]:.2f} and {rows[slow][-1]:.2f} samples/s")
    finally:
        launcher.close()
    return stats.compare_rounds(rows, prior=stats.PRIORS["cpu"]).ratio(FAST, slow)


def one_search(
    number: int, slow: int, slow_baseline: bool, budget_s: float, folder: Path, *, allow_busy: bool
) -> Ended:
    """Search over the fast and the slow variant, one of which is the baseline."""
    baseline = slow if slow_baseline else FAST
    fixed = {name: spell(value) for name, value in planted_config(FAST).items() if name != KNOB}
    spec = StudySpec(
        name=f"search-{number}",
        mark=uuid.uuid4().hex,
        created=timestamp(),
        model=str(workload("planted").path),
        device="cpu",
        budget_s=budget_s,
        seed=number,
        fixed=fixed,
        narrowed={KNOB: (str(FAST), str(slow))},
        baseline={KNOB: str(baseline)},
        allow_busy=allow_busy,
    )
    try:
        outcome = search(spec, folder, Environment.real()).outcome
    except AutotuneError as error:
        return Ended(slow_baseline, failed=str(error))
    return ended(outcome, slow_baseline)


def ended(outcome: Outcome, slow_baseline: bool) -> Ended:
    """Extract the relevant parts of an outcome."""
    own = outcome.baseline.config[KNOB]
    candidate = next((s for s in outcome.finalists if s.config[KNOB] != own), None)
    return Ended(
        slow_baseline,
        winner=int(outcome.best.config[KNOB]),
        ratio=None if candidate is None else (candidate.speedup, *candidate.speedup_ci95),
        launches=outcome.baseline.launches if outcome.baseline.verified else 0,
    )


def real(
    searches: int, slow: int, budget_s: float, rounds: int, say: Callable[[str], None], *, allow_busy: bool
) -> ResultTable:
    """Run real searches, alternating between the fast and the slow variant as the baseline."""
    table = ResultTable(f"Real searches with a planted slowdown of {slow - FAST} %", ("what", "seen", "goal", ""))
    found: list[Ended] = []
    with tempfile.TemporaryDirectory(prefix="autotune-planted-") as name:
        planted = slow / FAST
        measured = truth(slow, rounds, Path(name), say)
        for number in range(1, searches + 1):
            found.append(one_search(number, slow, number % 2 == 0, budget_s, Path(name), allow_busy=allow_busy))
            say(found[-1].told(number))
    done = [e for e in found if e.failed is None]
    compared = [e for e in done if e.ratio is not None]
    wrong = sum(e.false_winner for e in done)
    table.add("fast over slow, planted", f"{planted:.3f}×", "", "")
    holds = measured[1] <= planted <= measured[2]
    table.add(f"fast over slow, {rounds} long launches each in turns", told_ratio(measured), "holds it", met(holds))
    allowed = int(REAL_GOAL * searches)
    enough = wrong <= allowed if len(done) == searches else None
    table.add("the slower one won", f"{wrong} of {len(done)}", f"at most {allowed:.0f} of {searches}", met(enough))
    table.add("  searches in which it could", str(sum(not e.slow_baseline for e in done)), "", "")
    missed, chances = sum(e.missed for e in done), sum(e.slow_baseline for e in done)
    table.add("the slower baseline stayed (a missed win)", f"{missed} of {chances}", "", "")
    table.add("intervals that hold the planted ratio", _held(compared, planted), "", "")
    table.add("intervals that hold the measured one", _held(compared, measured[0]), "", "")
    table.add("launches of the baseline in a verification", _median([e.launches for e in done]), "", "")
    table.add("searches without a result", str(len(found) - len(done)), "", "")
    table.notes += [e.told(i) for i, e in enumerate(found, start=1)]
    table.notes.append(
        f"{budget_s:.0f} s each. With fewer than three launches each the verification rests on the noise "
        "assumed of a CPU: a few per cent can then hardly be told from nothing."
    )
    return table


def _held(compared: Sequence[Ended], ratio: float) -> str:
    return f"{sum(e.holds(ratio) for e in compared)} of {len(compared)}"


def _median(values: Sequence[int]) -> str:
    return f"{median(values):.0f} (median)" if values else "none"


def resampled(
    path: Path,
    searches: int,
    slowdowns: Sequence[float],
    candidates: int,
    budget_s: float | None,
    seed: int,
    say: Callable[[str], None],
) -> ResultTable:
    """Run searches in virtual time over recorded launches; per slowdown, a fifth as many to count missed wins."""
    heading, launches = read(path)
    table = ResultTable(
        "Searches resampled from recorded launches, a slowdown planted",
        ("what", "seen", "", "goal", "", "candidates' ratio, median", "launches each, median"),
    )
    # Every launch writes files and syncs them to disk, which costs nothing in memory.
    with tempfile.TemporaryDirectory(prefix="autotune-resampled-", dir=in_memory()) as name:
        runner = Searches(launches, budget_s, Path(name), seed)
        for slowdown in slowdowns:
            for slow_baseline, count in ((False, searches), (True, searches // 5)):
                began = time.monotonic()
                setting = Setting(slowdown, slow_baseline, candidates)
                proofs = [runner.run(setting) for _ in range(count)]
                if not proofs:
                    continue
                # Trial 0 is the baseline: if that is the slow one, it wins by staying.
                slower = sum((p.best.trial == 0) == slow_baseline for p in proofs)
                ratios = [s.speedup for p in proofs for s in p.finalists if s.trial != 0]
                goal = None if slow_baseline else RESAMPLED_GOAL
                what = "the slower baseline stayed (a missed win)" if slow_baseline else "the slower one won"
                what = what if slowdown else what.replace("slower", "equal")
                table.add(
                    f"{100 * slowdown:g} %: {what}",
                    f"{slower} of {count}",
                    f"{100 * slower / count:.1f} %",
                    "" if goal is None else f"at most {100 * goal:g} %",
                    met(None if goal is None else slower <= goal * count),
                    f"{median(ratios):.3f}×" if ratios else "none",
                    f"{median(p.baseline.launches for p in proofs):.0f}",
                )
                say(f"{count} searches in {time.monotonic() - began:.0f} s: {table.rows[-1]}")
        table.notes += [
            f"{runner.budget_s:.0f} virtual seconds each; baseline and {candidates} candidate(s). A search takes "
            f"launches that were neighbours in time out of {len(launches)} recorded ones, from a random moment on, "
            "forward or backward.",
            f"Recorded on: {heading.machine.removeprefix('Machine: ')}.",
        ]
    return table


def main() -> None:
    """Search and count."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    kinds = parser.add_subparsers(dest="do", required=True)
    really = kinds.add_parser("real")
    really.add_argument("--searches", type=int, default=20)
    really.add_argument("--slowdown", type=int, choices=(2, 5), default=5)
    really.add_argument("--budget", type=float, default=120.0, help="seconds of each search")
    really.add_argument("--rounds", type=int, default=6, help="of the measurement of what was planted")
    really.add_argument("--allow-busy", action="store_true", help="to see that it runs, on a machine that is not quiet")
    virtual = kinds.add_parser("resampled")
    virtual.add_argument("file", type=Path)
    virtual.add_argument("--searches", type=int, default=1000)
    virtual.add_argument("--slowdown", type=float, nargs="+", default=[2.0, 5.0])
    virtual.add_argument("--candidates", type=int, default=1)
    virtual.add_argument("--budget", type=float, default=None, help="virtual seconds; default: 40 launches")
    virtual.add_argument("--seed", type=int, default=0)
    for one in (really, virtual):
        one.add_argument("--markdown", type=Path, default=None)
    o = parser.parse_args()

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    if o.do == "real":
        table = real(o.searches, FAST + o.slowdown, o.budget, o.rounds, say, allow_busy=o.allow_busy)
    else:
        slowdowns = [per_cent / 100 for per_cent in o.slowdown]
        table = resampled(o.file, o.searches, slowdowns, o.candidates, o.budget, o.seed, say)
    table.show(o.markdown)


if __name__ == "__main__":
    main()
