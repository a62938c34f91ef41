#!/usr/bin/env python3
"""What the emulated driver refuses, as the real one does, and what it does late.

    benches/gpu/emulate/run.sh benches/gpu/emulate/rules.py

Needs nothing but Python and g++. Every rule is broken once; the driver says so on standard error."""

import ctypes as c
import os
import subprocess
import sys
import threading

cuda = c.CDLL(os.environ["QURL_CUDA"])
NOT_READY, THREAD_LOCAL = 600, 1
KERNEL = b"""
extern "C" __global__ void __launch_bounds__(64) fill(unsigned* to, unsigned value) {
    extern __shared__ unsigned smem[];
    smem[threadIdx.x] = value;
    to[blockIdx.x * blockDim.x + threadIdx.x] = smem[threadIdx.x];
}
extern "C" __global__ void __launch_bounds__(64) four(unsigned* to, unsigned at) {
    *(uint4*)(to + at) = uint4{1, 2, 3, 4};
}
extern "C" __global__ void __launch_bounds__(64) peek(unsigned* to, unsigned at) {
    unsigned early = to[0];
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (threadIdx.x == 0) to[at] = early, to[at + 1] = to[0];
}
"""


class Config(c.Structure):
    _fields_ = [("grid", c.c_uint * 3), ("block", c.c_uint * 3), ("shared", c.c_uint), ("stream", c.c_void_p),
                ("attributes", c.c_void_p), ("count", c.c_uint)]


def call(name, *args, expect=0):
    status = getattr(cuda, name)(*args)
    assert status == expect, f"{name}: {status}, expected {expect}"


def made(name, *args, kind=c.c_void_p):
    to = kind()
    call(name, c.byref(to), *args)
    return to


def elsewhere(run):
    """Runs in a thread of its own, in which no context is current."""
    wrong = []

    def body():
        try:
            run()
        except AssertionError as error:
            wrong.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert not wrong, wrong


def function(name=b"fill"):
    program, size = c.c_void_p(), c.c_size_t()
    call("nvrtcCreateProgram", c.byref(program), KERNEL, b"fill.cu", 0, None, None)
    call("nvrtcCompileProgram", program, 0, None)
    call("nvrtcGetCUBINSize", program, c.byref(size))
    image = c.create_string_buffer(size.value)
    call("nvrtcGetCUBIN", program, image)
    call("nvrtcDestroyProgram", c.byref(program))
    module = made("cuModuleLoadData", image)
    return made("cuModuleGetFunction", module, name), module


def alloc(size):
    return made("cuMemAlloc_v2", c.c_size_t(size), kind=c.c_uint64)


def launch(
    kernel, stream, to, value=7, expect=0, grid=(1, 1, 1), block=(64, 1, 1), shared=256, overlaps=False
):
    overlap = (c.c_uint * 18)(6, 0, 1)  # programmatic stream serialization
    place = c.addressof(overlap) if overlaps else None
    config = Config((c.c_uint * 3)(*grid), (c.c_uint * 3)(*block), shared, stream, place, int(overlaps))
    arguments = [c.c_uint64(to), c.c_uint(value)]
    places = (c.c_void_p * 2)(*[c.addressof(argument) for argument in arguments])
    call("cuLaunchKernelEx", c.byref(config), kernel, places, None, expect=expect)


def contexts():
    at = c.c_uint64()
    call("cuMemAlloc_v2", c.byref(at), c.c_size_t(256), expect=709)
    context = made("cuDevicePrimaryCtxRetain", 0)
    call("cuMemAlloc_v2", c.byref(at), c.c_size_t(256), expect=201)
    call("cuCtxSetCurrent", context)
    call("cuMemAlloc_v2", c.byref(at), c.c_size_t(256))
    elsewhere(lambda: call("cuMemFree_v2", at, expect=201))
    call("cuMemFree_v2", at)
    call("cuMemFree_v2", at, expect=1)


