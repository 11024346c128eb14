"""The model families that omniplat knows itself. Third parties add theirs through `omniplat.models`."""

from __future__ import annotations

from omniplat.models import diffusion, omni, text
from omniplat.models.common import EXPERTS, STACKED
from omniplat.models.family import Family

FAMILIES: tuple[Family, ...] = (*text.FAMILIES, *diffusion.FAMILIES, *omni.FAMILIES)

#: Used where no family is known: nothing fuses, experts are grouped by the names that all engines share.
UNKNOWN = Family("", (), experts=EXPERTS, stacked=STACKED)
