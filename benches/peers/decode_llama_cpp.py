"""llama.cpp's decoding and prompt speed on a CPU, on random weights of Qwen2.5-0.5B's shape.

    pip install llama-cpp-python gguf
    python decode_llama_cpp.py --dir /tmp/peers --weights q8_0 --batch 1 8 --context 128 8192 --json

llama-cpp-python compiles llama.cpp where it is installed, so that it uses every instruction of this
processor; wheels that come compiled know AVX2 at most (what it was compiled for is printed). It is driven
through its C interface, in the way of its own llama-batched-bench: sequences with a cache each, random
tokens, logits of every new token, no sampling. `qurl bench rollout` samples as well.

`--dir` keeps the model files and the caches of long contexts between runs; the first run makes them, which
takes a minute or two. A context is computed once, as one prompt, and copied to all sequences of a batch.
`--flash` and `--threads` take several values, for who does not know which is fastest; every combination is
measured.
"""

import argparse
import ctypes
import itertools
import json
import os
import random
import resource
import statistics
import sys
import time
from pathlib import Path

import gguf
import llama_cpp as api
import numpy as np

VOCABULARY, WIDTH, INNER, LAYERS, HEADS, KV_HEADS = 151_936, 896, 4864, 24, 14, 2
HEAD_SIZE = WIDTH // HEADS
CONTEXT_LIMIT = 32_768
WEIGHTS = {
    "bf16": gguf.GGMLQuantizationType.BF16,
    "f16": gguf.GGMLQuantizationType.F16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
}
CACHES = {"f16": gguf.GGMLQuantizationType.F16, "q8_0": gguf.GGMLQuantizationType.Q8_0}
FLASH = {"off": 0, "on": 1}
# Random numbers that are repeated over all weights, as in `qurl bench`: a prime, so that rows differ.
BLOCK = 1_048_573
# Decode steps that are not measured.
WARM_UP = 2


def tensors():
    """Name and shape (rows x columns) of every tensor; output and embedding are one."""
    kv = KV_HEADS * HEAD_SIZE
    yield "token_embd.weight", (VOCABULARY, WIDTH)
    yield "output_norm.weight", (WIDTH,)
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        yield block + "attn_norm.weight", (WIDTH,)
        for name, rows in (("q", WIDTH), ("k", kv), ("v", kv)):
            yield f"{block}attn_{name}.weight", (rows, WIDTH)
            yield f"{block}attn_{name}.bias", (rows,)
        yield block + "attn_output.weight", (WIDTH, WIDTH)
        yield block + "ffn_norm.weight", (WIDTH,)
        yield block + "ffn_gate.weight", (INNER, WIDTH)
        yield block + "ffn_up.weight", (INNER, WIDTH)
        yield block + "ffn_down.weight", (WIDTH, INNER)


