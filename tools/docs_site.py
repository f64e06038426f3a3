#!/usr/bin/env python3
"""Prepares the pages of the documentation site in one folder, for Sphinx.

  tools/docs_site.py FOLDER      copies docs/ and the pages beside it, and writes the C reference

Pages are written for a reader of the repository, so their links are paths between its files. Some
of these files have other places on the site: links between pages are rewritten, and a link to a
file that is no page becomes plain text.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADERS = ROOT / "include" / "tilewise"
# The order of the headers in the C reference, by their stems.
ORDER = ("types", "mask", "attention", "append", "info", "version")

# Pages outside of docs/, and their place on the site.
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "bench/README.md": "bench.md",
    "examples/README.md": "examples.md",
    "tools/README.md": "tools.md",
    "tests/emulator/README.md": "emulator.md",
}
CONTENTS = {
    "Guides": "options masks mla from-flexattention derivatives api c-api numerics performance "
    "serving distributed distributed-scaling migration packaging examples",
    "Integrations": "integrations/*",
    "Reference": "reference/python reference/c glossary",
    "How it works": "architecture kernels-hopper kernels-blackwell kernels-mma-sync "
    "decode decisions/README",
    "Development": "contributing tools emulator bench results/README lab/README versioning "
    "security changelog",
}
LINK = re.compile(
    r"(!?)\[([^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*)\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)"
)
# A comment and the declaration that follows it; a struct or an enum up to its name.
DECLARATION = re.compile(
    r"(?P<comment>/\*(?:(?!\*/).)*\*/\n)?"
    r"(?P<code>typedef (?:struct|enum) \w+ \{.*?\} (?P<type>\w+);"
    r"|typedef void \(\*(?P<callback>\w+)\)[^;]*;"
    r"|TILEWISE_API [^;(]*?(?P<function>\w+)\([^;]*;(?: /\*[^\n]*\*/)?)\n",
    re.DOTALL,
)


def rewritten(text: str, source: str, address: str) -> str:
    """The text of page `source` of the repository, whose place on the site is `address`."""

    def replace(match: re.Match[str]) -> str:
        picture, label, path, anchor = match[1], match[2], match[3], match[4] or ""
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        site = OUTSIDE.get(target)
        if site is None and target.startswith("docs/") and (ROOT / target).is_file():
            site = target.removeprefix("docs/")
        if site is None:
            return label
        link = posixpath.relpath(site, posixpath.dirname(address) or ".")
        return f"{picture}[{label}]({link}{anchor})"

    return LINK.sub(replace, text)


def contents(folder: Path) -> str:
    """The tables of contents, for the end of the first page."""
    parts = []
    for caption, names in CONTENTS.items():
        lines = []
        for name in names.split():
            if name.endswith("*"):
                pages = sorted((folder / name).parent.glob("*.md"))
                lines += [page.relative_to(folder).with_suffix("").as_posix() for page in pages]
            else:
                lines.append(name)
        body = "\n".join(lines)
        parts.append(f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{body}\n```\n")
    return "\n".join(parts)


def chapter(folder: Path, name: str) -> str:
    """The table of contents of a folder whose README is its first page."""
    pages = sorted(p.stem for p in (folder / name).glob("*.md") if p.name != "README.md")
    body = "\n".join(pages)
    return f"\n```{{toctree}}\n:hidden:\n\n{body}\n```\n"


def plain(comment: str) -> str:
    """The text of a C comment."""
    lines = comment.strip().removeprefix("/*").removesuffix("*/").split("\n")
    return "\n".join(re.sub(r"^ ?\* ?", "", line).rstrip() for line in lines).strip()


def c_reference() -> str:
    """The declarations of the C ABI with their comments, one header after the other."""
    texts = {header.stem: header.read_text() for header in HEADERS.glob("*.h")}
    text = texts.pop("tilewise")
    introduction = plain(text[text.index("/*") : text.index("*/") + 2]).split("\n\n", 2)[-1]
    parts = [f"# C reference\n\n`#include <tilewise/tilewise.h>`\n\n{introduction}\n"]
    declarations = "".join(
        texts[name].partition('extern "C" {')[2] for name in sorted(texts, key=ORDER.index)
    )
    for match in DECLARATION.finditer(declarations):
        name = match["type"] or match["callback"] or match["function"]
        comment = plain(match["comment"]) + "\n\n" if match["comment"] else ""
        parts.append(f"## {name}\n\n{comment}```c\n{match['code'].strip()}\n```\n")
    return "\n".join(parts)


def main() -> int:
    """Rewrites the folder."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(sys.argv[1]).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder)
    for page in folder.rglob("*.md"):
        address = page.relative_to(folder).as_posix()
        page.write_text(rewritten(page.read_text(), f"docs/{address}", address))
    for source, address in OUTSIDE.items():
        (folder / address).write_text(rewritten((ROOT / source).read_text(), source, address))
    (folder / "reference" / "c.md").write_text(c_reference())
    for name in ("decisions", "lab", "results"):
        first = folder / name / "README.md"
        first.write_text(first.read_text() + chapter(folder, name))
    first = folder / "index.md"
    first.write_text(first.read_text() + "\n" + contents(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
