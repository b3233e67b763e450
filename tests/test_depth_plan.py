"""The depth plan: the one place that knows in which order layers run."""

import random

import pytest

from modeling_looped import DepthPlan


@pytest.mark.parametrize(
    ("text", "order", "unique", "depth"),
    [
        ("Loop(4x6)", list(range(4)) * 6, 4, 24),
        ("Loop(4-4x4-4)", [*range(4), *list(range(4, 8)) * 4, *range(8, 12)], 12, 24),
        ("4-4x4-4", [*range(4), *list(range(4, 8)) * 4, *range(8, 12)], 12, 24),
        ("8x1", list(range(8)), 8, 8),
        ("Loop(1-2x2-1)", [0, 1, 2, 1, 2, 3], 4, 6),
        ("0 1 2 1 2 3", [0, 1, 2, 1, 2, 3], 4, 6),
    ],
)
def test_a_plan_is_parsed_and_printed_back(text, order, unique, depth):
    plan = DepthPlan.parse(text)
    assert list(plan.order) == order
    assert (plan.unique_layers, plan.effective_depth) == (unique, depth)
    assert str(plan) == text
    assert DepthPlan.parse(str(plan)) == plan


def test_equal_orders_are_equal_plans_however_they_were_written():
    assert DepthPlan.parse("0 1 2 1 2 3") == DepthPlan.parse("Loop(1-2x2-1)") == DepthPlan.looped(1, 2, 2, 1)
    assert str(DepthPlan((0, 1, 2, 1, 2, 3))) == "Loop(1-2x2-1)"
    assert hash(DepthPlan.parse("4-4x4-4")) == hash(DepthPlan.parse("Loop(4-4x4-4)"))


def test_prelude_and_coda_keep_their_slots_at_any_number_of_recurrences():
    assert DepthPlan.looped(1, 2, 3, 1).cache_slots == (0, 2, 3, 4, 5, 6, 7, 1)
    assert DepthPlan.looped(1, 2, 1, 1).cache_slots == (0, 2, 3, 1)
    for recurrences in range(1, 6):
        plan = DepthPlan.looped(2, 3, recurrences, 4)
        assert sorted(plan.cache_slots) == list(range(plan.effective_depth))
        assert plan.cache_slots[:2] == (0, 1) and plan.cache_slots[-4:] == (2, 3, 4, 5)


def test_an_order_that_is_no_loop_has_its_positions_as_slots():
    plan = DepthPlan.parse("8x1").swap(1, 2)
    assert plan.sections is None and plan.cache_slots == tuple(range(8))


def test_edits_of_the_order():
    dense = DepthPlan.parse("8x1")
    assert dense.repeat(2, 4, times=2).order == (0, 1, 2, 3, 2, 3, 2, 3, 4, 5, 6, 7)
    assert str(dense.repeat(2, 4, times=2)) == "Loop(2-2x3-4)"
    assert dense.repeat(2, 4, 1).repeat(2, 4, 1) == dense.repeat(2, 4, 2)
    assert DepthPlan.parse("Loop(4-4x4-4)").repeat(4, 8, 1) == DepthPlan.parse("Loop(4-4x5-4)")
    assert dense.swap(1, 2).order == (0, 3, 4, 1, 2, 5, 6, 7)
    assert dense.skip(3, 2).order == (0, 1, 2, 5, 6, 7)
    assert dense.reverse(2, 4).order == (0, 1, 5, 4, 3, 2, 6, 7)
    assert dense == DepthPlan.parse("8x1"), "edits return new plans"


@pytest.mark.parametrize("text", ["24x1", "Loop(4x6)", "Loop(4-4x4-4)"])
def test_swaps_are_involutions_and_permutations_with_a_place_for_every_start(text):
    plan = DepthPlan.parse(text)
    for length, places in ((1, 23), (2, 21), (4, 17), (8, 9), (12, 1)):
        for s in range(places):
            swapped = plan.swap(s, length)
            assert sorted(swapped.order) == sorted(plan.order) and swapped.effective_depth == 24
            back = swapped.swap(s, length)
            assert back == plan and back.ends == plan.ends and back.sections == plan.sections
        for s in (-1, places):
            with pytest.raises(ValueError, match="s="):
                plan.swap(s, length)


def test_a_repeat_of_the_looped_block_is_as_many_recurrences_more():
    for text, start, stop in (("Loop(4x6)", 0, 4), ("Loop(4-4x4-4)", 4, 8), ("Loop(1-2x1-1)", 1, 3)):
        plan = DepthPlan.parse(text)
        prelude, core, recurrences, coda = plan.sections
        for times in (1, 2, 4):
            expected = DepthPlan.looped(prelude, core, recurrences + times, coda)
            for repeated in (plan.repeat(start, stop, times), repeated_one_by_one(plan, start, stop, times)):
                assert (repeated, repeated.ends, repeated.sections) == (expected, expected.ends, expected.sections)
    assert DepthPlan.parse("24x1").repeat(8, 12, 1).order == (*range(12), *range(8, 24))  # a retrofitted block
    assert DepthPlan.parse("24x1").repeat(8, 12, 1).effective_depth == 28


