"""KL divergence from the reference, estimated on the sampled tokens (docs/objective.md, equations 9 to 11).

With d = log pi(y_t) - log pi_ref(y_t) (Schulman 2020, "Approximating KL divergence"):

    k1  d                  unbiased, large variance, can be negative
    k2  d^2 / 2            biased, never negative
    k3  exp(-d) - 1 + d    unbiased, never negative

What is minimised is not the value but what its gradient leads to, for tokens drawn from pi:

    k1  as a loss, grad d = grad log pi has expectation 0: it would be noise and no penalty. So the value is k1's and
        the gradient k2's (verl calls this k1+).
    k2  d * grad log pi: the gradient of KL(pi || pi_ref), without bias.
    k3  (1 - exp(-d)) * grad log pi: in expectation the gradient of KL(pi_ref || pi), which agrees with k2's to first
        order in d. It is bounded where pi is the larger, and what TRL and GRPO do.
"""

from torch import Tensor


def kl_estimate(logprobs_C: Tensor, reference_C: Tensor, estimator: str) -> Tensor:
    """[C] estimates of KL(pi || pi_ref) at each token, differentiable in `logprobs_C`; `reference_C` is a constant."""
    difference = logprobs_C - reference_C
    match estimator:
        case "k1":
            half_square = difference**2 / 2
            return half_square + (difference - half_square).detach()
        case "k2":
            return difference**2 / 2
        case "k3":
            return (-difference).exp() - 1 + difference
    raise ValueError(f"unknown KL estimator {estimator!r}")
