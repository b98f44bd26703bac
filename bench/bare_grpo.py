"""The arithmetic recipe's work as one bare PyTorch file: the yardstick for `make demo`.

A 0.86M-parameter Llama-like model learns a+b (reversed digits): supervised warm-up to about half
right on held-out pairs, then GRPO until 96%. No services, no versions, no records, no checks.

    python bench/bare_grpo.py [--threads 2] [--seed 0] [--json]
"""

from __future__ import annotations

import argparse
import json
import random
import time

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

CHARS = "0123456789+=$_"  # $ ends, _ pads
EOS, PAD = CHARS.index("$"), CHARS.index("_")
WIDTH, LAYERS, HEADS, HIDDEN, VOCAB = 128, 4, 4, 384, 16
MAX_NEW = 4


def encode(text: str) -> list[int]:
    return [CHARS.index(c) for c in text]


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    freq = 1.0 / (10000 ** (torch.arange(half, dtype=torch.float32) / half))
    angle = positions[:, None, :, None].float() * freq
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH, eps=1e-6), nn.RMSNorm(WIDTH, eps=1e-6)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_up = nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x, positions, mask, cache):
        b, t, _ = x.shape
        q, k, v = (
            self.qkv(self.norm1(x)).view(b, t, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        )
        q, k = rotate(q, positions), rotate(k, positions)
        if cache is not None:
            if "k" in cache:
                k, v = torch.cat([cache["k"], k], 2), torch.cat([cache["v"], v], 2)
            cache["k"], cache["v"] = k, v
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, WIDTH))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids, valid, caches=None):
        """valid: [B, keys so far]; ids are the last columns of the keys."""
        t, keys = ids.shape[1], valid.shape[1]
        positions = (valid.long().cumsum(1) - 1).clamp(min=0)[:, keys - t :]
        causal = torch.ones(t, keys, dtype=torch.bool).tril(keys - t)
        mask = causal[None] & valid[:, None, :]
        mask = (mask | torch.eye(keys, dtype=torch.bool)[None, keys - t :])[:, None]
        x = self.embed(ids)
        for i, block in enumerate(self.blocks):
            x = block(x, positions, mask, caches[i] if caches is not None else None)
        return self.head(self.norm(x))


@torch.no_grad()
def generate(model, prompts, temperature):
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(p)) + p for p in prompts])
    valid = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]).bool()
    caches = [{} for _ in range(LAYERS)]
    done = torch.zeros(len(prompts), dtype=torch.bool)
    drawn, logprobs, masks = [], [], []
    logits = model(ids, valid, caches)[:, -1]
    for step in range(MAX_NEW):
        logp = F.log_softmax(logits / (temperature or 1.0), -1)
        token = logp.argmax(-1) if temperature == 0 else torch.multinomial(logp.exp(), 1)[:, 0]
        masks.append(~done)
        drawn.append(torch.where(done, PAD, token))
        logprobs.append(logp.gather(1, token[:, None])[:, 0])
        done = done | (token == EOS)
        if done.all() or step == MAX_NEW - 1:
            break
        valid = torch.cat([valid, torch.ones(len(prompts), 1, dtype=torch.bool)], 1)
        logits = model(token[:, None], valid, caches)[:, -1]
    return torch.stack(drawn, 1), torch.stack(logprobs, 1), torch.stack(masks, 1)


def token_logprobs(model, rows):
    width = max(map(len, rows))
    ids = torch.tensor([r + [PAD] * (width - len(r)) for r in rows])
    valid = torch.tensor([[1] * len(r) + [0] * (width - len(r)) for r in rows]).bool()
    logp = F.log_softmax(model(ids, valid)[:, :-1], -1)
    return logp.gather(2, ids[:, 1:, None])[..., 0]


def accuracy(model, pairs):
    prompts = [encode(f"{a}+{b}=") for a, b in pairs]
    drawn, _, masks = generate(model, prompts, 0)
    right = sum(
        answer_of(d, m) == str(a + b)[::-1]
        for d, m, (a, b) in zip(drawn, masks, pairs, strict=True)
    )
    return right / len(pairs)


