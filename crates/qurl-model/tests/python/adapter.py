"""Adapters as PEFT sees them.

adapter.py score BASE ADAPTER IDS     load ADAPTER beside BASE, print the log-probs of the ids (1,2,3) after
                                      the first and the adapter's settings
adapter.py make BASE ADAPTER IDS      write a random adapter beside BASE and print the same of it
adapter.py make-INIT BASE ADAPTER IDS the same, begun with PEFT's initialization INIT, which is saved as it is
adapter.py plain-INIT BASE ADAPTER IDS the same, converted to plain LoRA by PEFT when it is saved
adapter.py regex BASE ADAPTER IDS     the same with a regular expression and a list of excluded modules

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
    modules = settings.target_modules
    print(json.dumps({
        "logprobs": values, "rank": settings.r, "alpha": settings.lora_alpha,
        "modules": modules if isinstance(modules, str) else sorted(modules),
        "trained": sum("lora_" in n for n, _ in model.named_parameters()),
    }))


def main(what, base, adapter, ids):
    try:
        import peft
    except ImportError as error:
        return print(json.dumps({"skipped": str(error)}))
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if what == "score":
        return print_scores(peft.PeftModel.from_pretrained(model, adapter).eval(), ids)
    targets = {"target_modules": ["k_proj", "o_proj", "gate_proj", "down_proj"]}
    if what == "regex":
        ends = r"(?:.*?(?:self_attn|mlp).*?(?:q_proj|o_proj|up_proj))"
        pattern = ends + r"|(?:\bmodel\.layers\.[\d]{1,}\.mlp\.(?:down_proj))"
        targets = {"target_modules": pattern, "exclude_modules": ["lm_head", "mlp.up_proj"]}
    init = what.split("-")[1] if "-" in what else "true"
    init = True if init == "true" else init
    settings = peft.LoraConfig(r=6, lora_alpha=9, task_type="CAUSAL_LM", init_lora_weights=init, **targets)
    model = peft.get_peft_model(model, settings).eval()
    conversion = {}
    if what.startswith("plain-"):
        # As PEFT's documentation has it: the untrained adapter is saved as one that needs no initialization.
        model.peft_config["default"].init_lora_weights = True
        model.save_pretrained(adapter + "/initial")
        model.peft_config["default"].init_lora_weights = init
        conversion["path_initial_model_for_weight_conversion"] = adapter + "/initial"
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    model.save_pretrained(adapter, **conversion)
    print_scores(model, ids)


main(*sys.argv[1:])
