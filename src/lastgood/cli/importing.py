"""`lastgood import`: a new generation from a file or folder of another format (convert/importing.py)."""

from __future__ import annotations

import os
from typing import Annotated

import typer
from rich.text import Text

from ..convert import exporting, importing
from ..format import layout
from ..limits import STEP_LIMIT
from ..run import access, paths
from ..units import size
from .answer import Answer
from .arguments import Json, Run, TakeOver, require_suffix
from .exporting import FILES
from .terminal import progress
from .texts import named, plural


def import_file(
    file: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="model.safetensors, model.pt, or a folder of torch.distributed.checkpoint or of Hugging Face.",
            show_default=False,
        ),
    ],
    run: Run,
    step: Annotated[int, typer.Option(min=0, max=STEP_LIMIT - 1, help="Of the new generation.")] = 0,
    under: Annotated[
        str,
        typer.Option(
            metavar="PREFIX", help="Put the names under this one: the opposite of export --only.", show_default=False
        ),
    ] = "",
    take_over: TakeOver = False,
    as_json: Json = False,
) -> Answer:
    """Make a new generation from a file or folder, and verify it. Nothing that lies in there is run."""
    file, place = paths.local(file, "SOURCE"), access.many_files(run)
    swapped = run.endswith(FILES) or os.path.isfile(os.path.join(file, layout.HEADER))
    order = " SOURCE comes first, then RUN." if swapped else ""
    if os.path.isdir(file) and not importing.is_known_folder(file):
        raise typer.BadParameter(
            f"{file!r} is a folder of neither torch.distributed.checkpoint ({importing.DCP_METADATA}) nor Hugging Face "
            f"({exporting.HF_FILE}, {exporting.HF_INDEX}).{order}"
        )
    if not os.path.isdir(file):
        if not os.path.lexists(file) and not file.endswith(FILES):
            raise typer.BadParameter(f"there is nothing at {file!r}.{order}")
        require_suffix(file, FILES)
    with importing.opened(file, under) as source:
        total = sum(one.length for one in source.tensors)
        with progress("importing", 2 * total) as count_bytes:
            generation = importing.bring(source, run, step, count_bytes, take_over)
    data = {
        "place": place,
        **named(generation.id),
        "verified": generation.verified,
        "tensors": len(source.tensors),
        "aliases": len(source.aliases),
        "values": len(source.values),
        "bytes": generation.bytes,
    }
    text = f"{generation.id}: {plural(len(source.tensors), 'tensor')}, {size(total)}, verified"
    return Answer(data, Text(text))
