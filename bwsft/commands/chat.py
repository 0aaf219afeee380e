"""`bwsft chat`: talk to a model in the terminal and watch its answer being unmasked.

Without a terminal (a pipe, a test) it reads a question per line and writes the answers as plain
text. A line that ends in a backslash goes on in the next one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.text import Text

from bwsft.commands.options import ChatOptions
from bwsft.decoding.generate import generate
from bwsft.decoding.pipeline import Decoder
from bwsft.decoding.request import check_modes, check_request, whole_blocks
from bwsft.decoding.result import Commit, Generation, OnCommit
from bwsft.decoding.summary import line_of
from bwsft.utils.lines import printable, say

HELP = """/quit            leave (so does the end of the input)
/reset           forget the conversation
/steps N         denoising steps of an answer; auto: one per token
/block N         tokens in a block
/seed N          seed of the samples (--temperature above 0)
/context MODE    exact, cached, prefix or block_causal
Ctrl-C           stop the answer
A line that ends in \\ goes on in the next one."""
SETTINGS = {"steps": "steps", "block": "block_size", "seed": "seed", "context": "context"}
MASK = "░"
# A token's color by the steps since it was committed; older ones have the terminal's own.
AGES = ("bold black on bright_green", "bright_green", "green")


def run_chat(options: ChatOptions) -> int:
    """Run `bwsft chat` and return the exit status; ValueError or OSError for a bad model."""
    decoder = Decoder.load(options.model, options)
    shell = Terminal() if sys.stdin.isatty() and sys.stdout.isatty() else Plain()
    shell.note(f"{options.model or 'the embedded tiny LLaDA'}; /help lists the commands")
    if decoder.template.name != "chat":
        shell.note(f"template {decoder.template.name} has no turns: each question stands alone")
    conversation = Conversation(decoder, options.system)
    if options.system is not None:
        conversation.prompt("?")  # ValueError now where the template takes no system message
    return talk(conversation, shell)


def talk(conversation: Conversation, shell: Plain | Terminal) -> int:
    """Read and answer until the input ends."""
    for line in whole_lines(shell.read):
        if line.strip() == "/quit":
            break
        try:
            if line.startswith("/"):
                shell.note(conversation.command(line))
            elif line.strip():
                respond(conversation, shell, line)
        except KeyboardInterrupt:
            shell.note("[stopped: this turn is forgotten]")
        except (ValueError, FloatingPointError) as error:
            shell.note(str(error))
    return 0


def whole_lines(read: Callable[[str], str | None]) -> Iterator[str]:
    """Lines of `read(mark)` up to None, those that end in a backslash joined with what follows."""
    parts: list[str] = []
    while (line := read("… " if parts else "> ")) is not None:
        parts.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            yield "\n".join(parts)
            parts.clear()
    if parts:
        yield "\n".join(parts)


def respond(conversation: Conversation, shell: Plain | Terminal, question: str) -> None:
    """Answer a question and keep the turn."""
    prompt, dropped = conversation.prompt(question)
    if dropped:
        positions = conversation.decoder.trained.backbone.family.max_positions
        shell.note(f"[{dropped} old turns no longer fit the model's {positions:,} positions]")
    began = time.perf_counter()
    generation = shell.answer(conversation, prompt)
    shell.note(f"{line_of(generation)} {time.perf_counter() - began:.1f} s")
    conversation.keep(question, conversation.decoder.text(generation.tokens), dropped)


@dataclass
class Conversation:
    """A model, its settings and what was said."""

    decoder: Decoder
    system: str | None = None
    # Questions and answers that the next question follows.
    turns: list[tuple[str, str]] = field(default_factory=list)
    asked: int = 0  # number of the next answer, which its noise depends on

    def prompt(self, question: str) -> tuple[list[int], int]:
        """Prompt ids of a question after the turns that fit, and how many old ones do not.
        ValueError if the question alone is too long."""
        template, config = self.decoder.template, self.decoder.config
        family = self.decoder.trained.backbone.family
        question.encode()  # lone surrogates of a mistyped byte: ValueError
        first = [] if self.system is None else [("system", self.system)]
        for dropped in range(len(self.turns) + 1):
            earlier = self.turns[dropped:]
            said = [m for q, a in earlier for m in (("user", q), ("assistant", a))]
            said = [*first, *said, ("user", question)]
            [ids] = template.encode_prompts([[{"role": r, "content": c} for r, c in said]])
            if len(ids) + whole_blocks(len(ids), family, config) <= family.max_positions:
                break
        check_request([ids], [self.asked], family, config)
        return ids, dropped

    def decode(self, prompt: list[int], on_commit: OnCommit | None = None) -> Generation:
        """The answer to a prompt."""
        model, config = self.decoder.trained.backbone, self.decoder.config
        options = {"on_commit": on_commit, "verifier": self.decoder.verifier}
        return generate(model, [prompt], config, requests=[self.asked], **options)[0]

    def keep(self, question: str, answer: str, dropped: int) -> None:
        """Remember a turn, where the template has turns, and forget the oldest `dropped`."""
        self.asked += 1
        if self.decoder.template.name == "chat":
            self.turns = [*self.turns[dropped:], (question, answer)]

    def command(self, line: str) -> str:
        """Do what a line like "/steps 16" says; what to tell the user. ValueError for a bad one."""
        name, _, value = line[1:].strip().partition(" ")
        value = value.strip()
        if name == "help":
            return HELP
        if name == "reset":
            self.turns, self.asked = [], 0
            return "[a new conversation]"
        if name not in SETTINGS:
            raise ValueError(f"/{name} is no command; /help lists them")
        return self.set(name, value) if value else self.shown(name)

    def set(self, name: str, text: str) -> str:
        """Change one of SETTINGS; ValueError, the old value kept, for one that cannot be."""
        value: str | int | None = text
        if name == "steps" and text == "auto":
            value = None
        elif name != "context":
            try:
                value = int(text)
            except ValueError:
                raise ValueError(f"/{name} needs a whole number, not {text!r}") from None
        config = dataclasses.replace(self.decoder.config, **{SETTINGS[name]: value})
        check_modes(self.decoder.trained.backbone.family, config)
        self.decoder = dataclasses.replace(self.decoder, config=config)
        hint = self.decoder.hint() if name == "context" else None
        return self.shown(name) + (f"; {hint}" if hint else "")

    def shown(self, name: str) -> str:
        value = getattr(self.decoder.config, SETTINGS[name])
        return f"{name}: {'one per token' if value is None else value}"


class Plain:
    """Lines in, lines out; notes go to stderr."""

    def read(self, mark: str) -> str | None:
        line = sys.stdin.readline()
        return line.rstrip("\r\n") if line else None

    def note(self, text: str) -> None:
        say(text, file=sys.stderr)

    def answer(self, conversation: Conversation, prompt: list[int]) -> Generation:
        generation = conversation.decode(prompt)
        say(conversation.decoder.text(generation.tokens))
        return generation


class Terminal:
    """A line editor, and answers that are drawn while they are decoded."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console()
        with contextlib.suppress(ImportError):  # Windows has none
            import readline  # noqa: F401  line editing and history for input()

    def read(self, mark: str) -> str | None:
        while True:
            try:
                return input(mark)
            except EOFError:
                self.console.print()
                return None
            except KeyboardInterrupt:
                self.console.print()
                self.note("/quit leaves")

    def note(self, text: str) -> None:
        self.console.print(Text(printable(text), style="dim"))

    def answer(self, conversation: Conversation, prompt: list[int]) -> Generation:
        picture = Picture(conversation.decoder)
        with Live(console=self.console, transient=True, auto_refresh=False) as live:

            def draw(_: int, commits: list[Commit]) -> None:
                picture.commit(commits)
                live.update(picture.fitted(self.console), refresh=True)

            draw(0, [])
            generation = conversation.decode(prompt, draw)
        answer = conversation.decoder.text(generation.tokens)
        self.console.print(Text(printable(answer)))
        return generation


