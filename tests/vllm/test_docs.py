"""docs/vllm-support.md is what the engines say now."""

from __future__ import annotations

from docs.generate_vllm import PAGE, STOCK, checkpoints_table, methods_table


def test_checkpoints_are_what_the_engine_says() -> None:
    lines = PAGE.read_text().splitlines()
    assert [line for line in checkpoints_table() if line not in lines] == []


def test_methods_of_the_engine_are_what_it_says() -> None:
    """Kernels of backends change more often than this page has to be written again."""
    lines = PAGE.read_text().splitlines()
    stock = [line for line in methods_table() if "| vllm-omni |" in line]
    assert len(stock) >= len(STOCK)
    assert [line for line in stock if line not in lines] == []
