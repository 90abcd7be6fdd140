"""Fill in what the pages take from elsewhere: files of the root, the help of the command line, the options.

| in a page                              | becomes                                                        |
|----------------------------------------|----------------------------------------------------------------|
| `<!-- include: FILE -->`               | that file of the repository                                    |
| `<!-- include: FILE, from A to B -->`  | what is between the comments `<!-- A -->` and `<!-- B -->`     |
| `<!-- help -->`                        | the help of `hf-dcsgd` and of every command                    |
| `<!-- options -->`                     | the options of `DCSGDTrainingArguments` that are this library's |
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES_OF_FILES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}
INCLUDE = re.compile(r"<!-- include: (\S+?)(?:, from (.+?) to (.+?))? -->")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in what a page asks for."""
    markdown = INCLUDE.sub(included, markdown)
    for mark, text in (("<!-- help -->", command_line_help), ("<!-- options -->", option_list)):
        if mark in markdown:
            markdown = markdown.replace(mark, text())
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """Show types of arguments, which docstrings have in the way of transformers, without their Markdown."""
    return re.sub(r"<code>([^<]*`[^<]*)</code>", lambda type_: f"<code>{re.sub('[`*]', '', type_[1])}</code>", html)


def included(wanted: re.Match[str]) -> str:
    """Return a file, or a part of it, whose links are those of a page."""
    name, start, end = wanted.groups()
    text = (ROOT / name).read_text(encoding="utf-8")
    if start:
        text = text.split(f"<!-- {start} -->")[1].split(f"<!-- {end} -->")[0]
    text = text.replace("](docs/", "](")
    for file, page in PAGES_OF_FILES.items():
        text = text.replace(f"]({file})", f"]({page})")
    return text


def command_line_help() -> str:
    """Return what every command's `--help` prints."""
    overview = help_of([])
    commands = re.findall(r"^    ([a-z-]+)(?:\s|$)", overview.split("commands:")[1], re.MULTILINE)
    sections = [f"```text\n{overview}```"]
    sections += [f"## hf-dcsgd {command}\n\n```text\n{help_of([command])}```" for command in commands]
    return "\n\n".join(sections)


def help_of(command: list[str]) -> str:
    from hf_dcsgd.cli import main

    os.environ["COLUMNS"] = "100"
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        main([*command, "--help"])
    return shown.getvalue()


def option_list() -> str:
    """Return name, default and help of each option."""
    from transformers import TrainingArguments

    from hf_dcsgd import DCSGDTrainingArguments

    theirs = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    entries = []
    for field in dataclasses.fields(DCSGDTrainingArguments):
        if field.init and (field.name not in theirs or field.default != theirs[field.name]):
            default = "" if field.default is None else f", default `{field.default!r}`"
            entries.append(f"`{field.name}`{default}\n:   {field.metadata['help'].replace('%%', '%')}")
    return "\n\n".join(entries)
