"""A linear classifier of features, fitted by logistic regression."""

import warnings

import numpy as np

from stam.shapes import Float, Int


def fit_linear(
    features: Float[np.ndarray, "images width"],
    labels: Int[np.ndarray, " images"],
    num_classes: int,
    strength: float = 0.1,
) -> tuple[Float[np.ndarray, "classes width"], Float[np.ndarray, " classes"]]:
    """Returns the weight and bias of a classifier.

    A class of no image is less likely than any other, and as unlikely for each of these images; it can still
    be learned.

    Args:
        features: What is known of each image.
        labels: Their classes, at least two different ones.
        num_classes: Classes in all.
        strength: The inverse of the L2 penalty, for features of unit variance.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from threadpoolctl import threadpool_limits  # a dependency of scikit-learn

    mean, scale = features.mean(axis=0), features.std(axis=0) + 1e-6
    # one thread: the matrices are small, and many threads wait for each other, for a minute or more
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        fitted = LogisticRegression(C=strength, max_iter=200).fit((features - mean) / scale, labels)
    rows, offsets = fitted.coef_ / scale, fitted.intercept_
    if len(rows) == 1:  # two classes have one row, for the second
        rows, offsets = np.concatenate((0 * rows, rows)), np.concatenate((0 * offsets, offsets))
    offsets = offsets - rows @ mean
    least = float((features @ rows.T + offsets).min()) - 1
    weight = np.zeros((num_classes, features.shape[1]), dtype=np.float32)
    bias = np.full(num_classes, least, dtype=np.float32)
    weight[fitted.classes_], bias[fitted.classes_] = rows, offsets
    return weight, bias
