"""Losses and models that combine the rows of a batch: on several workers they give another result.

Half of them read whole numbers that are stored as floats, such as class ids, flags or ranks: a
small change of these rows is a large change of the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from auditing.models import OwnStep, built, compiled, dense, stack
from auditing.subject import Subject
from keras import ops

layers = keras.layers
Loss = Callable[[Any, Any], Any]

_RNG = np.random.default_rng(37)
ROWS = 46
X = _RNG.normal(size=(ROWS, 8)).astype("float32")


def column(values: Any) -> Any:
    return np.asarray(values).reshape(ROWS, -1).astype("float32")


CLASS = column(_RNG.integers(0, 4, ROWS))
FLAG = column(_RNG.random(ROWS) < 0.35)
REAL = column(X[:, 0] + _RNG.normal(size=ROWS))
TARGETS = column(_RNG.uniform(size=(ROWS, 3)))
# Whole numbers, and -1.0 where the value is missing.
GAPS = column(np.where(_RNG.random(ROWS) < 0.4, -1, _RNG.integers(0, 9, ROWS)))
# Days until an event, of which several are equal; and whether it was observed.
TIMES = column(np.stack([_RNG.integers(1, 7, ROWS), _RNG.random(ROWS) < 0.7], axis=1))
# A query, and how well a document fits it.
QUERY = column(np.stack([_RNG.integers(0, 3, ROWS), _RNG.integers(0, 4, ROWS)], axis=1))
# A group, and a value.
GROUP = column(np.stack([_RNG.integers(0, 3, ROWS), _RNG.normal(size=ROWS)], axis=1))
# A value, and its weight.
WEIGHTED = column(np.stack([_RNG.normal(size=ROWS), _RNG.lognormal(size=ROWS)], axis=1))
DAYS = column(_RNG.integers(0, 120, ROWS))


def real(condition: Any) -> Any:
    return ops.cast(condition, "float32")


def flat(values: Any) -> Any:
    return ops.reshape(values, (-1,))


def mean_of(values: Any, chosen: Any) -> Any:
    """Return the mean of the chosen values; 0 if there are none."""
    return ops.sum(values * chosen) / ops.maximum(ops.sum(chosen), 1e-6)


def distances(vectors: Any) -> Any:
    return ops.sum((vectors[:, None] - vectors[None]) ** 2, axis=-1)


def same(y: Any) -> Any:
    """Return for each pair of rows whether they have the same number; a row is not its own pair."""
    y = flat(y)
    return real(y[:, None] == y[None]) * (1 - ops.eye(ops.shape(y)[0]))


def roots(values: Any) -> Any:
    return ops.sqrt(values + 1e-6)


def errors(y: Any, predicted: Any) -> Any:
    """Return the square error of each row's first numbers."""
    return flat((predicted[:, :1] - y[:, :1]) ** 2)


def entropies(y: Any, predicted: Any) -> Any:
    """Return the binary cross-entropy of each row."""
    logits = flat(predicted[:, :1])
    return ops.softplus(logits) - flat(y[:, :1]) * logits


# --- rows that are compared by a class, stored as a float ---


def batch_hard(y: Any, predicted: Any) -> Any:
    apart, alike = distances(predicted), same(y)
    other = real(flat(y)[:, None] != flat(y)[None])
    farthest = ops.max(apart * alike, axis=1)
    nearest = ops.min(apart + 1e4 * (1 - other), axis=1)
    return ops.relu(farthest - nearest + 1.0)


def batch_all(y: Any, predicted: Any) -> Any:
    apart, alike = distances(predicted), same(y)
    other = real(flat(y)[:, None] != flat(y)[None])
    margins = ops.relu(apart[:, :, None] - apart[:, None, :] + 1.0)
    valid = alike[:, :, None] * other[:, None, :]
    return mean_of(margins, valid * real(margins > 0))


def pairs(y: Any, predicted: Any) -> Any:
    apart, alike = distances(predicted), same(y)
    return ops.mean(alike * apart + (1 - alike) * ops.relu(1.0 - roots(apart)) ** 2, axis=1)


