"""A test plugin."""
