"""Errors and interrupts at any line."""

import linecache
import sys


class Raise:
    """Raises an error in the n-th line that is run; counts lines otherwise.

    Args:
        error: The error; raised once.
        after: Number of the line.
        counts: Whether a line counts, given its code object and its text.
    """

    def __init__(self, error, after, counts):
        self.error, self.left, self.lines, self.counts, self.where = error, after, 0, counts, None

    def __enter__(self):
        sys.settrace(self._call)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _call(self, frame, event, argument):
        return self._line if self.counts(frame.f_code, "") else None

    def _line(self, frame, event, argument):
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and self.counts(frame.f_code, text):
            self.lines += 1
            if self.lines == self.left:
                self.where = f"{frame.f_code.co_name}:{frame.f_lineno}"
                raise self.error
        return self._line
