"""Marks what is wrong inside of a text, so that it costs one row and not the whole object.

Readers of CSV refuse an object for one byte that is not UTF-8, and move a quote that is inside
of a quoted value. Here each such place gets a character that the text does not have.
"""

import codecs
import re
from dataclasses import dataclass, field

from .text_chunks import build_value_patterns

_PRIVATE = range(0xF0000, 0xFFFFE)
"""Characters without a meaning, from which a mark is chosen."""
_REPLACEMENT = "\ufffd"


@dataclass
class MarkedText:
    """A text object that is UTF-8.

    Attributes:
        data: its bytes, with marks.
        complaints: mark -> what is wrong with a row that has it.
    """

    data: bytes
    complaints: dict[str, str] = field(default_factory=dict)

    def clean(self, text: str) -> str:
        """Return a text of a row as it can be shown, without marks."""
        for mark in self.complaints:
            text = text.replace(mark, _REPLACEMENT)
        return text


def decode_line(line: bytes) -> tuple[str, bool]:
    """Return a line as text, and whether it is UTF-8; other bytes are replaced."""
    try:
        return line.decode(), True
    except UnicodeDecodeError:
        return line.decode("utf-8", "replace"), False


def add_marks(data: bytes, delimiter: str, quote: str) -> MarkedText:
    """Return an object of CSV with marks where a value is not what was written."""
    found = _add_byte_marks(data)
    _add_tail_marks(found, delimiter, quote)
    return found


def _add_byte_marks(data: bytes) -> MarkedText:
    try:
        data.decode()
        return MarkedText(data)
    except UnicodeDecodeError:
        text = data.decode("utf-8", "surrogateescape")
    mark = _choose_mark(text)
    marked = re.sub("[\ud800-\udfff]", mark, text)
    return MarkedText(marked.encode(), {mark: "the line is not UTF-8"})


def _add_tail_marks(found: MarkedText, delimiter: str, quote: str) -> None:
    """Mark quoted values with more text behind their closing quote."""
    if quote.encode() not in found.data:
        return
    quoted, plain, inner = build_value_patterns(delimiter, quote)
    ends = re.escape(delimiter.encode())
    # Most objects have no such value.
    usual = rb"(?:%b(?!%b)|%b|[%b\r\n])*+" % (quoted, inner, plain, ends)
    # A byte-order mark is no part of the first value.
    start = len(codecs.BOM_UTF8) if found.data.startswith(codecs.BOM_UTF8) else 0
    match = re.compile(usual).match(found.data, start)
    if match is not None and match.end() == len(found.data):
        return
    mark = _choose_mark(found.data.decode())

    def add_mark(value: re.Match[bytes]) -> bytes:
        """Return a value, with a mark if it goes on behind its closing quote."""
        return value[0] + mark.encode() if value["tail"] else value[0]

    values = rb"%b(?P<tail>%b*)|%b" % (quoted, inner, plain)
    found.data = found.data[:start] + re.sub(values, add_mark, found.data[start:])
    found.complaints[mark] = "a value goes on behind its closing quote"


def _choose_mark(text: str) -> str:
    return next(chr(code) for code in _PRIVATE if chr(code) not in text)
