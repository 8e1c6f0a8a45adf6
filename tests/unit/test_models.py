"""The built-in workloads, as autotune calls them: what they make, real training steps, and a user's own data."""

from __future__ import annotations

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
from autotune import training, workload
from autotune.records import DataRef, WorkloadRef
from autotune.workload import Context

MODELS = Path(autotune.__file__).parent.parent / "models"
#: Of each: what makes it small, and the side of its images.
SMALL: dict[str, tuple[dict[str, str], int | None]] = {
    "classifier_small": ({}, 40),
    "ddpm_unet": ({}, 20),
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


@pytest.mark.parametrize("name", SMALL)
def test_a_workload_trains(loaded: Loaded, name: str) -> None:
    found = loaded(name)
    assert all(np.isfinite(losses(found, context(found, name))))


@pytest.mark.parametrize("knobs", [{"attention": "written out"}, {"checkpointing": True}])
def test_knobs_that_change_no_maths_change_none(loaded: Loaded, knobs: dict[str, Any]) -> None:
    found = loaded("gpt")
    plain = losses(found, context(found, "gpt"))
    assert losses(found, context(found, "gpt", **knobs)) == pytest.approx(plain, rel=1e-4)


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


OWN = {"classifier_small": pictures, "ddpm_unet": pictures, "gpt": tokens, "seresnet_audio": sounds}


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
