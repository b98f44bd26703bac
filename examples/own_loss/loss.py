"""A policy loss whose trust region has no edge: a Gaussian gate in place of ppo's clip.

    term = -sg(exp(-(log rho)^2 / (2 width^2))) rho A

Near rho = 1 it is the plain surrogate; the further a token's probability has moved, the less it is
pushed, in either direction, and never suddenly.
"""

import torch


def gaussian_gate(outputs, inputs, settings):
    """[n] the term of each trained token of an optimizer step; NexRL multiplies by the weights
    (1 / denominator), adds the KL term, differentiates, and sends gradients of logprobs only."""
    log_ratio = outputs["logprobs"] - inputs["proximal_logprobs"]
    gate = torch.exp(-0.5 * (log_ratio.detach() / settings["width"]) ** 2)
    return -gate * torch.exp(log_ratio) * inputs["advantage"]
