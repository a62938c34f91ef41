"""A whole GRPO step of TRL on a CPU, beside `qurl bench step`.

    pip install torch transformers trl
    python step_trl.py --shape default --prompts 32 --n 16 --prompt 16 --length 48 --json

The same model shapes with random weights, prompts of one length, responses that all reach `--length`,
rewards that alternate, a reference model with its KL in the loss, and one update a step: what
`qurl bench step --mini-batches 1` does. TRL samples with transformers' generate (vLLM needs a GPU), in one
batch, and trains on it in one batch, without recomputing activations. As both policies are one here, TRL
computes no log-probs of its own for the sampling policy.

Variants
    f32            weights and arithmetic in f32
    bf16-autocast  f32 weights, matmuls in bf16 by autocast (TRL's `bf16=True`)
    bf16-pure      weights, gradients and moments all in bf16: small updates are lost to rounding
"""

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, TrainerCallback

# vocabulary, width, inner width, layers, heads, key and value heads, context; embedding and head are one.
SHAPES = {
    "default": (20, 128, 384, 4, 4, 2, 256),
    "qwen2.5-0.5b": (151_936, 896, 4864, 24, 14, 2, 32_768),
}
VARIANTS = ("f32", "bf16-autocast", "bf16-pure")
DIGITS = "0123456789"


def digit_tokenizer():
    """A token for every digit."""
    tokens = ["<pad>", "<eos>", *DIGITS]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def write_model(directory, shape):
    """A model directory with random weights, since TRL reads the reference model from one; the count of
    parameters."""
    vocabulary, width, inner, layers, heads, kv_heads, positions = SHAPES[shape]
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(directory)
    return sum(p.numel() for p in model.parameters())


class Clock(TrainerCallback):
    """Seconds of every step, and of the sampling in it."""

    def __init__(self):
        self.steps, self.rollouts, self.start = [], [], 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append(time.perf_counter() - self.start)

    def watch(self, model):
        """Times the model's `generate`."""
        generate = model.generate

        def timed(*args, **kwargs):
            start = time.perf_counter()
            result = generate(*args, **kwargs)
            self.rollouts.append(time.perf_counter() - start)
            return result

        model.generate = timed


def measure(options, scratch):
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    parameters = write_model(f"{scratch}/model", options.shape)
    batch, steps = options.prompts * options.n, options.steps + 1
    random = torch.Generator().manual_seed(1)
    digits = torch.randint(len(DIGITS), (options.prompts * steps, options.prompt), generator=random)
    prompts = Dataset.from_dict({"prompt": ["".join(DIGITS[d] for d in row) for row in digits.tolist()]})
    config = trl.GRPOConfig(
        output_dir=f"{scratch}/run",
        model_init_kwargs={
            "dtype": "bfloat16" if options.variant == "bf16-pure" else "float32",
            "attn_implementation": "sdpa",
        },
        use_cpu=True,
        bf16=options.variant == "bf16-autocast",
        learning_rate=1e-7,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=1,
        num_generations=options.n,
        max_completion_length=options.length,
        generation_kwargs={"min_new_tokens": options.length},
        temperature=1.0,
        beta=0.001,
        max_steps=steps,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    clock = Clock()
    lengths = []

    def reward(completion_ids, **kwargs):
        lengths.extend(len(ids) for ids in completion_ids)
        return [float(i % 2) for i in range(len(completion_ids))]

    trainer = trl.GRPOTrainer(
        model=f"{scratch}/model",
        reward_funcs=reward,
        args=config,
        train_dataset=prompts,
        processing_class=digit_tokenizer(),
        callbacks=[clock],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    clock.watch(trainer.model)
    trainer.train()
    # The first step is not counted, neither here nor in `qurl bench step`.
    assert (
        len(clock.steps) == len(clock.rollouts) == steps
    ), f"{len(clock.rollouts)} rollouts in {steps} steps"
    assert set(lengths) == {options.length}, f"responses of {sorted(set(lengths))} tokens"
    seconds, rollout = statistics.median(clock.steps[1:]), statistics.median(clock.rollouts[1:])
    return {
        "case": "step",
        "shape": options.shape,
        "variant": options.variant,
        "parameters": parameters,
        "prompts": options.prompts,
        "n": options.n,
        "prompt": options.prompt,
        "length": options.length,
        "steps": options.steps,
        "threads": options.threads,
        "seconds": seconds,
        "rollout_s": rollout,
        "rest_s": seconds - rollout,
        "response_tokens_per_s": batch * options.length / seconds,
        "rollout_tokens_per_s": batch * options.length / rollout,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
        "versions": {
            "trl": trl.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        },
    }


def main():
    parser = argparse.ArgumentParser(description="a whole GRPO step of TRL on a CPU")
    parser.add_argument("--shape", choices=SHAPES, default="default")
    parser.add_argument("--variant", choices=VARIANTS, default="f32")
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a step")
    parser.add_argument("--n", type=int, default=16, help="responses to each prompt")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of a prompt")
    parser.add_argument("--length", type=int, default=48, help="tokens of a response")
    parser.add_argument("--steps", type=int, default=2, help="timed steps, after one that is not")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args()
    if (
        min(options.prompts, options.prompt, options.length, options.steps, options.threads) < 1
        or options.n < 2
    ):
        parser.error("--n must be at least 2, all other counts at least 1")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(options, scratch)
    if options.json:
        json.dump({"results": [result]}, sys.stdout)
        print()
        return
    print(
        f"{options.shape} {options.variant}: {result['seconds']:.3f} s a step, of which sampling "
        f"{result['rollout_s']:.3f} s ({result['rollout_tokens_per_s']:,.0f} tokens/s); "
        f"peak {result['peak_rss_mb']:,.0f} MB"
    )


if __name__ == "__main__":
    main()
