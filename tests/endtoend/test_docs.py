"""The snippets of docs/*.md run, as a reader would run them.

The rule, for whoever writes a page:

- Before each ```python block stands `<!-- run: 2 ranks -->`, with any number of ranks, or
  `<!-- not run: reason -->`. A page without Python says the latter once, anywhere.
- The blocks of a page that have the same number of ranks are one script: a later one uses the names
  of those before it. It runs under mpirun, on 1 rank without it, in an empty folder that is the
  ranks' current one.
- What a snippet needs and a reader does not may follow in the comment, from its second line on; it
  runs before the block:

      <!-- run: 2 ranks
      x = np.zeros((8, 3), "float32")
      -->
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.glob("*.md"))
PYTHON_BLOCK = re.compile(r"^( *)```(?:python|py)\b[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
# The last comment before a block, with nothing but white space between them.
RUN = re.compile(r"<!-- run: (\d+) ranks?[ ]*(\n(?:(?!-->).)*)?-->\s*\Z", re.DOTALL)
NOT_RUN = re.compile(r"<!-- not run: \S(?:(?!-->).)*-->", re.DOTALL)
NOT_RUN_BEFORE = re.compile(NOT_RUN.pattern + r"\s*\Z", re.DOTALL)


class Snippet(NamedTuple):
    """What runs, and the line of the page that it begins in; `num_ranks` is None if it does not."""

    line: int
    num_ranks: int | None
    code: str


def snippets(text: str) -> list[Snippet]:
    """Find the Python blocks of a page, and what is hidden before them."""
    found = []
    for block in PYTHON_BLOCK.finditer(text):
        before = text[: block.start()]
        marker = RUN.search(before)
        if marker is None:
            reason = "not run" if NOT_RUN_BEFORE.search(before) else ""
            found.append(Snippet(line_of(text, block.start()), None, reason))
            continue
        num_ranks = int(marker[1])
        if hidden := marker[2]:
            # It begins with the rest of the marker's line, which is empty.
            found.append(Snippet(line_of(text, marker.start(2)), num_ranks, hidden))
        indent = len(block[1])
        lines = [line[indent:] for line in block[2].splitlines()]
        found.append(Snippet(line_of(text, block.start(2)), num_ranks, "\n".join(lines)))
    return found


def line_of(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def script(page: Path, num_ranks: int) -> str:
    """Compose what runs of a page; tracebacks name the page's own lines."""
    parts = [
        (page.as_posix(), "\n" * (snippet.line - 1) + snippet.code)
        for snippet in snippets(page.read_text())
        if snippet.num_ranks == num_ranks
    ]
    return f"for name, code in {parts!r}:\n    exec(compile(code, name, 'exec'), globals())\n"


JOBS = [
    pytest.param(page, num_ranks, id=f"{page.stem}-{num_ranks}")
    for page in PAGES
    for num_ranks in sorted({s.num_ranks for s in snippets(page.read_text())} - {None})
]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("page, num_ranks", JOBS)
def test_snippets_run(
    page: Path, num_ranks: int, mpirun: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "reader"
    folder.mkdir()
    monkeypatch.chdir(folder)
    program = script(page, num_ranks)
    # A page may start ranks itself, which it could not do as a rank of another job.
    mpirun(num_ranks if num_ranks > 1 else 0, program, timeout=150).assert_ok().assert_no_orphans()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_snippet_runs_or_says_why_not(page: Path) -> None:
    text = page.read_text()
    found = snippets(text)
    bare = [s.line for s in found if s.num_ranks is None and not s.code]
    assert not bare, (
        f"{page.name}, lines {bare}: a python block has neither `<!-- run: N ranks -->` nor "
        "`<!-- not run: reason -->` before it"
    )
    assert found or NOT_RUN.search(text), f"{page.name}: no python block, and no reason why"
    markers = len(re.findall(r"<!-- run:", text))
    used = len([s for s in found if s.num_ranks is not None and not s.code.startswith("\n")])
    assert markers == used, f"{page.name}: a run marker stands before no python block"


def test_the_rule() -> None:
    page = (
        "<!-- run: 2 ranks\nhidden = 1\n-->\n\n```python\nshown = 2\n```\n"
        "<!-- not run: needs a GPU -->\n```python\nother = 3\n```\n"
        "- in a list:\n\n  <!-- run: 1 rank -->\n  ```python\n  if True:\n      x = 4\n  ```\n"
        "<!-- run: 3 ranks -->\nText between.\n```python\nbare = 5\n```\n"
        "```sh\nls\n```\n"
    )
    assert snippets(page) == [
        Snippet(1, 2, "\nhidden = 1\n"),
        Snippet(6, 2, "shown = 2"),
        Snippet(9, None, "not run"),
        Snippet(16, 1, "if True:\n    x = 4"),
        Snippet(21, None, ""),
    ]


def test_a_traceback_names_the_line_of_the_page(tmp_path: Path, mpirun: Any) -> None:
    page = tmp_path / "page.md"
    page.write_text("Title\n\n<!-- run: 1 rank\na = 0\n-->\n```python\nb = 1\nb / a\n```\n")
    result = mpirun(0, script(page, 1), timeout=60)
    assert result.returncode == 1
    assert f'"{page}", line 8' in result.stderr
    assert "ZeroDivisionError" in result.stderr


def test_pages_are_found() -> None:
    assert len(PAGES) >= 1
