"""Parts that are searches of ResNet-50: two whole ones, the promise of the first, and a recorded surface."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from autotune.base.errors import AutotuneError
from autotune.base.layout import STATE_DIR
from autotune.profile import read
from autotune.search.replay import read_surface
from benchmarks.card.launches import IMAGE_SIZE
from benchmarks.card.stage import ROOT, Skipped, Stage, last_json, tail
from benchmarks.launching import WORKLOADS
from benchmarks.surfaces import shown

#: The budget of a search, and what it needs beside it (start, the last launch), in seconds.
BUDGET_S, BESIDE_S = 250.0, 45.0
LEAST_BUDGET_S = 30.0
#: Leaves a rehearsal nothing but the workload's own knob to search.
_PINNED = [
    word
    for value in ("precision=fp32", "compile_mode=off", "batch_size=8", "memory_format=contiguous", "num_workers=0")
    for word in ("--fix", value)
] + ["--fix", "optimizer_impl=for-loop", "--fix", "intra_op_threads=1"]
#: A promise is compared with so many steps, or as many as fit into these seconds.
STEPS, TRAIN_S = 1500, 120.0
#: A recording gets this long to end its launch, in seconds.
END_S = 20.0


def synthetic(stage: Stage) -> None:
    """Search with data in memory, which shows the device."""
    _search(stage, "synthetic", "synthetic")


def generated(stage: Stage) -> None:
    """Search with JPEG files, which shows the loader."""
    stage.replaced("data in memory instead of generated photographs, because making them takes long")
    _search(stage, "generated", stage.pick("generated", "synthetic"))


def _state(stage: Stage) -> dict[str, str]:
    return {STATE_DIR: str(stage.work / "state")}


def _search(stage: Stage, name: str, data: str) -> None:
    budget_s = min(stage.pick(BUDGET_S, 45.0), stage.left_s - stage.pick(BESIDE_S, 5.0))
    if budget_s < LEAST_BUDGET_S:
        raise Skipped(f"{stage.left_s:.0f} s are too few for a search")
    studies = stage.work / "studies" / name
    options = ["--data", data, "--budget", f"{budget_s:.0f}s", "--studies-dir", str(studies), "--no-input", "--json"]
    if stage.rehearsal:
        options += ["--model", str(WORKLOADS / "two_speeds.py"), "--device", "cpu", "--allow-busy"]
        options += ["--baseline", "intra_op_threads=1", *_PINNED]
    else:
        options += ["--model", "resnet50", "--image-size", str(IMAGE_SIZE)]
    stage.note(budget_s=budget_s)
    note = stage.work / f"profile-{name}.json"
    note.unlink(missing_ok=True)
    ended = stage.python("-m", "autotune", "search", *options, limit_s=stage.left_s - 5, env=_state(stage))
    found = last_json(ended)
    stage.note(exit_code=ended.returncode, said=tail(ended.stderr, 6), **_of_outcome(found))
    # The next parts use the profile of the last search that has one.
    if found["profile"]:
        note.write_text(json.dumps(found["profile"]))
    told = last_json(
        stage.python("-m", "autotune", "show", found["study"], "--studies-dir", str(studies), "--json", limit_s=60)
    )
    stage.note(course=[_of_trial(trial) for trial in told["trials"]])


def _of_outcome(found: dict[str, Any]) -> dict[str, Any]:
    names = (
        "finding",
        "because",
        "stopped",
        "tie",
        "trials",
        "elapsed_s",
        "measured_s",
        "data_s",
        "wait_s",
        "page_cache",
    )
    rows = [("baseline", found["baseline"]), ("best", found["best"]), ("best, same batch", found["best_same_batch"])]
    rows += [("finalist", one) for one in found["finalists"]]
    columns: tuple[str, ...] = (
        "trial",
        "launches",
        "verified",
        "samples_per_second",
        "ci95",
        "speedup",
        "speedup_ci95",
        "compile_s",
    )
    columns += ("peak_memory_bytes", "loader_wait_fraction", "config")
    return {
        **{name: found[name] for name in names},
        "standings": [{"as": how, **{name: one[name] for name in columns}} for how, one in rows],
        "dropped": found["dropped"],
        "bottlenecks": [one["sentence"] for one in found["bottlenecks"]],
        "checks": [{name: one[name] for name in ("trials", "passed", "reason", "distance")} for one in found["checks"]],
        "hold": found["hold"],
        "gains": [{name: one[name] for name in ("knob", "value", "gain", "why_not")} for one in found["ablation"]],
        "edges": [one["knob"] for one in found["edges"]],
        "ledger": found["ledger"],
    }


def _of_trial(trial: dict[str, Any]) -> dict[str, Any]:
    m = trial["measurement"] or {}
    return {
        "trial": trial["number"],
        "status": trial["status"],
        "samples_per_s": m.get("samples_per_s") or trial["rate_seen_per_s"],
        "device_per_s": m.get("device_per_s"),
        "first_step_s": m.get("compile_s"),
        "reserved_bytes": m.get("peak_reserved_bytes"),
        "seconds": sum(trial["phase_seconds"].values()),
        "config": trial["config"],
        "cause": trial["cause"],
    }


def best_profile(stage: Stage) -> Path:
    """Return the profile of the search with data in memory.

    Raises:
        Skipped: there is none on this machine.
    """
    note = stage.work / "profile-synthetic.json"
    path = Path(json.loads(note.read_text())) if note.exists() else None
    if path is None or not path.exists():
        raise Skipped("needs a profile: run search-synthetic on this machine first")
    return path


def promise(stage: Stage) -> None:
    """Train with the profile for as many steps as time allows, at most 1,500, and compare with its promise."""
    path = best_profile(stage)
    profile = read(path)
    step_s = int(profile.configuration["batch_size"]) / profile.gives.samples_per_second
    # The training may go on for 40 s until its rate has settled.
    seconds = min(TRAIN_S, stage.left_s - 50 - 2 * profile.gives.compile_seconds)
    steps = stage.pick(max(10, min(STEPS, int(seconds / step_s))), 30)
    stage.note(steps_asked=steps, configuration=profile.configuration)
    options = ["--profile", str(path), "--steps", str(steps), "--json"]
    ended = stage.python("-m", "autotune", "train", *options, limit_s=stage.left_s - 5, env=_state(stage))
    stage.note(**last_json(ended))


def surface(stage: Stage) -> None:
    """Record a surface until the time is over. The next call continues."""
    design = stage.pick("resnet50-card", "rehearsal")
    file = stage.out / f"{stage.stem}-surface.jsonl"
    options = ["--allow-busy"] if stage.uuid is None else []
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.surfaces", "record", design, str(file), *options],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            _, said = process.communicate(timeout=max(1.0, stage.left_s - END_S))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=END_S)
        finally:
            process.kill()
    last = next((line for line in reversed(said.splitlines()) if " of " in line), "nothing recorded")
    stage.note(exit_code=process.returncode, last=last, surface=file.name)
    if not file.exists() or (process.returncode and "the same command goes on" not in said):
        raise RuntimeError(tail(said))
    try:
        stage.note(shown=shown(read_surface(file)))
    except AutotuneError as error:
        # A recording that has only begun is no surface yet.
        stage.note(shown=str(error))
