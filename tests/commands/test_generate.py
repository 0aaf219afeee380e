"""`bwsft generate`: what is read, printed, written and resumed, and whose settings hold."""

import dataclasses
import json
import os

import pytest
import torch
import tyro
from jsonl import read as rows
from jsonl import write
from transformers import LlamaConfig, LlamaForCausalLM

from bwsft import config as c
from bwsft.checkpoints.folders import save_checkpoint
from bwsft.checkpoints.resolve import TINY, load_trained
from bwsft.cli import main
from bwsft.commands import generate as infer
from bwsft.commands.generate import run_generate
from bwsft.commands.options import GenerateOptions
from bwsft.data.chat_template import Template
from bwsft.data.tokenizer import load_tokenizer
from bwsft.decoding import pipeline
from bwsft.decoding.config import DecodeConfig
from bwsft.decoding.generate import generate
from bwsft.decoding.pipeline import AskedModel
from bwsft.decoding.result import Generation
from bwsft.decoding.settings import DecoderOptions
from bwsft.evaluation.pass_at_1 import EvaluateOptions, evaluate
from bwsft.models.llada_config import LladaConfig
from bwsft.models.loading import new_backbone
from bwsft.models.verifier import load_verifier
from bwsft.training.optim import make_optimizer
from bwsft.utils.lines import printable

QUESTIONS = ["1+1", "What is 12 * 12?", "a", "Say\nnothing", "7"]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory, tokenizer_folder):
    """A run folder that remembers template "none", gen_length 12 and block_size 4; a random model
    that produces end tokens often."""
    root = tmp_path_factory.mktemp("infer")
    shape = dict(d_model=32, n_layers=2, n_heads=2, mlp_hidden_size=48, max_sequence_length=256)
    ids = dict(vocab_size=264, mask_token_id=257, eos_token_id=256, pad_token_id=256)
    backbone = new_backbone(LladaConfig(**shape, **ids), 1)
    with torch.no_grad():
        for name, weight in backbone.model.named_parameters():
            if "proj" in name or "_out" in name:
                weight.mul_(3)
        backbone.head()[0][[256, 258]] *= 4
    backbone.family = dataclasses.replace(backbone.family, end_ids=(258, 256))
    config = c.Config(
        preset="debug", gen_length=12, block_size=4, dataset=c.DataConfig(template="none"),
        lora=c.LoraConfig(rank=0),
    )
    state = {"config": json.loads(c.to_json(config)), "data": "", "base": None}
    words = load_tokenizer(tokenizer_folder)
    optimizer = make_optimizer(backbone, config.optim)
    save_checkpoint(root / "run", 1, backbone, words, optimizer, state)
    return root / "run"


@pytest.fixture
def prompts(tmp_path):
    return write(tmp_path / "prompts.jsonl", *({"question": q, "id": 1} for q in QUESTIONS))


def options(run_folder, prompts, tmp_path, **changes):
    found = {"model": str(run_folder), "prompts": prompts, "out": tmp_path / "out.jsonl"}
    return GenerateOptions(**{**found, **changes})


def expected(run_folder, template="none", **config):
    trained = load_trained(str(run_folder))
    encoded = Template(trained.tokenizer, template).encode_prompts(QUESTIONS)
    decoding = DecodeConfig(**{"gen_length": 12, "block_size": 4, **config})
    return trained.tokenizer, generate(trained.backbone, encoded, decoding, trace=True)


