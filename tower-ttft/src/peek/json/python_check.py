"""Checks what the JSON reader found against Python's own json module.

One case per input line, as JSON: body (hex), ok (accepted), limit (refused by one of our own bounds), fields
([key in hex, start, end, value as JSON text or null, why there is no value]), all occurrences in order; null if the body
is no object. Prints one JSON document: counts and the first differences.
"""
import json
import math
import signal
import sys

signal.alarm(300)
counts = {"cases": 0, "accepted": 0, "refused": 0, "objects": 0, "values": 0, "unrepresentable": 0, "utf16": 0, "limits": 0}
wrong = []


def why_not(value, depth=0):
    """Every reason why a strict tree cannot hold this value."""
    why = set()
    if depth > 128:
        why.add("TooDeep")
        return why
    if isinstance(value, str):
        if any(0xD800 <= ord(c) < 0xE000 for c in value):
            why.add("LoneSurrogate")
    elif isinstance(value, float):
        if not math.isfinite(value):
            why.add("NotFinite")
    elif isinstance(value, bool) or value is None:
        pass
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            why.add("BigInteger")
    elif isinstance(value, Pairs):
        for k, v in value.pairs:
            why |= why_not(k) | why_not(v, depth + 1)
    elif isinstance(value, list):
        for v in value:
            why |= why_not(v, depth + 1)
    return why


class Pairs:
    def __init__(self, pairs):
        self.pairs = pairs


def check(case):
    body = bytes.fromhex(case["body"])
    if case["limit"]:
        counts["limits"] += 1
        return None
    encoding = json.detect_encoding(body)
    if encoding not in ("utf-8", "utf-8-sig"):
        counts["utf16"] += 1
        return "took " + encoding if case["ok"] else None
    try:
        value = json.loads(body)
        pairs = json.loads(body, object_pairs_hook=Pairs)
    except RecursionError:
        counts["limits"] += 1
        return None
    except ValueError as e:
        counts["refused"] += 1
        return "accepted, Python: " + str(e)[:80] if case["ok"] else None
    counts["accepted"] += 1
    if not case["ok"]:
        return "refused"
    if isinstance(value, dict) != (case["fields"] is not None):
        return "object or not"
    if not isinstance(value, dict):
        return None
    counts["objects"] += 1
    fields = [[bytes.fromhex(k).decode(), *rest] for k, *rest in case["fields"]]
    keys = [k for k, _ in pairs.pairs if "LoneSurrogate" not in why_not(k)]
    if keys != [f[0] for f in fields]:
        return "keys"
    theirs = [v for k, v in pairs.pairs if "LoneSurrogate" not in why_not(k)]
    last = {}
    for (key, start, end, tree, why), expected in zip(fields, theirs):
        own = json.loads(body[start:end].decode("utf-8", "surrogatepass"))
        last[key] = own
        if tree is not None:
            counts["values"] += 1
            if repr(json.loads(bytes.fromhex(tree))) != repr(own):
                return "value of " + repr(key)
        else:
            counts["unrepresentable"] += 1
            if why not in why_not(expected):
                return "no value of " + repr(key) + ": " + why
    for key, own in last.items():
        if repr(own) != repr(value[key]):
            return "last value of " + repr(key)
    return None


for line in sys.stdin:
    case = json.loads(line)
    counts["cases"] += 1
    try:
        difference = check(case)
    except RecursionError:
        counts["limits"] += 1
        continue
    if difference and len(wrong) < 10:
        wrong.append([difference, repr(bytes.fromhex(case["body"]))[:300]])
print(json.dumps({"python": sys.version.split()[0], "counts": counts, "wrong": wrong}))
