"""Reads the weights of a Hugging Face folder, and writes them as one.

Loading comes right after ``families.read_spec``; exporting is the last thing a run does. All names and shapes are checked on
the headers of the files before any memory is taken. Then each tensor goes into its place in the stacked array on the devices,
so that the host holds one tensor at a time. While exporting it holds one stacked array (all layers of one projection) and one
file. ``weight_table.py`` says which tensor becomes which array.
"""

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding
from jax.typing import DTypeLike
from safetensors.numpy import save_file

from pods_jax.models.families import read_config, read_spec
from pods_jax.models.side_files import copy_side_files
from pods_jax.models.spec import DecoderSpec
from pods_jax.models.weight_files import (
    DTYPES,
    INDEX,
    SINGLE,
    WeightFiles,
    cast,
    find_weight_files,
    first_not_finite,
    read_headers,
    read_tensor,
)
from pods_jax.models.weight_table import EMBED, HEAD, Keys, Tensor, array_shapes, axis_sizes, tensors_of

ShardingOf = Callable[[Keys], Sharding]

STACKED_ON_HOST = 16 * 2**20
"""Bytes up to which the layers of an array are stacked on the host, which compiles nothing."""

# Buffers that old exports wrote among the weights; they are computed from the config.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)


def load_params(
    folder: Path | str, spec: DecoderSpec, *, dtype: DTypeLike, sharding_of: ShardingOf | None = None
) -> dict[str, Any]:
    """Reads the weights of a Hugging Face folder, tensor by tensor, to their shards.

    Next to the arrays the host holds one tensor: its pages of the file, and a copy in the array's order and dtype. Arrays
    without layers are the largest tensors and come first, when the others take no memory yet.

    Args:
        folder: Hugging Face folder.
        spec: The decoder's shape, as ``read_spec`` gives it for this folder.
        dtype: Dtype of the arrays: float32, bfloat16 or float16, whichever of them the file holds.
        sharding_of: Gives the sharding of an array by its path; the layer axis stays whole. Default: the default device.

    Returns:
        The parameter tree that ``weight_table.py`` describes.

    Raises:
        FileNotFoundError: The folder holds no safetensors weights, or lacks a shard file.
        ValueError: A tensor is unmapped, missing, repeated, misshapen, of another dtype or elsewhere than the index says (all
            are listed, with file and shape); one is not finite in ``dtype``; or a tied model's file holds an output head that
            differs from the embedding.
    """
    folder, array_dtype = Path(folder), _float_dtype(dtype)
    source = _checked_sources(find_weight_files(folder), spec, folder)
    if spec.tied and HEAD in source:
        _check_tied_head(source)
    rows = sorted(tensors_of(spec), key=lambda row: bool(row.stack(spec)))
    read = partial(_load, source=source, spec=spec, dtype=array_dtype)
    return _nested((row.path, read(row, sharding=sharding_of and sharding_of(row.path))) for row in rows)


def export_folder(
    params: Mapping[str, Any],
    spec: DecoderSpec,
    source_folder: Path | str,
    target_folder: Path | str,
    *,
    dtype: DTypeLike,
    shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
    tokenizer_folder: Path | None = None,
    generation_folder: Path | None = None,
    files: Mapping[str, str] | None = None,
) -> None:
    """Writes a Hugging Face folder that transformers loads: weights, config and the tokenizer files of the source.

    Everything is written next to the target and renamed at the end, so that a killed export leaves no half folder behind. All
    processes must call this; the first one writes.

    Args:
        params: The parameter tree that ``weight_table.py`` describes.
        spec: The decoder's shape.
        source_folder: The folder that the model came from; its config (with the new dtype), tokenizer files and generation
            config are kept.
        target_folder: The folder to write.
        dtype: Dtype of the weights in the file: float32, bfloat16 or float16.
        shard_bytes: Largest weight file in bytes; more weights than that are cut into several files with an index.
        overwrite: Replace an earlier export; without it an existing target is refused.
        tokenizer_folder: Folder of the tokenizer where it isn't the source's.
        generation_folder: Folder of ``generation_config.json`` where it isn't the source's.
        files: Texts by the names of files that are written in place of the copied ones.

    Raises:
        FileExistsError: The target exists and ``overwrite`` is off, or it isn't a model folder.
        ValueError: An array is unknown, missing, misshapen or not finite in ``dtype``, the source's config describes another
            decoder, or the target is or holds the source.
    """
    source, target = Path(source_folder).resolve(), Path(target_folder).resolve()
    arrays, file_dtype = dict(_flat(params)), _float_dtype(dtype)
    _check_export(arrays, spec, source, target, overwrite)
    partial, replaced = (target.with_name(target.name + suffix) for suffix in (".partial", ".replaced"))
    writes = jax.process_index() == 0
    if writes:
        _remove(partial, replaced)
        partial.mkdir(parents=True)
        copy_side_files(source, partial, tokenizer=tokenizer_folder, generation=generation_folder)
        _write_config(source, partial, file_dtype)
        for name, text in (files or {}).items():
            (partial / name).write_text(text, encoding="utf-8")
    try:
        _write_weights(arrays, spec, partial, file_dtype, shard_bytes, writes)
    except ValueError:
        _remove(*[partial] * writes)
        raise
    if writes:
        if target.exists():
            target.rename(replaced)
        partial.rename(target)
        _remove(replaced)


