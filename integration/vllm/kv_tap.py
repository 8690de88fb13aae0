#!/usr/bin/env python3
"""kv_tap.py --events PORT --replay PORT [--relay]: records an engine's KV events and, as a relay, spoils them on demand.

It speaks through libzmq and msgspec, as vLLM itself does, so that what it says does not rest on the code under test.
Standard output has one JSON object a line:

  {"ready": {"events": "tcp://…", "replay": "tcp://…"}}   addresses of the relay, null without --relay
  {"subscribed": true|false}                              someone subscribed to the relay, or left
  {"batch": {…}}        seq, ts (engine's clock), recv (ours), events, via "live" or "replay", fate (what the relay did)
  {"restart": true}     the sequence began anew
  {"asked": SEQ, "answered": true|false}                  someone asked the relay for a replay
  {"ack": ID}           the command with that id is in force

Commands are JSON objects, one a line, on standard input; the end of input ends the tap:

  {"id": 1, "next": "drop"|"truncate", "count": N}   the fate of the next N batches, instead of what was to be theirs
  {"id": 2, "delay": SECONDS}                        every batch from now on leaves this much later, in order
  {"id": 3, "replay": "pass"|"refuse"|"stall", "after": N}   stall: the answer stops after N messages
"""

import argparse
import collections
import json
import os
import sys
import time

import msgspec
import zmq

END = b"\xff" * 8


def say(**fields):
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def plain(value):
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value


def events(payload):
    ts, batch, *_ = msgspec.msgpack.decode(payload)
    out = []
    for e in batch:
        match e["type"]:
            case "BlockStored":
                out.append(
                    {
                        "stored": plain(e["block_hashes"]),
                        "parent": plain(e["parent_block_hash"]),
                        "tokens": e["token_ids"],
                        "extra": plain(e.get("extra_keys")),
                    }
                )
            case "BlockRemoved":
                out.append({"removed": plain(e["block_hashes"])})
            case "AllBlocksCleared":
                out.append({"cleared": True})
            case other:
                raise SystemExit(f"unknown event {other}")
    return ts, out


class Tap:
    def __init__(self, args):
        self.context = zmq.Context()
        self.replay_address = f"tcp://127.0.0.1:{args.replay}"
        self.poller = zmq.Poller()
        self.live = self.socket(zmq.SUB, f"tcp://127.0.0.1:{args.events}")
        self.live.setsockopt(zmq.SUBSCRIBE, b"")
        self.expected = 0
        self.seen = {}  # the last payloads by sequence number
        self.fates = collections.deque()
        self.delay = 0.0
        self.late = collections.deque()
        self.replay_mode, self.replay_after = "pass", 0
        self.askers = {}
        self.pub = self.router = None
        addresses = {"events": None, "replay": None}
        if args.relay:
            # XPUB is a PUB that tells of subscriptions.
            self.pub, addresses["events"] = self.bound(zmq.XPUB)
            self.router, addresses["replay"] = self.bound(zmq.ROUTER)
        say(ready=addresses)

    def socket(self, kind, address):
        s = self.context.socket(kind)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            s.setsockopt(option, 0)
        s.setsockopt(zmq.RECONNECT_IVL, 50)
        s.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        s.connect(address)
        self.poller.register(s, zmq.POLLIN)
        return s

    def bound(self, kind):
        s = self.context.socket(kind)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            s.setsockopt(option, 0)
        port = s.bind_to_random_port("tcp://127.0.0.1")
        self.poller.register(s, zmq.POLLIN)
        return s, f"tcp://127.0.0.1:{port}"

    def record(self, seq, payload, via, fate=None):
        received = time.time()
        ts, decoded = events(payload)
        say(batch={"seq": seq, "ts": ts, "recv": received, "events": decoded, "via": via, "fate": fate})
        self.expected = seq + 1
        self.seen[seq] = payload
        if len(self.seen) > 256:
            del self.seen[min(self.seen)]

    def fill(self, until=None):
        """Records what was missed, from the engine's own replay."""
        s = self.socket(zmq.DEALER, self.replay_address)
        s.send_multipart([b"", self.expected.to_bytes(8, "big")])
        while s.poll(3000):
            *_, seq, payload = s.recv_multipart()
            if seq == END:
                break
            seq = int.from_bytes(seq, "big")
            if seq == self.expected and (until is None or seq < until):
                self.record(seq, payload, "replay")
        self.poller.unregister(s)
        s.close()

    def on_live(self):
        frames = self.live.recv_multipart()
        seq = int.from_bytes(frames[-2], "big")
        known = seq < self.expected and self.seen.get(seq) == frames[-1]
        if seq < self.expected and not known:
            say(restart=True)
            self.expected = 0
            self.seen.clear()
        if seq > self.expected:
            self.fill(seq)
        fate = None
        if self.pub is not None:
            fate = self.fates.popleft() if self.fates else ("delay" if self.delay else "pass")
            if fate == "truncate":
                self.pub.send_multipart([*frames[:-1], frames[-1][: len(frames[-1]) // 2]])
            elif fate != "drop":
                self.late.append((time.monotonic() + self.delay, frames))
                self.flush()
        if not known:  # else it came with the first fill too
            self.record(seq, frames[-1], "live", fate)

    def flush(self):
        while self.late and self.late[0][0] <= time.monotonic():
            self.pub.send_multipart(self.late.popleft()[1])

    def on_ask(self):
        identity, *frames = self.router.recv_multipart()
        answered = self.replay_mode != "refuse"
        say(asked=int.from_bytes(frames[-1], "big"), answered=answered)
        if answered:
            if old := self.askers.pop(identity, None):
                self.poller.unregister(old[0])
                old[0].close()
            s = self.socket(zmq.DEALER, self.replay_address)
            s.send_multipart(frames)
            left = self.replay_after if self.replay_mode == "stall" else None
            self.askers[identity] = [s, left]

    def on_answer(self, identity):
        asker = self.askers[identity]
        frames = asker[0].recv_multipart()
        if asker[1] is not None:
            if asker[1] == 0:
                return
            asker[1] -= 1
        self.router.send_multipart([identity, *frames])

    def on_command(self, line):
        command = json.loads(line)
        if "next" in command:
            self.fates = collections.deque([command["next"]] * command["count"])
        if "delay" in command:
            self.delay = command["delay"]
        if "replay" in command:
            self.replay_mode, self.replay_after = command["replay"], command.get("after", 0)
        say(ack=command["id"])

    def run(self):
        self.fill()
        stdin = sys.stdin.fileno()
        os.set_blocking(stdin, False)
        self.poller.register(stdin, zmq.POLLIN)
        pending = b""
        while True:
            wait = None
            if self.late:
                wait = max(0, (self.late[0][0] - time.monotonic()) * 1000)
            ready = dict(self.poller.poll(wait))
            if self.late:
                self.flush()
            if self.live in ready:
                self.on_live()
            if self.pub is not None and self.pub in ready:
                say(subscribed=self.pub.recv().startswith(b"\x01"))
            if self.router is not None and self.router in ready:
                self.on_ask()
            for identity in [i for i, (s, _) in self.askers.items() if s in ready]:
                self.on_answer(identity)
            if stdin in ready:
                chunk = os.read(stdin, 65536)
                if not chunk:
                    return
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    self.on_command(line)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--events", type=int, required=True)
    parser.add_argument("--replay", type=int, required=True)
    parser.add_argument("--relay", action="store_true")
    Tap(parser.parse_args()).run()
