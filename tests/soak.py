"""Interfere with commands at random, and look at what is left and at what was said.

    python tests/soak.py --events 200 [--seed 0]

An event is one of EVENTS: something happens to a tiny training, generation, evaluation or
comparison (kills and signals, a full disk, a vanished terminal, a symlink or a file of somebody's
in the way, two writers, a changed or damaged file, a process that reads something else), which then
goes on to its end. Every command is a process of its own, forked from this one after the imports.
Failed unless: nobody else's file was touched; what ended with status 0 is, bit for bit, what came
without an event; nothing printed a traceback or left temporary files. The same seed draws the same
events; when a kill strikes is up to the machine.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pty
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import datasets
import jsonl
from kills import Failed, curves, end_state, first_difference, newest
from lives import Life
from matplotlib.backends import backend_agg
from tiny_ranks import free_ports
from tiny_tokenizer import byte_tokenizer
from tqdm import tqdm

from bwsft.commands import compare, evaluate, generate, train
from bwsft.models.llada_config import LladaConfig
from bwsft.models.loading import new_backbone
from bwsft.training import setup

CHAT = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1)
# What commands import late: forked from here, they have it.
WARM = (compare, evaluate, generate, train, setup, backend_agg, datasets)


class Soak:
    """The files that all events read, what comes without an event, and one event after another."""

    def __init__(self, folder: Path, seed: int = 0):
        self.folder, self.rng, self.happened = folder, random.Random(seed), Counter()
        self.number = 0
        folder.mkdir(parents=True, exist_ok=True)
        rows = [{"query": f"{7 * i}+{i}", "response": f"{8 * i}{'!' * (i % 5)}"} for i in range(40)]
        self.data = jsonl.write(folder / "sums.jsonl", *rows)
        asked = [{"question": f"{i}+{i}", "answer": f"so\n#### {2 * i}"} for i in range(8)]
        self.questions = jsonl.write(folder / "questions.jsonl", *asked)
        self.model, self.other = folder / "model", folder / "other model"
        for seed, model in ((1, self.model), (2, self.other)):
            config = LladaConfig(
                d_model=32, n_layers=2, n_heads=2, mlp_hidden_size=64, vocab_size=320,
                max_sequence_length=64, mask_token_id=257, eos_token_id=256, pad_token_id=256,
            )  # fmt: skip
            new_backbone(config, seed=seed).model.save_pretrained(model)
            byte_tokenizer(
                eos_token="<|endoftext|>", mask_token="[MASK]", chat_template=CHAT,
                additional_special_tokens=["<|end|>"],
            ).save_pretrained(model)
        self.others = folder / "others"
        self.others.mkdir()
        self.place = folder / "reference"
        self.place.mkdir()
        began = time.monotonic()
        self.finish(self.train)
        self.seconds = time.monotonic() - began  # of a training
        self.expected = {c.__name__: self.finish(c) for c in self.commands}
        self.curves, self.end = curves(self.place / "run"), end_state(self.place / "run")

    # --- commands, each in the folder of the event, and what comes of them ---

    def train(self) -> list:
        run = self.place / "run"
        if (run / "config.json").exists():
            return ["train", "debug", "--resume", run]
        return [
            "train", "debug", "--resume" if run.exists() else "--out", run, "--data",
            self.at(self.data), "--model", self.at(self.model), "--dataset.template", "chat",
            "--dataset.holdout", "6", "--dataset.cache-dir", self.folder / "cache", "--steps", "8",
            "--block-size", "4", "--gen-length", "16", "--max-length", "40", "--batch-size", "8",
            "--micro-batch-size", "4", "--save-every", "2", "--keep-last", "2", "--eval.every",
            "4", "--eval.draws", "1", "--lora.rank", "2", "--device", "cpu",
        ]  # fmt: skip

    def generate(self) -> list:
        return ["generate", "--model", self.at(self.model), "--prompts", self.at(self.questions),
                *self.decoding, "--out", self.place / "out.jsonl", "--trace",
                self.place / "trace.jsonl", "--resume"]  # fmt: skip

    def evaluate(self) -> list:
        return ["evaluate", "--task", "gsm8k", "--model", self.at(self.model), "--data",
                self.at(self.questions), *self.decoding, "--save", self.place / "saved.jsonl",
                "--json", self.place / "evaluated.json"]  # fmt: skip

    def compare(self) -> list:
        return ["compare", "--model", self.at(self.model), "--data", self.at(self.questions),
                *self.decoding, "--modes", "exact,cached", "--json",
                self.place / "compared.json"]  # fmt: skip

    # One at a time: what is decoded beside a prompt moves the last bits of its confidences.
    decoding = ("--gen-length", "16", "--block-size", "4", "--steps", "8", "--template", "none",
                "--batch-size", "1", "--device", "cpu")  # fmt: skip
    outputs = ("out.jsonl", "trace.jsonl", "saved.jsonl", "evaluated.json", "compared.json")

    @property
    def commands(self) -> list[Callable[[], list]]:
        return [self.generate, self.evaluate, self.compare]

    def at(self, source: Path) -> Path:
        """The event's own copy of a file or folder that is read, which an event may change."""
        copy = self.folder / "own" / source.name
        if not copy.exists():
            copy.parent.mkdir(exist_ok=True)
            (shutil.copytree if source.is_dir() else shutil.copy2)(source, copy)
        return copy

    def start(self, command: Callable[[], list], **how) -> Life:
        self.number += 1
        return Life(command(), self.folder / f"said-{self.number % 8}.txt", **how)

    def finish(self, command: Callable[[], list]) -> list:
        """Give a command until it ends, which must be with status 0; what came of it. (A comparison
        that is written is not written again.)"""
        written = self.place / "compared.json"
        if command == self.compare and written.exists() and written.stat().st_size:
            return self.results(command)
        life = self.start(command)
        if life.wait():
            raise Failed(f"{command.__name__} ended with {life.status}:\n{life.said()[-3000:]}")
        return self.results(command)

    def results(self, command: Callable[[], list]) -> list:
        if command == self.train:
            return []
        names = [Path(w).name for w in map(str, command()) if Path(w).name in self.outputs]
        return [self.result(self.place / name) for name in names]

    def result(self, path: Path) -> object:
        """A result without paths, and without times and what an interrupted one does not know."""
        free = ("seconds", "flops", "settings", "saved")
        drop = functools.partial(json.loads, object_hook=lambda o: {
            k: v for k, v in o.items() if k not in free
        })  # fmt: skip
        text = path.read_text()
        return drop(text) if path.suffix == ".json" else list(map(drop, text.splitlines()))

    def check(self, command: Callable[[], list]) -> None:
        """What a command that ended with 0 left is what comes without an event."""
        if command != self.train:
            if self.results(command) != self.expected[command.__name__]:
                raise Failed(f"another result of {command.__name__}")
        else:
            run = self.place / "run"
            found = curves(run)
            for name, expected in self.curves.items():
                if found[name] != expected:
                    raise Failed(f"{name}: {first_difference(found[name], expected)}")
            if end_state(run) != self.end:
                raise Failed("the last checkpoints differ")
        if left := [p for p in self.place.rglob(".*") if p.name != ".lock"]:
            raise Failed(f"left over: {left}")

    # --- events ---

    def moment(self) -> float:
        return self.rng.random() * 1.1 * self.seconds

    def any_command(self) -> Callable[[], list]:
        return self.rng.choice([self.train, self.train, *self.commands])

    def killed(self) -> None:
        command = self.any_command()
        for _ in range(self.rng.randint(1, 2)):
            life = self.start(command)
            time.sleep(self.moment())
            life.send(signal.SIGKILL)
            life.wait()
        self.finish(command)
        self.check(command)

    def signalled(self) -> None:
        command = self.any_command()
        life = self.start(command)
        for _ in range(self.rng.randint(1, 3)):
            time.sleep(self.moment() / 2)
            life.send(self.rng.choice(SIGNALS if command == self.train else SIGNALS[:3]))
        life.wait()
        self.finish(command)
        self.check(command)

    def full_disk(self) -> None:
        command = self.any_command()
        life = self.start(command, limit=int(10 ** self.rng.uniform(2, 5.7)))
        if not life.wait():
            self.check(command)
        self.finish(command)
        self.check(command)

    def lost_terminal(self) -> None:
        """Nobody listens any more, from a moment or a byte on. A training takes no notice (a hung
        up terminal's SIGHUP ends it with a checkpoint)."""
        command = self.any_command()
        ours, theirs = pty.openpty() if self.rng.random() < 0.5 else os.pipe()
        life = self.start(command, terminal=theirs)
        os.close(theirs)
        time.sleep(self.moment())
        os.close(ours)
        life.wait()
        self.finish(command)
        self.check(command)

    def in_the_way(self) -> None:
        """Somebody's file, or a symlink to it, where a command writes."""
        mine = self.others / f"{self.number}.txt"
        content = self.rng.choice([b"mine", b'{"question": "1"}\n{"que', b"", b"\n", b"x\n" * 999])
        link = self.rng.random() < 0.5
        mine.write_bytes(content if link else content or b"mine")
        command = self.any_command()
        if command == self.train:  # a lock, or all of a log
            (self.place / "run").mkdir()
            name, link = self.rng.choice((".lock", "metrics.jsonl", "config.json")), True
            place = self.place / "run" / name
        else:
            own = [w for w in map(str, command()) if Path(w).name in self.outputs]
            place = Path(self.rng.choice(own))
        if link:
            place.symlink_to(mine)
        else:
            shutil.move(mine, place)
            mine = place
        before = mine.read_bytes()
        life = self.start(command)
        if not life.wait() and command != self.train:
            raise Failed(f"{command.__name__} took {place}")
        if mine.read_bytes() != before or place.is_symlink() != link and command != self.train:
            raise Failed(f"{command.__name__} touched {place} ({content[:20]})")

    def raced(self) -> None:
        command = self.any_command()
        lives = []
        for _ in range(self.rng.randint(2, 3)):
            lives.append(self.start(command))
            time.sleep(self.rng.choice((0, 0, self.moment() / 4)))
        ends = [life.wait() for life in lives]
        if set(ends) - {0, 2} or 0 not in ends:
            raise Failed(f"racing {command.__name__}: {ends} {[x.said()[-500:] for x in lives]}")
        self.check(command)

    def changed(self) -> None:
        """Other weights, another bit, or another record under the same name, in the middle."""
        command = self.any_command()
        life = self.start(command)
        while not life.ended() and not self.begun(command):
            time.sleep(0.002)
        life.send(signal.SIGKILL)
        if not life.wait() or not self.begun(command):
            return  # it was quicker
        how = self.rng.choice(("weights", "bit", "record"))
        if how == "weights":
            shutil.copy2(self.other / "model.safetensors", self.at(self.model))
        elif how == "bit":
            self.flip(self.at(self.model) / "model.safetensors")
        else:
            # The first one: a question without an answer yet is asked as it is now.
            source = self.at(self.data if command == self.train else self.questions)
            rows = jsonl.read(source)
            asked, answer = ("query", "response") if "query" in rows[0] else ("question", "answer")
            rows[0][self.rng.choice((asked, answer))] += "0"
            jsonl.write(source, *rows)
        life = self.start(command)
        if not life.wait():  # what changed does not matter to it, or it matters and is seen
            self.check(command)

    def begun(self, command: Callable[[], list]) -> bool:
        """Whether a whole checkpoint, or an answer, is kept."""
        if command == self.train:
            return newest(self.place / "run") > 0
        kept = [*self.place.rglob("*.jsonl"), *(self.folder / "runs").rglob("*.jsonl")]
        return any(  # a trace is written before its answer, and left out where that is missing
            file.name != "trace.jsonl" and file.read_bytes().endswith(b"\n") for file in kept)

    def flip(self, path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[self.rng.randrange(len(content))] ^= 1 << self.rng.randrange(8)
        path.write_bytes(content)

    def damaged(self) -> None:
        """A bit of a checkpoint, of the config or of the token cache, in a run that was killed."""
        life = self.start(self.train)
        while not life.ended() and not self.begun(self.train):
            time.sleep(0.002)
        time.sleep(self.moment() / 4)
        life.send(signal.SIGKILL)
        life.wait()
        run = self.place / "run"
        files = [p for p in (run / "checkpoints").rglob("*") if p.is_file()]
        files += [run / "config.json", *(self.folder / "cache").glob("*.safetensors")]
        self.flip(self.rng.choice(sorted(files)))
        life = self.start(self.train)
        if not life.wait():
            self.check(self.train)

    def stale(self) -> None:
        """A second process that reads other data, or was given another rate or interval."""
        other = self.at(self.data).with_name("stale.jsonl")
        rows = jsonl.read(self.data)
        rows[self.rng.randrange(len(rows))]["response"] += "?"
        jsonl.write(other, *rows)
        ours = list(map(str, self.train()))
        model, data = str(self.at(self.model)), str(self.at(self.data))
        changed = self.rng.choice(({data: str(other)}, {model: str(self.other)}, {}))
        theirs = [changed.get(word, word) for word in ours]
        if not changed:
            theirs += self.rng.choice((["--optim.lr", "0.5"], ["--optim.warmup", "0.5"]))
        port = str(free_ports(1))
        env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        lives = [
            self.start(lambda words=words: words, env=env | {"RANK": r, "LOCAL_RANK": r})
            for r, words in (("0", ours), ("1", theirs))
        ]
        ends = [life.wait() for life in lives]
        if 0 in ends or "process 1 of 2 has" not in lives[0].said():
            raise Failed(f"stale {theirs}: {ends} {[life.said()[-500:] for life in lives]}")

    def event(self) -> str:
        """One event in a folder of its own; its name."""
        name = self.rng.choices(list(EVENTS), list(EVENTS.values()))[0]
        for leftover in ("own", "runs", "event"):
            shutil.rmtree(self.folder / leftover, ignore_errors=True)
        self.place = self.folder / "event"
        self.place.mkdir()
        for kept in self.others.iterdir():
            kept.unlink()
        bystander = self.others / "bystander.jsonl"
        bystander.write_text('{"mine": ')
        try:
            getattr(self, name)()
        except Failed as failure:
            raise Failed(f"event {sum(self.happened.values()) + 1}, {name}: {failure}") from None
        if bystander.read_text() != '{"mine": ':
            raise Failed(f"{name} touched a bystander")
        self.happened[name] += 1
        return name


EVENTS = {
    "killed": 5, "signalled": 3, "full_disk": 4, "lost_terminal": 3, "in_the_way": 5, "raced": 4,
    "changed": 4, "damaged": 4, "stale": 2,
}  # fmt: skip


def soak(folder: Path, events: int, seed: int) -> str:
    """So many events; a summary, or Failed."""
    began, home = time.monotonic(), os.getcwd()
    os.environ.update(
        OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", BWSFT_CACHE=str(folder / "bwsft cache")
    )
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)  # evaluate and compare keep their answers in ./runs
    try:
        work = Soak(folder, seed)
        for _ in tqdm(range(events), unit="event", disable=None):
            work.event()
    finally:
        os.chdir(home)
    counts = ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in sorted(work.happened.items()))
    return f"{events} events ({counts}), seed {seed}: {time.monotonic() - began:.0f} s"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--events", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            print(soak(Path(folder).resolve(), asked.events, asked.seed))
        except Failed as failure:
            sys.exit(str(failure))
