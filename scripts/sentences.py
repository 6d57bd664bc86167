#!/usr/bin/env python3
"""Prints random sentences from the repository for a review of its language (STYLE.md).

A reviewer reads the sentences and counts those that a fluent engineer would rewrite. The same seed and the same tree
give the same sentences. The samples of all kinds of text have about the same size, regardless of how much text there
is. With files as arguments, only those are sampled.

    scripts/sentences.py --seed 1 --count 100
"""

import argparse
import html.parser
import pathlib
import random
import re
import subprocess

# The marks that begin a comment, by file extension.
COMMENT_MARKS = {".rs": ("///", "//!", "//"), ".cpp": ("//",), ".hpp": ("//",), ".py": ("#",), ".sh": ("#",), ".yaml": ("#",),
                 ".proto": ("//",), ".toml": ("#",), ".js": ("//",)}
# Generated tables whose last column is prose, with the kind of its text. They are complete, unlike a search of the
# sources for calls that register a flag or a metric.
TABLES = {"flags-": "flag help", "metrics": "metric help", "llmdeployment.md": "field of the resource", "limits.md": "limit"}
SKIPPED = ("docs/benchmarks/", "crds/", "charts/ovfleet-crds/manifests/", "operator/tests/snapshots/", "tests/tests/node_upgrade/")
# Comments that are instructions for a program.
NOT_PROSE = re.compile(r"(shellcheck |clang-format|NOLINT|rustfmt|noqa|type: |!/|-\*-|yaml-language-server)")
# Rust string literals that users read, such as errors and log messages.
STRING = re.compile(r'"((?:[^"\\]|\\.|\\\n)*)"')
READ_BY_PEOPLE = re.compile(
    r'(#\[error\(|context\(|bail!\(|ensure!\(|anyhow!\(|warn!\(|info!\(|error!\(|format!\()[^"]*$')


def comments(lines, marks):
    """Yields the kind, the line number and the text of each paragraph of comment lines."""
    text, start, current, in_code = [], 0, None, False
    for number, line in enumerate([*lines, ""], 1):
        stripped = line.strip()
        mark = next((mark for mark in marks if stripped.startswith(mark)), None)
        body = stripped[len(mark):].strip() if mark else ""
        in_code = (mark is not None and in_code) != body.startswith("```")
        is_heading = mark in ("///", "//!") and body.startswith("# ")
        if in_code or is_heading or body.startswith(("```", "|")) or NOT_PROSE.match(body):
            body = ""
        # A list item is a paragraph of its own.
        item = re.match(r"([-*]|\d+\.)\s+", body)
        if mark != current or not body or item:
            if text:
                yield ("doc comment" if current in ("///", "//!") else "comment"), start, " ".join(text)
            text, start = [], number
        current = mark if body else None
        if body:
            text.append(body[item.end():] if item else body)


def docstrings(source):
    for match in re.finditer(r'^\s*"""(.+?)"""', source, re.M | re.S):
        for paragraph in match[1].split("\n\n"):
            if not paragraph.strip().startswith(("usage:", "scripts/")):
                yield "comment", source.count("\n", 0, match.start()) + 1, " ".join(paragraph.split())


def messages(source):
    for match in STRING.finditer(source):
        if READ_BY_PEOPLE.search(source[max(0, match.start() - 80):match.start()]):
            text = re.sub(r"\\\n\s*", "", match.group(1)).replace('\\"', '"').replace("\\n", " ")
            # Markup, JSON, URLs and the content of files that tests write are not prose.
            words = re.findall(r"[A-Za-z]{2,}", re.sub(r"\{[^}]*\}", "", text))
            if len(words) > 2 and not re.search(r"\n|\\r|\{\{|://|\w+=\w|<\w|[{\"]\w+\": |^\|| \| ", text):
                yield "message", source.count("\n", 0, match.start()) + 1, text


