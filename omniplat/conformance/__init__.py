"""The conformance suite: what a backend runs, unchanged, to prove that it does what it declares.

    omniplat conformance NAME [--profile full|quick] [--report r.json]
    pytest --pyargs omniplat.conformance --omniplat-backend NAME

Importing this package, or its pytest plugin, imports neither torch nor anything else of weight.
"""
