"""Tokenizers and chat templates as transformers sees them.

tokenizer.py encode DIR TEXTS     TEXTS is a JSON file with a list of texts
tokenizer.py chat DIR CASES       CASES is a JSON file with a list of {messages, prompt, variables}

Prints one JSON object.
"""

import json
import sys

import transformers


def main(mode, path, cases):
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    with open(cases, encoding="utf-8") as file:
        cases = json.load(file)
    if mode == "chat":
        texts = [
            tokenizer.apply_chat_template(
                case["messages"], tokenize=False, add_generation_prompt=case["prompt"], **case["variables"]
            )
            for case in cases
        ]
        print(json.dumps({"texts": texts}))
        return
    ids = [tokenizer.encode(text) for text in cases]
    print(json.dumps({
        "class": type(tokenizer).__name__,
        "size": len(tokenizer),
        "special": [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id],
        "ids": ids,
        "texts": [tokenizer.decode(one) for one in ids],
        "plain": [tokenizer.decode(one, skip_special_tokens=True) for one in ids],
    }))


main(*sys.argv[1:])
