"""LaTeX of short answers to plain text, without a TeX parser: `\\frac{x+1}{2}` -> `(x+1)/2`, `\\sqrt{3}` ->
`sqrt(3)`."""

from __future__ import annotations

import re

MAX_DEPTH = 40  # nested braces; deeper text keeps its braces and is compared as it stands

# What has no reading here (set operations, relations, plus-minus) becomes a sign that no expression may hold.
_SYMBOLS = {
    "cdot": "*", "times": "*", "ast": "*", "div": "/", "pi": "pi", "infty": "inf", "cup": "∪", "cap": "∩",
    "pm": "±", "mp": "∓", "le": "≤", "leq": "≤", "leqslant": "≤", "ge": "≥", "geq": "≥", "geqslant": "≥",
    "ne": "≠", "neq": "≠", "left": "", "right": "", "displaystyle": "", "quad": " ", "qquad": " ",
    "langle": "(", "rangle": ")", "ldots": "...", "dots": "...", "cdots": "...", "circ": "", "degree": "",
    "sin": "sin", "cos": "cos", "tan": "tan", "ln": "ln", "log": "log", "exp": "exp", "arcsin": "arcsin",
    "arccos": "arccos", "arctan": "arctan", "sinh": "sinh", "cosh": "cosh", "tanh": "tanh",
}  # fmt: skip
_WRAPPERS = frozenset({
    "text", "textbf", "textit", "textrm", "texttt", "mathrm", "mathbf", "mathit", "mathsf", "mathcal",
    "mathbb", "operatorname", "mbox", "boxed", "fbox", "ensuremath",
})  # fmt: skip
_UNICODE = str.maketrans(
    {"√": "sqrt", "π": "pi", "∞": "inf", "·": "*", "×": "*", "÷": "/", "−": "-", "⋅": "*"}
)
_TOKEN = re.compile(r"\\([A-Za-z]+|.)|([{}])|([^\\{}]+)", re.DOTALL)
_ATOM = re.compile(r"[0-9]+(?:\.[0-9]+)?|[A-Za-z]")

_Token = tuple[str | None, str | None, str | None]  # a command's name, a brace, other characters: one of them


def command_argument(text: str, start: int, limit: int) -> str | None:
    """What stands between the brace at `start` and its partner; None without one in the next `limit`
    characters."""
    depth = 0
    for match in re.compile(r"[{}]").finditer(text, start, start + limit + 2):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return text[start + 1 : match.start()]
    return None


def to_plain(text: str) -> str:
    """Plain text of a LaTeX answer; unknown commands stay as words. Unbalanced or deeply nested text loses
    only its backslashes."""
    tokens: list[_Token] = [
        (match[1], match[2], match[3]) for match in _TOKEN.finditer(text.translate(_UNICODE))
    ]
    depth = deepest = 0
    for _, brace, _ in tokens:
        depth += {"{": 1, "}": -1}.get(brace or "", 0)
        deepest = max(deepest, depth)
        if depth < 0:
            break
    if depth != 0 or deepest > MAX_DEPTH:
        return text.replace("\\", "")
    return _Reader(tokens).sequence()


class _Reader:
    """One pass over the tokens of balanced text."""

    def __init__(self, tokens: list[_Token]) -> None:
        self.tokens = tokens
        self.place = 0

    def sequence(self) -> str:
        """Up to the closing brace or the end."""
        out = ""
        while self.place < len(self.tokens):
            command, brace, chars = self.tokens[self.place]
            self.place += 1
            if brace == "}":
                break
            if brace == "{":
                out = _joined(out, self.sequence())
            elif command is not None:
                out = _joined(out, self.command(command, out))
            else:
                out += chars or ""
        return out

    def argument(self) -> str:
        """The next group, command or single character."""
        while self.place < len(self.tokens) and (self.tokens[self.place][2] or "x").isspace():
            self.place += 1
        if self.place >= len(self.tokens):
            return ""
        command, brace, chars = self.tokens[self.place]
        self.place += 1
        if brace == "{":
            return self.sequence()
        if command is not None:
            return self.command(command, "")
        chars = (chars or "").lstrip()
        if brace == "}" or not chars:
            self.place -= brace == "}"
            return ""
        if chars[1:]:
            self.place -= 1
            self.tokens[self.place] = (None, None, chars[1:])
        return chars[0]

    def command(self, name: str, before: str) -> str:
        if name in ("frac", "dfrac", "tfrac", "cfrac"):
            fraction = f"{_grouped(self.argument())}/{_grouped(self.argument())}"
            # A mixed number: 7\frac{3}{4}; anything else before it multiplies.
            return " " + fraction if re.search(r"[0-9]\s*$", before) else fraction
        if name == "sqrt":
            degree = self.degree()
            radicand = self.argument()
            return f"({radicand})^(1/({degree}))" if degree else f"sqrt({radicand})"
        if name in _WRAPPERS:
            return self.argument()
        if name.isalpha():
            return _SYMBOLS.get(name, f" {name} ")
        return " " if name in ",;:! " else name

    def degree(self) -> str:
        chars = self.tokens[self.place][2] if self.place < len(self.tokens) else None
        if not chars or not chars.startswith("[") or "]" not in chars:
            return ""
        degree, _, rest = chars[1:].partition("]")
        self.tokens[self.place] = (None, None, rest or " ")
        return degree


def _joined(before: str, piece: str) -> str:
    """An exponent stays whole; an empty one (a degree sign) goes, with its caret."""
    if not before.endswith("^"):
        return before + piece
    return before + _grouped(piece) if piece.strip() else before[:-1]


def _grouped(text: str) -> str:
    text = text.strip()
    return text if _ATOM.fullmatch(text) or (text[:1] == "-" and _ATOM.fullmatch(text[1:])) else f"({text})"
