"""Adapters as PEFT sees them.

adapter.py score BASE ADAPTER IDS     load ADAPTER beside BASE, print the log-probs of the ids (1,2,3) after
                                      the first and the adapter's settings
adapter.py make BASE ADAPTER IDS      write a random adapter beside BASE and print the same of it

Prints one JSON object, or {"skipped": why} where peft is not installed.
"""

import json
import sys

import torch
import transformers


def print_scores(model, ids):
    ids = torch.tensor([int(i) for i in ids.split(",")])
    with torch.no_grad():
        logp = torch.log_softmax(model(ids[None]).logits[0, :-1], dim=-1)
    values = logp.gather(1, ids[1:, None])[:, 0].tolist()
    settings = model.peft_config["default"]
    print(json.dumps({
        "logprobs": values, "rank": settings.r, "alpha": settings.lora_alpha,
        "modules": sorted(settings.target_modules), "trained": sum("lora_" in n for n, _ in model.named_parameters()),
    }))


def main(what, base, adapter, ids):
    try:
        import peft
    except ImportError as error:
        return print(json.dumps({"skipped": str(error)}))
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if what == "score":
        return print_scores(peft.PeftModel.from_pretrained(model, adapter).eval(), ids)
    settings = peft.LoraConfig(
        r=6, lora_alpha=9, target_modules=["k_proj", "o_proj", "gate_proj", "down_proj"], task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(model, settings).eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape))
    model.save_pretrained(adapter)
    print_scores(model, ids)


main(*sys.argv[1:])
