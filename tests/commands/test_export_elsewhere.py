"""Exported folders open in transformers 4 with the official code's file layout (stand-ins of it:
tests/official_code), give bwsft's logits and the token ids of the tokenizer that was trained."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_folders import SHAPE, qwen, run_of, saved
from tiny_tokenizer import byte_tokenizer

from bwsft import config as c
from bwsft import presets
from bwsft.checkpoints.resolve import load_trained
from bwsft.commands.export import run_export
from bwsft.commands.options import ExportOptions
from bwsft.data.tokenizer import add_mask_token, load_tokenizer
from bwsft.models.dream_sdar import DreamConfig, SdarConfig
from bwsft.models.llada_config import LladaConfig
from bwsft.models.loading import load_backbone, new_backbone

CODE = Path(__file__).parents[1] / "official_code"
# The environment's package kernels needs a newer huggingface_hub than transformers 4 does.
ALONE = """import runpy, sys
sys.modules["kernels"] = None
runpy.run_path(sys.argv[1], run_name="__main__")
"""
# transformers, and the releases of what it needs in other versions than transformers 5.
VERSIONS = {
    "4.52": ("transformers==4.52.*", "tokenizers==0.21.*", "huggingface_hub==0.36.*"),
    "4.57": ("transformers==4.57.*", "tokenizers==0.22.*", "huggingface_hub==0.36.*"),
}
IDS = dict(vocab_size=320, mask_token_id=257, eos_token_id=256, pad_token_id=256)
CONFIGS = {
    "llada": LladaConfig(
        d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, mlp_hidden_size=48,
        max_sequence_length=96, **IDS,
        auto_map={"AutoConfig": "configuration_llada.LLaDAConfig",
                  "AutoModel": "modeling_llada.LLaDAModelLM"},
    ),
    "dream": DreamConfig(
        **SHAPE, **IDS, num_key_value_heads=2, rope_theta=1e6, tie_word_embeddings=False,
        auto_map={"AutoConfig": "configuration_dream.DreamConfig",
                  "AutoModel": "modeling_dream.DreamModel"},
    ),
    "sdar": SdarConfig(
        **SHAPE, **IDS, head_dim=8, num_key_value_heads=2, rope_theta=1e6, block_size=4,
        auto_map={"AutoConfig": "configuration_sdar.SDARConfig",
                  "AutoModel": "modeling_sdar.SDARForCausalLM"},
    ),
}  # fmt: skip
# What to open; no official code is there for the embedded base, and Qwen 2's class is causal.
WHAT = {"embedded": "tokenizer", "grown": "config"}
TEXT, TOKENS = "7+7=<|end|> é\n", [55, 43, 55, 61, 257, 257, 258, 256]


def dreams_tokenizer(source, folder):
    """The same tokenizer in the files of Dream's repository: its own class, no tokenizer.json."""
    whole = json.loads((source / "tokenizer.json").read_text())
    roles = json.loads((source / "tokenizer_config.json").read_text())
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(whole["model"]["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    added = {token.pop("id"): token for token in whole["added_tokens"]}
    config = {name: roles[name] for name in ("eos_token", "mask_token")} | {
        "tokenizer_class": "DreamTokenizer", "added_tokens_decoder": added,
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "pad_token": roles["eos_token"], "unk_token": None, "bos_token": None,
        "additional_special_tokens": ["<|end|>"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def install(folder, packages):
    """A folder that, put before this environment's packages, makes its transformers another."""
    done = folder / "done"
    if not done.exists():
        shutil.rmtree(folder)
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target"]
        tried = subprocess.run([*command, str(folder), *packages], capture_output=True, text=True)
        if tried.returncode:
            pytest.skip(f"pip cannot install {packages[0]}: {tried.stderr.strip()[-200:]}")
        done.touch()
    return folder


@pytest.fixture(scope="module")
def exports(tmp_path_factory, tokenizer_folder):
    """{name: exported folder} of an adapter on each layout, of the embedded base, and of a run
    that added its [MASK]."""
    root, made = tmp_path_factory.mktemp("elsewhere"), {}
    for name, config in CONFIGS.items():
        base = root / name / "base"
        new_backbone(config, seed=4).model.save_pretrained(base)
        shutil.copytree(CODE / name, base, dirs_exist_ok=True)
        shutil.copytree(tokenizer_folder, base, dirs_exist_ok=True)
        if name == "dream":
            dreams_tokenizer(tokenizer_folder, base)
        context = "block_causal" if name == "sdar" else "exact"
        settings = dataclasses.replace(
            presets.debug(), model=str(base), block_size=4, context=context,
            lora=c.LoraConfig(rank=2),
        )
        checkpoint = run_of(root / name, load_backbone(base), settings, base)
        made[name] = root / name / "out"
        run_export(ExportOptions(str(checkpoint), made[name]))
    made["grown"] = grown(root / "grown", tokenizer_folder)
    made["embedded"] = root / "embedded"
    embedded = Path(presets.__file__).parent / "tiny"
    run_export(ExportOptions(str(embedded), made["embedded"]))
    return made


def grown(root, tokenizer_folder):
    """The export of a run that gave the tokenizer its [MASK]."""
    model = saved(root / "base", qwen(mask_token_id=320, logit_shift=1, rope_theta=1e6))
    words = load_tokenizer(tokenizer_folder)
    byte_tokenizer(
        eos_token="<|endoftext|>", additional_special_tokens=["<|end|>"],
        chat_template=words.chat_template,
    ).save_pretrained(model)  # fmt: skip
    words = load_tokenizer(model)
    add_mask_token(words, "<|new|>")
    words.save_pretrained(root / "words")
    settings = dataclasses.replace(presets.debug(), model=str(model), mask_token="<|new|>")
    checkpoint = run_of(root, load_backbone(model), settings, root / "words")
    run_export(ExportOptions(str(checkpoint), root / "out"))
    assert "<|new|>" in (root / "out" / "tokenizer_config.json").read_text()
    return root / "out"


@pytest.mark.slow
@pytest.mark.timeout(900)  # pip
@pytest.mark.parametrize("version", VERSIONS)
def test_transformers_4_opens_them(exports, version, request, tmp_path):
    folder = request.config.cache.mkdir(f"transformers-{version}")
    there = install(folder, VERSIONS[version])
    asked = {
        "text": TEXT, "ids": TOKENS,
        "folders": {str(f): WHAT.get(n, "model") for n, f in exports.items()},
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", ALONE, CODE / "open_folders.py"], input=json.dumps(asked), text=True,
        capture_output=True,
        env=os.environ | {"PYTHONPATH": str(there), "HF_MODULES_CACHE": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["version"].startswith(version)
    for name, out in exports.items():
        found = answer["folders"][str(out)]
        trained = load_trained(str(out), dtype=torch.float32)
        words, contract = trained.tokenizer, trained.contract
        turn = [{"role": "user", "content": TEXT}]
        assert found["ids"] == words(TEXT)["input_ids"]
        assert (found["mask"], found["eos"]) == (words.mask_token_id, words.eos_token_id)
        assert found["special"] == sorted(set(words.all_special_ids)) and len(found["special"]) > 2
        assert found["chat"] == words.apply_chat_template(
            turn, tokenize=False, add_generation_prompt=True
        )
        assert found["settings"] == [
            list(contract.end_ids), contract.mask_id, contract.gen_length
        ]
        assert found["kept"] == contract.template
        if name != "embedded":
            assert found["config"] == [5e5 if name == "llada" else 1e6, "float32"]
        if name in CONFIGS:
            check_model(name, found, trained)


def check_model(name, found, trained):
    assert found["model"] == CONFIGS[name].auto_map["AutoModel"].split(".")[1]
    assert (found["sampler"] == "DreamGenerationConfig") == (name == "dream")
    ids = torch.tensor([TOKENS])
    mask = torch.ones(1, 1, len(TOKENS), len(TOKENS), dtype=torch.bool)
    with torch.no_grad():
        logits = trained.backbone.model(ids, attention_mask=mask).logits[0]
    # float32 through two layers, in another order of sums.
    torch.testing.assert_close(torch.tensor(found["logits"]), logits, rtol=1e-4, atol=1e-4)
