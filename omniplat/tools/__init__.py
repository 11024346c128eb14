"""What one does with checkpoints beside planning and loading them."""
