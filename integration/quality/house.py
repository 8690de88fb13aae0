#!/usr/bin/env python3
"""Promises of the house that no compiler checks. Prints every breach; succeeds if there is none."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
FIELD_REPORTS = ROOT / "integration/FIELD-REPORTS.md"
breaches = []


def run(*command):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def tracked():
    for name in run("git", "ls-files").splitlines():
        path = ROOT / name
        try:
            yield name, path.read_text()
        except (UnicodeDecodeError, FileNotFoundError):
            continue


def leftovers(files):
    """Nothing unfinished is left in the code, and no path of one machine."""
    code = re.compile(r"\btodo!|\bunimplemented!|#\[ignore|allow\((dead_code|unused)\b")
    machine = re.compile(r"/(?:root|home/\w+|Users/\w+)/")
    for name, text in files:
        for number, line in enumerate(text.splitlines(), 1):
            if name.endswith(".rs") and code.search(line):
                breaches.append(f"{name}:{number}: {line.strip()}")
            if machine.search(line):
                breaches.append(f"{name}:{number}: a path of one machine")


def light_defaults():
    """tower-ttft's default features need no C compiler, no ZMQ, no tokenizer."""
    tree = run("cargo", "tree", "--locked", "-p", "tower-ttft", "-e", "normal,build", "--prefix", "none")
    heavy = {"cc", "cmake", "pkg-config", "bindgen", "zeromq", "zmq", "fastokens", "tokenizers", "onig", "minijinja"}
    for line in set(tree.splitlines()):
        crate = line.split(" ")[0]
        if crate in heavy or crate.endswith("-sys"):
            breaches.append(f"tower-ttft's default features pull in {crate}")


def shipped_apart():
    """What ships does not depend on tests or benchmarks."""
    for package in ["forebay-proxy", "forebay-cli"]:
        tree = run("cargo", "tree", "--locked", "-p", package, "-e", "normal,build", "--prefix", "none")
        for other in ["forebay-integration", "forebay-bench"]:
            if re.search(rf"^{other} ", tree, re.MULTILINE):
                breaches.append(f"{package} depends on {other}")


def field_reports(files):
    """Every test that the table names exists, and every row has a test or a reason."""
    if not FIELD_REPORTS.exists():
        breaches.append("integration/FIELD-REPORTS.md is missing")
        return
    tests = set()
    for name, text in files:
        if name.endswith(".rs"):
            tests |= set(re.findall(r"\bfn (\w+)", text))
            tests |= set(re.findall(r'test!\(\s*"\w+",\s*[\w:]+,\s*"(\w+)"', text))
    rows = 0
    for line in FIELD_REPORTS.read_text().splitlines():
        cells = [c.strip() for c in line.strip().strip("|").split("|")]
        if not line.startswith("|") or not re.fullmatch(r"[A-Z]\d+", cells[0]):
            continue
        rows += 1
        if len(cells) != 3 or len(cells[2]) < 10 or (cells[0][0] not in "CDE"):
            breaches.append(f"FIELD-REPORTS.md: {cells[0]} names neither test nor reason")
        for test in re.findall(r"`([\w:/.-]+)`", cells[-1]):
            if test.rsplit("::", 1)[-1] not in tests:
                breaches.append(f"FIELD-REPORTS.md: {cells[0]} names the test {test}, which does not exist")
    if rows != 37:
        breaches.append(f"FIELD-REPORTS.md: {rows} rows instead of 37 (C1 to C9, D1 to D13, E1 to E15)")


def scripts(files):
    """Shell and Python scripts can at least be read."""
    for name, text in files:
        if text.startswith("#!/bin/bash") or (name.startswith("integration/") and name.endswith(".sh")):
            if subprocess.run(["bash", "-n", ROOT / name], capture_output=True).returncode:
                breaches.append(f"{name}: bash cannot read it")
        if text.startswith("#!/usr/bin/env python3"):
            try:
                compile(text, name, "exec")
            except SyntaxError as error:
                breaches.append(f"{name}: {error}")


def main():
    files = list(tracked())
    leftovers(files)
    light_defaults()
    shipped_apart()
    field_reports(files)
    scripts(files)
    print("\n".join(breaches) or "all promises hold")
    sys.exit(bool(breaches))


if __name__ == "__main__":
    main()
