"""What a search of some minutes finds for each of autotune's own workloads.

    python -m benchmarks.trainings [NAME…] [--budget 3m] [--keep DIR] [--markdown FILE]

Each is searched once, on an otherwise idle machine, at a size that two cores can train. Run nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from autotune.formatting import rate_text
from benchmarks.tables import ResultTable

_SMALL_GPT = ("depth=4", "width=256", "heads=4", "block=128", "vocabulary=8192")
#: The options of each search. A stated batch size is the baseline's.
CASES: dict[str, tuple[str, ...]] = {
    "fasterrcnn_resnet50_fpn": ("--batch-size", "4"),
    "classifier_small": (),
    "inception_v3": ("--batch-size", "16"),
    "ddpm_unet": (),
    "seresnet_audio": ("--batch-size", "16"),
    "resnet50": (),
    "resnet50 behind a store": ("--store-latency", "80ms", "--store-bandwidth", "50MB/s"),
    "gpt": tuple(word for arg in _SMALL_GPT for word in ("--arg", arg)),
    "vit_b_16": ("--batch-size", "16"),
}


def trainings(names: list[str], budget: str, folder: Path) -> ResultTable:
    """Search each case, and make a row of what it found."""
    columns = ("training", "baseline", "best", "speedup", "same batch", "what changed, and gave alone", "verdict")
    table = ResultTable(f"Each workload searched for {budget}, rates in samples/s (`gpt`: tokens/s)", columns)
    for name in names:
        words = ("--model", name.split()[0], *CASES[name], "--budget", budget)
        print("autotune search", *words, flush=True)
        outcome = search(words, folder, name.replace(" ", "-"))
        row = ("no outcome", *[""] * (len(columns) - 2)) if outcome is None else _row(outcome)
        table.add(" ".join((f"`{name.split()[0]}`", *CASES[name])), *row)
        print("  ", *row, sep=" | ", flush=True)
    return table


def search(words: tuple[str, ...], folder: Path, study: str) -> dict[str, Any] | None:
    """Search in a folder of its own, where no winner of another search is tried first; return the outcome, if any.

    What the search prints at its end is left beside the study, in ``search.txt``.
    """
    own = folder / study
    own.mkdir(parents=True, exist_ok=True)
    command = (sys.executable, "-m", "autotune", "search", *words, "--study", study, "--studies-dir", str(own))
    with open(own / "search.txt", "w") as told:
        subprocess.run((*command, "--no-input"), stdout=told, check=False)
    try:
        found: dict[str, Any] = json.loads((own / study / "outcome.json").read_bytes())
    except (OSError, ValueError):
        return None
    return found


def _row(outcome: dict[str, Any]) -> tuple[str, ...]:
    base, best, same = outcome["baseline"], outcome["best"], outcome["best_same_batch"]
    limit = next((b["limit"] for b in outcome["bottlenecks"] if b["trial"] == best["trial"]), "not measured")
    local = next((b["local_per_s"] for b in outcome["bottlenecks"] if b["trial"] == best["trial"]), None)
    if local is not None:
        limit = f"{limit} by its store; from a local copy about {rate_text(local)}"
    if outcome["finding"] == "open":
        limit = f"no verdict: {outcome['because']}"
    return (
        rate_text(base["samples_per_second"]),
        rate_text(best["samples_per_second"]),
        _ratio(best),
        _ratio(same),
        "; ".join(_part(part) for part in outcome["ablation"]) or _differences(base["config"], best["config"]),
        limit,
    )


def _ratio(standing: dict[str, Any]) -> str:
    low, high = standing["speedup_ci95"]
    return f"{standing['speedup']:.2f}× ({low:.2f} to {high:.2f})"


def _part(part: dict[str, Any]) -> str:
    told = f"{part['knob']} {_spelled(part['baseline_value'])} → {_spelled(part['value'])}"
    return told if part["gain"] is None else f"{told} {part['gain'][0]:.2f}×"


def _differences(base: dict[str, Any], best: dict[str, Any]) -> str:
    names = [name for name in best if best[name] != base.get(name)]
    return ", ".join(f"{n} {_spelled(base.get(n))} → {_spelled(best[n])}" for n in names) or "nothing"


def _spelled(value: object) -> str:
    return "–" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def main() -> None:
    """Make the table, and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--budget", default="3m")
    parser.add_argument("--keep", type=Path, help="where the studies are to lie (default: nowhere for long)")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in CASES]
    if unknown:
        parser.error(f"there is no {unknown[0]!r}; there are {', '.join(CASES)}")
    with tempfile.TemporaryDirectory() as folder:
        trainings(options.names, options.budget, options.keep or Path(folder)).show(options.markdown)


if __name__ == "__main__":
    main()
