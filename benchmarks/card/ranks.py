"""A part on two cards: two ranks of one training, whose gradients go over NCCL, and a script of two ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from autotune.base.records import CommandRef, LaunchKind, MeasurePlan, TrialResult, TrialSpec, Value
from autotune.machine.gpu import NvmlUnavailable, gpus, visible
from autotune.search.subject import command_name, command_ref
from benchmarks.card.launches import SHORT, base_config, figures_of, launcher, run, spec_for
from benchmarks.card.stage import NO_TIME, Skipped, Stage
from benchmarks.card.trials import FAST, ONE_TRIAL_S

RANKS = 2
PLAN = MeasurePlan(max_measure_s=3.0, max_warmup_s=5.0, target_halfwidth=0.01)
SCRIPT = Path(__file__).with_name("two_ranks.py")
#: What is changed in the fast configuration of one card, and in the launch.
_LAUNCHES: dict[str, tuple[dict[str, Value], dict[str, Any]]] = {
    "measured": ({}, {}),
    "device only, without exchange": ({}, {"kind": LaunchKind.DEVICE_ONLY, "exchanges": False}),
    "gradients in bf16": ({"gradient_compression": "bf16"}, {}),
    "reduce-overhead": ({"compile_mode": "reduce-overhead"}, {}),
}


def ranks(stage: Stage) -> None:
    """Make launches of two ranks, each on a card of its own, and one of a script that `torchrun` starts."""
    uuids = _cards(stage)
    if not uuids:
        stage.replaced("two ranks on the CPU, over gloo, in fp32; reduce-overhead: off, as both would compile for long")
    env = {"CUDA_VISIBLE_DEVICES": ",".join(uuids)} if uuids else {}
    common = {"env": env, "plan": stage.pick(PLAN, SHORT)}
    with launcher(stage.waits) as made:
        for name, (changes, how) in _LAUNCHES.items():
            if stage.left_s < ONE_TRIAL_S:
                stage.add("launches", {"launch": name, "status": NO_TIME})
                continue
            config = {**base_config(stage), **FAST, **changes}
            config["num_workers"] = stage.pick(config["num_workers"], 1)
            config["precision"] = stage.pick(config["precision"], "fp32")
            config["compile_mode"] = stage.pick(config["compile_mode"], "off")
            spec = spec_for(stage, name.replace(" ", "-").replace(",", ""), config, ranks=RANKS, **common, **how)
            _note(stage, name, run(made, _sharing_cores(stage, spec)))
        if stage.left_s < ONE_TRIAL_S:
            stage.add("launches", {"launch": "script", "status": NO_TIME})
            return
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}")
        command = CommandRef(words=(*torchrun, str(SCRIPT)), folder=str(stage.folder))
        workload = command_ref(command, command_name(command.words))
        config = {**base_config(stage), "num_workers": 0}
        spec = spec_for(stage, "script", config, workload=workload, command=command, **common)
        _note(stage, "script", run(made, _sharing_cores(stage, spec)))


def _sharing_cores(stage: Stage, spec: TrialSpec) -> TrialSpec:
    """Return a spec whose ranks, in a rehearsal, compute with one thread each."""
    return spec if stage.uuid else spec.model_copy(update={"config": {**spec.config, "intra_op_threads": 1}})


def _note(stage: Stage, name: str, result: TrialResult) -> None:
    found = result.measurement
    waits = None if found is None else found.rank_wait_fractions
    stage.add("launches", {"launch": name, **figures_of(result), "rank_wait_fractions": waits})


def _cards(stage: Stage) -> list[str]:
    """Return the UUIDs of two equal cards; none in a rehearsal.

    Raises:
        Skipped: there are none.
    """
    if stage.uuid is None:
        return []
    listed = gpus()
    seen = [] if isinstance(listed, NvmlUnavailable) else visible(listed, os.environ.get("CUDA_VISIBLE_DEVICES"))
    name = next((card.name for card in seen if card.uuid == stage.uuid), None)
    equal = [card.uuid for card in seen if card.name == name and not card.mig and card.profile is None]
    if len(equal) < RANKS:
        raise Skipped("needs two equal cards, and NVML lists one")
    return [stage.uuid, *(uuid for uuid in equal if uuid != stage.uuid)][:RANKS]
