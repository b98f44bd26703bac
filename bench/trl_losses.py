"""TRL's own loss code on given tensors; run by the Python of an environment that has TRL.

    python -m tests.certify.trl_comparison  -> JSON on stdin -> this -> JSON on stdout

Each request names a function below and its tensors. Trainers are not built: their loss methods
run on an object that has the attributes they read, and a model that returns the logprobs given.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
import trl
from trl.experimental.cpo import CPOTrainer
from trl.experimental.gkd import GKDTrainer
from trl.experimental.gmpo import GMPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.reward_trainer import RewardTrainer

GRPO = {
    "aux_loss_enabled": False,
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "importance_sampling_level": "token",
    "loss_type": "grpo",
    "beta": 0.0,
    "epsilon_low": 0.2,
    "epsilon_high": 0.28,
    "use_vllm": False,
    "vllm_importance_sampling_correction": False,
    "max_completion_length": 8,
    "current_gradient_accumulation_steps": 1,
    "_entropy_bonus_enabled": False,
}
GRPO_ARGS = {
    "delta": None,
    "use_bias_correction_kl": False,
    "steps_per_generation": 1,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
}


def stand_in(**attributes):
    """An object for `self`: attributes as given, metrics swallowed, one process."""
    trainer = MagicMock()
    trainer.accelerator.gather = trainer.accelerator.gather_for_metrics = lambda x: x
    trainer.accelerator.reduce = lambda x, reduction: x
    trainer.accelerator.num_processes = 1
    trainer.accelerator.device = torch.device("cpu")
    trainer._total_train_tokens, trainer._tp_size = 0, 1
    for name, value in attributes.items():
        setattr(trainer, name, value)
    return trainer


def outputs_of(logprobs):
    """What TRL's models return beside logprobs, for its metrics."""
    zeros = torch.zeros_like(logprobs)
    return SimpleNamespace(
        log_probs=logprobs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool()
    )


def grpo(request, live):
    mask = torch.tensor(request["mask"], dtype=torch.long)
    own = GMPOTrainer if request.get("gmpo") else GRPOTrainer
    trainer = stand_in(**{**GRPO, **request["attributes"]})
    trainer.args = SimpleNamespace(**{**GRPO_ARGS, **request.get("args", {})})
    trainer.get_gamma_weights = GRPOTrainer.get_gamma_weights
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (
        live["logprobs"],
        torch.zeros_like(live["logprobs"]),
        None,
    )
    ids = torch.zeros_like(mask)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1] + 1,
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": torch.tensor(request["advantages"], dtype=torch.float64),
        "old_per_token_logps": torch.tensor(request["proximal"], dtype=torch.float64),
        "ref_per_token_logps": torch.tensor(request["reference"], dtype=torch.float64),
        "num_items_in_batch": mask.sum(),
    }
    return own._compute_loss(trainer, None, inputs)


def dpo(request, live):
    """Rows are [chosen..., rejected...]; the prompt is one token, so TRL's shift drops it."""
    mask = torch.tensor(request["mask"], dtype=torch.long)
    shifted = torch.cat([torch.zeros_like(mask[:, :1]), mask], dim=1)
    trainer = stand_in(
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        use_weighting=False,
        label_smoothing=0.0,
        **request["attributes"],
    )
    chosen, rejected = torch.tensor(request["reference_sums"], dtype=torch.float64).chunk(2)
    inputs = {
        "input_ids": torch.zeros_like(shifted),
        "attention_mask": torch.ones_like(shifted),
        "completion_mask": shifted,
        "ref_chosen_logps": chosen,
        "ref_rejected_logps": rejected,
    }
    masked = live["logprobs"] * mask
    return DPOTrainer._compute_loss(trainer, lambda **_: outputs_of(masked), inputs, False)


def kto(request, live):
    sums = live["logprobs"]
    ones = torch.ones(len(sums), 2, dtype=torch.long)
    trainer = stand_in(
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        calculate_KL=True,
        loss_type="kto",
        **request["attributes"],
    )
    mismatched = torch.tensor(request["mismatched"], dtype=torch.float64)
    trainer._compute_kl_logps = lambda *_: mismatched
    inputs = {
        "input_ids": torch.zeros_like(ones),
        "attention_mask": ones,
        "completion_mask": ones,
        "label": torch.tensor(request["desirable"]),
        "ref_logps": torch.tensor(request["reference_sums"], dtype=torch.float64),
        "ref_KL_logps": torch.zeros_like(mismatched),
    }
    return KTOTrainer._compute_loss(trainer, lambda **_: outputs_of(sums[:, None]), inputs, False)


def simpo(request, live):
    trainer = stand_in(alpha=0.0, loss_type="simpo", label_smoothing=0.0, **request["attributes"])
    return CPOTrainer.cpo_loss(trainer, live["chosen"], live["rejected"])[0].mean()


def orpo(request, live):
    trainer = stand_in(**request["attributes"])
    return -ORPOTrainer.odds_ratio_loss(trainer, live["chosen"], live["rejected"])[0].mean()


def reward_model(request, live):
    trainer = stand_in(args=SimpleNamespace(center_rewards_coefficient=None))
    scores = torch.cat([live["chosen"], live["rejected"]])[:, None]
    inputs = {
        "margin": torch.tensor(request["margin"], dtype=torch.float64),
        "attention_mask": torch.ones(1),
    }
    return RewardTrainer.compute_loss(trainer, lambda **_: SimpleNamespace(logits=scores), inputs)


def jsd(request, live):
    teacher = torch.tensor(request["teacher"], dtype=torch.float64)
    return GKDTrainer.generalized_jsd_loss(
        live["logits"][None], teacher[None], beta=request["beta"], reduction="sum"
    )


FUNCTIONS = {f.__name__: f for f in (grpo, dpo, kto, simpo, orpo, reward_model, jsd)}


def answer(request):
    live = {
        key: torch.tensor(value, dtype=torch.float64).requires_grad_()
        for key, value in request["live"].items()
    }
    loss = FUNCTIONS[request["function"]](request, live)
    loss.backward()
    return {
        "loss": float(loss.detach()),
        "gradients": {key: tensor.grad.tolist() for key, tensor in live.items()},
    }


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    answers = {name: answer(request) for name, request in asked.items()}
    print(json.dumps({"version": trl.__version__, "answers": answers}))
