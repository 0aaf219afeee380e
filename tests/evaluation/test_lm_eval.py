"""The "bwsft" model of lm-evaluation-harness on the embedded LLaDA, with tasks from local files."""

import dataclasses
import importlib
import importlib.util
import re
import subprocess
import sys

import jsonl
import pytest
from harness_tasks import CHOICES, SUMS, write_task

from bwsft.data import word_problems as wordproblems
from bwsft.decoding.config import DecodeConfig
from bwsft.decoding.pipeline import AskedModel
from bwsft.decoding.settings import DecoderOptions
from bwsft.evaluation.likelihood import LikelihoodConfig, log_likelihoods

needs_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None,
    reason="lm-evaluation-harness is missing: pip install 'bwsft[lm-eval]'",
)
ANSWER = r"The answer is: (-?[0-9]+)"


def test_without_the_harness_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "bwsft.evaluation.lm_eval", raising=False)
    with pytest.raises(ImportError, match=r"not installed: pip install 'bwsft\[lm-eval\]'"):
        importlib.import_module("bwsft.evaluation.lm_eval")


@pytest.fixture(scope="module")
def model():
    from bwsft.evaluation.lm_eval import BwsftLM

    return BwsftLM(template="chat", draws=8)


@pytest.fixture
def tasks(tmp_path):
    """A folder with a GSM8K-shaped task of 10 problems and one of 4 multiple choices."""
    problems = wordproblems.generate(10, split="test")
    sums = [
        {"question": p["query"], "answer": p["response"].replace("The answer is:", "####")}
        for p in problems
    ]
    choices = [
        {"question": p["query"], "choices": [f" {n}", " 7 x x", " ."]}
        for n, p in enumerate(problems[:4])
    ]
    for name, kind, rows, rest in (
        ("sums", "generate_until", sums, SUMS),
        ("choices", "multiple_choice", choices, CHOICES),
    ):
        write_task(tmp_path, name, kind, rows, rest)
    return tmp_path


