#!/usr/bin/env python3
"""Prints each crate that ships with each set of features to check it with: "PACKAGE", "PACKAGE none", "PACKAGE FEATURE"."""

import json
import subprocess

metadata = json.loads(
    subprocess.run(
        ["cargo", "metadata", "--no-deps", "--format-version", "1", "--locked"], capture_output=True, text=True, check=True
    ).stdout
)
shipped = set(metadata["workspace_default_members"])
for package in metadata["packages"]:
    if package["id"] not in shipped:
        continue
    print(package["name"])
    features = [f for f in package["features"] if f != "default"]
    if features:
        for feature in ["none", *features]:
            print(package["name"], feature)
