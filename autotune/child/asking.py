"""The probe of a command: a script of the user's trains for some steps as it stands, and is asked what it does itself
and what could be set from outside."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from autotune.launcher import entering
from autotune.child.beats import Beats
from autotune.child.deliveries import DeliveryLog, refused_by
from autotune.child.probe import compiler_here, native_bf16
from autotune.child.program import probe_program
from autotune.child.script import ScriptProcess
from autotune.child.trail import Trail
from autotune.child.unseen import too_short
from autotune.base.errors import AutotuneError, WorkloadError
from autotune.knobs import KNOBS, answer_to
from autotune.knobs.alloc_conf import expands, limits_splitting
from autotune.knobs.batch_size import KNOB as BATCH_SIZE
from autotune.knobs.optimizer_impl import KNOB as OPTIMIZER_IMPL
from autotune.knobs.precision import KNOB as PRECISION
from autotune.base.layout import LaunchFiles
from autotune.base.records import CommandRef, DeliveryPlan, Probe, TrialSpec, WorkloadRef


def probe_command(spec: TrialSpec, beats: Beats) -> Probe:
    """Run ``spec.command`` until all that it trains with has been seen, and end it.

    Raises:
        WorkloadError: the script ended too early, or does not train as far as can be seen.
        Exception: what the script did not catch.
    """
    command = spec.command
    if command is None:
        raise AutotuneError(f"{spec.launch} is to run a command and is not told which")
    if command.rate is not None:
        return probe_program(spec, command, beats)
    in_command = entering.set_by(command)
    plan = DeliveryPlan()
    log = DeliveryLog(plan, LaunchFiles(Path(spec.folder)))
    asked = entering.question(in_command=in_command)
    # The order of its samples is the same in launches with which it is compared, if the script draws it.
    script = ScriptProcess(spec, command, beats, asked=asked, seed=plan.seed, deliveries=plan)
    trail = script.trail
    try:
        for _ in script.looks():
            over = log.is_over() or (trail.own is not None and not log.has_begun)
            if trail.own is not None and over:
                break
    except Exception:
        # A script may not expect that its epochs end early. What was to be seen of its training has been seen.
        if trail.own is None or not log.has_ended_early:
            raise
    finally:
        script.end()
    if trail.own is None or not trail.own["optimizer"]:
        raise too_short(script)
    if trail.loader is None and any(flag.knob == BATCH_SIZE.name for flag in entering.flags_of(command.flags)):
        raise WorkloadError(
            "no loader was seen, so nobody would count the samples of other batch sizes",
            advice=f"leave --map {BATCH_SIZE.name} out.",
        )
    found = probe_of(command, trail, trail.own, in_command, spec.workload, device=spec.devices[0])
    if found.device != "cpu" and spec.devices[0] == "cpu":
        raise WorkloadError("the script trains on CUDA, and the CPU was asked for", advice="leave --device out.")
    deliveries = log.found()
    outside = {name: dict(answers) for name, answers in found.outside.items()}
    for name, answer, why in refused_by(deliveries, found.own or {}) if deliveries is not None else ():
        outside.setdefault(name, {}).setdefault(answer, why)
    return found.model_copy(update={"deliveries": deliveries, "outside": outside})


def probe_of(
    command: CommandRef,
    trail: Trail,
    told: Mapping[str, Any],
    in_command: set[str],
    workload: WorkloadRef,
    *,
    device: str = "cuda:0",
) -> Probe:
    """Return what is known of a script from what it does itself.

    Args:
        told: facts and answers of the agent, which was asked the `question`. in_command: knobs that the command sets.
        workload: how the script is called. device: its card, if it trains on one.

    Raises:
        WorkloadError: autotune knows nothing of the device that it trains on.
    """
    card = device
    machine, model, optimizer = told["machine"], told["model"], told["optimizer"]
    device = model.get("device") or optimizer["device"]
    if device not in ("cpu", "cuda"):
        raise WorkloadError(f"the script trains on {device!r}", advice="autotune knows CPUs and CUDA.")
    cuda = device == "cuda"
    loader = trail.loader
    facts = {
        **{door: told[door] for door in ("process", "model", "optimizer")},
        "loader": {} if loader is None else loader.arguments,
        "device": device,
    }
    own = {name: value for name, knob in KNOBS.items() if (value := knob.own_outside(facts)) is not None}
    placed = entering.places(command.words)
    # Without a loader nothing tells samples, and rates are in steps.
    own.setdefault(BATCH_SIZE.name, command.samples_per_step or 1)
    offers = {"for-loop": True, "foreach": "foreach" in optimizer, "fused": "fused" in optimizer}
    compiler, compiler_lack = compiler_here(machine["capability"][0] if cuda else None)
    samples = loader.batch_size * loader.batches if loader and loader.batch_size and loader.batches else None
    outside: dict[str, dict[str, str]] = {}
    for name, value, why_not in told["answers"]:
        if why_not is not None:
            outside.setdefault(name, {})[answer_to(KNOBS[name], value)] = why_not
    if PRECISION.name not in in_command:
        PRECISION.not_beside(own, outside)
    return Probe(
        torch_version=trail.torch_version or "",
        torchvision_version=machine["vision"] or "",
        python_version=machine["python"],
        cuda_version=trail.cuda,
        cudnn_version=machine.get("cudnn"),
        device=card if cuda else "cpu",
        device_name=machine.get("name", "cpu"),
        device_memory_bytes=machine.get("memory"),
        device_uuid=f"GPU-{machine['uuid']}" if machine.get("uuid") else None,
        native_bf16=native_bf16(machine.get("bf16")),
        tf32=cuda and machine["capability"][0] >= 8,
        cudagraphs=cuda,
        compiler=compiler,
        compiler_lack=compiler_lack,
        worker_start_method=machine["start_method"],
        # Launchers of scripts ask for one thread, and there may be more cores than that.
        cores=max(told["process"]["threads"], torch.get_num_threads()),
        multiprocessors=machine.get("multiprocessors"),
        workload_sha256=workload.sha256,
        workload_name=workload.name,
        default_batch_size=int(own["batch_size"]),
        default_image_size=None,
        cpu_image_size=None,
        wants_data=None,
        varying_shapes=False,
        has_images=bool(model.get("images")),
        has_volumes=bool(model.get("volumes")),
        optimizer_impls=tuple(name for name, there in offers.items() if there),
        own_optimizer_impl=str(own[OPTIMIZER_IMPL.name]),
        parameters=model.get("parameters") or optimizer["parameters"],
        dataset_samples=samples,
        sample_bytes=None,
        # Of what has a place, the value is what has just been put there.
        own={name: value for name, value in own.items() if name not in placed},
        outside=outside,
        in_command=tuple(sorted(in_command)),
        ranks=machine["ranks"],
        expandable_segments=expands(os.environ),
        limits_splitting=limits_splitting(os.environ),
    )
