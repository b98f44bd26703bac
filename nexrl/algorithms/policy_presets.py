"""Presets that learn from rewards on sampled tokens: estimator, policy loss, denominator.

Each writes out what defines the method, also where it equals a default, so that a preset reads the
same when a default moves. Learning rates and batch sizes are the user's.
"""

from __future__ import annotations

from nexrl.algorithms.preset_definition import Preset, policy

_REFERENCE = "a frozen reference: a copy of the policy as the stage begins"
_CRITIC = "a critic: a value head on the same kind of model, with its own optimizer"
_GROUP = "several rollouts of an item (data.rollout_repeat_n)"

_CLIP_20 = "max(-rho A, -clip(rho, 0.8, 1.2) A)"
_CLIP_28 = "max(-rho A, -clip(rho, 0.8, 1.28) A)"
_CLIPPED = {"name": "ppo", "clip_low": 0.2, "clip_high": 0.2}
_CLIPPED_HIGHER = {"name": "ppo", "clip_low": 0.2, "clip_high": 0.28}
_TOKEN_MEAN = {"aggregation": "token_mean"}
_ROW_MEAN = {"aggregation": "sequence_mean_token_mean"}
_ROW_SUM = {"name": "reinforce", "aggregation": "sequence_mean_token_sum"}
_GRPO_ADVANTAGE = "A = (r - mu) / (sd + 1e-6)"
_GRPO = {"name": "grpo", "std": "sample"}

