"""Lengths of completions as a benchmark takes them: all alike, or drawn as real ones are."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Int

from pods_jax.config.fields import Checked, PositiveFraction

SIGMA = 0.5


@dataclass(frozen=True)
class LengthOptions(Checked, key="lengths"):
    """How long completions are."""

    distribution: Literal["fixed", "geometric", "lognormal"] = "fixed"
    """All at the limit, or drawn and cut at it (lognormal with sigma 0.5)."""
    mean: PositiveFraction = 0.4
    """Mean of the drawn lengths before they are cut, as a fraction of the limit."""

    def draw(self, shape: tuple[int, int], most: int, seed: int) -> Int[np.ndarray, "P N"]:
        """Tokens of each completion, 1 to ``most``."""
        rng, mean = np.random.default_rng(seed), self.mean * most
        drawn = {
            "fixed": lambda: np.full(shape, most),
            "geometric": lambda: rng.geometric(1 / max(mean, 1.0), shape),
            "lognormal": lambda: np.rint(rng.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA, shape)),
        }[self.distribution]()
        return np.clip(drawn, 1, most).astype(np.int32)