def repeated_one_by_one(plan: DepthPlan, start: int, stop: int, times: int) -> DepthPlan:
    for _ in range(times):
        plan = plan.repeat(start, stop, 1)
    return plan


def test_edits_inside_of_a_pass_leave_the_passes_where_they_are():
    # prelude 0 | core 1 2 3 4 | coda 5: what is repeated inside of the core is no recurrence.
    plan = DepthPlan.looped(1, 4, 1, 1)
    for times in (1, 2, 3):
        for edited in (plan.repeat(2, 4, times), repeated_one_by_one(plan, 2, 4, times)):
            assert edited.ends == (1, 5 + 2 * times, 6 + 2 * times) and edited.passes == 1
    assert plan.repeat(2, 4, 1).skip(2, 2).ends == plan.ends
    assert plan.repeat(1, 5, 1).ends == (1, 5, 9, 10), "and the whole core is one"
    twice = DepthPlan.looped(1, 4, 2, 1)
    assert repeated_one_by_one(twice, 2, 4, 2).ends == twice.repeat(2, 4, 2).ends == (1, 5, 13, 14)
    assert twice.swap(1, 2).ends == twice.ends == twice.reverse(0, 9).ends
    assert plan.repeat(0, 1, 2).ends == (3, 7, 8), "the prelude grows"
    assert plan.repeat(5, 6, 2).ends == (1, 5, 8), "the coda grows"
    assert plan.skip(0, 1).ends == (0, 4, 5) and plan.skip(5, 1).ends == (1, 5, 5) and plan.skip(0, 3).ends == (0, 2, 3)


def test_whatever_the_edits_every_position_has_a_slot_and_a_section():
    draw = random.Random(0)
    for _ in range(300):
        plan = DepthPlan.looped(draw.randint(0, 2), draw.randint(1, 3), draw.randint(1, 3), draw.randint(0, 2))
        for _ in range(4):
            depth, length = plan.effective_depth, draw.randint(1, 3)
            kind = draw.choice(["repeat", "swap", "skip", "reverse"])
            start = draw.randint(0, depth)
            try:
                plan = plan.repeat(start, start + length, 1) if kind == "repeat" else getattr(plan, kind)(start, length)
            except ValueError:
                continue
            assert sorted(plan.cache_slots) == list(range(plan.effective_depth))
            assert list(plan.ends) == sorted(plan.ends) and plan.ends[0] >= 0 and plan.ends[-1] == plan.effective_depth
            assert plan.passes >= 1
            assert plan.effective_depth == 1 or DepthPlan.parse(str(plan)) == plan


def test_growth_at_birth_is_a_repeat():
    # 8 -> 12 layers, LIDAS: the grown stack's sources are the small stack with layers [2, 6) run twice.
    assert DepthPlan.parse("8x1").repeat(2, 6, 1).order == (0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 6, 7)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("Loop(4x)", "4x"),
        ("Loop(4-ax2-1)", "ax2"),
        ("Loop 4x6", " 4x6"),
        ("Loop(4x6", "(4x6"),
        ("1-2x3-4-5", "5"),
        ("4x0", "4x0"),
        ("0x3", "0x3"),
        ("4x3x2", "4x3x2"),
        ("", "''"),
        ("8", "8"),
        (8, "8"),
    ],
)
def test_a_wrong_plan_is_refused_with_the_part_that_is_wrong(text, named):
    with pytest.raises(ValueError) as error:
        DepthPlan.parse(text)
    assert named in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "edit",
    [
        lambda plan: plan.swap(5, 2),
        lambda plan: plan.swap(-1, 1),
        lambda plan: plan.skip(0, 8),
        lambda plan: plan.reverse(6, 3),
        lambda plan: plan.repeat(4, 4, 1),
        lambda plan: plan.repeat(6, 9, 1),
        lambda plan: plan.repeat(0, 2, -1),
        lambda plan: plan.repeat(3, 2, 1),
        lambda plan: plan.repeat(-1, 2, 1),
        lambda plan: plan.repeat("0", 2, 1),
        lambda plan: plan.repeat(0, 2.0, 1),
        lambda plan: plan.repeat(0, 2, True),
        lambda plan: plan.repeat(False, 2, 1),
        lambda plan: plan.swap(0, 0),
        lambda plan: plan.swap(0, 5),
        lambda plan: plan.swap(0.5, 1),
        lambda plan: plan.swap("0", 1),
        lambda plan: plan.skip(8, 1),
        lambda plan: plan.skip(0, None),
        lambda plan: plan.reverse(0, 9),
    ],
)
def test_an_edit_outside_the_plan_is_refused(edit):
    with pytest.raises(ValueError, match="8x1") as error:
        edit(DepthPlan.parse("8x1"))
    assert "\n" not in str(error.value) and str(error.value).endswith(".")
