"""Generated word problems: right sums, disjoint splits, the same text everywhere."""

import re

import pytest

from bwsft.data.records import normalize
from bwsft.data.word_problems import KINDS, MOST, Generated, chains, generate, named


def test_every_equation_is_right_and_the_last_is_the_answer():
    operations = {"+": int.__add__, "-": int.__sub__, "x": int.__mul__}
    for record in generate(500, seed=1) + generate(200, seed=1, split="test"):
        steps, answer = record["response"].split("\nThe answer is: ")
        equations = re.findall(r"(\d+) ([+x-]) (\d+) = (\d+)\.", steps)
        assert len(equations) == 2
        for left, sign, right, result in equations:
            assert operations[sign](int(left), int(right)) == int(result)
        assert equations[0][3] == equations[1][0]
        assert equations[1][3] == answer
        assert normalize(record).messages[0]["content"].endswith("?")
        numbers = re.findall(r"\d+", record["query"])
        assert numbers == [equations[0][0], equations[0][2], equations[1][2]]


def test_splits_share_no_numbers():
    def sums(records):
        return {(r["response"], r["query"].split()[1]) for r in records}

    train, test = sums(generate(5000, seed=1)), sums(generate(1000, seed=2, split="test"))
    assert len(test) > 300
    assert not train & test


def test_generation_is_a_pure_function():
    assert generate(50, seed=1) == generate(60, seed=1)[:50]
    assert generate(50, seed=1) != generate(50, seed=2)
    assert generate(1, seed=0) == PINNED
    assert len({r["query"].split()[1] + r["response"][:9] for r in generate(300)}) > 30


PINNED = [
    {
        "query": "Leo fills 6 bags with 7 books each and sells 6. How many books stay?",
        "response": "6 x 7 = 42. 42 - 6 = 36.\nThe answer is: 36",
    }
]


def test_numbers_are_configurable():
    largest = max(int(n) for r in generate(300, largest=40) for n in re.findall(r"\d+", r["query"]))
    assert 40 <= largest <= 80  # the loss story shows the sum of two operands
    with pytest.raises(ValueError, match="largest must be at least 6"):
        generate(1, largest=2)
    with pytest.raises(ValueError, match="unknown split 'dev'"):
        generate(1, split="dev")


def test_every_story_appears_in_both_splits():
    of_kind = {
        "wordproblems": ("then finds", "gives", "loses", "bags of", "fills"),
        "newstories": ("and Joe", "and then", "Of ", "bags with", "sells"),
    }
    for kind, words in of_kind.items():
        assert len(words) == len(KINDS[kind][0])
        for split in ("train", "test"):
            text = " ".join(r["query"] for r in generate(300, split=split, kind=kind))
            assert all(word in text for word in words)


def test_new_stories_are_right_and_hold_out_what_the_old_ones_do():
    """The chain's steps are equal, and no test problem is a computation that a training problem of
    the old stories asks for."""
    operations = {"+": int.__add__, "-": int.__sub__, "x": int.__mul__}
    old = set()
    for record in generate(20_000):
        (a, op, b, _), (_, then, c, _) = re.findall(
            r"(\d+) ([+x-]) (\d+) = (\d+)\.", record["response"]
        )
        old.add((a, op, b, then, c))
    found = set()
    for record in generate(500, 7, "test", kind="newstories"):
        chain, answer = record["response"].split("\nThe answer is: ")
        a, op, b, then, c, middle, again, last, result = re.fullmatch(
            r"(\d+) (.) (\d+) (.) (\d+) = (\d+) (.) (\d+) = (\d+)", chain
        ).groups()
        assert operations[op](int(a), int(b)) == int(middle) and (again, last) == (then, c)
        assert operations[then](int(middle), int(c)) == int(result) == int(answer)
        assert sorted(re.findall(r"\d+", record["query"])) == sorted((a, b, c))
        found.add((a, op, b, then, c))
    assert len(found) > 200 and not found & old


def test_chains_carry_a_total_and_split_by_their_numbers():
    found = {}
    for split in ("train", "test"):
        for record in chains(400, 3, split):
            steps, answer = record["response"].split("\nThe answer is: ")
            equations = re.findall(r"(\d+) ([+-]) (\d+) = (\d+)\.", steps)
            results = [int(equation[3]) for equation in equations]
            for (left, sign, step, _), result in zip(equations, results, strict=True):
                assert int(left) + int(sign + step) == result and 0 <= result <= MOST
            assert [int(e[0]) for e in equations[1:]] == results[:-1] and answer == equations[-1][3]
            asked = re.search(r" has (\d+) \w+((, [+-] \d+)+)\. How many", record["query"])
            assert asked[1] == equations[0][0]
            assert asked[2] == "".join(f", {sign} {step}" for _, sign, step, _ in equations)
            found.setdefault(split, set()).add((asked[1], asked[2]))
    assert not found["train"] & found["test"]
    assert Generated(kind="chains").problems(5, 3) == chains(400, 3)[:5]
    with pytest.raises(ValueError, match="largest must be at least 6"):
        chains(1, largest=2)


def test_names_of_generated_data():
    assert [named(name) for name in (None, "wordproblems-20")] == [Generated(9), Generated(20)]
    assert named("wordproblems-12-seed3") == Generated(12, seed=3)
    assert named("newstories-9-seed2") == Generated(9, seed=2, kind="newstories")
    others = ("wordproblems", "wordproblems-x.jsonl", "data/train.jsonl", "meta-math/MetaMathQA",
              "wordproblems-9-seed", "wordproblems-9-seed2.jsonl", "wordproblems-\u0669")
    assert [named(name) for name in others] == [None] * len(others)
