"""Choosing the requested card, regardless of CUDA's order."""

import pytest

from autotune.errors import MachineError, UnknownNameError
from autotune.machine.gpu import Gpu, NvmlUnavailable
from autotune.records import StudySpec
from autotune.search import request
from autotune.search.request import check_request, resolve_device


def card(index: int, uuid: str, name: str = "a card") -> Gpu:
    fields = dict.fromkeys(Gpu.__dataclass_fields__)
    fields |= {"index": index, "uuid": uuid, "name": name, "mig": False, "driver_version": "580"}
    return Gpu(**fields)


CARDS = [card(0, "GPU-aaaa-1"), card(1, "GPU-bbbb-2"), card(2, "GPU-cccc-3")]


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch):
    """A machine with three cards, simulated at NVML's answer because there is no driver."""
    monkeypatch.setattr(request, "gpus", lambda: CARDS)
    monkeypatch.setattr(request, "has_nvidia_device", lambda: True)
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
    name, found = resolve_device(asked)
    assert found is not None
    assert found.uuid == uuid
    assert name.startswith("cuda:")


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
    assert resolve_device(asked)[1] is not None


@pytest.mark.parametrize(
    ("asked", "visible"), [("cuda:GPU-bbbb-2", None), ("auto", "GPU-bbbb"), ("cuda:1", "GPU-a,GPU-b")]
)
def test_if_cards_differ_a_uuid_is_unambiguous(cards, asked, visible):
    cards.setattr(request, "gpus", lambda: DIFFERENT)
    if visible is not None:
        cards.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert resolve_device(asked)[1] == DIFFERENT[1]


def test_a_driver_without_cards_means_the_cpu(cards):
    cards.setattr(request, "gpus", list)
    assert resolve_device("auto") == ("cpu", None)


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
        ("narrowed", "batchsize", "did you mean batch_size?"),
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