def captures(kernel, module):
    stream, other, event = made("cuStreamCreate", 1), made("cuStreamCreate", 1), made("cuEventCreate", 2)
    at, graph = alloc(1024), c.c_void_p()
    pageable, locked = c.create_string_buffer(64), made("cuMemHostAlloc", c.c_size_t(64), 0)

    def capture(status, run):
        """What is done while a stream is captured; a refused call makes the capture invalid."""
        call("cuStreamBeginCapture_v2", stream, THREAD_LOCAL)
        run()
        if status == 0:
            call("cuStreamEndCapture", stream, c.byref(graph))
            return graph.value
        launch(kernel, stream, at.value, expect=901)
        call("cuStreamEndCapture", stream, c.byref(graph), expect=901)
        assert not graph.value
        return None

    unsafe = [
        ("cuMemAlloc_v2", c.byref(c.c_uint64()), c.c_size_t(256)), ("cuMemFree_v2", at),
        ("cuMemHostAlloc", c.byref(c.c_void_p()), c.c_size_t(256), 0), ("cuMemFreeHost", locked),
        ("cuStreamSynchronize", stream), ("cuEventQuery", event), ("cuEventSynchronize", event),
        ("cuMemcpyHtoDAsync_v2", at, pageable, c.c_size_t(64), stream), ("cuModuleUnload", module),
    ]
    for name, *args in unsafe:
        capture(900, lambda: call(name, *args, expect=900))
    call("cuEventRecord", event, other)
    capture(905, lambda: call("cuStreamWaitEvent", stream, event, 0, expect=905))
    # The other threads' calls are their own matter, but the end of a capture is the thread's that began it.
    call("cuStreamBeginCapture_v2", stream, THREAD_LOCAL)
    context = c.c_void_p(1)

    def others():
        call("cuCtxSetCurrent", context)
        call("cuMemFree_v2", alloc(256))
        call("cuStreamEndCapture", stream, c.byref(graph), expect=908)

    elsewhere(others)
    call("cuEventRecord", event, stream)
    call("cuEventDestroy_v2", event)
    call("cuStreamEndCapture", stream, c.byref(graph))
    call("cuStreamEndCapture", stream, c.byref(graph), expect=401)

    def work():
        launch(kernel, stream, at.value)
        call("cuMemcpyHtoDAsync_v2", c.c_uint64(at.value + 256), locked, c.c_size_t(64), stream)

    exec_ = made("cuGraphInstantiateWithFlags", c.c_void_p(capture(0, work)), c.c_uint64(0))
    call("cuMemFree_v2", at)
    return exec_, stream


def launches(kernel):
    stream, at = made("cuStreamCreate", 1), alloc(1024)
    for wrong in [{"grid": (0, 1, 1)}, {"grid": (1, 65536, 1)}, {"block": (0, 1, 1)}, {"shared": 60 << 10}]:
        launch(kernel, stream, at.value, expect=1, **wrong)
    launch(kernel, stream, at.value, block=(96, 1, 1), expect=701)
    launch(kernel, None, at.value, expect=400)
    call("cuFuncSetAttribute", kernel, 8, 228 << 10, expect=1)
    call("cuFuncSetAttribute", kernel, 8, 60 << 10)
    launch(kernel, stream, at.value, shared=60 << 10)
    # Copies outside of allocations.
    call("cuMemsetD8Async", at, 0, c.c_size_t(1025), stream, expect=1)
    call("cuMemsetD8Async", at, 0, c.c_size_t(1024), stream)
    call("cuStreamDestroy_v2", stream)
    call("cuStreamSynchronize", stream, expect=400)


def tensor_maps():
    at, hopper = alloc(1 << 16), int(os.environ.get("EMULATE_ARCH", 80)) >= 90

    def encode(good, offset=0, width=256, stride=256, box=(128, 64), swizzle=3, shift=0):
        place = c.create_string_buffer(256)
        to = (c.addressof(place) + 63) // 64 * 64 + shift
        call("cuTensorMapEncodeTiled", c.c_void_p(to), 0, 2, c.c_uint64(at.value + offset),
             (c.c_uint64 * 2)(width, 64), (c.c_uint64 * 1)(stride), (c.c_uint * 2)(*box),
             (c.c_uint * 2)(1, 1), 0, swizzle, 3, 0, expect=0 if good and hopper else 1)

    encode(True)
    encode(True, box=(16, 256), swizzle=0)
    for wrong in [{"offset": 8}, {"stride": 264}, {"stride": 240}, {"width": 0}, {"shift": 16},
                  {"box": (128, 257)}, {"box": (256, 8)}, {"box": (24, 8), "swizzle": 0}, {"box": (0, 8)}]:
        encode(False, **wrong)


