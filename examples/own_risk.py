"""A risk of your own: positives that rank below many negatives count by a power of their mean exponential loss.

From Python: python own_risk.py. From TOML, by its name: fedxl train own_risk.toml (in this folder).
"""

import torch

import fedxl
from fedxl.data import digits
from fedxl.models import mlp
from fedxl.risks import LINKS


@fedxl.named
def push(power: float = 2.0, scale: float = 1.0) -> fedxl.XRisk:
    """mean_i g_i^power, g_i = mean_j exp(-(h_i - h_j) / scale). The arguments are settings of [risk] in TOML."""
    sigmoid = LINKS["sigmoid"]  # scores in (0, 1), whose exponentials cannot overflow
    return fedxl.XRisk(
        pair=lambda a, b, y: torch.exp(-fedxl.gap(a, b) / scale),  # every a_i with every b_j: [.., B1, B2]
        outer=lambda g: g**power,
        link=sigmoid.apply,
        score_range=sigmoid.range,
    )


if __name__ == "__main__":
    data = digits()
    result = fedxl.fit(
        mlp(data.train.shape), data.train, fedxl.FeDXL2(push(power=3.0), lr=0.3),
        rounds=10, local_steps=8, batch_size=(8, 8), eval_every=2, validation=data.validation, test=data.test,
    )  # fmt: skip
    print(f"AUROC {result.metrics['test']['auroc']:.3f}")
