"""Lines of JSON: how the files of a run are written, read back and cut."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

Number = bool | int | float | np.generic | np.ndarray


def json_line(row: Mapping) -> str:
    """The line of one row."""
    return json.dumps(row, allow_nan=False) + "\n"


def complete_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, but for a torn last one."""
    with path.open("rb") as file:
        yield from (line for line in file if line.endswith(b"\n"))


def parse_line(line: bytes) -> dict | None:
    """The row of a line, or None where it cannot be read."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def cut_after(path: Path, step: int) -> None:
    """Truncates the file behind the last row of ``step`` or earlier; the first unreadable row ends the file too."""
    path.touch()
    end = 0
    for line in complete_lines(path):
        row = parse_line(line)
        if row is None or row["step"] > step:
            break
        end += len(line)
    with path.open("rb+") as file:
        file.truncate(end)


def plain_number(value: Number, name: str) -> float | int | None:
    """A Python number for JSON; ``None`` where not finite. A float32 keeps its own shortest digits: 0.1, not 0.10000000149."""
    if not isinstance(value, bool | int | float | np.generic | np.ndarray):
        raise TypeError(f"metric {name!r} is a {type(value).__name__}, not a plain number; fetch it from the device first")
    scalar = np.asarray(value)
    if scalar.size != 1 or scalar.dtype.kind not in "biuf":
        raise TypeError(f"metric {name!r} must be one number; got shape {scalar.shape}, dtype {scalar.dtype}")
    number = scalar.reshape(())[()]
    if scalar.dtype.kind != "f":
        return int(number)
    if not np.isfinite(number):
        return None
    return float(number) if number.dtype == np.float64 else float(str(number))
