"""A backend whose declared requirement is not installed."""

import acme_runtime

SPEC = acme_runtime.SPEC
