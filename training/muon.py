"""Muon: momentum whose update is made orthogonal, for the matrices inside the layers.

Small transformers learn in fewer steps with it than with Adam. Matrices of one shape are stacked
and made orthogonal together: on a CPU a few large products are far quicker than many small ones.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

# Coefficients of the quintic iteration that drives all singular values towards 1.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPSILON = 1e-7


def orthogonalize(matrices: Tensor, num_iterations: int = 5) -> Tensor:
    """Return matrices with the same singular vectors and singular values near 1.

    Args:
        matrices: (count, rows, columns), rows <= columns.
        num_iterations: Newton-Schulz iterations.
    """
    a, b, c = _COEFFICIENTS
    x: Tensor = matrices.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + _EPSILON)
    for _ in range(num_iterations):
        gram = torch.bmm(x, x.transpose(1, 2))
        x = a * x + torch.bmm(torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x)
    return x


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay.

    The update is scaled to the size of Adam's, so that one learning rate serves both.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            stacks: dict[tuple[int, int], list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum: Tensor = state["momentum"]
                momentum.lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(momentum, group["momentum"])
                rows, columns = sorted(update.shape)
                stacks[rows, columns].append((parameter, update))
            for (_, columns), stack in stacks.items():
                updates = [u if u.shape[0] <= u.shape[1] else u.T for _, u in stack]
                directions = orthogonalize(torch.stack(updates))
                step_size = group["lr"] * 0.2 * columns**0.5
                for (parameter, _), direction in zip(stack, directions, strict=True):
                    if parameter.shape != direction.shape:
                        direction = direction.T
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.sub_(direction.to(parameter.dtype), alpha=step_size)
