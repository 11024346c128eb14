"""From canonical arrays to running layers. torch starts here."""
