"""Quantized layers in somebody else's `nn.Module`: filled from a checkpoint, or quantized where they stand."""
