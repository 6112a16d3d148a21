"""How many generated examples a test with hypothesis runs."""

from __future__ import annotations

from hypothesis import settings


def examples(count: int) -> settings:
    """`count` examples, and a tenth of them with `--hypothesis-profile=check`, as `make check` runs the tests."""
    return settings(max_examples=count * settings.default.max_examples // 100)
