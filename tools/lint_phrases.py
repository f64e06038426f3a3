"""Phrase lint: comments, docstrings and pages in plain English, with the terms of docs/glossary.md.

The lint reads the comments of C++, CUDA and Python (with docstrings) and the prose of Markdown
pages. For each phrase that is hard to understand it says what to write instead. Lines of Markdown
end at 100 columns, except in tables, code, headings and lines that are one link. Records of
measurements and the decisions up to 042 (docs/lab, docs/results, docs/decisions) stay as they were
written, except for the README of each folder.
Run: python tools/lint_phrases.py
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lint_common import CXX_SUFFIXES, PYTHON_SUFFIXES, Finding, read_text, run_lint

MAX_COLUMNS = 100

_RECORDS = re.compile(r"docs/(?:lab|results)/(?!README)|docs/decisions/0(?:[0-3]\d|4[0-2])-")


class Rule(NamedTuple):
    """A phrase to avoid, and what to write instead."""

    pattern: re.Pattern[str]
    instead: str


class Block(NamedTuple):
    """Adjacent lines of prose; `line` is the number of the first one."""

    line: int
    text: str


def _rules(*rules: tuple[str, str]) -> tuple[Rule, ...]:
    # A space also matches the end of a line within a sentence.
    return tuple(
        Rule(re.compile(pattern.replace(" ", r"\s+"), re.MULTILINE), instead)
        for pattern, instead in rules
    )


_NOT_A_PERSON = '"it", "the warp that ...", "no thread": a thread or a program is no person'

# Phrases to avoid in comments and pages.
_PHRASES = _rules(
    (r"\b(?:[Ww]hoever|[Hh]imself|[Nn]obody|[Ss]omebody)\b", _NOT_A_PERSON),
    (r"\bhad better\b", '"must", "should", or the reason'),
    (r"\b(?:is|are) to be\b(?= (?!a\b|an\b|the\b)\w)", '"must be", "has to be", or an active verb'),
    (r"\bas they come\b", '"in the order of ...", or name the order'),
    (r"\bthat there (?:are\b|is\b(?=[.,;:)]))", '"that exist", "existing", or leave it out'),
    (r"\b[Bb]ut for\b", '"except"'),
    (r"\bon (?:its|their) way\b", '"in flight"'),
    (r"\b(?:deal(?:ing|s)?) (?:warps?|blocks?)\b", '"tile scheduler warp"'),
    (r"\b(?:math|loading|load) warps?\b", '"consumer warp", "producer warp"'),
    (r"\b(?:math|loading) warpgroups?\b", '"consumer warpgroup", "producer warpgroup"'),
    (r"\b[Ss]trangers?\b", '"keys that the row does not attend to", "other sequences"'),
    (r"\b(?:[Ss]poil(?:t|s|ed)?|may_spoil)\b", '"contaminated by NaN", "contaminate"'),
    (r"\b[Ff]oresees?\b", '"prefetch"'),
    (r"\b(?:let_next_in|lets? (?:the )?next (?:one |launch )?in)\b", '"PDL trigger"'),
    (r"\bboxes form\b|\bForm::boxes\b|\bpaged_boxes\b", '"TMA form", "Form::tma"'),
    (r"\blengths (?:that )?(?:are|is) alike\b", '"uniform lengths"'),
    (r"\blast rounds?\b(?= (?:of|that|is)\b)", '"wave"'),
)

# Phrases to avoid in comments only: pages speak about people.
_COMMENT_PHRASES = _rules(
    (r"\b[Ww]ho\b(?!['’]s)|\b(?:he|his|him)\b", _NOT_A_PERSON),
    (r"\b(?:[Ee]very|[Aa]ny)body\b", _NOT_A_PERSON),
    (r"(?<![\w\"'`])Of\b(?= [a-z0-9\[(`])", 'begin with the subject, not with "Of"'),
    (r", too(?=[.;:)]|\s*\Z)", '"also" before the verb, or leave it out'),
    (r"\b(?:a |per |of )?multiprocessors?\b", '"SM", "per SM"'),
    (r"\A(?:What|Which|Whom) [^.:?]*\.(?=\s|\Z)", 'a sentence, or a noun: "The rows that ..."'),
)

# Strings and characters of C++, which may look like comments, and comments.
_CXX = re.compile(
    r'R"(?P<tag>[^(\s]*)\(.*?\)(?P=tag)"'
    r'|"(?:\\.|[^"\\\n])*"'
    r"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'"
    r"|(?P<comment>//[^\n]*|/\*.*?\*/)",
    re.DOTALL,
)
_CXX_MARKER = re.compile(r"^\s*(?:/\*+!?|//+[!/<]*|\*+(?!/)(?=\s|$))|\*+/\s*$", re.MULTILINE)


# One link, with a remark in parentheses as below generated tables.
_ONE_LINK = re.compile(r"\s*(?:[-*+] |\d+[.)] )?\*?!?\[[^\]]*\]\([^)]*\)(?: \(.*\))?\*?[.,;:]?")


def _blank(text: str) -> str:
    return re.sub(r"[^\n]", " ", text)


def _comment_lines(comments: list[tuple[int, str]], code: list[bool]) -> Iterator[Block]:
    """Blocks of comment lines; a comment after code starts one, and comment lines continue it."""
    first, lines = 0, list[str]()
    for number, text in comments:
        if lines and (number != first + len(lines) or code[number - 1]):
            yield Block(first, "\n".join(lines))
            lines = []
        if not lines:
            first = number
        lines.append(text)
    if lines:
        yield Block(first, "\n".join(lines))


def cxx_comments(text: str) -> Iterator[Block]:
    """The comments of C++ or CUDA, without their markers."""
    code, comments, at = list[str](), dict[int, str](), 0
    for match in _CXX.finditer(text):
        if match["comment"] is None:
            continue
        code.append(text[at : match.start()])
        code.append(_blank(match["comment"]))
        at = match.end()
        first = text.count("\n", 0, match.start()) + 1
        plain = _CXX_MARKER.sub("", match["comment"])
        for number, line in enumerate(plain.split("\n"), first):
            comments[number] = (comments.get(number, "") + " " + line.strip()).strip()
    code.append(text[at:])
    has_code = [bool(line.strip()) for line in "".join(code).split("\n")]
    yield from _comment_lines(sorted(comments.items()), has_code)


def python_comments(text: str) -> Iterator[Block]:
    """The comments and docstrings of Python."""
    comments, lines = list[tuple[int, str]](), text.split("\n")
    has_code = [not line.lstrip().startswith("#") for line in lines]
    before = tokenize.NEWLINE
    skipped = (tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments.append((token.start[0], token.string.lstrip("#! ")))
        elif token.type == tokenize.STRING and before == tokenize.NEWLINE:
            yield Block(token.start[0], token.string.strip("rRbBuU").strip("\"'"))
        if token.type != tokenize.COMMENT and token.type not in skipped:
            before = token.type
    yield from _comment_lines(comments, has_code)


def _markdown_lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines of a page that are not code, with their numbers."""
    fence, indented, in_list, before = "", False, False, ""
    for number, line in enumerate(text.split("\n"), 1):
        found = re.match(r"\s*(`{3,}|~{3,})", line)
        if fence:
            fence = "" if found and found[1].startswith(fence) else fence
        elif found:
            fence = found[1]
        else:
            deep = line.startswith(("    ", "\t"))
            indented = deep and not in_list and (indented or not before.strip())
            if not indented:
                yield number, line
            if line.strip() and not line[0].isspace():
                in_list = bool(re.match(r"[-*+] |\d+[.)] ", line))
            indented = indented or (not line.strip() and indented)
        before = line