def supervised_contrast(y: Any, predicted: Any) -> Any:
    unit = ops.normalize(predicted, axis=-1)
    alike = ops.matmul(unit, ops.transpose(unit)) / 0.2
    alike = alike - 1e9 * ops.eye(ops.shape(alike)[0])
    logs = ops.log_softmax(alike, axis=1)
    chosen = same(y)
    return -ops.sum(ops.where(chosen > 0, logs, 0.0), 1) / ops.maximum(ops.sum(chosen, 1), 1.0)


def to_centers(y: Any, predicted: Any) -> Any:
    alike = same(y) + ops.eye(ops.shape(y)[0])
    centers = ops.matmul(alike, predicted) / ops.sum(alike, axis=1, keepdims=True)
    return ops.sum((predicted - centers) ** 2, axis=-1) + errors(y, predicted)


def discriminant(y: Any, predicted: Any) -> Any:
    alike = same(y) + ops.eye(ops.shape(y)[0])
    centers = ops.matmul(alike, predicted) / ops.sum(alike, axis=1, keepdims=True)
    within = ops.mean((predicted - centers) ** 2)
    return within / (ops.mean((centers - ops.mean(predicted, axis=0)) ** 2) + 0.1)


def graph(y: Any, predicted: Any) -> Any:
    return ops.mean(same(y) * distances(predicted)) + errors(y, predicted)


def by_frequency(y: Any, predicted: Any) -> Any:
    count = ops.sum(same(y), axis=1) + 1
    return ops.cast(ops.shape(y)[0], "float32") / count * errors(y, predicted)


def by_effective_number(y: Any, predicted: Any) -> Any:
    weights = 0.1 / (1 - 0.9 ** (ops.sum(same(y), axis=1) + 1))
    return weights / ops.mean(weights) * errors(y, predicted)


def by_share_of_positives(y: Any, predicted: Any) -> Any:
    share = ops.mean(real(y == 1.0))
    weights = ops.where(flat(y) == 1.0, 1 - share, share)
    return weights * entropies(y, predicted)


def worst_class(y: Any, predicted: Any) -> Any:
    found = errors(y, predicted)
    means = [mean_of(found, real(flat(y) == float(one))) for one in range(4)]
    return ops.max(ops.stack(means))


def balanced(y: Any, predicted: Any) -> Any:
    found = errors(y, predicted)
    kinds = ops.cast(flat(y), "int32")
    sums = ops.segment_sum(found, kinds, 4) / (ops.segment_sum(ops.ones_like(found), kinds, 4) + 1)
    return ops.mean(sums)


# --- flags, missing values, times and queries, stored as floats ---


def mean_over_positives(y: Any, predicted: Any) -> Any:
    return mean_of(ops.softplus(-flat(predicted)), real(flat(y) == 1.0))


def per_positive(y: Any, predicted: Any) -> Any:
    """As in detectors: the loss of all, divided by the number of positive rows."""
    return ops.sum(entropies(y, predicted)) / ops.maximum(ops.sum(real(y == 1.0)), 1.0)


def mean_over_labelled(y: Any, predicted: Any) -> Any:
    return mean_of(errors(y, predicted), real(flat(y) >= 0))


def mean_over_known(y: Any, predicted: Any) -> Any:
    return mean_of(ops.abs(flat(predicted - y)), real(flat(y) != -1.0))


def filled_in(y: Any, predicted: Any) -> Any:
    """Missing values are replaced by the mean of the others."""
    known = real(flat(y) != -1.0)
    filled = ops.where(known > 0, flat(y), mean_of(flat(y), known))
    return (flat(predicted) - filled) ** 2


def over_observed(y: Any, predicted: Any) -> Any:
    return mean_of(ops.abs(flat(predicted) - y[:, 0]), real(y[:, 1] == 1.0))


def positives_above_negatives(y: Any, predicted: Any) -> Any:
    score, one = flat(predicted), real(flat(y) == 1.0)
    return mean_of(ops.softplus(score[None] - score[:, None]), one[:, None] * (1 - one[None]))


def cox(y: Any, predicted: Any) -> Any:
    time, seen, risk = y[:, 0], real(y[:, 1] == 1.0), flat(predicted)
    later = real(time[None] >= time[:, None])
    return mean_of(ops.log(ops.sum(later * ops.exp(risk)[None], axis=1)) - risk, seen)


