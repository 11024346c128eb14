"""docs/vllm-support.md is what the engines and omniplat say now."""

from __future__ import annotations

from docs.generate_vllm import PAGE, page


def test_the_page_is_what_would_be_written() -> None:
    """Wholly: a line that nobody says any more is as wrong as one that is missing."""
    assert PAGE.read_text().splitlines() == page().splitlines()