def answer_of(drawn, mask):
    text = "".join(
        CHARS[i]
        for i, keep in zip(drawn.tolist(), mask.tolist(), strict=True)
        if keep and i < len(CHARS)
    )
    return text[:-1] if text.endswith("$") else text + "!"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warmup-steps", type=int, default=260)
    parser.add_argument("--rl-steps", type=int, default=260)
    parser.add_argument("--target", type=float, default=0.96)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    pairs = [(a, b) for a in range(100) for b in range(100)]
    rng.shuffle(pairs)
    held_out, train = pairs[:500], pairs[500:]
    model = Model()
    start = time.perf_counter()

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.0)
    after_warmup = 0.0
    for step in range(args.warmup_steps):
        batch = rng.sample(train, 256)
        rows, masks = [], []
        for a, b in batch:
            prompt, answer = encode(f"{a}+{b}="), encode(str(a + b)[::-1] + "$")
            rows.append(prompt + answer)
            masks.append([0] * (len(prompt) - 1) + [1] * len(answer))
        logp = token_logprobs(model, rows)
        mask = torch.tensor([m + [0] * (logp.shape[1] - len(m)) for m in masks]).float()
        loss = -(logp * mask).sum() / mask.sum()
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 20)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 9:
            after_warmup = accuracy(model, held_out)
            if after_warmup >= 0.5:
                break
    warm_s = time.perf_counter() - start
    if not args.json:
        print(f"warm-up: {step + 1} steps, {warm_s:.1f} s, held-out {after_warmup:.3f}")

    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.98), weight_decay=0.0)
    reached_s, final, updates = None, 0.0, 0
    spent = {"generate": 0.0, "train": 0.0}
    for step in range(args.rl_steps):
        t0 = time.perf_counter()
        batch = rng.sample(train, 64)
        prompts = [encode(f"{a}+{b}=") for a, b in batch for _ in range(8)]
        drawn, behavior, masks = generate(model, prompts, 1.0)
        rewards = torch.tensor(
            [
                float(answer_of(drawn[i], masks[i]) == str(sum(batch[i // 8]))[::-1])
                for i in range(len(prompts))
            ]
        )
        t1 = time.perf_counter()
        advantage = (rewards.view(64, 8) - rewards.view(64, 8).mean(1, keepdim=True)).view(-1)
        kept = [g for g in range(64) if rewards.view(64, 8)[g].std() > 0]
        for part in [p for n in range(4) if (p := kept[n::4])]:  # four optimizer steps a batch
            keep = [8 * g + member for g in part for member in range(8)]
            rows = [prompts[i] + drawn[i][masks[i]].tolist() for i in keep]
            logp = token_logprobs(model, rows)
            old, mask = torch.zeros_like(logp), torch.zeros_like(logp)
            for j, i in enumerate(keep):
                p, n = len(prompts[i]) - 1, int(masks[i].sum())
                old[j, p : p + n], mask[j, p : p + n] = behavior[i][:n], 1
            ratio = (logp - old).exp()
            adv = advantage[keep][:, None]
            term = torch.max(-ratio * adv, -ratio.clamp(0.8, 1.28) * adv)
            loss = (term * mask).sum() / mask.sum()
            updates += 1
            for group in optimizer.param_groups:
                group["lr"] = (
                    6e-4 * min(1.0, updates / 10) * max(0.1, 1 - 0.9 * step / args.rl_steps)
                )
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        t2 = time.perf_counter()
        spent["generate"] += t1 - t0
        spent["train"] += t2 - t1
        if step % 20 == 19:
            final = accuracy(model, held_out)
            if not args.json:
                print(
                    f"step {step + 1}: reward {rewards.mean():.3f} held-out {final:.3f} at {t2 - start:.1f} s"
                )
            if final >= args.target:
                reached_s = time.perf_counter() - start
                break
    result = {
        "warmup_s": round(warm_s, 2),
        "after_warmup": after_warmup,
        "final": final,
        "rl_steps": step + 1,
        "reached_s": reached_s and round(reached_s, 2),
        "total_s": round(time.perf_counter() - start, 2),
        "rl_share": {k: round(v, 2) for k, v in spent.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
