"""`bwsft trace`: what is read, drawn in the terminal and as a PNG."""

import json
import math

import jsonl
import pytest

from bwsft.cli import main
from bwsft.commands.generate import run_generate
from bwsft.commands.options import GenerateOptions
from bwsft.commands.trace import checked, grid, unmasking

RECORD = {
    "run": "0", "question": "2+2?", "gen_length": 6, "block_size": 2,
    "tokens": {"7": "a", "8": "\n", "9": " b"},
    "commits": [[0, 1, 7, 0.5], [1, 0, 8, 1e-7], [2, 3, 9, 1.0], [2, 2, 7, 0.25]],
}  # fmt: skip


@pytest.fixture
def file(tmp_path):
    return jsonl.write(tmp_path / "t.jsonl", {**RECORD, "question": "first"}, RECORD)


def test_tokens_stand_in_their_places_with_their_steps(file, capsys):
    assert main(["trace", str(file), "--line", "2"]) == 0
    question, drawing, figures = capsys.readouterr().out.splitlines()
    assert question == "2+2?"
    assert drawing == "⏎₂ a₁ │a₃  b₃ │··"
    assert figures == "4 tokens in 3 steps (1.33 per step), mean confidence 0.438"


def test_a_later_commit_replaces_an_earlier_one(file, capsys):
    revised = {**RECORD, "commits": [*RECORD["commits"], [3, 1, 9, 0.9]]}
    file.write_text(json.dumps(revised))
    assert main(["trace", str(file)]) == 0
    _, drawing, figures = capsys.readouterr().out.splitlines()
    assert drawing == "⏎₂  b₄ │a₃  b₃ │··"
    assert figures == "4 tokens in 4 steps (1.00 per step), mean confidence 0.538, 1 revised"
    column = [row[1] for row in grid(checked(revised, "here"))]
    assert column == [0.5, 0.5, 0.5, 0.9]


def test_late_tokens_are_brighter():
    text = unmasking({0: 4, 1: 0}, {0: "a", 1: "b"}, [0, 1], 8)
    shades = [str(span.style) for span in text.spans if "rgb" in str(span.style)]
    assert shades == ["rgb(255,255,255) bold", "rgb(110,110,255) bold"]


def test_the_heat_map_keeps_a_confidence_from_its_step_on(file):
    rows = grid(checked(RECORD, "here"))
    nan = None
    expected = [[nan, 0.5, nan, nan], [1e-7, 0.5, nan, nan], [1e-7, 0.5, 0.25, 1.0]]
    assert [[None if math.isnan(x) else x for x in row[:4]] for row in rows] == expected
    assert all(math.isnan(x) for row in rows for x in row[4:])


def test_a_png_is_drawn_from_what_generate_writes(model_folder, tmp_path, capsys):
    trace, png = tmp_path / "t.jsonl", tmp_path / "sub" / "t.png"
    options = {"gen_length": 8, "block_size": 4, "template": "none", "context": "cached"}
    run_generate(GenerateOptions(model=str(model_folder()), prompt="1+1", trace=trace, **options))
    assert main(["trace", str(trace), "--png", str(png)]) == 0
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "1+1" in capsys.readouterr().out


def test_a_png_overwrites_nothing(file, tmp_path, capsys):
    mine = tmp_path / "thesis.tex"
    mine.write_text("years")
    (tmp_path / "link.png").symlink_to(tmp_path / "thesis.tex")
    for path, message in ((mine, "exists: name another file"), (tmp_path / "link.png", "symlink")):
        assert main(["trace", str(file), "--png", str(path)]) == 2
        assert message in capsys.readouterr().err
    assert mine.read_text() == "years"


@pytest.mark.parametrize("size", [{"gen_length": 4097}, {"commits": [[4096, 0, 7, 0.5]]}])
def test_a_png_of_more_than_it_can_show_is_refused(tmp_path, capsys, size):
    path = jsonl.write(tmp_path / "t.jsonl", {**RECORD, **size})
    assert main(["trace", str(path), "--png", str(tmp_path / "t.png")]) == 2
    assert "--png draws up to 4,096 positions and steps, and line 1" in capsys.readouterr().err
    assert not (tmp_path / "t.png").exists()


@pytest.mark.parametrize("changes", [
    {"commits": []}, {"commits": [[0, 6, 7, 0.5]]}, {"commits": [[0, 1, 3, 0.5]]},
    {"commits": [[0, 1, 7]]}, {"tokens": None}, {"block_size": 0}, {"gen_length": "x"},
])  # fmt: skip
def test_what_is_no_trace_is_refused(tmp_path, capsys, changes):
    path = jsonl.write(tmp_path / "t.jsonl", {**RECORD, **changes})
    assert main(["trace", str(path)]) == 2
    assert "line 1 is no trace of bwsft generate --trace" in capsys.readouterr().err


def test_lines_and_files_that_are_not_there(file, capsys):
    for words, message in (
        ([str(file), "--line", "3"], "--line 3: "),
        ([str(file), "--line", "0"], "has lines 1 to 2"),
        (["gone.jsonl"], "gone.jsonl: no such file"),
    ):
        assert main(["trace", *words]) == 2
        assert message in capsys.readouterr().err
