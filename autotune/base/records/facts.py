"""Facts about a machine, a workload and its data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from autotune.base.records.base import Record, Value

# What a loader has delivered, so that it can be compared with what another has, or the same under other settings.


_LISTS = ("used", "moved", "stores", "opened", "counts", "grown")


class DeliveredBatch(Record):
    """One batch.

    Attributes:
        samples: what the sampler has chosen: indices, or digests of whatever else stands for a sample; ``None`` if the
            data set is iterable and this is unknown.
        digests: by place in the batch, such as ``[0]`` or ``['image']``: one for all of it, or one for each sample.
    """

    samples: tuple[int | str, ...] | None
    digests: dict[str, str | tuple[str, ...]]

    @property
    def size(self) -> int:
        """Number of samples, as far as known."""
        rows = [len(digest) for digest in self.digests.values() if isinstance(digest, tuple)]
        return len(self.samples) if self.samples is not None else max(rows, default=1)


class DeliveredEpoch(Record):
    """The batches of an epoch, which ends after some of them.

    Attributes:
        changed: what of its data set the script has changed since the epoch before, such as ``dataset.difficulty``.
        ended: the loader was asked for more, and had none. whole: by itself. total: batches, including those not noted.
        states: digests of the global generators of random numbers with which each worker began, by name.
    """

    changed: tuple[str, ...] = ()
    batches: tuple[DeliveredBatch, ...] = ()
    ended: bool = False
    whole: bool = False
    total: int = 0
    states: tuple[dict[str, str], ...] = ()


class Delivered(Record):
    """What the loaders of one data set have delivered in a training.

    Attributes:
        kind: class of the data set. iterable: it has no indices. workers: of its loader. persist: these do.
        used: the global generators that it draws from.
        moved: what it continues to read from one sample to the next, each ``(where, what)``: ``("dataset.file",
            "the open file 'records.bin'")``; where is empty if it was only seen open in the process.
        opened: what was opened between its epochs in the training process, likewise.
        counts: plain values that differ after a batch.
        stores: what else it holds open that no other process may use, likewise. grown: where it held more after a
            batch.
        first_s, again_s: seconds to make each batch, and to make it again right afterwards in the same process.
    """

    kind: str
    iterable: bool
    workers: int = 0
    persist: bool = False
    epochs: tuple[DeliveredEpoch, ...] = ()
    used: tuple[str, ...] = ()
    moved: tuple[tuple[str, str], ...] = ()
    stores: tuple[tuple[str, str], ...] = ()
    opened: tuple[tuple[str, str], ...] = ()
    counts: tuple[str, ...] = ()
    grown: tuple[str, ...] = ()
    first_s: tuple[float, ...] = ()
    again_s: tuple[float, ...] = ()


class Deliveries(Record):
    """What all loaders of a training have delivered.

    Attributes:
        sets: one per data set, in the order in which they were first iterated over.
        done: as many epochs were seen as requested. lost: why not everything was noted, if so.
    """

    sets: tuple[Delivered, ...] = ()
    done: bool = False
    lost: str | None = None


class DataVerdict(Record):
    """Whether a configuration's loader delivers what the baseline's does.

    Attributes:
        trial: of the configuration. passed: ``None`` if it was not compared, or could not be.
        reason: why not; or how it was compared, if that is less than sample by sample.
        batches, samples, epochs: how many were compared. needless: the loader has the baseline's settings.
    """

    trial: int
    config: dict[str, Value]
    passed: bool | None
    reason: str | None = None
    batches: int = 0
    samples: int = 0
    epochs: int = 0
    needless: bool = False


def deliveries_of(events: Sequence[Mapping[str, Any]]) -> Deliveries:
    """Return what the agent has noted; see `autotune_agent.deliveries` for its events."""
    sets: dict[int, dict[str, Any]] = {}
    done, lost = False, None
    last_made: dict[tuple[int, int], tuple[Any, float]] = {}
    indices_made: set[tuple[int, str]] = set()
    for event in events:
        kind, facts = event["e"], sets.get(event.get("l", -1))
        if kind == "loader":
            sets[event["l"]] = {
                **{name: event[name] for name in ("kind", "iterable", "workers", "persist")},
                **{name: {} for name in _LISTS},
                **{name: [] for name in ("epochs", "first_s", "again_s")},
            }
        elif kind == "done":
            done = True
        elif kind == "lost":
            lost = str(event["why"])
        elif facts is None:
            # An event of a process that has outlived another launch.
            continue
        elif kind == "epoch":
            facts["epochs"].append({"changed": event["changed"], "batches": [], "states": []})
        elif kind == "batch":
            facts["epochs"][event["n"]]["batches"].append({"samples": event["i"], "digests": event["d"]})
        elif kind == "end":
            facts["epochs"][event["n"]].update(ended=True, whole=event["whole"], total=event["batches"])
        elif kind == "made":
            facts["used"].update(dict.fromkeys(event["used"]))
            before = last_made.get((event["l"], event["pid"]))
            if before is not None and before[0] == event["i"]:
                facts["first_s"].append(before[1])
                facts["again_s"].append(event["s"])
            # A batch that was made in an earlier epoch is not made for the first time.
            indices = event["l"], str(event["i"])
            is_new = indices not in indices_made
            indices_made.add(indices)
            last_made[event["l"], event["pid"]] = (event["i"] if is_new else None, event["s"])
        elif kind == "peek":
            facts["epochs"].pop()
        elif kind in ("grown", "counts"):
            facts[kind].update(dict.fromkeys(event["what"]))
        elif kind in ("moved", "stores", "opened"):
            facts[kind].update(dict.fromkeys(map(tuple, event["what"])))
    # A worker that goes on to its next epoch has advanced since.
    starts = {(event["l"], event["pid"]): event for event in reversed(events) if event["e"] == "fetch"}
    for event in starts.values():
        epochs = sets[event["l"]]["epochs"] if event["l"] in sets else []
        if event["w"] is not None and event["n"] < len(epochs):
            epochs[event["n"]]["states"].append(event["states"])
    for facts in sets.values():
        facts.update({name: tuple(facts[name]) for name in _LISTS})
    return Deliveries(sets=tuple(Delivered(**facts) for facts in sets.values()), done=done, lost=lost)


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
        """Return the share of one of several ranks or devices, which share cores and free memory equally."""
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
    cuda_version: str | None = None
    cudnn_version: str | None = None
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
    default_image_size: int | None = None
    cpu_image_size: int | None = None
    #: The generated data set that the workload asks for, or None if it brings its own data.
    wants_data: str | None = None
    #: As the workload declares it, of any tensor of a batch.
    varying_shapes: bool = False
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
    #: What glibc's malloc does with freed memory by itself, a value of the knob; None if that cannot be set.
    malloc: str | None = "default"
    parameters: int
    dataset_samples: int | None = None
    sample_bytes: int | None = None
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
    #: Of a script: seconds of one of its steps, the median; ``None`` if none was seen inside an epoch.
    step_s: float | None = None
    #: What this launch has written in its view.
    wrote: LeftFiles | None = None
    #: Whether the workload itself says how ranks share its training, and how samples become a batch.
    own_exchange: bool = False
    own_collate: bool = False
    #: Of the workload's knobs that say so: whether they change the maths.
    workload_maths: dict[str, bool] = Field(default_factory=dict)
    #: Of the workload's knobs, those that take part only where the user states values of them.
    workload_unasked: tuple[str, ...] = ()


class Fingerprint(Record):
    """Facts that must not change for a measurement to remain valid. Compared when a study is resumed and by profiles.

    ``device_uuid`` is recorded but not compared: two cards of the same model count as the same machine.
    """

    values: Annotated[
        dict[str, str | int | float | bool | None], AfterValidator(lambda values: dict(sorted(values.items())))
    ]
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
