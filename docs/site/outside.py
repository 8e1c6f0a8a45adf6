"""Lets the site hold what its pages link to outside of `docs/`: sources, results and the guide to the code.

The pages link to these files as they lie in the repository, so that they can be followed there. mkdocs knows of no file
outside of its folder; so each gets a page of its own below `source/`, and the links are turned there: Markdown as it
is, with what it links to in its turn, other text as a listing, and folders as a list of their files.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^()\s#]+)(#[^()\s]*)?(?=\))")
#: Files whose text is not worth a page (recordings) are copied.
_COPIED = (".svg", ".png", ".jsonl")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml"}


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each file outside of `docs/` that a page links to."""
    seen: set[str] = set()
    todo = [(f"docs/{file.src_uri}", file.content_string) for file in files.documentation_pages()]
    while todo:
        path, text = todo.pop()
        for target in _targets(path, text):
            if target in seen:
                continue
            seen.add(target)
            files.append(_file(target, config))
            if target.endswith(".md"):
                todo.append((target, (ROOT / target).read_text()))
            if (ROOT / target).is_dir():
                todo.append((f"{target}/index.md", _listing(target)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links to files outside of `docs/` to their pages."""
    del config, files
    uri: str = page.file.src_uri
    here = _real(uri)

    def turned(match: re.Match[str]) -> str:
        found = _target(here, match[2])
        if found is None:
            return match[0]
        if found.startswith("docs/"):
            uri_of = found.removeprefix("docs/")
        else:
            uri_of = _uri(found)
        return f"{match[1]}{posixpath.relpath(uri_of, posixpath.dirname(uri))}{match[3] or ''}"

    return _LINK.sub(turned, markdown)


def _targets(path: str, text: str) -> Iterator[str]:
    for match in _LINK.finditer(text):
        found = _target(path, match[2])
        if found is not None and not found.startswith("docs/"):
            yield found


def _target(path: str, link: str) -> str | None:
    """Return what a link of a file leads to, from the root of the repository; ``None`` if to none of its files."""
    if ":" in link:
        return None
    found = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    return found if (ROOT / found).exists() else None


def _uri(target: str) -> str:
    """Return the place of a file in the site."""
    if (ROOT / target).is_dir():
        return f"source/{target}/index.md"
    if target.endswith((".md", *_COPIED)):
        return f"source/{target}"
    return f"source/{target}.md"


def _real(uri: str) -> str:
    """Return the file that a page of the site shows, from the root of the repository."""
    return uri.removeprefix("source/") if uri.startswith("source/") else f"docs/{uri}"


def _file(target: str, config: Any) -> File:
    path = ROOT / target
    if target.endswith(_COPIED):
        return File.generated(config, _uri(target), abs_src_path=str(path))
    if path.is_dir():
        text = _listing(target)
    elif target.endswith(".md"):
        text = path.read_text()
    else:
        text = f"# {target}\n\n`````{_LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}\n`````\n"
    return File.generated(config, _uri(target), content=f"---\nsearch: {{exclude: true}}\n---\n\n{text}")


def _listing(target: str) -> str:
    names = sorted(p.name for p in (ROOT / target).iterdir() if p.is_file())
    return "\n".join([f"# {target}", "", *(f"- [{name}]({name})" for name in names), ""])
