"""The identity of this machine."""

from __future__ import annotations

from lastgood.io.machine import machine


def test_a_machine_has_one_identity_and_a_variable_names_another():
    assert machine({}) == machine({"LASTGOOD_NODE": ""}) != ""
    assert machine({"LASTGOOD_NODE": "node-7"}) == "node-7"