def cox_with_ties(y: Any, predicted: Any) -> Any:
    """Breslow's form: rows with the same time share the rows at risk."""
    time, seen, risk = y[:, 0], real(y[:, 1] == 1.0), flat(predicted)
    ties = real(time[None] == time[:, None]) * seen[None]
    later = real(time[None] >= time[:, None])
    logs = ops.log(ops.sum(later * ops.exp(risk)[None], axis=1))
    return mean_of(logs - risk, seen / ops.maximum(ops.sum(ties, axis=1), 1.0))


def concordance(y: Any, predicted: Any) -> Any:
    time, seen, risk = y[:, 0], real(y[:, 1] == 1.0), flat(predicted)
    valid = real(time[:, None] < time[None]) * seen[:, None]
    return mean_of(ops.softplus(risk[None] - risk[:, None]), valid)


def within_queries(y: Any, predicted: Any) -> Any:
    query, fit, score = y[:, 0], y[:, 1], flat(predicted)
    valid = real(query[:, None] == query[None]) * real(fit[:, None] > fit[None])
    return mean_of(ops.softplus(score[None] - score[:, None]), valid)


def list_of_a_query(y: Any, predicted: Any) -> Any:
    query, fit, score = y[:, 0], y[:, 1], flat(predicted)
    whole = query[:, None] == query[None]
    logs = ops.log_softmax(ops.where(whole, score[None], -1e9), axis=1)
    shares = ops.softmax(ops.where(whole, fit[None], -1e9), axis=1)
    return -ops.sum(ops.where(whole, shares * logs, 0.0), axis=1)


def gain_of_ranks(y: Any, predicted: Any) -> Any:
    """An approximate NDCG: soft ranks within a query."""
    query, fit, score = y[:, 0], y[:, 1], flat(predicted)
    whole = real(query[:, None] == query[None])
    ranks = 0.5 + ops.sum(whole * ops.sigmoid(score[None] - score[:, None]), axis=1)
    return -mean_of((2**fit - 1) / ops.log(1 + ranks), ops.ones_like(fit)) / ops.max(fit)


def lambda_rank(y: Any, predicted: Any) -> Any:
    fit, score = flat(y), flat(predicted)
    places = real(ops.argsort(ops.argsort(-score)))
    gain = ops.abs((fit[:, None] - fit[None]) * (places[:, None] - places[None]))
    return mean_of(
        gain * ops.softplus(score[None] - score[:, None]), real(fit[:, None] > fit[None])
    )


def list_in_order(y: Any, predicted: Any) -> Any:
    """The likelihood of the right order of the batch (ListMLE)."""
    ordered = ops.take(flat(predicted), ops.argsort(-flat(y)))
    behind = ops.flip(ops.log(ops.cumsum(ops.flip(ops.exp(ordered)))))
    return ops.mean(behind - ordered)


def by_bin(y: Any, predicted: Any) -> Any:
    """Rows count by how many others are in the same month."""
    month = ops.floor(flat(y) / 30)
    count = ops.sum(real(month[:, None] == month[None]), axis=1)
    return errors(y / 60, predicted) / count


def by_month_means(y: Any, predicted: Any) -> Any:
    month = ops.cast(flat(y) / 30, "int32")
    ones = ops.ones_like(flat(predicted))
    means = ops.segment_sum(flat(predicted), month, 4) / (ops.segment_sum(ones, month, 4) + 0.1)
    return ops.mean((means - 1.0) ** 2)


def parity(y: Any, predicted: Any) -> Any:
    """Equal means of two groups, in addition to an error of rows."""
    one, score = real(flat(y) == 1.0), ops.sigmoid(flat(predicted))
    gap = mean_of(score, one) - mean_of(score, 1 - one)
    return entropies(y, predicted) + 5 * gap**2


def worst_group(y: Any, predicted: Any) -> Any:
    found = (flat(predicted) - y[:, 1]) ** 2
    means = [mean_of(found, real(y[:, 0] == float(one))) for one in range(3)]
    return ops.logsumexp(3 * ops.stack(means)) / 3


def domains(y: Any, predicted: Any) -> Any:
    """The distance of two domains by kernels (MMD)."""
    kernel, one = ops.exp(-distances(predicted)), real(flat(y) == 1.0)
    both = one[:, None] * one[None]
    neither = (1 - one[:, None]) * (1 - one[None])
    mixed = one[:, None] * (1 - one[None])
    return mean_of(kernel, both) + mean_of(kernel, neither) - 2 * mean_of(kernel, mixed)


