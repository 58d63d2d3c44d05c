"""A data set of your own: a function from its settings to `Splits`. Here three hospitals with different machines.

From Python: python own_data.py. From TOML, by its name: fedxl train own_data.toml (in this folder).
"""

import torch
from torch import nn

import fedxl
from fedxl import Examples, Splits
from fedxl.data import from_arrays


def load(hospitals: int = 3, patients: int = 200, seed: int = 0) -> Splits:
    """Each hospital's machine has its own offset. `hospitals` and `patients` are settings of [data] in TOML."""
    generator = torch.Generator().manual_seed(seed)

    def measured(offset: float) -> Examples:
        y = (torch.rand(patients, generator=generator) < 0.2).long()
        x = torch.randn(patients, 6, generator=generator)
        return Examples(x + 0.7 * y[:, None] + offset, y[:, None])

    clients = [measured(0.5 * number) for number in range(hospitals)]
    return Splits(from_arrays(clients), validation=measured(0.5), test=measured(0.5))


if __name__ == "__main__":
    data = load(hospitals=4)
    result = fedxl.fit(
        nn.Linear(6, 1), data.train, fedxl.FeDXL2(fedxl.partial_auc(lam=1.0), lr=0.1),
        rounds=10, local_steps=8, batch_size=(8, 8), eval_every=2, validation=data.validation, test=data.test,
    )  # fmt: skip
    print(f"AUROC {result.metrics['test']['auroc']:.3f}")
