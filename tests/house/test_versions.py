"""Messages between processes that may be of two versions of lastgood are changed with their version only."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec

from lastgood.run.agent_link import PROTOCOL
from lastgood.run.agent_messages import AgentSpec, Answer, Copied, Request
from lastgood.run.peers import FileCall
from lastgood.wire.frames import VERSION
from lastgood.wire.messages import Message


def fingerprint(*types: Any) -> str:
    """The fields of these records, their types, bounds and defaults, as a short digest. Docstrings do not count."""

    def fields(part: Any) -> Any:
        if isinstance(part, dict):
            return {name: fields(one) for name, one in part.items() if name != "description"}
        return [fields(one) for one in part] if isinstance(part, list | tuple) else part

    schema = fields(msgspec.json.schema_components(types))
    return hashlib.sha256(json.dumps(schema, sort_keys=True).encode()).hexdigest()[:16]


def test_a_changed_message_of_the_wire_has_a_new_version():
    """A field was added to the calls of agents and the version stayed: nodes of the version before refused restores
    with "no call of an agent" and advised nothing, in place of naming the two versions."""
    assert (VERSION, fingerprint(Message, FileCall)) == (2, "628737e563fa7165")


def test_a_changed_message_of_the_agent_has_a_new_version():
    assert (PROTOCOL, fingerprint(Request, Answer, AgentSpec, Copied)) == (13, "77c13c9f270ae0c3")