def covariances(y: Any, predicted: Any) -> Any:
    """The distance of the covariances of two domains (CORAL)."""

    def covariance(chosen: Any) -> Any:
        count = ops.maximum(ops.sum(chosen), 1.0)
        mean = ops.sum(predicted * chosen, axis=0) / count
        centered = (predicted - mean) * chosen
        return ops.matmul(ops.transpose(centered), centered) / count

    one = real(y == 1.0)
    return ops.mean((covariance(one) - covariance(1 - one)) ** 2)


def soft_matthews(y: Any, predicted: Any) -> Any:
    one, score = real(flat(y) == 1.0), ops.sigmoid(flat(predicted))
    hits, misses = ops.sum(one * score), ops.sum(one * (1 - score))
    alarms, rest = ops.sum((1 - one) * score), ops.sum((1 - one) * (1 - score))
    product = (hits + alarms) * (hits + misses) * (rest + alarms) * (rest + misses)
    return 1 - (hits * rest - alarms * misses) / roots(product)


def calibration(y: Any, predicted: Any) -> Any:
    score = ops.sigmoid(flat(predicted))
    bins = real(ops.floor(5 * score)[:, None] == ops.arange(5.0)[None])
    gaps = ops.abs(ops.matmul(ops.transpose(bins), (score - flat(y))[:, None]))
    return ops.sum(gaps) / ops.cast(ops.shape(score)[0], "float32") + entropies(y, predicted)


def neighbours(y: Any, predicted: Any) -> Any:
    """Each row's soft vote of the other rows (NCA)."""
    scores = -distances(predicted) - 1e9 * ops.eye(ops.shape(predicted)[0])
    return -ops.log(ops.sum(ops.softmax(scores, axis=1) * same(y), axis=1) + 1e-3)


def every_other(y: Any, predicted: Any) -> Any:
    """Rows count by their place in the batch."""
    places = ops.arange(ops.shape(y)[0])
    return real(places % 4 == 0) * errors(y, predicted) * 4


def first_of_a_class(y: Any, predicted: Any) -> Any:
    """Only the first row of each class counts."""
    before = ops.sum(ops.tril(same(y), -1), axis=1)
    return mean_of(errors(y, predicted), real(before == 0))


COLUMNS: dict[str, tuple[Loss, Any, int]] = {
    "hardest triplets": (batch_hard, CLASS, 3),
    "all triplets": (batch_all, CLASS, 3),
    "pairs of classes": (pairs, CLASS, 3),
    "supervised contrast": (supervised_contrast, CLASS, 3),
    "centers of the batch": (to_centers, CLASS, 3),
    "discriminant": (discriminant, CLASS, 3),
    "graph of classes": (graph, CLASS, 3),
    "neighbours": (neighbours, CLASS, 3),
    "class frequencies": (by_frequency, CLASS, 1),
    "effective numbers": (by_effective_number, CLASS, 1),
    "share of positives": (by_share_of_positives, FLAG, 1),
    "worst class": (worst_class, CLASS, 1),
    "balanced classes": (balanced, CLASS, 1),
    "first row of a class": (first_of_a_class, CLASS, 1),
    "mean over positives": (mean_over_positives, FLAG, 1),
    "per positive": (per_positive, FLAG, 1),
    "mean over labelled rows": (mean_over_labelled, GAPS, 1),
    "mean over known values": (mean_over_known, GAPS, 1),
    "missing values filled in": (filled_in, GAPS, 1),
    "mean over observed times": (over_observed, TIMES, 1),
    "positives above negatives": (positives_above_negatives, FLAG, 1),
    "Cox": (cox, TIMES, 1),
    "Cox with ties": (cox_with_ties, TIMES, 1),
    "concordance": (concordance, TIMES, 1),
    "pairs within queries": (within_queries, QUERY, 1),
    "lists of queries": (list_of_a_query, QUERY, 1),
    "gain of ranks": (gain_of_ranks, QUERY, 1),
    "LambdaRank": (lambda_rank, CLASS, 1),
    "order of the batch": (list_in_order, CLASS, 1),
    "months": (by_bin, DAYS, 1),
    "means of months": (by_month_means, DAYS, 1),
    "parity of groups": (parity, FLAG, 1),
    "worst group": (worst_group, GROUP, 1),
    "MMD": (domains, FLAG, 3),
    "CORAL": (covariances, FLAG, 3),
    "soft Matthews": (soft_matthews, FLAG, 1),
    "calibration in bins": (calibration, FLAG, 1),
    "places in the batch": (every_other, REAL, 1),
}

