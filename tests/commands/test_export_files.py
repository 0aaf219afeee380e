"""What an export writes beside the weights: the base's files, a model card, and where it goes."""

import dataclasses
import json

import huggingface_hub
import pytest
from huggingface_hub.repocard import metadata_load
from tiny_folders import edit, run_of

from bwsft import config as c
from bwsft import presets
from bwsft.checkpoints.resolve import load_trained
from bwsft.commands import export_files as x
from bwsft.commands.export import run_export
from bwsft.commands.model_card import model_card
from bwsft.commands.options import ExportOptions
from bwsft.data.tokenizer import add_mask_token, load_tokenizer
from bwsft.models.loading import load_backbone
from bwsft.utils import hub

NAMES = {"AutoConfig": "configuration_llada.C", "AutoModel": "modeling_llada.M"}


@pytest.fixture
def run(model_folder, tmp_path):
    """run(**fields of the config) -> checkpoint of an adapter on tmp_path/base."""
    base = model_folder("base")
    edit(base / "config.json", auto_map=NAMES)

    def make(words=base, **changes):
        config = dataclasses.replace(
            presets.debug(), model=str(base), lora=c.LoraConfig(rank=2), **changes
        )
        return run_of(tmp_path, load_backbone(base), config, words)

    return make


def exported(checkpoint, out, **options):
    assert run_export(ExportOptions(str(checkpoint), out, **options)) == 0
    return out


def auto_map(out):
    return json.loads((out / "config.json").read_text()).get("auto_map")


def test_code_that_is_not_there_is_not_named(run, tmp_path):
    assert auto_map(exported(run(), tmp_path / "out")) is None


def test_the_bases_files_are_copied_as_they_are(run, tmp_path):
    """Whatever the named files import, packages and tokenizers' code too; nothing else."""
    base = tmp_path / "base"
    files = ["configuration_llada.py", "modeling_llada.py", "helper.py", "ops/__init__.py"]
    files += ["ops/deep/fast.py", "notes/plan.py", "weights.bin", "tokenization_own.py"]
    for file in files:
        (base / file).parent.mkdir(parents=True, exist_ok=True)
        (base / file).write_text(f"raise SystemExit({file!r})")  # running one would end the test
    config = json.loads((base / "tokenizer_config.json").read_text())
    extra = config.pop("extra_special_tokens")
    config |= {
        "tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": extra,
        "auto_map": {"AutoTokenizer": [None, "tokenization_own.Own"]}, "own_field": {"é": [1]},
    }  # fmt: skip
    (base / "tokenizer_config.json").write_text(json.dumps(config, indent=7))
    (base / "special_tokens_map.json").write_text("{ }")
    out = exported(run(), tmp_path / "out")
    assert auto_map(out) == NAMES
    copied = [*files[:5], "tokenization_own.py", "tokenizer.json", "tokenizer_config.json",
              "special_tokens_map.json", "chat_template.jinja"]
    for file in copied:
        assert (out / file).read_bytes() == (base / file).read_bytes(), file
    assert not (out / "notes").exists() and not (out / "weights.bin").exists()
    (out / "tokenization_own.py").unlink()
    again = json.loads((exported(out, tmp_path / "again") / "tokenizer_config.json").read_text())
    assert again == {k: v for k, v in config.items() if k != "auto_map"}


def test_no_symlink_leads_out_of_the_model(run, tmp_path):
    """What it leads to may be a secret; the Hub's cache is laid out so, though."""
    base, secret = tmp_path / "code", tmp_path / "id_rsa"
    base.mkdir()
    secret.write_text("secret")
    (base / "a.py").write_text("")
    (base / "b.py").symlink_to("a.py")
    x.copy_code(base, tmp_path / "out")
    (base / "c.py").symlink_to(secret)
    with pytest.raises(ValueError, match="c.py is a symlink out of its folder"):
        x.copy_code(base, tmp_path / "out2")
    blob = tmp_path / "models--a--b" / "blobs" / "1"
    snapshot = blob.parents[1] / "snapshots" / "2"
    for folder in (blob.parent, snapshot):
        folder.mkdir(parents=True)
    blob.write_text("code")
    (snapshot / "d.py").symlink_to(blob)
    x.copy_code(snapshot, tmp_path / "out3")
    assert [f.read_text() for f in (tmp_path / "out3").iterdir()] == ["code"]


