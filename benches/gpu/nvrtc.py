"""Compiles CUDA sources with NVRTC through ctypes: no toolkit, no framework.

As a program: `python3 nvrtc.py FILE.cu [-a sm_90a] [-D NAME=VALUE]...` prints registers, spills and shared
memory per kernel.
"""

import argparse
import ctypes
import glob
import os
import re
import site
import sys

KERNELS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "crates", "qurl-kernels")
CU = os.path.join(KERNELS, "cu")


def library():
    roots = site.getsitepackages() + ["/usr/local/cuda", "/usr/lib/x86_64-linux-gnu"]
    for root in roots:
        for pattern in ("nvidia/**/libnvrtc.so.1?", "**/libnvrtc.so.1?", "**/libnvrtc.so"):
            for path in glob.glob(os.path.join(root, pattern), recursive=True):
                return ctypes.CDLL(path)
    return ctypes.CDLL("libnvrtc.so")


class CompileError(Exception):
    pass


def shared_constants():
    """The numbers that kernels and host agree on, as NAME=VALUE, from the program's own text."""
    text = lambda *path: open(os.path.join(KERNELS, "src", *path)).read()
    elsewhere = text("checksum.rs") + text("types", "attention.rs") + text("types", "moments.rs")
    found = []
    for name, value in re.findall(r"^    ([A-Z][A-Z0-9_]*) = (.+);$", text("cuda", "constants.rs"), re.M):
        if "::" in value:
            value = re.search(rf"const {value.split('::')[-1]}: usize = (.+);", elsewhere)[1]
        shift = re.fullmatch(r"(\d+) << (\d+)", value)
        found.append(f"{name}={int(shift[1]) << int(shift[2]) if shift else int(value.replace('_', ''))}")
    seed = re.search(r"const SEED: u64 = (.+);", elsewhere)[1].replace("_", "")
    return [*found, f"CHECKSUM_SEED={seed}ull"]


def compile_source(path, arch="sm_90a", defines=(), folder=CU):
    """Returns (cubin bytes, log of ptxas)."""
    lib = library()
    source = open(path, "rb").read()
    program = ctypes.c_void_p()
    found = [name for name in os.listdir(folder) if name.endswith(".cuh")]
    names = (ctypes.c_char_p * len(found))(*[name.encode() for name in found])
    headers = (ctypes.c_char_p * len(found))(
        *[open(os.path.join(folder, name), "rb").read() for name in found]
    )
    check = lambda code: code == 0 or sys.exit(f"nvrtc error {code}")
    check(
        lib.nvrtcCreateProgram(
            ctypes.byref(program), source, os.path.basename(path).encode(), len(found), headers, names
        )
    )
    options = [
        f"--gpu-architecture={arch}",
        "--ptxas-options=-v",
        "--std=c++17",
        "--fmad=false",
        "-default-device",
    ]
    options += [f"-D{d}" for d in [*shared_constants(), *defines]]
    array = (ctypes.c_char_p * len(options))(*[o.encode() for o in options])
    code = lib.nvrtcCompileProgram(program, len(options), array)
    size = ctypes.c_size_t()
    lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetProgramLog(program, log)
    text = log.value.decode(errors="replace")
    if code != 0:
        raise CompileError(text)
    check(lib.nvrtcGetCUBINSize(program, ctypes.byref(size)))
    cubin = ctypes.create_string_buffer(size.value)
    check(lib.nvrtcGetCUBIN(program, cubin))
    return cubin.raw, text


def resources(log):
    """(kernel, registers, spill bytes, stack bytes) from the log of ptxas."""
    found = []
    for part in log.split("Compiling entry function '")[1:]:
        name = part.split("'")[0]
        registers = re.search(r"Used (\d+) registers", part)
        spills = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores", part)
        found.append(
            (
                name,
                int(registers[1]) if registers else -1,
                int(spills[2]) if spills else -1,
                int(spills[1]) if spills else -1,
            )
        )
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    parser.add_argument("-a", "--arch", default="sm_90a")
    parser.add_argument("-D", action="append", default=[])
    parser.add_argument("-o", "--out")
    options = parser.parse_args()
    try:
        cubin, log = compile_source(options.file, options.arch, options.D)
    except CompileError as error:
        sys.exit(str(error))
    for name, registers, spills, stack in resources(log):
        print(f"{name:44} registers {registers:3} spills {spills:4} stack {stack}")
    for line in log.splitlines():
        # ptxas says as a mere remark that it serializes wgmma.
        if "warning" in line.lower() or "Loss" in line:
            print(line)
    if options.out:
        open(options.out, "wb").write(cubin)
