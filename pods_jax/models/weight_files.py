"""The weight files of a Hugging Face folder: which there are, what their headers hold, and one tensor at a time.

``hf_weights.py`` reads a model through these functions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from pods_jax.json_file import read_object, shown

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Names of the dtypes that are read, by what safetensors calls them."""
SCANNED = 2**18
"""Values looked at together when a tensor is checked, few enough to stay in the processor's cache."""


@dataclass(frozen=True)
class Header:
    """What the head of a weight file says of one tensor.

    Attributes:
        name: Name of the tensor.
        shape: Its shape.
        dtype: Its dtype as safetensors spells it, for example ``BF16``.
        file: The file that holds it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path


@dataclass(frozen=True)
class WeightFiles:
    """The weight files of a folder.

    Attributes:
        files: The files, in the order of their names.
        index: The file that the index gives for each tensor; None where a single file needs no index.
    """

    files: tuple[Path, ...]
    index: Mapping[str, Path] | None


def holds_weights(folder: Path) -> bool:
    """Returns whether a folder holds a model's safetensors weights."""
    return (folder / SINGLE).is_file() or (folder / INDEX).is_file()


def find_weight_files(folder: Path) -> WeightFiles:
    """Returns ``model.safetensors`` of a folder, or the files that its index names.

    Raises:
        FileNotFoundError: The folder holds neither, or lacks a file that the index names.
        ValueError: It holds both, or the index is malformed or names a file outside the folder.
    """
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file() and index.is_file():
        raise ValueError(f"{folder} holds both {SINGLE} and {INDEX}; remove the one that is stale")
    if single.is_file():
        return WeightFiles((single,), None)
    if not index.is_file():
        pickled = sorted(file.name for file in folder.glob("*.bin"))
        hint = f"; convert {', '.join(pickled)} to safetensors first, pickled weights are not read" if pickled else ""
        raise FileNotFoundError(f"{folder} holds neither {SINGLE} nor {INDEX}{hint}")
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has weight_map={shown(weight_map)}, expected an object of tensor and file names")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(f"{index} gives {shown(name)} for {tensor}, expected a .safetensors file of the same folder")
    files = tuple(folder / name for name in sorted(set(weight_map.values())))
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise FileNotFoundError(f"{index} names shard files that do not exist: {', '.join(absent)}")
    return WeightFiles(files, {tensor: folder / name for tensor, name in weight_map.items()})


def read_headers(file: Path) -> list[Header]:
    """Returns what the head of a weight file says of its tensors; no tensor is read.

    Raises:
        ValueError: The file is no readable safetensors file.
    """
    with open_weights(file) as opened:
        headers = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (an open file is no mapping)
        return [Header(name, tuple(header.get_shape()), header.get_dtype(), file) for name, header in headers.items()]


def open_weights(file: Path) -> Any:
    """Returns a weight file, open for one ``with`` statement: an open one keeps all pages that were read in memory.

    Raises:
        ValueError: The file is no readable safetensors file.
    """
    try:
        return safe_open(file, framework="numpy")
    except SafetensorError as error:
        raise ValueError(f"{file} is not a readable safetensors file: {error}") from error


def read_tensor(file: Path, name: str) -> np.ndarray:
    """Returns one tensor of a weight file.

    Raises:
        ValueError: The file is no readable safetensors file.
    """
    with open_weights(file) as opened:
        return opened.get_tensor(name)


def cast(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns a contiguous array of a dtype; what the dtype cannot hold becomes infinite, for ``first_not_finite`` to find."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.ascontiguousarray(array, dtype)


def first_not_finite(array: np.ndarray) -> str | None:
    """Returns the first value of an array that is not finite, with its index, or None when all are.

    Args:
        array: Contiguous, of dtype float32, bfloat16 or float16.
    """
    # The exponent's bits are all set in infinities and NaNs alone; comparing them needs no float arithmetic and no copy.
    integer = np.dtype(f"u{array.dtype.itemsize}")
    exponent = integer.type(np.array(np.inf, array.dtype).view(integer))
    bits = array.reshape(-1).view(integer)
    for start in range(0, bits.size, SCANNED):
        found = np.bitwise_and(bits[start : start + SCANNED], exponent) == exponent
        if found.any():
            index = np.unravel_index(start + int(found.argmax()), array.shape)
            return f"{array[index]} at {[int(i) for i in index]}"
    return None
