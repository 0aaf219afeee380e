"""Conversations rendered by outlines: as the template prints them, or not at all."""

import itertools
import json
import os
from pathlib import Path

import pytest
import tiny_tokenizer

from bwsft.data.chat_template import Template
from bwsft.data.tokenizer import load_tokenizer

DATA = os.environ.get("BWSFT_DATA_DIR")
PARTS = (
    "",
    " ",
    "\n",
    "x",
    "<think>",
    "</think>",
    "a, b",
    "Ü\u2028",
    "{{ 1 }}",
    "%s",
    "\\",
    "'\"",
    "0",
)
CONTENTS = [a + b for a, b in itertools.product(PARTS, PARTS)]
LOOP = "{% for m in messages %}[%s]{% endfor %}{{ add_generation_prompt }}"
MACRO = "{% macro show(text) %}<{{ text }}>{% endmacro %}"

# What is done to each content, so that an outline of one content fits some others.
FOLLOWED = [
    "{{ m.content }}",
    "{{ m['role'] + ': ' + m['content'] | trim + '|' }}",
    "{{ m.content.strip('\\n').lstrip() }}",
    "{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}{% else %}-{% endif %}",
    "{{ m.content.partition('b') | last }}{{ m.content.split(' ') | length }}",
    "{% if m.content.startswith('<think>') and not m.content.endswith('x') %}T{% endif %}",
    "{% if m.content %}{{ m.content[1:] }}{% endif %}{{ m.content is string }}",
    "{% if m.content is iterable and m.content is not mapping %}I{% endif %}",
    "{% if m.content == 'x' or 'x' == m.content %}X{% else %}{{ m.content | length }}{% endif %}",
    "{% if m.content in ['x', ' '] %}listed{% endif %}{{ m.content is in ['x'] }}",
    MACRO + "{{ show(m.content) | trim }}{{ show(m.content).startswith('<x') }}",
    "{% set block %} {{ m.content }}{% endset %}{{ block | trim }}{{ block == ' x' }}",
    "{% set ns = namespace(text=m.content) %}{{ ns.text.replace('x', ns.text) }}",
    "{% generation %}{{ m.content }}{% endgeneration %}{{ loop.changed(m.content) }}",
    "{{ m.content.find('x') }}{{ m.content | default('d', true) }}{{ m.content.nothing }}",
    "{% if m.content[0] is defined %}I{% endif %}",
    "{{ 'abc' if loop.index0 % 2 == 0 else m.content.upper() }}",
]
# What prints or looks at a content by code that a stand-in does not see.
NOT_FOLLOWED = [
    "{% set t = 'a' ~ m.content %}{{ 'x' in t }}",
    "{% set t = '%s' % m.content %}{{ 'x' in t }}",
    "{% set t = '%s' | format(m.content) %}{{ 'x' in t }}",
    "{% set t = '{}'.format(m.content) %}{{ 'x' in t }}",
    "{% set t = m.values() | join(',') %}{{ 'x' in t }}",
    "{% set t = [m.content] | join %}{{ t.strip() }}",
    "{{ 'x' in (messages | map(attribute='content') | join) }}",
    "{{ m.content | tojson }}",
    "{% set t %}{{ m }}{% endset %}{{ 'x' in t }}",
    "{{ m.content.format(1) }}",
    "{% for letter in m.content %}{{ loop.index }}{% endfor %}",
    "{{ m.content | upper }}{{ m.content | int }}",
    "{{ m.content < 'x' }}",
    "{{ m.content * 2 }}",
    "{{ {'x': 1}[m.content] }}",
    "{{ [1, 2][m.content] }}",
    "{{ m.content.encode() }}",
    "{{ m.content in 'a x b' }}",
    "{% set s = m.content | string %}{{ s | reverse }}",
    "{{ m.content | escape }}",
]


def template_of(text, **args):
    """A Template whose chat template is `text`, however little sense it makes."""
    tokenizer = tiny_tokenizer.byte_tokenizer(
        ("<|eos|>",), eos_token="<|eos|>",
        chat_template="{% for m in messages %}{{ m.content }}{% endfor %}",
    )  # fmt: skip
    template = Template(tokenizer, "chat")
    template._sources, template.args = [text, text], args
    template._outlines = template._new_outlines()
    return template


def rendered(template, content, prompt):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]
    try:
        return template.render(turns, (), prompt)
    except ValueError as error:
        return str(error)


def outlined(inner):
    """How many of the renderings an outline made; each is what the template prints."""
    template, plain = (template_of(LOOP.replace("[%s]", inner)) for _ in range(2))
    plain._outlines.text = lambda messages, prompt: None
    made, find = [], template._outlines.text

    def text(messages, prompt):
        made.append(find(messages, prompt))
        return made[-1]

    template._outlines.text = text
    for content, prompt in itertools.product((*CONTENTS, ""), (False, True)):
        assert rendered(template, content, prompt) == rendered(plain, content, prompt), content
    return sum(found is not None for found in made)


@pytest.mark.parametrize("inner", FOLLOWED)
def test_an_outline_prints_what_the_template_prints(inner):
    assert outlined(inner) >= len(CONTENTS)


@pytest.mark.parametrize("inner", NOT_FOLLOWED)
def test_what_cannot_be_followed_is_run(inner):
    assert outlined(inner) == 0


def test_other_fields_roles_and_arguments_are_other_shapes():
    text = "{% for m in messages %}{{ m.role + m.content + (m.name or style) }}{% endfor %}"
    template = template_of(text, style="s")
    one = [{"role": "user", "content": "1"}]
    assert [template.render(one, (), False) for _ in range(2)] == ["user1s"] * 2
    assert template.render([one[0] | {"name": "n"}], (), False) == "user1n"
    assert template.render([{"role": "system", "content": "1"}], (), False) == "system1s"
    assert template.render([{"role": "user", "content": "2"}, *one], (), True) == "user2suser1s"
    assert template_of(text, continue_final_message=True)._outlines._template is None
    other = template_of(text, style="o")._outlines
    other.learn(one, False, "user1s")  # not what it prints
    assert other.text(one, False) is None


@pytest.mark.skipif(not DATA, reason="BWSFT_DATA_DIR is not set")
@pytest.mark.parametrize("which", ["qwen3", "llada"])
def test_real_templates_need_no_run_for_a_record(which):
    source = Path(DATA) / "metamath_shaped" / "gsm8k_train_AnsAugShape.jsonl"
    rows = [json.loads(line) for line in source.read_text().splitlines()[:200]]
    tokenizer = load_tokenizer(Path(DATA) / "tokenizers" / "qwen3")
    if which == "llada":
        config = json.loads((Path(DATA) / "llada_8b_instruct/tokenizer_config.json").read_text())
        tokenizer.chat_template, tokenizer.bos_token = config["chat_template"], "<|endoftext|>"
    template = Template(tokenizer, "metamath")
    for row in rows:
        turns = [{"role": "user", "content": row["query"]},
                 {"role": "assistant", "content": row["response"]}]  # fmt: skip
        for asked, prompt in ((turns[:1], True), (turns, False)):
            expected = tokenizer.apply_chat_template(
                asked, tokenize=False, add_generation_prompt=prompt
            )
            assert template._outlines.text(asked, prompt) == expected
