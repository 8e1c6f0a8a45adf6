"""The devices that a search is asked to use: cards, and sets of cores."""

from pathlib import Path

import pytest

from autotune.base.errors import AutotuneError, ImpossibleError, MachineError, UsageError
from autotune.base.records import Host, StudySpec
from autotune.machine.cpu_load import cores_text, equal_shares, parse_cores
from autotune.machine.gpu import Gpu, NvmlUnavailable
from autotune.search import request, setup
from autotune.search.request import cards_for, devices_text, resolve_devices
from autotune.search.setup import Run
from autotune.study.request import spec_of
from tests.support import make_host, make_study_spec

from .cards import card, list_cards, make_machine


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    make_machine(monkeypatch)
    return monkeypatch


def asked(text: str) -> StudySpec:
    return make_study_spec(devices=text)


def test_sets_of_cores() -> None:
    one, other = resolve_devices(asked("cpu:0-1,4, cpu:2,3,5"))
    assert (one.name, one.gpu, one.cores) == ("cpu", None, (0, 1, 4))
    assert other.cores == (2, 3, 5)
    assert devices_text((one, other)) == "cpu, 2 devices side by side: cores 0-1,4 | 2-3,5"
    (alone,) = resolve_devices(asked("cpu:3"))
    assert devices_text((alone,)) == "cpu, cores 3"


@pytest.mark.parametrize("text", ["all", "0,1,2,3", "cuda:0,1,GPU-2a,3"])
def test_cards_share_the_cores(text: str) -> None:
    found = resolve_devices(asked(text))
    assert [d.gpu.uuid for d in found if d.gpu] == ["GPU-0a", "GPU-1a", "GPU-2a", "GPU-3a"]
    cores = [d.cores for d in found]
    assert {len(c) for c in cores} == {2} and sorted(sum(cores, ())) == list(range(8))


def test_all_means_those_that_are_visible_and_the_instances_of_split_ones(machine: pytest.MonkeyPatch) -> None:
    machine.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert [d.gpu.uuid for d in resolve_devices(asked("all")) if d.gpu] == ["GPU-2a", "GPU-3a"]
    parts = tuple(
        Gpu(i, f"MIG-{i}b", "a card", "580", mig=False, memory_bytes=2**34, profile="1g.18gb") for i in range(2)
    )
    machine.delenv("CUDA_VISIBLE_DEVICES")
    list_cards(machine, [card(0, mig=True, instances=parts)])
    assert [d.gpu for d in resolve_devices(asked("all"))] == list(parts)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0,,1", "names nothing between its commas"),
        ("", "names nothing between its commas"),
        ("cpu", "'cpu' is neither a card nor a set of cores"),
        ("0,cpu:1", "cards and cores of the CPU"),
        ("cpu:x", "'x' is neither a core nor a range of cores"),
        ("cpu:5-3", "'5-3' is an empty range"),
        ("cpu:0,cpu:7-9", "cpu:7-9 has cores that may not be used here: 8-9"),
        ("cpu:0-3,cpu:3-6", "cpu:0-3 and cpu:3-6 have core 3 in common"),
        ("cpu:0,cpu:0", "cpu:0 and cpu:0 have core 0 in common"),
        ("cpu:0-3,cpu:4-5", "cpu:0-3 has 4 cores and cpu:4-5 has 2"),
        ("0,GPU-0a", "cuda:0 and cuda:GPU-0a are the same card"),
        ("0,all", "leaves nothing to be named"),
        ("0,9", "there is no cuda:9"),
        ("two", "'two' is neither a card nor a set of cores"),
    ],
)
def test_what_is_no_set_of_equal_devices_is_refused(text: str, told: str) -> None:
    with pytest.raises(AutotuneError, match=told) as caught:
        resolve_devices(asked(text))
    assert isinstance(caught.value, UsageError | MachineError) and caught.value.advice


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"name": "another"}, "another, 80.0 GiB, 700 W"),
        ({"memory_bytes": 40 * 2**30}, "a card, 40.0 GiB, 700 W"),
        ({"power_limit_w": 350.0}, "a card, 80.0 GiB, 350 W"),
    ],
)
def test_cards_that_differ_are_refused_with_both(
    machine: pytest.MonkeyPatch, other: dict[str, object], told: str
) -> None:
    machine.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    list_cards(machine, [card(0), card(1, **other)])
    with pytest.raises(UsageError, match=rf"cuda:0 and cuda:1 differ: a card, 80.0 GiB, 700 W; {told}"):
        resolve_devices(asked("0,1"))