def test_answers_are_those_of_generate_with_the_training_settings(
    run_folder, prompts, tmp_path, capsys
):
    assert run_generate(options(run_folder, prompts, tmp_path, batch_size=2)) == 0
    found = rows(tmp_path / "out.jsonl")
    assert [row["question"] for row in found] == QUESTIONS
    tokenizer, results = expected(run_folder)
    rate = sum(len(r.tokens) for r in results) / sum(r.passes for r in results)
    told = f"out.jsonl, {rate:.2f} tokens per forward pass (TPF)\n"
    assert told in capsys.readouterr().err
    run_generate(options(run_folder, prompts, tmp_path, resume=True))  # of old answers too
    assert told in capsys.readouterr().err
    assert {result.ended for result in results} == {True, False}
    for row, result in zip(found, results, strict=True):
        text = tokenizer.decode(result.tokens, skip_special_tokens=True)
        counts = (len(result.tokens), not result.ended, result.steps)
        assert row.pop("run").isalnum() and row.pop("output") == text
        assert (row["tokens"], row["truncated"], row["steps"]) == counts


def test_options_beat_the_training_settings(run_folder, prompts, tmp_path, capsys):
    changes = {"gen_length": 16, "block_size": 8, "steps": 4, "temperature": 1.5, "seed": 8,
               "cfg_scale": 1.0}  # fmt: skip
    run_generate(options(run_folder, prompts, tmp_path, template="chat", **changes))
    tokenizer, results = expected(run_folder, "chat", **changes)
    for row, result in zip(rows(tmp_path / "out.jsonl"), results, strict=True):
        assert row["output"] == tokenizer.decode(result.tokens, skip_special_tokens=True)
        assert row["steps"] == result.steps <= 4
        assert result.passes == 2 * result.steps
    rate = sum(len(r.tokens) for r in results) / sum(r.passes for r in results)
    assert f", {rate:.2f} tokens per forward pass" in capsys.readouterr().err


def test_one_prompt_is_printed(run_folder, capsys):
    assert run_generate(GenerateOptions(model=str(run_folder), prompt=QUESTIONS[1])) == 0
    shown = capsys.readouterr()
    tokenizer, results = expected(run_folder)
    # Noise-free, so that the prompt's number does not matter.
    answer = tokenizer.decode(results[1].tokens, skip_special_tokens=True)
    assert shown.out == printable(answer) + "\n"
    one = results[1]
    rate = f"and {one.passes} forward passes, TPF {len(one.tokens) / one.passes:.2f}"
    assert f"[{len(one.tokens)} tokens in {one.steps} steps {rate}" in shown.err


@pytest.mark.parametrize("at", [0, 3, 40, -1])
def test_a_killed_run_is_resumed_to_the_same_file(run_folder, prompts, tmp_path, at):
    """Whatever byte the file was cut at, and with noise, which depends on the prompt's number."""
    trace = tmp_path / "trace.jsonl"
    noise = {"temperature": 0.9, "dtype": "float64"}
    full = options(run_folder, prompts, tmp_path, **noise, batch_size=2, trace=trace)
    run_generate(full)
    whole, traces = full.out.read_bytes(), rows(trace)
    lines = whole.splitlines(keepends=True)
    cut = whole.index(lines[3]) + (at if at >= 0 else len(lines[3]) - 1)
    full.out.write_bytes(whole[:cut])
    run_generate(dataclasses.replace(full, resume=True, batch_size=3))
    assert full.out.read_bytes() == whole
    # Confidences may differ in the last bit: batches of other sizes sum in another order.
    steps = [[row["question"], [entry[:3] for entry in row["commits"]]] for row in rows(trace)]
    assert steps == [[r["question"], [entry[:3] for entry in r["commits"]]] for r in traces]


def test_results_are_flushed_as_they_come(run_folder, prompts, tmp_path, monkeypatch):
    config = options(run_folder, prompts, tmp_path)

    def two_then_crash(*args, **kwargs):
        yield 1, Generation([65], True, 1)
        assert not config.out.read_text()  # lines keep the order of the prompts
        yield 0, Generation([66], True, 1)
        assert [row["output"] for row in rows(config.out)] == ["c", "b"]
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "decode_stream", two_then_crash)
    with pytest.raises(KeyboardInterrupt):
        run_generate(config)
    monkeypatch.undo()
    assert len(rows(config.out)) == 2


