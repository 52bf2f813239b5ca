"""Compiles a program for an H200 on a machine that has no GPU, and says what became of it.

JAX's CUDA plugin compiles for a described GPU; the description was saved from a real one. The plugin and NVIDIA's
assembler lie beside the other packages (requirements/h200-compiler.lock), so that nothing else sees them: they join the
process when the first program is compiled, and the CPU remains its only device. The calls of jax._src are private; the
locks pin the version that they were tried with.
"""

import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import itertools
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib import xla_client as xc  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax.experimental import topologies

from sparda_jax.pallas_kernels.backend import H200

_COMPILER = Path(sys.prefix) / "cuda-compiler"
_DESCRIPTION = Path(__file__).with_name("h200_target_config.txtpb")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4, "s64": 8}

needs_compiler = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"),
    reason="NVIDIA's compiler packages are installed on Linux x86-64 only",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """What NVIDIA's assembler says about one kernel."""

    name: str
    registers: int
    """Per thread."""
    spilled: int
    """Bytes of registers per thread that did not fit and went to memory, stores and loads together."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """A program compiled for an H200."""

    hlo: str
    """The optimised and scheduled HLO."""
    thunks: str
    """What the runtime executes, a line for each launch, copy or command buffer."""
    memory_stats: Any
    """XLA's byte counts: ``argument_size_in_bytes``, ``alias_size_in_bytes``, ``temp_size_in_bytes``, ``host_..``."""
    ptx: tuple[str, ...]
    """The kernels' code, XLA's own and those of Pallas."""

    @functools.cached_property
    def kernels(self) -> tuple[Kernel, ...]:
        """Registers and spills of every kernel of the program."""
        return tuple(kernel for code in self.ptx for kernel in _assemble(code))

    @property
    def launches(self) -> list[str]:
        """Kinds of what the host launches, in order: ``["kCommandBuffer"]`` if the whole program is one CUDA graph."""
        return re.findall(r"^\d+: (\w+)", self.thunks, re.MULTILINE)

    def copies(self, min_bytes: int) -> list[str]:
        """The HLO instructions that copy an array of at least so many bytes, within a memory or to another one."""
        copy = r"^\s*(?:ROOT )?(%\S+ = \(?(\w+)\[([\d,]*)\].* copy(?:-start)?\(.*)$"
        return [
            line
            for line, dtype, shape in re.findall(copy, self.hlo, re.MULTILINE)
            if _BYTES.get(dtype, 8) * np.prod([int(n) for n in shape.split(",") if n], dtype=np.int64) >= min_bytes
        ]


def compile_for_h200(
    fn: Callable, *args: Any, flags: Mapping[str, bool | int | str] | None = None, **jit_kwargs: Any
) -> Compiled:
    """``jax.jit(fn, **jit_kwargs)`` on arguments like ``args``, compiled for an H200.

    Args:
        args: arrays or `jax.ShapeDtypeStruct`. What lies in host memory must be a real array of the memory kind
            ``pinned_host`` (see `pinned_host`), since the structs lose it.
        flags: XLA's options, as for ``jax.jit(compiler_options=)``.
    """
    device = _device()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        # Mosaic compiles its kernels itself and is asked for their code through the environment.
        patch.setenv("MOSAIC_GPU_DUMP_TO", folder)
        with jax.sharding.use_abstract_mesh(H200):
            lowered = jax.jit(fn, **jit_kwargs).trace(*args).lower(lowering_platforms=("cuda",))
        module = lowered.compiler_ir("stablehlo")
        assert module is not None
        _rename_mosaic_kernels(module)
        options = xc.CompileOptions()
        options.num_replicas = options.num_partitions = 1
        options.device_assignment = xc.DeviceAssignment.create(np.array([[0]]))
        overrides = {"xla_dump_to": folder, "xla_dump_emitter_re": "ptx", **(flags or {})}
        options.env_option_overrides = list(overrides.items())
        executable = device.client.compile(
            module,
            executable_devices=_jax.DeviceList((device,)),
            compile_options=options,
        )
        dumped = Path(folder)
        sequences = sorted(dumped.glob("*.thunk_sequence*.txt"), key=lambda file: len(file.name))
        return Compiled(
            hlo=executable.hlo_modules()[0].to_string(),
            thunks=sequences[-1].read_text(),
            memory_stats=executable.get_compiled_memory_stats(),
            ptx=tuple(file.read_text() for file in sorted(dumped.glob("*.ptx"))),
        )


def pinned_host(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """An array of zeros in page-locked host memory, as an argument of `compile_for_h200`."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0], memory_kind="pinned_host")
    return jax.device_put(np.zeros(shape, dtype), sharding)


@functools.cache
def _device() -> Any:
    """The described GPU. In an environment with JAX's CUDA packages the plugin is there already."""

    def described() -> Any:
        description = _DESCRIPTION.read_text()
        topology = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=description)
        return topology.devices[0]

    try:
        return described()
    except NotImplementedError:
        if not _COMPILER.is_dir():
            raise FileNotFoundError(f"{_COMPILER} is missing: `bash scripts/setup.sh dev` installs it.") from None
        sys.path.append(str(_COMPILER))
        # Otherwise set on import of the Mosaic lowering, if the plugin is there by then.
        os.environ["MOSAIC_GPU_RUNTIME_LIB_PATH"] = str(_COMPILER / "jax_cuda13_plugin" / "libmosaic_gpu_runtime.so")
        importlib.import_module("jax_plugins.xla_cuda13").initialize()
        return described()


_compilation = itertools.count()


def _rename_mosaic_kernels(module: ir.Module) -> None:
    """Mosaic compiles what it takes for a known kernel only once in a process, and would have no code to show again."""
    prefix = str(next(_compilation)).encode()

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == "stablehlo.custom_call" and "mosaic_gpu" in str(op.attributes["call_target_name"]):
            config = ir.DictAttr(op.attributes["mhlo.backend_config"])
            entries = {entry.name: entry.attr for entry in config}
            name = prefix + ir.StringAttr(entries["kernel_hash"]).value_bytes
            entries["kernel_hash"] = ir.StringAttr.get(hashlib.sha256(name).digest())
            op.attributes["mhlo.backend_config"] = ir.DictAttr.get(entries)
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(visit)


@functools.cache
def _ptxas() -> str:
    spec = importlib.util.find_spec("nvidia.cu13")
    assert spec is not None
    assert spec.submodule_search_locations
    return next(
        str(found) for place in spec.submodule_search_locations if (found := Path(place) / "bin/ptxas").is_file()
    )


def _assemble(ptx: str) -> Iterator[Kernel]:
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert target is not None
    done = subprocess.run(
        [_ptxas(), "--verbose", f"--gpu-name={target.group(1)}", "--output-file", os.devnull, "-"],
        input=ptx,
        capture_output=True,
        check=True,
        text=True,
    )
    said = re.split(r"Compiling entry function '(\w+)'", done.stderr)
    for name, text in zip(said[1::2], said[2::2], strict=True):
        used = re.search(r"Used (\d+) registers", text)
        assert used is not None
        spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", text)
        yield Kernel(name=name, registers=int(used.group(1)), spilled=sum(map(int, spills)))
