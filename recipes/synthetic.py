"""
Texts made by a seed, for runs that need no data: the reasoning primitives of arXiv 2602.16490 (section 5.2 of its
specification) and short word problems. Item i depends on the seed and on i, not on how many are asked for.
"""

import string
from collections.abc import Callable
from dataclasses import dataclass
from random import Random


FORMS = ("basic", "math", "code")
SPLITS = ("train", "test", "shots")
COPY_KINDS = ("random", "real")
COPIED_WORDS, SPAN = 10, 5


@dataclass(frozen=True)
class ChoiceItem:
    """A multiple-choice question: `prompt` goes on with a space and the right one of `choices`, which is `answer`."""

    prompt: str
    answer: str
    choices: tuple[str, ...]
    depth: int = 0

    @property
    def text(self) -> str:
        return f"{self.prompt} {self.answer}"


def variable_assignment(
    form: str,
    depth: int,
    count: int,
    seed: int,
    num_variables: int = 5,
    largest_value: int = 25,
    split: str = "train",
) -> list[ChoiceItem]:
    """
    Chains of assignments: `num_variables` letters get different values, then `depth` layers of as many fresh letters
    get one letter each of the layer before. The question is for a letter of the last layer, the choices are all values.

    Args:
        form: `"basic"`, `"math"` or `"code"`. The same seed states the same assignments in each of them.
        depth: How many assignments lead from the letter asked for to a letter with a value.
        count: Items.
        seed: Of the items.
        num_variables: Letters in a layer, and choices.
        largest_value: Values are drawn from 1 to this one.
        split: `"train"`, `"test"`, or `"shots"` to fill prompts with. Each has random numbers of its own.

    Raises:
        `ValueError`: for a form, depth or size that no such item has.
    """
    _check_choice("form", form, FORMS)
    _check_choice("split", split, SPLITS)
    return [
        _assignment(Random(f"assignment {split} {seed} {index}"), form, depth, num_variables, largest_value)
        for index in range(count)
    ]


def _assignment(random: Random, form: str, depth: int, num_variables: int, largest_value: int) -> ChoiceItem:
    letters = (depth + 1) * num_variables
    if depth < 0 or num_variables < 1 or letters > len(string.ascii_lowercase):
        raise ValueError(
            f"depth={depth} and num_variables={num_variables} must be at least 0 and 1 and take at most the 26 letters "
            f"there are ({max(letters, 0)} are asked for)."
        )
    if largest_value < num_variables:
        raise ValueError(
            f"largest_value={largest_value} must be at least num_variables={num_variables}: all values differ."
        )
    names = random.sample(string.ascii_lowercase, letters)
    layer = names[:num_variables]
    values = {name: str(value) for name, value in zip(layer, random.sample(range(1, largest_value + 1), num_variables))}
    choices = tuple(values.values())
    lines = list(values.items())
    for level in range(1, depth + 1):
        sources = random.sample(layer, num_variables)  # a bijection onto the layer before, in an order of its own
        layer = names[level * num_variables : (level + 1) * num_variables]
        values |= {name: values[source] for name, source in zip(layer, sources)}
        lines += zip(layer, sources)
    asked = random.choice(layer)
    return ChoiceItem(assignment_prompt(form, lines, asked), values[asked], choices, depth)


def assignment_prompt(form: str, lines: list[tuple[str, str]], asked: str) -> str:
    """The assignments `lines`, and the question for the letter `asked`, as each of `FORMS` puts them."""
    if form == "basic":
        return "Fill in blank:\n\n" + "".join(f"{name}={value}\n" for name, value in lines) + f"{asked}=___. ->"
    if form == "math":
        equations = "".join(f"{name}={value}\n" for name, value in lines)
        return (
            "The following is a set of simple mathematical equations.\n\n"
            f"{equations}What is the numerical value of {asked}?\nAnswer:"
        )
    program = "".join(f"{name} = {value}\n" for name, value in lines)
    return (
        "The following is a very short Python program. Use the program to resolve the value of the variable in the "
        f"question.\nProgram:\n{program}\nQuestion:\nWhat is the value of {asked}?\nAnswer:"
    )


