r"""Sums and differences of one-digit numbers: problems, the two ways to answer them, and the exact reward.

Compute 3+5-2   ->   \boxed{6}   or, in steps,   3+5=8;8-2=6;\boxed{6}
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

# A number and nothing else: a box that repeats the question, \boxed{3+5-2}, is equal but no answer.
BOX = re.compile(r"\\boxed\{(-?\d+)\}")
LARGEST = 9


@dataclass(frozen=True, slots=True)
class Problem:
    """`terms[0] signs[0] terms[1] ...`; the result may be negative."""

    terms: tuple[int, ...]
    signs: tuple[str, ...]  # one fewer than the terms

    @property
    def results(self) -> list[int]:
        """The result after each term; the last is the answer."""
        signed = [x if sign == "+" else -x for sign, x in zip(self.signs, self.terms[1:])]
        return list(itertools.accumulate(signed, initial=self.terms[0]))

    @property
    def answer(self) -> int:
        return self.results[-1]

    @property
    def expression(self) -> str:
        return str(self.terms[0]) + "".join(f"{sign}{x}" for sign, x in zip(self.signs, self.terms[1:]))

    @property
    def question(self) -> str:
        return f"Compute {self.expression}"

    @property
    def direct(self) -> str:
        """The answer at once."""
        return f"\\boxed{{{self.answer}}}"

    @property
    def stepwise(self) -> str:
        """One operation at a time, then the answer."""
        results = self.results
        steps = [
            f"{before}{sign}{x}={after};"
            for before, sign, x, after in zip(results, self.signs, self.terms[1:], results[1:])
        ]
        return "".join(steps) + self.direct


def problems(terms: int) -> list[Problem]:
    """Every problem with that many terms."""
    numbers = itertools.product(range(LARGEST + 1), repeat=terms)
    return [Problem(xs, signs) for xs in numbers for signs in itertools.product("+-", repeat=terms - 1)]


def split(held_out: int, seed: int = 0) -> tuple[list[Problem], list[Problem]]:
    """(training problems of two and three terms, `held_out` problems of three terms): disjoint, shuffled."""
    rng = random.Random(seed)
    longer = problems(3)
    rng.shuffle(longer)
    training = longer[held_out:] + problems(2)
    rng.shuffle(training)
    return training, longer[:held_out]


def by_first_result(pool: Sequence[Problem]) -> dict[int, list[Problem]]:
    """The problems by the result of their first operation: sums near 0 are many, those near -9 and 18 few."""
    groups: dict[int, list[Problem]] = {}
    for problem in pool:
        groups.setdefault(problem.results[1], []).append(problem)
    return groups


def exact_match(response: str, label: str | int) -> float:
    r"""1 when the last `\boxed{number}` of the response is the label, else 0."""
    found = BOX.findall(response)
    return float(bool(found) and int(found[-1]) == int(label))
