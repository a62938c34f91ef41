import json, re, sys

for line in sys.stdin:
    asked = json.loads(line)
    numbers = re.findall(r"-?\d+", asked["response"])
    right = numbers[-1:] == [asked["answer"]]
    long = asked["tokens"] > 200
    reply = {"request": asked["request"], "score": 1.0 * right - 0.5 * long, "correct": right}
    reply["parts"] = {"right": right, "long": long}
    print(json.dumps(reply), flush=True)