def test_finished_files_need_no_decoding(run_folder, prompts, tmp_path, monkeypatch):
    config = options(run_folder, prompts, tmp_path)
    run_generate(config)
    before = config.out.read_bytes()
    monkeypatch.setattr("bwsft.decoding.generate.denoise", None)
    run_generate(dataclasses.replace(config, resume=True))
    assert config.out.read_bytes() == before


def test_nothing_is_overwritten_or_mixed(run_folder, prompts, tmp_path):
    config = options(run_folder, prompts, tmp_path)
    run_generate(config)
    before = config.out.read_bytes()
    with pytest.raises(ValueError, match="out.jsonl exists: .* by --resume"):
        run_generate(config)
    for changes in ({"seed": 1}, {"gen_length": 8}, {"template": "chat"}, {"dtype": "float64"}):
        with pytest.raises(ValueError, match="line 1 is not the answer to prompt 1 under these"):
            run_generate(dataclasses.replace(config, resume=True, **changes))
    prompts.write_text(prompts.read_text().replace("nothing", "something"))
    with pytest.raises(ValueError, match="line 4 is not the answer to prompt 4"):
        run_generate(dataclasses.replace(config, resume=True))
    prompts.write_text("".join(prompts.read_text().splitlines(keepends=True)[:3]))
    with pytest.raises(ValueError, match="line 4 is not"):
        run_generate(dataclasses.replace(config, resume=True))
    with pytest.raises(ValueError, match="trace.jsonl has 0 lines for 3 answers"):
        config.out.write_bytes(b"".join(before.splitlines(keepends=True)[:3]))
        run_generate(dataclasses.replace(config, resume=True, trace=tmp_path / "trace.jsonl"))
    assert before.startswith(config.out.read_bytes()) and len(rows(config.out)) == 3


@pytest.mark.parametrize("flag", ["out", "trace"])
def test_a_file_of_somebodys_is_not_gone_on_with(run_folder, prompts, tmp_path, flag):
    """One line without its end, as a torn one of ours has none; nor through a symlink."""
    mine, link = tmp_path / "thesis.tex", tmp_path / "link"
    mine.write_text('{"run": "what I wrote')
    link.symlink_to(mine)
    for path, message in ((mine, "line 1 is not the answer to prompt 1"), (link, "is a symlink")):
        with pytest.raises(ValueError, match=message):
            run_generate(options(run_folder, prompts, tmp_path, resume=True, **{flag: path}))
    assert mine.read_text() == '{"run": "what I wrote'
    assert sorted(os.listdir(tmp_path)) == ["link", "prompts.jsonl", "thesis.tex"]


@pytest.mark.parametrize("resume", [False, True])
def test_two_runs_do_not_write_one_file(run_folder, prompts, tmp_path, monkeypatch, resume):
    config, load = options(run_folder, prompts, tmp_path), pipeline.Decoder.load

    def second(*arguments):
        monkeypatch.setattr(pipeline.Decoder, "load", load)
        with pytest.raises(ValueError, match="out.jsonl is being written by another process"):
            run_generate(dataclasses.replace(config, resume=resume))
        return load(*arguments)

    monkeypatch.setattr(pipeline.Decoder, "load", second)
    run_generate(config)
    assert [row["question"] for row in rows(config.out)] == QUESTIONS


def test_a_trace_tells_every_commitment(run_folder, prompts, tmp_path):
    trace = tmp_path / "trace.jsonl"
    run_generate(options(run_folder, prompts, tmp_path, trace=trace))
    tokenizer, results = expected(run_folder)
    for row, question, result in zip(rows(trace), QUESTIONS, results, strict=True):
        assert (row["question"], row["gen_length"], row["block_size"]) == (question, 12, 4)
        assert [tuple(entry[:3]) for entry in row["commits"]] == [x[:3] for x in result.trace]
        assert all(0 < entry[3] <= 1 for entry in row["commits"])
        for _, _, token, _ in row["commits"]:
            assert row["tokens"][str(token)] == tokenizer.decode([token])


