"""Where rows come from: local JSON lines, JSON or Parquet files, or a data set of the Hugging Face Hub.

This is the first stage of the data layer. Rows are plain dicts, and the file of each task says what they mean.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pods_jax.config.sections import DataConfig

Split = Literal["train", "held_out"]
Row = dict[str, Any]

SUFFIXES = (".jsonl", ".json", ".parquet")
USUAL_SPLITS: dict[Split, str] = {"train": "train", "held_out": "test"}
"""Names of the splits in files, and in data sets other than a task's own."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Origin:
    """Where the Hub has one split of a task: the repository, its name of the split, and the subsets to join."""

    repository: str
    split: str
    subsets: tuple[str | None, ...] = (None,)


@dataclass(frozen=True)
class Columns:
    """How the columns of the user's own rows are named, and what kind of answer they hold."""

    question: str = "question"
    answer: str = "answer"
    solution: str | None = None
    choices: str | None = None
    answer_kind: str = "math"


@dataclass(frozen=True)
class Source:
    """Where the user says that the data of a task is; ``None`` takes the task's own place."""

    path: str | None = None
    held_out_path: str | None = None
    subset: str | None = None
    revision: str | None = None
    train_split: str | None = None
    held_out_split: str | None = None
    columns: Columns = field(default_factory=Columns)
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Place:
    """Where one split is: a local path, or a repository of the Hub when ``local`` is ``None``."""

    local: Path | None
    repository: str
    split: str
    subsets: tuple[str | None, ...]


def make_source(data: DataConfig) -> Source:
    """Returns what a configuration says about where the data is."""
    return Source(
        path=data.path,
        held_out_path=data.held_out_path,
        subset=data.subset,
        revision=data.revision,
        train_split=data.train_split,
        held_out_split=data.held_out_split,
        columns=Columns(data.question_column, data.answer_column, data.solution_column, data.choices_column, data.answer_kind),
        options=tuple(data.options),
    )


def read_rows(split: Split, *, source: Source, origins: Mapping[Split, Origin]) -> tuple[list[Row], bool]:
    """Returns the rows of one split, in the order of the names of the files, and whether both splits have the same ones.

    ``source.path`` is a local file, a local folder, or the id of a Hub data set; unset takes the task's origin. A file of a
    folder belongs to a split by its own name or its folder's (``train.jsonl``, ``main/test-00000-of-00001.parquet``). Files
    that are named after neither split, and a Hub data set whose two splits are one, serve both, and their questions must be
    divided.

    Args:
        split: ``"train"`` or ``"held_out"``.
        source: What the user says.
        origins: What the task says, for the splits that it has on the Hub.

    Raises:
        ValueError: There is no such file, folder or data set, or nothing of that split in it; or a line is no JSON object.
    """
    places: dict[Split, _Place] = {name: _place(name, source, origins) for name in ("train", "held_out")}
    here, there = places[split], places["held_out" if split == "train" else "train"]
    if here.local is None:
        main = places["train"].repository or places["held_out"].repository
        return _hub_rows(here, source.revision if here.repository == main else None), here == there
    # A task that the Hub has one split of is for that split alone: nothing is divided then.
    shared = here.local == there.local and len(origins) != 1
    files, divided = _local_files(here, there.split if shared else None)
    return [row for file in files for row in _read_file(file)], divided


def _place(split: Split, source: Source, origins: Mapping[Split, Origin]) -> _Place:
    own_path = source.held_out_path if split == "held_out" else None
    own_name = source.held_out_split if split == "held_out" else source.train_split
    key = "data.held_out_path" if own_path else "data.path"
    path, origin = own_path or source.path, origins.get(split)
    name = own_name or USUAL_SPLITS[split]
    subsets = (source.subset,) if source.subset else origin.subsets if origin else (None,)
    if path is None:
        return _Place(None, origin.repository if origin else "", own_name or (origin.split if origin else name), subsets)
    local = Path(path).expanduser()
    if local.exists():
        return _Place(local, "", name, subsets)
    if _HUB_ID.fullmatch(path):
        return _Place(None, path, name, (source.subset,))
    raise ValueError(f"{key}={path!r} is no file, no folder and no id of a Hub data set")


def _hub_rows(place: _Place, revision: str | None) -> list[Row]:
    import datasets  # takes a second to import, and local files do without

    if not place.repository:
        raise ValueError("data.path must be set: this task reads a file, a folder or a Hub data set of your own")
    rows: list[Row] = []
    for subset in place.subsets:
        try:
            rows += datasets.load_dataset(place.repository, subset, split=place.split, revision=revision).to_list()
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            wanted = f"{place.repository!r}, subset {subset}, split {place.split!r}, revision {revision}"
            raise ValueError(
                f"the Hub data set {wanted} cannot be loaded: {error}; "
                f"data.path can name a local file or folder, and {place.repository!r} is none"
            ) from error
    return rows


def _local_files(place: _Place, other_split: str | None) -> tuple[list[Path], bool]:
    """Returns the files of a split, and whether the other split, where it shares the path, has the same ones."""
    assert place.local is not None
    files = _data_files(place.local, place.subsets)
    if not files:
        raise ValueError(f"data.path={str(place.local)!r} holds no file that ends in {', '.join(SUFFIXES)}")
    base = place.local if place.local.is_dir() else place.local.parent
    mine = [file for file in files if _belongs(file.relative_to(base), place.split)]
    others = [file for file in files if other_split and _belongs(file.relative_to(base), other_split)]
    if mine or not others:
        return mine or files, other_split is not None and mine == others
    names = ", ".join(str(file.relative_to(base)) for file in others[:3])
    raise ValueError(
        f"data.path={str(place.local)!r} has no file of the split {place.split!r}, only of {other_split!r} ({names}); "
        "data.held_out_path, data.train_split and data.held_out_split say otherwise"
    )


def _data_files(path: Path, subsets: Sequence[str | None]) -> list[Path]:
    if path.is_file():
        return [path] if path.suffix in SUFFIXES else []
    # A folder laid out as the Hub's repository has a folder for each subset, and perhaps others.
    roots = [path / subset for subset in subsets if subset and (path / subset).is_dir()] or [path]
    return sorted(file for root in roots for file in root.rglob("*") if file.suffix in SUFFIXES and file.is_file())


def _belongs(relative: Path, split: str) -> bool:
    return any(re.match(rf"{re.escape(split)}(?![A-Za-z0-9])", part) for part in relative.parts)


def _read_file(file: Path) -> list[Row]:
    if file.suffix == ".parquet":
        from pyarrow import parquet  # comes with datasets, and is as slow to import

        return parquet.read_table(file).to_pylist()
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".json":
        try:
            whole = json.loads(text)
        except ValueError:
            return _json_lines(file, text)  # many a .json file holds JSON lines
        return _objects(file, whole if isinstance(whole, list) else [whole])
    return _json_lines(file, text)


def _json_lines(file: Path, text: str) -> list[Row]:
    rows = []
    for index, line in enumerate(text.split("\n"), start=1):  # splitlines() would split within strings that hold U+2028
        if line.strip():
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"line {index} of {str(file)!r} is not JSON: {error}") from error
    return _objects(file, rows)


def _objects(file: Path, rows: list[Any]) -> list[Row]:
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"row {index} of {str(file)!r} is {type(row).__name__}, not a JSON object with named columns")
    return rows