def test_a_tokenizer_that_the_run_changed_is_written(run, tmp_path):
    base = tmp_path / "base"
    edit(base / "tokenizer_config.json", mask_token=None)
    words = load_tokenizer(base)
    add_mask_token(words, "[MASK]")
    words.save_pretrained(tmp_path / "words")
    out = exported(run(words=tmp_path / "words", mask_token="[MASK]"), tmp_path / "out")
    found = json.loads((out / "tokenizer_config.json").read_text())
    assert found["mask_token"] == "[MASK]" and found["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert found["additional_special_tokens"] == ["<|end|>"] and "extra_special_tokens" not in found
    assert x.same(load_tokenizer(out), words) and not x.same(load_tokenizer(base), words)


def test_the_base_is_found_through_runs_that_followed_each_other(run, tmp_path):
    first = run()
    second = exported(first, tmp_path / "second")
    (second / "modeling_llada.py").write_text("")
    later = dataclasses.replace(presets.debug(), model=str(first), lora=c.LoraConfig(rank=0))
    third = run_of(tmp_path / "third", load_backbone(second), later, second)
    assert x.origin_of(str(third), load_trained(str(third))) == x.Origin(
        str(tmp_path / "base"), str(tmp_path / "base")
    )
    alone = dataclasses.replace(later, model=None, tokenizer=str(second))
    fourth = run_of(tmp_path / "fourth", load_backbone(second), alone, second)
    assert x.origin_of(str(fourth), load_trained(str(fourth))) == x.Origin(
        None, str(second), "a random LLaDA"
    )
    assert x.origin_of(str(second), load_trained(str(second))).model == str(second)
    gone = load_trained(str(third))
    gone.state.update(config=gone.state["config"] | {"model": "some/gone"}, local=["model"])
    assert not hub.is_id(x.origin_of(str(third), gone).model)
    del gone.state["local"]
    assert hub.is_id(x.origin_of(str(third), gone).model)


def test_code_on_the_hub_is_named_with_its_repository():
    both = {"AutoTokenizer": ["tokenization_own.Own", None], "AutoModel": "else/where--m.M"}
    assert x.settle(both, "some/one") == {
        "AutoTokenizer": ["some/one--tokenization_own.Own", None], "AutoModel": "else/where--m.M"
    }  # fmt: skip
    assert x.settle(both, None) is None
    for wrong in ({"AutoModel": "../m.M;"}, {"AutoModel": "no_class"}, {"AutoModel": 3}):
        with pytest.raises(ValueError, match="names no classes"):
            x.settle(wrong, "some/one")


def test_files_on_the_hub_are_those_of_its_snapshot(run, tmp_path, monkeypatch, tokenizer_folder):
    (tmp_path / "base" / "vocab.json").write_text("{}")  # the snapshot has none

    def snapshot(origin, patterns):
        assert origin == "some/words" and "tokenizer.json" in patterns
        return tokenizer_folder

    trained = load_trained(str(run()))
    monkeypatch.setattr(hub, "snapshot", snapshot)
    (tmp_path / "out").mkdir()
    x.write_tokenizer(trained, "some/words", tmp_path / "out")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        file.name for file in tokenizer_folder.iterdir()
    }

    def gone(*_, **__):
        raise FileNotFoundError("offline")

    monkeypatch.setattr(hub, "snapshot", gone)
    (tmp_path / "own").mkdir()
    x.write_tokenizer(trained, "some/words", tmp_path / "own")
    assert x.same(load_tokenizer(tmp_path / "own"), trained.tokenizer)


