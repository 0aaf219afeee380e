"""Checkpoints on disk: round trips, the Auto classes, and everything that must be refused."""

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from thinning import thinned
from tiny_folders import edit, same

from bwsft.models.llada import LladaForMaskedDiffusion
from bwsft.models.llada_config import LladaConfig
from bwsft.models.loading import load_backbone, new_backbone, read_family

INDEX = "model.safetensors.index.json"
SMALL = dict(
    d_model=16, n_layers=2, n_heads=2, n_kv_heads=1, mlp_hidden_size=24, vocab_size=40,
    embedding_size=48, max_sequence_length=32, mask_token_id=39, eos_token_id=1, pad_token_id=1,
)  # fmt: skip


def saved(folder, shard_size="4KB", **changes):
    """A random model saved in `folder`, in several shards unless asked otherwise."""
    b = new_backbone(LladaConfig(**{**SMALL, **changes}))
    b.model.save_pretrained(folder, max_shard_size=shard_size)
    return b


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    saved(folder)
    return folder


@pytest.fixture
def copy(checkpoint, tmp_path):
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


@pytest.mark.parametrize("shard_size", ["4KB", "1GB"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_is_exact(tmp_path, shard_size, tied, dtype):
    b = new_backbone(LladaConfig(**SMALL, weight_tying=tied), 7, dtype=dtype)
    b.model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / INDEX).exists() == (shard_size == "4KB")
    again = load_backbone(tmp_path)
    assert same(b.model.state_dict(), again.model.state_dict()) and again.model.dtype == dtype
    assert again.family == b.family and not again.training
    ids, edges = torch.arange(10), torch.tensor([0, 4, 10])
    assert torch.equal(
        again.hidden_states(ids, ids, edges), b.eval().hidden_states(ids, ids, edges)
    )


def test_files_have_the_official_names_and_fields(tmp_path):
    saved(tmp_path, shard_size="1GB")
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["architectures"] == ["LLaDAModelLM"]
    assert written["torch_dtype"] == "float32" and "dtype" not in written
    layer = "attn_norm ff_norm q_proj k_proj v_proj attn_out ff_proj up_proj ff_out".split()
    expected = {f"model.transformer.{n}.weight" for n in ("wte", "ln_f", "ff_out")}
    expected |= {f"model.transformer.blocks.{i}.{n}.weight" for i in (0, 1) for n in layer}
    assert set(load_file(tmp_path / "model.safetensors")) == expected
    data = Path(os.environ.get("BWSFT_DATA_DIR", "/nonexistent")) / "llada_8b_instruct"
    if not data.is_dir():
        pytest.skip("BWSFT_DATA_DIR has no llada_8b_instruct")
    official = json.loads((data / "config.json").read_text())
    LladaConfig.from_pretrained(data).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written.pop("transformers_version") != official.pop("transformers_version")
    del official["_name_or_path"]
    assert written == official


def test_family_comes_from_the_json_files_alone(tmp_path):
    data = Path(os.environ.get("BWSFT_DATA_DIR", "/nonexistent")) / "llada_8b_instruct"
    if not data.is_dir():
        pytest.skip("BWSFT_DATA_DIR has no llada_8b_instruct")
    assert read_family(data).end_ids == (126081, 126348)


def test_generation_config_adds_end_ids(copy):
    (copy / "generation_config.json").write_text('{"eos_token_id": [1, 5, 99]}')
    assert load_backbone(copy).family.end_ids == read_family(copy).end_ids == (1, 5)


def test_dtype_and_attention_can_be_chosen(checkpoint):
    b = load_backbone(checkpoint, dtype=torch.float64, attn_implementation="sdpa")
    assert b.model.dtype == torch.float64 == b.head()[0].dtype
    assert b.model.config._attn_implementation == "sdpa"


def test_overrides_of_from_pretrained_are_checked(checkpoint):
    with pytest.raises(ValueError, match="residual_dropout"):
        LladaForMaskedDiffusion.from_pretrained(checkpoint, residual_dropout=0.1)


FIND = """
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
assert type(AutoConfig.from_pretrained(folder)).__name__ == "LladaConfig"
for auto in (AutoModel, AutoModelForCausalLM):
    assert type(auto.from_pretrained(folder)).__name__ == "LladaForMaskedDiffusion", auto
"""


@pytest.mark.parametrize("imports", thinned([
    # modeling_llama reaches AutoModel half-way through transformers' own layer module.
    "import bwsft; from transformers import LlamaForCausalLM",
    "from transformers import AutoModelForCausalLM; import bwsft",
]))
def test_auto_classes_find_the_model_in_either_import_order(checkpoint, imports):
    code = f"{imports}\nfolder = {str(checkpoint)!r}\n{FIND}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_bwsft_imports_neither_torch_nor_transformers():
    code = "import sys, bwsft; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        load_backbone(tmp_path / "nothing")
    (tmp_path / "file").touch()
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        load_backbone(tmp_path / "file")


def shards(folder):
    return sorted(folder.glob("model-*.safetensors"))


def cut_shard(folder, length=-10):
    shard = shards(folder)[1]
    shard.write_bytes(shard.read_bytes()[:length])


def lying_header(folder):
    """Twice the rows in the header, the same bytes after it."""
    shard = shards(folder)[0]
    blob = shard.read_bytes()
    (size,) = struct.unpack("<Q", blob[:8])
    header = json.loads(blob[8 : 8 + size])
    name = next(n for n in header if n != "__metadata__")
    header[name]["shape"][0] *= 2
    text = json.dumps(header).encode()
    shard.write_bytes(struct.pack("<Q", len(text)) + text + blob[8 + size :])


def wrong_shape(folder):
    tensors = load_file(shards(folder)[0])
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name][..., :-1].contiguous()}, shards(folder)[0])