def _float_dtype(dtype: DTypeLike) -> np.dtype:
    if (resolved := np.dtype(dtype)).name not in DTYPES.values():
        raise ValueError(f"dtype={resolved.name!r} is not supported; supported: {', '.join(DTYPES.values())}")
    return resolved


def _checked_sources(found: WeightFiles, spec: DecoderSpec, folder: Path) -> dict[str, Path]:
    """Returns the file that holds each tensor, after all headers have been checked against the table and the index."""
    sizes = axis_sizes(spec)
    expected = {name: row.file_shape(sizes) for row in tensors_of(spec) for name in row.file_names(spec)}
    allowed = {HEAD: expected[EMBED], **expected} if spec.tied else expected
    holders: dict[str, Path] = {}
    problems: list[str] = []
    for header in (header for file in found.files for header in read_headers(file)):
        name, place = header.name, f"{header.name} {list(header.shape)} in {header.file.name}"
        if name in holders:
            problems.append(f"repeated: {place}, already in {holders[name].name}")
        holders[name] = header.file
        if name.endswith(_IGNORED_SUFFIXES):
            continue
        if name not in allowed:
            problems.append(f"unmapped: {place}")
        elif header.shape != allowed[name]:
            problems.append(f"misshapen: {place}, expected {list(allowed[name])}")
        if header.dtype not in DTYPES:
            problems.append(f"dtype: {place} is {header.dtype}, expected {', '.join(DTYPES)}")
    problems += [f"missing: {name} {list(expected[name])}" for name in expected if name not in holders]
    problems += _index_problems(found, holders)
    if problems:
        raise ValueError(f"the weights in {folder} do not fit the config:\n  " + "\n  ".join(problems))
    return holders


def _index_problems(found: WeightFiles, holders: Mapping[str, Path]) -> list[str]:
    """Returns where the index and the files disagree about a tensor; programs differ in which of them they believe."""
    if found.index is None:
        return []
    problems = [f"index: {name} in {file.name} has no entry" for name, file in holders.items() if name not in found.index]
    for name, file in found.index.items():
        if name not in holders:
            problems.append(f"index: {name} is said to be in {file.name}, and is in no file")
        elif holders[name] != file:
            problems.append(f"index: {name} is said to be in {file.name}, and is in {holders[name].name}")
    return problems


def _check_tied_head(source: Mapping[str, Path]) -> None:
    if not np.array_equal(read_tensor(source[HEAD], HEAD), read_tensor(source[EMBED], EMBED)):
        raise ValueError(
            f"tie_word_embeddings is true, but {HEAD} differs from {EMBED}: set it to false to use this output head, "
            f"or remove {HEAD}"
        )


def _load(row: Tensor, source: Mapping[str, Path], spec: DecoderSpec, dtype: np.dtype, sharding: Sharding | None) -> jax.Array:
    """Returns one array, read layer by layer into its place on the devices."""
    sizes, names = axis_sizes(spec), row.file_names(spec)

    def read(name: str) -> np.ndarray:
        array = cast(row.from_file(read_tensor(source[name], name), sizes), dtype)
        if value := first_not_finite(array):
            raise ValueError(f"{name} in {source[name]} holds {value} as {dtype.name}; all weights must be finite")
        return array

    shape = row.stack(spec) + row.shape(sizes)
    if not row.stack(spec):
        return _put(read(names[0]), sharding)
    if math.prod(shape) * dtype.itemsize <= STACKED_ON_HOST:
        return _put(np.stack([read(name) for name in names]), sharding)
    zeros = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)
    write = jax.jit(partial(jax.lax.dynamic_update_slice_in_dim, axis=0), donate_argnums=0, out_shardings=sharding)
    stack = zeros()
    for layer, name in enumerate(names):
        # Waited for, or the host would read ahead of the devices and hold many tensors.
        stack = jax.block_until_ready(write(stack, _put(read(name)[None], sharding), layer))
    return stack


