"""What a fleet asks of the services that it shares, and of ten times its size: on paper, from counted costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from autotune.profile import parse
from benchmarks.fleet_week import HOUR_S, POLICIES, Assumptions, Fleet, Library, Seen
from benchmarks.tables import ResultTable

TIMES = 10
#: Counted in six studies of real searches (9 to 31 launches, benchmarks/README.md, "Each workload"): spec, result and
#: two logs of each launch; request, conditions, database, outcome, profile, report, seconds spent and lock of a study.
FILES_PER_LAUNCH, FILES_PER_STUDY = 4, 8
#: Bytes of such a study, its database included, by launch: 204 kB of 9 launches to 498 kB of 31.
BYTES_PER_LAUNCH = 17_000
#: Rows of a study's database by launch, Optuna's and ours: 341 of 31 launches, six of them trials.
ROWS_PER_LAUNCH = 11
#: Every so often `autotune jobs wait slurm:…` asks Slurm in the end (autotune/cli/slurm_jobs.py), for all jobs of the
#: user.
WAIT_S = 60.0
#: Assumed, not measured: one request to an object store.
REQUEST_S = 0.03
_PROFILE = Path(__file__).parents[1] / "tests" / "old" / "studies" / "finished" / "profile.yaml"


@dataclass(frozen=True)
class Load:
    """A simulated week, and what of it concerns the services."""

    asked: Assumptions
    week: Seen
    launch_s: float

    @property
    def pairs(self) -> int:
        return self.asked.trainings * len(self.asked.cards)

    @property
    def searches(self) -> float:
        """Of a week, in expectation: one week has few new versions of torch, and each makes all profiles stale."""
        asked = self.asked
        return self.pairs * (1 + asked.code_changes + asked.driver_changes + asked.torch_changes)

    @property
    def launches(self) -> float:
        """Of a week, in expectation."""
        return self.searches * self.week.launches / self.week.searches

    @property
    def launches_per_s(self) -> float:
        """When most searches are at work."""
        return self.week.most_searching / self.launch_s


def larger(asked: Assumptions, times: int) -> Assumptions:
    """Return a fleet with so many times the cards and trainings."""
    kinds = ",".join(f"{name}={times * number}@{speed:g}" for name, number, speed in asked.cards)
    return replace(asked, kinds=kinds, trainings=times * asked.trainings)


def profile_cpu_s() -> float:
    """Return the processor seconds of reading one profile."""
    text = _PROFILE.read_text()
    began = time.process_time()
    for _ in range(10):
        parse(text, "profile")
    return (time.process_time() - began) / 10


def limits(asked: Assumptions, library: Library) -> ResultTable:
    """Return what the last policy asks of services, by one simulated week of each size."""
    launch_s = fmean(s for searches in library.values() for search in searches for s in search.launches)
    small, large = (
        Load(one, Fleet(one, POLICIES[-1], library, 0).week(), launch_s) for one in (asked, larger(asked, TIMES))
    )
    read_s = profile_cpu_s()
    found = ResultTable(
        f"What {TIMES} times as many cards and trainings ask of what they share",
        ("what", "of one", f"{_cards(small)} cards", f"{_cards(large)} cards", "where the figure comes from"),
    )

    def row(what: str, each: str, figure: Callable[[Load], float], unit: str, source: str) -> None:
        found.add(what, each, *(f"{_short(figure(load))}{unit}" for load in (small, large)), source)

    begun = "simulated: jobs begun until the makespan"
    row("Slurm: jobs begun", "", lambda at: at.week.starts / at.week.makespan_s, " a second", begun)
    row(
        "Slurm: squeue, if somebody waits for every search",
        f"every {WAIT_S:g} s",
        lambda at: at.pairs / WAIT_S,
        " calls a second",
        "the interval in the code; one `jobs wait` for each pair of training and kind",
    )
    row(
        "Slurm: jobs listed in these answers",
        "all of the user's",
        lambda at: at.pairs**2 / WAIT_S,
        " a second",
        "the same, all by one user",
    )
    peak = f"simulated: most searches at once, launches of {launch_s:.1f} s (mean of the replayed ones)"
    row(
        "shared file system: files made, at the most",
        f"{FILES_PER_LAUNCH} a launch",
        lambda at: FILES_PER_LAUNCH * at.launches_per_s,
        " a second",
        f"counted in real studies; {peak}",
    )
    row(
        "shared file system: files left by a week",
        f"{FILES_PER_LAUNCH} a launch, {FILES_PER_STUDY} a study",
        lambda at: FILES_PER_LAUNCH * at.launches + FILES_PER_STUDY * at.searches,
        "",
        "counted; searches as the rates of changes give, launches of each simulated",
    )
    row(
        "shared file system: size of these",
        f"{BYTES_PER_LAUNCH / 1000:.0f} kB a launch",
        lambda at: BYTES_PER_LAUNCH * at.launches / 1e9,
        " GB",
        "counted; the same launches",
    )
    row(
        "database, if all studies are in one: rows, at the most",
        f"{ROWS_PER_LAUNCH} a launch",
        lambda at: ROWS_PER_LAUNCH * at.launches_per_s,
        " a second",
        "counted in a study of 31 launches; simulated",
    )
    row(
        "database: connections, if all studies are in one",
        "one a search at least",
        lambda at: at.week.most_searching,
        "",
        "simulated; PostgreSQL takes 100 by default (its manual)",
    )
    row("profiles in force", "", lambda at: at.pairs, "", "one for each pair of training and kind")
    row(
        "`autotune profiles`: processor time",
        f"{1000 * read_s:.0f} ms a profile",
        lambda at: at.pairs * read_s,
        " s",
        "measured here, beside other work",
    )
    row(
        "`load_profile(model=…)`: processor time",
        f"{1000 * read_s:.0f} ms a profile",
        lambda at: len(at.asked.cards) * read_s,
        " s",
        "the same; it reads the profiles of this model only",
    )
    row(
        "`autotune profiles pull`: requests to an object store",
        f"{1000 * REQUEST_S:.0f} ms each",
        lambda at: at.searches * REQUEST_S,
        " s",
        "assumed, not measured; it reads every profile that was ever pushed, here a week's",
    )
    found.notes.append(
        f"What is simulated is so with one seed for each column and the policy '{POLICIES[-1].name}'. Makespans: "
        f"{small.week.makespan_s / HOUR_S:.1f} h and {large.week.makespan_s / HOUR_S:.1f} h. How much of each the "
        "services bear was not measured."
    )
    return found


def _cards(load: Load) -> str:
    return f"{sum(number for _, number, _ in load.asked.cards):,}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