def drop_tensor(folder, entry=False):
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    tensors = load_file(shards(folder)[0])
    name = tensors.popitem()[0]
    save_file(tensors, shards(folder)[0])
    if entry:
        edit(folder / INDEX, weight_map={n: s for n, s in weight_map.items() if n != name})


def shard_not_in_index(folder):
    """The index forgets a whole shard."""
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    gone = shards(folder)[1].name
    edit(folder / INDEX, weight_map={n: s for n, s in weight_map.items() if s != gone})


def extra_tensor(folder):
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    save_file({"surplus": torch.zeros(2)}, folder / "more.safetensors")
    edit(folder / INDEX, weight_map={**weight_map, "surplus": "more.safetensors"})


def in_config(**changes):
    return lambda folder: edit(folder / "config.json", **changes)


def in_index(**changes):
    return lambda folder: edit(folder / INDEX, **changes)


def write(name, text):
    return lambda folder: (folder / name).write_text(text)


@pytest.mark.parametrize("damage, error, message", [
    (lambda folder: shards(folder)[1].unlink(), FileNotFoundError, "model-00002.*download"),
    (cut_shard, ValueError, "model-00002.*damaged or cut short"),
    (lambda folder: cut_shard(folder, 0), ValueError, "model-00002.*damaged or cut short"),
    (lying_header, ValueError, "model-00001.*damaged or cut short"),
    (wrong_shape, ValueError, "model.transformer.* has shape .* but config.json asks for"),
    (drop_tensor, ValueError, "disagree about model.transformer"),
    (lambda folder: drop_tensor(folder, True), ValueError, "lacks tensors .*: model.tra"),
    (shard_not_in_index, ValueError, "lacks tensors that its config needs: model.transf"),
    (extra_tensor, ValueError, "has tensors that its config does not know: surplus"),
    (in_index(weight_map={"a": "../m"}), ValueError, "names a shard outside the folder"),
    (lambda folder: (folder / INDEX).unlink(), FileNotFoundError, "only safetensors"),
    (write(INDEX, '{"weight_map": {'), ValueError, "not valid JSON"),
    (write(INDEX, "{}"), ValueError, "no weight_map"),
    (write("config.json", "[]"), ValueError, "must hold a JSON object"),
    (write("config.json", '{"model_type": "llada"'), ValueError, "not valid JSON"),
    (in_config(model_type="gpt2"), ValueError, "model_type 'gpt2': bwsft loads llada, Dream"),
    (in_config(model_type=None), ValueError, "model_type None"),
    (in_config(rope_theta=None), ValueError, "lacks rope_theta"),
    (in_config(alibi=True), ValueError, "alibi=True is not implemented"),
    (in_config(d_model=32), ValueError, "has shape .* but config.json asks for"),
    (in_config(n_layers=3), ValueError, "blocks.2.attn_norm.weight, .* and 6 more"),
    (in_config(n_layers=1), ValueError, "does not know: .*blocks.1"),
    (in_config(weight_tying=True), ValueError, "does not know: model.transformer.ff_out"),
    (in_config(mask_token_id=40), ValueError, "mask_token_id=40"),
    (lambda folder: (folder / "config.json").unlink(), FileNotFoundError, "config.json is mis"),
])
def test_a_bad_checkpoint_is_refused_with_its_reason(copy, damage, error, message):
    load_backbone(copy)
    damage(copy)
    with pytest.raises(error, match=message):
        load_backbone(copy)
