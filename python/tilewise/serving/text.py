"""Text from tokens, piece by piece, up to a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"  # what a tokenizer writes for bytes that are not (yet) a character
_LONGEST = 8  # tokens a character may take; what is not one by then will not become one


class TextStream:
    """The text of a growing sequence of tokens.

    What is given out is final: half a character, and what may turn out to be the beginning of a
    stop string, are held back until the next token or ``finish`` decides.

    Args:
        decode: Text of a list of tokens.
        stop: Strings before whose first occurrence the text ends.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode, self._stop = decode, tuple(stop)
        self._tokens: list[int] = []  # those whose text the next one may depend on
        self._given = 0  # how many of them have been turned into text
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that one more token makes certain."""
        self._tokens.append(token)
        # A token is decoded behind the ones before: many tokenizers drop a leading space.
        before = self._decode(self._tokens[: self._given])
        now = self._decode(self._tokens)
        if now.endswith(_INCOMPLETE) and len(self._tokens) - self._given < _LONGEST:
            return ""
        self._tokens = self._tokens[self._given :]
        self._given = len(self._tokens)
        return self._release(now[len(before) :])

    def finish(self) -> str:
        """What was held back."""
        if self.stopped:
            return ""
        before, now = self._decode(self._tokens[: self._given]), self._decode(self._tokens)
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
