"""What a search of some minutes finds for each of autotune's own workloads.

    python -m benchmarks.trainings [NAME…] [--budget 3m] [--keep DIR] [--markdown FILE]

Each is searched once, on an otherwise idle machine, at a size that two cores can train. Run nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from autotune.base.layout import StudyFiles
from autotune.base.records import Finding, KnobPart, Outcome, Standing
from autotune.knobs import spell
from autotune.report.sentences import bottleneck_of
from autotune.space.formatting import interval_text, rate_text, ratio_text
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


def search(words: tuple[str, ...], folder: Path, study: str) -> Outcome | None:
    """Search in a folder of its own, where no winner of another search is tried first; return the outcome, if any.

    What the search prints at its end is left beside the study, in ``search.txt``.
    """
    own = folder / study
    own.mkdir(parents=True, exist_ok=True)
    command = (sys.executable, "-P", "-m", "autotune", "search", *words, "--study", study, "--studies-dir", str(own))
    with open(own / "search.txt", "w") as told:
        subprocess.run((*command, "--no-input"), stdout=told, check=False)
    try:
        return Outcome.model_validate_json(StudyFiles(own / study).outcome.read_bytes())
    except OSError:
        return None


def _row(outcome: Outcome) -> tuple[str, ...]:
    found = bottleneck_of(outcome, outcome.best)
    limit = "not measured" if found is None else str(found.limit)
    if found is not None and found.local_per_s is not None:
        limit += f" by its store; from a local copy about {rate_text(found.local_per_s)}"
    if outcome.found is Finding.OPEN:
        limit = f"no verdict: {outcome.because}"
    return (
        rate_text(outcome.baseline.samples_per_second),
        rate_text(outcome.best.samples_per_second),
        _ratio(outcome.best),
        _ratio(outcome.best_same_batch),
        "; ".join(map(_part, outcome.ablation)) or "nothing that was measured",
        limit,
    )


def _ratio(standing: Standing) -> str:
    return f"{ratio_text(standing.speedup, standing.speedup_ci95)} ({interval_text(standing.speedup_ci95)})"


def _part(part: KnobPart) -> str:
    told = f"{part.knob} {spell(part.baseline_value)} → {spell(part.value)}"
    return told if part.gain is None else f"{told} {ratio_text(part.gain[0], part.gain[1:])}"


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
