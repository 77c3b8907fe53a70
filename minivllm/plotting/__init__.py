"""Figures of the chapters: drawn from what the engine recorded, computing nothing themselves."""
