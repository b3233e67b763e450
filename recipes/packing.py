"""Documents into rows of equal length: best fit, as the iso-depth paper packs, or one plain stream."""

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence

from modeling_looped.configuration_looped import require_int


def pack_best_fit(documents: Iterable[Sequence[int]], length: int, buffer_size: int = 1000) -> Iterator[list[int]]:
    """
    Rows of exactly `length` tokens (arXiv 2604.21106, section 5.4 of its specification): of the documents in a buffer,
    the longest that fits in what is left of the row goes next; where none fits, the shortest is cut to fill it and its
    rest is dropped. Documents begin a row or follow another one, and none is continued in the next row.

    Args:
        documents: Token ids of each, a first token that marks its beginning included; empty ones are skipped.
        length: Tokens of a row.
        buffer_size: Documents to choose from. The row that the end of the documents leaves unfilled is dropped.
    """
    require_int("length", length, 1)
    require_int("buffer_size", buffer_size, 1)
    documents = (list(document) for document in documents if len(document) > 0)
    # By length; of equal ones the latest comes first, which makes the rows a function of the documents alone.
    buffer: list[tuple[int, int]] = []
    held: dict[int, list[int]] = {}
    arrived = 0

    def refill() -> None:
        nonlocal arrived
        while len(buffer) < buffer_size:
            document = next(documents, None)
            if document is None:
                return
            insort(buffer, (len(document), arrived))
            held[arrived] = document
            arrived += 1

    row: list[int] = []
    refill()
    while buffer:
        left = length - len(row)
        fitting = bisect_right(buffer, (left, arrived))
        size, number = buffer.pop(fitting - 1 if fitting else 0)
        row += held.pop(number)[:left]
        if len(row) == length:
            yield row
            row = []
        refill()


def pack_stream(documents: Iterable[Sequence[int]], length: int) -> Iterator[list[int]]:
    """Rows of `length` tokens cut from all documents one after the other; a last one that is not full is dropped."""
    require_int("length", length, 1)
    row: list[int] = []
    for document in documents:
        row += document
        while len(row) >= length:
            yield row[:length]
            row = row[length:]