@needs_harness
def test_tasks_from_local_files(tasks, model):
    """The harness' scores are those of our own decoder and likelihoods on the same files."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model=model,
        tasks=["sums", "choices"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
    )
    rows = jsonl.read(tasks / "sums.jsonl")
    decode = AskedModel(None, DecoderOptions()).decode  # its own template and canvas
    texts = [answer.text for answer in decode([row["question"] for row in rows])]
    samples = sorted(found["samples"]["sums"], key=lambda sample: sample["doc_id"])
    # 37 tokens at most, on a canvas of 5 blocks of 8 as in training: most answers are shorter.
    full = [(s["resps"][0][0], text) for s, text in zip(samples, texts, strict=True)]
    assert all(text.startswith(got) for got, text in full)
    assert sum(got == text for got, text in full) >= 8
    right = [
        re.findall(ANSWER, got)[:1] == [row["answer"].split("#### ")[-1]]
        for (got, _), row in zip(full, rows, strict=True)
    ]
    assert found["results"]["sums"]["exact_match,answer"] == pytest.approx(sum(right) / len(right))
    assert any(re.search(ANSWER, got) for got, _ in full)

    backbone, template = model.decoder.trained.backbone, model.decoder.template
    best = []
    for row in jsonl.read(tasks / "choices.jsonl"):
        (prompt,) = template.encode_prompts([row["question"]])
        pairs = [(prompt, model.tok_encode(text)) for text in row["choices"]]
        values = [e.value for e in log_likelihoods(backbone, pairs, LikelihoodConfig(draws=8))]
        best.append(values.index(max(values)))
    assert found["results"]["choices"]["acc,none"] == best.count(0) / 4


def instance(*args):
    from lm_eval.api.instance import Instance

    return Instance(request_type="loglikelihood", doc={}, arguments=args, idx=0)


@needs_harness
def test_until_and_limits_cut_the_text(model):
    question = wordproblems.generate(1, split="test")[0]["query"]
    whole, first, eight, three = model.generate_until([
        instance(question, {"until": []}),
        instance(question, {"until": ["never", "=", " "], "max_gen_toks": 40}),
        instance(question, {"until": None, "max_gen_toks": 8}),
        instance(question, {"until": "", "max_gen_toks": 3}),  # on the canvas of 8 too
    ])  # fmt: skip
    assert "=" in whole[1:] and first == whole[: whole.index(" ")]
    assert eight.startswith(three) and 0 < len(three) < len(eight)
    assert len(model.tok_encode(three)) == 3


@needs_harness
def test_greedy_continuations(model):
    """What decoding in any order gives is greedy, another text is not."""
    from bwsft.decoding.generate import generate

    question = wordproblems.generate(1, split="test")[0]["query"]
    (prompt,) = model.decoder.template.encode_prompts([question])
    config = DecodeConfig(gen_length=4, block_size=4, stop_at_end=False)
    (answer,) = generate(model.decoder.trained.backbone, [prompt], config)
    assert len(answer.tokens) == 4
    other = [answer.tokens[0], *answer.tokens[:0:-1]]
    requests = [(("", ""), prompt, tokens) for tokens in (answer.tokens, other)]
    (good, greedy), (bad, not_greedy) = model._loglikelihood_tokens(requests)
    assert greedy and not not_greedy and bad < good < 0


@needs_harness
def test_blockwise_likelihood_is_that_of_the_decoder(model):
    from bwsft.evaluation.lm_eval import BwsftLM

    blockwise = BwsftLM(template="chat", draws=8, blockwise=True, block_size=4, gen_length=8)
    assert blockwise.likelihood.block_size == 4 and blockwise.likelihood.gen_length == 8
    request = [instance("Tom has 4 pens.", "4 x 5")]
    ((value, greedy),) = blockwise.loglikelihood(request)
    ((other, _),) = model.loglikelihood(request)
    assert value != other and isinstance(greedy, bool)


@needs_harness
def test_rolling_sums_windows_that_do_not_overlap(model, monkeypatch):
    text = "4 x 5 = 20. 20 + 3 = 23. The answer is: 23"
    tokens = model.tok_encode(text)
    monkeypatch.setattr(model, "family", dataclasses.replace(model.family, max_positions=7))
    windows = [tokens[at : at + 6] for at in range(0, len(tokens), 6)]
    before = [[model.eot_token_id], *([window[-1]] for window in windows[:-1])]
    before[-1] = tokens[-7 : -len(windows[-1])]  # as many as fit before the last, shorter one
    pairs = list(zip(before, windows, strict=True))
    assert len(pairs) > 3 and len(windows[-1]) < 6
    expected = log_likelihoods(model.decoder.trained.backbone, pairs, LikelihoodConfig(draws=8))
    assert model.loglikelihood_rolling([instance(text), instance("")]) == pytest.approx(
        [sum(e.value for e in expected), 0.0], rel=1e-5
    )


@needs_harness
def test_long_prompts_lose_their_start(model, monkeypatch, caplog):
    monkeypatch.setattr(model, "family", dataclasses.replace(model.family, max_positions=10))
    assert model._fit(list(range(20)), [1, 2, 3]) == (list(range(13, 20)), [1, 2, 3])
    assert "cut to its last 7" in caplog.text
    assert model._fit([5], [1] * 12) == ([], [1] * 12)


@needs_harness
def test_likelihoods_say_what_context_they_have(caplog):
    from bwsft.evaluation.lm_eval import BwsftLM

    BwsftLM(template="chat")
    assert "context" not in caplog.text
    BwsftLM(template="chat", context="cached")
    assert "decoded under context cached, likelihoods are bounds under context exact" in caplog.text


@needs_harness
def test_model_args_are_checked():
    from bwsft.evaluation.lm_eval import BwsftLM

    with pytest.raises(ValueError, match="model_args blocksize is unknown.*block_size"):
        BwsftLM.create_from_arg_string("blocksize=4")
    with pytest.raises(ValueError, match="batch_size auto"):
        BwsftLM.create_from_arg_string("", {"batch_size": "auto"})
    found = BwsftLM.create_from_arg_string(
        "gen_length=24,block_size=8,rule=threshold", {"batch_size": 3, "device": "cpu"}
    )
    assert found.decoder.config.batch_size == 3 and found.decoder.config.gen_length == 24
    assert found.decoder.template.name == "chat" and found.tokenizer_name  # as it was trained
    chat = found.apply_chat_template([{"role": "user", "content": "1 + 1"}])
    assert len(found.tok_encode(chat)) < len(chat)  # the template's tokens are special tokens
    assert found.decoder.template.name == "none"  # the harness renders
    twice = BwsftLM(template="chat")
    assert twice.chat_template(False) is None
    with pytest.raises(ValueError, match="template=chat puts a prompt around the text that --appl"):
        twice.chat_template(True)
    pair = found._encode_pair("4 x 5 =", " 20")
    assert found.tok_encode("4 x 5 = 20") == sum(pair, [])


@pytest.mark.slow
@needs_harness
def test_the_harness_command_line(tasks):
    command = [sys.executable, "-m", "bwsft.lm_eval_model", "run", "--model", "bwsft"]
    command += ["--tasks", "sums"]  # template, canvas and blocks: as the model was trained
    command += ["--include_path", str(tasks)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = jsonl.read(tasks / "sums.jsonl")
    decode = AskedModel(None, DecoderOptions(gen_length=40)).decode
    found = [re.findall(ANSWER, a.text)[:1] for a in decode([row["question"] for row in rows])]
    truth = [row["answer"].split("#### ")[-1:] for row in rows]
    right = sum(a == b for a, b in zip(found, truth, strict=True)) / len(rows)
    score = re.search(r"\|sums.*exact_match\W+([0-9.]+)", done.stdout)
    assert float(score[1]) == pytest.approx(right) and right > 0
