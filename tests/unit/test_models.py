"""The built-in workloads, as autotune calls them: what they make, real training steps, and a user's own data."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import autotune
from autotune.base.records import DataRef, WorkloadRef
from autotune.training import step as training
from autotune.workload import contract as workload
from autotune.workload.contract import Context

MODELS = Path(autotune.__file__).parent.parent / "models"
#: Of each: what makes it small, and the side of its images.
SMALL: dict[str, tuple[dict[str, str], int | None]] = {
    "classifier_small": ({}, 40),
    "ddpm_unet": ({}, 20),
    "inception_v3": ({}, 139),
    "resnet50": ({}, 32),
    "vit_b_16": ({"classes": "10"}, 32),
    "gpt": ({"depth": "2", "width": "32", "heads": "2", "block": "16", "vocabulary": "100"}, None),
    "seresnet_audio": ({"seconds": "0.5"}, None),
}

Loaded = Callable[[str], ModuleType]


@pytest.fixture
def loaded() -> Iterator[Loaded]:
    before, names = list(sys.path), []

    def load(name: str) -> ModuleType:
        names.append(name)
        found = workload.load(WorkloadRef(name=name, path=str(MODELS / f"{name}.py"), module=name))
        assert isinstance(found, ModuleType)
        return found

    yield load
    # Importing adds the file's folder to the path, where later tests would find the other built-in workloads.
    sys.path[:] = before
    for name in names:
        del sys.modules[name]
    importlib.invalidate_caches()


def context(found: ModuleType, name: str, data: DataRef | None = None, **knobs: Any) -> Context:
    args, size = SMALL[name]
    return Context(
        device="cpu",
        batch_size=2,
        image_size=size,
        seed=0,
        data=data or DataRef(kind="synthetic" if getattr(found, "DATA", None) else "none"),
        args={**getattr(found, "ARGS", {}), **args},
        knobs={**{own: values[0] for own, values in getattr(found, "KNOBS", {}).items()}, **knobs},
    )


def losses(found: ModuleType, ctx: Context, steps: int = 2) -> list[float]:
    """Train on one batch; return the losses."""
    torch.manual_seed(0)
    loader = training.open_loader(found, ctx, {"batch_size": ctx.batch_size}, worker_start_method="fork")
    step = training.build(found, ctx, {"batch_size": ctx.batch_size})
    batch = next(iter(loader))
    return [float(step(batch)) for _ in range(steps)]


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_workload_trains(loaded: Loaded, name: str) -> None:
    found = loaded(name)
    assert all(np.isfinite(losses(found, context(found, name))))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("gpt", {"attention": "written out"}),
        ("gpt", {"checkpointing": True}),
        ("vit_b_16", {"attention": "formula", "checkpointing": True}),
    ],
)
def test_knobs_that_change_no_maths_change_none(loaded: Loaded, name: str, knobs: dict[str, Any]) -> None:
    found = loaded(name)
    plain = losses(found, context(found, name))
    assert losses(found, context(found, name, **knobs)) == pytest.approx(plain, rel=1e-4)
    names = [list(found.model(context(found, name, **more)).state_dict()) for more in ({}, knobs)]
    assert names[0] == names[1], "weights are found by their names"


@pytest.mark.slow
def test_the_auxiliary_head_of_inception_counts_where_it_fits(loaded: Loaded) -> None:
    found = loaded("inception_v3")
    size = found.AUXILIARY_SIZE
    ctx = dataclasses.replace(context(found, "inception_v3"), image_size=size)
    batch = (torch.randn(2, 3, size, size), torch.tensor([0, 1]))
    model = found.model(ctx)
    found.loss(ctx, model, batch).backward()
    assert model.AuxLogits is not None and all(p.grad is not None for p in model.AuxLogits.parameters())


def test_an_image_without_whole_patches_is_refused(loaded: Loaded) -> None:
    found = loaded("vit_b_16")
    with pytest.raises(ValueError, match="100 pixels have no whole number of 16-pixel patches: --image-size 96"):
        found.model(dataclasses.replace(context(found, "vit_b_16"), image_size=100))


def test_an_equal_error_rate_is_where_both_errors_meet(loaded: Loaded) -> None:
    rate = loaded("seresnet_audio").equal_error_rate
    labels = np.array([0, 0, 0, 0, 1, 1, 1, 1])
    assert rate(np.arange(8.0), labels) == 0 and rate(-np.arange(8.0), labels) == 1
    # One spoofed sound scores below a person's, and that one above it.
    assert rate(np.array([0, 1, 2, 5, 3, 6, 7, 8.0]), labels) == 0.25
    assert rate(np.zeros(8), labels) == 0.5


@pytest.mark.slow
def test_a_metric_looks_at_other_sounds_and_leaves_the_training_alone(loaded: Loaded) -> None:
    found = loaded("seresnet_audio")
    ctx = context(found, "seresnet_audio")
    model = found.model(ctx).eval()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with torch.no_grad():
        first, second = found.metric(ctx, model), found.metric(ctx, model)
    assert 0 <= first == second <= 1 and torch.equal(before, torch.get_rng_state())


def test_a_language_models_samples_are_tokens(loaded: Loaded) -> None:
    found = loaded("gpt")
    ctx = context(found, "gpt")
    loader = training.open_loader(found, ctx, {"batch_size": 2}, worker_start_method="fork")
    tokens, following = batch = next(iter(loader))
    assert found.samples(ctx, batch) == 32 and tokens.max() < 100
    assert torch.equal(tokens[:, 1:], following[:, :-1])


def test_the_average_of_a_diffusion_follows_its_network(loaded: Loaded) -> None:
    found = loaded("ddpm_unet")
    ctx = context(found, "ddpm_unet")
    step = training.build(found, ctx, {"batch_size": 2})
    before = [p.clone() for p in step.model.average.parameters()]
    step(torch.zeros(2, 3, 20, 20))
    pairs = zip(before, step.model.average.parameters(), strict=True)
    assert any(not torch.equal(old, new) for old, new in pairs)
    assert not any(p.requires_grad for p in step.model.average.parameters())


def wav(path: Path, rate: int = 16_000) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.zeros(rate, dtype="<i2").tobytes())


def picture(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (50, 40)).save(path)


def sounds(folder: Path) -> None:
    for name in ("bonafide/one.wav", "spoof/deep/two.wav", "spoof/three.wav"):
        wav(folder / name)


def pictures(folder: Path) -> None:
    for name in ("a/1.png", "a/2.png", "b/3.png"):
        picture(folder / name)


def tokens(folder: Path) -> None:
    (np.arange(1000) % 100).astype(np.uint16).tofile(folder / "train.bin")


OWN = {
    "classifier_small": pictures,
    "inception_v3": pictures,
    "vit_b_16": pictures,
    "ddpm_unet": pictures,
    "gpt": tokens,
    "seresnet_audio": sounds,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_a_users_own_data_is_what_is_trained_on(loaded: Loaded, tmp_path: Path, name: str) -> None:
    OWN[name](tmp_path)
    found = loaded(name)
    ctx = context(found, name, DataRef(kind="folder", path=str(tmp_path)))
    assert len(found.dataset(ctx)) in (3, 62)
    assert all(np.isfinite(losses(found, ctx)))


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("classifier_small", lambda folder: None, "Couldn't find any class folder"),
        ("ddpm_unet", lambda folder: None, "Couldn't find any class folder"),
        ("gpt", lambda folder: None, "there is no .*train.bin"),
        ("gpt", lambda folder: np.full(50, 100, np.uint16).tofile(folder / "train.bin"), "beyond vocabulary=100"),
        ("seresnet_audio", lambda folder: wav(folder / "spoof" / "one.wav"), "no folders bonafide and spoof"),
    ],
)
def test_data_of_another_layout_is_one_sentence(
    loaded: Loaded, tmp_path: Path, name: str, make: Callable[[Path], None], message: str
) -> None:
    make(tmp_path)
    found = loaded(name)
    with pytest.raises((OSError, ValueError), match=message):
        found.dataset(context(found, name, DataRef(kind="folder", path=str(tmp_path))))


def test_a_sound_of_another_kind_is_named(loaded: Loaded, tmp_path: Path) -> None:
    sounds(tmp_path)
    wav(tmp_path / "bonafide" / "one.wav", rate=8_000)
    found = loaded("seresnet_audio")
    data = found.dataset(context(found, "seresnet_audio", DataRef(kind="folder", path=str(tmp_path))))
    with pytest.raises(ValueError, match=r"one.wav is no WAV file of 16 bits at 16000 Hz"):
        data[0]


def test_the_first_classes_of_many_are_trained_on(loaded: Loaded, tmp_path: Path) -> None:
    pictures(tmp_path)
    found = loaded("resnet50")
    ctx = context(found, "resnet50", DataRef(kind="folder", path=str(tmp_path)))
    assert len(found.dataset(ctx)) == 3
    few = dataclasses.replace(ctx, args={**ctx.args, "classes": "1"})
    images = found.dataset(few)
    assert len(images) == 2 and {label for _, label in images} == {0}
    assert found.model(few).fc.out_features == 1


@pytest.mark.slow
@pytest.mark.parametrize("mixing", ["mixup", "cutmix"])
@pytest.mark.parametrize("where", ["host", "device"])
def test_images_are_mixed_where_it_is_said(loaded: Loaded, mixing: str, where: str) -> None:
    found = loaded("resnet50")
    plain = context(found, "resnet50")
    ctx = dataclasses.replace(plain, args={**plain.args, "mixing": mixing, "mixing_on": where, "classes": "10"})
    _, labels = found.collate(ctx)([(torch.randn(3, 32, 32), 1), (torch.randn(3, 32, 32), 2)])
    assert labels.shape == ((2, 10) if where == "host" else (2,))
    assert all(np.isfinite(losses(found, ctx)))


@pytest.mark.parametrize("wrong", [{"mixing": "mixin"}, {"mixing": "mixup", "mixing_on": "gpu"}])
def test_a_mixing_that_there_is_not_is_refused(loaded: Loaded, wrong: dict[str, str]) -> None:
    found = loaded("resnet50")
    plain = context(found, "resnet50")
    with pytest.raises(ValueError, match=r"mixing.* is (not known|neither)"):
        losses(found, dataclasses.replace(plain, args={**plain.args, **wrong}))


def test_decoders_and_where_numbers_are_made_change_no_maths(loaded: Loaded, tmp_path: Path) -> None:
    for name in ("a/1.png", "b/2.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(0).integers(0, 255, (48, 48, 3), dtype=np.uint8)
        Image.fromarray(noise).save(tmp_path / name)
    found = loaded("resnet50")
    data = DataRef(kind="folder", path=str(tmp_path))
    seen = {}
    for decoder in ("pillow", "torchvision"):
        for floats in ("host", "device"):
            ctx = context(found, "resnet50", data, decoder=decoder, floats=floats)
            torch.manual_seed(3)
            image, label = found.dataset(ctx)[0]
            assert image.dtype == (torch.float32 if floats == "host" else torch.uint8)
            torch.manual_seed(0)
            model = found.model(ctx).eval()
            batch = (image[None], torch.tensor([label]))
            seen[decoder, floats] = found.loss(ctx, model, batch).item()
    assert list(seen.values()) == pytest.approx([seen["pillow", "host"]] * 4, rel=1e-4)


def test_what_is_no_image_is_named_by_either_decoder(loaded: Loaded, tmp_path: Path) -> None:
    pictures(tmp_path)
    (tmp_path / "a" / "1.png").write_bytes(b"no image")
    found = loaded("resnet50")
    for decoder in ("pillow", "torchvision"):
        images = found.dataset(context(found, "resnet50", DataRef(kind="folder", path=str(tmp_path)), decoder=decoder))
        with pytest.raises(OSError, match="1.png cannot be decoded"):
            images[0]


def test_numbers_made_on_the_device_cannot_be_mixed_on_the_host(loaded: Loaded, tmp_path: Path) -> None:
    pictures(tmp_path)
    found = loaded("resnet50")
    ctx = context(found, "resnet50", DataRef(kind="folder", path=str(tmp_path)), floats="device")
    ctx = dataclasses.replace(ctx, args={**ctx.args, "mixing": "mixup", "mixing_on": "host"})
    with pytest.raises(ValueError, match="mixes numbers, and workload.floats=device makes them later"):
        found.dataset(ctx)
