"""Whether a training that takes a profile over reaches the promised rate.

    python -m benchmarks.reach PROFILE [--snippet FILE] [--data DIR] [--rounds 4] [--seconds 20] [--markdown FILE]

The profile's workload is trained as readers of the documentation train: by `Applied.prepare`, and by the snippet that
`autotune export STUDY --format python` writes, which needs no autotune (``--snippet``); and, to tell the machine's
drift from theirs, by ``autotune train``. They train in turns, each time in a fresh process, and each counts the steps
of so many seconds after a warm-up of as many. Run nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from autotune import stats
from autotune.base.records import DataRef
from autotune.machine.host import read_host
from autotune.profile import Profile, read
from autotune.search.request import model_of
from autotune.space import environment
from autotune.stats import PRIORS
from autotune.workload.catalog import find_workload
from autotune.workload.data import sets
from benchmarks.tables import ResultTable

if TYPE_CHECKING:
    import torch
    from torch import nn

    from autotune.workload.contract import Context, Workload

#: Of the promise, what is to be reached.
GOAL = 0.97
PREPARE, SNIPPET, TRAIN = "profile.prepare(…)", "python export", "autotune train"


def reach(profile: Path, snippet: Path | None, data: str | None, rounds: int, seconds: float) -> ResultTable:
    """Train each way in turns; make a row of each with its rate, and that over the promised one."""
    promised = read(profile)
    gives = promised.gives
    ways = [PREPARE, *([SNIPPET] if snippet else []), TRAIN]
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds):
        for way in ways if number % 2 == 0 else reversed(ways):
            rates[way].append(_launched(way, profile, snippet, data, seconds))
            print(json.dumps({"round": number, "way": way, "rate": rates[way][-1]}), flush=True)
    compared = stats.compare_rounds(rates, prior=PRIORS[promised.conditions.device.split(":")[0]])
    columns = ("way", "samples/s", "of the promise (95 %)", f"≥ {GOAL:.2f}", f"of {TRAIN} (95 %)")
    name, config = promised.workload.name, promised.configuration
    table = ResultTable(f"{name} with its profile, {rounds} launches of {seconds:.0f} s each", columns)
    for way in ways:
        centre, low, high = _mean(rates[way])
        of = [value / gives.samples_per_second for value in (centre, low, high)]
        beside = "" if way == TRAIN else "{:.3f} ({:.3f} to {:.3f})".format(*compared.ratio(way, TRAIN))
        met = "yes" if of[0] >= GOAL else "NO"
        table.add(way, f"{centre:.1f}", "{:.3f} ({:.3f} to {:.3f})".format(*of), met, beside)
    low, high = gives.ci95
    settings = " ".join(f"{knob}={value}" for knob, value in config.items())
    table.notes.append(f"Promised: {gives.samples_per_second:.1f} ({low:.1f} to {high:.1f}) samples/s, {settings}.")
    return table


def _mean(rates: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean of launches, with its 95 % interval by Student's t."""
    logs = [math.log(rate) for rate in rates]
    centre = fmean(logs)
    if len(logs) < 2:
        return math.exp(centre), 0.0, math.inf
    half = stats.t_quantile(len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    return math.exp(centre), math.exp(centre - half), math.exp(centre + half)


def _launched(way: str, profile: Path, snippet: Path | None, data: str | None, seconds: float) -> float:
    """Train once in a fresh process, and return its rate in samples/s."""
    given = ["--data", data] if data else []
    promised = read(profile)
    if way == TRAIN:
        per_s = promised.gives.samples_per_second / int(promised.configuration["batch_size"])
        steps = ["--steps", str(max(50, int(seconds * per_s)))]
        # The user trusts the workload whose promise is looked at.
        words = ["-m", "autotune", "train", "--json", "--profile", str(profile), *steps, *given]
        words += ["--model", promised.workload.model]
    else:
        words = ["-m", "benchmarks.reach", str(profile), "--one", way, "--seconds", str(seconds), *given]
        words += ["--snippet", str(snippet)] if snippet else []
    # As `autotune train` does: the allocator reads its variables when torch is imported.
    env = {**os.environ, **environment(promised.configuration)}
    done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{way} ended with exit code {done.returncode}: {done.stderr.strip()[-2000:]}")
    rate: float | None = json.loads(done.stdout.splitlines()[-1])["samples_per_second"]
    if rate is None:
        raise SystemExit(f"{way} did not settle: {done.stdout}")
    return rate


def train(way: str, path: Path, snippet: Path | None, data: str | None, seconds: float) -> float:
    """Train the workload of a profile in this process, one way; return its rate in samples/s."""
    # Importing it sets what concerns the process, before anything else does.
    module = _imported(snippet) if way == SNIPPET and snippet else None

    from autotune.training import step as training
    from autotune.training.applied import Applied
    from autotune.workload import contract as workload
    from autotune.workload.contract import Context

    profile = read(path)
    applied = Applied(profile)
    ref = find_workload(model_of(profile, profile.workload.model), profile.workload.args)
    loaded = workload.load(ref)
    ctx = Context(
        device=applied.device,
        batch_size=applied.batch_size,
        image_size=profile.conditions.image_size,
        seed=profile.conditions.seed,
        data=_data(profile, data),
        args=workload.args_of(loaded, ref),
        knobs=training.workload_knobs(loaded, applied.config),
    )
    dataset, collate = training.data_of(loaded, ctx)
    options: dict[str, Any] = {"shuffle": True, "drop_last": True, "collate_fn": collate}
    model = loaded.model(ctx).train()

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        return loaded.optimizer(ctx, model)

    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        return loaded.loss(ctx, model, batch)

    batches: Iterable[Any]
    step: Callable[[Any], Any]
    if module is None:
        options |= {name: _hook(loaded, ctx, name) for name in ("after_backward", "after_step")}
        batches, step = applied.prepare(model, optimizer_of, dataset, loss_of, **options)
    else:
        batches = module.loader(dataset, **options)
        model, optimizer = module.prepare(model, optimizer_of(model))
        clip, after_step = _hook(loaded, ctx, "after_backward"), _hook(loaded, ctx, "after_step")

        def step(batch: Any) -> None:
            module.step(model, optimizer, loss_of, batch, *([clip] if clip else []))
            if after_step:
                after_step(model)

    return _rate(batches, step, lambda batch: training.samples_in(loaded, ctx, batch), ctx.device, seconds)


def _hook(workload: Workload, ctx: Context, name: str) -> Callable[[Any], None] | None:
    hook = getattr(workload, name, None)
    return None if hook is None else lambda model: hook(ctx, model)


def _rate(
    batches: Iterable[Any],
    step: Callable[[Any], Any],
    samples_in: Callable[[Any], int],
    device: str,
    seconds: float,
) -> float:
    """Train for twice ``seconds``, and return the rate of the second half."""
    import torch

    def now() -> float:
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
        return time.monotonic()

    # Compiling is no part of the warm-up's seconds.
    began, samples = math.inf, 0
    start: float | None = None
    while True:
        for batch in batches:
            step(batch)
            if began == math.inf:
                start = now() if start is None else start
                if time.monotonic() - start >= seconds:
                    began = now()
                continue
            samples += samples_in(batch)
            if time.monotonic() - began >= seconds:
                return samples / (now() - began)


def _data(profile: Profile, data: str | None) -> DataRef:
    kind = data or profile.conditions.data
    if kind == "generated":
        found = sets.ensure_generated(processes=read_host().cores, on_progress=lambda done, total: None)
    elif kind == "synthetic":
        found = sets.synthetic()
    elif kind == "none":
        found = DataRef(kind="none")
    else:
        found = DataRef(kind="folder", path=str(Path(kind).absolute()))
    stated = profile.conditions.epoch_samples
    return found if stated is not None else found.model_copy(update={"epoch_samples": None})


def _imported(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    for name in ("loader", "prepare", "step"):
        if not callable(getattr(module, name, None)):
            raise SystemExit(f"{path} has no {name}(): write it with `autotune export STUDY --format python`")
    return module


def main() -> None:
    """Make the table, or train one way, and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("profile", type=Path)
    parser.add_argument("--snippet", type=Path, help="of the same study: autotune export STUDY --format python")
    parser.add_argument("--data", help="as for `autotune train`")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        rate = train(options.one, options.profile, options.snippet, options.data, options.seconds)
        print(json.dumps({"samples_per_second": rate}))
        return
    table = reach(options.profile, options.snippet, options.data, options.rounds, options.seconds)
    table.show(options.markdown)


if __name__ == "__main__":
    main()
