"""Packing: rows of exact length, best fit as the paper defines it, and nothing that depends on chance."""

import random

import pytest

from modeling_looped.recipes.packing import pack_best_fit, pack_stream


def documents(count: int, seed: int = 0, longest: int = 60) -> list[list[int]]:
    """Document i holds 1000 i, 1000 i + 1, ..., so that every token says where it comes from."""
    chance = random.Random(seed)
    return [[1000 * i + j for j in range(chance.randint(1, longest))] for i in range(1, count + 1)]


def by_hand(texts: list[list[int]], length: int, buffer_size: int) -> list[list[int]]:
    """The definition, with a list that is searched from end to end."""
    waiting, buffer, rows, row = list(texts), [], [], []
    while waiting or buffer:
        while waiting and len(buffer) < buffer_size:
            buffer.append(waiting.pop(0))
        left = length - len(row)
        fitting = [text for text in buffer if len(text) <= left]
        chosen = max(fitting, key=lambda t: (len(t), t[0])) if fitting else min(buffer, key=lambda t: (len(t), t[0]))
        buffer.remove(chosen)
        row = row + chosen[:left]
        if len(row) == length:
            rows.append(row)
            row = []
    return rows


@pytest.mark.parametrize("buffer_size", [1, 3, 10, 1000])
@pytest.mark.parametrize("length", [1, 7, 32, 100])
def test_rows_are_those_of_the_definition(length, buffer_size):
    for seed in range(5):
        texts = documents(80, seed)
        assert list(pack_best_fit(texts, length, buffer_size)) == by_hand(texts, length, buffer_size)


def test_the_longest_that_fits_goes_next_and_the_shortest_is_cut():
    texts = [[1] * 6, [2] * 3, [3] * 5, [4] * 4]
    assert list(pack_best_fit(texts, 10)) == [[1] * 6 + [4] * 4]  # 5 and 3 leave a row of 8, which is dropped
    assert list(pack_best_fit([[1] * 8, [2] * 3, [3] * 5], 10)) == [[1] * 8 + [2] * 2]


def test_every_row_is_whole_and_every_document_is_used_once_and_from_its_beginning():
    texts = documents(300, longest=90)
    rows = list(pack_best_fit(texts, 64))
    assert all(len(row) == 64 for row in rows)
    beginnings = [token for row in rows for token in row if token % 1000 == 0]
    assert len(set(beginnings)) == len(beginnings) > 0.8 * len(texts)
    for row in rows:
        for before, token in zip(row, row[1:]):
            assert token == before + 1 or token % 1000 == 0


def test_best_fit_cuts_less_than_a_stream_tears():
    texts = documents(400, longest=50)
    whole = {text[0]: text for text in texts}

    def uncut(rows) -> int:
        count = 0
        for row in rows:
            starts = [i for i, token in enumerate(row) if token % 1000 == 0]
            count += sum(row[i : i + len(whole[row[i]])] == whole[row[i]] for i in starts)
        return count

    assert uncut(pack_best_fit(texts, 64)) > uncut(pack_stream(texts, 64))


def test_a_stream_keeps_every_token_but_those_of_the_last_row():
    texts = documents(50)
    rows = list(pack_stream(texts, 32))
    stream = [token for text in texts for token in text]
    assert [token for row in rows for token in row] == stream[: len(rows) * 32] and len(stream) - len(rows) * 32 < 32


def test_empty_documents_are_skipped_and_bad_sizes_refused():
    assert list(pack_best_fit([[], [1, 2], [], [3]], 3)) == [[1, 2, 3]]
    assert list(pack_best_fit([], 3)) == list(pack_stream([], 3)) == []
    with pytest.raises(ValueError, match="length=0 must be a whole number of at least 1"):
        list(pack_best_fit([[1]], 0))
    with pytest.raises(ValueError, match="buffer_size=0"):
        list(pack_best_fit([[1]], 3, 0))
