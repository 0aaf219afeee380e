"""Model weights in safetensors shards, read and written a few megabytes at a time.

safetensors' own `save_file` wants the whole shard in memory, and may copy it on the way. Here
a shard's header is written first, and then its tensors as they come.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from tqdm import tqdm

from bwsft.models.weight_files import opened

CHUNK = 4 << 20  # bytes of a tensor that are handed out at once, in the widest dtype
WINDOW = 8  # chunks that are read before a file is opened anew
INDEX = "model.safetensors.index.json"
_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}

Chunks = Callable[[str], Iterable[Tensor]]


def read_tensor(file: Path, name: str) -> Tensor:
    """One stored tensor, mapped: the file's pages count as memory as long as it lives."""
    with opened(file) as handle:
        return handle.get_tensor(name)


def read_rows(file: Path, name: str) -> Iterator[Tensor]:
    """A stored tensor [R, ...] in parts of some rows, of at most CHUNK bytes each (or one row).

    What is read of a mapped file counts as memory until it is closed: so it is, now and then.
    """
    with opened(file) as handle:
        shape = handle.get_slice(name).get_shape()
    if not shape:
        yield read_tensor(file, name)
        return
    step = max(1, CHUNK // max(8, 8 * torch.Size(shape[1:]).numel()))
    for first in range(0, shape[0], WINDOW * step):
        with opened(file) as handle:
            rows = handle.get_slice(name)
            for start in range(first, min(shape[0], first + WINDOW * step), step):
                yield rows[start : start + step]


def write_shards(
    folder: Path, tensors: dict[str, Tensor], chunks: Chunks, shard_size: str = "5GB"
) -> None:
    """Write weights as transformers does: `model.safetensors`, or `model-00001-of-0000N` and an
    index where they exceed `shard_size` (a larger tensor gets a shard of its own).

    `tensors` give names, shapes and dtypes alone (on the meta device); `chunks(name)` yields the
    values, in any shapes that follow each other in memory. ValueError for a size that is none.
    """
    try:
        plan = split_torch_state_dict_into_shards(tensors, max_shard_size=shard_size)
    except ValueError as error:
        raise ValueError(f"--shard-size {shard_size}: {error}") from error
    total = plan.metadata["total_size"]
    with tqdm(total=total, desc="writing", unit="B", unit_scale=True, disable=None) as bar:
        for shard, names in plan.filename_to_tensors.items():
            write_tensors(folder / shard, {n: tensors[n] for n in names}, chunks, bar.update)
    if plan.is_sharded:
        count = sum(tensor.numel() for tensor in tensors.values())
        metadata = {"total_parameters": count, **plan.metadata}
        index = {"metadata": metadata, "weight_map": plan.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def write_tensors(
    path: Path, tensors: dict[str, Tensor], chunks: Chunks, advance: Callable[[int], object]
) -> None:
    """Write one safetensors file, byte for byte what `save_file` writes; `advance` hears of the
    bytes as they are written."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    # The widest dtype first: so every tensor is aligned to its own size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    for name in order:
        start, end = end, end + tensors[name].nbytes
        header[name] = {
            "dtype": _NAMES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as handle:
        handle.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            stop = handle.tell() + tensors[name].nbytes
            for chunk in chunks(name):
                assert chunk.dtype == tensors[name].dtype, name
                advance(handle.write(chunk.contiguous().flatten().view(torch.uint8).numpy()))
            assert handle.tell() == stop, name
