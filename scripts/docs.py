#!/usr/bin/env python3
"""Builds the documentation site with mdBook and checks the internal links and anchors of the result.

usage: docs.py MDBOOK

The site is built from a copy of docs/ in target/docs. Pages outside docs/ that SUMMARY.md lists become pages of the site, and
links to other files of the repository lead to copies of these files, so the site is complete without the repository.
"""

from __future__ import annotations

import html.parser
import os
import pathlib
import re
import shutil
import subprocess
import sys
import urllib.parse

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
STAGE = ROOT / "target" / "docs"
SOURCE = STAGE / "src"
SITE = STAGE / "html"
# The configuration and the style sheet for mdBook.
SETTINGS = ("book.toml", "site.css")
# The directory in the site for pages and files from outside docs/.
OUTSIDE = "repository"
LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def main() -> None:
    mdbook = pathlib.Path(sys.argv[1]).resolve()
    shutil.rmtree(STAGE, ignore_errors=True)
    SOURCE.mkdir(parents=True)
    for name in SETTINGS:
        shutil.copy(DOCS / name, STAGE)
    pages = listed_pages()
    for path in sorted(DOCS.rglob("*")):
        if path.is_file() and path.name not in SETTINGS:
            stage(path, pages)
    for path in pages:
        if not path.is_relative_to(DOCS):
            stage(path, pages)
    subprocess.run([mdbook, "build", "--dest-dir", SITE, STAGE], check=True)
    problems = check(SITE)
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        sys.exit(f"docs: {len(problems)} broken links")
    print(f"docs: {len(pages)} pages in {(SITE / 'index.html').relative_to(ROOT)}, no broken links")


def listed_pages() -> set[pathlib.Path]:
    """Returns the pages that SUMMARY.md lists."""
    summary = (DOCS / "SUMMARY.md").read_text()
    return {(DOCS / match[2]).resolve() for match in LINK.finditer(summary)}


def staged(path: pathlib.Path, pages: set[pathlib.Path]) -> pathlib.Path:
    """Returns the path that a repository file has in the source directory of the site."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS)
    relative = OUTSIDE / path.relative_to(ROOT)
    # mdBook does not copy Markdown files that are not pages, so they become text files, which browsers display.
    if path.suffix == ".md" and path not in pages:
        relative = relative.with_suffix(".txt")
    return relative


def stage(path: pathlib.Path, pages: set[pathlib.Path]) -> None:
    """Copies a file. The links of a page are rewritten to point to the copies of their targets."""
    target = SOURCE / staged(path, pages)
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix != ".md" or (path not in pages and path.name != "SUMMARY.md"):
        shutil.copy(path, target)
        return

    def rewrite(match: re.Match[str]) -> str:
        link, _, anchor = match[2].partition("#")
        if not link or "://" in match[2] or match[2].startswith("mailto:"):
            return match[0]
        linked = (path.parent / link).resolve()
        if not linked.exists():
            sys.exit(f"docs: {path.relative_to(ROOT)} links to {link}, which does not exist")
        if linked.is_dir():
            sys.exit(f"docs: {path.relative_to(ROOT)} links to the directory {link}; link to a file in it")
        copy = staged(linked, pages)
        if linked not in pages and not linked.is_relative_to(DOCS) and not (SOURCE / copy).exists():
            (SOURCE / copy).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(linked, SOURCE / copy)
        relative = os.path.relpath(SOURCE / copy, target.parent)
        # The index of a directory is named README.md in the repository and index.html in the site.
        if path.name != "SUMMARY.md":
            relative = re.sub(r"(^|/)README\.md$", r"\1index.md", relative)
        # Copies of files that are not pages have no anchors.
        suffix = f"#{anchor}" if anchor and linked in pages else ""
        return f"{match[1]}{relative}{suffix}{match[3]}"

    lines = []
    is_code = False
    for line in path.read_text().splitlines(keepends=True):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        lines.append(line if is_code else LINK.sub(rewrite, line))
    target.write_text("".join(lines))


class Page(html.parser.HTMLParser):
    """Collects the links and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value:
                self.links.add(value)


def check(site: pathlib.Path) -> list[str]:
    """Returns a message for each link in the site whose target file or anchor does not exist."""
    pages = {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    problems = []
    for path, page in pages.items():
        # 404.html has absolute links, toc.html is displayed in a frame of each page, and print.html repeats all pages.
        if path.name in ("404.html", "toc.html", "print.html"):
            continue
        for link in sorted(page.links):
            url = urllib.parse.urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = (path.parent / urllib.parse.unquote(url.path)).resolve() if url.path else path
            where = path.relative_to(site)
            if target.is_dir():
                target /= "index.html"
            if not target.is_file():
                problems.append(f"{where}: link to {link}: the file does not exist")
            elif url.fragment and target in pages and urllib.parse.unquote(url.fragment) not in pages[target].anchors:
                problems.append(f"{where}: link to {link}: the anchor does not exist")
    return problems


if __name__ == "__main__":
    main()
