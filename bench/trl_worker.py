"""The TRL side of the comparison; run by TRL's own interpreter. Prints one JSON line."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def reward(completions: list[str], **_: object) -> list[float]:
    """Share of even digits: cheap, and different between siblings."""
    return [sum(c in "02468" for c in text) / max(1, len(text)) for text in completions]


class Clock(TrainerCallback):
    """Times the steps after the first two."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        self.ends.append(time.perf_counter())


def main() -> None:
    folder, settings = sys.argv[1], json.loads(sys.argv[2])
    prompts = json.loads(Path(folder, "prompts.json").read_text())
    clock = Clock()
    batch = settings["groups"] * settings["repeat"]
    config = GRPOConfig(
        output_dir=f"{folder}/trl",
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        per_device_train_batch_size=batch,
        num_generations=settings["repeat"],
        max_completion_length=settings["max_new"],
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        max_steps=settings["steps"],
        num_iterations=1,
        beta=0.0,
        temperature=1.0,
        logging_steps=1000,
        gradient_checkpointing=False,
        disable_tqdm=True,
        dataloader_num_workers=0,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(f"{folder}/model"),
        processing_class=AutoTokenizer.from_pretrained(f"{folder}/model", padding_side="left"),
        reward_funcs=reward,
        args=config,
        callbacks=[clock],
        train_dataset=Dataset.from_list([{"prompt": p} for p in prompts]),
    )
    trainer.train()
    seconds = clock.ends[-1] - clock.ends[1]
    print(
        json.dumps(
            {
                "trajectories_per_s": batch * (len(clock.ends) - 2) / seconds,
                "steps": len(clock.ends),
            }
        )
    )


if __name__ == "__main__":
    main()