def copying(kind: str, count: int, seed: int, split: str = "train") -> list[ChoiceItem]:
    """
    Ten different words, then a span of five of them again: which word came after the span? The span is never the last
    five, so that there is one. The choices are all ten.

    Args:
        kind: `"random"`: words of three random letters. `"real"`: common English words of three letters.
        count: Items.
        seed: Of the items.
        split: As in `variable_assignment`.

    Raises:
        `ValueError`: for a kind or split that there is not.
    """
    _check_choice("kind", kind, COPY_KINDS)
    _check_choice("split", split, SPLITS)
    items = []
    for index in range(count):
        random = Random(f"copying {kind} {split} {seed} {index}")
        words = random.sample(REAL_WORDS, COPIED_WORDS) if kind == "real" else _random_words(random, COPIED_WORDS)
        start = random.randrange(COPIED_WORDS - SPAN)
        shown = " ".join([*words, *words[start : start + SPAN]])
        items.append(ChoiceItem(f"Fill in the blank:\n{shown} ___. ->", words[start + SPAN], tuple(words)))
    return items


def _random_words(random: Random, count: int) -> list[str]:
    words: dict[str, None] = {}  # in the order drawn, each once
    while len(words) < count:
        words["".join(random.choices(string.ascii_lowercase, k=3))] = None
    return list(words)


def arithmetic_texts(count: int, seed: int) -> list[str]:
    """
    `count` word problems of one or two steps with their worked solutions, a document each, for math-heavy toy
    cooldowns.
    """
    return [_word_problem(Random(f"arithmetic {seed} {index}")) for index in range(count)]


def _word_problem(random: Random) -> str:
    question, steps, answer = random.choice(PROBLEMS)(random)
    heading, solution, last = random.choice(LAYOUTS)
    return f"{heading}{question}\n{solution}{' '.join(steps)} {last.format(answer)}"


# How a document is laid out: what stands before the question and the solution, and the sentence with the result.
LAYOUTS = (
    ("Question: ", "Answer: ", "The answer is {}."),
    ("Problem: ", "Solution: ", "So the answer is {}."),
    ("", "", "The result is {}."),
    ("Q: ", "A: ", "#### {}"),
)
NAMES = tuple(
    "Anna Ben Carla David Emma Felix Grace Henry Ines Jack Karen Leo Maria Noah Olga Paul Rita Sam Tina Victor".split()
)
THINGS = tuple(
    "apples books cards coins cookies flowers marbles oranges pencils shells stamps stickers stones toys".split()
)
HOLDERS = (("bag", "bags"), ("basket", "baskets"), ("box", "boxes"), ("jar", "jars"), ("shelf", "shelves"))
Problem = tuple[str, list[str], int]  # the question, the steps of its solution, and the result


def _gains(random: Random) -> Problem:
    name, thing, a, b = random.choice(NAMES), random.choice(THINGS), random.randint(2, 40), random.randint(2, 40)
    verb = random.choice(("buys", "finds", "gets"))
    question = f"{name} has {a} {thing} and {verb} {b} more. How many {thing} does {name} have now?"
    return question, [f"{name} has {a} + {b} = {a + b} {thing}."], a + b


def _loses(random: Random) -> Problem:
    name, thing, a = random.choice(NAMES), random.choice(THINGS), random.randint(5, 60)
    b, verb = random.randint(2, a - 1), random.choice(("gives away", "loses", "sells"))
    question = f"{name} has {a} {thing} and {verb} {b} of them. How many {thing} are left?"
    return question, [f"There are {a} - {b} = {a - b} {thing} left."], a - b


def _packs(random: Random) -> Problem:
    thing, (holder, holders) = random.choice(THINGS), random.choice(HOLDERS)
    a, b = random.randint(2, 12), random.randint(2, 12)
    question = f"There are {b} {thing} in each {holder}. How many {thing} are there in {a} {holders}?"
    return question, [f"{a} {holders} hold {a} * {b} = {a * b} {thing}."], a * b


