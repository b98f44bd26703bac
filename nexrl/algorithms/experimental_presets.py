"""Presets around losses that are built from their papers and little used so far."""

from __future__ import annotations

from nexrl.algorithms.preset_definition import Preset, policy

_GROUP = "several rollouts of an item (data.rollout_repeat_n)"
_PREPARED = "a forward pass of each optimizer step beforehand"
_GRPO = {"name": "grpo", "std": "sample"}
_GRPO_ADVANTAGE = "A = (r - mu) / (sd + 1e-6)"
_MEAN_ADVANTAGE = "A = r - mu"
_D = "d = log rho, D its sum over the row, W = exp(D)"

EXPERIMENTAL_PRESETS = (
    Preset(
        name="luspo",
        family="rl",
        summary="gspo without its length bias: a row counts by its length",
        formula=(
            "L = 1/R sum max(-s A, -clip(s, 1 - 2e-3, 1 + 2.5e-3) A), s = exp(mean log rho)\n"
            f"{_GRPO_ADVANTAGE}"
        ),
        source="Liu et al. 2026 (LUSPO), clip range of section 5.1",
        settings=policy(
            advantage=_GRPO,
            loss={
                "name": "luspo",
                "clip_low": 2e-3,
                "clip_high": 2.5e-3,
                "aggregation": "sequence_mean_token_sum",
            },
        ),
        needs=(_GROUP,),
        experimental=True,
    ),
    Preset(
        name="gmpo",
        family="rl",
        summary="the geometric mean of ratios that are clipped token by token",
        formula=(
            "L = 1/R sum 1/n -exp(mean over the row of d, clipped to 0.4 in the direction of A) A\n"
            f"{_GRPO_ADVANTAGE}, d = log rho"
        ),
        source="Zhao et al. 2025 (GMPO)",
        settings=policy(
            advantage=_GRPO,
            loss={
                "name": "gmpo",
                "clip_low": 0.4,
                "clip_high": 0.4,
                "aggregation": "sequence_mean_token_mean",
            },
        ),
        needs=(_GROUP,),
        experimental=True,
    ),
    Preset(
        name="sapo",
        family="rl",
        summary="a soft sigmoid gate in place of the clip",
        formula=(
            "L = 1/R sum 1/n -4/tau sigma(tau (rho - 1)) A, tau 1 where A >= 0, else 1.05\n"
            f"{_GRPO_ADVANTAGE}"
        ),
        source="Gao et al. 2025 (SAPO), eq. 5",
        settings=policy(
            advantage=_GRPO, loss={"name": "sapo", "aggregation": "sequence_mean_token_mean"}
        ),
        needs=(_GROUP,),
        experimental=True,
    ),
    Preset(
        name="vespo",
        family="rl",
        summary="a smooth weight of the whole row's ratio, from a variational bound",
        formula=(
            "L = 1/R sum -sg(W^k exp(lambda (1 - W))) A logp; k, lambda = 2, 3 where A >= 0,\n"
            f"else 3, 2\n{_MEAN_ADVANTAGE}, {_D}"
        ),
        source="Shen et al. 2026 (VESPO), eq. 20",
        settings=policy(
            advantage={"name": "dr_grpo"},
            loss={"name": "vespo", "aggregation": "sequence_mean_token_sum"},
        ),
        needs=(_GROUP,),
        experimental=True,
    ),
    Preset(
        name="topr",
        family="rl",
        summary="successes imitated, failures unlearnt with truncated weights",
        formula=(
            "L = 1/R sum -A logp where A >= 0, -sg(min(W, 1)) A logp where A < 0\n"
            f"{_MEAN_ADVANTAGE}, {_D}"
        ),
        source="Le Roux et al. 2025 (TOPR), eq. 7 and 8; there r is -1 or 1 and has no baseline",
        settings=policy(
            advantage={"name": "dr_grpo"},
            loss={"name": "topr", "clip_high": 0.0, "aggregation": "sequence_mean_token_sum"},
        ),
        needs=(_GROUP,),
        experimental=True,
    ),
    Preset(
        name="kimi",
        family="rl",
        summary="policy gradient with a squared log-ratio penalty of whole rows",
        formula=f"L = 1/R sum -A logp + tau/2 d D, tau 0.1\n{_MEAN_ADVANTAGE}, {_D}",
        source="Kimi k1.5 2025, eq. 3; tau is ours",
        settings=policy(
            advantage={"name": "dr_grpo"},
            loss={"name": "kimi", "aggregation": "sequence_mean_token_sum"},
        ),
        needs=(_GROUP,),
        experimental=True,
    ),
    Preset(
        name="clip_cov",
        family="rl",
        summary="ppo without gradient at a few tokens that cost most entropy",
        formula=(
            "L = 1/N sum max(-rho A, -clip(rho, 0.8, 1.2) A), 0 at 2e-4 N tokens, at least one, drawn\n"
            "from those whose covariance of logp and A in the step lies between 1 and 5: they stay in N\n"
            f"{_GRPO_ADVANTAGE}"
        ),
        source="Cui et al. 2025 (The Entropy Mechanism of RL for Reasoning LLMs), Clip-Cov",
        settings=policy(
            advantage=_GRPO,
            loss={
                "name": "clip_cov",
                "clip_low": 0.2,
                "clip_high": 0.2,
                "aggregation": "token_mean",
            },
        ),
        needs=(_GROUP, _PREPARED),
        experimental=True,
    ),
    Preset(
        name="kl_cov",
        family="rl",
        summary="a penalty at the tokens that cost most entropy, no clip",
        formula=(
            "L = 1/N sum -rho A + |log rho| at the 2e-3 N tokens of largest covariance of logp and A\n"
            f"{_GRPO_ADVANTAGE}"
        ),
        source="Cui et al. 2025 (The Entropy Mechanism of RL for Reasoning LLMs), KL-Cov",
        settings=policy(advantage=_GRPO, loss={"name": "kl_cov", "aggregation": "token_mean"}),
        needs=(_GROUP, _PREPARED, "one optimizer step a batch: the loss is unbounded"),
        experimental=True,
    ),
)
