"""What is made of thirty thousand step times."""

from __future__ import annotations

import pytest

from voxlite.bench.step_time import Course


def test_the_last_thousand_is_compared_with_the_second() -> None:
    course = Course(
        wall_ms=[9.0] * 1_000 + [2.0] * 1_000 + [7.0] * 500 + [3.0] * 1_000,
        thread_ms=[1.0] * 3_500,
        resident_mb=[50.0 + point for point in range(35)],
    )
    figures = course.summary()
    assert figures["steps"] == 3_500
    assert figures["wall_ms_ratio"] == pytest.approx(1.5)
    assert figures["thread_ms_ratio"] == pytest.approx(1.0)
    assert figures["resident_mb_after_2000"] == 69.0
    assert figures["resident_mb_at_end"] == 84.0
