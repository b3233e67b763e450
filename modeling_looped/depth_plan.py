"""The one idea of this package: unique layers, and a plan that says in which order depth visits them.

Growth, looping, interventions, unrolling, FLOP accounting and cache sizing are functions of a `DepthPlan`; if
something else in this package computes where a layer runs, one of the two is wrong.
"""

import re
from dataclasses import dataclass, field


_LOOP = re.compile(r"(?:(\d+)-)?(\d+)x(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class DepthPlan:
    """
    The order in which depth visits the unique layers of a model. Immutable; equal plans visit equal layers.

    Args:
        order (`tuple[int, ...]`): The unique layer that runs at each executed position, first to last.
        sections (`tuple[int, int, int, int]`, *optional*):
            `(prelude, core, recurrences, coda)` where the plan is one loop. Without it, it is read off `order`
            where `order` has that shape, and is `None` where it has not.
        ends (`tuple[int, ...]`, *optional*):
            The executed positions at which the prelude, every pass over the core, and the coda end. Follows from
            `sections`; an order that is no loop is all prelude. Edits keep it, so that what a model does between
            passes stays where it was.

    ```python
    >>> from modeling_looped import DepthPlan
    >>> DepthPlan.parse("Loop(1-2x2-1)").order
    (0, 1, 2, 1, 2, 3)
    >>> str(DepthPlan.parse("4x1").repeat(1, 3, times=1))
    'Loop(1-2x2-1)'
    >>> str(DepthPlan.parse("4x1").swap(0, 1))
    '1 0 2 3'
    ```
    """

    order: tuple[int, ...]
    sections: tuple[int, int, int, int] | None = field(default=None, compare=False)
    ends: tuple[int, ...] | None = field(default=None, compare=False, repr=False)
    _text: str | None = field(default=None, compare=False, repr=False)

    def __post_init__(self):
        object.__setattr__(self, "order", tuple(self.order))
        if not self.order or min(self.order) < 0:
            raise ValueError(f"A depth plan needs at least one layer and no negative indices, got {self.order}.")
        if self.sections is None:
            object.__setattr__(self, "sections", _find_loop(self.order))
        if self.ends is None:
            ends = (self.effective_depth, self.effective_depth)
            if self.sections is not None:
                prelude, core, recurrences, _ = self.sections
                ends = (*(prelude + i * core for i in range(recurrences + 1)), self.effective_depth)
            object.__setattr__(self, "ends", ends)

    @classmethod
    def looped(cls, prelude: int, core: int, recurrences: int, coda: int) -> "DepthPlan":
        """`prelude` layers once, then `core` layers `recurrences` times, then `coda` layers once."""
        once, last = range(prelude), range(prelude + core, prelude + core + coda)
        order = (*once, *(list(range(prelude, prelude + core)) * recurrences), *last)
        return cls(order, (prelude, core, recurrences, coda))

    @classmethod
    def parse(cls, text: str) -> "DepthPlan":
        """
        Reads `Loop(4x6)`, `Loop(4-4x4-4)`, the same without `Loop(...)`, `8x1` (dense), or an explicit order
        such as `0 1 2 1 2 3`. In `p-cxr-d`, p layers run once, c layers run r times, d layers run once (the
        notation of arXiv 2602.16490, section 3.1).

        Raises:
            `ValueError`: naming the part of `text` that is wrong.
        """
        if not isinstance(text, str):
            raise ValueError(f"A depth plan is text such as 'Loop(4-4x4-4)', got {type(text).__name__} {text!r}.")
        body = text.strip()
        steps = body.replace(",", " ").split()
        if len(steps) > 1 and all(step.isdigit() for step in steps):
            return cls(tuple(map(int, steps)), _text=body)
        if body.startswith("Loop"):
            if not (body.startswith("Loop(") and body.endswith(")")):
                raise ValueError(f"In depth plan {text!r}, {body[4:]!r} after 'Loop' is not in brackets: write Loop(4x6).")
            body = body[len("Loop(") : -1]
        loop = _LOOP.fullmatch(body)
        if loop is None:
            parts = body.split("-")
            looped = [part for part in parts if re.fullmatch(r"\d+x\d+", part)]
            wrong = next((p for p in parts if not re.fullmatch(r"\d+(x\d+)?", p)), parts[-1] if len(looped) == 1 else body)
            raise ValueError(
                f"In depth plan {text!r}, {wrong!r} does not fit: write LxR or P-LxR-C with whole numbers, for "
                "example Loop(4x6) or Loop(4-4x4-4), or an explicit order such as '0 1 2 1 2 3'."
            )
        prelude, core, recurrences, coda = (int(part or 0) for part in loop.groups())
        if core < 1 or recurrences < 1:
            raise ValueError(f"In depth plan {text!r}, {core}x{recurrences} runs nothing: both numbers must be at least 1.")
        plan = cls.looped(prelude, core, recurrences, coda)
        return cls(plan.order, plan.sections, _text=text.strip())

    def __str__(self) -> str:
        if self._text is not None:
            return self._text
        if self.sections is None:
            return " ".join(map(str, self.order))
        prelude, core, recurrences, coda = self.sections
        if recurrences == 1:
            return f"{prelude + core + coda}x1"
        return loop_text(prelude, core, recurrences, coda)

    @property
    def unique_layers(self) -> int:
        """Number of distinct layers that the plan visits."""
        return len(set(self.order))

    @property
    def effective_depth(self) -> int:
        """Number of executed layers."""
        return len(self.order)

    @property
    def is_explicit(self) -> bool:
        """Whether the plan was written as an order, or is none of the loops that can be written as one."""
        return self.sections is None or (self._text is not None and "x" not in self._text)

    @property
    def passes(self) -> int:
        """Number of passes over the core."""
        return len(self.ends) - 2

    @property
    def cache_slots(self) -> tuple[int, ...]:
        """
        The key-value cache slot of each executed position. A loop is laid out as
        `[prelude | coda | core pass 0 | core pass 1 | ...]`, so that prelude and coda keep their slots whatever
        the number of recurrences; any other order has its positions as slots.
        """
        if self.sections is None:
            return tuple(range(self.effective_depth))
        prelude, core, recurrences, coda = self.sections
        once = prelude + coda
        return (*range(prelude), *range(once, once + core * recurrences), *range(prelude, once))

    def repeat(self, start: int, stop: int, times: int) -> "DepthPlan":
        """
        `times` further passes over the layers [start, stop), directly after their last pass; none is the identity.

        Raises:
            `ValueError`: where the plan does not run these layers one after the other.
        """
        self._whole(times=times, start=start, stop=stop)
        self._check(times=(times, 0, None), start=(start, 0, None), stop=(stop, start + 1, None))
        block = tuple(range(start, stop))
        for end in range(self.effective_depth, len(block) - 1, -1):
            if self.order[end - len(block) : end] == block:
                return self._edited(self.order[:end] + block * times + self.order[end:], end, len(block) * times)
        raise ValueError(
            f"Depth plan {self} does not run the layers {start} to {stop - 1} one after the other: choose start and stop "
            "such that it does."
        )

    def swap(self, s: int, length: int) -> "DepthPlan":
        """The executed positions [s, s+length) and [s+length, s+2*length) exchanged."""
        self._whole(length=length, s=s)
        self._check(length=(length, 1, self.effective_depth // 2), s=(s, 0, self.effective_depth - 2 * length))
        middle, end = s + length, s + 2 * length
        return self._edited(self.order[:s] + self.order[middle:end] + self.order[s:middle] + self.order[end:])

    def skip(self, s: int, length: int) -> "DepthPlan":
        """The executed positions [s, s+length) left out."""
        self._whole(length=length, s=s)
        self._check(length=(length, 1, self.effective_depth - 1), s=(s, 0, self.effective_depth - length))
        return self._edited(self.order[:s] + self.order[s + length :], s + length, -length)

    def reverse(self, s: int, length: int) -> "DepthPlan":
        """The executed positions [s, s+length) in reverse."""
        self._whole(length=length, s=s)
        self._check(length=(length, 1, self.effective_depth), s=(s, 0, self.effective_depth - length))
        return self._edited(self.order[:s] + self.order[s : s + length][::-1] + self.order[s + length :])

    def _edited(self, order: tuple[int, ...], position: int = 0, longer: int = 0) -> "DepthPlan":
        """`order` with the `ends` of this plan, when `longer` positions came (or fewer than none: went) before `position`."""
        whole = self.sections is not None and self.ends == DepthPlan.looped(*self.sections).ends
        if whole and (recurrences := self._recurrences_of(order)) is not None:
            prelude, core, _, coda = self.sections
            return DepthPlan(order, _find_loop(order), DepthPlan.looped(prelude, core, recurrences, coda).ends)
        start = position + min(longer, 0)
        ends = [end + longer if end >= position else min(end, start) for end in self.ends]
        return DepthPlan(order, ends=tuple(ends))

    def _recurrences_of(self, order: tuple[int, ...]) -> int | None:
        """How often `order` runs the core of this plan's loop, where it is that loop: an edit can be a recurrence."""
        prelude, core, _, coda = self.sections
        recurrences, rest = divmod(len(order) - prelude - coda, core) if core > 0 else (0, 1)
        is_loop = not rest and recurrences > 0
        return recurrences if is_loop and DepthPlan.looped(prelude, core, recurrences, coda).order == order else None

    def _whole(self, **values) -> None:
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name}={value!r} does not fit depth plan {self}: it must be a whole number.")

    def _check(self, **bounds: tuple[int, int, int | None]) -> None:
        for name, (value, low, high) in bounds.items():
            if value < low or (high is not None and value > high):
                upper = "" if high is None else f" and at most {high}"
                raise ValueError(f"{name}={value!r} does not fit depth plan {self}: it must be at least {low}{upper}.")


def loop_text(prelude: int, core: int, recurrences: int, coda: int) -> str:
    """
    `prelude` layers, `core` layers `recurrences` times and `coda` layers as `Loop(4x6)` or `Loop(4-4x4-4)`, one
    recurrence written out too: what `DepthPlan.parse` reads back.
    """
    block = f"{core}x{recurrences}"
    return f"Loop({prelude}-{block}-{coda})" if prelude or coda else f"Loop({block})"


def _find_loop(order: tuple[int, ...]) -> tuple[int, int, int, int] | None:
    """`(prelude, core, recurrences, coda)` of an order that loops one block at most, else `None`."""
    unique = len(set(order))
    turn = next((i for i, layer in enumerate(order) if layer != i), len(order))
    if turn == len(order):
        return 0, unique, 1, 0
    prelude = order[turn]
    core = turn - prelude
    recurrences, rest = divmod(len(order) - unique + core, core) if core > 0 else (0, 1)
    sections = (prelude, core, recurrences, unique - prelude - core)
    if rest or min(sections[1:3]) < 1 or sections[3] < 0 or DepthPlan.looped(*sections).order != order:
        return None
    return sections
