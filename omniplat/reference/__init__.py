"""The cpu backend: every scheme, computed by torch in float32."""
