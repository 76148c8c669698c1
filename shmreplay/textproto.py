"""Protocol buffers as text: reads what a command line or a file says of a configuration.

    port: 8000
    tables { table_name: "replay"  sampler { uniform: true }  max_size: 1000 }   # and so on

Fields become lists of values, as any may stand there several times: the message above is
``{"port": [8000], "tables": [{...}]}``.
"""

from __future__ import annotations

import re
from typing import Any, Final, NoReturn, TypeAlias

from shmreplay.errors import InvalidArgumentError
from shmreplay.limits import MAX_NESTING

__all__ = ["Message", "parse"]

Message: TypeAlias = dict[str, list[Any]]
"""Field name -> its values: int, float, bool, str (texts and names of values), or messages."""

_TOKEN: Final = re.compile(
    r"""(?P<space>(?:\s|\#[^\n]*)+)
    |(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    |(?P<number>-?(?:0[xX][0-9a-fA-F]+|(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?[fF]?)(?![\w.]))
    |(?P<name>-?[A-Za-z_][\w.]*)
    |(?P<mark>[:{}<>\[\],;])""",
    re.VERBOSE,
)
_CLOSING: Final = {"{": "}", "<": ">"}
_WORDS: Final[dict[str, Any]] = {
    "true": True,
    "false": False,
    **{sign + word: float(sign + word) for sign in ("", "-") for word in ("inf", "nan")},
}
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r"}


class _Parser:
    """Walks over the tokens of a text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._kind: str | None = ""
        self._token = ""
        self._start = 0
        self._advance()

    def _advance(self) -> None:
        """The next token; kind None at the end."""
        while True:
            self._start = self._at
            if self._at == len(self._text):
                self._kind, self._token = None, ""
                return
            match = _TOKEN.match(self._text, self._at)
            if match is None:
                self._token = self._text[self._at]
                self.fail("what may stand there")
            self._at = match.end()
            self._kind, self._token = match.lastgroup, match.group()
            if self._kind != "space":
                return

    def fail(self, wanted: str) -> NoReturn:
        """Refuses the text for the token at hand."""
        before = self._text[: self._start]
        line, column = before.count("\n") + 1, self._start - (before.rfind("\n") + 1) + 1
        got = repr(self._token) if self._token else "the end of the text"
        raise InvalidArgumentError(
            f"Got {got} in line {line}, column {column} of a text of a message; expected {wanted}."
            " Write it as in 'port: 8000 tables { table_name: ... }'."
        )

    def _take(self, mark: str) -> bool:
        if self._kind == "mark" and self._token == mark:
            self._advance()
            return True
        return False

    def message(self, closing: str | None, depth: int) -> Message:
        """Fields up to the closing mark, or to the end of the text."""
        if depth > MAX_NESTING:
            self.fail(f"at most {MAX_NESTING} messages within each other")
        fields: Message = {}
        while True:
            if closing is not None and self._take(closing):
                return fields
            if closing is None and self._kind is None:
                return fields
            if self._kind != "name" or self._token.startswith("-"):
                self.fail("the name of a field" + (f" or {closing!r}" if closing else ""))
            values = fields.setdefault(self._token, [])
            self._advance()
            colon = self._take(":")
            if self._take("["):
                while not self._take("]"):
                    values.append(self._value(depth, True))
                    if not self._take(",") and self._token != "]":
                        self.fail("',' or ']'")
            else:
                values.append(self._value(depth, colon))
            if not self._take(","):
                self._take(";")

    def _value(self, depth: int, colon: bool) -> Any:
        """One value; a message may stand without a colon."""
        for opening, closing in _CLOSING.items():
            if self._take(opening):
                return self.message(closing, depth + 1)
        if not colon:
            self.fail("':' and a value, or '{'")
        kind, token = self._kind, self._token
        if kind == "number":
            self._advance()
            return _number(token)
        if kind == "name":
            self._advance()
            return _WORDS.get(token, token)
        if kind != "text":
            self.fail("a value")
        parts = []
        while self._kind == "text":  # texts that follow each other are one
            body = self._token[1:-1]
            parts.append(re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[1]), body))
            self._advance()
        return "".join(parts)


def _number(token: str) -> int | float:
    if "x" in token.lower():
        return int(token, 16)
    if re.fullmatch(r"-?\d+", token):
        return int(token)
    return float(token.rstrip("fF"))


def parse(text: str) -> Message:
    """Reads the fields of a message.

    Raises:
        InvalidArgumentError: It is no such text; says where.
    """
    return _Parser(text).message(None, 0)
