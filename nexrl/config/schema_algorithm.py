"""Settings of how rewards or preferences become a gradient: `trainer.algorithm`.

A preset (`nexrl/algorithms/presets.py`) fills what is not written; every field can be overridden.
A section that has a `name` or `preset` accepts that one word in place of the mapping:
`algorithm: dapo`, `advantage: rloo`, `loss: cispo`, `correction: tis`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from nexrl.config.section import Section

LossSetting = float | int | str | bool | None


class AdvantageConfig(Section):
    """From rewards to advantages."""

    name: str = "grpo"
    """Estimator (`nexrl algorithms` lists them), or a function `path.py:name`."""
    std: Literal["sample", "population", "none"] = "sample"
    """grpo: standard deviation divided by; `none` leaves it out."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token; per turn for step_returns and gigpo."""
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """gae: lambda of the advantages."""
    critic_lambda: float | None = Field(None, ge=0, le=1)
    """gae: lambda of the critic's targets; null is gae_lambda."""
    length_adaptive: float | None = Field(None, gt=0)
    """gae: alpha of lambda = 1 - 1 / (alpha x length); null keeps gae_lambda."""
    whiten: bool = True
    """gae, reinforce_pp, reinforce_pp_baseline, gdpo: whiten over the batch."""
    pass_k: int = Field(2, ge=1)
    """pass_at_k: k."""
    success_reward: float = 1.0
    """pass_at_k: a trajectory is correct when its reward is at least this."""
    part_weights: dict[str, float] = Field({})
    """gdpo: weight of each reward part; 1 where not named."""
    baseline: Literal["none", "batch", "moving"] = "none"
    """reinforce: what is subtracted from rewards."""
    step_weight: float = Field(1.0, ge=0)
    """gigpo: weight of the turn-level beside the trajectory-level part."""
    distill_coefficient: float = Field(1.0, ge=0)
    """distill: weight of the teacher."""
    task_coefficient: float = Field(0.0, ge=0)
    """distill: weight of the grpo advantage that is added."""


class LossConfig(Section):
    """The policy loss."""

    name: str = "ppo"
    """Per-token loss term (`nexrl algorithms` lists them), or a function `path.py:name`."""
    clip_low: float | None = Field(None, ge=0)
    """Lower clip distance, ratio >= 1 - clip_low; null is the loss's own."""
    clip_high: float | None = Field(None, ge=0)
    """Upper clip distance, ratio <= 1 + clip_high; null is the loss's own."""
    dual_clip: float | None = Field(None, gt=1)
    """ppo: bound on the ratio where the advantage is negative; null is off."""
    settings: dict[str, LossSetting] = Field({})
    """Further settings of the named loss, by its own names."""
    aggregation: Literal[
        "token_mean",
        "sequence_mean_token_mean",
        "sequence_mean_token_sum",
        "constant",
        "trajectory_mean",
    ] = "token_mean"
    """Denominator of the loss over the whole optimizer step."""


class KLConfig(Section):
    """Distance to a frozen reference policy."""

    coefficient: float = Field(0.0, ge=0)
    """Weight of the KL penalty; 0 turns the reference off."""
    estimator: Literal["k1", "k2", "k3", "k1+", "k3+"] = "k3"
    """Estimator; `+` has the value of the one named and the gradient of k2. k1 works only in the
    reward."""
    placement: Literal["loss", "reward"] = "loss"
    """Whether the penalty is a loss term or is subtracted from rewards."""


class EntropyConfig(Section):
    """Entropy bonus."""

    coefficient: float = Field(0.0, ge=0)
    """Weight of the bonus; the start with target."""
    target: float | None = Field(None, gt=0)
    """Entropy in nats to hold: the coefficient rises below it, falls above; null keeps it fixed."""
    rate: float = Field(0.001, gt=0)
    """Step of the adaptive coefficient after each batch."""


