"""Capabilities by the library that brings the kernel."""
