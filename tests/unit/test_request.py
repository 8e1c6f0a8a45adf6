"""Choosing the requested card, regardless of CUDA's order."""

from types import SimpleNamespace

import pytest

from autotune.base.errors import MachineError, UnknownNameError, UsageError
from autotune.base.records import StudySpec
from autotune.machine.gpu import Gpu, NvmlUnavailable
from autotune.search import request
from autotune.search.request import Device, check_request, resolve_device
from autotune.search.setup import first_headline


def card(index: int, uuid: str, name: str = "a card", **more: object) -> Gpu:
    return Gpu(index, uuid, name, "580", **({"mig": False} | more))


CARDS = [card(0, "GPU-aaaa-1"), card(1, "GPU-bbbb-2"), card(2, "GPU-cccc-3")]


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch):
    """A machine with three cards, simulated at NVML's answer because there is no driver."""
    monkeypatch.setattr(request, "gpus", lambda: CARDS)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("asked", "visible", "uuid"),
    [
        ("auto", None, "GPU-aaaa-1"),
        ("cuda", None, "GPU-aaaa-1"),
        ("cuda:1", None, "GPU-bbbb-2"),
        ("cuda:GPU-cccc-3", None, "GPU-cccc-3"),
        ("auto", "2,0", "GPU-cccc-3"),
        ("cuda:1", "2,0", "GPU-aaaa-1"),
        ("cuda:0", "GPU-bbbb", "GPU-bbbb-2"),
        ("cuda:1", "1, 2", "GPU-cccc-3"),
    ],
)
def test_the_chosen_card_is_the_one_that_cuda_shows(cards, asked, visible, uuid):
    if visible is not None:
        cards.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = resolve_device(asked)
    assert found.gpu is not None
    assert found.gpu.uuid == uuid
    assert found.name.startswith("cuda:")
    assert found.remark is None


@pytest.mark.parametrize(
    ("asked", "visible"), [("cuda:3", None), ("cuda:1", "2"), ("cuda:GPU-aaaa-1", "1"), ("cuda:1", "0,x,1")]
)
def test_a_missing_card_is_refused(cards, asked, visible):
    if visible is not None:
        cards.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(MachineError, match=asked):
        resolve_device(asked)


DIFFERENT = [card(0, "GPU-aaaa-1", "a slow card"), card(1, "GPU-bbbb-2", "a fast card")]


@pytest.mark.parametrize(("asked", "visible"), [("auto", None), ("cuda:1", None), ("cuda:GPU-aaaa-1", "1,0")])
def test_if_cards_differ_a_number_is_ambiguous(cards, asked, visible):
    """CUDA puts the fastest card first, NVML the first on the bus."""
    cards.setattr(request, "gpus", lambda: DIFFERENT)
    if visible is not None:
        cards.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(MachineError, match="CUDA_DEVICE_ORDER") as caught:
        resolve_device(asked)
    assert "by UUID" in caught.value.advice
    cards.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert resolve_device(asked).gpu is not None


@pytest.mark.parametrize(
    ("asked", "visible"), [("cuda:GPU-bbbb-2", None), ("auto", "GPU-bbbb"), ("cuda:1", "GPU-a,GPU-b")]
)
def test_if_cards_differ_a_uuid_is_unambiguous(cards, asked, visible):
    cards.setattr(request, "gpus", lambda: DIFFERENT)
    if visible is not None:
        cards.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert resolve_device(asked).gpu == DIFFERENT[1]


MIG = [
    card(0, "MIG-dddd-0", "a card MIG 1g.18gb", profile="1g.18gb", old_uuid="MIG-GPU-aaaa-1/7/0"),
    card(3, "MIG-dddd-3", "a card MIG 2g.35gb", profile="2g.35gb", old_uuid="MIG-GPU-aaaa-1/9/0"),
]
SPLIT = [card(0, "GPU-aaaa-1", mig=True, instances=tuple(MIG)), card(1, "GPU-bbbb-2"), card(2, "GPU-eeee-3", mig=True)]


@pytest.mark.parametrize(
    ("asked", "visible", "uuid"),
    [
        ("auto", "MIG-dddd-3", "MIG-dddd-3"),
        ("cuda:0", "MIG-dddd-3", "MIG-dddd-3"),
        ("cuda:MIG-dddd-3", "MIG-dddd-3,MIG-dddd-0", "MIG-dddd-3"),
        ("cuda:1", "MIG-dddd-3,MIG-dddd-0", "MIG-dddd-0"),
        ("auto", "MIG-GPU-aaaa-1/9/0", "MIG-dddd-3"),
        ("cuda:MIG-GPU-aaaa-1/9/0", None, "MIG-dddd-3"),
        ("cuda:MIG-dddd-3", None, "MIG-dddd-3"),
        ("cuda:MIG-dddd-3", "0", "MIG-dddd-3"),
        # Of a whole card that is split, CUDA shows the first instance.
        ("auto", None, "MIG-dddd-0"),
        ("auto", "0", "MIG-dddd-0"),
        ("cuda:GPU-aaaa-1", None, "MIG-dddd-0"),
        ("cuda:1", None, "GPU-bbbb-2"),
    ],
)
def test_an_instance_of_a_card_is_a_device(cards, asked, visible, uuid):
    cards.setattr(request, "gpus", lambda: SPLIT)
    if visible is not None:
        cards.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = resolve_device(asked)
    assert found.gpu is not None
    assert (found.gpu.uuid, found.remark) == (uuid, f"MIG {found.gpu.profile}" if found.gpu.profile else None)


