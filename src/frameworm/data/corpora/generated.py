"""A data set that needs no files: short texts about four topics, written by a seeded random process.

It is designed to be worth training on. Topics share words, texts differ widely in length, and many texts mention two
topics: a link word between the opening clause and the rest says which of them the text is about. A model that only
counts words cannot use the link; one that sees word order can. A few labels are wrong on purpose, so that no model
reaches 100%.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Sequence
from typing import Literal, TypeVar

Item = TypeVar("Item")

GENERATOR_VERSION = 1
CLASS_NAMES = ("sport", "food", "money", "weather")
TRAINING_SAMPLES = 6_000
VALIDATION_SAMPLES = 1_000
SHORTEST_WORDS, LONGEST_WORDS = 6, 120
TWO_TOPIC_SHARE = 0.4
LABEL_NOISE = 0.02
STRAY_TOPIC_WORD_SHARE = 0.01

# Words that two topics share (season, market, pitch, cold, ...) are in both lists.
TOPIC_WORDS: dict[str, str] = {
    "sport": "match goal team coach player league score season stadium pitch striker keeper referee trophy final race "
    "runner sprint marathon medal champion tennis serve court boxing round bout punch swim pool relay record training "
    "injury defeat victory draw fan crowd kick pass transfer captain",
    "food": "recipe oven bread butter flour sugar salt pepper sauce soup onion garlic kitchen chef menu dinner lunch "
    "breakfast plate spoon knife pan boil roast bake grill cheese tomato basil lemon honey cream pastry serve season "
    "dish taste market fresh cold stock olive rice",
    "money": "bank loan interest market stock share price profit loss budget tax fund bond invest investor trade "
    "currency inflation debt credit account salary wage rent mortgage dividend broker merger audit revenue cost deal "
    "rate economy export import fall rise record transfer pool pitch",
    "weather": "rain snow storm wind cloud sunshine thunder lightning fog frost hail drizzle heat cold temperature "
    "forecast degrees humid dry flood drought breeze gust pressure front climate season warm freeze thaw rainbow "
    "umbrella shower sky horizon mist ice fall rise round fresh",
}

# The text is about the topic before the link word, or about the one after it.
BACKWARD_LINKS = ("despite", "unlike")
FORWARD_LINKS = ("but", "instead")

COMMON_WORDS = (
    "the of and to a in it that was for on with as at by they this from we had were one which be said there their an "
    "all she would her what so up out about who them when some no more time into than then him two other could our now "
    "people my over first only new very after most also made many where back much even before well little good way "
    "such long here down still own day may old might never last man under while great another home same always "
    "world years part left right again off each place both few though small found use went looked think thing asked "
    "house seemed end come know three around important night point next turned almost away young began whole until "
    "rather side often later known per head course door perhaps name early across several best nothing "
    "quite hand eyes example together used during among half keep gave enough seen far white less given local large "
    "town story letter street table garden window river paper morning evening friend family city village school "
    "teacher music picture corner bridge road train station office number question answer reason month week hour "
    "minute summer winter spring autumn north south east west green blue yellow quiet loud slow quick heavy light "
    "empty full narrow broad simple hard easy certain common public private modern former recent usual strange plain "
    "proper wooden silver golden distant famous curious patient honest gentle clever"
)
FILLER_WORDS = COMMON_WORDS.split()


def identity(seed: int, split: Literal["train", "val"]) -> str:
    """Identifies the content of a split, as a file's hash does for other data sets."""
    samples = TRAINING_SAMPLES if split == "train" else VALIDATION_SAMPLES
    return f"generated:{GENERATOR_VERSION}:{seed}:{split}:{samples}"


def generate(seed: int, split: Literal["train", "val"]) -> tuple[list[str], list[int]]:
    """Generate one split.

    Args:
        seed: The same seed gives the same texts on every machine.
        split: Training or validation; the two are independent draws of one process.

    Returns:
        The texts and their labels, indices into `CLASS_NAMES`.
    """
    writer = _Writer(random.Random(f"{seed}:{split}"))
    samples = [writer.sample() for _ in range(TRAINING_SAMPLES if split == "train" else VALIDATION_SAMPLES)]
    return [text for text, _ in samples], [label for _, label in samples]


class _Writer:
    """Draws texts from one stream of random numbers.

    Only `Random.random` is used: its sequence is the only one that Python guarantees across versions.
    """

    def __init__(self, stream: random.Random) -> None:
        self._uniform = stream.random
        self._topic_words = [TOPIC_WORDS[name].split() for name in CLASS_NAMES]
        # The n-th filler word is 1/n as frequent as the first.
        self._filler_cumulative = list(itertools.accumulate(1 / rank for rank in range(1, len(FILLER_WORDS) + 1)))

    def sample(self) -> tuple[str, int]:
        """One text with its (rarely wrong) label."""
        length = self._length()
        opening = self._integer(2, 3)
        first, second = self._two_of(len(CLASS_NAMES))
        if self._uniform() >= TWO_TOPIC_SHARE:
            second = first
        backward = self._uniform() < 0.5
        link = self._pick(BACKWARD_LINKS if backward else FORWARD_LINKS)
        words = [*self._clause(opening, first), link, *self._clause(length - opening - 1, second)]
        label = first if backward else second
        if self._uniform() < LABEL_NOISE:
            label = (label + self._integer(1, len(CLASS_NAMES) - 1)) % len(CLASS_NAMES)
        return " ".join(words), label

    def _length(self) -> int:
        """Log-normal around 20 words, by the Box-Muller transform."""
        normal = math.sqrt(-2 * math.log(1 - self._uniform())) * math.cos(2 * math.pi * self._uniform())
        return min(max(round(math.exp(3.0 + 0.65 * normal)), SHORTEST_WORDS), LONGEST_WORDS)

    def _clause(self, length: int, topic: int) -> list[str]:
        """Filler words with two topic words among the first ten, and an occasional stray topic word."""
        words = [self._filler() for _ in range(length)]
        for position in self._two_of(min(length, 10)):
            words[position] = self._pick(self._topic_words[topic])
        return words

    def _filler(self) -> str:
        if self._uniform() < STRAY_TOPIC_WORD_SHARE:
            return self._pick(self._pick(self._topic_words))
        place = self._uniform() * self._filler_cumulative[-1]
        return FILLER_WORDS[min(bisect.bisect(self._filler_cumulative, place), len(FILLER_WORDS) - 1)]

    def _integer(self, low: int, high: int) -> int:
        """A random integer from `low` to `high`, both included."""
        return low + int(self._uniform() * (high - low + 1))

    def _two_of(self, count: int) -> tuple[int, int]:
        """Two different numbers below `count`."""
        first = self._integer(0, count - 1)
        return first, (first + self._integer(1, count - 1)) % count

    def _pick(self, items: Sequence[Item]) -> Item:
        return items[self._integer(0, len(items) - 1)]
