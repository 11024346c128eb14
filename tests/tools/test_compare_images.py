"""Images compared, against values that follow from the definitions. The tests that need Pillow and scikit-image (extra
`quantize`, and in `dev`) are skipped, and say so, where these are not installed."""

from __future__ import annotations

import json
from math import inf, log10
from pathlib import Path

import numpy as np
import pytest

from omniplat.cli.compare import compare_command
from omniplat.errors import BackendNotInstalledError, UsageError
from omniplat.tools import compare_images
from omniplat.tools.compare_images import SCALES, distance

NOISE = np.random.default_rng(0).integers(0, 256, (96, 128, 3), dtype=np.uint8)


@pytest.fixture
def image() -> type:
    pytest.importorskip("skimage", reason="scikit-image is not installed")
    found: type = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    return found


def compare(a: Path, b: Path, *, min_psnr: float | None = None, min_ssim: float | None = None) -> int:
    return compare_command(
        a, b, component=None, max_weight_error=None, min_psnr=min_psnr, min_ssim=min_ssim, json_output=True
    )


def save(image: type, path: Path, pixels: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.fromarray(pixels).save(path)
    return path


@pytest.mark.parametrize(("low", "high"), [(100, 101), (40, 90), (0, 255)])
def test_flat_images_have_the_figures_of_the_definitions(image: type, low: int, high: int) -> None:
    """Between constants the mean squared error is their difference's square, and of the structural similarity only
    the luminance is left: (2 ab + C) / (a² + b² + C) with C = (0.01 * 255)², at every scale."""
    a, b = (np.full((96, 128, 3), level, np.uint8) for level in (low, high))
    found = distance("flat", a, b)
    assert found.psnr == pytest.approx(20 * log10(255 / (high - low)), rel=1e-6)
    luminance = (2 * low * high + 2.55**2) / (low**2 + high**2 + 2.55**2)
    assert found.ssim == pytest.approx(dict.fromkeys(SCALES, luminance), rel=1e-6)


def test_noise_hides_structure_less_at_coarse_scales(image: type) -> None:
    """White noise averages out over squares, a picture does not."""
    rows, columns = np.mgrid[0:128, 0:128]
    smooth = np.repeat((127 + 100 * np.sin(rows / 20) * np.cos(columns / 30))[..., None], 3, axis=2)
    noise = np.random.default_rng(1).normal(0, 20, smooth.shape)
    found = distance("noisy", smooth.astype(np.uint8), np.clip(smooth + noise, 0, 255).astype(np.uint8))
    values = [found.ssim[scale] for scale in SCALES]
    assert values == sorted(values)
    assert values[0] < 0.5 < 0.9 < values[-1]


def test_equal_images(image: type) -> None:
    found = distance("same", NOISE, NOISE)
    assert found.psnr == inf
    assert found.ssim == pytest.approx(dict.fromkeys(SCALES, 1.0))


@pytest.mark.parametrize(("side", "scales"), [(88, 4), (87, 3), (44, 3), (22, 2), (21, 1), (11, 1)])
def test_scales_at_which_the_window_does_not_fit_are_left_out(image: type, side: int, scales: int) -> None:
    found = distance("small", NOISE[:side, :90], NOISE[::-1][:side, :90])
    assert tuple(found.ssim) == SCALES[:scales]


def test_too_small_for_any_scale(image: type) -> None:
    with pytest.raises(UsageError, match="too small"):
        distance("tiny", NOISE[:10], NOISE[:10])


@pytest.mark.parametrize(
    ("bounds", "code"),
    [({}, 0), ({"min_psnr": 48}, 0), ({"min_psnr": 48.2}, 1), ({"min_ssim": 0.99}, 0), ({"min_ssim": 1.0}, 1)],
)
def test_bounds_decide_the_exit_code(
    image: type, bounds: dict[str, float], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One level apart: 48.13 dB."""
    levels = np.minimum(NOISE, 254)
    a, b = save(image, tmp_path / "a.png", levels), save(image, tmp_path / "b.png", levels + 1)
    assert compare(a, b, **bounds) == code
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["kind"], document["unmatched"]) == ("omniplat.compare/1", "images", [])
    assert document["images"][0]["psnr"] == pytest.approx(48.1308, abs=1e-3)
    assert len(document["out_of_bounds"]) == code


def test_folders_are_compared_by_the_paths_inside(
    image: type, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for side, names in (("a", ("x.png", "deep/y.png", "z.png")), ("b", ("x.png", "deep/y.png", "w.png"))):
        for name in names:
            save(image, tmp_path / side / name, NOISE)
    save(image, tmp_path / "b" / "x.png", NOISE[:, :90])
    assert compare(tmp_path / "a", tmp_path / "b") == 1
    document = json.loads(capsys.readouterr().out)
    assert [(item["name"], item["equal"], item["psnr"]) for item in document["images"]] == [("deep/y.png", True, None)]
    reasons = {item["name"]: item["reason"] for item in document["unmatched"]}
    assert set(reasons) == {"x.png", "z.png", "w.png"}
    assert "128 x 96" in reasons["x.png"]
    assert reasons["z.png"] == "only in A"
    assert reasons["w.png"] == "only in B"


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_modes_of_eight_bits(image: type, mode: str, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    image.fromarray(NOISE).convert(mode).save(path)  # type: ignore[attr-defined]
    assert compare(path, path, min_psnr=99, min_ssim=0.999) == 0


def test_what_is_no_single_image_of_eight_bits_is_refused(image: type, tmp_path: Path) -> None:
    good = save(image, tmp_path / "good.png", NOISE)
    deep = save(image, tmp_path / "deep.png", NOISE[..., 0].astype(np.uint16))
    frames = tmp_path / "frames.webp"
    stills = [image.fromarray(NOISE), image.fromarray(255 - NOISE)]  # type: ignore[attr-defined]
    stills[0].save(frames, save_all=True, append_images=stills[1:])
    broken = tmp_path / "broken.png"
    broken.write_bytes(good.read_bytes()[:99])
    for path, text in (
        (tmp_path / "absent.png", "does not exist"),
        (deep, "mode I;16"),
        (frames, "holds 2 images"),
        (broken, "cannot be read"),
    ):
        with pytest.raises(UsageError, match=text):
            compare(good, path)


@pytest.mark.parametrize("library", ["pillow", "scikit-image"])
def test_without_the_libraries_the_line_that_installs_them(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_images, "is_installed", lambda name: name != library)
    with pytest.raises(BackendNotInstalledError, match=rf'{library}.*pip install "omniplat\[quantize\]"'):
        compare_images.compare_images(Path("a.png"), Path("b.png"))


def test_kinds_and_their_bounds_do_not_mix(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text("{}")
    (tmp_path / "checkpoint" / "sample.png").touch()
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "sample.png").touch()
    with pytest.raises(UsageError, match="an image and something else"):
        compare(tmp_path / "checkpoint", tmp_path / "images")
    with pytest.raises(UsageError, match="are for images"):
        compare(tmp_path / "checkpoint", tmp_path / "checkpoint", min_psnr=30)
    for options in ({"component": "vae", "max_weight_error": None}, {"component": None, "max_weight_error": 0.1}):
        with pytest.raises(UsageError, match="are for checkpoints"):
            compare_command(
                tmp_path / "images", tmp_path / "images", min_psnr=None, min_ssim=None, json_output=True, **options
            )
