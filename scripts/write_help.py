"""Writes the help of every command into README.md, between its markers. A test checks that it is up to date.

python scripts/write_help.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eeinfer.cli.app import app
from eeinfer.cli.examples import command_line, commands

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN = "<!-- The help of every command, written by scripts/write_help.py -->"
END = "<!-- end of the help -->"
WIDTH = 110


def help_of(root: Any, name: str) -> str:
    """What `eeinfer NAME --help` prints without colours and boxes, `WIDTH` columns wide."""
    command, context = root, None
    for part in ["eeinfer", *name.split()]:
        command = root if context is None else command.commands[part]
        context = command.make_context(
            part, [], parent=context, resilient_parsing=True, terminal_width=WIDTH, max_content_width=WIDTH
        )
    command.rich_markup_mode = None
    return "\n".join(line.rstrip() for line in command.get_help(context).splitlines())


def section() -> str:
    """The section of the README, markers included."""
    root = command_line(app)
    parts = [BEGIN]
    for name, _ in commands(root):
        title = f"eeinfer {name}".rstrip()
        text = help_of(root, name)
        parts.append(f"<details><summary><code>{title}</code></summary>\n\n```\n{text}\n```\n\n</details>")
    return "\n\n".join([*parts, END])


def updated(text: str) -> str:
    """The text of the README with the section as it is now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + section() + after


if __name__ == "__main__":
    README.write_text(updated(README.read_text(encoding="utf-8")), encoding="utf-8")
