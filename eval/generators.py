"""
Items that the tasks' YAML files have made: `custom_dataset` names a function of here, `dataset_kwargs` are what it is
called with, and it returns the items of each split. They depend on nothing else, so no file travels with the tasks.

`induction_head` and `var_assign` are the files of arXiv 2604.21106 (specification, section 6.4), byte for byte.
`copying` and `variable_assignment` are the primitives of arXiv 2602.16490 (section 5.2), which recipes train on too.
`p_hop` and `addition` are the tasks of arXiv 2502.17416, section 2.1 (sizes: specification of arXiv 2602.16490,
section 5.2). Item i of them depends on the seed and on i, not on how many are asked for.
"""

import string
from collections.abc import Callable
from random import Random

from modeling_looped.recipes import synthetic


INDUCTION_SEED, ASSIGNMENT_SEED = 1337, 42
ITEMS, KEYS, BASES, LARGEST_VALUE = 1000, 8, 5, 25
ASSIGNMENTS = ((0, "math"), (0, "code"), (1, "math"), (1, "code"))  # depths and forms, in the order they are drawn in
PRIMITIVE_SEED, SHOTS = 0, 100

Splits = dict[str, list[dict]]


def induction_head() -> Splits:
    """Eight lines `key -> value` of random letters, then one of the keys again. Which value follows?"""
    random = Random(INDUCTION_SEED)
    return {"test": [_lookup(random) for _ in range(ITEMS)]}


def _lookup(random: Random) -> dict:
    keys = ["".join(random.choices(string.ascii_lowercase, k=4)) for _ in range(KEYS)]
    values = ["".join(random.choices(string.ascii_lowercase, k=3)) for _ in range(KEYS)]
    gold = random.randrange(KEYS)
    lines = "".join(f"{key} -> {value}\n" for key, value in zip(keys, values))
    return {"context": f"{lines}{keys[gold]} ->", "continuation": values[gold], "choices": values, "gold": gold}


def var_assign(form: str, depth: int) -> Splits:
    """
    Five letters with values, and at depth 1 five more, each equal to one of the first. What is the value of a letter of
    the last five? Unlike those of `recipes.synthetic`, values may coincide and there are no choices.

    Args:
        form: `"math"` or `"code"`.
        depth: 0 or 1.

    Raises:
        `ValueError`: for a form and depth that the paper does not have.
    """
    if (depth, form) not in ASSIGNMENTS:
        named = ", ".join(f"{form!r} at {depth}" for depth, form in ASSIGNMENTS)
        raise ValueError(f"form={form!r} at depth={depth!r} is none of the paper's tasks: choose among {named}.")
    random = Random(ASSIGNMENT_SEED)  # one for all four: those before have to be drawn to be left behind
    for kind in ASSIGNMENTS:
        items = [_assignment(random, *kind) for _ in range(ITEMS)]
        if kind == (depth, form):
            break
    return {"test": items}


def _assignment(random: Random, depth: int, form: str) -> dict:
    names = random.sample(string.ascii_lowercase, BASES * (depth + 1))
    bases, aliases = names[:BASES], names[BASES:]
    values = {name: str(random.randint(1, LARGEST_VALUE)) for name in bases}
    lines = list(values.items())
    if aliases:
        sources = bases[:]
        random.shuffle(sources)
        lines += zip(aliases, sources)
        values |= {alias: values[source] for alias, source in zip(aliases, sources)}
    asked = random.choice(aliases or bases)
    return {"context": synthetic.assignment_prompt(form, lines, asked), "continuation": values[asked]}


def copying(kind: str) -> Splits:
    """`recipes.synthetic.copying` of a `kind`, in the splits `"test"` and `"shots"`."""
    return _primitive(lambda count, split: synthetic.copying(kind, count, PRIMITIVE_SEED, split))


def variable_assignment(form: str, depth: int) -> Splits:
    """`recipes.synthetic.variable_assignment` of a `form` and `depth`, in the splits `"test"` and `"shots"`."""
    return _primitive(
        lambda count, split: synthetic.variable_assignment(form, depth, count, PRIMITIVE_SEED, split=split)
    )


