"""`bwsft chat`: what is decoded and remembered, commands, interrupts, and what is drawn."""

import dataclasses
import io
import os
import select
import signal
import sys
import time

import pytest
import torch
from rich.console import Console

from bwsft.cli import main
from bwsft.commands import chat
from bwsft.commands.chat import Conversation, Picture, Terminal, talk, whole_lines
from bwsft.commands.options import ChatOptions
from bwsft.data.tokenizer import load_tokenizer
from bwsft.decoding.generate import generate
from bwsft.decoding.pipeline import Decoder
from bwsft.decoding.result import Commit
from bwsft.utils.lines import printable

OPTIONS = {"gen_length": 8, "block_size": 4, "template": "chat"}


@pytest.fixture
def folder(model_folder):
    """A random model of 64 positions whose byte tokens are likelier than its end tokens."""
    return str(model_folder())


@pytest.fixture
def conversation(folder):
    def make(**changes):
        options = ChatOptions(**{**OPTIONS, **changes})
        return Conversation(Decoder.load(folder, options), options.system)

    return make


def lines_in(monkeypatch, *lines):
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


@pytest.fixture
def ids(tokenizer_folder):
    """ids(text, ...): a token per byte, then the given ids; 258 ends an assistant's turn."""
    words = load_tokenizer(tokenizer_folder)
    return lambda text, *more: [*words(text, add_special_tokens=False)["input_ids"], *more]


def expected(conversation, prompt, request=0, **changes):
    decoder = conversation.decoder
    config = dataclasses.replace(decoder.config, **changes)
    [found] = generate(decoder.trained.backbone, [prompt], config, requests=[request])
    return decoder.text(found.tokens)


def test_without_a_terminal_answers_are_plain_lines(folder, conversation, ids, monkeypatch, capsys):
    lines_in(monkeypatch, "1+1", "", "/quit", "never read")
    words = ["--gen-length", "8", "--block-size", "4", "--template", "chat"]
    assert main(["chat", "--model", folder, *words]) == 0
    out, err = capsys.readouterr()
    assert out == printable(expected(conversation(), ids("1+1="))) + "\n"
    assert "/help lists the commands" in err and "tokens in 8 steps" in err
    assert sys.stdin.read() == "never read\n"


def test_a_template_without_turns_says_so(folder, monkeypatch, capsys):
    lines_in(monkeypatch)
    assert main(["chat", "--model", folder, "--template", "none"]) == 0
    assert "template none has no turns: each question stands alone" in capsys.readouterr().err


def test_the_conversation_goes_on_and_reset_ends_it(conversation, ids, monkeypatch, capsys):
    lines_in(monkeypatch, "a", "b", "/reset", "b")
    now = conversation(temperature=1.0)  # the noise of each answer is its own
    assert talk(now, chat.Plain()) == 0
    answers = capsys.readouterr().out.split("\n")
    first = expected(now, ids("a="))
    second = expected(now, [*ids(f"a{first}", 258), *ids("b=")], request=1)
    third = expected(now, ids("b="))
    assert "\n".join(answers) == printable(f"{first}\n{second}\n{third}\n")
    assert second != third
    assert now.turns == [("b", third)] and now.asked == 1


def test_a_system_message_begins_every_prompt(folder, conversation, capsys):
    now = conversation(system="Be brief.")
    words = now.decoder.trained.tokenizer
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}]

    def written():
        return words.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    assert now.prompt("a") == (written(), 0)
    chat.respond(now, chat.Plain(), "a")
    answer = now.turns[0][1]
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "b"}]
    assert now.prompt("b") == (written(), 0)
    assert main(["chat", "--model", folder, "--template", "none", "--system", "s"]) == 2
    assert "a system message needs a chat template" in capsys.readouterr().err


def test_only_the_chat_template_remembers(conversation, ids, capsys):
    now = conversation(template="none")
    chat.respond(now, chat.Plain(), "a")
    assert now.turns == [] and now.prompt("b") == (ids("b"), 0) and now.asked == 1


