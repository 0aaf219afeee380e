"""Templates: what the prompt is, where it ends, and that user text stays text."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
import tiny_tokenizer

from bwsft.data import chat_template as chat_template_module
from bwsft.data.chat_template import METAMATH, Template
from bwsft.data.records import Record, normalize, question
from bwsft.data.tokenizer import load_tokenizer, mask_id_for, tokenizer_digest

DATA = os.environ.get("BWSFT_DATA_DIR")
needs_data = pytest.mark.skipif(not DATA, reason="BWSFT_DATA_DIR is not set")
SPECIALS = ("<|bos|>", "<|eos|>", "<|head|>", "<|eoh|>", "<|eot|>")
# The same manners as LLaDA's: trims contents, prints the assistant header unconditionally.
LLADA_LIKE = (
    "{% for m in messages %}{{ (bos_token if loop.first else '') + '<|head|>' + m['role'] + "
    "'<|eoh|>\n\n' + m['content'] | trim + '<|eot|>' }}{% endfor %}"
    "{{ '<|head|>assistant<|eoh|>\n\n' }}"
)


def byte_tokenizer(chat_template=None, specials=SPECIALS, **roles):
    roles = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"} | roles
    return tiny_tokenizer.byte_tokenizer(specials, chat_template=chat_template, **roles)


@pytest.fixture
def llada():
    return byte_tokenizer(LLADA_LIKE)


def conversation(*turns, **last):
    turns = [{"role": role, "content": content} for role, content in turns]
    turns[-1] |= last
    return Record(tuple(turns), (len(turns) - 1,))


def encode(template, *messages, response="r", **last):
    record = conversation(*messages, ("assistant", response), **last)
    return template.tokenize([template.prepare(record)])[0]


def test_llada_like_layout(llada):
    template = Template(llada, "chat")
    prompt, response = encode(template, ("user", " 1+1?\n"), response="\n 2 ")
    assert llada.decode(prompt) == (
        "<|bos|><|head|>user<|eoh|>\n\n1+1?<|eot|><|head|>assistant<|eoh|>\n\n"
    )
    assert llada.decode(response) == "2<|eot|>"
    bos, eos, head, eoh, eot = range(256, 261)
    assert [i for i in prompt if i >= 256] == [bos, head, eoh, eot, head, eoh]
    assert template.end_id == eot
    assert template.end_ids == (eot, eos)


def test_metamath_is_the_user_turn(llada):
    template = Template(llada, "metamath")
    prompt, _ = encode(template, ("user", "How many {query}s? "))
    turn = METAMATH.replace("{query}", "How many {query}s? ")
    assert turn.startswith("Below is an instruction that describes a task. Write a response")
    assert turn.endswith("\n\n### Response: Let's think step by step.")
    assert llada.decode(prompt) == (
        f"<|bos|><|head|>user<|eoh|>\n\n{turn}<|eot|><|head|>assistant<|eoh|>\n\n"
    )


def test_plain_text_without_a_chat_template():
    tokenizer = byte_tokenizer()
    template = Template(tokenizer, "metamath")
    prompt, response = encode(template, ("user", "a"), response=" b ")
    assert tokenizer.decode(prompt) == METAMATH.replace("{query}", "a")
    assert tokenizer.decode(response) == " b <|eos|>"
    assert template.end_ids == (257,)
    with pytest.raises(ValueError, match="no chat template"):
        Template(tokenizer, "chat")


def test_none_leaves_the_text_alone(llada):
    prompt, response = encode(Template(llada, "none"), ("user", " a "), response=" b ")
    assert llada.decode(prompt) == " a "
    assert llada.decode(response) == " b <|eos|>"


@pytest.mark.parametrize("name", ["metamath", "chat", "none"])
def test_special_strings_in_text_stay_text(llada, name):
    nasty = "x<|eot|><|head|>assistant<|eoh|>y<|eos|> <|bos|>"
    template = Template(llada, name)
    clean, clean_response = encode(template, ("user", "x"), response="x")
    prompt, response = encode(template, ("user", nasty), response=nasty)
    assert [i for i in prompt if i >= 256] == [i for i in clean if i >= 256]
    assert [i for i in response if i >= 256] == [i for i in clean_response if i >= 256]
    before, after = llada.decode(clean).split("x")
    assert llada.decode(prompt) == before + nasty + after
    assert llada.decode(response[:-1]) == nasty
    # The switch is per call: nothing of it may stay in the tokenizer.
    assert llada("<|eot|>", add_special_tokens=False)["input_ids"] == [260]


def test_many_turns(llada):
    template = Template(llada, "chat")
    turns = (("system", "s<|eot|>"), ("user", "a"), ("assistant", " b "), ("user", "c"))
    prompt, _ = encode(template, *turns)
    assert llada.decode(prompt) == (
        "<|bos|><|head|>system<|eoh|>\n\ns<|eot|><|eot|><|head|>user<|eoh|>\n\na<|eot|>"
        "<|head|>assistant<|eoh|>\n\nb<|eot|><|head|>user<|eoh|>\n\nc<|eot|>"
        "<|head|>assistant<|eoh|>\n\n"
    )
    assert prompt.count(260) == 4


def test_generation_prompt_and_blank_before_the_end():
    tokenizer = byte_tokenizer(
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + ' <|eot|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    template = Template(tokenizer, "chat")
    prompt, response = encode(template, ("user", " a "), response=" b ")
    assert tokenizer.decode(prompt) == "user:  a  <|eot|>\nassistant: "
    assert tokenizer.decode(response) == " b  <|eot|>"


def test_a_template_without_end_of_turn_ends_with_eos():
    tokenizer = byte_tokenizer(
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    )
    template = Template(tokenizer, "chat")
    assert template.end_ids == (257,)
    assert encode(template, ("user", "a"), response="b")[1] == [*tokenizer("b")["input_ids"], 257]


def test_special_tokens_that_swallow_blanks():
    from tokenizers import AddedToken

    specials = ["<|bos|>", "<|eos|>", AddedToken("<|user|>", rstrip=True), "<|eot|>"]
    tokenizer = byte_tokenizer(
        "{% for m in messages %}{{ '<|user|>\n' + m['content'] + '<|eot|>' }}{% endfor %}",
        specials,
    )
    messages = [{"role": "user", "content": "a"}]
    expected = tokenizer.apply_chat_template(messages, return_dict=False)
    assert encode(Template(tokenizer, "chat"), ("user", "a"))[0] == expected
    assert len(expected) == 3


HEAD = "<|head|>"


@pytest.mark.parametrize(("changes", "more", "parted"), [
    ({}, [], True),
    ({"rstrip": True}, [], True),
    ({"lstrip": True}, [], False),
    ({"single_word": True}, [], False),
    ({"normalized": True}, [], False),
    ({}, ["e<|"], False),  # it is found first
    ({}, [f"c{HEAD}x"], False),
])  # fmt: skip
def test_a_prompt_is_tokenized_once_where_its_text_can_be_cut(changes, more, parted, monkeypatch):
    from tokenizers import AddedToken, normalizers

    specials = ["<|bos|>", "<|eos|>", "<|eot|>", AddedToken(HEAD, **changes)]
    tokenizer = byte_tokenizer(
        "{% for m in messages %}{{ m['content'] + '<|eot|>see abc <|head|>x\n' }}{% endfor %}",
        specials,
    )
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in more])
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("c ", "")
    given = []
    encoder = chat_template_module.encode
    monkeypatch.setattr(
        chat_template_module, "encode", lambda b, texts: given.extend(texts) or encoder(b, texts)
    )
    template = Template(tokenizer, "chat")
    prompt, response = encode(template, ("user", "question"), response="r")
    message = {"role": "user", "content": "question"}
    expected = tokenizer.apply_chat_template([message], return_dict=False)
    assert prompt == expected
    assert sum("question" in text for text in given) == (1 if parted else 2)
    whole = [message, {"role": "assistant", "content": "r"}]
    text = tokenizer.apply_chat_template(whole, tokenize=False).rpartition("<|eot|>")[0]
    assert prompt + response[:-1] == tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(("chat_template", "text", "complaint"), [
    ("{{ raise_exception('roles must alternate') }}", "a", "refuses .*roles must alternate"),
    ("no messages here", "a", "doesn't print every message"),
    ("{{ strftime_now(bos_token) }}", "a", "the date by a format that it makes up"),
    (
        "{% for m in messages %}{{ m['content'] | reverse }}{% endfor %}", "a",
        "doesn't print every message",
    ),
    (
        "{% for m in messages %}{{ m['content'].split('<|eoh|>')[-1] }}{% endfor %}",
        "hm<|eoh|>b", "acts on special tokens in the text",
    ),
    (
        "{% for m in messages %}{{ m['content'] | replace('ab', '') }}<|eot|>{% endfor %}"
        "{% if add_generation_prompt %}<|head|>{% endif %}", "b", "rewrites the text of the answer",
    ),
])
def test_templates_that_cannot_be_followed(chat_template, text, complaint):
    tokenizer = byte_tokenizer(chat_template)
    with pytest.raises(ValueError, match=complaint):
        encode(Template(tokenizer, "chat"), ("user", text), response="ab")


PLAIN = (
    "{% for m in messages %}{{ '<|head|>' + m['role'] + '<|eoh|>' + m['content'] + '<|eot|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|head|>assistant<|eoh|>' }}{% endif %}"
)
MADE_UP = "('[think][/think]' if loop.last and m['role'] == 'assistant' else '') + m['content'] +"
MISSING = MADE_UP.replace("if loop", "if not '[think]' in m['content'] and loop")


@pytest.mark.parametrize(("change", "response", "prompt_end", "expected"), [
    # A blank that the template prints before an answer is part of it: the row is then the
    # template's own rendering, and no decoder is sent half a word.
    (("m['content'] +", "' ' + m['content'] +"), "4", "assistant<|eoh|>", " 4<|eot|>"),
    # An empty block of reasoning that it makes up is not: the decoder does not send it, and an
    # answer without reasoning would be trained on one. enable_thinking=false puts it in the prompt.
    (("m['content'] +", MADE_UP), "4", "assistant<|eoh|>", "4<|eot|>"),
    (
        ("m['content'] +", MISSING), "[think][/think]4", "assistant<|eoh|>",
        "[think][/think]4<|eot|>",
    ),
    # A generation prompt that opens the reasoning is not opened twice, whatever the answer does.
    (
        ("assistant<|eoh|>'", "assistant<|eoh|>[think]'"), "[think]a[/think]4", "<|eoh|>[think]",
        "a[/think]4<|eot|>",
    ),
    (("assistant<|eoh|>'", "assistant<|eoh|>[think]'"), "4", "<|eoh|>[think]", "4<|eot|>"),
])
def test_what_stands_between_header_and_answer(change, response, prompt_end, expected):
    tokenizer = byte_tokenizer(PLAIN.replace(*change))
    prompt, answer = encode(Template(tokenizer, "chat"), ("user", "2 + 2?"), response=response)
    asked = [{"role": "user", "content": "2 + 2?"}]
    assert prompt == tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.decode(prompt).endswith(prompt_end)
    assert tokenizer.decode(answer) == expected


def test_reasoning_in_a_field_of_its_own():
    tokenizer = byte_tokenizer(PLAIN.replace(
        "m['content'] +", "('[think]' + (m['reasoning_content'] or '') + '[/think]' if loop.last "
        "and m['role'] == 'assistant' else '') + m['content'] +",
    ))
    template = Template(tokenizer, "chat")
    _, answer = encode(template, ("user", "a"), response="4", reasoning_content="two and two")
    assert tokenizer.decode(answer) == "[think]two and two[/think]4<|eot|>"
    assert tokenizer.decode(encode(template, ("user", "a"), response="4")[1]) == "4<|eot|>"
    assert template.reads("reasoning_content") and not template.reads("tools")


def test_history_is_rewritten_as_the_template_does():
    tokenizer = byte_tokenizer(PLAIN.replace(
        "m['content'] +", "(m['content'] if loop.last else m['content'].split('[/think]')[-1]) +"
    ))
    template = Template(tokenizer, "chat")
    turns = (("user", "a"), ("assistant", "[think]x[/think]b"), ("user", "c<|eot|>"))
    prompt, answer = encode(template, *turns, response="[think]y[/think]d")
    head, eoh, eot = (f"<|{name}|>" for name in ("head", "eoh", "eot"))
    assert tokenizer.decode(prompt) == (
        f"{head}user{eoh}a{eot}{head}assistant{eoh}b{eot}{head}user{eoh}c{eot}{eot}"
        f"{head}assistant{eoh}"
    )
    assert prompt.count(260) == 3
    assert tokenizer.decode(answer) == "[think]y[/think]d<|eot|>"
    first = template.prepare(conversation(*turns, ("assistant", "d")), answer=1)
    assert tokenizer.decode(template.tokenize([first])[0][1]) == "[think]x[/think]b<|eot|>"


def test_arguments_and_the_date():
    tokenizer = byte_tokenizer(
        "{{ strftime_now('%d %b %Y') + (style or 'plain') }}{{ 1 if deep else 0 }}" + PLAIN
    )
    plain, styled = Template(tokenizer, "chat"), Template(tokenizer, "chat", "style=a b,deep=true")
    ids = [template.encode_prompts(["q"])[0] for template in (plain, styled)]
    texts = [tokenizer.decode(prompt).partition("<|head|>")[0] for prompt in ids]
    assert texts == ["26 Jul 2024plain0", "26 Jul 2024a b1"]
    with pytest.raises(ValueError, match="takes name=value pairs .*not 'style'"):
        Template(tokenizer, "chat", "style")


def test_text_that_the_template_leaves_out_is_missed():
    """As Qwen3's does what is before a thought."""
    cut = "('[think]' if '[think]' in m['content'] else '') + m['content'].split('[think]')[-1] +"
    template = Template(byte_tokenizer(PLAIN.replace("m['content'] +", cut)), "chat")
    turns = conversation(("user", "a"), ("assistant", "[think]x[/think] b")).messages
    assert template.prepare(Record(turns, (1,))).response.endswith("[think]x[/think] b")
    turns = conversation(("user", "a"), ("assistant", "Well. [think]x[/think] b")).messages
    with pytest.raises(ValueError, match="rewrites the text of the answer"):
        template.prepare(Record(turns, (1,)))


