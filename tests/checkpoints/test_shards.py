"""Streamed safetensors: what is written is what `save_file` writes, and parts are the whole."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from bwsft.checkpoints import shards
from bwsft.checkpoints.shards import read_rows, read_tensor, write_shards, write_tensors


def weights():
    generator = torch.Generator().manual_seed(0)
    shapes = {"wide": (7, 40), "b.weight": (64, 3), "a.bias": (5,), 'é"': (2, 2, 2), "one": ()}
    found = {n: torch.randn(s, generator=generator) for n, s in shapes.items()}
    found["b.weight"] = found["b.weight"].bfloat16()
    found["wide"] = found["wide"].double()
    found["a.bias"] = found["a.bias"].bfloat16()
    return found | {"none": torch.empty(0, 4)}


def on_meta(tensors):
    return {name: tensor.to("meta") for name, tensor in tensors.items()}


def test_a_file_is_byte_for_byte_that_of_save_file(tmp_path):
    tensors, told = weights(), []
    save_file(tensors, tmp_path / "whole", metadata={"format": "pt"})
    parts = {n: t.split(3) if t.ndim else [t] for n, t in tensors.items()}
    write_tensors(tmp_path / "parts", on_meta(tensors), parts.get, told.append)
    assert (tmp_path / "parts").read_bytes() == (tmp_path / "whole").read_bytes()
    assert sum(told) == sum(t.nbytes for t in tensors.values())


def test_values_in_memory_that_is_not_in_order(tmp_path):
    tensors = {"a": torch.arange(12.0).view(3, 4)}
    turned = tensors["a"].T.contiguous().T
    assert not turned.is_contiguous()
    write_tensors(tmp_path / "f", on_meta(tensors), lambda name: [turned], lambda n: None)
    assert torch.equal(load_file(tmp_path / "f")["a"], tensors["a"])


@pytest.mark.parametrize("chunks", [[], [torch.zeros(5)], [torch.zeros(4).half()] * 2])
def test_values_that_do_not_fit_are_a_bug(tmp_path, chunks):
    with pytest.raises(AssertionError, match="w"):
        write_tensors(
            tmp_path / "f", {"w": torch.empty(4, device="meta")}, {"w": chunks}.get, lambda n: None
        )


@pytest.mark.parametrize("chunk, window", [(8, 2), (8 * 40 * 2, 1), (1 << 20, 8)])
def test_parts_of_a_stored_tensor_are_the_whole(tmp_path, monkeypatch, chunk, window):
    """Also where a row is larger than a chunk, and where windows end within a tensor."""
    monkeypatch.setattr(shards, "CHUNK", chunk)
    monkeypatch.setattr(shards, "WINDOW", window)
    tensors = weights()
    save_file(tensors, tmp_path / "f")
    for name, tensor in tensors.items():
        parts = [part.clone() for part in read_rows(tmp_path / "f", name)]
        assert torch.equal(torch.cat([tensor[:0], *parts]) if tensor.ndim else parts[0], tensor)
        assert torch.equal(read_tensor(tmp_path / "f", name), tensor)
        if tensor.ndim:
            rows = max(1, chunk // (8 * max(1, tensor[:1].numel())))
            assert all(len(part) <= rows for part in parts)


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "f").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    with pytest.raises(ValueError, match="f is damaged or cut short .*: copy it again"):
        list(read_rows(tmp_path / "f", "w"))
    with pytest.raises(ValueError, match="missing cannot be read"):
        read_tensor(tmp_path / "missing", "w")


def test_shards_and_index_are_those_of_transformers(tmp_path):
    """By the split that save_pretrained makes, and read back by the index."""
    tensors = {f"layer.{i}.weight": torch.full((100, 10 + i), float(i)) for i in range(9)}
    write_shards(tmp_path, on_meta(tensors), lambda n: tensors[n].split(7), "15KB")
    index = json.loads((tmp_path / shards.INDEX).read_text())
    count = sum(t.numel() for t in tensors.values())
    assert index["metadata"] == {"total_size": 4 * count, "total_parameters": count}
    files = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert files == [f"model-{i:05}-of-00004.safetensors" for i in range(1, 5)]
    assert set(index["weight_map"].values()) == set(files)
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / file, framework="pt") as handle:
            assert torch.equal(handle.get_tensor(name), tensors[name])
            assert handle.metadata() == {"format": "pt"}
    assert all((tmp_path / file).stat().st_size < 16_000 for file in files)


def test_one_shard_has_no_index(tmp_path):
    tensors = {"w": torch.ones(4)}
    write_shards(tmp_path, on_meta(tensors), lambda n: [tensors[n]])
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("size", ["5", "GB", "five GB", "5 bytes"])
def test_a_size_that_is_none(tmp_path, size):
    with pytest.raises(ValueError, match=f"--shard-size {size}: "):
        write_shards(tmp_path, {"w": torch.empty(4, device="meta")}, {}.get, size)
    assert not list(tmp_path.iterdir())