def test_old_turns_leave_when_the_positions_run_out(conversation, ids, monkeypatch, capsys):
    now = conversation()
    # A turn "qqqq...", answer, end token: with "x=" and 8 canvas positions, 64 hold two of 27.
    now.turns = [("q" * 20, "a" * 6), ("r" * 20, "b" * 6), ("s" * 20, "c" * 6)]
    prompt, dropped = now.prompt("x")
    kept = [*ids("r" * 20 + "b" * 6, 258), *ids("s" * 20 + "c" * 6, 258), *ids("x=")]
    assert (prompt, dropped) == (kept, 1) and len(kept) + 8 == 64
    lines_in(monkeypatch, "x")
    talk(now, chat.Plain())
    assert "[1 old turns no longer fit the model's 64 positions]" in capsys.readouterr().err
    assert [q[0] for q, _ in now.turns] == ["r", "s", "x"]


def test_a_question_that_never_fits_is_refused_and_the_talk_goes_on(
    conversation, monkeypatch, capsys
):
    now = conversation()
    now.turns = [("a", "b")]
    lines_in(monkeypatch, "z" * 70, "\udce9", "/seed 3")
    assert talk(now, chat.Plain()) == 0
    out, err = capsys.readouterr()
    assert "more than the model's 64 positions" in err and "surrogates" in err and "seed: 3" in err
    assert out == "" and now.turns == [("a", "b")]


def test_commands_change_the_decoding(conversation, ids, monkeypatch, capsys):
    now = conversation(temperature=1.0)
    lines_in(monkeypatch, "/steps 4", "/block 8", "/context cached", "/seed 5", "1", "/seed")
    talk(now, chat.Plain())
    out, err = capsys.readouterr()
    changes = {"steps": 4, "block_size": 8, "context": "cached", "seed": 5}
    assert out == printable(expected(now, ids("1="), **changes)) + "\n"
    assert "in 4 steps" in err and err.splitlines()[-1] == "seed: 5"
    now.command("/steps auto")
    assert now.decoder.config.steps is None and now.command("/steps") == "steps: one per token"


@pytest.mark.parametrize("line, message", [
    ("/steps 3", "multiple of the number of blocks, 2"),
    ("/steps x", "/steps needs a whole number, not 'x'"),
    ("/block 3", "block_size 3 must divide gen_length 8"),
    ("/context sideways", "context must be one of exact, cached, prefix, block_causal"),
    ("/seed -1", "seed must be in"),
    ("/unknown", "/unknown is no command; /help lists them"),
])
def test_bad_commands_change_nothing(conversation, line, message):
    now = conversation()
    before = now.decoder.config
    with pytest.raises(ValueError, match=message):
        now.command(line)
    assert now.decoder.config == before


def test_a_context_that_the_model_cannot_have_is_refused(conversation):
    now = conversation()
    backbone = now.decoder.trained.backbone
    backbone.family = dataclasses.replace(backbone.family, attention="block_causal")
    with pytest.raises(ValueError, match="attends from block to block"):
        now.command("/context cached")
    assert now.decoder.config.context == "exact"


def test_a_context_that_is_not_the_trained_one_is_named(conversation):
    now = conversation()
    trained = now.decoder.trained
    contract = dataclasses.replace(trained.contract, context="block_causal")
    trained = dataclasses.replace(trained, contract=contract, assumed=())
    now.decoder = dataclasses.replace(now.decoder, trained=trained)
    assert now.command("/context cached") == (
        "context: cached; the model was trained with --context block_causal and decodes with cached"
    )
    assert now.command("/context block_causal") == "context: block_causal"


def test_ctrl_c_stops_the_answer_and_not_the_program(conversation, ids, monkeypatch, capsys):
    real, calls = chat.generate, []

    def interrupted(*arguments, **options):
        calls.append(options["requests"])
        if len(calls) == 1:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(chat, "generate", interrupted)
    lines_in(monkeypatch, "a", "b")
    now = conversation()
    assert talk(now, chat.Plain()) == 0
    out, err = capsys.readouterr()
    assert "[stopped: this turn is forgotten]" in err
    assert out == printable(expected(now, ids("b="))) + "\n" and [q for q, _ in now.turns] == ["b"]
    assert calls == [[0], [0]]


def test_nan_is_reported(conversation, monkeypatch, capsys):
    now = conversation()
    with torch.no_grad():
        now.decoder.trained.backbone.head()[0].fill_(float("nan"))
    lines_in(monkeypatch, "a")
    assert talk(now, chat.Plain()) == 0
    assert "logits are NaN" in capsys.readouterr().err


