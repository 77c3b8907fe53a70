"""One completion, piece by piece."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from minivllm.output_processor import RequestTracker
from minivllm.outputs import RequestOutput

if TYPE_CHECKING:
    from minivllm.llm import LLM


class Stream:
    """The pieces of one completion, as an iterator of texts (of lists of token ids where there is no tokenizer).

    A piece is text that will not change any more: it never ends within a character, and a possible beginning of a
    stop string is held back until it is known to be none. `close()`, the end of a with statement, or giving the
    iterator up aborts the request.
    """

    def __init__(self, llm: "LLM", tracker: RequestTracker) -> None:
        self._llm = llm
        self._tracker = tracker
        self._num_shown = 0

    @property
    def request_id(self) -> str:
        return self._tracker.request_id

    @property
    def output(self) -> RequestOutput:
        """The request as it stands now."""
        return self._tracker.output()

    def __iter__(self) -> "Iterator[str | list[int]]":
        return self

    def __next__(self) -> str | list[int]:
        while True:
            piece = self._take_new()
            if piece:
                return piece
            if self._tracker.is_finished:
                self.close()
                raise StopIteration
            self._llm.step()

    def _take_new(self) -> str | list[int]:
        completion = self._tracker.completions[0]
        shown = completion.output.token_ids if self._llm.tokenizer is None else completion.visible_text()
        piece = shown[self._num_shown :]
        self._num_shown += len(piece)
        return piece

    def close(self) -> None:
        """Abort the request if it still runs; harmless after its end."""
        self._llm.abort(self.request_id)
        self._llm._trackers.pop(self.request_id, None)

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
