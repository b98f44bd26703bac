"""Presets that read their rows: supervised, preference and reward-model training."""

from __future__ import annotations

from nexrl.algorithms.preset_definition import Preset, offline

_REFERENCE = ("a frozen reference: a copy of the policy as the stage begins",)
_PAIRS = "rows with prompt, chosen, rejected"

OFFLINE_PRESETS = (
    Preset(
        name="sft",
        family="sft",
        summary="supervised fine-tuning: cross entropy on the loss mask",
        formula="L = 1/N sum -logp",
        source="maximum likelihood",
        settings=offline("supervised", "cross_entropy"),
        needs=("rows with prompt and answer, or messages",),
    ),
    Preset(
        name="dpo",
        family="preference",
        summary="direct preference optimisation",
        formula="L = 1/P sum -log sigma(beta (d_w - d_l)), d = logp - ref summed over a response",
        source="Rafailov et al. 2023, eq. 7",
        settings=offline("preference", "dpo", beta=0.1),
        needs=(_PAIRS, *_REFERENCE),
    ),
    Preset(
        name="ipo",
        family="preference",
        summary="identity preference optimisation: a squared loss that does not saturate",
        formula="L = 1/P sum (d_w - d_l - 1 / (2 beta))^2, d = logp - ref summed over a response",
        source="Azar et al. 2023, eq. 17 (tau is beta)",
        settings=offline("preference", "ipo", beta=0.1),
        needs=(_PAIRS, *_REFERENCE),
    ),
    Preset(
        name="hinge",
        family="preference",
        summary="hinge loss on the implicit reward margin of dpo",
        formula="L = 1/P sum max(0, 1 - beta (d_w - d_l)), d = logp - ref summed over a response",
        source="Liu et al. 2023 (RSO), hinge-norm; after SLiC, Zhao et al. 2023",
        settings=offline("preference", "hinge", beta=0.1),
        needs=(_PAIRS, *_REFERENCE),
    ),
    Preset(
        name="kto",
        family="preference",
        summary="prospect-theoretic loss on responses labelled good or bad, not paired",
        formula=(
            "L = 1/P sum of w_d (1 - sigma(beta (d - z0))) where desirable,\n"
            "               w_u (1 - sigma(beta (z0 - d))) where not, d = logp - ref of a response\n"
            "z0 = max(0, mean of d over mismatched prompts and responses of the step), no gradient"
        ),
        source="Ethayarajh et al. 2024, eq. 8 of its latest version",
        settings=offline("labelled", "kto", beta=0.1, desirable_weight=1.0, undesirable_weight=1.0),
        needs=("rows with prompt, answer, label", *_REFERENCE),
    ),
    Preset(
        name="simpo",
        family="preference",
        summary="preference by mean logprob with a target margin, without a reference",
        formula="L = 1/P sum -log sigma(beta logp_w / |w| - beta logp_l / |l| - margin)",
        source="Meng et al. 2024, eq. 6; beta 2.0 and gamma 1.0 as in table 8 for Llama-3-Base",
        settings=offline("preference", "simpo", beta=2.0, margin=1.0),
        needs=(_PAIRS,),
    ),
    Preset(
        name="orpo",
        family="preference",
        summary="cross entropy plus an odds-ratio penalty, without a reference",
        formula=(
            "L = 1/P sum -logp_w / |w| - lambda log sigma(log odds_w - log odds_l)\n"
            "odds = p / (1 - p), p = exp(logp / |y|)"
        ),
        source="Hong et al. 2024, eqs. 4, 6 and 7",
        settings=offline("preference", "orpo", odds_coefficient=0.1),
        needs=(_PAIRS,),
    ),
    Preset(
        name="reward_model",
        family="reward_model",
        summary="a scalar score trained on preferred and rejected responses (Bradley-Terry)",
        formula="L = 1/P sum -log sigma(s_w - s_l - margin), s the score after the response",
        source="Ouyang et al. 2022, eq. 1; margin: Touvron et al. 2023 (Llama 2), eq. 2",
        settings=offline("preference", "reward_model"),
        needs=(f"{_PAIRS}, and margin if they differ", "a value head"),
    ),
    Preset(
        name="process_reward_model",
        family="reward_model",
        summary="a score at the end of every step, trained on judged steps",
        formula="L = 1/P sum -y log sigma(s) - (1 - y) log(1 - sigma(s)) over step ends",
        source="Lightman et al. 2023; Wang et al. 2024 (Math-Shepherd), over step ends",
        settings=offline("process", "process_reward_model"),
        needs=("rows with prompt, steps, and a label for each step", "a value head"),
    ),
)