# --- the model card ---


def test_the_card_says_what_the_run_says(run, tmp_path):
    (tmp_path / "base/README.md").write_text("---\nlicense: mit\nbase_model: x/y\n---\ntext")
    data = "some/*set*`<b>`|\n# no.jsonl"
    checkpoint = run(data=data, steps=7, context="cached")
    log = [{"step": 0, "nelbo": 2.5}, {"step": 1, "nelbo": 1.25}, {"step": 9, "nelbo": 0.1}]
    lines = "".join(json.dumps(line) + "\n" for line in log)
    (checkpoint.parents[1] / "eval.jsonl").write_text(lines)
    out = exported(checkpoint, tmp_path / "my model")
    front, text = metadata_load(out / "README.md"), (out / "README.md").read_text()
    assert front["license"] == "mit" and front["library_name"] == "bwsft"
    assert "base_model" not in front and "datasets" not in front  # neither is on the Hub
    for line in (
        "# my model", "trained with Blockwise SFT", "Base: `base`, a local folder.",
        "- data: `*set*'<b>'| # no.jsonl`\n",
        "- updates: 1, of 32 sequences each", "LoRA, r 2, alpha 512",
        "2.5000 nats per token at update 0, 1.2500 at update 1\n",
        "bwsft generate --model 'my model' --prompt", 'Decoder.load("my model"',
        "context mode `cached`, blocks of 8 on a canvas of 40 tokens",
        "arXiv:2508.19529", "Sun and Cai and Yang and Wang",
    ):  # fmt: skip
        assert line in text, line
    assert str(tmp_path) not in text


def test_the_card_names_what_is_on_the_hub(run):
    trained = load_trained(str(run(data="some/set")))
    trained.state["examples"] = {"train": 1234, "held_out": 5}
    text = model_card(trained, x.Origin("some/base", "some/base"), "me/mine")
    front = text.split("---")[1]
    assert "base_model: some/base" in front and "- some/set" in front and "license" not in front
    assert "[some/base](https://huggingface.co/some/base)" in text and "NELBO" not in text
    assert "- data: `some/set`; 1,234 examples, 5 more held out" in text
    trained.state["local"] = ["data"]  # a folder, when it was read
    assert "some/set" not in model_card(trained, x.Origin(None, "some/base"), "me/mine")
    foreign = dataclasses.replace(trained, state=None, assumed=("template",))
    text = model_card(foreign, x.Origin("some/base", "some/base"), "me/mine")
    assert "## Training" not in text and "template" not in text and "## Decoding" in text


# --- pushing ---


class Hub:
    calls = []

    def create_repo(self, *arguments, **options):
        self.calls.append((*arguments, options))

    def upload_folder(self, repo_id, folder_path):
        self.calls.append((repo_id, folder_path))


def test_push_uploads_the_folder_that_was_written(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    out = exported(run(), tmp_path / "out", push="me/mine", private=True)
    assert Hub.calls == [("me/mine", {"private": True, "exist_ok": True}), ("me/mine", str(out))]
    assert "https://huggingface.co/me/mine" in capsys.readouterr().out
    assert "# me/mine" in (out / "README.md").read_text()


def test_a_push_that_fails_keeps_the_folder_and_says_what_to_do(run, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise huggingface_hub.errors.OfflineModeIsEnabled("offline mode")

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(Hub, "create_repo", refuse)
    checkpoint = run()
    message = r"written, but could not be pushed to me/mine \(offline mode\): log in"
    with pytest.raises(ValueError, match=message):
        run_export(ExportOptions(str(checkpoint), tmp_path / "out", push="me/mine"))
    assert (tmp_path / "out/model.safetensors").exists()
    for options, message in (({"push": "mine"}, "no ORG/NAME"), ({"private": True}, "--push ORG")):
        with pytest.raises(ValueError, match=message):
            run_export(ExportOptions(str(checkpoint), tmp_path / "two", **options))
    assert not (tmp_path / "two").exists()
