"""`bwsft export`: a checkpoint as a model folder in the official layout, adapters merged.

The model is built without its weights, which stream from the stored files into new ones.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
import torch
from torch import Tensor

from bwsft.checkpoints.generation_config import write_generation_config
from bwsft.checkpoints.resolve import Trained, adapter_base, load_trained
from bwsft.checkpoints.shards import read_rows, read_tensor, write_shards
from bwsft.commands.export_files import (
    Origin,
    origin_of,
    spell_config,
    write_code,
    write_tokenizer,
)
from bwsft.commands.model_card import model_card
from bwsft.commands.options import ExportOptions
from bwsft.models.backbone import Backbone
from bwsft.models.grouped_experts import by_expert
from bwsft.models.loading import model_folder
from bwsft.models.lora import ADAPTER
from bwsft.models.mask_row import token_rows, trained_beside
from bwsft.models.weight_files import (
    Rows,
    opened,
    renamed,
    shard_files,
    stored_rows,
    stored_state,
)
from bwsft.utils import hub
from bwsft.utils.files import folder_atomic, naming
from bwsft.utils.lines import say


def run_export(options: ExportOptions) -> int:
    """Run `bwsft export` and return the exit status; ValueError or OSError for bad input.

    The folder appears whole or not at all. Needs memory for the largest update of a matrix in
    float32, for the adapters of a layer's experts and some 50 MB, whatever the sizes of the model
    and its shards.
    """
    out = Path(options.out)
    if out.exists() or out.is_symlink():
        raise ValueError(f"{out} exists: name a folder that does not")
    if options.push is not None and not hub.ID.fullmatch(options.push):
        raise ValueError(f"--push {options.push!r} is no ORG/NAME")
    if options.private and options.push is None:
        raise ValueError("--private is about the repository that --push ORG/NAME makes")
    with warnings.catch_warnings():
        # Of weights that go nowhere, which is what the meta device is for.
        warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
        trained = load_trained(options.model, device="meta", dtype="auto")  # dtype: as stored
    stored = trained.backbone.head()[0].dtype
    target = getattr(torch, options.dtype) if options.dtype else stored
    weights = Weights(trained, stored, target)
    with naming(out), folder_atomic(out) as folder:
        origin = origin_of(options.model, trained)
        write_description(trained, origin, folder, options.push or out.name)
        write_shards(folder, weights.tensors, weights.chunks, options.shard_size)
    report(trained, out, target, weights.lost())
    if options.push is not None:
        push(out, options)
    return 0


class Weights:
    """The weights of a model that is on the meta device, read from where they are stored.

    An adapter's update is added matrix by matrix in float32, and each sum rounded once to
    `target`; the adapter is taken off the model. ValueError for an adapter that is more than
    low-rank updates of matrices, and for a weight that becomes infinite.
    """

    def __init__(self, trained: Trained, stored: torch.dtype, target: torch.dtype):
        self.backbone, self.stored, self.target = trained.backbone, stored, target
        self.adapter, self.updates = Path(trained.folder) / ADAPTER, {}
        self.merges = hasattr(self.backbone.model, "peft_config")
        source = trained.folder
        if self.merges:
            source = adapter_base(trained.folder, trained.state)
            self.updates = take_off_adapter(self.backbone)
        self.places = places_of(self.backbone.model, source)
        self.mask_rows = self.rows_of_mask()
        whole = in_dtype(self.backbone.model, target)
        self.tensors = {name: whole[name] for name in self.places}
        """What will be written, on the meta device."""
        self.backbone.model.to(target)
        self.moved = self.total = 0.0
        # The experts of a layer share two of them, and are written one after another.
        self.factors = functools.lru_cache(maxsize=2)(self.read_factors)

    def chunks(self, name: str) -> Iterator[Tensor]:
        """The values of one tensor, some rows at a time."""
        update = self.update(name) if name in self.updates else None
        done, size, kind = 0, self.tensors[name].shape, self.tensors[name].dtype
        for read in read_rows(*self.places[name]):
            rows = read.to(self.stored if kind == self.target else kind)
            if update is not None:
                found = self.merged(rows, update[done : done + len(rows)])
            else:
                found = rows.to(kind)
            if found is not read and (found.isinf() & read.isfinite()).any():
                raise ValueError(f"{name} has numbers beyond {self.target}: use --dtype float32")
            yield self.with_mask_row(name, found, done)
            done += len(rows) if size else 0
        if size and done < size[0]:  # a [MASK] that is new to the model: the row loading gives it
            values = read_tensor(*self.places[name]).to(self.stored)
            yield values.mean(0, dtype=torch.float32).to(self.stored).to(self.target)

    def rows_of_mask(self) -> dict[str, Tensor]:
        """Name of a tensor -> the row of [MASK] that loading gives it, where nobody trained it: a
        folder must mean the same to whoever opens it. Reads an embedding whole where it does."""
        state = stored_state(self.backbone.model)
        names = {id(state[name]): name for name in self.places}
        mask_id, found = self.backbone.family.mask_id, {}
        if self.backbone.family.noise != "mask":
            return found
        for weight, bias in token_rows(self.backbone.model):
            values = read_tensor(*self.places[names[id(weight)]]).to(self.stored)
            if mask_id >= len(values):  # a row that loading adds
                break
            trained = trained_beside(values, mask_id)
            if not len(trained):
                if not found:  # the embedding decides
                    break
                continue
            for tensor in (weight, bias):
                if tensor is not None:
                    name = names[id(tensor)]
                    whole = read_tensor(*self.places[name]).to(self.stored)
                    mean = whole[trained].mean(0, dtype=torch.float32)
                    found[name] = mean.to(self.stored).to(self.target)
        return found

    def with_mask_row(self, name: str, rows: Tensor, start: int) -> Tensor:
        """Rows of a tensor from `start` on, that of [MASK] as loading gives it."""
        at = self.backbone.family.mask_id - start
        if name not in self.mask_rows or not 0 <= at < len(rows):
            return rows
        rows = rows.clone()
        rows[at] = self.mask_rows[name]
        return rows

    def update(self, name: str) -> Tensor:
        """scale * B A, float32; of several adapters in the rows of one tensor each in its place."""
        whole = None
        for one in self.updates[name]:
            rows, (down, up) = one.rows, self.factors(one.place, one.experts)
            up = up[rows.matrix, rows.start : rows.start + rows.count]
            part = (up @ down[rows.matrix]).mul_(one.scale).float()
            if part.shape == self.tensors[name].shape:
                return part
            whole = torch.zeros(self.tensors[name].shape) if whole is None else whole
            whole[rows.first : rows.first + rows.count] = part
        return whole

    def read_factors(self, place: str, experts: int) -> tuple[Tensor, Tensor]:
        """A [experts, r, I] and B [experts, O, r], float32 at least."""
        kind = torch.promote_types(self.stored, torch.float32)
        # Copies: a mapped matrix is at any offset, where MKL promises no bits.
        found = (read_tensor(self.adapter, f"{place}.lora_{x}.weight") for x in "AB")
        return by_expert(*(matrix.to(kind, copy=True) for matrix in found), experts)

    def merged(self, rows: Tensor, update: Tensor) -> Tensor:
        """Rows of a weight with their update, rounded once."""
        merged = rows.float() + update
        rounded = merged.to(self.target)
        self.total += _square(update)
        self.moved += _square(rounded.float() - merged)
        return rounded

    def lost(self) -> float | None:
        """The share of the update's norm that rounding moved; None without an adapter."""
        if not self.merges:
            return None
        return (self.moved / self.total) ** 0.5 if self.total else 0.0


