"""Public clients against a running `qurl serve`, unchanged: what each saw, as one JSON document.

usage: serve_clients.py WHAT URL KEY MODEL_DIR, where WHAT is openai, guidellm or verifiers
"""

import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path

what, url, key, model = sys.argv[1:5]


def completion_sample(choice):
    return {"ids": choice.token_ids, "logprobs": choice.logprobs.token_logprobs}


def chat_sample(choice):
    return {"ids": choice.token_ids, "logprobs": [token.logprob for token in choice.logprobs.content]}


def with_openai():
    from openai import APIStatusError, AsyncOpenAI, AuthenticationError, OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    card = client.models.list().data[0]
    seen = {"model": card.id, "max_model_len": card.max_model_len}
    ids = {"extra_body": {"return_token_ids": True}}

    chat = dict(model=card.id, messages=[{"role": "user", "content": "12+3"}], max_tokens=8, logprobs=True)
    whole = client.chat.completions.create(**chat, **ids, seed=5, n=2, top_logprobs=3)
    stream = client.chat.completions.create(
        **chat, seed=5, n=2, stream=True, stream_options={"include_usage": True}
    )
    texts, logprobs, usage = ["", ""], [[], []], None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.logprobs:
                logprobs[choice.index] += [token.logprob for token in choice.logprobs.content]
    assert [choice.message.content for choice in whole.choices] == texts
    assert [chat_sample(choice)["logprobs"] for choice in whole.choices] == logprobs
    assert all(len(token.top_logprobs) == 3 for token in whole.choices[0].logprobs.content)
    assert usage.completion_tokens == whole.usage.completion_tokens and usage.prompt_tokens == 5
    seen["chat_prompt"], seen["chats"] = whole.prompt_token_ids, [chat_sample(c) for c in whole.choices]

    completion = dict(model=card.id, prompt="12+34=", max_tokens=10, logprobs=2)
    one = client.completions.create(**completion, **ids, seed=3).choices[0]
    pieces = [chunk.choices[0] for chunk in client.completions.create(**completion, seed=3, stream=True)]
    assert "".join(piece.text for piece in pieces) == one.text
    streamed = [logprob for piece in pieces for logprob in piece.logprobs.token_logprobs]
    assert streamed == one.logprobs.token_logprobs
    again = client.completions.create(**completion | {"prompt": one.prompt_token_ids}, seed=3)
    assert again.choices[0].text == one.text
    seen["completion_prompt"], seen["completions"] = one.prompt_token_ids, [completion_sample(one)]

    # Sixty-four clients at once, each with connections of its own.
    async def at_once(ask):
        async def one(seed):
            async with AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
                return await ask(client, seed)

        return await asyncio.gather(*[one(seed) for seed in range(64)])

    answers = asyncio.run(at_once(lambda c, seed: c.completions.create(**completion, **ids, seed=seed)))
    seen["many_completions"] = [completion_sample(answer.choices[0]) for answer in answers]
    assert len({answer.choices[0].text for answer in answers}) > 10
    answers = asyncio.run(at_once(lambda c, seed: c.chat.completions.create(**chat, **ids, seed=seed)))
    seen["many_chats"] = [chat_sample(answer.choices[0]) for answer in answers]

    for wrong, status in [
        (lambda: client.completions.create(model="another", prompt="1"), 404),
        (lambda: client.completions.create(model=card.id, prompt="1", presence_penalty=1), 400),
        (lambda: client.completions.create(model=card.id, prompt=[]), 400),
    ]:
        try:
            wrong()
            raise SystemExit("it was not refused")
        except APIStatusError as error:
            assert error.status_code == status and error.body["message"], error
    try:
        OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).models.list()
        raise SystemExit("a wrong key was taken")
    except AuthenticationError:
        pass
    return seen


def with_guidellm():
    with tempfile.TemporaryDirectory() as place:
        rows = [{"prompt": "12+34=", "output_tokens_count": 6 + i % 3} for i in range(12)]
        data, out = Path(place, "data.jsonl"), Path(place, "out.json")
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        command = [
            Path(sys.executable).with_name("guidellm"),
            "run",
            "--backend",
            f"kind=openai_http,target={url},api_key={key},model=tiny,request_format=/v1/completions",
            "--profile",
            "kind=concurrent,streams=4",
            "--constraint",
            "kind=max_requests,count=8",
            "--tokenizer",
            f"kind=huggingface_auto,model={model}",
            "--data",
            f"kind=json_file,path={data}",
            "--output",
            f"kind=json,path={out}",
            "--disable-console",
        ]
        subprocess.run(command, check=True, stdout=sys.stderr)
        benchmark = json.loads(out.read_text())["benchmarks"][0]
    totals = benchmark["metrics"]["request_totals"]
    return {"successful": totals["successful"], "errored": totals["errored"]}


def with_verifiers():
    from verifiers.v1.clients import TrainClient, TrainClientConfig
    from verifiers.v1.dialects import ChatDialect
    from verifiers.v1.types import SamplingConfig

    config = TrainClientConfig(
        base_url=f"{url}/v1", api_key_var="QURL_TEST_KEY", renderer_model_name=model, multiplex=8
    )

    async def rollouts():
        client = TrainClient(config)
        body = {"model": "tiny", "messages": [{"role": "user", "content": "12+3"}]}
        calls = [
            client.get_response(ChatDialect(), body, SamplingConfig(max_tokens=6, temperature=1.0, seed=seed))
            for seed in range(8)
        ]
        return await asyncio.gather(*calls)

    tokens = [response.tokens for response in asyncio.run(rollouts())]
    return {
        "prompt": tokens[0].prompt_ids,
        "samples": [{"ids": own.completion_ids, "logprobs": own.completion_logprobs} for own in tokens],
    }


print(json.dumps({"openai": with_openai, "guidellm": with_guidellm, "verifiers": with_verifiers}[what]()))
