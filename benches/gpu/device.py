"""A thin layer over the CUDA driver for the kernel harness: modules, launches with attributes, tensor maps,
timing.

Buffers are torch tensors; kernels run on torch's current stream, so that torch captures them into graphs.
"""

import concurrent.futures
import ctypes
import os
import statistics

import torch

import nvrtc

cuda = ctypes.CDLL("libcuda.so.1")


def check(code, what):
    if code != 0:
        name = ctypes.c_char_p()
        cuda.cuGetErrorName(code, ctypes.byref(name))
        raise RuntimeError(f"{what}: {name.value.decode() if name.value else code}")


class Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint64 * 8)]


class Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    ]


class TensorMap(ctypes.Structure):
    _fields_ = [("words", ctypes.c_uint64 * 16)]


# Number of a type of elements, and their bytes.
ELEMENTS = {"u8": (0, 1), "f32": (7, 4), "bf16": (9, 2)}


def tensor_map(pointer, rows, row_bytes, box_rows, box_bytes=128, kind="u8"):
    """A map of a row-major matrix in boxes of box_rows x box_bytes; those of 128 bytes are swizzled over
    them."""
    number, size = ELEMENTS[kind]
    raw = ctypes.create_string_buffer(128 + 64)
    address = (ctypes.addressof(raw) + 63) & ~63
    result = cuda.cuTensorMapEncodeTiled(
        ctypes.c_void_p(address),
        ctypes.c_int(number),
        ctypes.c_uint32(2),
        ctypes.c_void_p(pointer),
        (ctypes.c_uint64 * 2)(row_bytes // size, rows),
        (ctypes.c_uint64 * 1)(row_bytes),
        (ctypes.c_uint32 * 2)(box_bytes // size, box_rows),
        (ctypes.c_uint32 * 2)(1, 1),
        ctypes.c_int(0),
        ctypes.c_int(3 if box_bytes == 128 else 0),
        ctypes.c_int(3),
        ctypes.c_int(0),
    )
    check(result, "cuTensorMapEncodeTiled")
    return TensorMap.from_buffer_copy(ctypes.string_at(address, 128))


class Kernel:
    def __init__(self, module, name):
        self.handle = ctypes.c_void_p()
        check(cuda.cuModuleGetFunction(ctypes.byref(self.handle), module, name.encode()), name)
        self.name = name
        self.smem = 0

    def launch(self, grid, block, smem, args, pdl=False, cluster=None):
        """args: ctypes values; torch tensors are passed as pointers. cluster: its size in x, y, z."""
        values = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in args]
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(v) for v in values])
        if smem > 32 * 1024 and smem > self.smem:
            check(cuda.cuFuncSetAttribute(self.handle, 8, smem), f"shared memory of {self.name}")
            self.smem = smem
        attributes = (Attribute * 2)()
        count = 0
        if pdl:
            attributes[count].id = 6
            attributes[count].value[0] = 1
            count += 1
        if cluster:
            attributes[count].id = 4
            attributes[count].value[0] = cluster[0] | cluster[1] << 32
            attributes[count].value[1] = cluster[2]
            count += 1
        grid, block = tuple(grid) + (1,) * (3 - len(grid)), tuple(block) + (1,) * (3 - len(block))
        config = Config(grid, block, smem, torch.cuda.current_stream().cuda_stream, attributes, count)
        check(cuda.cuLaunchKernelEx(ctypes.byref(config), self.handle, pointers, None), self.name)


def load(cubin):
    torch.zeros(1, device="cuda")
    module = ctypes.c_void_p()
    check(cuda.cuModuleLoadData(ctypes.byref(module), cubin), "cuModuleLoadData")
    return module


def compile_one(job):
    path, arch, defines = job
    try:
        return nvrtc.compile_source(os.path.join(nvrtc.CU, path), arch, defines)
    except nvrtc.CompileError as error:
        return None, str(error)


def compile_all(jobs):
    """Compiles (path, arch, defines) in parallel processes."""
    with concurrent.futures.ProcessPoolExecutor(max_workers=min(14, len(jobs))) as pool:
        return list(pool.map(compile_one, jobs))


def graph_time(launches, repeats=7):
    """Median microseconds per launch of a list of launch functions, replayed as a graph."""
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for launch in launches:
            launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for launch in launches:
            launch()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(launches))
    return statistics.median(times)
