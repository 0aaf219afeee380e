"""DiffusionGemma from end to end by the commands' own road: training, checkpoints, resuming."""

import dataclasses
import json

import pytest
import torch
from bwsft_kernels.philox import Stream, philox_u24
from safetensors.torch import load_file
from tiny_diffusion_gemma import CANVAS, tiny_folder
from tiny_folders import edit, same
from tiny_runs import before_step, resumed
from transformers import DiffusionGemmaForBlockDiffusion, DynamicCache

from bwsft import config as c
from bwsft.checkpoints.resolve import load_trained
from bwsft.cli import main
from bwsft.commands.dry_run import count, step_of
from bwsft.commands.train import parse_train
from bwsft.decoding.pipeline import Decoder
from bwsft.decoding.settings import DecoderOptions
from bwsft.models.families import read_config
from bwsft.models.loading import load_backbone, read_family
from bwsft.objectives.config import ObjectiveConfig, UniformConfig
from bwsft.training.setup import setup, train
from bwsft.training.trainer import evaluate, train_step

UNIFORM = dict(
    objective=ObjectiveConfig(name="uniform"), context="block_causal", clean_attention="causal"
)


@pytest.fixture(scope="module")
def folder(tokenizer_folder, tmp_path_factory):
    """A random model in the published layout, with a tokenizer whose [MASK] means nothing to it."""
    return tiny_folder(tmp_path_factory.mktemp("gemma") / "model", tokenizer_folder)


@pytest.fixture
def gemma(tiny, folder):
    """gemma(**changes) -> Config of a run of 2 updates."""
    plain = dict(model=str(folder), tokenizer=None, steps=2, save_every=1, block_size=CANVAS)
    evaluated = c.EvalConfig(every=2, draws=1)
    return lambda **changes: tiny(**plain | UNIFORM | {"eval": evaluated} | changes)


def logged(run, name="metrics"):
    lines = (run / f"{name}.jsonl").read_text().splitlines()
    times = ("seconds", "data_seconds")
    return [{k: v for k, v in json.loads(line).items() if k not in times} for line in lines]


