"""Do searches find the best there is, and the same one each time?

    python -m benchmarks.race first [--searches 5] [--budget 10m] [--studies DIR] [--markdown FILE]
    python -m benchmarks.race twice [--pairs 10] [--budget 2m] [--studies DIR] [--markdown FILE]

*first*: README's first command (on synthetic data), in turns with parts of a grid of plain training loops that do not
use autotune: precision × format × batch size × workers × eager or compiled, once each. Then the winners of the searches
and the three best of the grid run as plain loops in interleaved rounds, because the best of many single runs is mostly
luck.
*twice*: pairs of searches of ResNet-18 at 64 px that differ only in their seed; winners that are not the same are run
as plain loops in rounds, too. Run nothing else meanwhile: on two cores the first takes two hours, the second one hour.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from autotune import stats
from autotune.base.errors import NoVerdictError
from autotune.base.records import Config, Value
from autotune.knobs import spell
from autotune.space import canonical, key
from benchmarks.tables import ResultTable, met

_LOOP = Path(__file__).with_name("plain_loop.py")
#: Winners are to be within this of the best, and two winners of each other.
WITHIN, ALIKE = 0.03, 0.02
#: The best of the grid that run again, and the rounds.
TOP, ROUNDS = 3, 6
#: A plain loop trains this many samples after its warm-up, in steps of its own batch size.
SAMPLES = 640


@dataclass(frozen=True)
class Case:
    """A training, and how the search is asked for it."""

    model: str
    image_size: int
    batch_size: int
    asked: tuple[str, ...] = ()

    def search(self, folder: Path, budget: str, seed: int) -> dict[str, Value]:
        """Search, and return the winner; the baseline if there is no verdict.

        Raises:
            SystemExit: the search failed.
        """
        command = [
            *(sys.executable, "-P", "-m", "autotune", "search", "--model", self.model, "--data", "synthetic"),
            *("--budget", budget, "--seed", str(seed), "--json", "--studies-dir", str(folder / f"studies-{seed}")),
            *self.asked,
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode not in (0, NoVerdictError.exit_code):
            raise SystemExit(f"search {seed} ended with exit code {done.returncode}")
        found: dict[str, Value] = json.loads(done.stdout)["best"]["config"]
        return canonical(found)

    def loop(self, config: Config) -> float:
        """Return the samples per second of a plain training loop.

        Raises:
            SystemExit: it failed.
        """
        batch = int(config["batch_size"])
        command = [
            *(sys.executable, str(_LOOP), "synthetic", str(self.image_size), str(batch), str(max(4, SAMPLES // batch))),
            *("--model", self.model, "--precision", str(config["precision"])),
            *("--compile", str(config["compile_mode"]), "--optimizer", str(config["optimizer_impl"])),
            *("--workers", str(config["num_workers"]), "--prefetch", str(config.get("prefetch_factor", 2))),
            *(["--channels-last"] if config["memory_format"] == "channels_last" else []),
            *(["--persistent"] if config.get("persistent_workers") else []),
        ]
        threads = {"OMP_NUM_THREADS": str(config["intra_op_threads"])} if "intra_op_threads" in config else {}
        environment = {**os.environ, **threads}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
        if done.returncode:
            raise SystemExit(f"a plain loop of {told(config)} ended with exit code {done.returncode}")
        return float(done.stdout.split()[0])


FIRST = Case("resnet50", 96, 32)
TWICE = Case("resnet18", 64, 16, ("--image-size", "64", "--batch-size", "16"))


def told(config: Config) -> str:
    """Describe a configuration."""
    return " ".join(spell(v) if n in ("precision", "memory_format") else f"{n}={spell(v)}" for n, v in config.items())


def grid(batch_size: int) -> list[dict[str, Value]]:
    """Return 40 configurations in random order: precision × format × batch ½–4× × workers, eager; and compiled without
    workers at batch 1–2×, because each takes a minute to compile."""
    batches = [batch_size // 2, batch_size, 2 * batch_size, 4 * batch_size]
    ways = [*product(batches, (0, 2), ("off",)), *product(batches[1:3], (0,), ("default",))]
    found = [
        canonical(
            {
                "precision": p,
                "compile_mode": compiled,
                "batch_size": b,
                "memory_format": f,
                "num_workers": w,
                "prefetch_factor": 2,
                "persistent_workers": True,
                "optimizer_impl": "foreach",
            }
        )
        for p, f, (b, w, compiled) in product(("fp32", "bf16"), ("contiguous", "channels_last"), ways)
    ]
    random.Random(0).shuffle(found)
    return found


def raced(case: Case, configs: Sequence[Config]) -> stats.ComparedRounds[str]:
    """Run plain loops of configurations in interleaved rounds."""
    field = {key(config): config for config in configs}
    rows: dict[str, list[float | None]] = {name: [] for name in field}
    for number in range(ROUNDS):
        for name in list(field) if number % 2 == 0 else list(reversed(field)):
            rows[name].append(case.loop(field[name]))
    return stats.compare_rounds(rows, prior=stats.PRIORS["cpu"])


def first(searches: int, budget: str, folder: Path) -> ResultTable:
    """Compare README's first command with a grid of plain loops."""
    configs = grid(FIRST.batch_size)
    rates: dict[str, float] = {}
    winners: list[dict[str, Value]] = []
    for seed in range(searches):
        winners.append(FIRST.search(folder, budget, seed))
        print(f"search {seed}: {told(winners[-1])}", file=sys.stderr)
        for config in configs[seed::searches]:
            rates[key(config)] = FIRST.loop(config)
    ranked = sorted(configs, key=lambda c: -rates[key(c)])[:TOP]
    found = raced(FIRST, [*winners, *ranked])
    best = max((key(c) for c in (*ranked, *winners)), key=lambda name: found.rate(name).per_s)
    table = ResultTable(
        f"README's first command against {len(configs)} plain loops",
        ("", "configuration", "samples/s", "of the best (95 %)", f"within {100 * WITHIN:g} %"),
    )
    for title, some in (("search", winners), ("grid", ranked)):
        for number, config in enumerate(some):
            ratio = found.ratio(key(config), best)
            shown = f"{ratio[0]:.3f} ({ratio[1]:.3f} to {ratio[2]:.3f})"
            rate = f"{found.rate(key(config)).per_s:.1f}"
            table.add(f"{title} {number}", told(config), rate, shown, met(ratio[0] >= 1 - WITHIN))
    table.notes.append(f"{ROUNDS} plain loops of each in turns; before, each of the grid ran once.")
    return table