def _square(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2


def in_dtype(model: torch.nn.Module, target: torch.dtype) -> dict[str, Tensor]:
    """A model's stored tensors in a dtype, on the meta device: routers of experts are not rounded
    to half precision."""
    strict = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    state, wide = model.state_dict(keep_vars=True), torch.promote_types(target, torch.float32)
    kept = {id(tensor) for name, tensor in state.items() if any(part in name for part in strict)}
    return {
        name: torch.empty_like(tensor, device="meta", dtype=wide if id(tensor) in kept else target)
        for name, tensor in stored_state(model).items()
    }


@dataclass(frozen=True)
class Update:
    """A low-rank update of rows of a stored tensor."""

    place: str
    """Of its matrices in an adapter's file."""
    scale: float
    experts: int
    """Whose updates those matrices hold."""
    rows: Rows


def take_off_adapter(backbone: Backbone) -> dict[str, list[Update]]:
    """Stored tensor -> its updates; the model is the plain one again."""
    name = backbone.model.active_adapter
    config = backbone.model.peft_config[name]
    beyond = [f for f in ("use_dora", "modules_to_save", "lora_bias") if getattr(config, f, None)]
    beyond += ["bias"] if config.bias != "none" else []
    if config.peft_type != "LORA" or beyond:
        raise ValueError(
            f"export merges plain LoRA adapters; this one is {config.peft_type.value} with "
            f"{', '.join(beyond) or 'no LoRA matrices'}: merge it with peft"
        )
    layers = {n: m for n, m in backbone.model.named_modules() if name in getattr(m, "lora_A", ())}
    backbone.model = backbone.model.unload()
    stored, updates = stored_rows(backbone.model), {}
    for place, layer in layers.items():
        weight = getattr(layer, "parameter_name", "weight")
        module = place.removeprefix("base_model.model.").replace(".base_layer", "")
        for rows in stored[f"{module}.{weight}"]:
            update = Update(place, layer.scaling[name], getattr(layer, "num_experts", 1), rows)
            updates.setdefault(rows.tensor, []).append(update)
    return updates


def places_of(model: torch.nn.Module, source: str) -> dict[str, tuple[Path, str]]:
    """Name of a tensor to write -> the file in the checkpoint that holds it, and its name there.
    Tied weights are written once, by the name that the others are tied to or the first, and may be
    stored by any."""
    folder, stored, tied = model_folder(source), {}, {}
    for shard in shard_files(folder):
        with opened(folder / shard) as handle:
            stored.update({renamed(name): (folder / shard, name) for name in handle.keys()})
    for name, tensor in stored_state(model).items():
        tied.setdefault(id(tensor), []).append(name)
    places = {}
    for names in tied.values():
        names.sort(key=lambda name: name in model.all_tied_weights_keys)
        found = [stored[name] for name in names if name in stored]
        assert found, f"{source} lacks {names[0]}"  # load_trained has compared names and shapes
        places[names[0]] = found[0]
    return places


def write_description(trained: Trained, origin: Origin, folder: Path, name: str) -> None:
    """Config, tokenizer, generation config, model card; the official code where it is at hand."""
    model = trained.backbone.model
    write_code(model.config, origin, folder)
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    spell_config(folder / "config.json")
    write_tokenizer(trained, origin.tokenizer, folder)
    # What was guessed stays unsaid.
    contract = None if trained.assumed else trained.contract
    write_generation_config(folder, trained.backbone, contract)
    (folder / "README.md").write_text(model_card(trained, origin, name), encoding="utf-8")


def push(folder: Path, options: ExportOptions) -> None:
    """Upload the folder to the Hub; ValueError, with what to do, where that fails."""
    try:
        api = huggingface_hub.HfApi()
        api.create_repo(options.push, private=options.private, exist_ok=True)
        api.upload_folder(repo_id=options.push, folder_path=str(folder))
    except Exception as error:  # the Hub's client and the transport below it: families of their own
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"{folder} is written, but could not be pushed to {options.push} ({reason}): log in "
            f"with `hf auth login`, then `hf upload {options.push} {folder}`"
        ) from error
    say(f"pushed: https://huggingface.co/{options.push}")


def report(trained: Trained, out: Path, target: torch.dtype, lost: float | None) -> None:
    """What was written, what rounding cost, and how to decode it as it was trained."""
    dtype = str(target).removeprefix("torch.")
    size = sum(p.numel() * p.element_size() for p in trained.backbone.parameters())
    say(f"{out}: {'adapter merged, ' if lost is not None else ''}{dtype}, {size / 1e9:.3g} GB")
    if lost:
        say(
            f"rounding to {dtype} moved the adapter's update by {lost:.2%} of its norm "
            "(--dtype float32 keeps it)"
        )
    if not trained.assumed:
        contract = trained.contract
        say(
            f"bwsft generate --model {out} decodes as it was trained: --template "
            f"{contract.template} --gen-length {contract.gen_length} --block-size "
            f"{contract.block_size} --context {contract.context}"
        )