WAYS = {
    "full": dict(ar_weight=0.3),
    "lora": dict(
        lora=c.LoraConfig(rank=2, dropout=0.1), draws_per_context=2, grad_checkpointing=True,
        objective=ObjectiveConfig(name="uniform", uniform=UniformConfig(0.7, one_block=True)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", [pytest.param("full", marks=pytest.mark.slow), "lora"])
def test_a_run_that_is_stopped_goes_on_to_the_same_numbers(way, gemma, tmp_path, monkeypatch):
    whole = gemma(out=str(tmp_path / "whole"), **WAYS[way])
    assert train(whole, saves_on_signal=False) == 0
    parted = dataclasses.replace(whole, out=str(tmp_path / "parted"))
    with monkeypatch.context() as patch:

        def fail(*_):
            raise RuntimeError("power cut")

        before_step(patch, fail, only=1)
        with pytest.raises(RuntimeError, match="power cut"):
            train(parted, saves_on_signal=False)
    assert train(resumed(parted, tmp_path / "parted"), saves_on_signal=False) == 0
    for name in ("metrics", "eval"):
        assert logged(tmp_path / "whole", name) == logged(tmp_path / "parted", name)
    assert [e["step"] for e in logged(tmp_path / "whole", "eval")] == [0, 2]
    name = "adapter_model" if whole.lora.rank else "model"
    folders = (tmp_path / run / "checkpoints/step-2" for run in ("whole", "parted"))
    one, other = (load_file(folder / f"{name}.safetensors") for folder in folders)
    assert same(one, other)
    if whole.lora.rank:
        assert all(".decoder.layers." in key for key in one)
        assert all(weight.abs().max() > 0 for weight in one.values())


def test_micro_batches_add_up_and_the_step_is_the_modes(gemma, make_run):
    """In float64 the split of an update changes nothing but the order of sums; a step's loss is the
    mean over its examples of the loss of each by itself."""
    found = {}
    for micro in (4, 1):
        config = gemma(micro_batch_size=micro, ar_weight=0.3, out=f"{gemma().out}-{micro}")
        run = make_run(config, torch.float64)
        found[micro] = train_step(run, 0), run
    (whole, one), (parts, other) = found.values()
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)
    assert (parts.tokens, parts.supervised_tokens) == (whole.tokens, whole.supervised_tokens)
    named = dict(other.backbone.named_parameters())
    for name, weight in one.backbone.named_parameters():
        # Norms are float32 in transformers, whatever the weights are.
        torch.testing.assert_close(named[name], weight, rtol=1e-4, atol=1e-6)
    values = {evaluate(one), evaluate(one)}
    assert len(values) == 1 and 2 < values.pop() < 20


def test_a_checkpoint_is_one_of_transformers(gemma, tmp_path):
    assert train(gemma(steps=1), saves_on_signal=False) == 0
    step = tmp_path / "run/checkpoints/step-1"
    theirs = DiffusionGemmaForBlockDiffusion.from_pretrained(step)
    ours = load_trained(str(tmp_path / "run"))
    assert same(theirs.state_dict(), ours.backbone.base_model.state_dict())
    assert theirs.generation_config.max_denoising_steps == 5  # as the model came
    assert theirs.generation_config.eos_token_id == list(ours.contract.end_ids) == [258, 256]
    assert (ours.contract.template, ours.contract.block_size) == ("chat", CANVAS)


def test_the_command_takes_the_models_objective(folder, data_file, capsys):
    asked = ["debug", "--model", str(folder), "--data", str(data_file)]
    config = parse_train(asked)
    assert config.objective.name == "uniform" and config.block_size == CANVAS
    assert (config.context, config.clean_attention) == ("block_causal", "causal")
    assert parse_train([*asked, "--block-size", "8"]).block_size == 8
    assert parse_train([*asked, "--gen-length", "6"]).gen_length == 8
    assert "--gen-length 8" in capsys.readouterr().out
    assert parse_train(["debug"]).objective.name == "blockwise"


@pytest.mark.parametrize(("words", "said"), [
    ("--objective.name blockwise", "--objective.name uniform --context block_causal --clean"),
    ("--objective.name mdlm", "--objective.name mdlm masks tokens, and this model has no [MASK]"),
    ("--mask-token [MASK]", "--mask-token: undecided tokens of this model are random"),
    ("--parallel fsdp", "--parallel fsdp splits layers, which the two halves"),
    ("--context cached", "--clean-attention causal is for --context block_causal"),
    ("--objective.empty skip", "--objective.empty belongs to blockwise and classical SFT"),
    ("--logit-shift 1", "--logit-shift 1: in this model it is 0"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(words, said, folder, data_file, tmp_path, capsys):
    asked = f"train debug --model {folder} --data {data_file} --out {tmp_path}/run {words}"
    assert main(asked.split()) == 2
    assert said in capsys.readouterr().err


def test_a_model_of_masks_refuses_random_tokens(tiny):
    config = tiny(**UNIFORM)
    with pytest.raises(ValueError, match="this one has a .MASK.: take --objective.name blockwise"):
        setup(config, c.run_folder(config), None)


def test_another_size_of_blocks_is_that_of_the_canvas_from_then_on(gemma, tmp_path):
    with pytest.warns(UserWarning, match=f"made for blocks of {CANVAS}, --block-size is 8"):
        assert train(gemma(steps=1, block_size=8), saves_on_signal=False) == 0
    described = json.loads((tmp_path / "run/checkpoints/step-1/config.json").read_text())
    assert described["canvas_length"] == 8


@pytest.mark.parametrize(("part", "change", "said"), [
    ("text_config", {"num_experts": None}, "text_config lacks num_experts"),
    ("text_config", {"hidden_size": "x"}, "hidden_size"),
    ("text_config", {"num_hidden_layers": 10**6}, "num_hidden_layers of text_config"),
    ("text_config", {"per_layer_config": {"2": {"head_dim": 16}}}, "has shape"),
    ("vision_config", {"hidden_size": 16}, "has shape"),
    (None, {"vision_config": 3}, "must be objects"),
    (None, {"dtype": "int8"}, "dtype int8"),
    (None, {"tie_word_embeddings": False}, "lacks tensors"),
])  # fmt: skip
def test_wrong_configs_are_refused_in_a_sentence(part, change, said, folder, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    described = json.loads((folder / "config.json").read_text())
    edit(copy / "config.json", **({part: described[part] | change} if part else change))
    with pytest.raises(ValueError, match=said) as refused:
        load_backbone(copy)
    assert str(copy) in str(refused.value) and len(str(refused.value)) < 500


def test_only_fields_of_the_model_reach_transformers(folder, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    expected = load_backbone(copy).model.config.to_dict()
    described = json.loads((folder / "config.json").read_text())
    poison = {"attn_implementation": "evil/kernel", "_attn_implementation": [1], "auto_map": {},
              "experts_implementation": "evil/kernel", "name_or_path": "evil/model"}  # fmt: skip
    parts = {name: described[name] | poison for name in ("text_config", "vision_config")}
    parts["text_config"]["per_layer_config"]["2"]["hidden_size"] = 1
    edit(copy / "config.json", **poison, **parts)
    assert load_backbone(copy).model.config.to_dict() == expected
    edit(copy / "generation_config.json", sampler_config={"_cls_name": "Evil", "entropy_bound": 1})
    with pytest.raises(ValueError, match="EntropyBoundSamplerConfig, the one that is known"):
        load_backbone(copy)
    assert read_family(copy).noise == "uniform"


# --- export and decoding ---


def adapted(gemma, root):
    """A run of an adapter that changes the model."""
    config = gemma(steps=1, lora=c.LoraConfig(rank=2, alpha=16.0), optim=c.OptimConfig(lr=0.3),
                   eval=c.EvalConfig(every=0))  # fmt: skip
    assert train(config, saves_on_signal=False) == 0
    return str(root / "run")


@torch.no_grad()
def logits(model, prompt, canvas):
    cache = DynamicCache(config=model.config.text_config)
    given = {"cache": cache, "decoder_input_ids": canvas}
    return model(input_ids=prompt, **given).logits


def test_a_merged_adapter_is_a_model_of_transformers_that_decodes_alike(gemma, tmp_path, capsys):
    run, out = adapted(gemma, tmp_path), tmp_path / "out"
    assert main(["export", "--model", run, "--out", str(out)]) == 0
    theirs = DiffusionGemmaForBlockDiffusion.from_pretrained(out).eval()
    base = DiffusionGemmaForBlockDiffusion.from_pretrained(gemma().model).eval()
    ours = load_trained(run)
    stored = load_file(out / "model.safetensors").keys()
    assert stored == load_file(f"{gemma().model}/model.safetensors").keys()  # the published names
    torch.manual_seed(0)
    prompt, canvas = torch.randint(256, (1, 11)), torch.randint(320, (1, CANVAS))
    expected = logits(theirs, prompt, canvas)
    with ours.backbone.shared():
        found = logits(ours.backbone.base_model, prompt, canvas)
    moved = (expected - logits(base, prompt, canvas)).abs().max()
    assert (expected - found).abs().max() < 1e-4 < moved
    card = (out / "README.md").read_text()
    assert "block-diffusion" in card and "[MASK]" not in card and "`bwsft.json`" in card
    texts = []
    for model in (run, str(out)):
        assert main(["generate", "--model", model, "--prompt", "1+1", "--steps", "8"]) == 0
        said = capsys.readouterr()
        texts.append(said.out.splitlines()[-1])
        assert "TPF" in said.err and "assumed" not in said.err
    assert texts[0] == texts[1]


def test_generate_is_the_published_sampler(folder, tmp_path):
    """Token for token, with passes that are its steps and its encoder's, whatever is beside it."""
    asked = DecoderOptions(gen_length=12, template="none", dtype="float32")
    decoder = Decoder.load(str(folder), asked)
    prompts = decoder.encode(["1+1", "what?", "12"])
    found = list(decoder.answers(prompts, trace=True))
    again = list(decoder.answers(prompts, skip=1))
    assert [f.tokens for f in found[1:]] == [f.tokens for f in again] and not again[0].trace
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(folder).eval()
    for request, (prompt, ours) in enumerate(zip(prompts, found, strict=True)):
        high, low = philox_u24(torch.arange(2), 0, request, seed=0, stream=Stream.GUMBEL).tolist()
        torch.manual_seed(high << 24 | low)
        ids = torch.tensor([list(prompt)])
        made = model.generate(input_ids=ids, max_new_tokens=12, eos_token_id=[256])
        written = made.sequences[0, len(prompt) :].tolist()
        end = written.index(256) if 256 in written else len(written)
        assert ours.tokens == written[:end] and ours.ended == (256 in written)
        canvases = len(written) // CANVAS
        steps = (len(written) - written.count(259)) / made.tokens_per_forward
        assert ours.steps == round(float(steps)) and ours.passes == ours.steps + canvases
        last = {commit.position: commit.token for commit in ours.trace}
        assert [last[i] for i in range(end)] == written[:end]
        assert max(commit.step for commit in ours.trace) < ours.steps
        assert all(0 < commit.confidence <= 1 for commit in ours.trace)


@pytest.mark.parametrize(("options", "said"), [
    (dict(rule="threshold"), "rule threshold fills .MASK.s, and undecided tokens of this model"),
    (dict(temperature=1.0), "temperature is no setting of this model's sampler"),
    (dict(top_k=3), "top_k is no setting"),
    (dict(context="exact"), "has no context exact"),
])  # fmt: skip
def test_settings_that_the_sampler_lacks_are_refused(options, said, folder):
    with pytest.raises(ValueError, match=said):
        options = DecoderOptions(gen_length=8, template="none", **options)
        decoder = Decoder.load(str(folder), options)
        list(decoder.answers(decoder.encode(["12"])))


def test_a_model_of_masks_has_no_such_rule():
    with pytest.raises(ValueError, match="rule renoise is for models whose undecided tokens"):
        Decoder.load(None, DecoderOptions(rule="renoise", context="block_causal")).encode(["1"])


def test_there_is_nothing_to_compare(folder, tmp_path, capsys):
    (tmp_path / "asked.jsonl").write_text('{"query": "1+1", "response": "2"}\n')
    asked = ["compare", "--model", str(folder), "--data", str(tmp_path / "asked.jsonl")]
    asked += ["--template", "none", "--gen-length", "8"]
    for modes, said in (("exact,cached", "no context exact: its only one is block_causal"),
                        ("block_causal", "decodes in one way: there is nothing to compare")):
        rule = ["--modes", modes, "--rule", "threshold", "--thresholds", "1,0.5"]
        assert main([*asked, *rule]) != 0
        assert said in capsys.readouterr().err


def test_steps_and_bound_are_those_that_are_asked_for(folder):
    options = dict(gen_length=8, template="none", rule="renoise")
    plain = Decoder.load(str(folder), DecoderOptions(**options))
    short = Decoder.load(str(folder), DecoderOptions(steps=4, **options))
    sure = Decoder.load(str(folder), DecoderOptions(entropy_bound=100.0, **options))
    [found], [two], [other] = (list(d.answers(d.encode(["12+3"]))) for d in (plain, short, sure))
    assert (found.steps, two.steps) == (10, 4)  # two canvases of 5 steps, and of 2
    assert other.tokens != found.tokens
    assert sure.config.entropy_bound == 100
    model = sure.backbone
    assert len(model.write_canvases([5, 6], 0, canvas=8, max_new_tokens=8)) == 8
    assert model.base_model.config.canvas_length == CANVAS  # as it was


# --- what is told before a run ---


@pytest.mark.parametrize(("words", "tokens", "supervised"), [
    ("", 8 + 12 + 16, 16),
    pytest.param("--ar-weight 0.1", 8 + 16 + 16, 32, marks=pytest.mark.slow),
    pytest.param("--objective.uniform.one-block", None, CANVAS, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_dry_run_counts_what_a_step_takes(folder, data_file, capsys, words, tokens, supervised):
    """Of two layers more than the model has, too, which follow from the kinds of its own."""
    asked = f"train debug --model {folder} --data {data_file} --gen-length 16 --max-length 24"
    more = "--batch-size 2 --micro-batch-size 1 --steps 3 --objective.uniform.self-conditioning 0"
    with pytest.raises(SystemExit):
        main([*asked.split(), *more.split(), *words.split(), "--dry-run"])
    said = capsys.readouterr().out
    assert tokens is None or f"tokens through the layers: {2 * tokens} an update" in said
    assert f"supervised tokens: {2 * supervised} an update" in said and "memory: " in said


@pytest.mark.slow
def test_a_hollow_model_counts_what_a_whole_one_takes(folder, gemma):
    config = gemma(objective=ObjectiveConfig(name="uniform", uniform=UniformConfig(0.0)))
    shape = read_config(folder)
    counted = count(config, shape)
    backbone = load_backbone(folder).train()
    tokens, flops = step_of(config, backbone)
    assert counted.tokens == tokens and counted.flops == pytest.approx(flops, rel=0.01)


@pytest.mark.slow
def test_the_preset_trains_a_small_one(folder, data_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("BWSFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    run = str(tmp_path / "run")
    words = f"--model {folder} --data {data_file} --lora.rank 2 --batch-size 2 --steps 1"
    words += f" --out {run}"
    assert main(["train", "diffusiongemma-26b-lora", *words.split()]) == 0
    contract = load_trained(run).contract
    assert (contract.template, contract.block_size, contract.gen_length) == ("chat", CANVAS, 16)