def _put(array: np.ndarray, sharding: Sharding | None) -> jax.Array:
    """Returns the array on its shards; all processes pass the same one."""
    if sharding is None:
        return jnp.asarray(array)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _nested(items: Iterator[tuple[Keys, Any]]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in items:
        branch = tree
        for key in path[:-1]:
            branch = branch.setdefault(key, {})
        branch[path[-1]] = leaf
    return tree


def _flat(tree: Mapping[str, Any], path: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    for key, leaf in tree.items():
        if isinstance(leaf, Mapping):
            yield from _flat(leaf, (*path, key))
        else:
            yield (*path, key), leaf


def _check_export(arrays: Mapping[Keys, Any], spec: DecoderSpec, source: Path, target: Path, overwrite: bool) -> None:
    if target in (source, *source.parents):
        raise ValueError(f"cannot export to {target}: it is or holds the source folder {source}")
    if target.exists() and not (overwrite and (target / "config.json").is_file()):
        what = "it is no model folder" if overwrite else "and overwrite is off"
        raise FileExistsError(f"cannot export to {target}: it exists, {what}")
    if (described := read_spec(source)) != spec:
        raise ValueError(f"the config of {source} describes another decoder: {described}, exporting {spec}")
    expected = array_shapes(spec)
    problems = [f"unknown: {'/'.join(path)}" for path in arrays if path not in expected]
    for path, shape in expected.items():
        if path not in arrays:
            problems.append(f"missing: {'/'.join(path)} {list(shape)}")
        elif arrays[path].shape != shape:
            problems.append(f"misshapen: {'/'.join(path)} {list(arrays[path].shape)}, expected {list(shape)}")
    if problems:
        raise ValueError("the parameters do not fit the spec:\n  " + "\n  ".join(problems))


def _remove(*folders: Path) -> None:
    for folder in folders:
        if folder.exists():
            shutil.rmtree(folder)


def _write_config(source: Path, target: Path, dtype: np.dtype) -> None:
    config = read_config(source)
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
    config |= dict.fromkeys(keys, dtype.name)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_weights(
    arrays: Mapping[Keys, Any], spec: DecoderSpec, folder: Path, dtype: np.dtype, shard_bytes: int, writes: bool
) -> None:
    """Writes the weight files array by array, so that the host holds one stacked array and one file at most."""
    plan = _plan_files(spec, dtype, shard_bytes)
    sizes, shard, total = axis_sizes(spec), {}, 0
    last_of = {file: name for name, file in plan.items()}
    for row in tensors_of(spec):
        stacked = _to_host(arrays[row.path]).reshape(-1, *row.shape(sizes))
        for name, layer in zip(row.file_names(spec), stacked, strict=True):
            # safetensors writes a non-contiguous view's memory as it lies, with wrong values and no error.
            tensor = cast(row.to_file(layer, sizes), dtype)
            if value := first_not_finite(tensor):
                raise ValueError(f"cannot export to {folder}: {name} holds {value} as {dtype.name}; all weights must be finite")
            if not writes:
                continue
            shard[name], total = tensor, total + tensor.nbytes
            if last_of[plan[name]] == name:
                save_file(shard, folder / plan[name], metadata={"format": "pt"})
                # safetensors makes its files readable by their owner alone, whatever the umask.
                shutil.copymode(folder / "config.json", folder / plan[name])
                shard = {}
    if writes and len(last_of) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": plan}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _plan_files(spec: DecoderSpec, dtype: np.dtype, shard_bytes: int) -> dict[str, str]:
    """Returns the file that each tensor goes to: files are filled in order, each with at least one tensor."""
    sizes, number, held, numbers = axis_sizes(spec), 1, 0, {}
    for row in tensors_of(spec):
        size = int(np.prod(row.file_shape(sizes))) * dtype.itemsize
        for name in row.file_names(spec):
            if held and held + size > shard_bytes:
                number, held = number + 1, 0
            held += size
            numbers[name] = number
    if number == 1:
        return dict.fromkeys(numbers, SINGLE)
    return {name: f"model-{shard:05d}-of-{number:05d}.safetensors" for name, shard in numbers.items()}


def _to_host(array: Any) -> np.ndarray:
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.asarray(jax.device_get(array))
