"""How many generated examples a test with hypothesis runs."""

from __future__ import annotations

from hypothesis import settings


def examples(count: int) -> settings:
    """`count` examples, or a twentieth of them with `--hypothesis-profile=check`, the profile of `make check`."""
    share = 20 if settings.get_current_profile_name() == "check" else 1
    return settings(max_examples=count // share)
