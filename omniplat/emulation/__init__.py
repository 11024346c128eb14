"""Vendors' operators on the CPU, under the vendors' own schemas: wrong calls fail here as they would on the device.

Never active by itself: `with emulate("npu:a5") as emulation`, `omniplat --emulate npu:a5 ...` or the pytest fixture
`omniplat_emulate`. What an emulated device runs is evidence of its own kind, "emulated": an emulator shares what its
author misread.
"""

from omniplat.emulation.core import Emulation, Vendor, VendorError, Violation, emulate
from omniplat.emulation.schemas import OpSchema

__all__ = ["Emulation", "OpSchema", "Vendor", "VendorError", "Violation", "emulate"]