def test_more_cards_than_cores_and_no_cards_at_all(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(request, "allowed_cores", lambda: frozenset({5, 6}))
    with pytest.raises(UsageError, match="4 cards would share 2 cores"):
        resolve_devices(asked("all"))
    list_cards(machine, [])
    with pytest.raises(UsageError, match="all means all cards, and there is none"):
        resolve_devices(asked("all"))
    list_cards(machine, NvmlUnavailable("Unknown Error", driver_present=True))
    with pytest.raises(MachineError, match="Unknown Error"):
        resolve_devices(asked("all"))


def test_ranks_have_devices_of_their_own() -> None:
    with pytest.raises(UsageError, match="--devices searches for a training on one device"):
        spec_of({"model": "x", "devices": "cpu:0", "nproc_per_node": 2}, mark="m", created="c")


def test_one_device_is_said_in_one_way() -> None:
    with pytest.raises(UsageError, match="--device and --devices both say"):
        spec_of({"model": "x", "device": "cpu", "devices": "cpu:0"}, mark="m", created="c")


def test_a_device_has_its_share_of_what_is_free(machine: pytest.MonkeyPatch) -> None:
    def share(host: Host, spec: StudySpec) -> Host:
        machine.setattr(setup, "read_host", lambda: host)
        return Run(*[None] * 6, devices=resolve_devices(spec)).host  # type: ignore[arg-type, misc]

    host = make_host(cores=8)
    half = share(host, asked("cpu:0-2,cpu:4-6"))
    assert (half.cores, half.available_bytes, half.shm_free_bytes) == (
        *(3, host.available_bytes // 2),
        host.shm_free_bytes // 2,
    )
    assert (half.memory_bytes, half.shm_bytes) == (host.memory_bytes, host.shm_bytes)
    assert share(host, asked("cpu:3")) == host.model_copy(update={"cores": 1})
    # A container's quota.
    assert share(make_host(cores=4), asked("cpu:0-3,cpu:4-7")).cores == 2
    assert share(host, make_study_spec(device="cpu")) == host


def test_hardware_threads_of_a_core_stay_together(tmp_path: Path) -> None:
    # Two packages of two cores; the second threads are numbered after all first ones.
    for cpu in range(8):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{cpu % 4 // 2}\n")
        (topology / "core_id").write_text(f"{cpu % 2}\n")
    assert equal_shares(frozenset(range(8)), 4, cpus=tmp_path) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert equal_shares(frozenset(range(8)), 2, cpus=tmp_path) == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert equal_shares(frozenset(range(7)), 3, cpus=tmp_path / "hidden") == [(0, 1), (2, 3), (4, 5)]


def test_cores_as_text() -> None:
    assert parse_cores("8,0-3,2") == (0, 1, 2, 3, 8)
    assert cores_text((8, 0, 1, 2, 3)) == "0-3,8"


def test_the_cards_of_several_ranks(machine: pytest.MonkeyPatch) -> None:
    second = request.resolve_device("cuda:1")
    assert cards_for(second, 1) == ["GPU-1a"] and cards_for(second, 3) == ["GPU-1a", "GPU-2a", "GPU-3a"]
    assert cards_for(request.resolve_device("cpu"), 2) == []
    with pytest.raises(ImpossibleError, match="4 ranks need as many cards, and from cuda:1 on there are 3"):
        cards_for(second, 4)
    list_cards(machine, [card(0), card(1), card(2, power_limit_w=350.0)])
    with pytest.raises(UsageError, match="differ"):
        cards_for(second, 2)
    parts = tuple(Gpu(i, f"MIG-{i}b", "a card", "580", mig=False, memory_bytes=2**34) for i in range(2))
    list_cards(machine, [card(0, mig=True, instances=parts)])
    instance = request.resolve_device("cuda:0")
    assert cards_for(instance, 1) == ["MIG-0b"]
    with pytest.raises(ImpossibleError, match="ranks of a training need whole cards, and these are MIG instances"):
        cards_for(instance, 2)
