"""Stop strings: the text must not depend on how it arrives."""

from hypothesis import given
from hypothesis import strategies as st

from minivllm.stop_strings import StopStringChecker


def grow(text: str, stop: list[str], sizes: list[int]) -> tuple[str, str | None, list[str]]:
    """Feed a text in pieces; returns what is kept, which stop string ended it, and what a stream showed on the way."""
    checker = StopStringChecker(stop)
    so_far, shown, position = "", [], 0
    sizes = iter(sizes)
    while position < len(text):
        size = next(sizes, 1)
        piece = text[position : position + size]
        position += len(piece)
        so_far += piece
        match = checker.find(so_far, len(piece))
        if match is not None:
            return so_far[: match[0]], match[1], shown
        shown.append(so_far[: len(so_far) - checker.num_held_back(so_far)])
    return so_far, None, shown


def first_completed(text: str, stop: list[str]) -> tuple[str, str | None]:
    """The rule, spelled out: the match that ends first, and of two the longer one."""
    matches = [(begin + len(s), begin, s) for s in stop for begin in range(len(text)) if text.startswith(s, begin)]
    if not matches:
        return text, None
    _, begin, found = min(matches)
    return text[:begin], found


texts = st.text(alphabet="abc", max_size=24)
stops = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3)


@given(texts, stops)
def test_character_by_character_the_first_completed_match_ends_the_text(text: str, stop: list[str]) -> None:
    kept, found, _ = grow(text, stop, [])
    assert (kept, found) == first_completed(text, stop)


@given(texts, stops, st.lists(st.integers(1, 7), max_size=24))
def test_the_size_of_the_pieces_does_not_change_the_text(text: str, stop: list[str], sizes: list[int]) -> None:
    assert grow(text, stop, sizes)[:2] == grow(text, stop, [])[:2]


@given(texts, stops, st.lists(st.integers(1, 7), max_size=24))
def test_a_stream_never_shows_what_a_stop_string_takes_back(text: str, stop: list[str], sizes: list[int]) -> None:
    kept, _, shown = grow(text, stop, sizes)
    assert all(kept.startswith(view) for view in shown)


@given(texts, stops)
def test_a_stream_holds_back_no_more_than_a_possible_beginning(text: str, stop: list[str]) -> None:
    held = StopStringChecker(stop).num_held_back(text)
    suffix = text[len(text) - held :]
    assert not held or any(s.startswith(suffix) and s != suffix for s in stop)


def test_of_two_stop_strings_completed_by_one_character_the_longer_wins() -> None:
    assert StopStringChecker(["c", "abc"]).find("xabc", 1) == (1, "abc")


def test_without_stop_strings_nothing_is_held_back() -> None:
    assert StopStringChecker([]).num_held_back("abc") == 0
    assert StopStringChecker([]).find("abc", 3) is None