def _primitive(make: Callable[[int, str], list[synthetic.ChoiceItem]]) -> Splits:
    return {
        split: [
            {"context": item.prompt, "choices": list(item.choices), "gold": item.choices.index(item.answer)}
            for item in make(count, split)
        ]
        for split, count in (("test", ITEMS), ("shots", SHOTS))
    }


def p_hop(hops: int, count: int, length: int = 256, alphabet: int = 4, seed: int = 0) -> Splits:
    """
    Follow induction `hops` times through a sequence of letters v_1 ... v_n (arXiv 2402.09268, section 4, the task of
    arXiv 2502.17416). One hop leads from place i to

        hop(i) = max {j <= i : v_(j-1) = v_i},

    the place after the last occurrence of v_i before i. The answer is the letter at hop(hop(...(n))), and it is asked
    for right after the sequence: at one hop it is what an induction head predicts.

    Only items in which all hops exist, and in which each leads further to the left: where v_(i-1) = v_i a hop stays at
    i for ever, which can happen to the first hop only. The places of the hops are drawn, all sets of places alike, then
    the other letters, all alike that leave the hops as they are. So the path runs through the whole sequence, and any
    `hops` fits that there are places for. Chance is 1 / `alphabet`; the most frequent letter is right a little more
    often, 28 % at the sizes of the tasks (tests/test_generators.py), as in any random sequence.

    Args:
        hops: How many hops, from 1 to `length - 2`.
        count: Items.
        length: Letters in the sequence, n.
        alphabet: Different letters, and choices, from 2 to 26.
        seed: Of the items.

    Raises:
        `ValueError`: for a size that no such item has.
    """
    _check("count", count, 1)
    _check("alphabet", alphabet, 2, len(string.ascii_lowercase))
    _check("length", length, 3)
    _check("hops", hops, 1, length - 2)
    letters = string.ascii_lowercase[:alphabet]
    return {"test": [_walk(Random(f"p-hop {seed} {index}"), hops, length, letters) for index in range(count)]}


def _walk(random: Random, hops: int, length: int, letters: str) -> dict:
    # From the right to the left: a hop is where the letter sought comes, and seeks the one to the right of it next. The
    # last letter but one is no hop, as it would lead to the last one again.
    places = sorted(random.sample(range(2, length), hops))
    reached, sought = set(places), random.choice(letters)
    sequence = [sought]
    for place in range(1, length):
        if place in reached:
            sequence.append(sought)
            sought = sequence[-2]
        else:
            sequence.append(random.choice(letters.replace(sought, "") if place < places[-1] else letters))
    return {"context": " ".join(reversed(sequence)), "choices": list(letters), "gold": letters.index(sought)}


def addition(operands: int, count: int, digits: int = 3, seed: int = 0) -> Splits:
    """
    The sum of `operands` numbers, with no steps between: `12 + 845 + 7 =` goes on with `864` (arXiv 2502.17416, section
    2.1). Numbers are drawn from 0 to the largest of `digits` digits, all alike. The split `shots` has up to 100 items
    to fill prompts with, none of which is in `test`.

    Args:
        operands: How many numbers, at least 2.
        count: Items of the split `test`.
        digits: Of the largest number.
        seed: Of the items.

    Raises:
        `ValueError`: for a size that no such item has, and where `test` has all sums that were to be shots.
    """
    _check("operands", operands, 2)
    _check("count", count, 1)
    _check("digits", digits, 1)

    def items(split: str, count: int) -> list[dict]:
        name = f"addition {operands} {digits} {split} {seed}"
        return [_sum(Random(f"{name} {index}"), operands, digits) for index in range(count)]

    test = items("test", count)
    known = {item["context"] for item in test}
    shots = [item for item in items("shots", SHOTS) if item["context"] not in known]
    if not shots:
        raise ValueError(f"count={count} test items leave no sum of {operands} numbers for shots: ask for fewer.")
    return {"test": test, "shots": shots}


def _sum(random: Random, operands: int, digits: int) -> dict:
    numbers = [random.randrange(10**digits) for _ in range(operands)]
    return {"context": " + ".join(map(str, numbers)) + " =", "continuation": str(sum(numbers))}


def _check(name: str, value: int, least: int, most: int | None = None) -> None:
    if type(value) is not int or value < least or (most is not None and value > most):
        expected = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name}={value!r} must be an integer {expected}: change {name} in the task's dataset_kwargs.")
