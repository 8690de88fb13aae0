#!/usr/bin/env python3
"""cuda_standins.py TORCH_LIB_DIR: lets PyPI's CUDA build of torch load without CUDA.

That build links some fourteen libraries of 2.7 GB in all, none of which is called when torch computes on a CPU. This
writes one small stand-in for each of them: a library with the right name that defines what libtorch asks of it, every
function returning 0. For tests only.

A reference may name a version ("cublasCreate_v2@libcublas.so.13"); glibc then insists that the file defines the
version too. References without one are looked up in whatever is loaded, so any stand-in may define them.
"""

import collections
import pathlib
import re
import subprocess
import sys
import tempfile

GPU_LIBRARY = re.compile(r"lib(cu(?!da\.so)|nv|nccl)")
GPU_SYMBOL = re.compile(r"_*cu|nccl|nv|cupti")


def readelf(option, path):
    out = subprocess.run(["readelf", "-W", option, path], capture_output=True, text=True, check=True)
    return out.stdout.splitlines()


def needed(path):
    for line in readelf("--dynamic", path):
        if match := re.search(r"\(NEEDED\).*\[(.+)\]", line):
            yield match.group(1)


def symbols(path):
    """(name, version or "", is it defined here) of every dynamic symbol."""
    for line in readelf("--dyn-syms", path):
        columns = line.split()
        if len(columns) >= 8 and columns[0].rstrip(":").isdigit():
            name, _, version = columns[7].partition("@")
            yield name, version.lstrip("@"), columns[6] != "UND"


def version_files(path):
    """(version, the library that is expected to define it) of every versioned reference."""
    library = None
    for line in readelf("--version-info", path):
        if match := re.search(r"File: (\S+)", line):
            library = match.group(1)
        elif library and (match := re.search(r"Name: (\S+)\s+Flags", line)):
            yield match.group(1), library


def write(directory, soname, by_version):
    names = sorted(set().union(*by_version.values()))
    lines = [".text"]
    for name in names:
        lines += [f".globl {name}", f".type {name},@function", f"{name}:"]
    lines += ["xor %eax,%eax", "ret", '.section .note.GNU-stack,"",@progbits', ""]
    versions = [
        f"{version} {{ {'global: ' + '; '.join(sorted(globals_)) + ';' if globals_ else ''} }};\n"
        for version, globals_ in sorted(by_version.items())
        if version
    ]
    with tempfile.TemporaryDirectory() as tmp:
        tmp = pathlib.Path(tmp)
        (tmp / "stub.s").write_text("\n".join(lines))
        command = ["gcc", "-shared", "-nostdlib", f"-Wl,-soname,{soname}", tmp / "stub.s", "-o", directory / soname]
        if versions:
            (tmp / "stub.map").write_text("".join(versions))
            command.append(f"-Wl,--version-script={tmp / 'stub.map'}")
        subprocess.run(command, check=True)
    return len(names)


def main():
    directory = pathlib.Path(sys.argv[1])
    files = [f for f in sorted(directory.glob("*.so*")) if f.is_file()]
    present = {f.name for f in files}
    missing = sorted({n for f in files for n in needed(f) if GPU_LIBRARY.match(n)} - present)
    if not missing:
        sys.exit(f"{directory}: no library is missing; is this the CUDA build of torch?")
    owner = {v: lib for f in files for v, lib in version_files(f) if lib in missing}
    found = {(name, version) for f in files for name, version, here in symbols(f) if not here}
    defined = {name for f in files for name, _, here in symbols(f) if here}

    stubs = {name: collections.defaultdict(set) for name in missing}
    for version, library in owner.items():
        stubs[library][version]  # must exist even if no symbol asks for it
    unversioned = next((n for n in missing if not stubs[n]), missing[0])
    for name, version in found:
        # readelf ends a reference's version with its index in brackets.
        version = re.sub(r"\s*\(\d+\)$", "", version)
        if name in defined:
            continue
        if version in owner:
            stubs[owner[version]][version].add(name)
        elif not version and GPU_SYMBOL.match(name):
            stubs[unversioned][""].add(name)
    for soname, by_version in stubs.items():
        write(directory, soname, by_version)
    print(f"stand-ins for {len(missing)} libraries in {directory}", file=sys.stderr)


if __name__ == "__main__":
    main()
