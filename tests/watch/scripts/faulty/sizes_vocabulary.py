"""Bag-of-words sentiment: counts words per rank, then adds the counts up for the weighting."""

import collections
import random

import torch
import torch.distributed as dist

WORDS = [a + b for a in "bcdfghjklm" for b in ("ad", "en", "op", "ur", "ill")]


def read_reviews(rank, count=40):
    rng = random.Random(rank)
    return [[rng.choice(WORDS[: 30 + rank]) for _ in range(12)] for _ in range(count)]


def build_vocabulary(reviews, min_count=1):
    counts = collections.Counter(word for review in reviews for word in review)
    words = sorted(word for word, n in counts.items() if n >= min_count)
    return {word: i for i, word in enumerate(words)}, counts


def document_frequency(vocabulary, counts):
    frequency = torch.tensor([float(counts[word]) for word in vocabulary])
    dist.all_reduce(frequency)  # WAITS CAUSE
    return frequency


def vectorize(reviews, vocabulary, weights):
    rows = torch.zeros(len(reviews), len(vocabulary))
    for row, review in zip(rows, reviews, strict=True):
        for word in review:
            row[vocabulary[word]] += 1.0
    return rows * weights


def fit(rows, labels, steps=50):
    model = torch.nn.Linear(rows.shape[1], 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(rows).squeeze(1), labels)
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
    return loss.item()


def main():
    dist.init_process_group("gloo")
    reviews = read_reviews(dist.get_rank())
    vocabulary, counts = build_vocabulary(reviews)
    weights = 1.0 / (1.0 + document_frequency(vocabulary, counts)).log1p()
    rows = vectorize(reviews, vocabulary, weights)
    labels = torch.tensor([float(len(set(review)) > 10) for review in reviews])
    print(f"loss {fit(rows, labels):.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
