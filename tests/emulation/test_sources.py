"""Reading a package's source: the functions that its imports lead to, and enums of its headers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.emulation.sources import Sources, enum_members

#: file -> text
PACKAGE = {
    "vendor/__init__.py": """
        if True:
            from .ops.gemm import *
            from .ops.shuffle import tiles as shuffle
        from .utility import dtypes
    """,
    "vendor/ops/__init__.py": "",
    "vendor/ops/gemm.py": """
        from ..utility.dtypes import bf16
        from .loop import back
        @decorated(fake=None)
        def gemm(A: Tensor, B: Tensor, bias: Optional[Tensor] = None, *, dtype: torch.dtype = dtypes.bf16) -> Tensor:
            def inner(x): ...
    """,
    "vendor/ops/loop.py": "from .gemm import *\n",
    "vendor/ops/shuffle.py": "def tiles(x, layout=(16, 16)): ...\n",
    "vendor/ops/triton/__init__.py": "_BACKWARD_COMPAT_MAP = {'old': 'deep.new'}\n",
    "vendor/ops/triton/deep/new.py": "def old(x): ...\n",
    "vendor/utility/dtypes.py": "bf16 = torch.bfloat16\n",
}


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    for name, text in PACKAGE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(line.removeprefix("        ") for line in text.splitlines()) + "\n")
    return Sources(tmp_path)


@pytest.mark.parametrize(
    ("module", "name", "signature"),
    [
        ("vendor", "gemm", "gemm(A, B, bias=None, *, dtype=dtypes.bf16)"),
        ("vendor", "shuffle", "shuffle(x, layout=(16, 16))"),
        ("vendor.ops.triton.old", "old", "old(x)"),
        ("vendor", "tiles", ""),
        ("vendor", "absent", ""),
        ("vendor", "bf16", ""),
        ("vendor.ops.triton.absent", "old", ""),
        ("elsewhere", "gemm", ""),
    ],
)
def test_a_signature_is_found_through_imports(sources: Sources, module: str, name: str, signature: str) -> None:
    assert sources.signature(module, name) == signature


def test_variables(sources: Sources) -> None:
    assert sources.assigns("vendor.utility.dtypes", "bf16")
    assert not sources.assigns("vendor.utility.dtypes", "fp8")
    assert not sources.assigns("vendor", "gemm")


def test_members_of_an_enum_are_counted_on() -> None:
    header = (
        "enum class Kind : int\n{\n    No = -1, // none\n    One,\n    Two = 5, Three,\n};\nenum class Other { A };"
    )
    assert enum_members(header, "Kind") == {"No": -1, "One": 0, "Two": 5, "Three": 6}
    assert enum_members(header, "Other") == {"A": 0}
    assert enum_members(header, "Kin") == {}