@pytest.mark.parametrize("name, content", [
    ("p.txt", "1+1\n\nWhat?\n"),
    ("p", "\ufeff1+1\r\nWhat?"),
    ("p.csv", "prompt,n\n1+1,1\nWhat?,2\n"),
    ("p.json", '[{"query": "1+1"}, {"prompt": "What?"}]'),
    ("p.jsonl", '{"problem": "1+1", "answer": 2.5}\n\n{"question": "What?"}'),
])
def test_prompt_files(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content.encode())
    found = infer.read_questions(GenerateOptions(prompts=path, out=tmp_path / "o"))
    assert found == ["1+1", "What?"]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_prompt_ends_at_its_line_feed_alone(tmp_path, end):
    """None of the other characters at which str.splitlines and a text file cut."""
    texts = [f"Add 2{mark}and 3" for mark in "\r\v\f\x1c\x1e\x85\u2028\u2029"]
    path = tmp_path / "p.txt"
    path.write_bytes(end.join(texts).encode())
    assert infer.read_questions(GenerateOptions(prompts=path, out=tmp_path / "o")) == texts


def test_subset_and_split_of_prompts(tmp_path):
    for name, text in (("a/train.jsonl", "no"), ("a/test.jsonl", "yes"), ("b/test.jsonl", "no")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, {"prompt": text})
    options = GenerateOptions(prompts=tmp_path, subset="a", out=tmp_path / "o")
    assert infer.read_questions(options) == ["yes"]
    assert infer.read_questions(dataclasses.replace(options, split="train")) == ["no"]
    (tmp_path / "p.txt").write_text("1+1")
    with pytest.raises(ValueError, match="p.txt is a text: --subset and --split are for records"):
        infer.read_questions(dataclasses.replace(options, prompts=tmp_path / "p.txt"))


def test_conversations_are_asked_as_they_were_trained(run_folder, tmp_path):
    system = {"role": "system", "content": "Be brief."}
    user = {"role": "user", "content": "1+1="}
    said = [user, {"role": "assistant", "content": "2"}, {"role": "user", "content": "2+2="}]
    path = write(
        tmp_path / "p.jsonl", {"messages": [system, user]}, {"prompt": said, "completion": []},
        {"q": "1+1=", "system": "Be brief.", "answer": "2"}, {"question": "1+1="},
    )
    asked = options(run_folder, path, tmp_path, template="chat")
    with pytest.raises(ValueError, match="record 3 has 'answer' but no 'question'"):
        infer.read_questions(asked)
    lines = path.read_text().replace('"q"', '"query"')
    path.write_text(lines)
    questions = infer.read_questions(asked)
    assert questions == [[system, user], said, [system, user], "1+1="]
    run_generate(asked)
    found = rows(asked.out)
    assert [row["question"] for row in found] == questions
    trained = load_trained(str(run_folder))
    template = Template(trained.tokenizer, "chat")
    decoding = DecodeConfig(gen_length=12, block_size=4)
    ids = template.encode_prompts(questions)
    assert ids[0] == trained.tokenizer.apply_chat_template(
        [system, user], add_generation_prompt=True, return_dict=False
    )
    for row, result in zip(found, generate(trained.backbone, ids, decoding), strict=True):
        assert row["output"] == trained.tokenizer.decode(result.tokens, skip_special_tokens=True)
    before = asked.out.read_bytes()
    run_generate(dataclasses.replace(asked, resume=True))
    assert asked.out.read_bytes() == before


