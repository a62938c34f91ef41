"""Makes tests/goldens/float8_e4m3fn.bin: PyTorch's cast of every bf16 value to float8_e4m3fn.

Byte i is the code of the bf16 number with bits i. Made with PyTorch 2.15, whose cast saturates at 448 (older
versions make NaN of larger numbers). Run from the crate's directory: python tests/python/fp8.py
"""

import pathlib

import torch

bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
codes = bits.view(torch.bfloat16).to(torch.float8_e4m3fn).view(torch.uint8)
target = pathlib.Path("tests/goldens/float8_e4m3fn.bin")
target.write_bytes(bytes(codes.tolist()))
print(target, "torch", torch.__version__)
