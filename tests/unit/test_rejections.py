"""Frames that cannot be read: all counted, one a second logged."""

from __future__ import annotations

from structlog.testing import capture_logs

from services.rejections import Rejections


def test_all_are_counted_and_one_a_second_is_logged() -> None:
    now = [0.0]
    rejections = Rejections(clock=lambda: now[0])
    with capture_logs() as lines:
        for number in range(30):
            now[0] = number / 10
            rejections.note(f"bad {number}", peer="p")
    assert rejections.count == 30
    assert [(line["why"], line["untold"]) for line in lines] == [("bad 0", 0), ("bad 10", 9), ("bad 20", 9)]
