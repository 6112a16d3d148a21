"""The identity of this machine."""

from __future__ import annotations

from lastgood.io.machine import NODE, machine


def test_a_machine_has_one_identity_and_a_variable_names_another():
    assert machine({}) == machine({"LASTGOOD_NODE": ""}) != ""
    assert machine({"LASTGOOD_NODE": "node-7"}) == "node-7"


def test_a_name_of_a_node_that_is_no_text_is_written_out() -> None:
    """With such a LASTGOOD_NODE ranks and then the supervisor ended with UnicodeEncodeError, without a record."""
    assert machine({NODE: "n\udcff"}) == "n\\xff"
