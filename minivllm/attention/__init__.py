"""Attention: the oracles, the three kernels side by side, and the choice between them. Import the modules."""