@pytest.mark.parametrize("content, message", [
    ('{"question": "a"}\n{"answer": "b"}\n', "record 2 has 'answer' but no 'question'"),
    ('{"question": "a"}\n{"question": {}}\n', "record 2 'question' is an object, expected text"),
    ('{"question": " "}\n', "prompt 1 has no text"),
    ('{"question": "a"}\n{"que', "p.jsonl:2:"),
    ("", "holds no records"),
])
def test_bad_prompt_files_are_named_with_the_place(tmp_path, content, message):
    path = tmp_path / "p.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        infer.read_questions(GenerateOptions(prompts=path, out=tmp_path / "o"))


@pytest.mark.parametrize("changes, message", [
    ({"prompt": None}, "either --prompt TEXT or --prompts FILE"),
    ({"prompts": "p.txt"}, "either --prompt TEXT or --prompts FILE"),
    ({"prompt": ""}, "--prompt: prompt 1 has no text"),
    ({"prompt": None, "prompts": "p.txt"}, "--prompts needs --out"),
    ({"resume": True}, "--resume goes on with an --out file"),
    ({"out": "x", "trace": "x"}, "name the same file"),
    ({"out": "."}, "is a folder"),
    ({"block_size": 5}, "block_size 5 must divide gen_length 12"),
    ({"block_size": 5, "gen_length": 12, "model": "not there"}, "block_size 5 must divide"),
    ({"steps": 4}, "steps 4 must be a multiple of the number of blocks, 3"),
    ({"gen_length": 256, "out": "o"}, "prompt 0 has 3 tokens: with gen_length 256"),
    ({"prompt": "a\udc80"}, "--prompt: prompt 1 is not valid text"),
    ({"device": "tpu"}, "--device tpu"),
    ({"tokenizer": "not there"}, "not there"),
])
def test_bad_options_are_one_sentence(run_folder, tmp_path, monkeypatch, changes, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.txt").write_text("text")
    paths = {k: tmp_path / changes[k] for k in ("prompts", "out", "trace") if k in changes}
    found = {"model": str(run_folder), "prompt": "1+1", **changes, **paths}
    with pytest.raises(ValueError, match=message):
        run_generate(GenerateOptions(**found))
    assert {path.name for path in tmp_path.iterdir()} == {"p.txt"}


def test_missing_and_binary_files(tmp_path):
    out = tmp_path / "o"
    with pytest.raises(FileNotFoundError, match="gone.txt: no such file"):
        infer.read_questions(GenerateOptions(prompts=tmp_path / "gone.txt", out=out))
    (tmp_path / "b.txt").write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match=r"not UTF-8 text \(byte 2\)"):
        infer.read_questions(GenerateOptions(prompts=tmp_path / "b.txt", out=out))
    (tmp_path / "e.txt").write_text("\n \n")
    with pytest.raises(ValueError, match="holds no prompts"):
        infer.read_questions(GenerateOptions(prompts=tmp_path / "e.txt", out=out))


def test_nan_is_a_sentence_for_the_user(run_folder, monkeypatch):
    def broken(*args, **kwargs):
        raise FloatingPointError("the model's logits are NaN at denoising step 1")
        yield

    monkeypatch.setattr(pipeline, "decode_stream", broken)
    with pytest.raises(ValueError, match=r"NaN at denoising step 1 \(--dtype float32\)"):
        run_generate(GenerateOptions(model=str(run_folder), prompt="1+1"))


@pytest.mark.parametrize("trained", ["exact", "cached", "block_causal"])
def test_the_context_mode_is_the_one_of_the_training(run_folder, monkeypatch, capsys, trained):
    found = load_trained(str(run_folder))
    contract = dataclasses.replace(found.contract, context=trained)
    found = dataclasses.replace(found, contract=contract)
    monkeypatch.setattr(pipeline, "load_trained", lambda *args, **options: found)

    def load(**options):
        config = pipeline.Decoder.load("any", DecoderOptions(**options)).config
        return config.context, capsys.readouterr().err

    capsys.readouterr()
    assert load() == load(context=trained) == (trained, "")
    for other in ("exact", "cached", "prefix", "block_causal"):
        chosen, hint = load(context=other)
        assert chosen == other
        fits = other == trained or (trained, other) == ("exact", "prefix")
        told = f"trained with --context {trained} and decodes with {other}" in hint
        assert told != fits


