"""A metric of your own: how many of the positives are found where one in twenty negatives is a false alarm.

From Python: python own_metric.py. From TOML, by its name: fedxl train own_metric.toml (in this folder).
"""

import numpy as np

import fedxl
from fedxl.data import digits
from fedxl.models import mlp


def sensitivity(scores: np.ndarray, labels: np.ndarray) -> float:
    """True positive rate at a specificity of 95 %; raw scores and labels 0 or 1 come in, NaN says "not defined"."""
    if labels.all() or not labels.any():
        return float("nan")
    threshold = np.quantile(scores[labels == 0], 0.95)
    return float((scores[labels == 1] > threshold).mean())


def miss_rate(scores: np.ndarray, labels: np.ndarray) -> float:
    return 1 - sensitivity(scores, labels)


# A Metric says more: which values it can take, and that less is better. To select by this one, write "-missed".
missed = fedxl.Metric(miss_rate, range=(0.0, 1.0), larger_is_better=False, name="missed")

if __name__ == "__main__":
    data = digits()
    result = fedxl.fit(
        mlp(data.train.shape), data.train, fedxl.FeDXL2(fedxl.partial_auc(lam=1.0), lr=0.3),
        rounds=10, local_steps=8, batch_size=(8, 8), eval_every=2, validation=data.validation, test=data.test,
        metrics=[sensitivity, missed], select="sensitivity",
    )  # fmt: skip
    print({name: round(result.metrics["test"][name], 3) for name in ("auroc", "sensitivity", "missed")})
