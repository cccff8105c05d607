"""`f1`: F1 of the words of the response against the label's, as SQuAD and HotpotQA count them (Rajpurkar et
al. 2016).

Lower case, no punctuation, no articles. A label "yes", "no" or "noanswer" (and such a response) counts
whole or not at all. Of a list of labels the best one counts."""

from __future__ import annotations

import string
from collections import Counter
from typing import Any

from ppo_lightning.rewards import register

MAX_CHARS = 100_000  # of a response, from its end
_DROP_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = frozenset({"a", "an", "the"})
_WHOLE = frozenset({"yes", "no", "noanswer"})


def _words(text: str) -> list[str]:
    return [w for w in text.lower().translate(_DROP_PUNCTUATION).split() if w not in _ARTICLES]


def _f1(given: list[str], truth: list[str]) -> float:
    if given != truth and (_WHOLE & {" ".join(given), " ".join(truth)}):
        return 0.0
    same = sum((Counter(given) & Counter(truth)).values())
    return 2 * same / (len(given) + len(truth)) if same else 0.0


@register("f1", sandboxed=True)
def f1(response: str, label: Any) -> float:
    given = _words(response[-MAX_CHARS:])
    truths = label if isinstance(label, (list, tuple)) else [label]
    return max((_f1(given, _words(str(truth))) for truth in truths), default=0.0)
