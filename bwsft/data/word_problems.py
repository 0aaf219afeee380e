"""Generated arithmetic word problems with short worked answers, for runs without a data file.

Training and test problems are disjoint by construction: the numbers of a problem alone decide its
split, so a test problem is never a training problem with another name in it.
"""

import operator
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

NAMES = ("Tom", "Ann", "Ben", "Mia", "Sam", "Eva", "Leo", "Zoe", "Max", "Ivy")
THINGS = ("apples", "books", "coins", "pens", "cards", "shells", "stamps", "eggs")
SPLITS = ("train", "test")
TEST_SHARE = 5  # one combination of numbers in five is a test problem

# Text of a problem, and the operations of its answer, (a op b) op c.
STORIES = (
    ("{name} has {a} {things}, buys {b} and then finds {c}. How many {things} now?", "+", "+"),
    ("{name} has {a} {things}, gets {b} more and gives {c} away. How many {things} now?", "+", "-"),
    ("{name} has {a} {things}, loses {b} and buys {c}. How many {things} now?", "-", "+"),
    ("{name} has {a} bags of {b} {things} and {c} more. How many {things} in all?", "x", "+"),
    (
        "{name} fills {a} bags with {b} {things} each and sells {c}. How many {things} stay?",
        "x",
        "-",
    ),
)
# The shift that a model trained on those is fine-tuned to: other texts of the same words, other
# operations in the third, and an answer in one chain.
NEW_STORIES = (
    ("{name} has {a} {things}, Kim {b} and Joe {c}. How many in all?", "+", "+"),
    ("{name} finds {a} {things} and then {b}. Kim buys {c}. How many stay?", "+", "-"),
    ("Of {a} {things} {name} gives {b} to Kim and {c} to Joe. How many stay?", "-", "-"),
    ("Kim has {c} {things}, {name} {a} bags with {b} each. How many in all?", "x", "+"),
    ("{name} sells {c} {things} of {a} bags with {b} each. How many stay?", "x", "-"),
)
CHAIN = 3  # changes of a running total
MOST = 18  # of which it is at no time more
KINDS = {
    "wordproblems": (STORIES, "{a} {first} {b} = {middle}. {middle} {second} {c} = {result}."),
    "newstories": (
        NEW_STORIES, "{a} {first} {b} {second} {c} = {middle} {second} {c} = {result}"
    ),
}  # fmt: skip
_OPERATIONS = {"+": operator.add, "-": operator.sub, "x": operator.mul}


def is_test(story: int, a: int, b: int, c: int) -> bool:
    """Whether these numbers belong to the test split, for every name and thing."""
    return (7 * a + 11 * b + 13 * c + story) % TEST_SHARE == 0


@dataclass(frozen=True)
class Generated:
    """The generated problems that a run's `data` names."""

    largest: int = 9
    seed: int | None = None
    """None: training problems alone, of seed 0, as the embedded base was trained on."""
    kind: str = "wordproblems"
    """Stories and form of answer: a key of KINDS; or "chains"."""

    def problems(self, count: int, seed: int, split: str = "train") -> list[dict[str, str]]:
        """So many of these problems, of a seed and a split."""
        if self.kind == "chains":
            return chains(count, seed, split, self.largest)
        return generate(count, seed, split, self.largest, self.kind)


def named(data: str | None) -> Generated | None:
    """What a run's `data` asks for: operands up to 9 (None), "wordproblems-20",
    "wordproblems-20-seed2", "newstories-9-seed2" or "chains-9-seed2"; None for any other text,
    which is a file or a Hub id."""
    if data is None:
        return Generated()
    found = isinstance(data, str) and re.fullmatch(
        r"(wordproblems|newstories|chains)-(\d+)(?:-seed(\d+))?", data, re.ASCII
    )
    if not found:  # a file, a Hub id, or records
        return None
    kind, largest, seed = found.groups()
    return Generated(int(largest), None if seed is None else int(seed), kind)


def generate(
    count: int, seed: int = 0, split: str = "train", largest: int = 9, kind: str = "wordproblems"
) -> list[dict[str, str]]:
    """`count` query/response records with operands from 2 to `largest`, a pure function.

    Each answer ends in "\\nThe answer is: N". Raises ValueError for an unknown split or numbers
    too small to tell the splits apart.
    """
    draw = drawing(seed, split, largest)
    problems: list[dict[str, str]] = []
    stories, form = KINDS[kind]
    while len(problems) < count:
        story = int(draw() * len(stories))
        a, b, c = (2 + int(draw() * (largest - 1)) for _ in range(3))
        name, things = NAMES[int(draw() * len(NAMES))], THINGS[int(draw() * len(THINGS))]
        is_wanted = is_test(story, a, b, c) == (split == "test")
        text, first, second = stories[story]
        a += b if first == "-" else 0  # nobody loses more than there is
        middle = _OPERATIONS[first](a, b)
        result = _OPERATIONS[second](middle, c)
        if result >= 0 and is_wanted:
            numbers = {"a": a, "b": b, "c": c}
            query = text.format(name=name, things=things, **numbers)
            steps = form.format(first=first, second=second, middle=middle, result=result, **numbers)
            problems.append({"query": query, "response": f"{steps}\nThe answer is: {result}"})
    return problems


def chains(count: int, seed: int = 0, split: str = "train", largest: int = 9) -> list[dict]:
    """`count` records about a total that goes up and down by 2 to `largest`, CHAIN times: each
    result is the next step's first number, so that no later token is known without the earlier
    ones. Splits and errors as in `generate`."""
    draw = drawing(seed, split, largest)
    problems: list[dict] = []
    while len(problems) < count:
        totals, steps = [2 + int(draw() * (largest - 1))], []
        name, things = NAMES[int(draw() * len(NAMES))], THINGS[int(draw() * len(THINGS))]
        while len(steps) < CHAIN:
            step = (2 + int(draw() * (largest - 1))) * (1 if draw() < 0.5 else -1)
            if 0 <= totals[-1] + step <= MOST:
                steps.append(step)
                totals.append(totals[-1] + step)
        if (sum(p * n for p, n in zip((7, 11, 13, 17), (totals[0], *steps), strict=True))
                % TEST_SHARE == 0) != (split == "test"):  # fmt: skip
            continue
        signed = [f"{'+' if step > 0 else '-'} {abs(step)}" for step in steps]
        worked = [f"{a} {step} = {b}." for a, step, b in
                  zip(totals[:-1], signed, totals[1:], strict=True)]  # fmt: skip
        query = f"{name} has {totals[0]} {things}, {', '.join(signed)}. How many {things} now?"
        answer = f"{' '.join(worked)}\nThe answer is: {totals[-1]}"
        problems.append({"query": query, "response": answer})
    return problems


def drawing(seed: int, split: str, largest: int) -> Callable[[], float]:
    """Uniform numbers from [0, 1) of a seed and a split; ValueError as in `generate`."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; known are {', '.join(SPLITS)}")
    if largest < 6:
        raise ValueError(f"largest must be at least 6, not {largest}")
    # random() is the one method whose sequence Python promises to keep between versions.
    return random.Random(f"{seed} {split}").random
