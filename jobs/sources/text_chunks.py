"""Divides texts into chunks of whole rows, of which a task holds one at a time."""

import re
from collections.abc import Iterator
from typing import Final

from .byte_streams import ByteStream

CHUNK_BYTES: Final = 4 << 20
"""Decoded at once, besides a row that began before."""
MOST_ROW_BYTES: Final = 32 << 20
"""Of one row of text."""
_SHOWN_BYTES: Final = 1000
"""Of a line that is too long."""
_BOM: Final = b"\xef\xbb\xbf"

Chunk = tuple[int, bytes]
"""Where it begins in the text, and its rows. The rows of a chunk do not depend on other chunks."""


def iterate_line_chunks(text: ByteStream) -> Iterator[Chunk]:
    """Yield the lines of a text, some MB at a time; none of an empty text.

    Of a line with more than `MOST_ROW_BYTES` only the beginning is left, and that it was so long.
    """
    rest, is_cut = b"", False
    start = size = 0
    while block := text.read(CHUNK_BYTES):
        size += len(block)
        if is_cut:
            newline = block.find(b"\n")
            if newline < 0:
                continue
            block, is_cut = block[newline:], False
        rest += block
        if len(rest) > MOST_ROW_BYTES:
            newline = rest.find(b"\n")
            is_cut = newline < 0
            if is_cut or newline > MOST_ROW_BYTES:
                shown = rest[:_SHOWN_BYTES].decode("utf-8", "ignore")
                left = b"" if is_cut else rest[newline:]
                rest = f"{shown}... has more than {MOST_ROW_BYTES} bytes".encode() + left
        end = rest.rfind(b"\n") + 1
        if end:
            yield start, rest[:end]
            rest = rest[end:]
            start = size - len(rest)
    if rest:
        yield start, rest


def iterate_csv_chunks(text: ByteStream, delimiter: str, quote: str) -> Iterator[Chunk]:
    """Yield the rows of CSV, some MB at a time; at least one chunk, which may be empty.

    Chunks after the first one begin with a row that is not blank.

    Raises:
        ValueError: a row has more than `MOST_ROW_BYTES`.
    """
    row = _build_row_pattern(delimiter, quote)
    rows = re.compile(b"(?:%b)*+" % row.pattern)
    rest, is_first = b"", True
    start = size = 0
    while block := text.read(CHUNK_BYTES):
        rest += block
        size += len(block)
        # The mark is no part of the first value: a quote may follow.
        begin = len(_BOM) if is_first and rest.startswith(_BOM) else 0
        if quote.encode() in rest:
            match = rows.match(rest, begin)
            end = match.end() if match is not None and match.end() > begin else 0
        else:
            end = max(rest.rfind(b"\n"), rest.rfind(b"\r")) + 1
        if len(rest) > MOST_ROW_BYTES:
            match = row.match(rest.lstrip(b"\r\n"))
            if match is None or match.end() > MOST_ROW_BYTES + 1:
                raise ValueError(f"a row has more than {MOST_ROW_BYTES} bytes")
        chunk = rest[:end].lstrip(b"\r\n")
        if chunk:
            # Behind a blank line, a byte order mark is part of the first value.
            yield start, rest[:end] if is_first else chunk
            rest, is_first = rest[end:], False
        elif end:
            rest = b"\n" + rest[end:]  # blank lines are no rows
        if end:
            start = size - len(rest)
    rest = rest if is_first else rest.lstrip(b"\r\n")
    if rest or is_first:
        yield start, rest


def find_csv_header_end(text: bytes, delimiter: str, quote: str) -> int:
    """Return where the first row of CSV ends, which may be behind blank lines."""
    row = _build_row_pattern(delimiter, quote)
    begin = len(_BOM) if text.startswith(_BOM) else 0
    match = re.compile(b"[\r\n]*+%b" % row.pattern).match(text, begin)
    return len(text) if match is None else match.end()


def _build_row_pattern(delimiter: str, quote: str) -> re.Pattern[bytes]:
    """Return a pattern for a whole row at the beginning of a text."""
    quoted, plain, inner = build_value_patterns(delimiter, quote)
    ends = re.escape(delimiter.encode())
    return re.compile(rb"(?:%b%b*+|%b|%b)*+[\r\n]" % (quoted, inner, plain, ends))


def build_value_patterns(delimiter: str, quote: str) -> tuple[bytes, bytes, bytes]:
    """Return patterns: of a quoted value, of one without quotes, of a byte inside of a value."""
    q, ends = (re.escape(one.encode()) for one in (quote, delimiter))
    inner = rb"[^%b\r\n]" % ends
    quoted = rb"%b(?:[^%b]++|%b%b)*+%b" % (q, q, q, q, q)
    return quoted, rb"[^%b\r\n%b]%b*+" % (ends, q, inner), inner
