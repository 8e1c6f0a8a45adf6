"""``autotune search --dry-run``: the first trials of a search and its expected duration, without running it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.table import Column

from autotune.cli.output import print_json, print_rich
from autotune.cli.running import environment, stop_signals
from autotune.knobs import spell
from autotune.base.records import SCHEMA_VERSION, StudySpec
from autotune.report.lines import FittingTable, Line
from autotune.search import DryRun, preview


def print_dry_run(spec: StudySpec, *, as_json: bool) -> None:
    """Probe the workload and print what a search would do."""
    with stop_signals() as stop, tempfile.TemporaryDirectory(prefix="autotune-dry-run-") as folder:
        found = preview(spec, environment(stop), Path(folder))
    if as_json:
        print_json(_as_json(spec, found))
    else:
        _print(spec, found)


def _as_json(spec: StudySpec, found: DryRun) -> dict[str, object]:
    return {
        "schema_version": SCHEMA_VERSION,
        "sampler": spec.sampler,
        "configurations": found.size,
        "counted": found.exact,
        "search_s": found.search_s,
        "trial_s": found.trial_s,
        "baseline": dict(found.space.baseline),
        "first": [
            {"config": p.config, "expected_speedup": p.predicted.rate_per_s, "seconds": p.predicted.seconds}
            for p in found.first
        ],
    }


def _print(spec: StudySpec, found: DryRun) -> None:
    def say(text: str) -> None:
        print_rich(Line(text))

    about = "" if found.exact else "about "
    say(f"{about}{found.size:,} legal configurations of {len(found.space.choices)} knobs.".capitalize())
    say(
        f"Searching may take {found.search_s:.0f} s of the budget of {spec.budget_s:.0f} s: about "
        f"{found.search_s / found.trial_s:.0f} trials of {found.trial_s:.0f} s each, fewer that compile. The rest "
        f"proves what was found."
    )
    say("First the baseline: " + " ".join(f"{n}={spell(v)}" for n, v in found.space.baseline.items()))
    if not found.first:
        say(f"Then what {spec.sampler} proposes.")
        return
    say("Then what won in earlier studies beside it; then, if each comes out as in most trainings:")
    table = FittingTable(
        Column("", no_wrap=True),
        Column("changed from the baseline", overflow="fold"),
        Column("expected", no_wrap=True),
        Column("takes", no_wrap=True),
        box=None,
        pad_edge=False,
    )
    baseline = found.space.baseline
    for number, one in enumerate(found.first, 1):
        changed = " ".join(f"{n}={spell(v)}" for n, v in one.config.items() if baseline.get(n) != v)
        table.add_row(str(number), changed, f"{one.predicted.rate_per_s:.2f}×", f"{one.predicted.seconds:.0f} s")
    print_rich(table)