def test_what_is_guessed_of_a_foreign_model_is_named(model_folder, capsys):
    folder = str(model_folder(max_sequence_length=256))

    def load(**options):
        capsys.readouterr()
        found = pipeline.Decoder.load(folder, DecoderOptions(**options))
        warned = [line for line in capsys.readouterr().err.splitlines() if "assumed" in line]
        return found, *warned

    found, warned = load()
    assert warned == (
        f"{folder} does not say how it was trained; assumed: --template metamath, --context exact, "
        "--block-size 32, --gen-length 128 (--context prefix is faster and approximate)"
    )
    config = found.config
    assert (config.context, config.block_size, config.gen_length) == ("exact", 32, 128)
    assert found.template.name == "metamath"
    found, warned = load(gen_length=8, block_size=4, context="prefix")
    assert warned.endswith("assumed: --template metamath") and found.config.context == "prefix"
    assert len(load(gen_length=8, block_size=4, context="exact", template="chat")) == 1


def test_every_setting_of_the_decoder_has_an_option():
    fields = {field.name: field for field in dataclasses.fields(DecoderOptions)}
    for field in dataclasses.fields(DecodeConfig):
        if field.name in ("banned_ids", "stop_at_end", "poll"):
            continue
        option = fields[field.name]
        if field.name not in pipeline.FROM_TRAINING:  # left out: the recipe's, else the default
            assert option.default in (None, field.default)
            assert option.type in (field.type, f"{field.type} | None")


def test_options_reach_the_decoder(run_folder, capsys):
    chosen = dict(
        rule="threshold", threshold=0.7, order="margin", min_length=3, refresh=2,
        context="cached", temperature=0.5, seed=9, batch_size=2,
    )  # fmt: skip
    config = pipeline.Decoder.load(str(run_folder), DecoderOptions(**chosen)).config
    assert {name: getattr(config, name) for name in chosen} == chosen
    assert (config.gen_length, config.block_size) == (12, 4)
    words = "--rule factor --factor 0.5 --suffix 8 --min-length 4 --cfg-scale 0.5".split()
    assert main(["generate", "--model", str(run_folder), "--prompt", "1+1", *words]) == 0
    words = "--rule factor --steps 12 --gen-length 12 --block-size 4 --model gone".split()
    assert main(["generate", "--prompt", "1+1", *words]) == 2  # before the model is looked for
    assert "steps belongs to rule quota" in capsys.readouterr().err


RULES = {
    "first_hitting": "--clip 0.2 0.9",
    "routed": "--schedule cosine --revise uncond --order-noise 0.5 --steps 6",
    "rcr": "--steps 6",
    "edit": "--threshold 0.4 --edit-threshold 0.5 --post-steps 3",
    "threshold": "--threshold 0.4 --active-blocks 2 --open-share 0.25",
    "speculative": "--threshold 0.05 --drafts 2 --order margin",
}


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_reached_from_the_command_line(rule, run_folder, prompts, tmp_path):
    out, trace, words = tmp_path / "a.jsonl", tmp_path / "t.jsonl", RULES[rule].split()
    files = ["--prompts", str(prompts), "--out", str(out), "--trace", str(trace)]
    assert main(["generate", "--model", str(run_folder), "--rule", rule, *words, *files]) == 0
    config = tyro.cli(GenerateOptions, args=["--rule", rule, *words])
    names = {f.name for f in dataclasses.fields(DecodeConfig)}
    given = {k: v for k, v in vars(config).items() if k in names and v is not None}
    given.pop("batch_size")
    tokenizer, results = expected(run_folder, **given)
    for row, result in zip(rows(out), results, strict=True):
        assert row["output"] == tokenizer.decode(result.tokens, skip_special_tokens=True)
        assert row["steps"] == result.steps
    for row, result in zip(rows(trace), results, strict=True):
        assert [c[:3] for c in row["commits"]] == [list(c[:3]) for c in result.trace]


