"""An algorithm of your own: FeDXL2 whose clients are pulled back to the server's model (the term of FedProx).

From Python: python own_algorithm.py. From TOML, by its name: fedxl train own_algorithm.toml (in this folder).
"""

from dataclasses import dataclass

import torch

import fedxl
from fedxl import tree
from fedxl.data import digits
from fedxl.models import mlp


@dataclass(frozen=True, kw_only=True, eq=False)
class FeDXLProx(fedxl.FeDXL2):
    """FeDXL2 with a proximal term. Its fields are settings of [algorithm] in TOML, next to those of FeDXL2."""

    mu: float = 0.1  # strength of the pull

    def step(self, score, server, work, batch):
        after, trace = super().step(score, server, work, batch)
        drift = tree.map(torch.sub, work.weights.params, server.weights.params)
        pull = self.descent.rate(self.lr, work.step, torch.float32) * self.mu
        params = tree.map(lambda w, d: w - pull * d, after.weights.params, drift)
        return after._replace(weights=after.weights._replace(params=params)), trace


if __name__ == "__main__":
    data = digits()
    result = fedxl.fit(
        mlp(data.train.shape), data.train, FeDXLProx(fedxl.partial_auc(lam=1.0), lr=0.3, mu=0.05),
        rounds=10, local_steps=8, batch_size=(8, 8), eval_every=2, validation=data.validation, test=data.test,
    )  # fmt: skip
    print(f"AUROC {result.metrics['test']['auroc']:.3f}")
