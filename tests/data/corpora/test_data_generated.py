"""The generated data set: reproducible, uneven in length, and not to be solved by counting words."""

from __future__ import annotations

import statistics

import torch
import torch.nn.functional as F

from frameworm.data.corpora import generated


def test_same_seed_same_texts() -> None:
    assert generated.generate(3, "val") == generated.generate(3, "val")
    assert generated.generate(3, "val") != generated.generate(4, "val")
    train = set(generated.generate(3, "train")[0])
    assert not train & set(generated.generate(3, "val")[0])


def test_first_text_never_changes() -> None:
    """A change here changes everyone's data: raise GENERATOR_VERSION with it."""
    texts, labels = generated.generate(0, "train")
    assert generated.GENERATOR_VERSION == 1
    assert (texts[0], labels[0]) == ("cold man mist instead was be about by time was pepper garden lemon", 1)


def test_sizes_and_spread() -> None:
    texts, labels = generated.generate(0, "train")
    assert len(texts) == len(labels) == generated.TRAINING_SAMPLES
    assert len(generated.generate(0, "val")[0]) == generated.VALIDATION_SAMPLES
    lengths = sorted(len(text.split()) for text in texts)
    assert lengths[0] == generated.SHORTEST_WORDS
    assert lengths[-1] == generated.LONGEST_WORDS
    assert 15 <= statistics.median(lengths) <= 25
    assert lengths[int(0.95 * len(lengths))] > 2.5 * statistics.median(lengths)
    assert min(labels.count(label) for label in range(4)) > 0.22 * len(labels)


def test_topics_share_words() -> None:
    words = [set(text.split()) for text in generated.TOPIC_WORDS.values()]
    assert all(any(mine & other for other in words if other is not mine) for mine in words)


def test_link_word_decides_which_topic_counts() -> None:
    own = {
        name: set(text.split())
        - {word for other, rest in generated.TOPIC_WORDS.items() if other != name for word in rest.split()}
        for name, text in generated.TOPIC_WORDS.items()
    }
    agree = total = 0
    for text, label in zip(*generated.generate(0, "train"), strict=True):
        words = text.split()
        link = next(i for i, word in enumerate(words) if word in generated.BACKWARD_LINKS + generated.FORWARD_LINKS)
        side = words[:link] if words[link] in generated.BACKWARD_LINKS else words[link + 1 :]
        counts = [len(own[name] & set(side)) for name in generated.CLASS_NAMES]
        if max(counts) >= 2:
            total += 1
            agree += counts.index(max(counts)) == label
    assert total > 2_000
    assert 0.95 < agree / total < 1


def test_counting_words_is_not_enough() -> None:
    """A linear model over word counts stays well below what a transformer reaches (about 0.96), and above chance."""
    texts, labels = generated.generate(0, "train")
    held_out, truth = generated.generate(0, "val")
    columns = {word: column for column, word in enumerate(sorted({word for text in texts for word in text.split()}))}

    def counts(batch: list[str]) -> torch.Tensor:
        places = [(row, columns[word]) for row, text in enumerate(batch) for word in text.split() if word in columns]
        matrix = torch.zeros(len(batch), len(columns))
        return matrix.index_put_(tuple(torch.tensor(places).T), torch.ones(len(places)), accumulate=True)

    features, target = counts(texts), torch.tensor(labels)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.Linear(len(columns), 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, weight_decay=1e-4)
    for _ in range(30):
        optimizer.zero_grad()
        F.cross_entropy(model(features), target).backward()
        optimizer.step()
    accuracy = float((model(counts(held_out)).argmax(1) == torch.tensor(truth)).float().mean())
    assert 0.6 < accuracy < 0.9
