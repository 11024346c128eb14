"""Ascend NPUs: torch_npu's operators."""

from omniplat.emulation.ascend.layout import format_cast
from omniplat.emulation.ascend.schemas import SCHEMAS
from omniplat.emulation.core import Vendor

VENDOR = Vendor(
    kind="npu",
    library="torch-npu",
    version="2.13.0",
    known=("2.10.0.post4", "2.13.0"),
    loaded_as=("torch_npu",),
    schemas=tuple(schema for schema in SCHEMAS if schema.name == "npu_format_cast"),
    operators={"npu::npu_format_cast": format_cast},
)
