"""What a folder says of how its model is decoded: read strictly, believed by every reader."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from tiny_folders import edit
from transformers import GenerationConfig

from bwsft import presets
from bwsft.checkpoints import generation_config as g
from bwsft.checkpoints.resolve import load_trained
from bwsft.decoding.config import DecodeConfig
from bwsft.decoding.pipeline import Decoder
from bwsft.decoding.settings import DecoderOptions
from bwsft.models.loading import load_backbone

OLD_RUN = Path(__file__).with_name("written_before") / "run"


@pytest.fixture
def folder(model_folder):
    """A model folder that says how it is decoded."""
    path = model_folder()
    backbone = load_backbone(path)
    config = dataclasses.replace(presets.debug(), context="cached", gen_length=24, block_size=6)
    tokenizer = load_trained(str(path)).tokenizer
    g.write_generation_config(path, backbone, g.DecodingContract.of(config, backbone.family))
    assert tokenizer.eos_token_id == 256
    return path


def test_what_is_written_is_read_and_followed(folder, capsys):
    contract = g.read_contract(folder)
    assert g.DecodingContract(
        template="chat", context="cached", block_size=6, gen_length=24, canvas="fixed",
        block_origin="response", end_ids=(256,), logit_shift=0, mask_id=257,
    ) == contract  # fmt: skip
    capsys.readouterr()
    decoder = Decoder.load(str(folder), DecoderOptions())
    assert decoder.config == DecodeConfig(24, 6, context="cached")
    assert decoder.template.name == "chat" and decoder.trained.contract == contract
    assert decoder.trained.backbone.family.end_ids == (256,)
    assert "assumed" not in capsys.readouterr().err
    settings = GenerationConfig.from_pretrained(folder)
    assert (settings.eos_token_id, settings.block_length, settings.bwsft["context"]) == (
        [256], 6, "cached"
    )  # fmt: skip


@pytest.mark.parametrize("changes, message", [
    ({"block_size": "6"}, "block_size must be a whole number, not '6'"),
    ({"block_size": True}, "block_size must be a whole number, not true"),
    ({"gen_length": 20}, "block_size 6 must divide gen_length 20"),
    ({"block_size": 0}, "block_size 0 must divide"),
    ({"template": "vicuna"}, "template must be 'metamath'"),
    ({"template_args": {"a": 1}}, "template_args must be"),
    ({"context": "prefix"}, "context must be 'exact'"),
    ({"end_ids": []}, "end_ids must be token ids, one at least"),
    ({"end_ids": [256.0]}, r"end_ids\[0\] must be a whole number"),
    ({"end_ids": [256, 320]}, "end_ids has 320, no token id"),
    ({"mask_id": 256}, "says mask_id 256, and the model's is 257"),
    ({"logit_shift": 1}, "says logit_shift 1, and the model's is 0"),
    ({"block_origin": "absolute"}, "says block_origin absolute"),
    ({"canvas": None}, "canvas must be"),
])  # fmt: skip
def test_wrong_values_are_refused_by_the_name_of_the_file(folder, changes, message):
    file = folder / g.FILE
    found = json.loads(file.read_text())[g.KEY] | changes
    edit(file, **{g.KEY: found})
    with pytest.raises(ValueError, match=message) as error:
        load_trained(str(folder))
    assert str(file) in str(error.value)


def test_what_a_later_version_adds_is_passed_over_and_what_lacks_is_named(folder):
    file = folder / g.FILE
    found = json.loads(file.read_text())[g.KEY]
    edit(file, **{g.KEY: found | {"taste": "sweet"}})
    assert g.read_contract(folder).block_size == 6
    del found["context"]
    for wrong, message in ((found, "field context is missing"), ([1], "must be an object")):
        edit(file, **{g.KEY: wrong})
        with pytest.raises(ValueError, match=message):
            g.read_contract(folder)
    edit(file, **{g.KEY: None})
    assert g.read_contract(folder) is None and load_trained(str(folder)).assumed


def test_the_embedded_base_says_that_it_is_made_for_the_debug_preset(capsys):
    trained = load_trained(None)
    words = trained.tokenizer
    assert trained.contract == g.DecodingContract.of(
        presets.debug(), trained.backbone.family, words
    )
    Decoder.load(None, DecoderOptions())
    assert "assumed" not in capsys.readouterr().err


def test_an_older_checkpoint_is_decoded_by_its_state(tmp_path):
    shutil.copytree(OLD_RUN, tmp_path / "run")
    trained = load_trained(str(tmp_path / "run"))
    assert not (Path(trained.folder) / g.FILE).exists() and not trained.assumed
    config = trained.state["config"]
    for name in ("context", "block_size", "gen_length"):
        assert getattr(trained.contract, name) == config[name]
    assert trained.contract.context == "cached" and trained.contract.template == "chat"
