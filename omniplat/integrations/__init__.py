"""Engines that omniplat runs inside. Only here is an engine imported."""