@pytest.fixture
def verifier_folder(tmp_path, tokenizer_folder):
    shape = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=264, max_position_embeddings=256))
    model.save_pretrained(tmp_path / "lm")
    load_tokenizer(tokenizer_folder).save_pretrained(tmp_path / "lm")
    return tmp_path / "lm"


def test_a_verifier_is_reached_from_the_command_line(
    run_folder, verifier_folder, prompts, tmp_path, capsys
):
    out = tmp_path / "a.jsonl"
    words = ["generate", "--model", str(run_folder), "--rule", "apd", "--context", "exact"]
    files = ["--prompts", str(prompts), "--out", str(out)]
    assert main([*words, "--mixture", "0.4", "--verifier", str(verifier_folder), *files]) == 0
    trained = load_trained(str(run_folder))
    encoded = Template(trained.tokenizer, "none").encode_prompts(QUESTIONS)
    config = DecodeConfig(12, 4, rule="apd", mixture=0.4)
    results = generate(trained.backbone, encoded, config, verifier=load_verifier(verifier_folder))
    for row, result in zip(rows(out), results, strict=True):
        assert row["output"] == trained.tokenizer.decode(result.tokens, skip_special_tokens=True)
    capsys.readouterr()
    # Another verifier gives other answers: the file is not gone on with.
    assert main([*words, "--mixture", "1", *files, "--resume"]) == 2
    assert "line 1 is not the answer to prompt 1 under these" in capsys.readouterr().err
    file = verifier_folder / "tokenizer.json"
    text = json.loads(file.read_text())
    names = sorted(text["model"]["vocab"], key=text["model"]["vocab"].get)
    text["model"]["vocab"].update({names[3]: 4, names[4]: 3})
    file.write_text(json.dumps(text))
    for more, message in (
        ([], "--rule apd needs --verifier DIR"),
        (["--verifier", str(verifier_folder)], f"another vocabulary: {names[3]!r} is 4 there"),
        (["--verifier", str(tmp_path / "gone")], "doesn't exist"),
    ):
        assert main([*words, "--prompt", "1+1", *more]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(ValueError, match="--verifier belongs to rule apd, and the rule is rcr"):
        DecodeConfig(**pipeline.chosen_settings(DecoderOptions(rule="rcr", verifier="x")))


def test_evaluate_decodes_with_it(run_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    records = ({"question": q, "answer": f"so\n#### {len(q)}"} for q in QUESTIONS)
    data = write(tmp_path / "gsm8k.jsonl", *records)
    decode = AskedModel(str(run_folder), DecoderOptions(batch_size=2)).decode
    result = evaluate(EvaluateOptions("gsm8k", model=run_folder, data=data), decode)
    tokenizer, results = expected(run_folder)
    assert result["count"] == 5
    assert result["truncated"] == sum(not r.ended for r in results) / 5
    assert result["mean_tokens"] == sum(len(r.tokens) for r in results) / 5
    # The JSONL of `generate` gives the same figures.
    run_generate(GenerateOptions(model=str(run_folder), prompts=data, out=tmp_path / "o.jsonl"))
    again = evaluate(EvaluateOptions("gsm8k", outputs=tmp_path / "o.jsonl", data=data))
    for key in ("accuracy", "strict_accuracy", "truncated", "mean_tokens", "tokens_per_forward",
                "no_answer", "count"):  # fmt: skip
        assert again[key] == result[key]


def test_the_embedded_base_answers(capsys):
    if not (TINY / "config.json").exists():
        pytest.skip("no embedded base in this checkout")
    assert run_generate(GenerateOptions(prompt="Ann has 3 pens and buys 4 pens. How many?")) == 0
    assert capsys.readouterr().out.strip()