# --- smooth losses ---


def contrast(y: Any, predicted: Any) -> Any:
    one, other = (ops.normalize(part, axis=-1) for part in ops.split(predicted, 2, axis=-1))
    alike = ops.matmul(one, ops.transpose(other)) / 0.2
    return ops.logsumexp(alike, axis=1) - ops.diagonal(alike)


def alignment(y: Any, predicted: Any) -> Any:
    unit = ops.normalize(predicted, axis=-1)
    return ops.log(ops.mean(ops.exp(-2 * distances(unit)))) + ops.mean((predicted - y) ** 2, -1)


def twins(y: Any, predicted: Any) -> Any:
    parts = ops.split(predicted, 2, axis=-1)
    one, other = ((p - ops.mean(p, 0)) / (ops.std(p, 0) + 0.01) for p in parts)
    crossed = ops.matmul(ops.transpose(one), other) / ops.cast(ops.shape(y)[0], "float32")
    return ops.sum((crossed - ops.eye(3)) ** 2)


def variances(y: Any, predicted: Any) -> Any:
    spread = roots(ops.var(predicted, axis=0))
    return ops.mean((predicted - y) ** 2, axis=-1) + ops.mean(ops.relu(1 - spread))


def uncorrelated(y: Any, predicted: Any) -> Any:
    centered = predicted - ops.mean(predicted, axis=0)
    found = ops.matmul(ops.transpose(centered), centered) / ops.cast(ops.shape(y)[0], "float32")
    return ops.sum(found**2) - ops.sum(ops.diagonal(found) ** 2) + errors(y, predicted)


def kept_distances(y: Any, predicted: Any) -> Any:
    return ops.mean((roots(distances(predicted)) - roots(distances(y))) ** 2, axis=1)


def neighbour_shares(y: Any, predicted: Any) -> Any:
    """Student's t shares of pairs against Gaussian ones (t-SNE)."""
    off = 1 - ops.eye(ops.shape(y)[0])
    near = off / (1 + distances(predicted))
    true = off * ops.exp(-distances(y))
    near, true = near / ops.sum(near), true / ops.sum(true)
    return ops.sum(true * (ops.log(true + 1e-9) - ops.log(near + 1e-9)))


def pearson(y: Any, predicted: Any) -> Any:
    one, other = y - ops.mean(y), predicted - ops.mean(predicted)
    return 1 - ops.sum(one * other) / roots(ops.sum(one**2) * ops.sum(other**2))


def concordance_correlation(y: Any, predicted: Any) -> Any:
    one, other = ops.mean(y), ops.mean(predicted)
    shared = ops.mean((y - one) * (predicted - other))
    return 1 - 2 * shared / (ops.var(y) + ops.var(predicted) + (one - other) ** 2)


def soft_ranks(y: Any, predicted: Any) -> Any:
    ranks = [ops.sum(ops.sigmoid(4 * (v[:, None] - v[None])), 1) for v in map(flat, (y, predicted))]
    return pearson(ranks[0], ranks[1])


def explained(y: Any, predicted: Any) -> Any:
    return ops.sum((y - predicted) ** 2) / ops.sum((y - ops.mean(y)) ** 2)


def standardized(y: Any, predicted: Any) -> Any:
    return errors((y - ops.mean(y)) / (ops.std(y) + 1e-3), predicted)


def by_largest(y: Any, predicted: Any) -> Any:
    return errors(y / ops.max(ops.abs(y)), predicted)


def root_mean_square(y: Any, predicted: Any) -> Any:
    return ops.sqrt(ops.mean(errors(y, predicted)))


def tilted(y: Any, predicted: Any) -> Any:
    return ops.logsumexp(errors(y, predicted)) - ops.log(ops.cast(ops.shape(y)[0], "float32"))