class CorrectionConfig(Section):
    """Off-policy correction between engine and trainer; needs recompute_proximal."""

    preset: Literal["none", "tis", "mis", "icepop", "sequence_mis", "geo_mask"] = "none"
    """Named combination of level, action and bounds."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """Unit of the ratio: each token, product over a row, geometric mean."""
    action: Literal["none", "truncate", "mask", "reject"] = "none"
    """What a ratio beyond the bounds does: `truncate` caps the weight, `mask` zeroes its unit,
    `reject` zeroes its whole row."""
    low: float | None = Field(None, ge=0)
    """Lower bound of the ratio; null is none."""
    high: float | None = Field(None, gt=0)
    """Upper bound of the ratio; null is none."""


class ShapingConfig(Section):
    """Changes to rewards and masks before advantages."""

    overlong_cache: int | None = Field(None, ge=1)
    """Tokens before the longest response from which a penalty falls linearly to -overlong_penalty
    (DAPO); null is off."""
    overlong_penalty: float = Field(1.0, ge=0)
    """Penalty at the longest response."""
    mask_truncated: bool = False
    """Leave truncated trajectories out of the loss and its denominator."""
    length_penalty: float = Field(0.0, ge=0)
    """Subtracted from the reward for each trained token."""


class CriticConfig(Section):
    """The critic of gae: a value head on the same kind of model, with its own optimizer."""

    lr: float = Field(1e-5, ge=0)
    """Learning rate, constant."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay, on matrices only."""
    grad_clip_norm: float = Field(1.0, ge=0)
    """Global gradient-norm bound; 0 is off."""
    clip: float | None = Field(0.2, gt=0)
    """Bound on the change of a value from the one before the batch; null is off."""
    warmup_batches: int = Field(0, ge=0)
    """Batches that train the critic alone, the policy unchanged."""


class PreferenceConfig(Section):
    """Losses on preferred and rejected responses, and on labelled ones."""

    beta: float = Field(0.1, gt=0)
    """dpo, ipo, hinge, kto, simpo: inverse temperature."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """dpo: probability that a label is wrong."""
    margin: float = Field(0.0, ge=0)
    """simpo: gamma; reward_model: margin when a row names none."""
    desirable_weight: float = Field(1.0, ge=0)
    """kto: weight of desirable responses."""
    undesirable_weight: float = Field(1.0, ge=0)
    """kto: weight of undesirable responses."""
    odds_coefficient: float = Field(0.1, ge=0)
    """orpo: lambda, weight of the odds-ratio term."""
    sft_coefficient: float = Field(0.0, ge=0)
    """dpo, ipo, hinge, simpo: weight of a cross-entropy term on preferred responses."""


class TeacherConfig(Section):
    """A frozen teacher on the train service, for distillation."""

    path: str | None = None
    """Hugging Face model folder with the student's tokenizer; null reads the column
    teacher_logprobs of trajectories."""
    top_k: int = Field(0, ge=0)
    """Most likely tokens of the teacher compared at each position; 0 compares the drawn token
    only."""


class AlgorithmConfig(Section):
    """How rewards or preferences become a gradient."""

    preset: str = "grpo"
    """Published algorithm that fills what is not written; `nexrl algorithms` lists them."""
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    kl: KLConfig = KLConfig()
    entropy: EntropyConfig = EntropyConfig()
    correction: CorrectionConfig = CorrectionConfig()
    shaping: ShapingConfig = ShapingConfig()
    critic: CriticConfig = CriticConfig()
    preference: PreferenceConfig = PreferenceConfig()
    teacher: TeacherConfig = TeacherConfig()
    recompute_proximal: bool = False
    """Recompute logprobs before the first optimizer step and use them in the ratio instead of the
    engine's."""
    greedy_baseline: bool = False
    """Draw and score a greedy completion of each draw as well; remax needs its reward."""
    trust_region: Literal["auto", "none"] = "auto"
    """`none` allows an unbounded loss off-policy."""
