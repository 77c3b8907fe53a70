"""The one error of everything between a model's name and its weights."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be found, fetched, read or fitted to its model; the message says what to do."""
