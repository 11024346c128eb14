"""A backend whose library is here and lacks a module that nobody declared."""

import acme_hidden_dependency

SPEC = acme_hidden_dependency.SPEC