def _compares(random: Random) -> Problem:
    (first, second), thing, a = random.sample(NAMES, 2), random.choice(THINGS), random.randint(5, 60)
    b = random.randint(1, a - 1)
    question = (
        f"{first} has {a} {thing}. {second} has {b} {thing}. How many more {thing} does {first} have than {second}?"
    )
    return question, [f"{first} has {a} - {b} = {a - b} {thing} more than {second}."], a - b


def _gains_and_loses(random: Random) -> Problem:
    name, thing, a, b = random.choice(NAMES), random.choice(THINGS), random.randint(2, 30), random.randint(2, 30)
    c = random.randint(1, a + b - 1)
    question = (
        f"{name} has {a} {thing}. A friend brings {b} more, and then {name} gives {c} to a neighbour. "
        f"How many {thing} does {name} have in the end?"
    )
    steps = [f"With the friend's {thing} there are {a} + {b} = {a + b}.", f"Then {a + b} - {c} = {a + b - c} are left."]
    return question, steps, a + b - c


def _packs_and_gains(random: Random) -> Problem:
    name, thing, (_, holders) = random.choice(NAMES), random.choice(THINGS), random.choice(HOLDERS)
    a, b, c = random.randint(2, 10), random.randint(2, 10), random.randint(2, 20)
    question = (
        f"{name} fills {a} {holders} with {b} {thing} each and has {c} {thing} over. "
        f"How many {thing} does {name} have in all?"
    )
    steps = [f"The {holders} hold {a} * {b} = {a * b} {thing}.", f"Together that is {a * b} + {c} = {a * b + c}."]
    return question, steps, a * b + c


def _packs_and_loses(random: Random) -> Problem:
    name, thing, (_, holders) = random.choice(NAMES), random.choice(THINGS), random.choice(HOLDERS)
    a, b = random.randint(2, 10), random.randint(2, 10)
    c = random.randint(1, a * b - 1)
    question = f"{name} has {a} {holders} with {b} {thing} each and uses {c} {thing}. How many {thing} remain?"
    steps = [f"At first there are {a} * {b} = {a * b} {thing}.", f"Then {a * b} - {c} = {a * b - c} remain."]
    return question, steps, a * b - c


def _times_as_many(random: Random) -> Problem:
    (first, second), thing = random.sample(NAMES, 2), random.choice(THINGS)
    a, b = random.randint(2, 15), random.randint(2, 6)
    question = (
        f"{first} has {a} {thing}, and {second} has {b} times as many. How many {thing} do {first} and {second} have "
        "together?"
    )
    steps = [f"{second} has {b} * {a} = {a * b} {thing}.", f"Together they have {a} + {a * b} = {a + a * b}."]
    return question, steps, a + a * b


def _pays(random: Random) -> Problem:
    name, thing, price, count = random.choice(NAMES), random.choice(THINGS), random.randint(2, 9), random.randint(2, 9)
    paid = price * count + random.randint(1, 20)
    question = (
        f"{name} buys {count} {thing} for {price} dollars each and pays with {paid} dollars. How much is the change?"
    )
    steps = [
        f"The {thing} cost {count} * {price} = {count * price} dollars.",
        f"The change is {paid} - {count * price} = {paid - count * price} dollars.",
    ]
    return question, steps, paid - count * price


PROBLEMS: tuple[Callable[[Random], Problem], ...] = (
    _gains, _loses, _packs, _compares, _gains_and_loses, _packs_and_gains, _packs_and_loses, _times_as_many, _pays,
)  # fmt: skip


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} must be {' or '.join(map(repr, choices))}.")


# The paper gives no list (section 5.2): common words, so that usual tokenizers have one token for most of them.
REAL_WORDS = tuple(
    """
    act add age ago aid aim air all and any arm art ask bad bag bar bed big bit box boy bus but buy can car cat cup cut
    dad day did die dog dry due ear eat egg end eye far fat few fit fly for fun gas get god got gun guy had has hat her
    him his hit hot how ice its job key kid law lay led leg let lie lot low man map may men mix mom net new nor not now
    odd off oil old one our out own pay per put ran red run sad sat saw say sea see set sex she sin sir sit six sky son
    sun tax tea ten the tie tip too top toy try two use van war was way web wet who why win yes yet you
    """.split()
)