def guide(lines):
    text, start, in_code = [], 0, False
    for number, line in enumerate([*lines, ""], 1):
        stripped = line.strip()
        if stripped.startswith("```"):
            in_code = not in_code
        is_prose = stripped and not in_code and not stripped.startswith(("#", "|", "<", "```", "!["))
        item = re.match(r"([-*]|\d+\.)\s+", stripped)
        if text and (not is_prose or item):
            yield "guide", start, " ".join(text)
            text = []
        if is_prose:
            if not text:
                start = number
            text.append(stripped[item.end():] if item else stripped)


def table(lines, kind):
    for number, line in enumerate(lines, 1):
        cells = line.strip().strip("|").split(" | ")
        if line.startswith("| `") and len(cells) > 1:
            yield kind, number, cells[-1].strip()


def chart(lines):
    """Yields the notes of the chart and the texts of its alerts and panels."""
    for number, line in enumerate(lines, 1):
        match = re.search(r'"?(?:summary|description|title)"?: "?(.+?)"?,?$', line)
        if match:
            yield "chart", number, match[1]
        elif re.match(r"[A-Z][^{]* ", line):
            yield "chart", number, line


class Console(html.parser.HTMLParser):
    """Collects the texts of a page."""

    def __init__(self, source):
        super().__init__()
        self.texts = []
        self.feed(source)

    def handle_data(self, data):
        if self.lasttag == "script":
            start = self.getpos()[0]
            for match in re.finditer(r'"([^"\n]*)"|`([^`\n]*)`', data):
                self.texts.append(("console", start + data.count("\n", 0, match.start()), match[1] or match[2] or ""))
        elif self.lasttag != "style" and data.strip():
            self.texts.append(("console", self.getpos()[0], " ".join(data.split())))


def makefile(lines):
    for number, line in enumerate(lines, 1):
        match = re.match(r"[a-z0-9-]+:.*## (.*)", line)
        if match:
            yield "make help", number, match[1]


def has_prose(path):
    return path.suffix in (*COMMENT_MARKS, ".md", ".html") or path.name in ("Makefile", "NOTES.txt", "ovfleet.json") or (
        path.parts[0] == "scripts" and not path.suffix)


def paragraphs(path):
    source = path.read_text(encoding="utf-8")
    lines = source.split("\n")
    kind = next((kind for name, kind in TABLES.items() if path.parent.name == "reference" and path.name.startswith(name)), None)
    if kind:
        yield from table(lines, kind)
    elif path.suffix == ".md":
        yield from guide(lines)
    elif path.suffix == ".html":
        yield from Console(source).texts
    elif path.name == "Makefile":
        yield from makefile(lines)
    elif path.parts[0] == "charts" and path.suffix in (".yaml", ".txt", ".json"):
        yield from chart(lines)
        if path.suffix == ".yaml":
            yield from (("chart", line, text) for _, line, text in comments(lines, ("#",)))
    else:
        yield from comments(lines, COMMENT_MARKS.get(path.suffix, ("#",)))
        if path.suffix == ".rs":
            yield from messages(source)
        elif path.suffix == ".py":
            yield from docstrings(source)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("files", nargs="*", help="only these files")
    arguments = parser.parse_args()
    listed = arguments.files or subprocess.run(
        ["git", "ls-files"], check=True, capture_output=True, text=True).stdout.split()
    kinds = {}
    for name in listed:
        path = pathlib.Path(name)
        if name.startswith(SKIPPED) or path.is_symlink() or not path.is_file() or not has_prose(path):
            continue
        for kind, line, text in paragraphs(path):
            for sentence in re.split(r"(?<=[.!?:])\s+(?=[A-Z`*\[])", text):
                if len(sentence.split()) >= 4:
                    kinds.setdefault(kind, []).append(f"{name}:{line}: {sentence}")
    generator = random.Random(arguments.seed)
    for index, (kind, found) in enumerate(sorted(kinds.items())):
        count = arguments.count // len(kinds) + (index < arguments.count % len(kinds))
        print(f"## {kind} ({len(found)} sentences)")
        for sentence in generator.sample(found, min(count, len(found))):
            print(sentence)


if __name__ == "__main__":
    main()
