"""Facts about a machine and a workload."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from autotune.base.records.base import Record, Value
from autotune.base.records.delivered import Deliveries


class Host(Record):
    """The resources the operating system allows this process, read without torch.

    Attributes:
        cores: number of cores this process may use (affinity mask and cgroup quota), not the machine's count.
        memory_bytes: the smaller of physical memory and the cgroup's limit; available_bytes: how much of it is free.
        shm_bytes: size of /dev/shm, 0 if it does not exist; shm_free_bytes: how much of it is free.
    """

    cpu_model: str
    cores: int = Field(gt=0)
    memory_bytes: int
    available_bytes: int
    shm_bytes: int
    shm_free_bytes: int
    open_files: int

    def part(self, parts: int) -> Host:
        """What one of several ranks or devices has, which share cores and free memory equally."""
        if parts == 1:
            return self
        shared = {name: getattr(self, name) // parts for name in ("available_bytes", "shm_free_bytes")}
        return self.model_copy(update={**shared, "cores": max(1, self.cores // parts)})


class LeftFiles(Record):
    """Files in the folder in which a script runs that are new or changed: since its search began, or by a launch.

    Attributes:
        names: of the largest, relative to `folder`. number, size_bytes: of all that were looked at.
    """

    folder: str
    names: tuple[str, ...]
    number: int = Field(gt=0)
    size_bytes: int


class Probe(Record):
    """The result of a probe launch: facts about torch, the device and the workload that the parent cannot find out
    itself, because it imports neither torch nor user code."""

    torch_version: str
    torchvision_version: str
    python_version: str
    cuda_version: str | None
    cudnn_version: str | None
    device: str
    device_name: str
    device_memory_bytes: int | None
    #: Of them, those that a training may use: without the CUDA context and what other processes hold.
    device_free_bytes: int | None = None
    device_uuid: str | None = None
    native_bf16: bool
    tf32: bool
    cudagraphs: bool
    compiler: str | None
    #: What the compiler lacks here, as a clause with advice; None if it is not known to lack anything.
    compiler_lack: str | None = None
    worker_start_method: str
    cores: int
    #: Streaming multiprocessors of the GPU.
    multiprocessors: int | None = None
    workload_sha256: str
    #: The workload's file, if it was not known before; None if it has none.
    workload_file: str | None = None
    workload_name: str
    default_batch_size: int
    default_image_size: int | None
    cpu_image_size: int | None
    #: The generated data set that the workload asks for, or None if it brings its own data.
    wants_data: str | None
    #: As the workload declares it, of any tensor of a batch.
    varying_shapes: bool
    #: Whether the shapes of images vary, as far as batches were looked at; None if that is not known.
    images_vary: bool | None = None
    has_images: bool
    #: It has 5-dimensional weights; tensors of four and of five dimensions; and of these, some that share their memory.
    has_volumes: bool = False
    mixed_formats: bool = False
    shared_memory: bool = False
    optimizer_impls: tuple[str, ...]
    #: The implementation that the workload's optimizer uses by default.
    own_optimizer_impl: str
    #: The user's own variables turn them on in CUDA's allocator, or keep it from splitting large blocks.
    expandable_segments: bool = False
    limits_splitting: bool = False
    parameters: int
    dataset_samples: int | None
    sample_bytes: int | None
    #: Tensors in one sample. Each takes a file descriptor while it is in a worker's queue.
    sample_tensors: int = 2
    workload_knobs: dict[str, tuple[Value, ...]] = Field(default_factory=dict)
    #: Of a command: what its script does itself, by knob, as far as that was seen; `None` for a workload.
    own: dict[str, Value] | None = None
    #: Of a command, by knob and value, why it cannot be set from outside; ``*`` stands for all numbers but the least.
    outside: dict[str, dict[str, str]] = Field(default_factory=dict)
    #: Of a command: the knobs that its words set, by places or flags of its own, and how many processes train.
    in_command: tuple[str, ...] = ()
    ranks: int = 1
    #: Of a command: what the script's own loader has delivered.
    deliveries: Deliveries | None = None
    #: Of a command: why its launches have no copy-on-write view of their folder, as a clause; None if they have one.
    view_refused: str | None = None
    #: What this launch has written in its view.
    wrote: LeftFiles | None = None
    #: Whether the workload itself says how ranks share its training.
    own_exchange: bool = False
    #: Of the workload's knobs that say so: whether they change the maths.
    workload_maths: dict[str, bool] = Field(default_factory=dict)
    #: Of the workload's knobs, those that take part only where the user states values of them.
    workload_unasked: tuple[str, ...] = ()


def _sorted_mapping(value: dict[str, Any]) -> dict[str, Any]:
    return dict(sorted(value.items()))


class Fingerprint(Record):
    """Facts that must not change for a measurement to remain valid. Compared when a study is resumed and by profiles.

    ``device_uuid`` is recorded but not compared: two cards of the same model count as the same machine.
    """

    values: Annotated[dict[str, str | int | float | bool | None], AfterValidator(_sorted_mapping)]
    device_uuid: str | None = None

    def _untold(self, name: str, other: Fingerprint) -> bool:
        # Of a folder in a workload's own layout, older versions did not tell what is in it.
        return name == "data_identity" and "" in (self.values.get(name), other.values.get(name))

    def differences(self, other: Fingerprint) -> list[tuple[str, str, str]]:
        """Return rows ``(name, mine, theirs)`` for everything that differs, as far as both are known."""
        names = sorted(n for n in self.values.keys() | other.values.keys() if not self._untold(n, other))
        return [
            (name, str(self.values.get(name, "absent")), str(other.values.get(name, "absent")))
            for name in names
            if self.values.get(name, "absent") != other.values.get(name, "absent")
        ]