def test_lines_that_end_in_a_backslash_go_on():
    lines = iter(["one\\", "two", "", "three\\"])
    marks = []
    found = list(whole_lines(lambda mark: (marks.append(mark), next(lines, None))[1]))
    assert found == ["one\ntwo", "", "three\n"[:-1]]
    assert marks == ["> ", "… ", "> ", "> ", "… "]


def commit(picture, step, **places):
    picture.commit([Commit(step, int(p[1:]), t, 0.5) for p, t in places.items()])


def test_the_picture_fades_tokens_and_stops_at_the_end_token(conversation, ids):
    picture = Picture(conversation().decoder)
    assert picture.text().plain == chat.MASK * 8
    commit(picture, 0, p1=ids("b")[0])
    commit(picture, 1, p0=ids("a")[0])
    text = picture.text()
    assert text.plain == "ab" + chat.MASK * 6
    styles = [(text.plain[s.start : s.end], str(s.style)) for s in text.spans]
    assert styles == [("a", chat.AGES[0]), ("b", chat.AGES[1]), (chat.MASK * 6, "dim")]
    commit(picture, 5, p4=258)
    assert picture.text().plain == "ab" + chat.MASK * 2
    assert "dim" in [str(s.style) for s in picture.text().spans]


def test_a_character_of_several_tokens_is_drawn_whole(conversation, ids):
    picture = Picture(conversation().decoder)
    first, second, escape, line = ids("é\x1b\n")
    commit(picture, 0, p0=first, p1=second, p2=escape, p3=line)
    assert picture.text().plain == "é\ufffd\n" + chat.MASK * 4  # escape moves no cursor


def test_a_low_terminal_shows_the_end_of_the_current_block(conversation, ids):
    picture = Picture(conversation(gen_length=40).decoder)
    for position, token in enumerate(ids("abcdefghijklmnopqrst")):
        commit(picture, position, **{f"p{position}": token})
    console = Console(width=10, height=4, file=io.StringIO())
    # Rows of ten; two are shown: the block of four behind the last token ends in the third.
    assert picture.fitted(console).plain == "klmnopqrst\n" + chat.MASK * 3
    console = Console(width=10, height=6, file=io.StringIO())
    assert picture.fitted(console).plain == picture.text().plain


def test_the_terminal_draws_every_step_and_leaves_the_answer(conversation, ids):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=40, color_system="standard")
    now = conversation(steps=4)
    chat.respond(now, Terminal(console), "1+1")
    drawn = stream.getvalue()
    assert drawn.count(chat.MASK) >= 8 + 6 + 4 + 2
    answer = expected(now, ids("1+1="))
    shown = printable(answer)
    assert now.turns == [("1+1", answer)]
    assert shown.split("\n")[0][:10] in drawn[drawn.rindex(chat.MASK) :]


def test_the_end_of_input_and_ctrl_c_at_the_prompt(conversation, monkeypatch):
    events = iter([KeyboardInterrupt, EOFError])
    stream = io.StringIO()
    shell = Terminal(Console(file=stream))

    def asked(mark):
        raise next(events)

    monkeypatch.setattr("builtins.input", asked)
    assert talk(conversation(), shell) == 0
    assert "/quit leaves" in stream.getvalue()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a pseudo-terminal")
def test_a_real_terminal_survives_ctrl_c(model_folder):
    import pty

    folder = str(model_folder(max_sequence_length=1024))  # long enough to be stopped half-way
    child, handle = pty.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job ignores it
        code = "import sys; from bwsft.cli import main; sys.exit(main(sys.argv[1:]))"
        words = ["chat", "--model", folder, "--gen-length", "960", "--block-size", "960"]
        os.execv(sys.executable, [sys.executable, "-c", code, *words, "--template", "chat"])
    seen = b""

    def wait_for(text):
        nonlocal seen
        end = time.monotonic() + 120
        while text not in seen and time.monotonic() < end:
            if select.select([handle], [], [], 1)[0]:
                seen += os.read(handle, 65536)
        assert text in seen, seen[-500:]
        seen = b""

    wait_for(b"> ")
    os.write(handle, b"1+1\n")
    wait_for(chat.MASK.encode())
    os.write(handle, b"\x03")
    wait_for(b"[stopped")
    os.write(handle, b"/seed 7\n")
    wait_for(b"seed: 7")
    os.write(handle, b"/quit\n")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
