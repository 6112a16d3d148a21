"""`lastgood export`: the tensors of a generation as a file or folder of another format (convert/exporting.py)."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from ..convert import exporting
from ..errors import Damaged
from ..policy import restore
from ..run import access, paths, read_places
from ..run.kept import kept
from ..run.watched import Watched
from ..units import size
from .answer import Answer
from .arguments import AnyStep, Json, Run, bytes_of, require_suffix
from .selection import pick
from .terminal import clean, progress
from .texts import named, plural

FILES = (".safetensors", ".pt", ".pth")


def export(
    run: Run,
    step: AnyStep = None,
    *,
    to: Annotated[
        str,
        typer.Option(
            metavar="TARGET",
            help="model.safetensors or model.pt; a folder: model.dcp of torch.distributed.checkpoint, model/ of "
            "Hugging Face.",
            show_default=False,
        ),
    ],
    only: Annotated[
        str | None,
        typer.Option(
            metavar="PREFIX",
            help="Tensors under this name, which is taken off, or the one of this name.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file when it is there.")] = False,
    shard: Annotated[
        int, typer.Option(metavar="SIZE", parser=bytes_of, help="Of a file of Hugging Face's: 5GB.")
    ] = "5GB",  # type: ignore[assignment]  # typer parses it
    as_json: Json = False,
) -> Answer:
    """Write the tensors of a generation, verified on the way. The file or folder appears whole or not at all."""
    to = paths.absolute(to, "--to") + "/" * to.endswith("/")  # which is lost in an absolute path
    require_suffix(to, (*FILES, ".dcp", "/"))
    if only is not None and not only.strip("."):
        raise typer.BadParameter(f"--only {only!r} names nothing: leave it out for all tensors.")
    places = read_places.found(access.for_reading(run))
    survey = places.survey
    generation = pick(survey, step, places.remark(None))
    with (
        progress("exporting", generation.bytes) as count_bytes,
        kept(places.tier_of(generation.id), generation.id) as tier,
    ):
        try:
            data = exporting.export(Watched(tier, count_bytes), generation, to, only, force, shard)
        except Damaged as error:
            error.safe = error.safe or "Nothing was written."
            error.todo = (
                error.todo or f"`lastgood verify RUN {generation.id}` says what is damaged; export another step."
            )
            raise
    count = plural(data["tensors"], "tensor")
    text = f"{data['file']}: {count}, {size(data['bytes'])}, from {generation.id}"
    text += "".join(f"\n  {name}: {dtype}, written as its bytes (U8)" for name, dtype in data["as_bytes"].items())
    newer = restore.choose(survey, None).passed_over if step is None else []
    over = [(at, why) for at, why in newer if at.step >= generation.step]
    data["stepped_over"] = [{**named(at), "why": why} for at, why in over]
    notes = [f"stepped over {at}: {clean(why)}" for at, why in over]
    note = "\n".join([*notes, *filter(None, [places.remark(generation.id)])])
    return Answer(data, Text(clean(text, "\n")), note=note)
