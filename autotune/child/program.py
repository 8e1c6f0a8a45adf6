"""The probe of a program that is not looked into: it tells its own rate, and its command sets all that is searched."""

from __future__ import annotations

import os
import platform
from itertools import islice

from autotune.launcher import entering
from autotune.child.beats import Beats
from autotune.child.script import ScriptProcess
from autotune.child.unseen import too_short
from autotune.knobs import KNOBS, answer_to
from autotune.machine.gpu import NvmlUnavailable, gpus, visible
from autotune.base.records import CommandRef, Probe, TrialSpec

NOT_INSIDE = "the program is not looked into, and its command does not set it"


def probe_program(spec: TrialSpec, command: CommandRef, beats: Beats) -> Probe:
    """Run a program until it has told its rate twice, end it, and return what can be known of it.

    Raises:
        WorkloadError: it ended before that, or what it told is no number.
    """
    script = ScriptProcess(spec, command, beats)
    try:
        told = next(islice(script.steps(), 1), None)
    finally:
        script.end()
    if told is None:
        raise too_short(script)
    return _probe(spec, command)


def _probe(spec: TrialSpec, command: CommandRef) -> Probe:
    in_command = entering.set_by(command)
    others = [knob for name, knob in KNOBS.items() if name not in in_command]
    outside = {
        knob.name: {answer_to(knob, value): NOT_INSIDE for value in knob.values or (knob.minimum, knob.maximum)}
        for knob in others
    }
    listed = gpus()
    cards = [] if isinstance(listed, NvmlUnavailable) else visible(listed, os.environ.get("CUDA_VISIBLE_DEVICES"))
    card = cards[0] if cards and spec.devices[0] != "cpu" else None
    batch = command.samples_per_step or (spec.batch_size if "batch_size" in in_command else 1)
    # What it could do, its author has written into its command; only of the machine something is known.
    return Probe(
        torch_version="",
        torchvision_version="",
        python_version=platform.python_version(),
        cuda_version=None,
        cudnn_version=None,
        device=spec.devices[0],
        device_name="cpu" if card is None else card.name,
        device_memory_bytes=None if card is None else card.memory_bytes,
        device_uuid=None if card is None else card.uuid,
        native_bf16=True,
        tf32=True,
        cudagraphs=True,
        compiler="its own",
        worker_start_method=spec.worker_start_method,
        cores=len(os.sched_getaffinity(0)),
        workload_sha256=spec.workload.sha256,
        workload_name=spec.workload.name,
        default_batch_size=batch,
        default_image_size=None,
        cpu_image_size=None,
        wants_data=None,
        varying_shapes=False,
        has_images=True,
        optimizer_impls=("for-loop", "foreach", "fused"),
        own_optimizer_impl="foreach",
        parameters=0,
        dataset_samples=None,
        sample_bytes=None,
        own={} if "batch_size" in in_command else {"batch_size": batch},
        outside=outside,
        in_command=tuple(sorted(in_command)),
    )