def _may_be_long(line: str) -> bool:
    words = line.split()
    return (
        line.lstrip().startswith(("|", "#", "<!--"))
        or _ONE_LINK.fullmatch(line) is not None
        or max(map(len, words), default=0) > MAX_COLUMNS - 10
    )


def markdown(text: str, path: str) -> Iterator[Finding | Block]:
    """The paragraphs of a page, and its lines that are too long."""
    first, lines = 0, list[str]()
    for number, line in [*_markdown_lines(text), (0, "")]:
        if len(line) > MAX_COLUMNS and not _may_be_long(line):
            yield Finding(path, number, f"{len(line)} columns; at most {MAX_COLUMNS}")
        if lines and (number != first + len(lines) or not line.strip()):
            yield Block(first, "\n".join(lines))
            lines = []
        if line.strip():
            first = first if lines else number
            lines.append(re.sub(r"\]\([^)]*\)", "]()", line))  # targets of links are names


def findings(path: str, block: Block, rules: tuple[Rule, ...]) -> Iterator[Finding]:
    """One finding for each phrase of a block."""
    for rule in rules:
        for match in rule.pattern.finditer(block.text):
            phrase = " ".join(match.group().split())
            phrase = phrase if len(phrase) <= 40 else phrase[:37] + "..."
            line = block.line + block.text.count("\n", 0, match.start())
            yield Finding(path, line, f"{phrase!r}: write {rule.instead}")


def check(root: Path, file: Path) -> Iterator[Finding]:
    """Findings of one file."""
    path = file.as_posix()
    if _RECORDS.match(path):
        return
    if file.suffix == ".md":
        for found in markdown(read_text(root / file) or "", path):
            if isinstance(found, Finding):
                yield found
            else:
                yield from findings(path, found, _PHRASES)
    elif file.suffix in CXX_SUFFIXES | PYTHON_SUFFIXES:
        blocks = cxx_comments if file.suffix in CXX_SUFFIXES else python_comments
        for block in blocks(read_text(root / file) or ""):
            yield from findings(path, block, _PHRASES + _COMMENT_PHRASES)


if __name__ == "__main__":
    sys.exit(run_lint("phrase lint", check))
