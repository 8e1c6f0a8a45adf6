"""The files that serve many models by name: detection, segmentation and timm, on data of their own and a user's."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from autotune.base.records import DataRef
from autotune.training import step as training
from autotune.workload import contract as workload
from autotune.workload.catalog import find_workload
from autotune.workload.contract import Context

#: One of each kind of target and of each interface.
NAMES = (
    "ssdlite320_mobilenet_v3_large",
    "maskrcnn_resnet50_fpn",
    "keypointrcnn_resnet50_fpn",
    "lraspp_mobilenet_v3_large",
    "fcn_resnet50",
)
SIZE = 64

Made = Callable[..., tuple[ModuleType, Context]]


@pytest.fixture
def made() -> Iterator[Made]:
    """``made(name, data, **args)``: the workload of a model's name, and a context."""
    before, names = list(sys.path), []

    def make(name: str, data: DataRef | None = None, **args: str) -> tuple[ModuleType, Context]:
        ref = find_workload(name, args)
        names.append(ref.module)
        found = workload.load(ref)
        assert isinstance(found, ModuleType)
        data = data or DataRef(kind="synthetic" if getattr(found, "DATA", None) else "none")
        given = workload.args_of(found, ref)
        return found, Context(device="cpu", batch_size=2, image_size=SIZE, seed=0, data=data, args=given)

    yield make
    # Importing adds the file's folder to the path, where later tests would find the other built-in workloads.
    sys.path[:] = before
    for name in names:
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


def loss(found: ModuleType, ctx: Context) -> float:
    """Return the loss of a step on the first batch."""
    torch.manual_seed(0)
    loader = training.open_loader(found, ctx, {"batch_size": 2}, worker_start_method="fork")
    return float(training.build(found, ctx, {"batch_size": 2})(next(iter(loader))))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_model_trains_by_its_name(made: Made, name: str) -> None:
    assert np.isfinite(loss(*made(name)))


def coco(folder: Path, kind: str) -> DataRef:
    """Write a set of two images in COCO's layout, the second without an object."""
    for number in range(2):
        path = folder / "train" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (128, 64)).save(path)
    note = {
        "image_id": 1,
        "category_id": 5,
        "bbox": [10, 20, 40, 30],
        "segmentation": [[10, 20, 50, 20, 50, 50, 10, 50]],
        "keypoints": [20, 30, 2] * 17,
    }
    told = {
        "images": [{"id": 1 + n, "file_name": f"{n}.png"} for n in range(2)],
        "categories": [{"id": 5}],
        "annotations": [note],
    }
    (folder / "annotations").mkdir()
    (folder / "annotations" / f"{kind}_train.json").write_text(json.dumps(told))
    return DataRef(kind="folder", path=str(folder))


def test_masks_and_keypoints_are_read_in_cocos_layout(made: Made, tmp_path: Path) -> None:
    (tmp_path / "masks").mkdir()
    (tmp_path / "points").mkdir()
    found, ctx = made("maskrcnn_resnet50_fpn", coco(tmp_path / "masks", "instances"))
    samples = found.dataset(ctx)
    # An image without an object teaches these models nothing, and some of them do not take it.
    assert len(samples) == 1
    image, target = samples[0]
    assert tuple(image.shape) == (3, SIZE, SIZE)
    assert target["boxes"].tolist() == [[5, 20, 25, 50]] and target["labels"].tolist() == [1]
    assert target["masks"].shape == (1, SIZE, SIZE)
    assert target["masks"][0, 25:45, 8:22].all() and not target["masks"][0, :15].any()
    found, ctx = made("keypointrcnn_resnet50_fpn", coco(tmp_path / "points", "person_keypoints"))
    assert found.dataset(ctx)[0][1]["keypoints"][0, 0].tolist() == [10, 30, 2]


def segmented(folder: Path, mask: Any) -> DataRef:
    for name, image in (("images/a.jpg", Image.new("RGB", (40, 30))), ("masks/a.png", Image.fromarray(mask))):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        image.save(folder / name)
    return DataRef(kind="folder", path=str(folder))


def test_images_with_masks_are_read(made: Made, tmp_path: Path) -> None:
    mask = np.full((30, 40), 255, np.uint8)
    mask[10:, :] = 3
    found, ctx = made("lraspp_mobilenet_v3_large", segmented(tmp_path, mask))
    image, target = found.dataset(ctx)[0]
    assert tuple(image.shape) == (3, SIZE, SIZE) and image.dtype == torch.float32
    assert target.shape == (SIZE, SIZE) and target.dtype == torch.int64
    assert set(target.unique().tolist()) <= {3, 255}


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.full((30, 40), 21, np.uint8), "a pixel of class 21, and --arg classes=21 counts from 0"),
        (np.zeros((10, 10), np.uint8), r"a mask of \(10, 10\) for an image of \(30, 40\)"),
    ],
)
def test_a_mask_that_does_not_fit_is_named(made: Made, tmp_path: Path, mask: Any, message: str) -> None:
    found, ctx = made("lraspp_mobilenet_v3_large", segmented(tmp_path, mask))
    with pytest.raises(ValueError, match=message):
        found.dataset(ctx)[0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("maskrcnn_resnet50_fpn", "has none: DIR/annotations/instances_NAME.json"),
        ("keypointrcnn_resnet50_fpn", "has none: DIR/annotations/person_keypoints_NAME.json"),
        ("fcn_resnet50", "has no image in .*images with a mask in .*masks"),
    ],
)
def test_a_folder_of_another_layout_is_one_sentence(made: Made, tmp_path: Path, name: str, message: str) -> None:
    found, ctx = made(name, DataRef(kind="folder", path=str(tmp_path)))
    with pytest.raises(FileNotFoundError, match=message):
        found.dataset(ctx)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["resnet18", "vit_tiny_patch16_224"])
def test_a_model_of_timm_trains(made: Made, architecture: str) -> None:
    pytest.importorskip("timm", reason="timm is an extra of its own")
    assert np.isfinite(loss(*made(f"timm:{architecture}")))


def test_a_model_that_timm_has_not_is_named_with_those_near_it(made: Made) -> None:
    pytest.importorskip("timm", reason="timm is an extra of its own")
    found, ctx = made("timm:resnet1800")
    with pytest.raises(ValueError, match="has no model 'resnet1800'; near it: "):
        found.model(ctx)
