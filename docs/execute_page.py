"""Run the Python blocks of a page, in order and in one namespace, and compare what they print with the page.

A `text` block directly behind a `python` block holds its output. With --write the page is rewritten with the
outputs of this run; without, a difference is an error.

    python docs/execute_page.py docs/article.md [--write]
"""

from __future__ import annotations

import contextlib
import difflib
import io
import re
import sys
from pathlib import Path

BLOCK = re.compile(r"```python\n(?P<code>.*?)```\n(?:\n```text\n(?P<output>.*?)```\n)?", re.DOTALL)


def execute_page(text: str) -> str:
    """Return the page with the output of every Python block as it is now."""
    namespace: dict[str, object] = {"__name__": "__page__"}

    def run(block: re.Match[str]) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block["code"], "page", "exec"), namespace)
        output = f"\n```text\n{printed.getvalue()}```\n" if printed.getvalue() else ""
        return f"```python\n{block['code']}```\n{output}"

    return BLOCK.sub(run, text)


def main(arguments: list[str]) -> int:
    """Check or rewrite one page; 1 where it is stale."""
    page = Path(arguments[0])
    text = page.read_text(encoding="utf-8")
    executed = execute_page(text)
    if "--write" in arguments:
        page.write_text(executed, encoding="utf-8")
        return 0
    difference = difflib.unified_diff(text.splitlines(), executed.splitlines(), "page", "executed", lineterm="")
    lines = list(difference)
    sys.stderr.write("".join(f"{line}\n" for line in lines))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
