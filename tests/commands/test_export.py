"""Exported folders hold the model that was trained: merged exactly, rounded once, never half."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_folders import run_of
from transformers import GenerationConfig

from bwsft import config as c
from bwsft import presets
from bwsft.checkpoints import shards
from bwsft.checkpoints.resolve import load_trained
from bwsft.checkpoints.shards import read_rows
from bwsft.commands import export
from bwsft.commands.export import run_export
from bwsft.commands.options import ExportOptions
from bwsft.data.tokenizer import load_tokenizer
from bwsft.models.llada_config import LladaConfig
from bwsft.models.loading import load_backbone, new_backbone

LORA = c.LoraConfig(rank=3, alpha=7.0, dropout=0.1)
HALF = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture(scope="module")
def make(tmp_path_factory, tokenizer_folder):
    """make(dtype, lora, **fields of the LLaDA config) -> checkpoint folder of a run."""

    def build(dtype=torch.bfloat16, lora=LORA, **fields):
        root = tmp_path_factory.mktemp("export")
        shape = dict(d_model=32, n_layers=2, n_heads=2, n_kv_heads=1, mlp_hidden_size=48)
        ids = dict(vocab_size=320, mask_token_id=257, eos_token_id=256, pad_token_id=256)
        llada = LladaConfig(**(shape | ids | {"max_sequence_length": 64} | fields))
        backbone = new_backbone(llada, 5, dtype=dtype)
        backbone.model.save_pretrained(root / "base")
        backbone.family = dataclasses.replace(backbone.family, end_ids=(258, 256))
        config = dataclasses.replace(
            presets.debug(), model=str(root / "base"), lora=lora, gen_length=24, block_size=6,
            dataset=c.DataConfig(template="none"),
        )
        return run_of(root, backbone, config, tokenizer_folder)

    return build


@pytest.fixture(scope="module")
def adapter(make):
    return make()


def exported(checkpoint, out, **options):
    assert run_export(ExportOptions(str(checkpoint), out, **options)) == 0
    return stored(out)


def stored(folder):
    found = {}
    for file in sorted(folder.glob("model*.safetensors")):
        found.update(load_file(file))
    return found


def merged_by_hand(checkpoint, lora=LORA):
    """Every tensor of the base, float32, with alpha / r * B A added where the adapter has it."""
    base = load_file(checkpoint.parents[2] / "base" / "model.safetensors")
    weights = {name: weight.float() for name, weight in base.items()}
    update = load_file(checkpoint / "adapter_model.safetensors")
    places = {name.split(".lora_")[0] for name in update}
    assert len(places) == 2 * 7 and len(update) == 2 * len(places)
    for place in places:
        a, b = (update[f"{place}.lora_{side}.weight"].float() for side in "AB")
        name = place.removeprefix("base_model.model.") + ".weight"
        change = (lora.alpha / lora.rank) * (b.double() @ a.double())
        assert change.abs().max() > 0
        weights[name] = (weights[name].double() + change).float()
    return weights


@pytest.mark.parametrize("base", ["float32", "bfloat16"])
@pytest.mark.parametrize("target", [None, "float32", "bfloat16", "float16"])
def test_merged_in_float32_and_rounded_once(make, tmp_path, base, target):
    checkpoint = make(HALF[base])
    found = exported(checkpoint, tmp_path / "out", dtype=target)
    dtype = HALF[target or base]
    expected = merged_by_hand(checkpoint)
    assert found.keys() == expected.keys()
    # float32 sums of other order differ by an ulp or two; rounding to half turns one in some
    # thousands of those into another neighbor, so there the count of such weights is bounded.
    different = total = 0
    for name, weight in expected.items():
        assert found[name].dtype == dtype
        if dtype == torch.float32:
            torch.testing.assert_close(found[name], weight, rtol=3e-7, atol=3e-8)
            continue
        rounded = weight.to(dtype)
        ulp = (rounded.float().abs() * torch.finfo(dtype).eps).clamp_min(1e-7)
        assert ((found[name].float() - rounded.float()).abs() <= ulp).all()
        different += int((found[name] != rounded).sum())
        total += weight.numel()
    assert different <= total / 1000


def canvas(seed=0):
    ids = torch.randint(0, 256, (24,), generator=torch.Generator().manual_seed(seed))
    ids[[7, 8, 20]] = 257
    positions = torch.cat([torch.arange(10), torch.arange(14)])
    return ids, positions, torch.tensor([0, 10, 24], dtype=torch.int32)


def logits(backbone):
    with torch.no_grad():
        return backbone.hidden_states(*canvas()) @ backbone.head()[0].T


def test_float32_export_computes_what_the_adapter_computed(make, tmp_path):
    checkpoint = make(torch.float32)
    exported(checkpoint, tmp_path / "out")
    with_adapter = logits(load_trained(str(checkpoint)).backbone)
    base = logits(load_backbone(checkpoint.parents[2] / "base"))
    merged = logits(load_backbone(tmp_path / "out"))
    scale = with_adapter.abs().max()
    assert (base - with_adapter).abs().max() > 0.1 * scale  # the adapter matters
    # x (W + s B A) against x W + s (x A) B: rounding of float32, 24 bits, through two layers.
    assert (merged - with_adapter).abs().max() < 1e-5 * scale


def test_half_precision_export_is_within_its_rounding(adapter, tmp_path):
    """Errors are measured against float64; the merged bf16 weights, computed with in float64, may
    not be further off than twice the merge rounded by hand."""
    exported(adapter, tmp_path / "out")
    exact = load_trained(str(adapter), dtype=torch.float64).backbone
    exact.model.double()
    stored = load_backbone(tmp_path / "out", dtype=torch.float64)
    by_hand = load_backbone(tmp_path / "out", dtype=torch.float64)
    weights = {n: w.bfloat16().double() for n, w in merged_by_hand(adapter).items()}
    by_hand.model.load_state_dict(weights)
    truth = logits(exact)
    error = (logits(stored) - truth).abs().max()
    assert 0 < error <= 2 * (logits(by_hand) - truth).abs().max()


@pytest.mark.parametrize("target", [None, "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_full_fine_tuning_is_converted(make, tmp_path, target, tied):
    checkpoint = make(torch.float32, c.LoraConfig(rank=0), weight_tying=tied)
    before = load_file(checkpoint / "model.safetensors")
    found = exported(checkpoint, tmp_path / "out", dtype=target)
    assert found.keys() == before.keys()
    for name, weight in before.items():
        assert torch.equal(found[name], weight.to(HALF[target or "float32"]))
    again = load_backbone(tmp_path / "out")
    assert again.model.dtype == HALF[target or "float32"]


def test_the_folder_is_complete(adapter, tmp_path, capsys):
    exported(adapter, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja", "generation_config.json", "README.md",
    }  # fmt: skip
    written = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert written.pop("bwsft") == {
        "template": "none", "template_args": None, "context": "exact", "block_size": 6,
        "gen_length": 24, "canvas": "fixed", "block_origin": "response", "end_ids": [258, 256],
        "logit_shift": 0, "mask_id": 257,
    }  # fmt: skip
    assert written == {
        "eos_token_id": [258, 256], "pad_token_id": 256, "mask_token_id": 257, "mask_id": 257,
        "block_size": 6, "block_length": 6, "gen_length": 24, "steps": 24,
        "remasking": "low_confidence",
    }  # fmt: skip
    settings = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (settings.steps, settings.mask_id, settings.bwsft["block_size"]) == (24, 257, 6)
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == "bfloat16"
    backbone = load_backbone(tmp_path / "out")
    assert set(backbone.family.end_ids) == {256, 258} and backbone.model.dtype == torch.bfloat16
    ours, theirs = (load_tokenizer(folder) for folder in (tmp_path / "out", adapter))
    assert ours.chat_template == theirs.chat_template
    assert ours("7+7=\n")["input_ids"] == theirs("7+7=\n")["input_ids"]
    shown = capsys.readouterr().out
    assert "adapter merged, bfloat16" in shown and "% of its norm" in shown
    assert "--template none --gen-length 24 --block-size 6 --context exact" in shown
    # An exported folder is a model folder like any other.
    exported(tmp_path / "out", tmp_path / "again", dtype="float32")
    assert "adapter" not in capsys.readouterr().out


def test_rounding_is_reported(make, tmp_path, capsys):
    checkpoint = make()
    exported(checkpoint, tmp_path / "out")
    base = load_file(checkpoint.parents[2] / "base" / "model.safetensors")
    moved = total = 0.0
    for name, weight in merged_by_hand(checkpoint).items():
        if not torch.equal(weight, base[name].float()):
            moved += float((weight.bfloat16().float() - weight).square().sum())
            total += float((weight - base[name].float()).square().sum())
    lost = (moved / total) ** 0.5
    assert (
        lost > 0.001 and f"moved the adapter's update by {lost:.1%}"[:-2] in capsys.readouterr().out
    )


@pytest.mark.parametrize("place", ["base", "adapter"])
def test_a_weight_beyond_the_dtype_is_refused(make, tmp_path, place):
    """Not written as infinity; one that was infinite stays so."""
    checkpoint = make(torch.float32)
    if place == "adapter":
        (checkpoint / "manifest.json").unlink()
    base = checkpoint.parents[2] / "base" / "model.safetensors"
    file = base if place == "base" else checkpoint / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "q_proj" in name and "lora_A" not in name)
    tensors[name][0, 0] = 1e9
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="q_proj.weight has numbers beyond torch.float16: use"):
        run_export(ExportOptions(str(checkpoint), tmp_path / "out", dtype="float16"))
    assert not (tmp_path / "out").exists()
    exported(checkpoint, tmp_path / "out", dtype="bfloat16")
    if place == "base":
        tensors[name][0, 0] = float("inf")
        save_file(tensors, file, metadata={"format": "pt"})
        assert any(w.isinf().any() for w in exported(checkpoint, tmp_path / "two").values())


@pytest.mark.parametrize("options", [
    {"use_rslora": True},
    {"alpha_pattern": {"q_proj": 2.0, r"blocks\.1\.ff_out": 11.0}},
    {"use_rslora": True, "alpha_pattern": {"v_proj": 5}, "rank_pattern": {"v_proj": 2}},
])  # fmt: skip
def test_the_scale_of_an_update_is_that_of_its_matrix(make, tmp_path, options):
    """alpha / r, alpha / sqrt(r) for rsLoRA; both may differ from matrix to matrix."""
    checkpoint = make(torch.float32)
    (checkpoint / "manifest.json").unlink()
    file = checkpoint / "adapter_model.safetensors"
    update, config = load_file(file), checkpoint / "adapter_config.json"
    for name in [n for n in update if "v_proj" in n and "rank_pattern" in options]:
        update[name] = (update[name][:2] if "lora_A" in name else update[name][:, :2]).contiguous()
    save_file(update, file, metadata={"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | options))
    found = exported(checkpoint, tmp_path / "out")
    base = load_file(checkpoint.parents[2] / "base" / "model.safetensors")
    for place in {name.split(".lora_")[0] for name in update}:
        a, b = (update[f"{place}.lora_{side}.weight"].double() for side in "AB")
        named = options.get("alpha_pattern", {}).items()
        alpha = next((v for key, v in named if place.endswith(key.replace("\\", ""))), LORA.alpha)
        divisor = len(a) ** (0.5 if "use_rslora" in options else 1)
        name = place.removeprefix("base_model.model.") + ".weight"
        expected = (base[name].double() + alpha / divisor * (b @ a)).float()
        torch.testing.assert_close(found[name], expected, rtol=3e-7, atol=3e-8)


def test_a_sharded_export_holds_the_same(make, tmp_path):
    """From a sharded base too; transformers reads it by its index."""
    checkpoint = make()
    whole = exported(checkpoint, tmp_path / "whole")
    base = checkpoint.parents[2] / "base"
    weights = load_backbone(base)
    (base / "model.safetensors").unlink()
    weights.model.save_pretrained(base, max_shard_size="20KB")
    assert len(list(base.glob("*.safetensors"))) > 2
    parts = exported(checkpoint, tmp_path / "parts", shard_size="12KB")
    assert len(list((tmp_path / "parts").glob("model-*-of-*.safetensors"))) > 3
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], whole[name]) for name in whole)
    again = load_backbone(tmp_path / "parts").model.state_dict()
    assert all(torch.equal(again[name], whole[name]) for name in whole)


def test_weights_stream_in_parts(make, tmp_path, monkeypatch):
    """Whatever the parts, they make the same numbers."""
    checkpoint = make()
    whole = exported(checkpoint, tmp_path / "whole")
    monkeypatch.setattr(shards, "CHUNK", 5 * 32 * 8)
    monkeypatch.setattr(shards, "WINDOW", 2)
    parts = exported(checkpoint, tmp_path / "parts")
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


def test_it_writes_what_transformers_would(make, tmp_path):
    """For a model that is one file, config and weights are those of save_pretrained, byte for
    byte."""
    checkpoint = make(torch.float32, c.LoraConfig(rank=0))
    exported(checkpoint, tmp_path / "out", dtype="bfloat16")
    load_trained(str(checkpoint), dtype=torch.bfloat16).backbone.model.save_pretrained(
        tmp_path / "theirs"
    )
    for name in ("model.safetensors", "config.json"):
        ours, theirs = (tmp_path / f / name for f in ("out", "theirs"))
        assert ours.read_bytes() == theirs.read_bytes()


def test_the_dtype_of_config_json_counts_as_in_loading(make, tmp_path):
    checkpoint = make(torch.float32)
    base = checkpoint.parents[2] / "base"
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    before = load_file(base / "model.safetensors")["model.transformer.wte.weight"]
    for dtype, expected in ((None, before.bfloat16()), ("float32", before.bfloat16().float())):
        found = exported(checkpoint, tmp_path / str(dtype), dtype=dtype)
        assert found["model.transformer.wte.weight"].dtype == expected.dtype
        assert torch.equal(found["model.transformer.wte.weight"], expected)


def test_nothing_is_overwritten_and_nothing_is_left_half(adapter, tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match="there exists"):
        run_export(ExportOptions(str(adapter), tmp_path / "there"))
    assert not list((tmp_path / "there").iterdir())
    with pytest.raises(ValueError, match="--shard-size many: "):
        run_export(ExportOptions(str(adapter), tmp_path / "out", shard_size="many"))

    def full(file, name):
        yield from list(read_rows(file, name))[:-1]
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "read_rows", full)
    with pytest.raises(OSError, match="No space left on device: .*/out'"):
        run_export(ExportOptions(str(adapter), tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_an_adapter_that_does_not_fit_is_refused(make, tmp_path):
    checkpoint = make()
    (checkpoint / "manifest.json").unlink()
    file = checkpoint / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "q_proj.lora_A" in name)
    save_file({n: t for n, t in tensors.items() if n != name}, file)
    with pytest.raises(ValueError, match="q_proj"):
        run_export(ExportOptions(str(checkpoint), tmp_path / "out"))
    save_file(tensors | {name: torch.zeros(3, 31)}, file)
    with pytest.raises(ValueError, match="does not fit a matrix"):
        run_export(ExportOptions(str(checkpoint), tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "field, value", [("use_dora", True), ("modules_to_save", ["wte"]), ("bias", "all")]
)
def test_other_adapters_are_refused(adapter, tmp_path, field, value):
    backbone = load_trained(str(adapter)).backbone
    setattr(backbone.model.peft_config["default"], field, value)
    with pytest.raises(ValueError, match=f"LORA with {field}: merge it with peft"):
        export.take_off_adapter(backbone)


# Prints the peak of the second export above the memory held before it (bytes); the first, of a
# small model, makes imports and thread buffers not count.
MEASURE = """
import ctypes, sys
from pathlib import Path
from bwsft.commands.export import run_export
from bwsft.commands.options import ExportOptions

def resident(which):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(which)) * 1024

small, large, out, size = sys.argv[1:]
run_export(ExportOptions(small, Path(out) / "small"))
ctypes.CDLL(None).malloc_trim(0)
before = resident("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
run_export(ExportOptions(large, Path(out) / "large", shard_size=size))
print(resident("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("size, files", [("100MB", 3), ("5GB", 1)])
def test_memory_stays_below_a_shard(make, adapter, tmp_path, size, files):
    large = make(
        lora=dataclasses.replace(LORA, rank=64), d_model=1024, n_layers=10, mlp_hidden_size=2560
    )
    command = [sys.executable, "-c", MEASURE, str(adapter), str(large), str(tmp_path), size]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sizes = [f.stat().st_size for f in (tmp_path / "large").glob("*.safetensors")]
    assert len(sizes) == files and sum(sizes) > 200e6
    assert int(done.stdout.splitlines()[-1]) < 1.3 * min(100e6, max(sizes))
