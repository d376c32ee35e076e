"""Thousands of odd JSON messages: what Arrow reads is what each message is by itself."""

from __future__ import annotations

import random
from typing import Any, Final

import pytest

from tests.rows.topic_messages import make_batch, rows, spec_of, split_messages
from tidegate.jobs.rows.json_messages import plan_messages

COLUMNS: Final = {
    "at": "timestamp",
    "n": "long",
    "i": "int",
    "x": "double",
    "ok": "boolean",
    "price": "decimal(6,2)",
    "wide": "decimal(38,20)",
    "s": "string",
    "day": "date",
}
INTEGERS: Final = [
    "0",
    "-0",
    "7",
    "-7",
    "2147483648",
    "9223372036854775808",
    "12345678901234567890123",
]
FRACTIONS: Final = ["1.5", "-0.0", "1.0", "1e3", "1.10", "0.1234567890123456789", "8.41e21"]
NUMBERS: Final = [*INTEGERS, *FRACTIONS]
QUOTED: Final = [
    "7",
    " 7 ",
    "1.5",
    "NaN",
    "Infinity",
    "true",
    "a: b",
    'a\\":b',
    "\\u0041",
    "\\ud83d",
    "ä ☃",
]
TEXTS: Final = ['""', *(f'"{text}"' for text in QUOTED)]
DAYS: Final = ["2026-03-01", "2026-02-30", "2026-3-1", "0003-01-01", "1582-10-10"]
CLOCKS: Final = [
    *("T10:00:00Z", " 10:00:00.123456Z", "T10:00:00.1234567Z", "T10:00:00", "T10:00Z"),
    *("T24:00:00Z", "T10:00:60Z", "T10:00:00+01:30", "T10:00:00-00:30", "T10:00:00+18:00"),
    *("t10:00:00Z", "T10:00:00z", "T10:00:00.5+17:59", " ", "Z"),
]
TIMES: Final = [
    *(f'"{day}"' for day in DAYS),
    *(f'"{day}T10:00:00Z"' for day in DAYS),
    *(f'"{DAYS[0]}{clock}"' for clock in CLOCKS),
    "1767225600500",
]
NESTED: Final = [
    "{}",
    "[]",
    '{"n": 1}',
    '[1, {"s": null}]',
    '{"s":"\\"n\\":"}',
    '{"z": NaN}',
    "[" * 1200 + "]" * 1200,
]
BEYOND: Final = ["1e999", "-1e999", "4.9e-324", "1" * 1500]
NO_JSON: Final = ["NaN", "01", "+1", ".5", "'x'", "True", "", '"open', '"a\tb"', '"\\q"']
LITERALS: Final = [*NUMBERS, *TEXTS, *TIMES, *NESTED, *BEYOND, *NO_JSON, "null", "true", "false"]
OTHER_KEYS: Final = [
    '"y"',
    '"s"',
    '"\\u006e"',
    '"x\\"s"',
    '"N"',
    '""',
    "n",
    '"m"',
]
COLONS: Final = [":"] * 6 + [": ", " :", "\t: ", "\n:", "::", ""]
WHOLE: Final = [
    *(
        "",
        " ",
        "null",
        "1",
        "[]",
        "[{}]",
        '[{"n":1}]',
        "{}",
        " {}",
        "{} x",
        '{"n":1,}',
        "/*c*/{}",
        "\ufeff{}",
    ),
    None,
]


def messages(seed: int, size: int) -> list[str]:
    """Objects of these keys and literals, a few of them damaged."""
    dice = random.Random(seed)
    known = [f'"{name}"' for name in COLUMNS]
    found = []
    for _ in range(size):
        keys = dice.sample(known, dice.randint(0, 3)) + dice.sample(
            [*known, *OTHER_KEYS], dice.choice((0, 0, 0, 1, 2))
        )
        colon = dice.choice(COLONS)
        text = "{" + ",".join(f"{key}{colon}{dice.choice(LITERALS)}" for key in keys) + "}"
        found.append(
            dice.choice(
                (*[text] * 9, text[:-1], f"[{text}]", f"{text} {{", text.replace(",", ",,"))
            )
        )
    return found


def comparable(row: dict[str, Any]) -> dict[str, Any]:
    """With NaN equal to itself, and the two zeros different."""
    return {name: repr(value) if isinstance(value, float) else value for name, value in row.items()}


@pytest.mark.parametrize("added", ["dead_letter", "ignore"])
def test_values_are_those_of_single_messages(added: str) -> None:
    """A message has one meaning, whether or not its neighbours are plain."""
    own: dict[str, Any] = {
        "kafka": {"key": None, "headers": {}, "timestamp": None},
        "schema": COLUMNS,
        "evolution": {"added": added, "renamed": {"m": "n"}},
    }
    one = [
        f'{{"at":"2026-03-01T10:00:00Z","{name}":{literal}}}'
        for name in COLUMNS
        for literal in LITERALS
    ]
    some = random.Random(added).sample([*one, *messages(1, 2000)], 400)
    given = [*WHOLE, *some]
    alone = rows(given, one_by_one=True, **own)
    plan, plain = plan_messages(spec_of(**own)), 0
    for place, (message, row) in enumerate(zip(given, alone, strict=True)):
        for found in split_messages(make_batch([message]), plan)[0].to_pylist():
            assert comparable({**found, "_at": place}) == comparable(row), message
            plain += 1
    assert plain > len(given) // 20
    assert sum(row["_why"] is None for row in alone) > len(given) // 10