def hardest_quarter(y: Any, predicted: Any) -> Any:
    found = errors(y, predicted)
    return ops.mean(ops.sort(found)[-(ops.shape(found)[0] // 4 + 1) :])


def trimmed(y: Any, predicted: Any) -> Any:
    found = errors(y, predicted)
    return ops.mean(ops.sort(found)[: ops.shape(found)[0] * 3 // 4])


def beyond_quantile(y: Any, predicted: Any) -> Any:
    found = errors(y, predicted)
    return mean_of(found, real(found >= ops.quantile(found, 0.8)))


def soft_f1(y: Any, predicted: Any) -> Any:
    score = ops.sigmoid(predicted)
    return 1 - 2 * ops.sum(y * score) / (ops.sum(y) + ops.sum(score))


def jaccard(y: Any, predicted: Any) -> Any:
    score = ops.sigmoid(predicted)
    hits = ops.sum(y * score)
    return 1 - hits / (ops.sum(y) + ops.sum(score) - hits)


def mean_prediction(y: Any, predicted: Any) -> Any:
    return entropies(y, predicted) + 3 * (ops.mean(ops.sigmoid(predicted)) - 0.3) ** 2


def information(y: Any, predicted: Any) -> Any:
    shares = ops.softmax(predicted, axis=-1)
    mean = ops.mean(shares, axis=0)
    return ops.sum(mean * ops.log(mean)) - ops.sum(shares * ops.log(shares), axis=-1)


def prototypes(y: Any, predicted: Any) -> Any:
    """Balanced codes by Sinkhorn's iterations (SwAV)."""
    codes = ops.exp(ops.stop_gradient(predicted))
    for _ in range(3):
        codes = codes / ops.sum(codes, axis=0, keepdims=True)
        codes = codes / ops.sum(codes, axis=1, keepdims=True)
    return -ops.sum(codes * ops.log_softmax(predicted, axis=-1), axis=-1)


def sorted_distance(y: Any, predicted: Any) -> Any:
    return ops.mean((ops.sort(flat(predicted)) - ops.sort(flat(y))) ** 2)


def energy(y: Any, predicted: Any) -> Any:
    one, other = flat(predicted), flat(y)
    crossed = ops.mean(ops.abs(one[:, None] - other[None]))
    return 2 * crossed - ops.mean(ops.abs(one[:, None] - one[None]))


def independence(y: Any, predicted: Any) -> Any:
    """The dependence of predictions and targets by kernels (HSIC)."""
    kernels = []
    for values in (y, predicted):
        kernel = ops.exp(-distances(values))
        kernel = kernel - ops.mean(kernel, axis=0, keepdims=True)
        kernels.append(kernel - ops.mean(kernel, axis=1, keepdims=True))
    return -ops.mean(kernels[0] * kernels[1])


def shuffled_pairs(y: Any, predicted: Any) -> Any:
    """True pairs against pairs with the next row (mutual information)."""
    true = ops.sum(y * predicted, axis=-1)
    false = ops.sum(y * ops.roll(predicted, 1, axis=0), axis=-1)
    return ops.softplus(-true) + ops.softplus(false)


def changes(y: Any, predicted: Any) -> Any:
    """Errors of the differences between rows that follow each other."""
    return ops.mean((ops.diff(flat(predicted)) - ops.diff(flat(y))) ** 2)


def weighted_mean(y: Any, predicted: Any) -> Any:
    return mean_of(errors(y, predicted), y[:, 1])


def summed(y: Any, predicted: Any) -> Any:
    return 0.05 * ops.sum((y - predicted) ** 2)


def largest(y: Any, predicted: Any) -> Any:
    return ops.max(errors(y, predicted))


SMOOTH: dict[str, tuple[Any, Any, int]] = {
    "two views": (contrast, REAL, 6),
    "alignment and uniformity": (alignment, TARGETS, 3),
    "twins": (twins, REAL, 6),
    "variances of the batch": (variances, TARGETS, 3),
    "uncorrelated outputs": (uncorrelated, TARGETS, 3),
    "kept distances": (kept_distances, TARGETS, 3),
    "shares of neighbours": (neighbour_shares, TARGETS, 2),
    "Pearson": (pearson, REAL, 1),
    "concordance correlation": (concordance_correlation, REAL, 1),
    "soft ranks": (soft_ranks, REAL, 1),
    "explained variance": (explained, REAL, 1),
    "standardized targets": (standardized, REAL, 1),
    "divided by the largest": (by_largest, REAL, 1),
    "root mean square": (root_mean_square, REAL, 1),
    "tilted": (tilted, REAL, 1),
    "hardest quarter": (hardest_quarter, REAL, 1),
    "trimmed": (trimmed, REAL, 1),
    "beyond a quantile": (beyond_quantile, REAL, 1),
    "largest error": (largest, REAL, 1),
    "soft F1": (soft_f1, FLAG, 1),
    "Jaccard": (jaccard, FLAG, 1),
    "Dice": (lambda: keras.losses.Dice(), TARGETS, 3),
    "Tversky": (lambda: keras.losses.Tversky(), TARGETS, 3),
    "mean prediction": (mean_prediction, FLAG, 1),
    "information": (information, REAL, 3),
    "prototypes": (prototypes, REAL, 3),
    "sorted distance": (sorted_distance, REAL, 1),
    "energy distance": (energy, REAL, 1),
    "independence": (independence, REAL, 1),
    "shuffled pairs": (shuffled_pairs, TARGETS, 3),
    "changes between rows": (changes, REAL, 1),
    "weighted mean": (weighted_mean, WEIGHTED, 1),
    "summed": (summed, REAL, 1),
}

# --- layers and train_steps ---


class Layer(layers.Layer):
    """A layer of one function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def call(self, x: Any, training: bool = False) -> Any:
        return self.function(self, x)


def normalized(layer: Any, x: Any) -> Any:
    return (x - ops.mean(x, axis=0)) / (ops.std(x, axis=0) + 0.01)


def scaled_by_largest(layer: Any, x: Any) -> Any:
    return x / ops.max(ops.abs(x))


def ranked(layer: Any, x: Any) -> Any:
    """Add each row's rank in the batch by its first number, as a float."""
    rank = real(ops.argsort(ops.argsort(x[:, 0])))
    return ops.concatenate([x, rank[:, None] / 4], axis=-1)


def discriminated(layer: Any, x: Any) -> Any:
    """Add how similar a row is to the others (minibatch discrimination)."""
    near = ops.mean(ops.exp(-ops.sum(ops.abs(x[:, None] - x[None]), -1) / 4), 1, keepdims=True)
    return ops.concatenate([x, near], axis=-1)


def attending(layer: Any, x: Any) -> Any:
    return ops.matmul(ops.softmax(ops.matmul(x, ops.transpose(x))), x)


def adding_sum(layer: Any, x: Any) -> Any:
    layer.add_loss(0.05 * ops.sum(x**2))
    return x


def adding_balance(layer: Any, x: Any) -> Any:
    """As for the load of experts: a product of two means over rows."""
    shares = ops.softmax(x, axis=-1)
    chosen = ops.one_hot(ops.argmax(x, axis=-1), x.shape[-1])
    layer.add_loss(3 * ops.sum(ops.mean(shares, axis=0) * ops.mean(chosen, axis=0)))
    return x


def limited(layer: Any, x: Any) -> Any:
    """Each expert takes the first three rows that choose it."""
    chosen = ops.one_hot(ops.argmax(x, axis=-1), x.shape[-1])
    places = ops.cumsum(chosen, axis=0) * chosen
    return x * real(ops.max(places, axis=-1, keepdims=True) <= 3.0)


def spread(values: Any) -> Any:
    """A regularizer of activity: the variance over the batch."""
    return ops.sum(ops.var(values, axis=0)) * ops.cast(ops.shape(values)[0], "float32") ** 2 / 10


class Scaled(OwnStep):
    """Divides the rows by the largest number of the batch, in Python."""

    def train_step(self, data: Any) -> Any:
        x, y = data

        def divide(values: Any) -> Any:
            return values / max(1.0, float(np.abs(values).max(initial=0.0)))

        divided = tf.ensure_shape(tf.numpy_function(divide, [x], tf.float32), x.shape)
        return super().train_step((divided, y))


class Pairs(OwnStep):
    """Learns differences between all pairs of rows."""

    def find_loss(self, x: Any, y: Any) -> Any:
        found, true = flat(self(x, training=True)), flat(y)
        apart = (found[:, None] - found[None]) - (true[:, None] - true[None])
        return ops.mean(apart**2)


class Mixed(OwnStep):
    """Mixes each row with the next one of the batch (mixup)."""

    def train_step(self, data: Any) -> Any:
        x, y = (0.6 * part + 0.4 * ops.roll(part, 1, axis=0) for part in data)
        return super().train_step((x, y))


class Clipped(OwnStep):
    """Clips gradients by itself."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.find_loss(x, y)
        weights = self.trainable_variables
        found = [g / (ops.norm(g) + 0.1) for g in tape.gradient(loss, weights)]
        self.optimizer.apply(found, weights)
        return {"loss": loss}


class Tape(OwnStep):
    """Adds up the losses of rows: a tape does so."""

    def find_loss(self, x: Any, y: Any) -> Any:
        return errors(y, self(x, training=True))


class Labelled(OwnStep):
    """Trains on the rows whose label is not -1.0."""

    def find_loss(self, x: Any, y: Any) -> Any:
        chosen = tf.where(flat(y) >= 0.0)[:, 0]
        x, y = tf.gather(x, chosen), tf.gather(y, chosen)
        count = ops.maximum(real(ops.shape(chosen)[0]), 1.0)
        return ops.sum((self(x, training=True) - y) ** 2) / count


class Codebook(layers.Layer):
    """Two centers of rows, as ratios of averages that a step assigns."""

    def build(self, shape: Any) -> None:
        self.centers = self.add_weight((2, shape[-1]), "glorot_uniform", trainable=False)

    def call(self, x: Any, training: bool = False) -> Any:
        apart = ops.sum((x[:, None] - self.centers[None]) ** 2, axis=-1)
        chosen = ops.one_hot(ops.argmin(apart, axis=-1), 2)
        if training:
            held = ops.stop_gradient(x)
            count = ops.sum(chosen, axis=0)[:, None]
            means = ops.matmul(ops.transpose(chosen), held) / ops.maximum(count, 1.0)
            self.centers.assign(ops.where(count > 0, means, self.centers))
        return ops.concatenate([x, x - ops.matmul(chosen, self.centers)], axis=-1)


def layer(function: Any, *before: Any, y: Any = REAL, **options: Any) -> Subject:
    """Return a training with a layer of a function."""
    parts = [*before, lambda: Layer(function), lambda: layers.Dense(y.shape[-1])]
    return Subject(stack(*parts, **{"loss": "mse", **options}), (X, y))


def own(kind: Any, y: Any = REAL) -> Subject:
    """Return a training with an own train_step of one output."""
    return Subject(built(lambda: kind(1), loss="mse"), (X, y))


def mixing(loss: Any, y: Any, units: int) -> Subject:
    """Return a training with a loss."""

    def build() -> Any:
        model = keras.Sequential([keras.Input((8,)), dense()(), layers.Dense(units)])
        is_sigmoid = getattr(loss, "__name__", "") == "<lambda>" and y is TARGETS
        if is_sigmoid:
            model.add(layers.Activation("sigmoid"))
        return compiled(model, optimizer="sgd", loss=loss)

    return Subject(build, (X, y))


LOSSES = {name: mixing(*given) for name, given in {**COLUMNS, **SMOOTH}.items()}
LOSSES |= {
    "normalized by hand": layer(normalized, dense()),
    "scaled by the largest": layer(scaled_by_largest),
    "ranks in the batch": layer(ranked),
    "similar to others": layer(discriminated, dense(4)),
    "attention over rows": layer(attending, dense(4)),
    "an added sum": layer(adding_sum, dense()),
    "an added balance": layer(adding_balance, dense(4)),
    "limited experts": layer(limited, dense(3)),
    "regularized spread": Subject(
        stack(
            lambda: layers.Dense(6, activity_regularizer=spread),
            lambda: layers.Dense(1),
            loss="mse",
        ),
        (X, REAL),
    ),
    "centers of rows": Subject(
        stack(dense(4), lambda: Codebook(), lambda: layers.Dense(1), loss="mse"), (X, REAL)
    ),
    "scaled in Python": own(Scaled),
    "pairs in a train_step": own(Pairs),
    "mixed rows": own(Mixed),
    "clipped by hand": own(Clipped),
    "rows on a tape": own(Tape),
    "labelled rows in a train_step": own(Labelled, GAPS),
}
