"""Images of handwritten digits: scikit-learn's bundled 8 x 8 ones, or MNIST from IDX files."""

from __future__ import annotations

import gzip
import importlib.util
import math
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

Images = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]


def load_digits(folder: Path | None) -> tuple[Images, Labels, Images, Labels]:
    """Return `(train images, train labels, test images, test labels)`, the same on every rank.

    Images are `[n, height, width, 1]`, 0 for paper and 1 for ink, minus the mean of the training
    images. Without a folder they are the 1,797 digits that come with scikit-learn, a fifth of
    them reserved for testing; with a folder, MNIST's.
    """
    if folder is None:
        pictures, labels, test_pictures, test_labels = _bundled()
    else:
        pictures, labels = _read_mnist(folder, "train")
        test_pictures, test_labels = _read_mnist(folder, "t10k")
    mean = pictures.mean(dtype=np.float64).astype(np.float32)
    return pictures - mean, labels, test_pictures - mean, test_labels


def _bundled() -> tuple[Images, Labels, Images, Labels]:
    package = importlib.util.find_spec("sklearn")
    if package is None:
        raise SystemExit(
            "the bundled digits are scikit-learn's: pip install scikit-learn, "
            "or pass a folder of MNIST files with --data"
        )
    # Without importing sklearn.datasets, which takes 2 to 3 s of CPU on each rank.
    file = Path(package.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    table = np.loadtxt(file, delimiter=",")
    pixels, labels = table[:, :-1], table[:, -1].astype(np.int64)
    pictures = (pixels.reshape(-1, 8, 8, 1) / 16).astype(np.float32)
    # Shuffled: neighbours in the file were written by the same person.
    order = np.random.default_rng(0).permutation(len(pictures))
    test, train = np.split(order, [len(order) // 5])
    return pictures[train], labels[train], pictures[test], labels[test]


def _read_mnist(folder: Path, part: str) -> tuple[Images, Labels]:
    pixels = _read_idx(folder, f"{part}-images-idx3-ubyte", dimensions=3)
    labels = _read_idx(folder, f"{part}-labels-idx1-ubyte", dimensions=1)
    if len(pixels) != len(labels):
        raise SystemExit(f"--data {folder}: {len(pixels)} {part} images, but {len(labels)} labels")
    return pixels[..., None].astype(np.float32) / np.float32(255), labels.astype(np.int64)


def _read_idx(folder: Path, name: str, dimensions: int) -> npt.NDArray[np.uint8]:
    """Read an IDX file of bytes: a magic number, the dimensions (big-endian), then the data."""
    path = folder / name
    if not path.exists():
        path = folder / f"{name}.gz"
    if not path.exists():
        raise SystemExit(
            f"--data {folder}: neither {name} nor {name}.gz exists; the four MNIST files are "
            "{train,t10k}-{images-idx3,labels-idx1}-ubyte, with or without .gz"
        )
    wrong = SystemExit(
        f"{path} is truncated, or not an IDX file of bytes in {dimensions} dimensions"
    )
    data = path.read_bytes()
    try:
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        magic, *shape = struct.unpack_from(f">{1 + dimensions}I", data)
    except (EOFError, gzip.BadGzipFile, struct.error):
        raise wrong from None
    body = np.frombuffer(data, np.uint8, offset=4 * (1 + dimensions))
    if magic != 0x0800 + dimensions or body.size != math.prod(shape):
        raise wrong
    return body.reshape(shape)
