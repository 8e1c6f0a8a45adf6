"""The detection workload, as autotune calls it: chips, box lists of varying length, and real training steps."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from PIL import Image

import autotune
from autotune.base.records import Config, DataRef, WorkloadRef
from autotune.child.probe import images_vary
from autotune.training import step as training
from autotune.workload import contract as workload
from autotune.workload.contract import Context
from tests.support import FakeClock

CTX = Context(device="cpu", batch_size=2, image_size=64, seed=0, data=DataRef(kind="synthetic"), args={"classes": "1"})


@pytest.fixture(scope="module")
def detector() -> Iterator[ModuleType]:
    before = list(sys.path)
    path = Path(autotune.__file__).parent.parent / "models" / "fasterrcnn_resnet50_fpn.py"
    loaded = workload.load(WorkloadRef(name=path.stem, path=str(path), module=path.stem))
    assert isinstance(loaded, ModuleType)
    yield loaded
    # Importing adds the file's folder to the path, where later tests would find the other built-in workloads.
    sys.path[:] = before
    del sys.modules[path.stem]


def test_a_chip_depends_only_on_seed_and_index(detector: ModuleType) -> None:
    image, target = detector.dataset(CTX)[7]
    again, same = detector.dataset(CTX)[7]
    assert torch.equal(image, again)
    assert torch.equal(target["boxes"], same["boxes"])
    assert not torch.equal(image, detector.dataset(CTX)[8][0])
    assert not torch.equal(image, detector.dataset(dataclasses.replace(CTX, seed=1))[7][0])


def test_chips_and_boxes_have_the_shapes_that_detectors_expect(detector: ModuleType) -> None:
    chips = detector.dataset(CTX)
    assert len(chips) == 2000
    for index in range(60):
        image, target = chips[index]
        boxes, labels = target["boxes"], target["labels"]
        assert (image.shape, image.dtype) == ((3, 64, 64), torch.float32)
        assert 0 <= image.min() < image.max() <= 1
        assert (boxes.shape, boxes.dtype) == ((len(boxes), 4), torch.float32)
        assert (labels.tolist(), labels.dtype) == ([1] * len(boxes), torch.int64)
        assert bool((boxes >= 0).all() and (boxes <= 64).all())
        assert bool((boxes[:, 2:] - boxes[:, :2] >= 6).all())


def test_the_number_of_boxes_varies_and_is_sometimes_zero(detector: ModuleType) -> None:
    chips = detector.dataset(CTX)
    counts = {len(chips[index][1]["boxes"]) for index in range(100)}
    assert {0, 1, 3, 5} <= counts
    assert max(counts) <= 12


def test_a_box_contains_the_target_of_its_chip(detector: ModuleType) -> None:
    chips = detector.dataset(dataclasses.replace(CTX, image_size=128))
    inside, outside = [], []
    for index in range(20):
        image, target = chips[index]
        covered = torch.zeros(128, 128, dtype=torch.bool)
        for x0, y0, x1, y1 in target["boxes"].int().tolist():
            covered[y0:y1, x0:x1] = True
        inside.append(image[0][covered])
        outside.append(image[0][~covered])
    # Clutter alone (gamma speckle with four looks) stays below 0.65 of the scale, which is ten times its mean power.
    assert torch.cat(outside).max() < 0.65
    assert torch.cat(inside).max() > 0.8


def test_a_batch_separates_images_and_box_lists_and_counts_its_chips(detector: ModuleType) -> None:
    chips = detector.dataset(CTX)
    images, targets = batch = detector.collate(CTX)([chips[index] for index in range(3)])
    assert [tuple(image.shape) for image in images] == [(3, 64, 64)] * 3
    assert [target["boxes"].shape[1] for target in targets] == [4] * 3
    assert detector.samples(CTX, batch) == 3


def test_chips_have_the_requested_size(detector: ModuleType) -> None:
    model = detector.model(CTX)
    images, _ = model.transform([torch.rand(3, 64, 64), torch.rand(3, 64, 64)])
    assert tuple(images.tensors.shape) == (2, 3, 64, 64)


def test_only_the_box_lists_vary_so_that_cudnn_may_benchmark(detector: ModuleType) -> None:
    assert detector.VARYING_SHAPES
    assert images_vary(detector.dataset(CTX), detector.collate(CTX), batch_size=2, seed=0, clock=FakeClock()) is False


def test_after_backward_clips_the_gradients(detector: ModuleType) -> None:
    model = torch.nn.Linear(4, 4)
    model.weight.grad = torch.full((4, 4), 100.0)
    detector.after_backward(CTX, model)
    assert model.weight.grad.norm() == pytest.approx(1.0, abs=1e-3)


# Two of the four combinations cover each value once; a step takes seconds on two cores.
@pytest.mark.slow
@pytest.mark.parametrize(("precision", "memory_format"), [("fp32", "contiguous"), ("bf16", "channels_last")])
def test_a_step_trains_with_and_without_boxes(detector: ModuleType, precision: str, memory_format: str) -> None:
    config: Config = {"precision": precision, "memory_format": memory_format, "batch_size": 2}
    chips = detector.dataset(CTX)
    empty = next(index for index in range(2000) if not len(chips[index][1]["boxes"]))
    full = next(index for index in range(2000) if len(chips[index][1]["boxes"]) > 2)
    step = training.build(detector, CTX, config)
    before = [parameter.detach().clone() for parameter in step.model.parameters()]
    loss = step(detector.collate(CTX)([chips[empty], chips[full]]))
    assert (loss.shape, loss.dtype) == ((), torch.float32)
    assert torch.isfinite(loss)
    parameters = list(step.model.parameters())
    assert all(torch.isfinite(parameter).all() for parameter in parameters)
    moved = sum(not torch.equal(old, new) for old, new in zip(before, parameters, strict=True))
    assert moved > 0.9 * len(parameters)
    # Training must work for a batch without targets, too.
    assert torch.isfinite(step(detector.collate(CTX)([chips[empty], chips[empty]])))


def test_the_loader_makes_batches(detector: ModuleType) -> None:
    batch = next(iter(training.open_loader(detector, CTX, {"batch_size": 2}, worker_start_method="fork")))
    assert detector.samples(CTX, batch) == 2
    assert all(target["boxes"].shape[1] == 4 for target in batch[1])


def coco(folder: Path, **changes: object) -> Context:
    """Write a set of two images; return a context with it."""
    for number, size in enumerate(((100, 50), (64, 64))):
        path = folder / "train2017" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", size).save(path)
    notes = {
        "images": [{"id": 40 + number, "file_name": f"{number}.jpg"} for number in range(2)],
        "categories": [{"id": 7}, {"id": 3}],
        "annotations": [
            {"image_id": 40, "category_id": 3, "bbox": [50, 0, 25, 50]},
            {"image_id": 40, "category_id": 7, "bbox": [0, 0, 10, 0.2]},
            {"image_id": 40, "category_id": 7, "bbox": [0, 0, 100, 50], "iscrowd": 1},
        ],
        **changes,
    }
    (folder / "annotations").mkdir()
    (folder / "annotations" / "instances_train2017.json").write_text(json.dumps(notes))
    (folder / "annotations" / "instances_val2017.json").write_text("{}")
    return dataclasses.replace(CTX, data=DataRef(kind="folder", path=str(folder)), args={"classes": "2"})


@pytest.mark.slow
def test_a_set_in_cocos_layout_is_read(detector: ModuleType, tmp_path: Path) -> None:
    ctx = coco(tmp_path)
    images = detector.dataset(ctx)
    image, target = images[0]
    # Brought to one size, and the box with it; a crowd and a box of no extent are left out.
    assert tuple(image.shape) == (3, 64, 64) and image.dtype == torch.float32
    assert target["boxes"].tolist() == [[32, 0, 48, 64]] and target["labels"].tolist() == [2]
    assert images[1][1]["boxes"].shape == (0, 4)
    batch = next(iter(training.open_loader(detector, ctx, {"batch_size": 2}, worker_start_method="fork")))
    assert torch.isfinite(training.build(detector, ctx, {"batch_size": 2})(batch))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"annotations": [{"image_id": 99, "category_id": 3, "bbox": [0, 0, 9, 9]}]}, "not in COCO's layout.*99"),
        ({"annotations": [{"image_id": 40}]}, "not in COCO's layout.*bbox"),
        ({"categories": [{"id": number} for number in range(90)]}, "90 categories: --arg classes=90"),
        ({"images": None}, "not in COCO's layout"),
    ],
)
def test_annotations_that_cannot_be_used_are_one_sentence(
    detector: ModuleType, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        detector.dataset(coco(tmp_path, **changes))


def test_a_folder_without_annotations_is_told_the_layout(detector: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has none: DIR/annotations/instances_NAME.json"):
        detector.dataset(dataclasses.replace(CTX, data=DataRef(kind="folder", path=str(tmp_path))))
