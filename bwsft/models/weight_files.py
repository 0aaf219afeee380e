"""Checks the safetensors files of a model against its config before a weight is read."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from bwsft.utils import strict_json

Shapes = dict[str, tuple[int, ...]]

_FLOATS = ("F64", "F32", "BF16", "F16")
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_MOST_NAMED = 3  # tensors named in one message
# What checkpoints of transformers hold beside a model with its head: BERT's other heads, and
# buffers that are computed today.
_BESIDE = re.compile(
    r"bert\.pooler\..*|cls\.seq_relationship\..*|.*\.position_ids|.*\.rotary_emb\.inv_freq"
)
# The first BERTs name their norms' weights as TensorFlow did; transformers renames them too.
_RENAMED = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def read_json(file: Path) -> dict:
    """A JSON object; ``FileNotFoundError`` or ``ValueError`` that says what to do."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: give the folder of a complete checkpoint")
    return strict_json.read_object(file)


@contextlib.contextmanager
def opened(file: Path) -> Iterator[safe_open]:
    """A safetensors file whose tensors are read one by one; ValueError for a damaged one."""
    try:
        with safe_open(file, framework="pt") as handle:
            yield handle
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged or cut short ({error}): copy it again") from error
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error}): copy it again") from error


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors file; ValueError for a damaged one."""
    with opened(file) as handle:
        return {name: handle.get_tensor(name) for name in handle.keys()}


def shard_files(folder: Path) -> dict[str, list[str] | None]:
    """Shard name -> the tensors that the index places there (None: no index says)."""
    if (folder / _SINGLE).is_file():  # transformers takes it too where there is an index beside
        return {_SINGLE: None}
    if not (folder / _INDEX).is_file():
        raise FileNotFoundError(
            f"{folder} has neither {_INDEX} nor {_SINGLE}: only safetensors weights are read"
        )
    index = read_json(folder / _INDEX)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{folder / _INDEX} has no weight_map: copy the index again")
    if not isinstance(index.get("metadata"), dict):  # transformers relies on it
        raise ValueError(f"{folder / _INDEX} has no metadata: copy the index again")
    shards: dict[str, list[str] | None] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(f"{folder / _INDEX} names a shard outside the folder: {shard!r}")
        shards.setdefault(shard, []).append(tensor)
    if missing := sorted(shard for shard in shards if not (folder / shard).is_file()):
        raise FileNotFoundError(
            f"{folder / _INDEX} names {', '.join(missing)}, which is not there: download the "
            "checkpoint again"
        )
    return shards


def stored_shapes(folder: Path) -> Shapes:
    """Shape of every stored tensor of the model, read from the shards' headers alone."""
    shapes: Shapes = {}
    for shard, indexed in shard_files(folder).items():
        file = folder / shard
        with opened(file) as handle:
            slices = {name: handle.get_slice(name) for name in handle.keys()}
            stored = {n: (tuple(x.get_shape()), x.get_dtype()) for n, x in slices.items()}
        if indexed is not None and set(indexed) != set(stored):
            raise ValueError(
                f"{file} and {_INDEX} disagree about {_some(set(indexed) ^ set(stored))}: "
                "download both again"
            )
        for name, (shape, kind) in stored.items():
            if _BESIDE.fullmatch(name):
                continue
            if kind not in _FLOATS:
                raise ValueError(
                    f"{file}: {name} is stored as {kind}, not as floating-point numbers: "
                    "take the checkpoint before quantization"
                )
            shapes[renamed(name)] = shape
    return shapes


def stored_state(model: nn.Module) -> dict[str, Tensor]:
    """A model's tensors by the names that its files have: experts, which transformers runs as one
    tensor, are matrices there. Those whose names are the same come first, in the model's order."""
    state = model.state_dict(keep_vars=True)
    found = _as_stored(model, state)
    return {name: found[name] for name in state if name in found} | found


def _as_stored(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion  # others need no model

    found = revert_weight_conversion(model, state)
    return {renamed(name): tensor for name, tensor in found.items()}


class Rows(NamedTuple):
    """Rows of a matrix, or of one in a stack of them, and where a model's files have them."""

    tensor: str
    first: int  # of the tensor's rows
    matrix: int
    start: int  # of the matrix's rows
    count: int


def stored_rows(model: nn.Module) -> dict[str, list[Rows]]:
    """Name of each of a model's matrices, and of its stacks of them -> where its files have the
    rows: queries, keys and values may be one tensor there, and experts are one each."""
    marks: dict[str, Tensor] = {}
    begins: dict[int, tuple[str, int]] = {}  # number of a matrix's first row -> its name and index
    number = 0
    for name, tensor in model.state_dict().items():
        if tensor.ndim in (2, 3):
            matrices, rows = (1, *tensor.shape)[-3:-1]
            begins |= {number + i * (rows + 1): (name, i) for i in range(matrices)}
            numbers = torch.arange(number, number + matrices * (rows + 1)).view(matrices, -1, 1)
            marks[name] = numbers[:, :-1].reshape(*tensor.shape[:-1], 1)
            number += matrices * (rows + 1)  # one is left out, so that no two matrices adjoin
    firsts, found = sorted(begins), {}
    for stored, numbers in _as_stored(model, marks).items():
        numbers = numbers.flatten()
        breaks = [0, *(numbers.diff() != 1).nonzero()[:, 0].add(1).tolist(), len(numbers)]
        for first, end in itertools.pairwise(breaks):
            at = int(numbers[first])
            begin = firsts[bisect.bisect_right(firsts, at) - 1]
            name, matrix = begins[begin]
            rows = Rows(stored, first, matrix, at - begin, end - first)
            found.setdefault(name, []).append(rows)
    return found


def renamed(name: str) -> str:
    stem, dot, rest = name.rpartition("LayerNorm.")
    return stem + _RENAMED.get(dot + rest, dot + rest)


def check_tensors(stored: Shapes, expected: Shapes, folder: Path, tied: Mapping[str, str]) -> None:
    """``ValueError`` unless exactly the expected tensors are stored, in the expected shapes.

    ``tied``: a tensor's name -> that of the one it is tied to. The first need not be stored; where
    both are, they must be the same numbers, or the model would not be what was saved.
    """
    if missing := expected.keys() - stored.keys() - tied.keys():
        raise ValueError(f"{folder} lacks tensors that its config needs: {_some(missing)}")
    if unexpected := stored.keys() - expected.keys():
        raise ValueError(f"{folder} has tensors that its config does not know: {_some(unexpected)}")
    for name in expected.keys() & stored.keys():
        if stored[name] != expected[name]:
            raise ValueError(
                f"{name} in {folder} has shape {stored[name]}, but config.json asks for "
                f"{expected[name]}: take weights and config from the same checkpoint"
            )
    for name, origin in tied.items():
        if name in stored and not _same(folder, name, origin):
            raise ValueError(
                f"config.json in {folder} ties {name} to {origin}, but both are stored and differ: "
                "set tie_word_embeddings to false"
            )


def _same(folder: Path, *names: str) -> bool:
    """Whether two tensors hold the same numbers."""
    found = []
    for shard in shard_files(folder):
        with opened(folder / shard) as handle:
            found += [handle.get_tensor(name) for name in names if name in handle.keys()]
    return found[0].equal(found[1])


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
