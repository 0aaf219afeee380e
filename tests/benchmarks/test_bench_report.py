"""The page of results, the tables and the plots that it is made of, and `bwsft bench`."""

import json
import re
import shutil
from pathlib import Path

import report
from house_rules import passes_beside_tpf
from lib import figures

from bwsft.commands import bench as bench_command
from bwsft.commands.options import BenchOptions

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
RESULTS = BENCHMARKS / "results"


def point(settings, **seconds):
    return {"settings": settings, "results": [
        {"name": name, "median_s": s, "low_s": s, "high_s": s, "flops": 10**9, "peak_bytes": 2**20,
         "phases": {"total": s}} for name, s in seconds.items()
    ]}  # fmt: skip


def result_file(points, bench="loss"):
    header = {"device": "cpu", "torch": "2", "triton": None, "python": "3", "commit": "abc",
              "dirty": True, "date": "2026-01-01", "peak_flops": 1e10, "peak_bytes_per_s": None}
    return {"bench": bench, "header": header, "remarks": ["As it is."], "points": points}


def test_the_committed_page_is_what_its_files_make(tmp_path):
    """A new result or page: run python benchmarks/report.py."""
    folder = tmp_path / "results"
    shutil.copytree(RESULTS, folder)
    (folder / "README.md").unlink()
    report.main([str(folder)])
    assert (folder / "README.md").read_text() == (RESULTS / "README.md").read_text()
    assert sorted(p.name for p in folder.iterdir()) == sorted(p.name for p in RESULTS.iterdir())


def test_every_link_of_the_page_leads_somewhere():
    text = (RESULTS / "README.md").read_text()
    links = re.findall(r"\]\(([^)#]+)\)", text)
    assert links and all((RESULTS / link).exists() for link in links)
    anchors = re.findall(r"\]\(#([^)]+)\)", text)
    headings = [line[3:].lower() for line in text.splitlines() if line.startswith("## ")]
    assert anchors == headings


def test_decodings_tell_tokens_per_forward_beside_passes(tmp_path):
    pages = {page.name: page.read_text() for page in RESULTS.rglob("*.md")}
    assert passes_beside_tpf(pages) == []
    result = {"name": "exact", "extra": {"steps": 5, "passes": 5}}
    points = [{"settings": {"gen": 32, "block": 4, "blocks": 2}, "results": [result]},
              {"settings": {"gen": 40, "block": 8}, "results": [result]}]
    (tmp_path / "one.json").write_text(json.dumps(result_file(points, "generate")))
    page = report.render(tmp_path)
    assert "| exact | 5 | 5 | 1.60 |" in page and "| exact | 5 | 5 | 8.00 |" in page


def test_a_page_with_a_failure(tmp_path):
    content = result_file([point({"rows": 8}, naive=0.2, fused=0.1)])
    content["points"][0]["results"].append({"name": "liger", "note": "out of memory"})
    (tmp_path / "one.json").write_text(json.dumps(content))
    (tmp_path / "other.json").write_text("[1]")
    (tmp_path / "page.md").write_text("# A study\n")
    report.main([str(tmp_path)])
    text = (tmp_path / "README.md").read_text()
    assert "- [A study](page.md)" in text and "other" not in text
    assert "| [one](#one) | LM head and loss | cpu | 2026-01-01 | fused 2.00x |" in text
    assert "| fused | 100 | 100-100 | 2.00 | 1 | 1 | 100.0% |" in text  # 1 GFLOP at 10 GFLOP/s
    assert "| liger |  |  |  |  |  |  |\n\n- liger: out of memory\n" in text
    assert "commit abc, with changes that are not in it; 2026-01-01" in text and "As it is." in text
    assert (tmp_path / "one.png").exists()


def test_sections_by_benchmark_and_the_newest_first(tmp_path):
    for name, bench, date in (("a", "step", "2026-01-02"), ("b", "loss", "2026-01-01"),
                              ("c", "loss", "2026-01-03"), ("d", "loss", "2026-01-03")):
        content = result_file([point({"rows": 8}, naive=0.2)], bench)
        content["header"]["date"] = date
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert re.findall(r"^## (.)", report.render(tmp_path), re.M) == ["c", "d", "b", "a"]


def test_a_sweep_is_what_differs_in_one_number(tmp_path):
    shapes = [(8, 100), (4, 100), (16, 100), (8, 50), (16, 50)]
    points = [point({"rows": r, "vocab": v, "head": "frozen"}, naive=0.1 * r) for r, v in shapes]
    found = figures.sweeps([(p["settings"], p["results"]) for p in points])
    assert {key: [(s["rows"], s["vocab"]) for s, _ in line] for key, line in found.items()} == {
        "rows": [(4, 100), (8, 100), (16, 100)], "vocab": [(8, 50), (8, 100)]}
    figures.draw(result_file(points), str(tmp_path / "lines.png"))
    figures.draw(result_file(points[:1]), str(tmp_path / "bars.png"))
    assert figures.sweeps([(p["settings"], p["results"]) for p in points[:2]]) == {}
    sizes = {(tmp_path / f"{name}.png").stat().st_size for name in ("lines", "bars")}
    assert len(sizes) == 2 and min(sizes) > 5_000


BENCH = """
import json, sys
print("a table")
print(json.dumps({"bench": "x", "device": "cpu", "commit": "abc", "speedup": {"naive": 1, "own": 4},
    "variants": {"naive": {"median_s": 2, "peak_bytes": 2**22}, "own": {"median_s": 0.5,
    "peak_bytes": 2**20}}}))
"""


def test_bench_prints_one_table(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench_command, "FOLDER", tmp_path)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/harness.py").touch()
    (tmp_path / "bench_loss.py").write_text(BENCH)
    (tmp_path / "bench_mask.py").write_text("raise SystemExit('the check failed: labels')")
    assert bench_command.run_bench(BenchOptions(only=("loss", "mask"))) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "cpu, commit abc"
    assert lines[3].split() == ["loss", "own", "500", "4x", "faster", "1", "25", "%"]
    assert "mask" in lines[4] and "the check failed: labels" in lines[4]
    assert bench_command.run_bench(BenchOptions(only=("loss",))) == 0


def test_bench_says_what_is_slower_and_counts_supervised_tokens():
    naive = {"median_s": 2.0, "supervised_tokens_per_s": 100.0}
    other = {"median_s": 2.5, "supervised_tokens_per_s": 400.0}  # a longer step of more tokens
    assert bench_command.against(other, naive) == "4x faster"
    del other["supervised_tokens_per_s"]
    assert bench_command.against(other, naive) == "1.25x slower"
    assert bench_command.against({"median_s": 2.001}, naive) == "as fast"
    assert bench_command.against({"flops": 1}, naive) == ""
    summary = {"device": "cpu", "commit": "c", "variants": {"naive": naive}}
    row = bench_command.table([bench_command.Outcome("step", 1.0, summary)]).split("\n")[2]
    assert row.split() == ["step", "naive", "2,000", "100"]


def test_bench_without_a_checkout(monkeypatch, tmp_path, capsys):
    from bwsft.cli import main

    monkeypatch.setattr(bench_command, "FOLDER", tmp_path / "site-packages/benchmarks")
    assert main(["bench"]) == 2
    assert "clone it" in capsys.readouterr().err


def test_bench_names_every_quick_benchmark():
    assert bench_command.FOLDER == BENCHMARKS
    files = {path.stem.removeprefix("bench_") for path in BENCHMARKS.glob("bench_*.py")}
    assert set(BenchOptions.only) == files