class Picture:
    """A canvas that is being filled."""

    def __init__(self, decoder: Decoder):
        self.decoder = decoder
        self.tokens: dict[int, int] = {}
        self.steps: dict[int, int] = {}
        self.step, self.focus = 0, 0

    def commit(self, commits: list[Commit]) -> None:
        for step, position, token, _ in commits:
            self.tokens[position], self.steps[position] = token, step
            self.step, self.focus = step, position

    def text(self, stop: int | None = None) -> Text:
        """The positions before `stop` (default: all) up to the first end token."""
        length = self.decoder.config.gen_length if stop is None else stop
        ends = self.decoder.trained.backbone.family.end_ids
        ends = [p for p, token in self.tokens.items() if token in ends]
        length = min([length, *ends])
        text = Text()
        for style, run in itertools.groupby(range(length), self.style):
            if style is None:
                text.append(MASK * len(list(run)), style="dim")
            else:  # together: a character may be spread over several tokens
                words = self.decoder.text([self.tokens[position] for position in run])
                text.append(printable(words), style=style)
        return text

    def style(self, position: int) -> str | None:
        """None for [MASK]."""
        if position not in self.tokens:
            return None
        age = self.step - self.steps[position]
        return AGES[age] if age < len(AGES) else ""

    def fitted(self, console: Console) -> Text:
        """The picture, cut at both ends to what a terminal shows at once."""
        room = max(console.height - 2, 1)
        whole = self.text()
        if len(whole.wrap(console, console.width)) <= room:
            return whole
        block = self.decoder.config.block_size
        lines = self.text(stop=self.focus + block).wrap(console, console.width)
        return Text("\n").join(lines[-room:])