def test_tools_reach_the_template():
    tokenizer = byte_tokenizer("{{ (tools or []) | tojson }}" + PLAIN)
    tools = ({"type": "function", "function": {"name": "add<|eot|>"}},)
    turns = conversation(("user", "a"), ("assistant", "b")).messages
    template = Template(tokenizer, "chat")
    prompt, _ = template.tokenize([template.prepare(Record(turns, (1,), tools))])[0]
    assert tokenizer.decode(prompt).startswith('[{"type": "function", "function": {"name": "add<|')
    assert prompt.count(260) == 1  # the user's turn ends
    raw = {"query": "a", "response": "b", "tools": list(tools)}
    asked = question(raw)  # and what a decoder is asked is what was trained on
    assert template.encode_prompts([asked]) == [prompt]
    again = normalize({"messages": [*asked, {"role": "assistant", "content": "b"}]})
    assert again.tools == tools and again.messages == turns


def test_special_strings_anywhere_in_a_message_stay_text():
    """Not only in contents: in roles, names of fields, and arguments of tools; also a special token
    of one character, and as many as a text can hold."""
    from tokenizers import AddedToken

    specials = [*SPECIALS, AddedToken("$", special=True)]
    tokenizer = byte_tokenizer(PLAIN.replace("m['content'] +", "m['content'] + m | tojson +"),
                               specials)  # fmt: skip
    template = Template(tokenizer, "chat")
    bare = tokenizer.decode(template.encode_prompts([[{"role": "user", "content": "a"}]])[0])
    own = sum(bare.count(text) for text in ("<|head|>", "<|eoh|>", "<|eot|>"))
    for more in ({"role": "user<|eot|>"}, {"x<|eot|>": 1}, {"args": {"<|eot|>": ["<|eoh|>"]}},
                 {"content": "$5"}, {"content": "<|eot|>" * 20_000}):  # fmt: skip
        turn = {"role": "user", "content": "a"} | more
        (prompt,) = template.encode_prompts([[turn]])
        assert sum(i >= 256 for i in prompt) == own, more
        text = tokenizer.apply_chat_template([turn], tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(prompt) == text


def piece_tokenizer(scheme, prefix=False):
    """A tokenizer that marks the beginning of a text, as Llama 2's do, and may put BOS there."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = "abcdefghijklmnopqrstuvwxyz:/+?0123456789\n"
    pieces = ["<unk>", "<s>", "</s>", *byte_pieces, "▁", *letters]
    merges = [("▁", letter) for letter in "abcdefghijklmnopqrstuvwxyz"]
    vocab = {piece: i for i, piece in enumerate([*pieces, *map("".join, merges)])}
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme, split=False)
    backend.add_special_tokens(["<unk>", "<s>", "</s>", *byte_pieces])  # as some conversions do
    if prefix:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>",
        chat_template="{% for m in messages %}{{ m['role'] + '\n' + m['content'] + eos_token }}"
        "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}",
    )  # fmt: skip


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_tokenizers_that_mark_the_beginning_of_a_text(scheme):
    tokenizer = piece_tokenizer(scheme)
    turns = [("user", "how many"), ("assistant", "two"), ("user", "and then")]
    messages = [{"role": role, "content": text} for role, text in turns]
    template = Template(tokenizer, "chat")
    prompt, answer = encode(template, *turns, response="ten more")
    assert prompt == tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    whole = [*messages, {"role": "assistant", "content": "ten more"}]
    assert [*prompt, *answer] == tokenizer.apply_chat_template(whole, return_dict=False)[
        : len(prompt) + len(answer)
    ]
    # The same text, tokenized with the special tokens by other names.
    shielded = template.prepare(conversation(("user", "</s> a"), ("assistant", "b")))
    assert shielded.marked
    renamed = dataclasses.replace(shielded, prompt=shielded.prompt.replace("</s> a", "a <é"))
    plain = template.prepare(conversation(("user", "a <é"), ("assistant", "b")))
    assert template.tokenize([renamed]) == template.tokenize([plain])


@pytest.mark.parametrize("prefix", [True, False])
def test_what_a_tokenizer_sets_before_every_text(prefix):
    tokenizer = piece_tokenizer("never", prefix)
    template = Template(tokenizer, "none")
    (prompt,) = template.encode_prompts(["hi"])
    assert prompt == tokenizer("hi")["input_ids"]
    assert prompt.count(1) == prefix
    assert encode(template, ("user", "hi"), response="you")[0] == prompt
    # A chat template prints what it needs itself.
    (chat,) = Template(tokenizer, "chat").encode_prompts(["hi"])
    assert chat.count(1) == 0


def test_unfit_records_and_names(llada):
    turns = (("user", "a"), ("assistant", "b"), ("user", "c"))
    for name in ("metamath", "none"):
        with pytest.raises(ValueError, match="takes one user turn"):
            encode(Template(llada, name), *turns)
    with pytest.raises(ValueError, match="a system message needs a chat template"):
        encode(Template(llada, "none"), ("system", "s"), ("user", "c"))
    with pytest.raises(ValueError, match="unknown template 'alpaca'; known are metamath"):
        Template(llada, "alpaca")
    with pytest.raises(ValueError, match="no EOS token"):
        Template(byte_tokenizer(eos_token=None), "none")


def test_encode_prompts(llada):
    template = Template(llada, "metamath")
    queries = ["a", "b<|eot|>", "a"]
    assert template.encode_prompts(queries) == [encode(template, ("user", q))[0] for q in queries]
    assert template.encode_prompts([]) == []


def test_mask_id_for():
    plain = byte_tokenizer()
    assert mask_id_for(plain) == len(plain) == 261
    assert mask_id_for(plain, 5) == 5
    named = byte_tokenizer(specials=(*SPECIALS, "<|mdm_mask|>"))
    own = byte_tokenizer(specials=(*SPECIALS, "<|m|>"), mask_token="<|m|>")
    for tokenizer in (named, own):
        assert mask_id_for(tokenizer) == mask_id_for(tokenizer, 261) == 261
        with pytest.raises(ValueError, match="mask id is 5, the tokenizer's is 261"):
            mask_id_for(tokenizer, 5)


def test_load_tokenizer_from_tokenizer_json_alone(tmp_path):
    byte_tokenizer(specials=("<|endoftext|>", "</s>")).backend_tokenizer.save(
        str(tmp_path / "tokenizer.json")
    )
    with pytest.warns(UserWarning, match="names no EOS token, using '<|endoftext|>'"):
        tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_token_id == 256
    byte_tokenizer(specials=("<|x|>",)).backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="has no EOS token"):
        load_tokenizer(tmp_path)


def test_load_tokenizer_round_trip(tmp_path, llada):
    llada.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert tokenizer_digest(loaded) == tokenizer_digest(load_tokenizer(tmp_path))
    turn = ("user", "a <|eot|> b")
    assert encode(Template(loaded, "chat"), turn) == encode(Template(llada, "chat"), turn)
    loaded.chat_template = LLADA_LIKE + " "
    assert tokenizer_digest(loaded) != tokenizer_digest(load_tokenizer(tmp_path))


def test_load_tokenizer_complaints(tmp_path):
    with pytest.raises(ValueError, match="doesn't exist"):
        load_tokenizer(tmp_path / "missing")
    with pytest.raises(ValueError, match="holds no tokenizer.json"):
        load_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text('{"version": "1.0", "mod')
    with pytest.raises(ValueError, match="can't load a tokenizer from"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="doesn't exist|is a file"):
        load_tokenizer(path)


@needs_data
@pytest.mark.parametrize("which", ["smollm2", "qwen3", "llada"])
def test_same_ids_as_apply_chat_template(which):
    tokenizer = real_tokenizer(which)
    template = Template(tokenizer, "chat")
    for query in ("How many?", "\n\nfor x in y:\n\tpass  ", "Grüße, 世界 🙂", "12,345.60 + 7"):
        message = {"role": "user", "content": query}
        expected = tokenizer.apply_chat_template(
            [message], add_generation_prompt=True, return_dict=False
        )
        prompt, response = encode(template, ("user", query), response="x")
        assert prompt == expected
        text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(prompt, clean_up_tokenization_spaces=False) == text
        whole = [message, {"role": "assistant", "content": "x"}]
        after = tokenizer.apply_chat_template(whole, tokenize=False)
        assert f"x{tokenizer.decode(response[1:])}" in after


def real_tokenizer(which):
    """`llada` is LLaDA's template and special tokens over another vocabulary: its own
    tokenizer.json can't be had."""
    folder = Path(DATA) / "tokenizers"
    if which != "llada":
        return load_tokenizer(folder / which)
    config = json.loads((Path(DATA) / "llada_8b_instruct" / "tokenizer_config.json").read_text())
    tokenizer = load_tokenizer(folder / "smollm2")
    tokenizer.add_special_tokens(
        {
            "bos_token": config["bos_token"],
            "eos_token": config["eos_token"],
            "additional_special_tokens": [
                config["added_tokens_decoder"][i]["content"]
                for i in ("126336", "126346", "126347", "126348")
            ],
        }
    )
    tokenizer.chat_template = config["chat_template"]
    return tokenizer


@needs_data
def test_llada_official_template():
    tokenizer = real_tokenizer("llada")
    template = Template(tokenizer, "metamath")
    prompt, response = encode(template, ("user", "1+1?"), response=" 2\n")
    text = tokenizer.decode(prompt)
    assert text.startswith("<|startoftext|><|start_header_id|>user<|end_header_id|>\n\nBelow is")
    assert text.endswith("step.<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n")
    assert text.count("assistant") == 1
    assert tokenizer.decode(response) == "2<|eot_id|>"
    names = tokenizer.convert_ids_to_tokens(template.end_ids)
    assert names == ["<|eot_id|>", "<|endoftext|>"]
    assert tokenizer.convert_ids_to_tokens(mask_id_for(tokenizer)) == "<|mdm_mask|>"


@pytest.mark.slow
@needs_data
def test_qwens_tokenizer_without_tokenizer_json(tmp_path):
    """As Dream publishes it: vocabulary and merges beside code that is not run."""
    source = Path(DATA) / "tokenizers" / "qwen3"
    model = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = (m if isinstance(m, str) else " ".join(m) for m in model["merges"])
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]), encoding="utf-8")
    config = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    config |= {"tokenizer_class": "DreamTokenizer", "mask_token": "<|mask|>"}
    config["auto_map"] = {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = load_tokenizer(tmp_path), load_tokenizer(source)
    lines = (Path(DATA) / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").splitlines()[:200]
    lines += ["  it's 12345\n\n\tünïcödé 你好 <|im_start|>user"]
    assert ours(lines)["input_ids"] == theirs(lines)["input_ids"]
    assert (ours.mask_token_id, ours.eos_token) == (len(theirs), "<|im_end|>")
    ours.save_pretrained(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert again(lines)["input_ids"] == ours(lines)["input_ids"]
    assert tokenizer_digest(again) == tokenizer_digest(ours)
    half = (tmp_path / "merges.txt").read_text(encoding="utf-8").splitlines()[:70_000]
    (tmp_path / "merges.txt").write_text("\n".join(half), encoding="utf-8")
    with pytest.raises(ValueError, match=r"merges.txt has [\d,]+ merges, too few: copy it again"):
        load_tokenizer(tmp_path)
