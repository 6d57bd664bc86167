#!/usr/bin/env python3
"""Prints random sentences of the repository for a review of its language (STYLE.md).

A reviewer reads the sentences and counts those that a fluent engineer would rewrite. The same seed and the same tree give
the same sentences. With a file as an argument, only that file is sampled.

    scripts/sentences.py --seed 1 --count 100
"""

import argparse
import pathlib
import random
import re
import subprocess

# The kinds of text and how a line of each begins. Each kind is sampled equally, whatever its size.
COMMENT_MARKS = {".rs": ("///", "//!", "//"), ".cpp": ("//",), ".hpp": ("//",), ".py": ("#",), ".sh": ("#",), ".yaml": ("#",)}
GENERATED = ("docs/benchmarks/", "crds/", "docs/reference/")
# String literals of Rust that people read: errors, logs, help texts of metrics.
STRING = re.compile(r'"((?:[^"\\]|\\.|\\\n)*)"')
READ_BY_PEOPLE = re.compile(
    r'(#\[error\(|context\(|bail!\(|ensure!\(|anyhow!\(|warn!\(|info!\(|error!\(|\.register\(|format!\()[^"]*$')


def paragraphs_of_comments(lines, marks):
    """Yields the kind, the first line number and the text of each block of comment lines."""
    text, start, current = [], 0, None
    for number, line in enumerate([*lines, ""], 1):
        stripped = line.strip()
        mark = next((mark for mark in marks if stripped.startswith(mark)), None)
        body = stripped[len(mark):].strip() if mark else ""
        if mark != current or not body:
            if text:
                yield ("doc comment" if current in ("///", "//!") else "comment"), start, " ".join(text)
            text, start = [], number
        current = mark if body else None
        if mark and body:
            if not text:
                start = number
            text.append(body)


def paragraphs_of_strings(source):
    for match in STRING.finditer(source):
        if READ_BY_PEOPLE.search(source[max(0, match.start() - 80):match.start()]):
            text = re.sub(r"\\\n\s*", "", match.group(1)).replace('\\"', '"').replace("\\n", " ")
            if "\n" in text or "{{" in text:
                continue  # A file that a test writes.
            yield "message", source.count("\n", 0, match.start()) + 1, text


def paragraphs_of_markdown(lines):
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


def sentences(path):
    source = path.read_text(encoding="utf-8")
    lines = source.split("\n")
    if path.suffix == ".md":
        found = list(paragraphs_of_markdown(lines))
    else:
        found = list(paragraphs_of_comments(lines, COMMENT_MARKS[path.suffix]))
        if path.suffix == ".rs":
            found += paragraphs_of_strings(source)
    for kind, line, text in found:
        for sentence in re.split(r"(?<=[.!?:])\s+(?=[A-Z`*\[])", text):
            if len(sentence.split()) >= 4:
                yield kind, line, sentence


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
        if (path.suffix in COMMENT_MARKS or path.suffix == ".md") and not name.startswith(GENERATED):
            for kind, line, sentence in sentences(path):
                kinds.setdefault(kind, []).append(f"{name}:{line}: {sentence}")
    generator = random.Random(arguments.seed)
    for index, (kind, found) in enumerate(sorted(kinds.items())):
        count = arguments.count // len(kinds) + (index < arguments.count % len(kinds))
        print(f"## {kind} ({len(found)} sentences)")
        for sentence in generator.sample(found, min(count, len(found))):
            print(sentence)


if __name__ == "__main__":
    main()
