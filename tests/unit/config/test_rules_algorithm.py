"""Rules of `trainer.algorithm`: what cannot be composed is refused with key, value and reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nexrl.algorithms.advantages import ADVANTAGES
from nexrl.algorithms.aggregation import AGGREGATIONS
from nexrl.algorithms.losses import LOSSES
from nexrl.config.loader import load_run_config
from nexrl.config.rules_algorithm import policy_losses
from nexrl.errors import ConfigError

MakeRecipe = Callable[..., Path]
A = "trainer.algorithm"
CUSTOM_WORKER = (
    "rollout_worker.type=custom",
    "rollout_worker.custom_rollout_worker_module_path=w.py",
    "rollout_worker.custom_rollout_worker_class_name=W",
)


def refused(recipe: Path, *overrides: str) -> str:
    """The text of the error that a recipe must raise."""
    with pytest.raises(ConfigError) as caught:
        load_run_config(recipe, overrides)
    return str(caught.value)


REFUSED = [
    ([f"{A}.loss=pppo"], "no policy loss is named 'pppo'; did you mean ppo? (accepted: reinforce,"),
    ([f"{A}.loss=PPO"], "no policy loss is named 'PPO'; did you mean ppo? (accepted: reinforce,"),
    ([f"{A}=DR-GRPO"], "no preset is named 'DR-GRPO'; did you mean dr_grpo? (accepted: grpo,"),
    ([f"{A}.loss=forward_kl", f"{A}.teacher.path=t"], "did you mean forward_kl_top_k?"),
    ([f"{A}.loss=cross_entropy"], "cross_entropy does not learn from rewards"),
    ([f"{A}.loss=dpo"], "dpo is no policy loss; write trainer.algorithm: dpo"),
    ([f"{A}.advantage=gro"], "no estimator is named 'gro'; did you mean grpo?"),
    ([f"{A}.loss=file.py"], "or a function `path.py:name`"),
    ([f"{A}=dpo", f"{A}.loss=ipo"], "loss.name must be dpo for trainer.algorithm: dpo, got ipo"),
    ([f"{A}=sft", f"{A}.loss=ppo"], "loss.name must be cross_entropy for trainer.algorithm: sft"),
    (
        [f"{A}.loss=reinforce", f"{A}.loss.clip_low=0.1"],
        "loss.clip_low is no setting of loss reinforce (its settings: none), got 0.1",
    ),
    ([f"{A}.loss=gmpo", f"{A}.loss.dual_clip=3"], "dual_clip is no setting of loss gmpo"),
    (
        [f"{A}.loss=bapo", f"{A}.loss.settings={{positive_shares: 0.5}}"],
        "settings.positive_shares is no setting of loss bapo; did you mean positive_share?",
    ),
    ([f"{A}.loss.settings={{clip_low: 0.1}}"], "clip_low is written trainer.algorithm.loss.clip_"),
    (
        [f"{A}.loss.settings={{kl_coefficient: 1}}"],
        "kl_coefficient is written trainer.algorithm.kl.coefficient",
    ),
    (
        [f"{A}=bapo", f"{A}.loss.settings={{positive_share: 2}}"],
        "positive_share must be between 0 and 1, got 2",
    ),
    (
        [f"{A}=bapo", f"{A}.loss.clip_high=0.3", f"{A}.loss.settings={{positive_share: 2}}"],
        "trainer.algorithm.loss.settings.positive_share: loss setting positive_share must be",
    ),
    (
        [f"{A}=gspo", f"{A}.loss.aggregation=token_mean"],
        "aggregation must be sequence_mean_token_mean for loss gspo, which is defined for no other",
    ),
    ([f"{A}.kl.estimator=k1"], "got k1: its gradient is zero in expectation"),
    (
        [f"{A}.kl.estimator=k1+", f"{A}.kl.placement=reward"],
        "kl.estimator must be k1, k2 or k3 with trainer.algorithm.kl.placement reward, got k1+",
    ),
    (
        [
            f"{A}=distill_top_k",
            f"{A}.teacher.path=t",
            f"{A}.kl=" + "{coefficient: 0.1, placement: reward}",
        ],
        "placement must be loss with trainer.algorithm.loss reverse_kl_top_k, got reward",
    ),
    (
        [f"{A}.correction=tis", f"{A}.recompute_proximal=false"],
        "recompute_proximal must be true for trainer.algorithm.correction tis, got false",
    ),
    (
        [f"{A}.correction=icepop", f"{A}.correction.low=6"],
        "correction.low must be below trainer.algorithm.correction.high, got 6.0 and 5.0",
    ),
    ([f"{A}.correction.action=mask"], "needs trainer.algorithm.correction.low or"),
    (
        [f"{A}.correction.high=2"],
        "correction.high is 2.0, and it is used only with trainer.algorithm.correction.action, "
        "which is none",
    ),
    (
        [f"{A}.correction=mis", f"{A}.correction.action=none"],
        "correction.preset mis acts, and trainer.algorithm.correction.action is none",
    ),
    (
        [f"{A}.critic.lr=1e-3"],
        "critic.lr is 0.001, and it is used only with trainer.algorithm.advantage gae",
    ),
    (
        [f"{A}=remax", f"{A}.greedy_baseline=false"],
        "greedy_baseline must be true for trainer.algorithm.advantage remax",
    ),
    (
        [f"{A}=gigpo"],
        "gigpo needs turns with an anchor state, which rollout_worker.type single_turn does not",
    ),
    (
        [f"{A}=step_returns"],
        "step_returns needs turns with a reward, which rollout_worker.type single_turn",
    ),
    (
        [f"{A}=pass_at_k", f"{A}.advantage.pass_k=2"],
        "pass_k must be less than data.rollout_repeat_n = 2, got 2",
    ),
    ([f"{A}=opo", "data.rollout_repeat_n=1"], "must be at least 2 for trainer.algorithm.advantage"),
    ([f"{A}=distill"], "teacher.path must be set for trainer.algorithm.advantage distill"),
    ([f"{A}.loss=reverse_kl"], "teacher.path must be set for trainer.algorithm.loss reverse_kl"),
    ([f"{A}=distill_top_k"], "set trainer.algorithm.teacher.path and trainer.algorithm.teacher.t"),
    (
        [f"{A}=distill", f"{A}.teacher.path=t", f"{A}.teacher.top_k=4"],
        "teacher.top_k must be 0 for loss importance_sampling, got 4",
    ),
    ([f"{A}.teacher.path=t"], "teacher.path is set and nothing asks for a teacher"),
    (
        [f"{A}=dapo", f"{A}.shaping.overlong_cache=8"],
        "must be less than rollout_worker.sampling.max_tokens = 8, got 8",
    ),
    ([f"{A}=kl_cov", "trainer.num_optimizer_steps=2"], "kl_cov is unbounded and trainer.num_opti"),
    ([f"{A}=dpo", "data.rejected_key=chosen"], "data.chosen_key and data.rejected_key must differ"),
    (
        [f"{A}=kto", "rollout_worker.type=preference"],
        "rollout_worker.type must be labelled or custom for trainer.algorithm: kto, got preference",
    ),
    (["rollout_worker.type=process"], "rows of process are trained by process_reward_model"),
    (
        [f"{A}=dpo", "trajectory_pool.dynamic_sampling.filters=[constant_reward]"],
        "rows of rollout_worker.type preference have no reward",
    ),
]


@pytest.mark.parametrize(("overrides", "sentence"), REFUSED)
def test_parts_that_cannot_be_composed_are_refused(
    make_recipe: MakeRecipe, overrides: list[str], sentence: str
) -> None:
    text = refused(make_recipe(), *overrides)
    assert sentence in text
    assert "problems" not in text
    assert text.endswith(")")


ACCEPTED = [
    [f"{A}.loss=mine.py:loss", f"{A}.loss.clip_low=0.1", f"{A}.loss.settings={{a: 1}}"],
    [f"{A}.advantage=mine.py:advantage", "data.rollout_repeat_n=1"],
    [f"{A}=dapo", f"{A}.kl={{coefficient: 0.1, estimator: k1, placement: reward}}"],
    [f"{A}.kl.estimator=k3+"],
    [f"{A}.kl={{coefficient: 0, estimator: k1}}"],
    [f"{A}=distill", f"{A}.teacher.path=t", "rollout_worker.reward=null"],
    [f"{A}=distill", *CUSTOM_WORKER],
    [f"{A}=gigpo", *CUSTOM_WORKER],
    [f"{A}=ppo", f"{A}.critic.lr=1e-3", "data.rollout_repeat_n=1"],
    [f"{A}=ppo", "trainer.num_optimizer_steps=2", f"{A}.correction=geo_mask"],
    [f"{A}=dpo", "rollout_worker.reward=null", "data.rollout_repeat_n=1"],
    [f"{A}=dpo", *CUSTOM_WORKER],
    [
        *(f"{A}=reward_model", "rollout_worker.reward=null", "validate.enabled=true"),
        "validate.sources=[{path: held_out.jsonl}]",
    ],
]


@pytest.mark.parametrize("overrides", ACCEPTED, ids=str)
def test_what_an_expert_may_want_is_accepted(make_recipe: MakeRecipe, overrides: list[str]) -> None:
    load_run_config(make_recipe(), overrides)


def combination(advantage: str, loss: str) -> list[str]:
    """Whatever the two need, so that only their composition is judged."""
    needs = ADVANTAGES[advantage].needs
    custom = CUSTOM_WORKER if "turn_" in str(needs) else ()
    settings = [f"{A}.advantage={advantage}", f"{A}.loss={loss}", "data.rollout_repeat_n=8"]
    if "candidate_logprobs" in LOSSES[loss].needs:
        settings += [f"{A}.teacher.top_k=4"]
    if "teacher" in str((*needs, *LOSSES[loss].required)):
        settings += [f"{A}.teacher.path=teacher"]
    return [*settings, *custom]


@pytest.mark.parametrize("loss", policy_losses())
def test_any_estimator_goes_with_any_policy_loss_correction_and_kl_placement(
    make_recipe: MakeRecipe, loss: str
) -> None:
    recipe = make_recipe()
    for advantage in ADVANTAGES:
        pair = combination(advantage, loss)
        load_run_config(recipe, pair)
    further = [f"{A}.correction=icepop", f"{A}.entropy.target=1"]
    if "advantage" in LOSSES[loss].required:
        further.append(f"{A}.kl.placement=reward")
    for override in further:
        load_run_config(recipe, [*combination("grpo", loss), override])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_any_loss_without_one_of_its_own_takes_any_aggregation(
    make_recipe: MakeRecipe, aggregation: str
) -> None:
    recipe = make_recipe()
    for name, loss in policy_losses().items():
        if loss.aggregation is None:
            pair = combination("grpo", name)
            load_run_config(recipe, [*pair, f"{A}.loss.aggregation={aggregation}"])


@pytest.mark.parametrize("name", policy_losses())
def test_off_policy_exactly_the_unbounded_losses_need_a_word(
    make_recipe: MakeRecipe, name: str
) -> None:
    recipe = make_recipe()
    overrides = [*combination("grpo", name), "trainer.num_optimizer_steps=2"]
    load_run_config(recipe, [*overrides, f"{A}.trust_region=none"])
    if LOSSES[name].bounded:
        load_run_config(recipe, overrides)
    else:
        assert f"loss.name {name} is unbounded" in refused(recipe, *overrides)


def test_a_written_key_is_named_rather_than_one_that_a_preset_brought(
    make_recipe: MakeRecipe,
) -> None:
    text = refused(make_recipe("trainer:\n  algorithm: gigpo\n"))
    assert text.endswith("(rl_train.yaml:3)")
