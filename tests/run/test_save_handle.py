"""What a person sees of a save and of its generation."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from histories import generation
from lastgood.errors import Overtaken
from lastgood.records import Finding
from lastgood.run.save_handle import Save


def test_a_save_is_printed_with_its_step_its_state_and_its_places() -> None:
    """`print(ckpt.step(n))` showed the class and the address of the object."""
    save, copied = Save(3), Future[None]()
    assert repr(save) == "<Save: step 3, being copied from the live state>"
    save.note_staged()
    assert repr(save) == "<Save: step 3, being written>"
    save.note_places("/nvme/run", {"s3://bucket/run": copied})
    save.note_outcome(generation(3), None)
    assert repr(save) == "<Save: step 3, in /nvme/run, being copied to s3://bucket/run>"
    copied.set_result(None)
    assert repr(save) == "<Save: step 3, in /nvme/run and s3://bucket/run>"


@pytest.mark.parametrize(
    ("error", "text"), [(Overtaken("step 4 is committed"), "dropped: Overtaken"), (OSError("full"), "failed: OSError")]
)
def test_a_save_that_ended_with_an_error_is_printed_with_it(error: Exception, text: str) -> None:
    save = Save(3)
    save.note_outcome(None, error)
    assert repr(save) == f"<Save: step 3, {text}>"


@pytest.mark.parametrize(
    ("marks", "text"),
    [
        ({}, "not verified yet"),
        ({"verified": True}, "good"),
        ({"damaged": [Finding(kind="Damaged", what="a bit", blob="r00000.safetensors")]}, "damaged"),
        ({"unfit": [Finding(kind="Unfit", what="a NaN", layer="finite")]}, "intact, and not good"),
    ],
)
def test_a_generation_is_printed_in_one_line(marks: dict[str, object], text: str) -> None:
    """`print(save.result())` showed every field of its commit record, 500 characters for one rank."""
    assert repr(generation(3, bytes=19_473, **marks)) == f"<Generation: step 3 (a), {text}, 19,473 bytes>"
