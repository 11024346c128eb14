"""Every field of every real config, one by one, set to values of every kind."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import omniplat
from omniplat.errors import OmniplatError
from tests.fuzz.inputs import TIMES, Base, Raw, bases, dumps, places, replaced

VALUES: list[Any] = [None, True, 0, -1, 3, Raw("9" * 400), 1.5, "", "x", "re:(", [], [None], [[]], {}, {"": None},
                     {"x": {}}, [{"x": 1}], "int4", 10**18, ["re:(a+)+$"],
                     {"default": {"quant_method": "fp8"}}]  # fmt: skip
#: Without OMNIPLAT_FUZZ only every so many-th input is tried.
STEP = 97 if TIMES == 1 else 1


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bases")


def inputs(found: tuple[Base, ...]) -> list[tuple[Base, str, str]]:
    """(checkpoint, file, text) for every field outside tables of tensors, and every value."""
    tried = []
    for base in found:
        for name, content in base.files.items():
            if name.endswith("index.json"):
                continue
            paths = [path for path in places(content) if len(path) < 7]
            for path in paths[:: max(len(paths) // 120, 1)]:
                tried += [(base, name, dumps(replaced(content, path, value))) for value in VALUES]
    return tried[::STEP]


def test_every_field_of_every_config(store: Path) -> None:
    problems: dict[str, str] = {}
    tried = inputs(bases(store))
    assert tried
    for base, name, text in tried:
        with TemporaryDirectory(dir=store) as folder:
            base.write(Path(folder), {name: text})
            try:
                omniplat.plan(folder, "cpu")
            except OmniplatError:
                continue
            except Exception as exc:
                trace = exc.__traceback__
                while trace is not None and trace.tb_next is not None:
                    trace = trace.tb_next
                where = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else ""
                problems.setdefault(f"{type(exc).__name__} {where}", f"{exc}: {base.name} {name}: {text[:2000]}")
    assert problems == {}
