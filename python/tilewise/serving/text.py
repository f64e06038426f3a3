"""Incremental decoding of tokens to text, up to a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"  # what tokenizers return for bytes that are not (yet) a character
_MAX_TOKENS_PER_CHARACTER = 8  # after this many tokens without a character, the bytes are invalid


class TextStream:
    """The text of a growing sequence of tokens.

    Text that has been returned is final. An incomplete character, and text that may be the
    beginning of a stop string, is held back until the next token or ``finish`` decides.

    Args:
        decode: Function that turns a list of tokens into text.
        stop: Strings that end the text before their first occurrence.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode, self._stop = decode, tuple(stop)
        self._tokens: list[int] = []  # tokens that the text of the next one may depend on
        self._decoded = 0  # number of them whose text has been returned or held back
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that is final after one more token."""
        self._tokens.append(token)
        # A token is decoded after the previous ones, because many tokenizers drop a leading space.
        before = self._decode(self._tokens[: self._decoded])
        now = self._decode(self._tokens)
        if (
            now.endswith(_INCOMPLETE)
            and len(self._tokens) - self._decoded < _MAX_TOKENS_PER_CHARACTER
        ):
            return ""
        self._tokens = self._tokens[self._decoded :]
        self._decoded = len(self._tokens)
        return self._release(now[len(before) :])

    def finish(self) -> str:
        """The text that was held back."""
        if self.stopped:
            return ""
        before, now = self._decode(self._tokens[: self._decoded]), self._decode(self._tokens)
        return self._release(now[len(before) :], final=True)

    def _release(self, text: str, final: bool = False) -> str:
        text = self._held + text
        found = [at for at in map(text.find, self._stop) if at >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        held = 0
        if not final:
            for stop in self._stop:
                for length in range(min(len(stop) - 1, len(text)), held, -1):
                    if text.endswith(stop[:length]):
                        held = length
                        break
        self._held = text[len(text) - held :]
        return text[: len(text) - held]
