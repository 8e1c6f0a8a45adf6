"""Generated photographs: their size in bytes, and their likeness to natural images."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from autotune.workload.data.photographs import photograph


@pytest.fixture(scope="module")
def photographs() -> list[bytes]:
    return [photograph(0, index) for index in range(24)]


def test_a_photograph_depends_only_on_its_seed_and_index() -> None:
    assert photograph(3, 5) == photograph(3, 5)
    assert len({photograph(3, 5), photograph(3, 6), photograph(4, 5)}) == 3


def test_photographs_have_the_size_of_imagenets(photographs: list[bytes]) -> None:
    sizes = [len(content) for content in photographs]
    assert 100_000 < np.mean(sizes) < 120_000
    assert min(sizes) > 40_000
    assert max(sizes) < 180_000


def test_photographs_are_colour_jpegs_of_both_orientations(photographs: list[bytes]) -> None:
    images = [Image.open(io.BytesIO(content)) for content in photographs]
    assert {(image.format, image.mode) for image in images} == {("JPEG", "RGB")}
    assert {image.size for image in images} == {(500, 375), (375, 500)}


def test_photographs_have_a_natural_spectrum_and_correlated_colours(photographs: list[bytes]) -> None:
    slopes, correlations = [], []
    for content in photographs:
        pixels = np.asarray(Image.open(io.BytesIO(content)), dtype=np.float64)
        correlations.append(np.corrcoef(pixels[..., 0].ravel(), pixels[..., 1].ravel())[0, 1])
        luminance = pixels.mean(axis=2)
        # A central square, so that cycles per picture mean the same in both directions.
        luminance = luminance[:256, :256] - luminance[:256, :256].mean()
        amplitude = np.abs(np.fft.fft2(luminance * np.outer(np.hanning(256), np.hanning(256))))
        cycles = np.hypot(*np.meshgrid(np.fft.fftfreq(256, 1 / 256), np.fft.fftfreq(256, 1 / 256)))
        band = (cycles >= 4) & (cycles <= 80)
        slopes.append(np.polyfit(np.log(cycles[band]), np.log(amplitude[band]), 1)[0])
    assert -1.4 < np.mean(slopes) < -0.8
    assert np.mean(correlations) > 0.7
