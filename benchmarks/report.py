"""Turns the result files of benchmarks/results/ into its README.md: tables, plots, provenance.

python benchmarks/report.py [FOLDER]

Every JSON file of a benchmark becomes a section, failed variants included; a plot that is missing
is drawn. Pages written by hand are linked. The same files give the same text.
"""

import argparse
import json
from pathlib import Path

from lib import output
from lib.harness import Peak, Result

TITLES = {
    "loss": "LM head and loss",
    "mask": "Masks",
    "step": "Training step",
    "generate": "Decoding",
    "operators": "Launched operators",
    "attention": "One-pass attention",
    "gpu_suite": "GPU suite",
}
INTRODUCTION = """# Results

Written by `python benchmarks/report.py` from the JSON files beside it. How to read the tables, and
how to get your own: [benchmarks/README.md](../README.md). Compare within a table, not between
devices.
"""


def read(folder: Path) -> list[tuple[Path, dict]]:
    """Result files in the order of the report: by benchmark, the newest first, then by name."""
    found = []
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and content.get("bench") in TITLES:
            found.append((path, content))
    found.sort(key=lambda pair: date_of(pair[1]), reverse=True)
    return sorted(found, key=lambda pair: list(TITLES).index(pair[1]["bench"]))


def date_of(content: dict) -> str:
    return content.get("header", content).get("date", "")


def render(folder: Path) -> str:
    """The whole page."""
    files = read(folder)
    titles = ("file", "what", "device", "date", "times naive's speed, first shape")
    parts = [INTRODUCTION, f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for path, content in files:
        device = content.get("header", content)["device"]
        cells = (f"[{path.stem}](#{path.stem.lower()})", TITLES[content["bench"]], device,
                 date_of(content), headline(content))
        parts.append(f"| {' | '.join(cells)} |")
    pages = [p for p in sorted(folder.glob("*.md")) if p.name != "README.md"]
    parts += ["", "Pages:", "", *(f"- [{title_of(page)}]({page.name})" for page in pages)]
    for path, content in files:
        parts += ["", f"## {path.stem}", "", *section(path, content)]
    return "\n".join(parts) + "\n"


def title_of(page: Path) -> str:
    first = page.read_text(encoding="utf-8").lstrip().splitlines()[0]
    return first.removeprefix("# ") if first.startswith("# ") else page.stem


def headline(content: dict) -> str:
    """Every variant's speed of the first shape, or what became of the parts of a suite."""
    if content["bench"] == "gpu_suite":
        done = sum(part["status"] in (0, 5) for part in content["parts"])
        return f"{done} of {len(content['parts'])} parts ended well"
    results = [Result(**r) for r in content["points"][0]["results"]]
    times = {r.name: r.median_s for r in results if r.median_s}
    if not times:
        return "counted, not timed"
    base = "naive" if "naive" in times else next(iter(times))
    note = "" if base == "naive" else f", times {base}'s"
    return ", ".join(f"{n} {times[base] / t:.2f}x" for n, t in times.items() if n != base) + note


def section(path: Path, content: dict) -> list[str]:
    if content["bench"] == "gpu_suite":
        return suite_section(content)
    head = content["header"]
    lines = [output.provenance(head) + ".", ""]
    if "command" in head:
        lines += [f"`{head['command']}`", ""]
    peak = Peak(head.get("peak_flops"), head.get("peak_bytes_per_s"))
    for point in content["points"]:
        results = [Result(**r) for r in point["results"]]
        lines += [f"**{output.settings_text(point['settings'])}**", ""]
        lines += [*markdown(output.cells(results, peak, point["settings"])), ""]
        lines += [f"- {r.name}: {r.note}" for r in results if r.note]
        if any(r.note for r in results):
            lines.append("")
    lines += [f"{remark}\n" for remark in content.get("remarks", ())]
    if was_timed(content):
        lines.append(f"![{path.stem}]({path.stem}.png)")
    return lines


def was_timed(content: dict) -> bool:
    results = [r for point in content.get("points", ()) for r in point["results"]]
    return any(r.get("median_s") for r in results)


def suite_section(content: dict) -> list[str]:
    kind = "Dry run on a CPU" if content["dry"] else "Run"
    lines = [f"{kind}: {content['device']}, torch {content['torch']}, {content['date']}.", ""]
    rows = [["part", "command", "exit status", "seconds"]]
    rows += [
        [p["part"], f"`{' '.join(p.get('command', ()))}`", str(p["status"]), str(p["seconds"])]
        for p in content["parts"]
    ]
    return lines + markdown(rows)


def markdown(rows: list[list[str]]) -> list[str]:
    align = "|---" + "|---:" * (len(rows[0]) - 1) + "|"
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [lines[0], align, *lines[1:]]


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?",
                        default=Path(__file__).resolve().parent / "results")
    folder = parser.parse_args(argv).folder
    for path, content in read(folder):
        picture = path.with_suffix(".png")
        if was_timed(content) and not picture.exists():
            from lib.figures import draw  # matplotlib is optional

            draw(content, str(picture))
    (folder / "README.md").write_text(render(folder), encoding="utf-8")
    print(folder / "README.md")


if __name__ == "__main__":
    main()