def twice(pairs: int, budget: str, folder: Path) -> ResultTable:
    """Search for the same training twice, again and again."""
    table = ResultTable(
        f"The same search twice: {TWICE.model}, {TWICE.image_size} px, {budget}",
        ("pair", "winners", "ratio (95 %)", f"within {100 * ALIKE:g} %"),
    )
    good = 0
    for pair in range(pairs):
        one, other = (TWICE.search(folder, budget, 2 * pair + i) for i in (0, 1))
        shown, alike = "the same", True
        if key(one) != key(other):
            ratio, low, high = raced(TWICE, [one, other]).ratio(key(one), key(other))
            alike = abs(ratio - 1) < ALIKE
            shown = f"{ratio:.3f} ({low:.3f} to {high:.3f})"
        good += alike
        table.add(str(pair), told(one) if key(one) == key(other) else f"{told(one)} / {told(other)}", shown, met(alike))
        print(f"pair {pair}: {shown}", file=sys.stderr)
    table.notes.append(f"{good} of {pairs} pairs agree.")
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a benchmark and print its table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.race", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("first", "twice"))
    parser.add_argument("--searches", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--budget")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--studies", type=Path, help="keep the studies in this folder")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="autotune-race-") as name:
        folder = options.studies or Path(name)
        if options.what == "first":
            table = first(options.searches, options.budget or "10m", folder)
        else:
            table = twice(options.pairs, options.budget or "2m", folder)
    table.show(options.markdown)


if __name__ == "__main__":
    main()
