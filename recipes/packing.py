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
    packer = BestFitPacker(length, buffer_size)
    yield from packer.rows(documents)


def pack_stream(documents: Iterable[Sequence[int]], length: int) -> Iterator[list[int]]:
    """Rows of `length` tokens cut from all documents one after the other; a last one that is not full is dropped."""
    yield from StreamPacker(length).rows(documents)


class BestFitPacker:
    """`pack_best_fit` that can stop between rows: `held` is all that it has read and not yet put into one."""

    def __init__(self, length: int, buffer_size: int = 1000, held: Iterable[Sequence[int]] = ()):
        require_int("length", length, 1)
        require_int("buffer_size", buffer_size, 1)
        self.length, self.buffer_size = length, buffer_size
        # By length; of equal ones the latest comes first, which makes the rows a function of the documents alone.
        self._buffer: list[tuple[int, int]] = []
        self._held: dict[int, list[int]] = {}
        self._arrived = 0
        for document in held:
            self._add(document)

    @property
    def held(self) -> list[list[int]]:
        """The documents of the buffer, in the order in which they came."""
        return list(self._held.values())

    def rows(self, documents: Iterable[Sequence[int]]) -> Iterator[list[int]]:
        documents = (document for document in documents if len(document) > 0)
        row: list[int] = []
        while True:
            while len(self._buffer) < self.buffer_size and (document := next(documents, None)) is not None:
                self._add(document)
            if not self._buffer:
                return
            left = self.length - len(row)
            fitting = bisect_right(self._buffer, (left, self._arrived))
            _, number = self._buffer.pop(fitting - 1 if fitting else 0)
            row += self._held.pop(number)[:left]
            if len(row) == self.length:
                yield row
                row = []

    def _add(self, document: Sequence[int]) -> None:
        insort(self._buffer, (len(document), self._arrived))
        self._held[self._arrived] = list(document)
        self._arrived += 1


class StreamPacker:
    """`pack_stream` that can stop between rows; `held` is the rest of the document that the last row cut."""

    def __init__(self, length: int, held: Iterable[Sequence[int]] = ()):
        require_int("length", length, 1)
        self.length = length
        self._row = [token for document in held for token in document]

    @property
    def held(self) -> list[list[int]]:
        return [self._row]

    def rows(self, documents: Iterable[Sequence[int]]) -> Iterator[list[int]]:
        documents = iter(documents)
        while True:
            while len(self._row) < self.length:
                document = next(documents, None)
                if document is None:
                    return
                self._row += document
            row, self._row = self._row[: self.length], self._row[self.length :]
            yield row


PACKERS = {"best_fit": BestFitPacker, "concatenate": StreamPacker}
