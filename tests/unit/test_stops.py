"""Stop strings: what is shown, what is held back, what ends the text."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.stops import StopStrings

S1 = (" quick", " brown", "\n", "User", ":", " world")
S2 = (" quick", " brown", "\n", "User", ",", " world")
S3 = (" quick", " brown", "\n", "User")
S4 = ("Obs", "ervation")


def run(stops: list[str], pieces: tuple[str, ...], *, include: bool = False) -> tuple[list[str], str | None]:
    """The shown pieces, with the flushed one last, and the match."""
    checker = StopStrings(stops, include=include)
    shown = []
    for piece in pieces:
        shown.append(checker.feed(piece))
        if checker.matched is not None:
            return shown, checker.matched
    return [*shown, checker.flush()], None


def reference(stops: list[str], text: str, include: bool) -> tuple[str, str | None]:
    """By definition: the match that ends first, of those the one that begins first."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[:end] if include else text[: end - len(stop)], stop


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "matched"),
    [
        (S1, ["\nUser:"], " quick brown", "\nUser:"),
        (S2, ["\nUser:"], " quick brown\nUser, world", None),
        (S3, ["\nUser:"], " quick brown\nUser", None),
        (S4, ["vat"], "Obser", "vat"),
        (S1, ["\nUser:", "quick"], " ", "quick"),
        (S1, ["quick", "\nUser:"], " ", "quick"),
        (S1, ["brown", "quick brown"], " ", "quick brown"),
        (S1, ["quick brown", "brown"], " ", "quick brown"),
        (("a", "ab", "aac"), ["aac"], "aab", "aac"),
        (("x STOP y",), ["STOP", "y"], "x ", "STOP"),
    ],
)
def test_scripted_texts(pieces: tuple[str, ...], stops: list[str], text: str, matched: str | None) -> None:
    shown, found = run(stops, pieces)
    assert ("".join(shown), found) == (text, matched)


def test_no_piece_holds_the_beginning_of_a_stop_string() -> None:
    shown, _ = run(["\nUser:"], S1)
    assert shown == [" quick", " brown", "", "", ""]


def test_only_a_real_beginning_is_held_back() -> None:
    shown, _ = run(["\nUser:"], S2)
    assert shown == [" quick", " brown", "", "", "\nUser,", " world", ""]


def test_an_included_stop_string_is_shown_without_holding_back() -> None:
    shown, found = run(["\nUser:"], S1, include=True)
    assert shown == [" quick", " brown", "\n", "User", ":"]
    assert found == "\nUser:"


def test_unarmed_matches_do_not_end_the_text() -> None:
    checker = StopStrings(["quick"])
    assert checker.feed(" quick", armed=False) == " quick"
    assert checker.matched is None
    assert checker.feed(" quick!") == " "
    assert checker.matched == "quick"


def test_a_match_may_begin_before_it_is_armed() -> None:
    checker = StopStrings(["\nUser:"])
    assert checker.feed("\nUser", armed=False) == ""
    assert checker.feed(":") == ""
    assert checker.matched == "\nUser:"


@given(
    st.text("ab:", max_size=30),
    st.lists(st.text("ab:", min_size=1, max_size=5), min_size=1, max_size=4),
    st.booleans(),
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
)
def test_the_borders_of_pieces_and_the_order_of_the_list_do_not_matter(
    text: str, stops: list[str], include: bool, sizes: list[int]
) -> None:
    pieces, begin = [], 0
    for size in itertools.cycle(sizes):
        if begin >= len(text):
            break
        pieces.append(text[begin : begin + size])
        begin += size
    shown, found = run(stops, tuple(pieces), include=include)
    assert ("".join(shown), found) == reference(stops, text, include)
    assert run(stops[::-1], tuple(pieces), include=include) == (shown, found)


@given(st.text("ab", max_size=20), st.text("ab", min_size=1, max_size=6))
def test_what_is_held_back_is_the_longest_beginning_of_the_stop_string(text: str, stop: str) -> None:
    checker = StopStrings([stop])
    shown = checker.feed(text, armed=False)
    held = text[len(shown) :]
    assert checker.flush() == held
    tails = [text[begin:] for begin in range(len(text) + 1) if len(text) - begin < len(stop)]
    assert held == max((tail for tail in tails if stop.startswith(tail)), key=len)
