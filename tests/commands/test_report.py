"""`bwsft report`: the numbers that the page holds, what a sample's text may do, and, where Chromium
is installed, that the figures are drawn and answer to the keyboard."""

import dataclasses
import html
import json
import re
import shutil
import subprocess

import pytest
from jsonl import read as lines
from tiny_report import data_of, small_run

from bwsft import config as c
from bwsft import presets
from bwsft.checkpoints.folders import newest_complete, versions
from bwsft.checkpoints.resolve import load_trained, plan_model
from bwsft.cli import main
from bwsft.commands.report.page import page
from bwsft.commands.report.recorded import MOST_POINTS, curves
from bwsft.data.chat_template import Template
from bwsft.data.tokenizer import load_tokenizer
from bwsft.decoding.config import DecodeConfig
from bwsft.decoding.generate import generate
from bwsft.training.metrics import running_mean
from bwsft.training.setup import train

EVIL = "</script><script>document.documentElement.dataset.error = 1</script><img src=x onerror=y>"


@pytest.fixture
def trained(tiny):
    """(config, run folder) of ten updates."""
    config = tiny(context="block_causal")
    assert train(config) == 0
    return config, c.run_folder(config)


def test_the_page_holds_the_runs_numbers_and_answers(trained, capsys):
    config, folder = trained
    assert main(["report", str(folder), "--samples", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(folder / "report.html")
    data = data_of(folder / "report.html")
    check_numbers(data, folder)
    check_data(data, folder)
    check_slices(data, folder)
    check_settings(data, config)
    check_samples(data, config, folder)


def check_numbers(data, folder):
    metrics, evals = lines(folder / "metrics.jsonl"), lines(folder / "eval.jsonl")
    [run] = data["runs"]
    found = run["curves"]
    assert found["step"] == [line["step"] for line in metrics] == list(range(1, 11))
    losses = [line["loss"] for line in metrics]
    expected = {
        "loss": losses,
        "mean": running_mean(losses, 5),
        "lr": [line["lr"] for line in metrics],
        "grad_norm": [line["grad_norm"] for line in metrics],
        "tokens_per_second": [line["tokens"] / line["seconds"] for line in metrics],
        "supervised_per_second": [line["supervised_tokens"] / line["seconds"] for line in metrics],
    }
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-5), name  # kept to 6 digits
    assert found["every"] == 1
    assert run["evals"] == {k: [line[k] for line in evals] for k in ("step", "nelbo")}
    assert [0, 4, 8, 10] == run["evals"]["step"]
    facts = dict(data["facts"]["rows"])
    assert facts["updates"] == "10 of 10" and "10 of 10 updates" in data["summary"][0]
    assert facts["held-out NELBO"] == f"{evals[0]['nelbo']:.3f} → {evals[-1]['nelbo']:.3f}"


def check_data(data, folder):
    """The 40 records of the fixture, 6 of them held out; data.json says so in the run folder."""
    counts = dict(data["counts"]["rows"])
    assert counts["records"] == "40" and counts["kept"] == "40 (100.00%)"
    assert (counts["trained on"], counts["held out"]) == ("34", "6")
    stored = json.loads((folder / "data.json").read_text())
    assert stored["train"] == 34 and stored["kept"] == 40


def check_slices(data, folder):
    """The draws behind the slices are those of the held-out NELBO: 6 examples, 2 draws each."""
    evals = lines(folder / "eval.jsonl")
    [run] = data["runs"]
    for slice_, name, nelbo in zip(
        run["slices"], ["base", "step-10"], [evals[0], evals[-1]], strict=True
    ):
        assert slice_["name"] == name
        for by in ("block", "rate"):
            found = slice_[by]
            assert sum(found["count"]) == 12 and len(found["at"]) > 1
            total = sum(n * m for n, m in zip(found["count"], found["mean"], strict=True))
            assert total / 12 == pytest.approx(nelbo["nelbo"], rel=1e-5)  # fp32 sums
        assert set(slice_["block"]["at"]) <= {1, 2, 3, 4}
        assert set(slice_["rate"]["at"]) <= {25, 50, 75, 100}


def check_settings(data, config):
    found = data["settings"]
    assert found["about"] == "What differs from the preset debug:"
    assert [f"{name}: {preset} -> {own}" for name, own, preset in found["differ"]["rows"]] == (
        c.differences(presets.debug(), config)
    )
    provenance = dict(data["provenance"]["rows"])
    assert provenance["checkpoint"] == "step-10" and provenance["model"] == "random"
    assert {name: provenance[name] for name in versions()} == versions()


def check_samples(data, config, folder):
    """The base in exact mode, the checkpoint in its own, on the first two held-out examples."""
    words = load_tokenizer(config.tokenizer)
    prompts = [sample["question"] for sample in data["samples"]]
    # the chat template of the fixtures: the text, then "="
    assert len(set(prompts)) == 2 and all(re.fullmatch(r"\d+\+\d+=", p) for p in prompts)
    template = Template(words, "chat")
    ids = template.encode_prompts([p.removesuffix("=") for p in prompts])
    new = load_trained(str(newest_complete(folder)[0])).backbone
    base = plan_model(config, words, folder).build(new.head()[0].device).eval()
    base.family = new.family
    for place, (model, name, context) in enumerate(
        [(base, "base", "exact"), (new, "step-10", "block_causal")]
    ):
        settings = DecodeConfig(gen_length=16, block_size=4, context=context)
        for sample, expected in zip(
            data["samples"], generate(model, ids, settings, trace=True), strict=True
        ):
            answer = sample["answers"][place]
            assert (answer["name"], answer["context"]) == (name, context)
            assert answer["text"] == words.decode(expected.tokens, skip_special_tokens=True)
            assert [tuple(x[:3]) for x in answer["commits"]] == [x[:3] for x in expected.trace]
            confidences = [x[3] for x in answer["commits"]]
            assert confidences == pytest.approx([x[3] for x in expected.trace], abs=5e-5)
            assert answer["steps"] == expected.steps and answer["ended"] == expected.ended
    for sample in data["samples"]:  # 7i+i: the answer begins with 8i
        left, right = map(int, sample["question"].removesuffix("=").split("+"))
        assert sample["reference"].startswith(str(left + right))


def test_a_run_that_has_only_begun_has_a_page(tmp_path, capsys):
    run = small_run(tmp_path / "run", steps=0)
    assert main(["report", str(run), "--out", str(tmp_path / "sub" / "page.html")]) == 0
    data = data_of(tmp_path / "sub" / "page.html")
    assert dict(data["facts"]["rows"]) == {"updates": "none yet", "spikes": "0"}
    assert data["runs"][0]["curves"]["step"] == [] and data["counts"]["rows"] == []
    [note] = data["notes"]
    assert note.startswith("No samples, no loss by block and mask rate: ")
    assert "missing/folder/x" in note
    assert note in capsys.readouterr().err


def test_without_a_checkpoint_the_base_alone_answers(tmp_path, tiny):
    config = tiny()
    open_holdout = dataclasses.replace(config.dataset, holdout=None)  # it follows the data
    config = dataclasses.replace(config, dataset=open_holdout)
    run = small_run(tmp_path / "run", config=config)
    assert main(["report", str(run), "--samples", "1", "--steps", "4"]) == 0
    data = data_of(run / "report.html")
    assert data["notes"] == ["No checkpoint yet: the samples are the base's."]
    [[answer]] = [sample["answers"] for sample in data["samples"]]
    assert answer["name"] == "base" and answer["steps"] <= 4
    assert data["runs"][0]["evals"] == {"step": [], "nelbo": []}


def test_samples_can_be_left_out(tmp_path, tiny):
    run = small_run(tmp_path / "run", config=tiny(dataset=c.DataConfig(holdout=0)))
    for words, note in (([], "--dataset.holdout 0"), (["--samples", "0"], "--samples 0")):
        assert main(["report", str(run), *words]) == 0
        data = data_of(run / "report.html")
        assert data["samples"] == [] and note in data["notes"][0]


def test_long_curves_are_thinned_to_means(tmp_path):
    count = 2 * MOST_POINTS + 1  # three to a point, one over
    rows = [{"step": i + 1, "loss": float(i), "lr": 1.0, "seconds": 0.0} for i in range(count)]
    rows[1]["loss"] = None  # 0 and 2 are left of the first three
    found = curves(rows)
    assert found["every"] == 3 and found["step"][:2] == [3, 6]
    assert found["loss"][:2] == [1.0, 4.0] and len(found["loss"]) == count // 3
    assert found["grad_norm"] == found["tokens_per_second"] == [None] * (count // 3)
    means = running_mean([float(i) for i in range(count) if i != 1], (count - 1) // 20)
    assert found["mean"][-1] == pytest.approx(sum(means[-4:-1]) / 3, rel=1e-5)


def evil_run(name):
    line = {"lr": 1e-5, "seconds": 0.5, "tokens": 9}
    groups = {"at": [1, 2], "mean": [1.0, 2.0], "error": [None, 0.5], "count": [1, 3]}
    return {
        "name": name, "curves": curves([{"step": i, "loss": 1 / i, **line} for i in range(1, 41)]),
        "evals": {"step": [0, 40], "nelbo": [2.0, 1.0]}, "spikes": [[7, EVIL, EVIL]],
        "slices": [{"name": EVIL, "block": groups, "rate": {**groups, "at": [25, 100]}}],
    }  # fmt: skip


def evil_data(runs=1):
    commits = [[0, 1, 7, 0.5], [1, 0, 8, 0.25], [2, 3, 9, 1.0]]
    answer = {
        "name": EVIL, "context": "exact", "text": EVIL, "ended": True, "steps": 3,
        "gen_length": 6, "block_size": 2, "offset": 0, "end_ids": [9],
        "tokens": {"7": EVIL, "8": "a\n", "9": "<|end|>"}, "commits": commits,
    }  # fmt: skip
    table = {"head": ["", *[EVIL] * runs], "rows": [[EVIL, *[EVIL] * runs]]}
    return {
        "name": EVIL, "summary": [EVIL], "facts": table, "counts": table, "notes": [EVIL],
        "runs": [evil_run(f"{EVIL}{i}") for i in range(runs)], "provenance": table,
        "samples": [{"question": EVIL, "reference": EVIL, "answers": [answer, answer]}],
        "settings": {"about": EVIL, "differ": table, "all": table},
        "live": {"every": 60, "runs": [{"name": EVIL, "done": 1, "steps": 2, "said": EVIL}]},
    }  # fmt: skip


def test_a_text_cannot_leave_its_element(tmp_path):
    path = tmp_path / "page.html"
    path.write_text(page(evil_data()))
    assert data_of(path) == evil_data()
    text = path.read_text()
    assert text.count("<script") == text.count("</script>") == 2
    assert "<img" not in text and html.escape(EVIL) in text  # the title


def test_the_page_asks_the_network_for_nothing():
    text = page(evil_data())
    assert re.findall(r"\w+://[^\"'\s]*", text) == ["http://www.w3.org/2000/svg"]  # a name
    assert not re.findall(r"\burl\(|@import|\bfetch\(|XMLHttpRequest|\bimport\b|<link", text)
    assert not re.findall(r"<[^>]*\b(?:src|href)=", text.partition('id="data"')[0])
    assert "default-src 'none'" in text


@pytest.mark.parametrize("words, message", [
    (["gone"], "gone is not a run folder: it has no config.json"),
    ([], "name one to 8 run folders, not 0"),
    (["RUN", "RUN"], "is named twice"),
    (["RUN", "--samples", "-1"], "--samples must be at least 0"),
    (["RUN", "--steps", "3"], "steps 3 must be a multiple of the number of blocks, 4"),
    (["RUN", "--out", "RUN"], "is a folder: name a file"),
])
def test_what_cannot_be_reported_is_refused(tmp_path, capsys, words, message):
    run = str(small_run(tmp_path / "run"))
    assert main(["report", *(run if word == "RUN" else word for word in words)]) == 2
    assert message in capsys.readouterr().err


def test_a_page_replaces_no_file_but_a_page(tmp_path, capsys):
    run, path = small_run(tmp_path / "run"), tmp_path / "page.html"
    for _ in range(2):
        assert main(["report", str(run), "--out", str(path)]) == 0
    path.write_text("<!doctype html><title>My thesis</title>")
    assert main(["report", str(run), "--out", str(path)]) == 2
    assert "page.html exists and is no page of bwsft report" in capsys.readouterr().err
    assert "My thesis" in path.read_text()


# What a user does, and what is then on the page.
ACTIONS = """<script>
const root = document.documentElement, $ = (query) => document.querySelector(query);
const key = (node, name) => node.dispatchEvent(new KeyboardEvent("keydown", { key: name }));
const found = { figures: document.querySelectorAll("figure").length };
const paths = document.querySelectorAll("svg[role=img] path");
found.paths = [...paths].map((p) => p.getAttribute("d").length);
key($("svg[role=img]"), "End"); found.reading = $("figure .reading").textContent;
key($("svg[role=img]"), "ArrowLeft"); found.before = $("figure .reading").textContent;
key($(".heat"), "ArrowRight"); key($(".heat"), "ArrowRight");
found.cell = $(".answer .reading").textContent;
found.height = document.body.scrollHeight;
const cells = () => [...$(".canvas").querySelectorAll("span:not(.edge)")];
found.masked = [0, 1, 2, 3].map((step) => {
  $("#scrub").value = step; $("#scrub").dispatchEvent(new Event("input"));
  return cells().map((cell) => (cell.classList.contains("masked") ? "m" : "t")).join("");
});
found.shade = () => cells()[0].style.getPropertyValue("--x");
found.byStep = found.shade();
$("input[value=confidence]").click();
found.byConfidence = found.shade();
found.shifted = document.body.scrollHeight - found.height;
found.overflow = root.scrollWidth - root.clientWidth;
found.width = innerWidth;
$("#play").click();
found.playing = [$("#play").textContent, $("#at").textContent];
setTimeout(() => {
  found.played = [$("#play").textContent, $("#at").textContent];
  found.state = { ...root.dataset };
  parent.postMessage(JSON.stringify(found), "*");
}, 2000);
</script>"""

FRAME = """<!doctype html><script>
onmessage = (event) => { document.documentElement.dataset.found = event.data; };
</script><iframe src="page.html" width="WIDTH" height="900" style="border: 0"></iframe>"""


@pytest.mark.parametrize("width, runs", [(1280, 1), (400, 1), (400, 8)])
def test_chromium_draws_the_figures_and_they_answer_to_the_keyboard(tmp_path, width, runs):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("Chromium is not installed")
    text = page(evil_data(runs)).replace("</body>", ACTIONS + "</body>")
    (tmp_path / "page.html").write_text(text)
    outer = tmp_path / "outer.html"  # windows have a least width, frames have none
    outer.write_text(FRAME.replace("WIDTH", str(width)))
    flags = ["headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run"]
    flags += ["disable-background-networking", "disable-component-update", "disable-sync"]
    flags += [f"user-data-dir={tmp_path}/user", "window-size=1400,1000", "dump-dom"]
    flags += ["virtual-time-budget=5000"]
    command = [browser, *(f"--{flag}" for flag in flags), outer.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = json.loads(html.unescape(re.search(r'data-found="([^"]*)"', dom)[1]))
    assert found["state"] == {"drawn": "yes"}
    assert found["figures"] == 7 and min(found["paths"]) > 15  # a spike is the shortest
    if runs == 1:
        assert found["reading"] == "step 40: update 0.025, running mean 0.0264"
    assert found["before"].startswith("step 39: ")
    assert found["cell"].startswith("block 1, position 2: “</script><script>")
    assert found["cell"].endswith("at step 1, confidence 0.500")
    assert found["masked"] == ["mmmmmm", "mtmmmm", "ttmmmm", "ttmtmm"]
    assert (found["byStep"], found["byConfidence"]) == ("0.5", "0.25")
    assert found["shifted"] == 0 and found["overflow"] == 0 and found["width"] == width
    assert found["playing"] == ["Pause", "0 of 3"] and found["played"] == ["Play", "3 of 3"]
