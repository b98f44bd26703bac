"""Settings of what happens before training: data items, rollouts, the trajectory pool."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from nexrl.config.section import Section


class SourceConfig(Section):
    """One source of data items."""

    path: str | None = None
    """File (jsonl, json, csv, parquet) or a Hugging Face dataset folder saved to disk."""
    factory: str | None = None
    """Python factory `path.py:name` or `package.module:name` that returns a sequence or iterable of
    mappings."""
    arguments: dict[str, Any] = Field({})
    """Keyword arguments of the factory."""
    name: str | None = None
    """Name in metrics; default: the file's stem or the factory's name."""
    weight: float = Field(1.0, gt=0)
    """Share of draws when there are several sources, relative to the others."""


class DataConfig(Section):
    """Where data items come from, and how many make a batch."""

    sources: tuple[SourceConfig, ...] = ()
    """Sources of data items; at least one."""
    batch_size: int = Field(64, ge=1)
    """Items (rollout groups) in a batch; one batch ends in one published version."""
    rollout_repeat_n: int = Field(8, ge=1)
    """Rollouts of each item (the group size)."""
    epochs: int | None = Field(None, ge=1)
    """Passes over the data; null means until trainer.num_steps is reached."""
    shuffle: bool = True
    """Shuffle each epoch with the run's seed."""
    prompt_key: str = "prompt"
    """Column with the prompt string."""
    messages_key: str = "messages"
    """Column with chat messages; used when the prompt column is absent."""
    answer_key: str = "answer"
    """supervised, labelled: column with the response."""
    chosen_key: str = "chosen"
    """preference: column with the preferred response."""
    rejected_key: str = "rejected"
    """preference: column with the response it is preferred to."""
    margin_key: str = "margin"
    """preference: column with the least difference in score; it may be absent."""
    label_key: str = "label"
    """labelled: column with true (desirable) or false. process: with a list of true, false or
    numbers in [0, 1], one for each step."""
    steps_key: str = "steps"
    """process: column with the list of steps, texts."""
    item_id_key: str | None = None
    """Column with a stable item id; default: source name and row number."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Items whose rendered prompt is longer (in tokens, template included) are left out and
    counted."""
    filter: str | None = None
    """User function `path.py:name` of a row mapping; rows for which it returns false are left
    out."""


class SamplingConfig(Section):
    """How tokens are drawn; every field is sent with every request."""

    max_tokens: int = Field(256, ge=1)
    """Most tokens to draw for one completion."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus mass; below 1 is refused for RL training."""
    top_k: int | None = Field(None, ge=1)
    """Keep the k likeliest tokens; null is off; refused for RL training when set."""
    stop: tuple[str, ...] = ()
    """Stop strings."""


class FailurePolicyConfig(Section):
    """What happens to a group that loses members."""

    retry_member: bool = True
    """Run a member that failed for infrastructure reasons again while attempts and the deadline
    allow."""
    max_attempts: int = Field(3, ge=1)
    """Attempts for one rollout, the first included."""
    retry_delay_s: float = Field(0.2, ge=0)
    """Seconds before the second attempt; doubles with each further one."""
    min_group_size: int | None = Field(None, ge=1)
    """Keep a group if at least this many members ended well; null means all of them."""


class RolloutWorkerConfig(Section):
    """How a data item becomes a trajectory."""

    type: Literal["single_turn", "supervised", "preference", "labelled", "process", "custom"] = (
        "single_turn"
    )
    """Built-in worker, or `custom`. Only `single_turn` samples; `supervised` reads prompt and
    answer, `preference` prompt, chosen and rejected, `labelled` prompt, answer and label, `process`
    prompt, steps and label."""
    custom_rollout_worker_module_path: str | None = None
    """File or module of the custom worker; relative to the recipe folder, then to the working
    directory."""
    custom_rollout_worker_class_name: str | None = None
    """Class in that module."""
    arguments: dict[str, Any] = Field({})
    """Settings of the worker's own, at `self.arguments`."""
    reward: str | None = None
    """Reward function `path.py:name` or `package.module:name`, called with the completion text and
    the row's columns as keywords."""
    reward_arguments: dict[str, Any] = Field({})
    """Further keywords for the reward function."""
    reward_isolation: Literal["thread", "process"] = "thread"
    """Where a blocking reward function runs; `process` can end one that hangs and lets it use
    signals."""
    reward_deadline_s: float = Field(30.0, gt=0)
    """Seconds for one reward call; past it the rollout is failed, never scored 0."""
    num_reward_workers: int = Field(2, ge=1)
    """Threads or processes for blocking reward functions; a blocking `step` has threads of its
    own."""
    sampling: SamplingConfig = SamplingConfig()
    """How tokens are drawn in training rollouts."""
    deadline_s: float = Field(300.0, gt=0)
    """Seconds for one rollout, all attempts together."""
    on_deadline: Literal["fail", "truncate"] = "fail"
    """What a rollout that reaches its deadline while the policy acts becomes: failed, or truncated
    with what `put_trajectory` has got so far."""
    max_concurrent: int = Field(1024, ge=1)
    """Rollouts running at once."""
    failure_policy: FailurePolicyConfig = FailurePolicyConfig()
    system_prompt: str | None = None
    """System message put before `prompt` strings when chat_template is on."""
    chat_template: bool = False
    """Render `prompt` strings as one user message with the model's chat template; messages always
    are."""
    add_eos: bool = True
    """Supervised rows end with the end-of-sequence token, trained."""


class DynamicSamplingConfig(Section):
    """Groups without signal are filtered and refilled."""

    filters: tuple[str, ...] = ()
    """`constant_reward`, `all_truncated`, or user functions `path.py:name` of a RolloutGroup that
    return a reason to drop it or None."""
    refill_factor: float = Field(0.0, ge=0)
    """Groups that may be admitted beyond the batch size to replace filtered ones, as a multiple of
    it; 0 means none."""
    on_exhausted: Literal["train_short", "skip", "stop"] = "train_short"
    """What to do with a batch that is still short when the budget is spent."""


class StoreConfig(Section):
    """The durable record of every trajectory."""

    enabled: bool = True
    """Keep every trajectory, also failed and filtered ones, in the run folder."""
    commit_every_s: float = Field(0.05, gt=0)
    """Longest time a record waits for its group commit, in seconds."""
    commit_max_records: int = Field(2048, ge=1)
    """Records after which a group commit happens at once."""
    on_error: Literal["stop", "continue"] = "stop"
    """What a store that cannot write (full disk) does to the run."""


class TrajectoryPoolConfig(Section):
    """Admission, groups, freshness and hand-out."""

    batch_size: int | None = Field(None, ge=1)
    """Trajectories in a batch, as the original counts it; accepted only when it equals
    data.batch_size x data.rollout_repeat_n."""
    hand_out: Literal["fifo", "windowed"] = "fifo"
    """Order in which groups are handed out."""
    window: int = Field(1, ge=1)
    """With `windowed`: number of batches of admissions that may be chosen from; at most
    weight.staleness_threshold + 1."""
    on_bound: Literal["wait", "cancel"] = "wait"
    """At the staleness bound: wait for the group, or cancel it."""
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    take_deadline_s: float = Field(3600.0, gt=0)
    """Seconds the trainer may wait for a batch before the run stops and names who it waits for."""
    store: StoreConfig = StoreConfig()