@pytest.mark.parametrize(
    ("asked", "visible", "match"),
    [
        ("cuda:MIG-dddd-0", "MIG-dddd-3", "there is no cuda:MIG-dddd-0 with CUDA_VISIBLE_DEVICES=MIG-dddd-3"),
        ("cuda:GPU-aaaa-1", "MIG-dddd-3", "there is no cuda:GPU-aaaa-1"),
        ("auto", "MIG-ffff", "there is no cuda:0"),
        ("auto", "2", "has no instance"),
    ],
)
def test_an_instance_that_may_not_be_used_here_is_refused(cards, asked, visible, match):
    cards.setattr(request, "gpus", lambda: SPLIT)
    cards.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(MachineError, match=match):
        resolve_device(asked)


@pytest.mark.parametrize(
    "device", ["cuda:MIG-1a2b-3c", "cuda:MIG-GPU-1a2b-3c/7/0", "cuda:GPU-1a2b-3c", "cuda:3", "auto"]
)
def test_devices_are_named_by_number_or_uuid(device):
    check_request(StudySpec(name="", mark="m", created="c", model="resnet18", device=device))


@pytest.mark.parametrize("device", ["cuda:MIG-", "cuda:MIG-GPU-1a/7", "cuda:GPU-1a/7/0", "MIG-1a", "cuda:-1", "gpu"])
def test_other_names_of_devices_are_refused(device):
    with pytest.raises(UsageError, match="unknown device"):
        check_request(StudySpec(name="", mark="m", created="c", model="resnet18", device=device))


@pytest.mark.parametrize(
    ("found", "visible", "on_the_bus", "remark"),
    [
        ([], None, True, "the NVIDIA driver lists no GPU"),
        (CARDS, "", True, "CUDA_VISIBLE_DEVICES='' hides the GPU"),
        (CARDS, "-1", True, "CUDA_VISIBLE_DEVICES='-1' hides the GPU"),
        (CARDS, "NoDevFiles", True, "CUDA_VISIBLE_DEVICES='NoDevFiles' hides the GPU"),
        (NvmlUnavailable("no driver", driver_present=False), None, True, "an NVIDIA card, but no driver for it"),
        (NvmlUnavailable("no driver", driver_present=False), None, False, None),
    ],
)
def test_auto_says_why_it_takes_the_cpu_of_a_machine_with_a_card(cards, found, visible, on_the_bus, remark):
    cards.setattr(request, "gpus", lambda: found)
    cards.setattr(request, "has_nvidia_card", lambda: on_the_bus)
    if visible is not None:
        cards.setenv("CUDA_VISIBLE_DEVICES", visible)
    device = resolve_device("auto")
    assert (device.name, device.gpu) == ("cpu", None)
    assert (remark or "") in (device.remark or "") and bool(device.remark) is bool(remark)
    assert resolve_device("cpu") == Device("cpu")
    with pytest.raises(MachineError):
        resolve_device("cuda")


@pytest.mark.parametrize(
    ("target", "line"),
    [
        (Device("cpu"), "net, on cpu"),
        (Device("cpu", remark="the NVIDIA driver lists no GPU"), "net, on cpu (the NVIDIA driver lists no GPU)"),
        (Device("cuda:0", MIG[0], "MIG 1g.18gb"), "net, on cuda:0 (MIG 1g.18gb)"),
    ],
)
def test_the_first_line_of_a_search_says_what_the_devices_name_does_not(target, line):
    assert first_headline(SimpleNamespace(ref=SimpleNamespace(name="net"), devices=(target,), away=None)) == line


def test_a_card_that_does_not_answer_does_not_mean_the_cpu(cards):
    cards.setattr(request, "gpus", lambda: NvmlUnavailable("Unknown Error", driver_present=True))
    with pytest.raises(MachineError, match="Unknown Error"):
        resolve_device("auto")


@pytest.mark.parametrize(
    ("field", "name", "advice"),
    [
        ("fixed", "checkpointing", "did you mean workload.checkpointing?"),
        ("narrowed", "checkpointing", "did you mean workload.checkpointing?"),
        ("baseline", "chekpointing", "did you mean workload.checkpointing?"),
        ("fixed", "workload.chekpointing", "did you mean workload.checkpointing?"),
        ("narrowed", "batchsize", "did you mean batch_size or batch_memory?"),
        ("fixed", "precison", "did you mean precision?"),
    ],
)
def test_an_unknown_knob_names_the_closest_before_anything_runs(tmp_path, field, name, advice):
    (tmp_path / "mine.py").write_text('KNOBS = {"checkpointing": (False, True)}\nraise SystemExit\n')
    value = ("true",) if field == "narrowed" else "true"
    spec = StudySpec(name="", mark="m", created="c", model=str(tmp_path / "mine.py"), **{field: {name: value}})
    with pytest.raises(UnknownNameError) as caught:
        check_request(spec)
    assert caught.value.advice == advice
    check_request(spec.model_copy(update={field: {"workload.checkpointing": value}}))