POLICY_PRESETS = (
    Preset(
        name="grpo",
        family="rl",
        summary="group-relative advantages, clipped, mean of row means, KL to a reference",
        formula=f"L = 1/R sum 1/n [ {_CLIP_20} + 0.04 sg(rho) k3 ]\n{_GRPO_ADVANTAGE}",
        source="Shao et al. 2024 (DeepSeekMath), eq. 3 and 4, KL coefficient of section 4.2; there "
        "without sg(rho), which is 1 on policy, and without a number for the clip",
        settings=policy(
            advantage=_GRPO,
            loss={**_CLIPPED, **_ROW_MEAN},
            kl={"coefficient": 0.04, "estimator": "k3", "placement": "loss"},
        ),
        needs=(_GROUP, _REFERENCE),
    ),
    Preset(
        name="dr_grpo",
        family="rl",
        summary="grpo without its biases: no deviation, no division by the length",
        formula=f"L = 1/(T max_tokens) sum {_CLIP_20}\nA = r - mu",
        source="Liu et al. 2025 (Understanding R1-Zero-like training), section 3.2",
        settings=policy(
            advantage={"name": "dr_grpo"}, loss={**_CLIPPED, "aggregation": "constant"}
        ),
        needs=(_GROUP,),
    ),
    Preset(
        name="dapo",
        family="rl",
        summary="clip higher, token mean, soft overlong penalty, groups without signal replaced",
        formula=(
            f"L = 1/N sum {_CLIP_28}\n{_GRPO_ADVANTAGE}\n"
            "r falls linearly by up to 1 over the last fifth of max_tokens;\n"
            "groups of equal rewards are replaced before the step: not in N"
        ),
        source="Yu et al. 2025 (DAPO), eq. 8, 9, 11 and 13; penalty over 4,096 of 20,480 tokens",
        settings=policy(
            advantage=_GRPO,
            loss={**_CLIPPED_HIGHER, **_TOKEN_MEAN},
            shaping={"overlong_penalty": 1.0},
            pool={
                "dynamic_sampling": {
                    "filters": ["constant_reward"],
                    "refill_factor": 3.0,
                    "on_exhausted": "train_short",
                }
            },
        ),
        shares={
            "trainer.algorithm.shaping.overlong_cache": ("rollout_worker.sampling.max_tokens", 0.2)
        },
        needs=(_GROUP,),
    ),
    Preset(
        name="ppo",
        family="rl",
        summary="generalised advantages of a critic, clipped policy and value loss",
        formula=(
            f"L = 1/N sum {_CLIP_20}\n"
            "A = sum over later trained tokens of (gamma lambda)^k delta, whitened over the batch,\n"
            "delta = reward + gamma V(next) - V, gamma 1, lambda 0.95\n"
            "critic: 1/N sum 1/2 max((V - G)^2, (V_old + clip(V - V_old, -0.2, 0.2) - G)^2)"
        ),
        source="Schulman et al. 2017, eq. 7 and 11; Schulman et al. 2016, eq. 16; Ouyang et al. 2022",
        settings=policy(
            advantage={"name": "gae", "gamma": 1.0, "gae_lambda": 0.95, "whiten": True},
            loss={**_CLIPPED, **_TOKEN_MEAN},
            critic={"clip": 0.2},
        ),
        needs=(_CRITIC,),
    ),
    Preset(
        name="vapo",
        family="rl",
        summary="ppo for long answers: decoupled and length-adaptive lambda, critic warm-up",
        formula=(
            f"L = 1/N sum {_CLIP_28}\n"
            "A = gae with lambda = 1 - 1 / (0.05 length); the critic learns returns of lambda 1,\n"
            "alone for the first 50 batches. Without the paper's imitation of right answers"
        ),
        source="Yue et al. 2025 (VAPO), section 4",
        settings=policy(
            advantage={
                "name": "gae",
                "gamma": 1.0,
                "critic_lambda": 1.0,
                "length_adaptive": 0.05,
                "whiten": True,
            },
            loss={**_CLIPPED_HIGHER, **_TOKEN_MEAN},
            critic={"clip": 0.2, "warmup_batches": 50},
        ),
        needs=(_CRITIC,),
    ),
    Preset(
        name="rloo",
        family="rl",
        summary="REINFORCE whose baseline is the mean of the item's other rollouts",
        formula="L = 1/R sum -A logp\nA = r - mean of the others = size / (size - 1) (r - mu)",
        source="Ahmadian et al. 2024 (Back to Basics); after Kool et al. 2019",
        settings=policy(advantage={"name": "rloo"}, loss=_ROW_SUM),
        needs=(_GROUP, "one optimizer step a batch: the loss is unbounded"),
    ),
    Preset(
        name="opo",
        family="rl",
        summary="exact on-policy REINFORCE with the length-weighted optimal baseline",
        formula="L = 1/R sum -A logp\nA = r - sum(length r) / sum(length) over the group",
        source="Hao et al. 2025 (OPO)",
        settings=policy(advantage={"name": "opo"}, loss=_ROW_SUM),
        needs=(_GROUP, "one optimizer step a batch: the loss is unbounded"),
    ),
    Preset(
        name="remax",
        family="rl",
        summary="REINFORCE whose baseline is the reward of the greedy completion",
        formula="L = 1/R sum -A logp\nA = r - r(greedy completion of the same draw)",
        source="Li et al. 2024 (ReMax), algorithm 1",
        settings=policy(advantage={"name": "remax"}, loss=_ROW_SUM, greedy_baseline=True),
        needs=(
            "a greedy completion of each draw, scored as well",
            "one optimizer step a batch: the loss is unbounded",
        ),
    ),
    Preset(
        name="reinforce",
        family="rl",
        summary="the plain policy gradient, less the mean reward of the batch",
        formula="L = 1/R sum -A logp\nA = r - mean reward of the batch",
        source="Williams 1992",
        settings=policy(advantage={"name": "reinforce", "baseline": "batch"}, loss=_ROW_SUM),
        needs=("one optimizer step a batch: the loss is unbounded",),
    ),
    Preset(
        name="reinforce_pp",
        family="rl",
        summary="returns with a KL penalty at each token, whitened over the batch, clipped",
        formula=(
            f"L = 1/R sum 1/n {_CLIP_20}\n"
            "A = reward to go of r at the last token - 0.01 k1 at each, whitened over the batch's tokens"
        ),
        source="Hu et al. 2025 (REINFORCE++), eq. 1, 4 and 5; the KL coefficient of its first version",
        settings=policy(
            advantage={"name": "reinforce_pp", "gamma": 1.0, "whiten": True},
            loss={**_CLIPPED, **_ROW_MEAN},
            kl={"coefficient": 0.01, "estimator": "k1", "placement": "reward"},
        ),
        needs=(_REFERENCE,),
    ),
    Preset(
        name="reinforce_pp_baseline",
        family="rl",
        summary="rewards less the group's mean, then whitened over the batch, clipped, KL in the loss",
        formula=(
            f"L = 1/R sum 1/n [ {_CLIP_20} + 1e-5 sg(rho) k2 ]\n"
            "A = r - mu, whitened over the batch's tokens"
        ),
        source="Hu et al. 2025 (REINFORCE++), eq. 1 and 6 to 8; the KL coefficient of its code",
        settings=policy(
            advantage={"name": "reinforce_pp_baseline", "whiten": True},
            loss={**_CLIPPED, **_ROW_MEAN},
            kl={"coefficient": 1e-5, "estimator": "k2", "placement": "loss"},
        ),
        needs=(_GROUP, _REFERENCE),
    ),
    Preset(
        name="gdpo",
        family="rl",
        summary="several rewards, each normalised in its group before they are added",
        formula=(
            f"L = 1/R sum 1/n {_CLIP_20}\n"
            "A = sum over reward parts of weight (part - mu) / sd, whitened over the batch"
        ),
        source="GDPO 2026",
        settings=policy(advantage={"name": "gdpo", "whiten": True}, loss={**_CLIPPED, **_ROW_MEAN}),
        needs=(_GROUP, "named reward parts"),
    ),
    Preset(
        name="pass_at_k",
        family="rl",
        summary="advantages of the chance that one of k answers is right",
        formula=(
            f"L = 1/N sum {_CLIP_28}\n"
            "R = 1 - C(wrong, k) / C(size, k), s = sqrt(R (1 - R)); right: A = (1 - R) / s;\n"
            "wrong: A = (1 - R - C(wrong - 1, k - 1) / C(size - 1, k - 1)) / s"
        ),
        source="Chen et al. 2025 (Pass@k Training), eq. 11 to 15",
        settings=policy(
            advantage={"name": "pass_at_k", "pass_k": 4, "success_reward": 1.0},
            loss={**_CLIPPED_HIGHER, **_TOKEN_MEAN},
        ),
        needs=("more than k rollouts of an item, rewards that say right or wrong",),
    ),
    Preset(
        name="cispo",
        family="rl",
        summary="truncated importance weights: every token keeps a gradient",
        formula=f"L = 1/N sum -sg(min(rho, 5)) A logp\n{_GRPO_ADVANTAGE}",
        source="MiniMax-M1 2025, eq. 4 and 5; cap 5: ScaleRL 2025",
        settings=policy(
            advantage=_GRPO,
            loss={"name": "cispo", "clip_low": None, "clip_high": 4.0, **_TOKEN_MEAN},
        ),
        needs=(_GROUP,),
    ),
    Preset(
        name="gspo",
        family="rl",
        summary="one length-normalised ratio for a whole row, clipped",
        formula=(
            "L = 1/R sum 1/n max(-s A, -clip(s, 1 - 3e-4, 1 + 4e-4) A), s = exp(mean log rho)\n"
            f"{_GRPO_ADVANTAGE}"
        ),
        source="Zheng et al. 2025 (GSPO), eq. 5 and 7, clip range of section 5.1",
        settings=policy(
            advantage=_GRPO,
            loss={"name": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, **_ROW_MEAN},
        ),
        needs=(_GROUP,),
    ),
    Preset(
        name="gspo_token",
        family="rl",
        summary="gspo for advantages that differ between the tokens of a row",
        formula=(
            "L = 1/R sum 1/n max(-s_t A, -clip(s_t, 1 - 3e-4, 1 + 4e-4) A),\n"
            f"s_t = sg(s) pi_t / sg(pi_t), s = exp(mean log rho)\n{_GRPO_ADVANTAGE}"
        ),
        source="Zheng et al. 2025 (GSPO), eq. 13 and 14",
        settings=policy(
            advantage=_GRPO,
            loss={"name": "gspo_token", "clip_low": 3e-4, "clip_high": 4e-4, **_ROW_MEAN},
        ),
        needs=(_GROUP,),
    ),
    Preset(
        name="bapo",
        family="rl",
        summary="ppo whose clip range moves until rewarded tokens have their share of the loss",
        formula=(
            "L = 1/N sum max(-rho A, -clip(rho, c_low, c_high) A); for each optimizer step c_high\n"
            "rises from 1.2 to 3, then c_low from 0.6 to 0.9, until tokens with A > 0 give 40%\n"
            f"{_GRPO_ADVANTAGE}"
        ),
        source="Xi et al. 2025 (BAPO), eq. 8, algorithm 1, numbers of section 5.1",
        settings=policy(advantage=_GRPO, loss={"name": "bapo", **_TOKEN_MEAN}),
        needs=(_GROUP, "a forward pass of each optimizer step beforehand"),
    ),
    Preset(
        name="dppo",
        family="rl",
        summary="tokens masked where their probability, not its ratio, has moved too far",
        formula=(
            "L = 1/(T max_tokens) sum -M rho A, M = 0 where pi - behavior > 0.15 and A > 0,\n"
            "or behavior - pi > 0.15 and A < 0\nA = r - mu"
        ),
        source="Qi et al. 2026 (DPPO), binary total variation; advantage and mean as in its code",
        settings=policy(
            advantage={"name": "dr_grpo"},
            loss={"name": "dppo", "clip_low": 0.15, "clip_high": 0.15, "aggregation": "constant"},
        ),
        needs=(_GROUP,),
    ),
    Preset(
        name="decoupled_ppo",
        family="rl",
        summary="ppo around a recomputed policy, corrected for the older one that drew the tokens",
        formula=(
            f"L = 1/N sum c {_CLIP_20}, c = sg(exp(prox - behavior)), 0 where above 5:\n"
            f"masked tokens stay in N\n{_GRPO_ADVANTAGE}"
        ),
        source="Fu et al. 2025 (AReaL), bound of its code; after Hilton et al. 2022",
        settings=policy(
            advantage=_GRPO,
            loss={**_CLIPPED, **_TOKEN_MEAN},
            correction={"level": "token", "action": "mask", "low": None, "high": 5.0},
            recompute_proximal=True,
        ),
        needs=(_GROUP, "a forward pass of the batch beforehand"),
    ),
    Preset(
        name="gigpo",
        family="rl",
        summary="group in group: trajectories compared in a group, turns at equal states",
        formula=(
            f"L = 1/R sum 1/n [ {_CLIP_20} + 0.01 sg(rho) k3 ]\n"
            "A = A of the trajectory in its group + A of the turn's discounted reward among turns\n"
            "of the group that began in the same state, gamma 0.95 a turn"
        ),
        source="Feng et al. 2025 (GiGPO), eq. 3 to 8, numbers of its code",
        settings=policy(
            advantage={"name": "gigpo", "gamma": 0.95, "step_weight": 1.0, "std": "sample"},
            loss={**_CLIPPED, **_ROW_MEAN},
            kl={"coefficient": 0.01, "estimator": "k3", "placement": "loss"},
        ),
        needs=(_GROUP, "turns with an anchor state (a custom worker)", _REFERENCE),
    ),
    Preset(
        name="step_returns",
        family="rl",
        summary="each turn credited with its own discounted return",
        formula=f"L = 1/N sum {_CLIP_20}\nA = sum over this and later turns of 0.95^k reward",
        source="discounted reward to go, Sutton and Barto 2018, eq. 3.8, by turns",
        settings=policy(
            advantage={"name": "step_returns", "gamma": 0.95}, loss={**_CLIPPED, **_TOKEN_MEAN}
        ),
        needs=("turns with a reward (a custom worker)",),
    ),
    Preset(
        name="distill",
        family="rl",
        summary="on-policy distillation: the teacher scores the student's own tokens",
        formula="L = 1/N sum -rho A\nA = -sg(behavior - teacher), logprobs of the drawn token",
        source="Agarwal et al. 2024 (GKD); Lu et al. 2025 (On-Policy Distillation)",
        settings=policy(
            advantage={"name": "distill", "distill_coefficient": 1.0, "task_coefficient": 0.0},
            loss={"name": "importance_sampling", **_TOKEN_MEAN},
        ),
        needs=(
            "trainer.algorithm.teacher.path, or teacher_logprobs of a custom worker",
            "one optimizer step a batch: the loss is unbounded",
        ),
    ),
    Preset(
        name="distill_top_k",
        family="rl",
        summary="on-policy distillation on the teacher's most likely tokens",
        formula=(
            "L = 1/N sum over 16 candidates and one for all other tokens of s (log s - log t),\n"
            "s the student's and t the teacher's probabilities, candidates the teacher's likeliest"
        ),
        source="Agarwal et al. 2024 (GKD); Gu et al. 2024 (MiniLLM), reverse KL",
        settings=policy(
            advantage={"name": "reinforce", "baseline": "none"},
            loss={"name": "reverse_kl_top_k", **_TOKEN_MEAN},
            teacher={"top_k": 16},
        ),
        needs=("trainer.algorithm.teacher.path",),
    ),
)
