"""`lastgood report`: puts the reports of benchmarks and experiments on one HTML page. It measures nothing itself.

Tables come from the Markdown reports, and figures are embedded as SVG. The page loads no script, font or other file.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt

from lastgood.errors import NotWritable, Refused

REPORT = "report.md"
"""The report of an experiment, to which all figures of its folder belong. The figures of a benchmark have names that
begin with the name of its report."""


def write(folders: Sequence[Path], out: Path, title: str) -> int:
    """Write the page to `out` and return its length in bytes. An existing file is replaced only by a complete page.

    Raises Refused if a folder has no report, and NotWritable for an error of the operating system.
    """
    try:
        data = page(folders, title).encode()
        staged = out.with_name(out.name + ".tmp")
        staged.write_bytes(data)
        staged.replace(out)
    except OSError as error:
        raise NotWritable(f"{error.filename or out}: {error.strerror}", safe="The old page is untouched.") from error
    return len(data)


class Section(NamedTuple):
    """One report: its heading, the id of its HTML section, and the HTML text."""

    title: str
    anchor: str
    body: str


def page(folders: Sequence[Path], title: str) -> str:
    """Return the HTML page of all reports in these folders. Raises Refused if a folder has none."""
    sections: list[Section] = []
    for folder in folders:
        found = list(_reports(folder))
        if not found:
            raise Refused(
                f"{folder} holds no report",
                safe="Nothing was written.",
                todo="Give the --out of `lastgood bench` or `lastgood lab`.",
            )
        sections += [_section(path, figures, len(sections) + at) for at, (path, figures) in enumerate(found)]
    links = "".join(f'<li><a href="#{one.anchor}">{html.escape(one.title)}</a></li>' for one in sections)
    bodies = "".join(f'<section id="{one.anchor}">{one.body}</section>' for one in sections)
    return _PAGE.format(title=html.escape(title), style=_STYLE, links=links, bodies=bodies)


def _reports(folder: Path) -> Iterator[tuple[Path, list[Path]]]:
    """Yield each Markdown file of a folder with its figures."""
    for path in sorted(folder.glob("*.md")):
        figures = folder.glob("*.svg" if path.name == REPORT else f"{path.stem}-*.svg")
        yield path, sorted(figures)


def _section(path: Path, figures: Sequence[Path], number: int) -> Section:
    text = path.read_text(encoding="utf-8")
    found = re.search(r"^# (.+)$", text, re.M)
    title = found[1] if found else path.stem
    # HTML markup inside a report is escaped, so that the page shows it as text.
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    body = body.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")
    drawn = "".join(_figure(one, title) for one in figures)
    return Section(title, f"report-{number + 1}", body + drawn)


def _figure(path: Path, title: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    name = html.escape(f"{title}: {path.stem}")
    return f'<figure><img alt="{name}" src="data:image/svg+xml;base64,{data}"></figure>'


_STYLE = """
:root { color-scheme: light dark; --text: #1b1b1b; --quiet: #666; --page: #fff; --line: #ddd; --stripe: #f6f6f6; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e6e6; --quiet: #a0a0a0; --page: #16181b; --line: #3a3d42; --stripe: #1f2226; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 72rem; font: 16px/1.5 system-ui, sans-serif;
  color: var(--text); background: var(--page); overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; }
section { border-top: 1px solid var(--line); margin-top: 2rem; }
section h1 { font-size: 1.25rem; }
h2 { font-size: 1.05rem; }
a { color: inherit; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: 0.25rem 0.6rem; text-align: left; border-bottom: 1px solid var(--line); white-space: nowrap; }
tbody tr:nth-child(even) { background: var(--stripe); }
code { font-size: 0.9em; }
figure { margin: 1rem 0; padding: 0.5rem; background: #fff; border-radius: 6px; border: 1px solid var(--line); }
figure img { display: block; max-width: 100%; height: auto; margin: 0 auto; }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
<ul>{links}</ul>
{bodies}
</body>
</html>
"""
