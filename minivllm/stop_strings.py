"""Stop strings: where a growing text ends, and how much of it may be shown already."""


class StopStringChecker:
    """Watches one text grow.

    The stop string that is completed first ends the text, and of two that are completed by the same character the
    longer one: the result does not depend on how many tokens, or characters, arrive at a time.
    """

    def __init__(self, stop: list[str]) -> None:
        self._stop = stop
        self._longest = max(map(len, stop), default=0)

    def find(self, text: str, num_new: int) -> tuple[int, str] | None:
        """Look for a stop string that is completed within the last `num_new` characters.

        Returns:
            (where the match begins, the stop string), or None.
        """
        found: tuple[int, int, str] | None = None
        for stop in self._stop:
            begin = text.find(stop, max(0, len(text) - num_new - len(stop) + 1))
            if begin >= 0:
                found = min(found or (len(text) + 1, 0, ""), (begin + len(stop), begin, stop))
        return None if found is None else found[1:]

    def num_held_back(self, text: str) -> int:
        """Length of the longest end of the text that could be the beginning of a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            suffix = text[-length:]
            if any(stop.startswith(suffix) for stop in self._stop if len(stop) > length):
                return length
        return 0