def late(kernel):
    """With EMULATE_LATE=4 nothing is done before somebody waits."""
    stream, other, event = made("cuStreamCreate", 1), made("cuStreamCreate", 1), made("cuEventCreate", 2)
    at, back = alloc(256), made("cuMemHostAlloc", c.c_size_t(256), 0)
    words = c.cast(back, c.POINTER(c.c_uint))
    is_late = int(os.environ.get("EMULATE_LATE", 0)) & 4

    def bring(wait):
        words[0] = 0
        launch(kernel, stream, at.value, value=5)
        call("cuEventRecord", event, stream)
        call("cuStreamWaitEvent", other, event, 0)
        call("cuMemcpyDtoHAsync_v2", back, at, c.c_size_t(256), other)
        if is_late:
            assert words[0] == 0, "done before somebody waited"
            call("cuEventQuery", event, expect=NOT_READY)
        call("cuEventQuery", event)
        wait()
        assert words[0] == 5, words[0]

    bring(lambda: call("cuStreamSynchronize", other))
    bring(lambda: call("cuMemFree_v2", alloc(256)))
    # What goes to the device is read when the stream comes there.
    words[0] = 1
    call("cuMemcpyHtoDAsync_v2", at, back, c.c_size_t(256), stream)
    words[0] = 2
    call("cuMemcpyDtoHAsync_v2", back, at, c.c_size_t(256), stream)
    call("cuStreamSynchronize", stream)
    assert words[0] == (2 if is_late else 1), words[0]


def overlap(kernel):
    """With EMULATE_LATE=12 a kernel that may begin before the one before it has ended does."""
    peek, _ = function(b"peek")
    stream, at, back = made("cuStreamCreate", 1), alloc(1024), made("cuMemHostAlloc", c.c_size_t(1024), 0)
    words = c.cast(back, c.POINTER(c.c_uint))
    begins = int(os.environ.get("EMULATE_LATE", 0)) & 12 == 12

    def work():
        launch(kernel, stream, at.value, value=5)
        launch(peek, stream, at.value, value=100, overlaps=True)
        launch(peek, stream, at.value, value=110, overlaps=True)

    def look():
        call("cuMemcpyDtoHAsync_v2", back, at, c.c_size_t(1024), stream)
        call("cuStreamSynchronize", stream)
        assert [words[i] for i in (100, 101, 110, 111)] == [1 if begins else 5, 5, 5, 5], "another order"

    launch(kernel, stream, at.value, value=1)
    call("cuStreamSynchronize", stream)
    work()
    look()
    launch(kernel, stream, at.value, value=1)
    call("cuStreamSynchronize", stream)
    call("cuStreamBeginCapture_v2", stream, THREAD_LOCAL)
    work()
    graph = c.c_void_p()
    call("cuStreamEndCapture", stream, c.byref(graph))
    call("cuGraphLaunch", made("cuGraphInstantiateWithFlags", graph, c.c_uint64(0)), stream)
    look()


def stale():
    """A graph that is launched after memory of its was freed ends the program."""
    call("cuCtxSetCurrent", made("cuDevicePrimaryCtxRetain", 0))
    exec_, stream = captures(*function())
    call("cuGraphLaunch", exec_, stream)
    call("cuStreamSynchronize", stream)


def askew():
    """So does an access that is not aligned."""
    call("cuCtxSetCurrent", made("cuDevicePrimaryCtxRetain", 0))
    kernel, _ = function(b"four")
    stream, at = made("cuStreamCreate", 1), alloc(1024)
    for place in [4, 2]:
        launch(kernel, stream, at.value, value=place)
        call("cuStreamSynchronize", stream)
        print("done", flush=True)


def ends(what, says, after=""):
    """What is wrong ends the program, with a reason."""
    ended = subprocess.run([sys.executable, __file__, what], capture_output=True, text=True)
    assert ended.returncode < 0 and says in ended.stderr and ended.stdout == after, ended


if __name__ == "__main__":
    if sys.argv[1:]:
        {"stale": stale, "askew": askew}[sys.argv[1]]()
        sys.exit()
    contexts()
    kernel, module = function()
    launches(kernel)
    captures(kernel, module)
    tensor_maps()
    late(kernel)
    if int(os.environ.get("EMULATE_ARCH", 80)) >= 90:
        overlap(kernel)
    ends("stale", "that was freed\nemulator: address")
    ends("askew", "emulator: an access that is not aligned", after="done\n")
    print("the emulated driver keeps the rules")