def write_model(path, kind):
    """A GGUF file without a vocabulary: tokens are numbers here."""
    part = path.with_suffix(".part")
    writer = gguf.GGUFWriter(part, "qwen2")
    writer.add_vocab_size(VOCABULARY)
    writer.add_context_length(CONTEXT_LIMIT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_tokenizer_model("no_vocab")
    numbers = np.random.default_rng(5).normal(0, 0.02, BLOCK).astype(np.float32)
    place = 0
    for name, shape in tensors():
        if len(shape) == 1:
            fill = 1.0 if "norm" in name else 0.0
            writer.add_tensor(name, np.full(shape, fill, np.float32))
            continue
        count = shape[0] * shape[1]
        values = np.resize(np.roll(numbers, -place), count).reshape(shape)
        place = (place + count) % BLOCK
        writer.add_tensor(name, gguf.quants.quantize(values, WEIGHTS[kind]), raw_dtype=WEIGHTS[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(part, path)


class Context:
    """A context of llama.cpp with as many `sequences` of at most `positions` tokens."""

    def __init__(self, model, sequences, positions, cache, flash, threads):
        params = api.llama_context_default_params()
        params.n_ctx = sequences * positions
        params.n_seq_max = sequences
        params.n_batch = max(512, sequences)
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = FLASH[flash]
        params.type_k = params.type_v = int(CACHES[cache])
        params.kv_unified = False
        params.no_perf = True
        self.pointer = api.llama_init_from_model(model, params)
        if not self.pointer:
            sys.exit(f"llama.cpp makes no context: cache {cache}, flash {flash}, {sequences} x {positions}")
        self.sequences, self.largest = sequences, params.n_batch
        self.tokens = api.llama_batch_init(self.largest, 0, 1)
        self.memory = api.llama_get_memory(self.pointer)
        self.random = random.Random(7)

    def free(self):
        api.llama_batch_free(self.tokens)
        api.llama_free(self.pointer)

    def compute(self, places):
        """Computes random tokens at `places`: (sequence, position, whether logits are wanted)."""
        batch = self.tokens
        batch.n_tokens = len(places)
        for i, (sequence, position, logits) in enumerate(places):
            batch.token[i] = self.random.randrange(VOCABULARY)
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = logits
        code = api.llama_decode(self.pointer, batch)
        if code != 0:
            sys.exit(f"llama_decode: {code}")
        api.llama_synchronize(self.pointer)

    def prompt(self, length):
        """Computes one prompt with the logits of its last token; seconds."""
        start = time.perf_counter()
        for first in range(0, length, self.largest):
            last = min(first + self.largest, length)
            self.compute([(0, p, p == length - 1) for p in range(first, last)])
        return time.perf_counter() - start

    def fill(self, length, file):
        """Gives every sequence a context of `length` tokens, kept in `file` for the next time."""
        name, none = str(file).encode(), (api.llama_token * 1)()
        count = ctypes.c_size_t()
        if file.exists():
            if not api.llama_state_seq_load_file(self.pointer, name, 0, none, 1, ctypes.byref(count)):
                sys.exit(f"llama.cpp does not read {file}; remove it if llama.cpp has changed since")
        else:
            self.prompt(length)
            part = file.with_suffix(".part")
            if not api.llama_state_seq_save_file(self.pointer, str(part).encode(), 0, none, 0):
                sys.exit(f"llama.cpp does not write {part}")
            os.replace(part, file)
        for sequence in range(1, self.sequences):
            api.llama_memory_seq_cp(self.memory, 0, sequence, -1, -1)

    def decode(self, batch, context, new):
        """Seconds of each of `new` decode steps of `batch` sequences, from `context` tokens on, to where they
        return."""
        seconds = []
        for step in range(WARM_UP + new):
            start = time.perf_counter()
            self.compute([(sequence, context + step, True) for sequence in range(batch)])
            seconds.append(time.perf_counter() - start)
        for sequence in range(batch):
            api.llama_memory_seq_rm(self.memory, sequence, context, -1)
        return seconds[WARM_UP:]


def tensor_bytes(kind, count):
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    return count * size / elements


def decode_rows(model, options):
    weight_bytes = tensor_bytes(
        WEIGHTS[options.weights], sum(s[0] * s[1] for _, s in tensors() if len(s) > 1)
    )
    if not options.batch:
        return
    sequences = options.sequences or max(options.batch)
    for cache, flash, context in itertools.product(options.cache, options.flash, options.context):
        if cache != "f16" and flash == "off":
            continue  # llama.cpp reads a quantized cache of values with flash attention only
        handle = Context(model, sequences, context + options.new + WARM_UP, cache, flash, options.threads[0])
        # The numbers in a cache do not matter, so that all kinds of weights share it.
        handle.fill(context, options.dir / f"context-{context}-{cache}-flash-{flash}-{sequences}")
        for batch, threads in itertools.product(options.batch, options.threads):
            api.llama_set_n_threads(handle.pointer, threads, threads)
            seconds = handle.decode(batch, context, options.new)
            token = 2 * LAYERS * tensor_bytes(CACHES[cache], KV_HEADS * HEAD_SIZE)
            read = weight_bytes + batch * token * (context + WARM_UP + options.new / 2)
            yield {
                "case": "decode",
                "weights": options.weights,
                "cache": cache,
                "flash": flash,
                "threads": threads,
                "batch": batch,
                "context": context,
                "new": options.new,
                "tokens_per_s": batch * len(seconds) / sum(seconds),
                "median_tokens_per_s": batch / statistics.median(seconds),
                "gb_per_s": read * len(seconds) / sum(seconds) / 1e9,
            }
        handle.free()


def prompt_rows(model, options):
    for length, flash, threads in itertools.product(options.prompt, options.flash, options.threads):
        handle = Context(model, 1, length + 1, "f16", flash, threads)
        handle.prompt(min(length, 32))
        api.llama_memory_clear(handle.memory, True)
        seconds = handle.prompt(length)
        handle.free()
        yield {
            "case": "prompt",
            "weights": options.weights,
            "cache": "f16",
            "flash": flash,
            "threads": threads,
            "prompt": length,
            "tokens_per_s": length / seconds,
        }


def main():
    parser = argparse.ArgumentParser(
        description="llama.cpp's speed on random weights of Qwen2.5-0.5B's shape"
    )
    parser.add_argument(
        "--dir", type=Path, required=True, help="for model files and caches, outside of the project"
    )
    parser.add_argument("--weights", choices=WEIGHTS, default="bf16")
    parser.add_argument(
        "--cache", nargs="+", choices=CACHES, default=["f16"], help="formats of keys and values"
    )
    parser.add_argument("--batch", type=int, nargs="*", default=[1], help="sequences decoded together")
    parser.add_argument("--sequences", type=int, help="places in the cache, the largest batch if not given")
    parser.add_argument("--context", type=int, nargs="*", default=[128], help="tokens before a new one")
    parser.add_argument("--new", type=int, default=32, help="measured decode steps")
    parser.add_argument("--prompt", type=int, nargs="*", default=[], help="prompts to measure, in tokens")
    parser.add_argument("--flash", nargs="+", choices=FLASH, default=["on"], help="flash attention")
    parser.add_argument("--threads", type=int, nargs="+", default=[os.cpu_count()])
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args()
    if min([options.new, *options.batch, *options.context, *options.prompt, *options.threads]) < 1:
        parser.error("--new, --batch, --context, --prompt and --threads must be at least 1")
    if max([*options.context, *options.prompt], default=0) + options.new + WARM_UP > CONTEXT_LIMIT:
        parser.error(f"--context and --prompt may have {CONTEXT_LIMIT - options.new - WARM_UP} tokens here")
    if options.sequences and options.sequences < max(options.batch, default=0):
        parser.error("--sequences must be at least the largest --batch")

    options.dir.mkdir(parents=True, exist_ok=True)
    path = options.dir / f"qwen2.5-0.5b-{options.weights}.gguf"
    if not path.exists():
        write_model(path, options.weights)
    quiet = api.llama_log_callback(lambda *_: None)
    api.llama_log_set(quiet, ctypes.c_void_p(0))
    api.llama_backend_init()
    model = api.llama_model_load_from_file(str(path).encode(), api.llama_model_default_params())
    if not model:
        sys.exit(f"llama.cpp does not load {path}")
    machine = api.llama_print_system_info().decode().strip(" |\n")
    if not options.json:
        print(f"llama-cpp-python {api.__version__}; {machine}")
    rows = []
    for row in itertools.chain(prompt_rows(model, options), decode_rows(model, options)):
        row["peak_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
        rows.append(row)
        if not options.json:
            keys = ("weights", "cache", "flash", "threads", "batch", "context", "prompt")
            what = ", ".join(f"{key} {row[key]}" for key in keys if key in row)
            print(f"{what}: {row['tokens_per_s']:,.1f} tokens/s")
    if options.json:
        json.dump({"llama_cpp_python": api.__version__, "machine": machine, "results": rows}, sys.stdout)
        print()


if __name__ == "__main__":
    main()
