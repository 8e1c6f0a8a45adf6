"""Generates photograph-like JPEGs from random numbers. As a command, writes one worker's share of a set.

`autotune.workload.data.sets` runs ``python -m autotune.workload.data.photographs FOLDER SEED FIRST:COUNT:STEP`` and
never imports this module, which keeps numpy and Pillow out of the parent.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

CLASSES = 16
LONG_SIDE, SHORT_SIDE = 500, 375
#: ImageNet's files have about 4.7 bits per pixel. Photographs of this contrast reach that at this JPEG quality.
QUALITY = 92


def photograph(seed: int, index: int) -> bytes:
    """Generate one JPEG, a function only of ``(seed, index)`` and the installed numpy and Pillow.

    500×375 pixels, one in four upright; about 110 KB, between 50 and 160. The image combines three random fields with
    an amplitude spectrum near 1/f (Field 1987, J. Opt. Soc. Am. A 4:2379), one for luminance and two much weaker ones
    for opponent colours, along which natural colour decorrelates (Ruderman et al. 1998, J. Opt. Soc. Am. A 15:2036),
    with sharp-edged objects that occlude each other and have power-law sizes (Lee, Mumford & Huang 2001, Int. J.
    Comput. Vis. 41:35).
    """
    rng = np.random.default_rng((seed, index))
    width, height = (SHORT_SIDE, LONG_SIDE) if rng.random() < 0.25 else (LONG_SIDE, SHORT_SIDE)

    cycles = np.hypot(np.fft.fftfreq(height, 1 / height)[:, None], np.fft.rfftfreq(width, 1 / width)[None, :])
    cycles[0, 0] = np.inf  # the mean is set below
    amplitude = (cycles ** -rng.uniform(0.9, 1.2)).astype(np.float32)
    real, imaginary = rng.standard_normal((2, 3, *amplitude.shape), dtype=np.float32)
    fields = np.fft.irfft2((real + 1j * imaginary) * amplitude, s=(height, width))
    fields /= fields.std(axis=(1, 2), keepdims=True)

    # Rows: luminance, red against blue, green against both. Each holds a field's contribution to R, G and B.
    opponents = np.array([[1.0, 1.0, 1.0], [0.2, 0.0, -0.2], [-0.06, 0.12, -0.06]])
    objects = _objects(rng, width, height)
    gain = rng.uniform(0.4, 1.6, 256)[objects] * rng.uniform(30, 57)
    colour = (rng.normal(0, 1, (256, 3)) * (40, 90, 60) @ opponents)[objects]
    pixels = gain[..., None] * np.tensordot(fields, opponents, axes=(0, 0)) + colour + rng.uniform(95, 145)

    stream = io.BytesIO()
    image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    image.save(stream, "JPEG", quality=QUALITY)
    return stream.getvalue()


def _objects(rng: np.random.Generator, width: int, height: int) -> npt.NDArray[np.uint8]:
    """Draw a mask (height, width) of the object visible at each pixel: 0 is the background, later ones are nearer."""
    mask = Image.new("L", (width, height))
    draw = ImageDraw.Draw(mask)
    for number in range(1, int(rng.integers(10, 40))):
        radius = min(8 * (1 + rng.pareto(1.2)), SHORT_SIDE / 2)
        x, y = rng.uniform(0, width), rng.uniform(0, height)
        if rng.random() < 0.5:
            a, b = radius * rng.uniform(0.4, 1, 2)
            draw.ellipse((x - a, y - b, x + a, y + b), fill=number)
        else:
            turns = np.sort(rng.uniform(0, 2 * np.pi, rng.integers(3, 8)))
            draw.polygon([(x + radius * np.cos(t), y + radius * np.sin(t)) for t in turns], fill=number)
    return np.asarray(mask)


def write_share(folder: Path, seed: int, indices: range, reports: int) -> None:
    """Write the images of ``indices`` as ``class_NN/NNNN.jpg``, and one JSON line per image to a descriptor.

    A line holds a file's ``path``, ``size_bytes`` and ``sha256``, or ``errno`` and ``error`` if writing failed.
    Returns early if the pipe is closed, because the parent is gone then.
    """
    for index in indices:
        path = f"class_{index % CLASSES:02d}/{index:04d}.jpg"
        content = photograph(seed, index)
        report: dict[str, str | int | None]
        try:
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_bytes(content)
            report = {"path": path, "size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        except OSError as error:
            report = {"errno": error.errno, "error": error.strerror or str(error)}
        try:
            os.write(reports, json.dumps(report).encode() + b"\n")
        except BrokenPipeError:
            return


if __name__ == "__main__":
    folder_name, seed_text, share = sys.argv[1:]
    write_share(Path(folder_name), int(seed_text), range(*map(int, share.split(":"))), sys.stdout.fileno())
