"""The number of examples that a hypothesis test generates."""

from __future__ import annotations

from hypothesis import settings


def examples(count: int) -> settings:
    """`count` examples, or a tenth of them with `--hypothesis-profile=check`, the profile of `make check`."""
    return settings(max_examples=count * settings.default.max_examples // 100)
