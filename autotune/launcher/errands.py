"""What goes between a search and the workers that run its launches elsewhere: errands, and how they ended."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field

from autotune.base.records import Host, Record, TrialResult, TrialSpec
from autotune.machine.gpu import Gpu


class WorkerFacts(Record):
    """What a worker has of its machine.

    Attributes:
        where: names it for people.
        device: contract name, of which it has one. gpu: its description by NVML.
        cores: to which its launches are pinned; empty: to none.
    """

    where: str
    host: Host
    device: str = "cpu"
    gpu: Gpu | None = None
    cores: tuple[int, ...] = ()

    @property
    def place(self) -> dict[str, Any]:
        """Its device, as fields of the specs of launches."""
        env = {} if self.gpu is None else {"CUDA_VISIBLE_DEVICES": self.gpu.uuid}
        return {"devices": (self.device,), "env": env, "cores": self.cores}


class Errand(Record):
    """A launch that a worker is to run for a search elsewhere. Made to be sent as JSON.

    Attributes:
        name: unique among all that the search sends: a launch that is sent again has another one.
        study: the study's folder there. What lies below it lies below the worker's own folder here.
        spec: with the paths and the device of the machine of the search.
        code: the workload's file and the modules beside it, by name relative to its folder; empty: they are not files,
            or the training is a command, whose script is seen from here under the same name.
        script: that script. script_sha256: its `autotune.workload.catalog.source_hash`.
        before: the launch that makes what this one starts from; it is run first if it was not run here.
    """

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    name: str
    study: str
    spec: TrialSpec
    code: dict[str, bytes] = Field(default_factory=dict)
    script: str | None = None
    script_sha256: str = ""
    before: TrialSpec | None = None


class ErrandEnd(Record):
    """How an errand ended: with a result, or with the error because of which this worker cannot run it.

    Attributes:
        stdout, stderr: the ends of the launch's logs.
        error: one sentence. advice: what to change.
    """

    errand: str
    result: TrialResult | None = None
    stdout: str = ""
    stderr: str = ""
    error: str | None = None
    advice: str | None = None
