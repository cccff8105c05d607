"""Whether two plain expressions have the same value, decided without evaluating text as code.

A strict tokenizer and a recursive-descent parser (numbers, letters, + - * / ^, brackets, a few functions)
build a tree of bounded size. Rational trees are compared exactly; others by their values at fixed complex
points, to 30 of 50 digits. Every step checks the size of its operands first, so `9**9**9**9` is refused,
not computed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any

MAX_CHARS = 400
MAX_TOKENS = 200
MAX_DEPTH = 30
MAX_BITS = 20_000  # of an exact integer, and of the exponent of a floating-point number
MAX_VARIABLES = 4
DIGITS = 50
TOLERANCE = 30  # digits that must agree

Tree = tuple[
    Any, ...
]  # ("number", Fraction) | ("name", str) | (operator, tree, ...) | ("call", function, tree)

FUNCTIONS = (
    "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "sqrt", "sin", "cos", "tan", "log", "exp", "ln",
)  # fmt: skip
_TOKEN = re.compile(r"[0-9]+(?:\.[0-9]*)?|\.[0-9]+|[a-z]+|\*\*|[-+*/^()\[\]]")
_WORD = re.compile("|".join((*FUNCTIONS, "pi", "[a-z]")))
# No two coordinates alike, both half-planes: sqrt(x^2) is not x.
_POINTS = (
    ("0.7312+0.4217j", "-1.2931+0.6143j", "0.3879-1.1713j", "1.6171+0.2393j"),
    ("-0.8719+0.5381j", "0.6427+1.3099j", "-1.5173-0.3391j", "0.9277-0.7589j"),
    ("1.1447-0.9613j", "-0.4861-0.8237j", "1.0789+0.7127j", "-0.6653+1.4159j"),
)


class Unsupported(ValueError):
    """Not an expression of the small language, or too large a one."""


def same_value(one: str, two: str) -> bool:
    """Whether both are expressions of equal value. What cannot be read, or is too large, equals nothing."""
    try:
        trees = parse(one), parse(two)
        variables = sorted(_names(trees[0]) | _names(trees[1]))
        if len(variables) > MAX_VARIABLES:
            return False
        exact = [None if variables else _exact(tree) for tree in trees]
        if None not in exact:
            return exact[0] == exact[1]
        return _agree(trees, variables)
    except (Unsupported, ZeroDivisionError, OverflowError):
        return False


@lru_cache(maxsize=4096)
def parse(text: str) -> Tree:
    """The tree of an expression; Unsupported for anything else."""
    if len(text) > MAX_CHARS:
        raise Unsupported("too long")
    parser = _Parser(_tokens(text))
    tree = parser.sum()
    if parser.peek():
        raise Unsupported(f"unexpected {parser.peek()!r}")
    return tree


def _tokens(text: str) -> list[str]:
    tokens, place = [], 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise Unsupported(f"unexpected {text[place]!r}")
        tokens.extend(
            _split_word(match[0]) if match[0][0].isalpha() else ["^" if match[0] == "**" else match[0]]
        )
        place = match.end()
    if len(tokens) > MAX_TOKENS:
        raise Unsupported("too many parts")
    return tokens


def _split_word(word: str) -> list[str]:
    """Functions, pi and one-letter variables. Three letters in a row are a word, not a product: god is not
    dog."""
    found = _WORD.findall(word)
    for three in zip(found, found[1:], found[2:]):
        if all(len(piece) == 1 for piece in three):
            raise Unsupported("a word")
    return found


class _Parser:
    """sum := product (+- product)*; product := sign ((*/)? sign)*; sign := +-* power; power := atom (^
    sign)?"""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.place, self.depth = tokens, 0, 0

    def peek(self) -> str:
        return self.tokens[self.place] if self.place < len(self.tokens) else ""

    def next(self) -> str:
        token = self.peek()
        self.place += 1
        return token

    def sum(self) -> Tree:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unsupported("nested too deep")
        tree = self.product()
        while self.peek() in ("+", "-"):
            tree = (self.next(), tree, self.product())
        self.depth -= 1
        return tree

    def product(self) -> Tree:
        tree = self.sign()
        while (token := self.peek()) and token not in ("+", "-", ")", "]", "^"):
            operator = self.next() if token in ("*", "/") else "*"
            tree = (operator, tree, self.sign())
        return tree

    def sign(self) -> Tree:
        negative = False
        while self.peek() in ("+", "-"):
            negative ^= self.next() == "-"
        tree = self.power()
        return ("-", ("number", Fraction(0)), tree) if negative else tree

    def power(self) -> Tree:
        tree = self.atom()
        if self.peek() != "^":
            return tree
        self.next()
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unsupported("nested too deep")
        tree = ("^", tree, self.sign())
        self.depth -= 1
        return tree

    def atom(self) -> Tree:
        token = self.next()
        if token in ("(", "["):
            tree = self.sum()
            if self.next() != {"(": ")", "[": "]"}[token]:
                raise Unsupported("brackets do not match")
            return tree
        if token in FUNCTIONS:
            self.depth += 1
            if self.depth > MAX_DEPTH:
                raise Unsupported("nested too deep")
            tree = ("call", token, self.power())
            self.depth -= 1
            return tree
        if token.isalpha():
            return ("name", token)
        if token[:1].isdigit() or token[:1] == ".":
            return ("number", Fraction(token if token[-1] != "." else token[:-1]))
        raise Unsupported(f"unexpected {token!r}")


def _names(tree: Tree) -> set[str]:
    if tree[0] == "number":
        return set()
    if tree[0] == "name":
        return set() if tree[1] == "pi" else {tree[1]}
    return set().union(*(_names(child) for child in tree[1:] if isinstance(child, tuple)))


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _exact(tree: Tree) -> Fraction | None:
    """The rational value; None where a function, pi or a fractional power makes it irrational."""
    kind = tree[0]
    if kind == "number":
        return tree[1]
    if kind in ("name", "call"):
        return None
    left, right = _exact(tree[1]), _exact(tree[2])
    if left is None or right is None:
        return None
    if kind == "^":
        if right.denominator != 1:
            return None
        if abs(right.numerator) * max(1, _bits(left) - 1) > MAX_BITS:
            raise Unsupported("too large")
        return left**right.numerator
    value = {"+": Fraction.__add__, "-": Fraction.__sub__, "*": Fraction.__mul__, "/": Fraction.__truediv__}[
        kind
    ](left, right)
    if _bits(value) > MAX_BITS:
        raise Unsupported("too large")
    return value


def _agree(trees: tuple[Tree, Tree], variables: list[str]) -> bool:
    evaluate = _evaluator()
    context = evaluate.context
    for point in _POINTS:
        where = {name: context.mpmathify(complex(text)) for name, text in zip(variables, point)}
        one, two = (evaluate(tree, where) for tree in trees)
        if abs(one - two) > context.mpf(10) ** -TOLERANCE * max(abs(one), abs(two), 1):
            return False
        if not variables:
            break
    return True


@cache
def _evaluator() -> _Evaluator:
    import mpmath

    context = mpmath.mp.clone()  # our own: precision is a setting of the context
    context.dps = DIGITS
    return _Evaluator(context)


class _Evaluator:
    """Numerical value of a tree in an mpmath context, each operand's size checked before it is used."""

    def __init__(self, context: Any) -> None:
        self.context = context
        named = {"ln": "log", "arcsin": "asin", "arccos": "acos", "arctan": "atan"}
        self.functions: dict[str, Callable[[Any], Any]] = {
            name: getattr(context, named.get(name, name)) for name in FUNCTIONS
        }

    def size(self, value: Any) -> float:
        """log2 |value|, roughly; -inf for 0."""
        return float(self.context.mag(value)) if value else -math.inf

    def __call__(self, tree: Tree, where: dict[str, Any]) -> Any:
        value = self.value(tree, where)
        if not self.context.isfinite(value) or abs(self.size(value) if value else 0) > MAX_BITS:
            raise Unsupported("too large")
        return value

    def value(self, tree: Tree, where: dict[str, Any]) -> Any:
        kind = tree[0]
        if kind == "number":
            return self.context.mpf(tree[1].numerator) / tree[1].denominator
        if kind == "name":
            return self.context.pi if tree[1] == "pi" else where[tree[1]]
        if kind == "call":
            argument = self(tree[2], where)
            if self.size(argument) > 12:  # exp and the trigonometric functions grow or lose all digits
                self.refuse_unless(tree[1] in ("sqrt", "log", "ln"))
            return self.functions[tree[1]](argument)
        left, right = self(tree[1], where), self(tree[2], where)
        if kind == "^":
            self.refuse_unless(
                self.size(right) < 14 and abs(right) * max(1, abs(self.size(left or 1))) < MAX_BITS
            )
            return left**right
        return {"+": left.__add__, "-": left.__sub__, "*": left.__mul__, "/": left.__truediv__}[kind](right)

    def refuse_unless(self, bounded: bool) -> None:
        if not bounded:
            raise Unsupported("too large")
