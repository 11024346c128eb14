"""Images compared: peak signal-to-noise ratio and structural similarity, both by scikit-image.

The structural similarity is the mean of that of Wang, Bovik, Sheikh and Simoncelli, "Image quality assessment: from
error visibility to structural similarity" (2004), with their Gaussian window. It is given at four scales: of the
images as they are, and averaged over squares of 2, 4 and 8 pixels, where only coarse structure is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from omniplat.errors import BackendNotInstalledError, UsageError
from omniplat.registry import is_installed
from omniplat.tools.compare import Comparison, Unmatched, in_both

if TYPE_CHECKING:
    from PIL import Image

#: Sides of the squares that are averaged before the structural similarity is taken.
SCALES = (1, 2, 4, 8)
#: Files that are taken for images, by their ending.
SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"})

_LARGEST = 255
_SIGMA = 1.5
#: Pixels of the Gaussian window's side: 3.5 standard deviations on each side of the middle, as scikit-image cuts it.
_WINDOW = 11
#: Pillow's modes with eight bits for each channel.
_MODES = ("L", "LA", "RGB", "RGBA")


@dataclass(frozen=True, slots=True)
class ImageDistance:
    """`psnr` in dB, infinite for equal images. `ssim`: scale -> mean structural similarity, 1 for equal images;
    scales at which the image is smaller than the window are absent."""

    name: str
    psnr: float
    ssim: Mapping[int, float]


def compare_images(a: Path, b: Path) -> Comparison[ImageDistance]:
    """Compare two image files, or two folders of them by their paths inside.

    Raises BackendNotInstalledError without scikit-image or Pillow, UsageError for a file that cannot be read, is no
    single image of eight bits a channel, or is too small to be compared.
    """
    _require_libraries()
    unmatched: list[Unmatched] = []
    found = []
    for name, first, second in in_both(_images(a), _images(b, like=a), unmatched):
        one, other = _read(first), _read(second)
        if one.shape != other.shape:
            unmatched.append(Unmatched(name, f"{_sizes(one)} in A, {_sizes(other)} in B"))
        else:
            found.append(distance(name, one, other))
    return Comparison(tuple(found), tuple(unmatched))


def distance(name: str, a: NDArray[np.uint8], b: NDArray[np.uint8]) -> ImageDistance:
    """The figures of two images of the same shape, uint8 [height, width, channels]."""
    _require_libraries()
    from skimage.metrics import peak_signal_noise_ratio

    psnr = inf if np.array_equal(a, b) else float(peak_signal_noise_ratio(a, b, data_range=_LARGEST))
    fitting = [scale for scale in SCALES if min(a.shape[:2]) // scale >= _WINDOW]
    if not fitting:
        raise UsageError(f"{name}: {_sizes(a)} is too small: structural similarity needs {_WINDOW} x {_WINDOW}")
    return ImageDistance(name, psnr, {scale: _similarity(a, b, scale) for scale in fitting})


def _similarity(a: NDArray[np.uint8], b: NDArray[np.uint8], scale: int) -> float:
    from skimage.metrics import structural_similarity
    from skimage.transform import downscale_local_mean

    height, width = (side // scale * scale for side in a.shape[:2])
    one, other = (downscale_local_mean(image[:height, :width], (scale, scale, 1)) for image in (a, b))
    return float(
        structural_similarity(
            one,
            other,
            data_range=_LARGEST,
            channel_axis=-1,
            gaussian_weights=True,
            sigma=_SIGMA,
            use_sample_covariance=False,
        )
    )


def _require_libraries() -> None:
    for library in ("pillow", "scikit-image"):
        if not is_installed(library):
            raise BackendNotInstalledError("images", library, 'pip install "omniplat[quantize]"', kind="comparison")


def _images(path: Path, like: Path | None = None) -> dict[str, Path]:
    """Images by name: a folder's by their paths inside it, a single file by its own name or that of `like`."""
    if not path.exists():
        raise UsageError(f"{path} does not exist")
    if path.is_file():
        return {(like or path).name: path}
    return {file.relative_to(path).as_posix(): file for file in sorted(image_files(path))}


def image_files(folder: Path) -> Iterator[Path]:
    """The images in a folder and below."""
    return (file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())


def _read(path: Path) -> NDArray[np.uint8]:
    """uint8 [height, width, channels]; palettes and black-and-white become RGB."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            return _pixels(image, path)
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as exc:
        raise UsageError(f"{path} cannot be read as an image: {exc}") from exc


def _pixels(image: Image.Image, path: Path) -> NDArray[np.uint8]:
    frames = getattr(image, "n_frames", 1)
    if frames != 1:
        raise UsageError(f"{path} holds {frames} images; one is compared with one")
    loaded = image.convert("RGB") if image.mode in ("1", "P") else image
    if loaded.mode not in _MODES:
        raise UsageError(f"{path} is of mode {loaded.mode}, not eight bits a channel ({', '.join(_MODES)})")
    pixels: NDArray[np.uint8] = np.asarray(loaded, np.uint8)
    return pixels.reshape(*pixels.shape[:2], -1)


def _sizes(pixels: NDArray[Any]) -> str:
    height, width, channels = pixels.shape
    return f"{width} x {height} in {channels} channel(s)"
